"""Lists of bad documents: their lines in whole files, and what is said where a disk refuses them."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bloomery.data.corpus_parts import bad_documents
from bloomery.data.documents import BadDocument
from bloomery.data.readers import SourceFile
from bloomery.data.storage import open_new
from bloomery.data.tokenize_worker import Job, TextPiece, bad_path, prepared_tokenizer, tokenize_piece
from bloomery.data.tokenizer import train_tokenizer
from bloomery.errors import StorageError

EOD = "<|endoftext|>"


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: what stands for a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["a"], vocabulary=257, end_of_document=EOD).save(path)
    (tmp_path / "parts").mkdir()
    return Job(directory=str(tmp_path / "parts"), tokenizer=str(path), end_of_document=EOD, fast=False)


def piece(number: int, *files: SourceFile) -> TextPiece:
    return TextPiece(number=number, files=files, size_bytes=1)


def test_a_disk_without_room_for_the_list_of_bad_documents_is_told_by_its_file(
    job: Job, tmp_path: Path
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "good"}\n' + '{"text": ""}\n' * 300)
    one = piece(3, SourceFile(key="a", path=source))
    listed, tokenizer = bad_path(tmp_path / "parts", 3), prepared_tokenizer(job)
    with pytest.raises(StorageError) as refused, files_up_to(4096):
        tokenize_piece(one, job, tokenizer, tell=lambda size, tokens: None)
    assert refused.value.message.startswith(f"Writing data failed at {listed}: File too large")
    assert not listed.exists()
    tokenize_piece(one, job, tokenizer, tell=lambda size, tokens: None)
    assert len(listed.read_text().splitlines()) == 300
    results = [{"lines": [301]}]
    said = r"failed at .*parts/bad-documents: File too large"
    with pytest.raises(StorageError, match=said), files_up_to(4096):
        bad_documents(tmp_path / "parts", [one], results, None)
    with pytest.raises(StorageError, match=r"failed at .*none/bad\.jsonl: No such file"):
        bad_documents(tmp_path / "parts", [one], results, tmp_path / "none" / "bad.jsonl")


def test_what_is_no_error_of_the_disk_passes_as_it_is(tmp_path: Path) -> None:
    for error in (BrokenPipeError("nobody listens"), ValueError("no text")):
        with pytest.raises(type(error)), open_new(tmp_path / "list") as file:
            file.write(b"x")
            raise error
        assert not (tmp_path / "list").exists()
    with open_new(tmp_path / "list") as file:
        file.write(b"whole")
    assert (tmp_path / "list").read_bytes() == b"whole"
    with pytest.raises(StorageError, match=r"failed at .*list: File exists"), open_new(tmp_path / "list"):
        raise AssertionError("it is there already")


def listed_of(parts: Path, number: int, *entries: tuple[int, str, int]) -> None:
    """Write the list of a piece: (number of the file, its path, line in the part)."""
    rows = [
        json.dumps([file, {"file": path, "line": line, "kind": "empty", "why": f"{number}"}])
        for file, path, line in entries
    ]
    bad_path(parts, number).write_text("".join(f"{row}\n" for row in rows))


def lines_of(parts: Path, pieces: list[TextPiece], results: list[dict[str, Any]]) -> list[tuple[str, int]]:
    report = parts / "report.jsonl"
    (parts / "bad-documents").write_text("what a start that was killed had written")
    bad = bad_documents(parts, pieces, results, report)
    entries = [json.loads(line) for line in report.read_text().splitlines()]
    assert [BadDocument(**entry) for entry in entries] == bad.entries and bad.count == len(entries)
    assert bad.stop_after == 0 and not bad.good
    return [(Path(entry.file).name, entry.line) for entry in bad.entries]


def test_lines_of_parts_of_a_file_are_counted_through_all_pieces(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in ("a.jsonl", "b.txt", "c.jsonl"))
    pieces = [
        piece(0, SourceFile(key="a", path=a, start=0, stop=100)),
        piece(1, SourceFile(key="a", path=a, start=100, stop=200), SourceFile(key="b", path=b)),
        piece(2, SourceFile(key="a", path=a, start=200, stop=300), SourceFile(key="c", path=c)),
    ]
    listed_of(tmp_path, 0, (0, str(a), 3))
    listed_of(tmp_path, 1, (0, str(a), 1), (0, str(a), 0), (1, str(b), 0))
    listed_of(tmp_path, 2, (0, str(a), 2), (1, str(c), 4), (1, str(c), 0))
    results = [{"lines": [10]}, {"lines": [20, 0]}, {"lines": [5, 9]}]
    assert lines_of(tmp_path, pieces, results) == [
        ("a.jsonl", 3),
        ("a.jsonl", 11),
        ("a.jsonl", 0),  # it is in no line
        ("b.txt", 0),
        ("a.jsonl", 32),
        ("c.jsonl", 4),
        ("c.jsonl", 0),
    ]


def test_lines_of_a_file_that_is_given_twice_are_counted_from_its_beginning_each_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    pieces = [piece(number, SourceFile(key="a", path=path)) for number in range(2)]
    for number in range(2):
        listed_of(tmp_path, number, (0, str(path), 3))
    assert lines_of(tmp_path, pieces, [{"lines": [10]}] * 2) == [("a.jsonl", 3)] * 2


@pytest.mark.parametrize(("name", "before"), [("a.jsonl", 2), ("a.txt", 0)])
def test_lines_that_other_parts_of_the_corpus_hold_are_counted_from_the_file_itself(
    tmp_path: Path, name: str, before: int
) -> None:
    """The first piece of this part begins within a file, whose beginning another machine has."""
    a, b = tmp_path / name, tmp_path / "b.jsonl"
    a.write_bytes(b"one\ntwo\nthree\nfour\n")
    pieces = [
        piece(4, SourceFile(key="a", path=a, start=8, stop=14)),
        piece(5, SourceFile(key="a", path=a, start=14, stop=19), SourceFile(key="b", path=b)),
    ]
    listed_of(tmp_path, 4, (0, str(a), 1))
    listed_of(tmp_path, 5, (0, str(a), 1), (1, str(b), 7))
    results = [{"lines": [1]}, {"lines": [1, 9]}]
    assert lines_of(tmp_path, pieces, results) == [
        (name, before + 1),
        (name, before + 2),
        ("b.jsonl", 7),
    ]
