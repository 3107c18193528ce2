"""How the work on a corpus is divided, what is told of it, and what its parts are called."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.disk_calls import recorded

from bloomery.data import storage, tokenize_corpus
from bloomery.data.corpus_parts import CorpusPart, join_parts, record_path, remove_record, write_record
from bloomery.data.indexed import IndexedDataset
from bloomery.data.pair_files import idx_path
from bloomery.data.readers import SourceFile
from bloomery.data.tokenize_corpus import Pair, TokenizeSummary, piece_size, tokenize
from bloomery.data.tokenize_pool import BatchDone, PieceDone
from bloomery.data.tokenize_worker import Job, TextPiece, prepared_tokenizer, tokenize_piece
from bloomery.data.tokenizer import train_tokenizer
from bloomery.errors import DataError, StorageError

EOD = "<|endoftext|>"
TEXTS = [f"text {number:02}" for number in range(12)]  # of seven bytes, and of eight tokens


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(["a"], vocabulary=257, end_of_document=EOD).save(path)
    return Job(directory="", tokenizer=str(path), end_of_document=EOD, fast=False)


@pytest.fixture
def files(tmp_path: Path) -> list[SourceFile]:
    """Four files of three lines, each a piece of 57 bytes, and a bad line in the third."""
    found = []
    for number in range(4):
        path = tmp_path / f"{number}.jsonl"
        lines = [json.dumps({"text": text}) for text in TEXTS[3 * number : 3 * number + 3]]
        path.write_text("\n".join([*lines[:2], *(['{"text": ""}'] if number == 2 else []), lines[2]]) + "\n")
        found.append(SourceFile(key=path.name, path=path))
    return found


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of the pool of workers, whose work this process does."""
    asked: list[dict[str, Any]] = []

    def pieces_of(pieces: list[TextPiece], job: Job, **settings: Any) -> Iterator[BatchDone | PieceDone]:
        asked.append({"pieces": [piece.number for piece in pieces], "engine": job.engine, **settings})
        for piece in pieces:
            tokenize_piece(piece, job, prepared_tokenizer(job), tell=lambda size, tokens: None)
            yield BatchDone(text_bytes=21, tokens=24)
            yield PieceDone(number=piece.number)

    monkeypatch.setattr(tokenize_corpus, "tokenize_pieces", pieces_of)
    return asked


@pytest.mark.parametrize(
    ("workers", "processes"), [(1, None), (2, None), (3, 2), (4, 2), (5, 3), (8, 4), (99, 4)]
)
def test_each_process_gets_two_cores_and_no_more_run_than_there_are_pieces(
    files: list[SourceFile],
    job: Job,
    tmp_path: Path,
    pool: list[dict[str, Any]],
    workers: int,
    processes: int | None,
) -> None:
    done = tokenize(files, tmp_path / "out", job, workers=workers, piece_bytes=75)
    if processes is None:
        assert pool == []
    else:
        (asked,) = pool
        (lock,) = asked.pop("held_open")
        assert lock > 2
        assert asked == {
            "pieces": [0, 1, 2, 3], "engine": "tokenizers", "processes": processes, "threads": 2,
        }  # fmt: skip
    assert (done.pieces, done.pieces_kept) == (4, 0)


def test_what_was_done_is_told_in_whole(files: list[SourceFile], job: Job, tmp_path: Path) -> None:
    report = tmp_path / "bad.jsonl"
    done = tokenize(files, tmp_path / "out", job, workers=1, piece_bytes=75, report=report)
    assert done == TokenizeSummary(
        pairs=(Pair(prefix=tmp_path / "out", documents=12, tokens=96, text_bytes=84),),
        dtype="uint16",
        text_bytes=84,
        bad=done.bad,
        engines={"tokenizers": 4},
        notes=(),
        pieces=4,
        pieces_kept=0,
    )
    assert done.bad.summary() == (
        f"1 document skipped: 1 empty. The first: {tmp_path}/2.jsonl:3: the document is empty"
    )
    assert json.loads(report.read_text()) == {
        "file": f"{tmp_path}/2.jsonl",
        "line": 3,
        "kind": "empty",
        "why": "the document is empty",
    }


def test_progress_begins_with_what_an_earlier_start_had_done(
    files: list[SourceFile], job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [file.path.stat().st_size for file in files]

    def broken_off(piece: TextPiece, job: Job, tokenizer: object, *, tell: object) -> None:
        if piece.number == 3:
            raise KeyboardInterrupt
        tokenize_piece(piece, job, tokenizer, tell=tell)  # type: ignore[arg-type]

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(tokenize_corpus, "tokenize_piece", broken_off)
        tokenize(files, tmp_path / "out", job, workers=1, piece_bytes=75)
    now = iter([100.0, 100.5])
    monkeypatch.setattr(tokenize_corpus, "time", SimpleNamespace(monotonic=lambda: next(now)))
    told: list[tuple[object, ...]] = []

    def progress(*about: object) -> None:
        told.append(about)

    done = tokenize(files, tmp_path / "out", job, workers=1, piece_bytes=75, progress=progress)
    whole = sum(sizes)
    assert done.pieces_kept == 3 and done.text_bytes == 84
    first, *joined, last = told
    before = sum(sizes[:3])
    assert first == ("tokenising", before + 21, whole, "bytes", "0.00M tokens/s")
    assert {stage for stage, *_ in joined} == {"joining and sealing"}
    assert last == ("tokenising", whole, whole, "bytes")


def test_the_rate_is_of_the_tokens_since_the_start_and_no_more_than_all_is_ever_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([10.0, 12.0, 14.0])
    monkeypatch.setattr(tokenize_corpus, "time", SimpleNamespace(monotonic=lambda: next(now)))
    told: list[tuple[object, ...]] = []
    watch = tokenize_corpus._Watch(lambda *about: told.append(about), done=5, total=40)
    watch.see(BatchDone(text_bytes=10, tokens=3_000_000))
    watch.see(PieceDone(number=1))
    watch.see(BatchDone(text_bytes=90, tokens=5_000_000))
    watch.end()
    assert told == [
        ("tokenising", 15, 40, "bytes", "1.50M tokens/s"),
        ("tokenising", 40, 40, "bytes", "2.00M tokens/s"),
        ("tokenising", 40, 40, "bytes"),
    ]


def test_pieces_of_a_corpus_are_of_32_mib_up_to_four_thousand(
    files: list[SourceFile], job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size, pieces in ((0, 1), (4096 << 25, 4096), ((4096 << 25) + 1, 4096), (1 << 50, 4096)):
        assert -(-max(size, 1) // piece_size(size)) == pieces
    assert piece_size((4096 << 25) + 1) == (32 << 20) + 1
    monkeypatch.setattr(tokenize_corpus, "_PIECE_BYTES", 120)
    assert tokenize(files, tmp_path / "out", job, workers=1).pieces == 3


@pytest.mark.parametrize(
    ("text", "part", "name"),
    [
        ("1/1", CorpusPart(number=1, count=1), "out-part-1-of-1"),
        ("3/16", CorpusPart(number=3, count=16), "out-part-03-of-16"),
        ("16/16", CorpusPart(number=16, count=16), "out-part-16-of-16"),
        ("7/100000", CorpusPart(number=7, count=100_000), "out-part-000007-of-100000"),
    ],
)
def test_a_part_is_written_and_named_by_its_number(text: str, part: CorpusPart, name: str) -> None:
    assert CorpusPart.parse(text) == part and part.prefix(Path("/x/out")) == Path("/x") / name


@pytest.mark.parametrize("text", ["100001/100001", "1/100001", " 1/2", "1/2 ", "1/2/3", ""])
def test_what_is_written_otherwise_is_no_part(text: str) -> None:
    with pytest.raises(ValueError, match="is no part such as 3/16, from 1/16 to 16/16"):
        CorpusPart.parse(text)


@pytest.mark.parametrize(
    ("sizes", "count", "parts"),
    [
        ([10, 10, 10, 10], 2, [[0, 1], [2, 3]]),
        ([30, 10], 2, [[0], [1]]),
        ([10, 30], 2, [[0], [1]]),
        ([10, 20, 10], 2, [[0], [1, 2]]),  # the middle of the second is the middle of all: the later part
        ([0, 0], 2, [[0, 1], []]),
        ([5], 3, [[], [0], []]),
        ([], 2, [[], []]),
    ],
)
def test_a_piece_is_in_the_part_that_its_middle_lies_in(
    sizes: list[int], count: int, parts: list[list[int]]
) -> None:
    pieces = [TextPiece(number=n, files=(), size_bytes=size) for n, size in enumerate(sizes)]
    found = [CorpusPart(number=number, count=count).of_pieces(pieces) for number in range(1, count + 1)]
    assert [[piece.number for piece in part] for part in found] == parts


def test_a_record_of_a_part_is_gone_from_the_disk_before_its_pair_is_replaced(tmp_path: Path) -> None:
    prefix = tmp_path / "out-part-1-of-2"
    write_record(prefix, corpus="c", sample="s", engine="e", held_out=True)
    assert json.loads(record_path(prefix).read_bytes()) == {
        "corpus": "c",
        "sample": "s",
        "engine": "e",
        "held_out": True,
    }
    with recorded() as calls:
        remove_record(prefix, held_out=True)
    assert not record_path(prefix).exists() and calls.paths == [("sync", tmp_path)]
    remove_record(prefix, held_out=True)


def parts_of(out: Path, count: int, *, without: tuple[int, ...] = ()) -> None:
    for number in range(1, count + 1):
        if number not in without:
            prefix = CorpusPart(number=number, count=count).prefix(out)
            write_record(prefix, corpus="c", sample="s", engine="e", held_out=False)
            idx_path(prefix).write_bytes(b"")


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (range(2, 22), ", ".join(f"{number}/30" for number in range(2, 22)) + "."),
        (range(2, 23), ", ".join(f"{number}/30" for number in range(2, 22)) + " and 1 more."),
    ],
)
def test_of_many_parts_that_are_missing_twenty_are_named(tmp_path: Path, missing: range, said: str) -> None:
    out = tmp_path / "out"
    parts_of(out, 30, without=tuple(missing))
    with pytest.raises(DataError) as refused:
        join_parts(out)
    assert refused.value.message == f"These parts of {out} are not finished: {said}"


def test_a_part_needs_its_record_and_its_pair(tmp_path: Path) -> None:
    out = tmp_path / "out"
    parts_of(out, 2)
    idx_path(CorpusPart(number=2, count=2).prefix(out)).unlink()
    with pytest.raises(DataError, match=r"not finished: 2/2\."):
        join_parts(out)
    parts_of(out, 2)
    record_path(CorpusPart(number=1, count=2).prefix(out)).write_text('{"corpus": 1}')
    with pytest.raises(DataError, match=r"out-part-1-of-2\.part\.json is no record of a part \('engine'\)"):
        join_parts(out)
    (tmp_path / "other-part-1-of-9.idx").write_bytes(b"")
    (tmp_path / "out-part-1-of-9.bin").write_bytes(b"")
    with pytest.raises(DataError, match="is no record"):  # files of other names count for nothing
        join_parts(out)


def test_parts_of_a_pair_are_not_those_of_one_whose_name_is_like_it(tmp_path: Path) -> None:
    parts_of(tmp_path / "out", 2)
    parts_of(tmp_path / "out.more", 2)
    for other in ("o.t", "ou", "out.mor"):
        with pytest.raises(DataError) as refused:
            join_parts(tmp_path / other)
        assert refused.value.message == f"{tmp_path} holds no parts of {other}."


@pytest.mark.parametrize("content", ["", "[1]", "7", '"corpus engine held_out"'])
def test_a_record_that_is_none_is_told_with_what_helps(tmp_path: Path, content: str) -> None:
    out = tmp_path / "out"
    parts_of(out, 2)
    record_path(CorpusPart(number=2, count=2).prefix(out)).write_text(content)
    with pytest.raises(DataError, match=r"out-part-2-of-2\.part\.json is no record of a part") as refused:
        join_parts(out)
    assert refused.value.remedy == "Tokenise that part again."


def test_more_parts_than_can_be_are_refused(tmp_path: Path) -> None:
    idx_path(tmp_path / "out-part-1-of-100001").write_bytes(b"")
    with pytest.raises(DataError) as refused:
        join_parts(tmp_path / "out")
    assert refused.value.message == f"{tmp_path} holds files of 100001 parts."


def test_parts_are_joined_with_progress_and_their_lists_in_their_order(
    files: list[SourceFile], job: Job, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for number in (1, 2):
        part = CorpusPart(number=number, count=2)
        report = part.prefix(out).with_name(part.prefix(out).name + "-bad-documents.jsonl")
        tokenize(files, out, job, workers=1, piece_bytes=75, report=report, part=part)
        report.write_text(f"list {number}\n")
    told: list[tuple[object, ...]] = []
    (joined,) = join_parts(out, progress=lambda *about: told.append(about[:3]))
    assert (joined.prefix, joined.document_count) == (out, 12) and told[-1] == ("merging", 192, 192)
    draft = tmp_path / ".out-bad-documents.jsonl.draft"
    draft.write_text("what a start that was killed had written")
    with recorded() as calls:
        join_parts(out)
    assert (tmp_path / "out-bad-documents.jsonl").read_text() == "list 1\nlist 2\n"
    renamed = calls.paths.index(("rename", tmp_path / "out-bad-documents.jsonl"))
    assert calls.paths.index(("sync", draft)) < renamed
    for number in (1, 2):
        (tmp_path / f"out-part-{number}-of-2-bad-documents.jsonl").unlink()
    join_parts(out)
    assert not (tmp_path / "out-bad-documents.jsonl").exists(), "that of an earlier join would tell of others"


def test_the_engine_of_a_part_is_chosen_by_texts_of_the_whole_corpus(
    files: list[SourceFile], job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []

    def sampled(pieces: list[TextPiece], job: Job) -> list[str]:
        asked.append([piece.number for piece in pieces])
        return []

    monkeypatch.setattr(tokenize_corpus, "sampled_texts", sampled)
    part, quick = CorpusPart(number=2, count=2), replace(job, fast=True)
    tokenize(files, tmp_path / "out", quick, workers=1, piece_bytes=75, part=part)
    assert asked == [[0, 1, 2, 3]], "parts of several engines could not be joined"


def test_two_that_tokenise_into_one_pair_never_work_at_a_time(
    files: list[SourceFile], job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_LOCK_TIMEOUT_S", 0.0)
    refused = list[str]()

    def again(*told: object) -> None:
        if not refused:
            with pytest.raises(StorageError) as busy:
                tokenize(files, tmp_path / "out", job, workers=1, piece_bytes=75)
            refused.append(busy.value.message)

    done = tokenize(files, tmp_path / "out", job, workers=1, piece_bytes=75, progress=again)
    assert f"which works in {tmp_path / 'out.parts'}" in refused[0] and done.pairs[0].documents == 12
    assert not (tmp_path / "out.parts").exists()


@pytest.mark.parametrize(("recorded", "told"), [("they differ", "they differ"), ("", "a later start's own")])
def test_why_the_reference_engine_was_chosen_is_told_by_later_starts_too(
    tmp_path: Path, job: Job, recorded: str, told: str
) -> None:
    notes = list[str]()
    tokenizer: Any = SimpleNamespace(
        engine="fastokens", engine_note="a later start's own", use_reference=notes.append, prove=pytest.fail
    )
    decision = tmp_path / "engine.json"
    decision.write_text(json.dumps({"engine": "tokenizers", "note": recorded}))
    tokenize_corpus._decide_engine(tmp_path, [], job, tokenizer)
    assert notes == [told]
    tokenize_corpus._decide_engine(tmp_path, [], job, tokenizer)
    assert notes == [told], "it is the engine that the last start recorded"
    assert json.loads(decision.read_text()) == {"engine": "fastokens", "note": "a later start's own"}


def test_a_disk_that_keeps_files_that_are_open_does_not_fail_work_that_is_done(
    files: list[SourceFile],
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def kept_by_nfs(path: object, *_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(os, "rmdir", kept_by_nfs)
    summary = tokenize(files, tmp_path / "out", job, workers=1)
    assert summary.pairs[0].documents == IndexedDataset(tmp_path / "out").document_count == 12
    assert f"{tmp_path / 'out.parts'} could not be removed as a whole" in caplog.text
