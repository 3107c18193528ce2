"""Held-out pairs of an earlier command never lie beside training documents that may hold their own."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.config.data import DataSection
from bloomery.data.corpus_parts import CorpusPart, join_parts
from bloomery.data.indexed import IndexedDataset
from bloomery.data.pair_files import PARTS, bin_path, idx_path
from bloomery.data.prepare import prepare
from bloomery.data.sources import find_files
from bloomery.data.tokenize_corpus import tokenize
from bloomery.data.tokenize_worker import Job
from bloomery.data.tokenizer import train_tokenizer
from bloomery.data.tokenizer_files import tokenizer_in
from bloomery.errors import DataError

TEXTS = [f"document {number}: {'to be or not to be ' * (number % 5)}" for number in range(60)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(TEXTS, vocabulary=280, end_of_document="<|endoftext|>").save(path)
    return Job(directory="", tokenizer=str(path), end_of_document="<|endoftext|>", held_out_every=4)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    text.mkdir()
    for number, content in enumerate(TEXTS):
        (text / f"{number:02}.txt").write_text(content)
    return tmp_path / "tokens" / "out"


def work(out: Path, job: Job, part: CorpusPart | None = None) -> None:
    files = find_files([str(out.parents[1] / "text")]).files
    tokenize(files, out, job, workers=1, piece_bytes=500, part=part)


def held_out(out: Path) -> Path:
    return out.with_name(out.name + "-held-out")


def contents(prefix: Path) -> dict[str, bytes]:
    return {ending: path(prefix).read_bytes() for ending, path in PARTS.items()}


def documents(prefix: Path) -> set[bytes]:
    pair = IndexedDataset(prefix)
    return {pair.document(number).tobytes() for number in range(pair.document_count)}


def in_parts(out: Path, job: Job) -> None:
    for number in (1, 2):
        work(out, job, CorpusPart(number=number, count=2))
    join_parts(out)


@pytest.mark.parametrize("make", [work, in_parts])
def test_a_pair_that_holds_nothing_out_is_not_made_beside_what_was_held_out_of_the_older_one(
    out: Path, job: Job, make: Callable[[Path, Job], None]
) -> None:
    make(out, job)
    before = contents(out), contents(held_out(out))
    with pytest.raises(DataError, match=r"out-held-out lies beside .*tokens/out, ") as refused:
        make(out, replace(job, held_out_every=0))
    assert f"Remove {held_out(out)}.*" in refused.value.remedy
    assert (contents(out), contents(held_out(out))) == before
    for path in PARTS.values():
        path(held_out(out)).unlink()
    make(out, replace(job, held_out_every=0))
    assert len(documents(out)) == len(TEXTS) and not list(out.parent.glob("*-held-out*"))


@pytest.mark.parametrize("make", [work, in_parts])
def test_new_training_documents_never_lie_beside_the_older_held_out_pair(
    out: Path, job: Job, make: Callable[[Path, Job], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(out, job)
    older, move = documents(held_out(out)), Path.rename
    seen = []

    def rename(self: Path, target: Path) -> Path:
        moved = move(self, target)
        if target.parent == out.parent and target.name in ("out.idx", "out.seal.json", "out-held-out.idx"):
            seen.append(target.name)
            if target.name != "out-held-out.idx":
                assert older & documents(out) and not idx_path(held_out(out)).exists()
        return moved

    monkeypatch.setattr(Path, "rename", rename)
    make(out, replace(job, held_out_every=7))
    assert seen == ["out.idx", "out.seal.json", "out-held-out.idx"]
    assert not documents(out) & documents(held_out(out))


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_parts_of_which_a_held_out_pair_is_not_whole_change_nothing(out: Path, job: Job, harm: str) -> None:
    in_parts(out, job)
    before = contents(out), contents(held_out(out))
    part = CorpusPart(number=2, count=2).prefix(out)
    in_parts_of_seven = replace(job, held_out_every=7)
    for number in (1, 2):
        work(out, in_parts_of_seven, CorpusPart(number=number, count=2))
    file = bin_path(held_out(part))
    content = file.read_bytes()
    file.unlink() if harm == "gone" else file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(DataError, match=r"out-part-2-of-2-held-out\.bin"):
        join_parts(out)
    assert (contents(out), contents(held_out(out))) == before
    file.write_bytes(content)
    join_parts(out)
    assert not documents(out) & documents(held_out(out)) and contents(out) != before[0]


def test_parts_without_a_document_to_train_on_are_refused_as_one_corpus_is(out: Path, job: Job) -> None:
    for file in (out.parents[1] / "text").iterdir():
        file.write_text("")
    for number in (1, 2):
        work(out, job, CorpusPart(number=number, count=2))
    with pytest.raises(DataError, match="hold no document to train on") as refused:
        join_parts(out)
    assert "*-bad-documents.jsonl" in refused.value.remedy and not bin_path(out).exists()


def test_a_part_that_holds_nothing_out_takes_the_place_of_one_that_did(out: Path, job: Job) -> None:
    part = CorpusPart(number=1, count=2)
    work(out, job, part)
    assert idx_path(held_out(part.prefix(out))).exists()
    work(out, replace(job, held_out_every=0), part)
    assert not list(out.parent.glob("*-held-out*"))


def test_the_data_of_a_run_are_what_the_last_start_made_and_nothing_of_an_earlier_one(out: Path) -> None:
    """Code that finds no manifest takes the tokenizer that lies there, a tokenizer.json before a model."""
    sentencepiece = pytest.importorskip("sentencepiece")
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=trained, vocab_size=40, hard_vocab_limit=False
    )
    model = out.parents[1] / "given.model"
    model.write_bytes(trained.getvalue())
    data = DataSection(
        sources=(str(out.parents[1] / "text"),),
        sequence_length=8,
        tokenizer_vocabulary=280,
        end_of_document_token="</s>",
        held_out_every=4,
    )
    run = out.parents[1] / "run"
    assert prepare(data, run).held_out and tokenizer_in(run) == run / "tokenizer.json"
    made = prepare(replace(data, tokenizer=str(model), held_out_every=0), run)
    assert tokenizer_in(run) == made.tokenizer_path == run / "tokenizer.model"
    assert not list(run.glob("held-out*")) and not made.held_out
