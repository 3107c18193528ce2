"""A corpus whose first thousand documents are all bad is refused before any of it is tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.data import tokenize_worker
from bloomery.data.corpus_parts import CorpusPart
from bloomery.data.documents import BadDocuments, Document
from bloomery.data.readers import Reading, SourceFile
from bloomery.data.sources import find_files
from bloomery.data.tokenize_corpus import tokenize
from bloomery.data.tokenize_worker import Job
from bloomery.data.tokenizer import train_tokenizer
from bloomery.errors import DataError

LINES = 1200


@pytest.fixture
def job(tmp_path: Path) -> Job:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["a few words"], vocabulary=260, end_of_document="<|endoftext|>").save(path)
    return Job(directory="", tokenizer=str(path), end_of_document="<|endoftext|>", text_field="body")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Lines in two files, so that no piece of a few hundred bytes holds a thousand documents."""
    for name in "ab":
        lines = [json.dumps({"text": f"line {number}"}) for number in range(LINES // 2)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def work(text: Path, job: Job, part: CorpusPart | None = None) -> None:
    files = find_files([str(text / "*.jsonl")]).files
    tokenize(files, text / "out", job, workers=1, piece_bytes=400, part=part)


@pytest.mark.parametrize("part", [None, CorpusPart(number=1, count=3), CorpusPart(number=3, count=3)])
def test_each_part_refuses_a_wrong_field_and_tokenises_nothing(
    text: Path, job: Job, part: CorpusPart | None
) -> None:
    with pytest.raises(
        DataError, match=r"The first 1,000 documents are all bad; .*b\.jsonl:400, for"
    ) as told:
        work(text, job, part)
    assert "no field 'body'" in told.value.message and "--text-field" in told.value.remedy
    (parts,) = text.glob("out*.parts")
    assert not list(parts.glob("*.bin")) and not list(text.glob("*.bin"))


def test_up_to_the_first_good_document_is_read_and_no_further(
    text: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, original = [], tokenize_worker.read_file

    def watched(file: SourceFile, *, reading: Reading, bad: BadDocuments) -> Iterator[Document]:
        for document in original(file, reading=reading, bad=bad):
            read.append(document.text)
            yield document

    monkeypatch.setattr(tokenize_worker, "read_file", watched)
    pieces = tokenize_worker.cut_corpus(find_files([str(text / "*.jsonl")]).files, piece_bytes=400)
    tokenize_worker.refuse_all_bad(pieces, replace(job, text_field="text"))
    assert read == ["line 0"]


def test_where_bad_documents_are_fatal_the_first_one_is_told(text: Path, job: Job) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:1: no field 'body'"):
        work(text, replace(job, fail=True))
