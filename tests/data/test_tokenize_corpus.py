"""A whole corpus to one pair: the same bytes however it was done, and after whatever kill."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from tests.independent_indexed import independent_pair

from bloomery.data import documents, tokenize_pool
from bloomery.data.pair_files import bin_path, idx_path, seal_path
from bloomery.data.pairs import verify_pair
from bloomery.data.readers import SourceFile
from bloomery.data.sources import find_files, is_held_out
from bloomery.data.tokenize_corpus import TokenizeSummary, tokenize
from bloomery.data.tokenize_worker import Job, TextPiece, prepared_tokenizer
from bloomery.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from bloomery.data.tokenizer_engines import Encoded
from bloomery.errors import DataError, StorageError

EOD = "<|endoftext|>"
TEXTS = [f"document {n}: {'to be or not to be, ' * (n % 7)}{n**3} é\n" for n in range(120)]
PIECE_BYTES = 1500


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines in one file, some of them bad, and files of one document."""
    directory = tmp_path_factory.mktemp("source")
    lines = [json.dumps({"text": text}) for text in TEXTS[:100]]
    for place in (30, 60, 90):
        lines.insert(place, '{"text": ""}')
    (directory / "a.jsonl").write_text("\n".join(lines) + "\n")
    for number, text in enumerate(TEXTS[100:], 100):
        (directory / f"b{number}.txt").write_text(text)
    return directory


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(TEXTS, vocabulary=290, end_of_document=EOD).save(path)
    return Job(directory="", tokenizer=str(path), end_of_document=EOD)


def work(
    source: Path, out: Path, job: Job, *, workers: int = 1, piece_bytes: int = PIECE_BYTES
) -> TokenizeSummary:
    files = find_files([str(source)]).files
    return tokenize(files, out, job, workers=workers, piece_bytes=piece_bytes)


def contents(prefix: Path) -> tuple[bytes, bytes]:
    return idx_path(prefix).read_bytes(), bin_path(prefix).read_bytes()


def expected(job: Job, texts: list[str]) -> tuple[bytes, bytes]:
    """By the reference engine, document by document, through the independent writer."""
    tokenizer = load_tokenizer(Path(job.tokenizer), end_of_document=EOD)
    return independent_pair([[*tokenizer.encode(text), tokenizer.eod] for text in texts], code=8)


@pytest.mark.parametrize("piece_bytes", [300, PIECE_BYTES, 1 << 20])
def test_the_pieces_join_to_what_one_pass_would_write(
    source: Path, job: Job, tmp_path: Path, piece_bytes: int
) -> None:
    done = work(source, tmp_path / "out", job, piece_bytes=piece_bytes)
    assert contents(tmp_path / "out") == expected(job, TEXTS)
    assert done.engines == {"fastokens": done.pieces} and done.pieces_kept == 0
    assert [entry.place for entry in done.bad.entries] == [f"{source}/a.jsonl:{n}" for n in (31, 61, 91)]
    assert done.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out.bin",
        "out.idx",
        "out.seal.json",
        "out.seal.sums",
    ]
    verified = verify_pair(tmp_path / "out")
    assert (verified.findings, verified.skipped, verified.documents) == ((), (), len(TEXTS))
    assert done.notes == ()  # no text becomes the end of a document


def test_several_processes_write_the_same_and_split_off_what_is_held_out(
    source: Path, job: Job, tmp_path: Path
) -> None:
    done = work(source, tmp_path / "out", replace(job, held_out_every=4), workers=4)
    assert done.pieces > 4

    def kept(number: int, text: str) -> bool:
        from hashlib import sha256

        name = f"b{number}.txt" if number >= 100 else sha256(text.encode()).hexdigest()
        return is_held_out(name, one_in=4)

    held_out = [text for number, text in enumerate(TEXTS) if kept(number, text)]
    training = [text for number, text in enumerate(TEXTS) if not kept(number, text)]
    assert contents(tmp_path / "out") == expected(job, training)
    assert contents(tmp_path / "out-held-out") == expected(job, held_out)
    assert [pair.documents for pair in done.pairs] == [len(training), len(held_out)]


def test_joining_and_sealing_tell_how_many_bytes_are_done(source: Path, job: Job, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    done = tokenize(
        find_files([str(source)]).files,
        tmp_path / "out",
        job,
        workers=1,
        piece_bytes=PIECE_BYTES,
        progress=lambda stage, done, total, unit, note="": told.append((stage, done, total)),
    )
    joined = [(done, total) for stage, done, total in told if stage == "joining and sealing"]
    size = bin_path(tmp_path / "out").stat().st_size
    assert len(joined) == done.pieces > 2
    assert [amount for amount, _ in joined] == sorted(amount for amount, _ in joined)
    assert {total for _, total in joined} == {size} and joined[-1][0] == size


def test_the_reference_engine_writes_the_same(source: Path, job: Job, tmp_path: Path) -> None:
    done = work(source, tmp_path / "out", replace(job, fast=False))
    assert set(done.engines) == {"tokenizers"} and contents(tmp_path / "out") == expected(job, TEXTS)


KILLED = """
import os, sys, signal
from pathlib import Path
from bloomery.data import sealing, tokenize_corpus
from bloomery.data.tokenize_worker import Job, result_path
from bloomery.data.sources import find_files

source, out, tokenizer, workers, moment = sys.argv[1:]
job = Job(directory="", tokenizer=tokenizer, end_of_document="<|endoftext|>")

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

class Watch(tokenize_corpus._Watch):
    pieces = 0
    def see(self, event):
        self.pieces += isinstance(event, tokenize_corpus.PieceDone)
        if moment == "pieces" and self.pieces == 4:
            die()

tokenize_corpus._Watch = Watch
if moment == "joining":
    tokenize_corpus.IndexedWriter.add_pair = die
if moment == "sealing":
    sealing.SealWriter.commit = die
if moment == "cleaning":
    tokenize_corpus.shutil.rmtree = die
tokenize_corpus.tokenize(find_files([source]).files, Path(out), job, workers=int(workers), piece_bytes=1500)
"""


@pytest.mark.parametrize(
    ("moment", "workers"), [("pieces", 1), ("pieces", 4), ("joining", 1), ("sealing", 1), ("cleaning", 1)]
)
def test_after_a_kill_finished_pieces_are_kept_and_the_output_is_the_same(
    source: Path, job: Job, tmp_path: Path, moment: str, workers: int
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, source, out, job.tokenizer, str(workers), moment]
    killed = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=False)
    assert killed.returncode == -signal.SIGKILL
    done = work(source, out, job, workers=workers)
    assert contents(out) == expected(job, TEXTS)
    assert done.pieces_kept >= 4
    if moment != "pieces":
        assert done.pieces_kept == done.pieces
    assert len(done.bad.entries) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out.bin",
        "out.idx",
        "out.seal.json",
        "out.seal.sums",
    ]
    assert verify_pair(out).findings == ()


def started(source: Path, out: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pieces made, and broken off before they are joined."""
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr("bloomery.data.tokenize_corpus._joined", interrupted)
        work(source, out, job)


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def append_line(source: Path) -> None:
    with (source / "a.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')


@pytest.mark.parametrize(
    "change",
    [append_line, lambda source: (source / "b100.txt").unlink(), lambda source: os.utime(source / "a.jsonl")],
    ids=["a line more", "a file less", "touched"],
)
def test_other_text_or_settings_are_not_taken_for_the_earlier_start(
    source: Path, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    import shutil

    copy = shutil.copytree(source, tmp_path / "copy")
    started(copy, tmp_path / "out", job, monkeypatch)
    kept = work(copy, tmp_path / "out", job)
    assert kept.pieces_kept == kept.pieces
    started(copy, tmp_path / "out", job, monkeypatch)
    change(copy)
    assert work(copy, tmp_path / "out", job).pieces_kept == 0
    started(copy, tmp_path / "out", job, monkeypatch)
    assert work(copy, tmp_path / "out", replace(job, held_out_every=5)).pieces_kept == 0


def test_who_asks_for_the_reference_engine_gets_no_piece_of_the_fast_one(
    source: Path, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(source, tmp_path / "out", job, monkeypatch)
    done = work(source, tmp_path / "out", replace(job, fast=False))
    assert (done.pieces_kept, set(done.engines)) == (0, {"tokenizers"})
    started(source, tmp_path / "out", replace(job, fast=False), monkeypatch)
    done = work(source, tmp_path / "out", job)  # the other way round nothing is lost
    assert done.pieces_kept == done.pieces and contents(tmp_path / "out") == expected(job, TEXTS)


@pytest.mark.parametrize("moves", range(9))
def test_a_kill_while_the_pair_is_put_in_place_leaves_the_old_or_the_new_or_neither(
    source: Path, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    held = replace(job, held_out_every=5)
    out = tmp_path / "out"
    work(source / "a.jsonl", out, held)
    pairs = (out, out.with_name("out-held-out"))
    old = [contents(pair) for pair in pairs]
    left, move = moves, Path.rename

    def rename(self: Path, target: Path) -> Path:
        nonlocal left
        if target.parent == tmp_path and target.name.startswith("out"):
            if not left:
                raise KeyboardInterrupt
            left -= 1
        return move(self, target)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt) if moves < 8 else nullcontext():
            work(source, out, held)
    for pair, before in zip(pairs, old, strict=True):
        try:
            found = verify_pair(pair)
        except DataError as missing:
            assert "Cannot read" in missing.message and ".idx" in missing.message
            continue
        assert found.findings == ()  # whole, and its seal, where it has one, is its own
        assert moves > 0 or (contents(pair) == before and found.skipped == ())
    done = work(source, out, held)
    assert moves == 8 or done.pieces_kept == done.pieces
    assert [verify_pair(pair).skipped for pair in pairs] == [(), ()]
    assert sum(verify_pair(pair).documents for pair in pairs) == len(TEXTS)
    assert not out.with_name("out.parts").exists()


def test_a_piece_that_was_damaged_meanwhile_is_made_again(
    source: Path, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(source, tmp_path / "out", job, monkeypatch)
    parts = tmp_path / "out.parts"
    os.truncate(parts / "000002.bin", 10)
    (parts / "000003.json").write_text("{")
    (parts / "000004.idx").unlink()
    done = work(source, tmp_path / "out", job)
    assert done.pieces_kept == done.pieces - 3 and contents(tmp_path / "out") == expected(job, TEXTS)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_bad_document_is_fatal_where_it_was_asked_to_be(
    source: Path, job: Job, tmp_path: Path, workers: int
) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:(31|61|91): the document is empty"):
        work(source, tmp_path / "out", replace(job, fail=True), workers=workers)
    assert not bin_path(tmp_path / "out").exists()


def test_a_worker_that_dies_is_named_with_what_it_was_at(source: Path, job: Job, tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nread job; read piece; kill -9 $$\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", str(tmp_path / "python"))
        with pytest.raises(DataError, match=r"killed by signal 9 while it tokenised .*a\.jsonl"):
            work(source, tmp_path / "out", job, workers=4)
    assert work(source, tmp_path / "out", job).pieces_kept == 0


def test_workers_that_fall_silent_are_named_with_what_they_are_at(tmp_path: Path) -> None:
    files = (SourceFile(key="a", path=tmp_path / "a.jsonl"),)
    at_work = {71: TextPiece(number=3, files=files, size_bytes=9)}
    with pytest.raises(DataError, match=r"No worker has reported for 0 s \(process 71 at .*a\.jsonl\)"):
        tokenize_pool._next(SimpleQueue(), at_work, silence_s=0.05)


@pytest.mark.parametrize("limit", [600, 4000])
def test_a_full_disk_names_the_file_and_what_was_done_is_kept(
    source: Path, job: Job, tmp_path: Path, limit: int
) -> None:
    out = tmp_path / "out"
    work(source / "b100.txt", out, job)
    before = contents(out)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(StorageError, match=r"Writing data failed at .*out") as refused:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))  # a piece, or all of them, is too large
        try:
            work(source, out, job)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "ulimit" in refused.value.remedy  # the limit that stands for a full disk
    assert contents(out) == before and verify_pair(out, vocabulary_size=290).findings == ()
    done = work(source, out, job)
    assert contents(out) == expected(job, TEXTS)
    assert done.pieces_kept == (done.pieces if limit == 4000 else 0)


def test_text_that_leaves_nothing_is_refused(job: Job, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match=r"No document is left .*1 empty"):
        work(tmp_path / "a.jsonl", tmp_path / "out", job)
    assert not seal_path(tmp_path / "out").exists()


class WrongLate:
    """An engine that errs in one document in the midst of the corpus."""

    name = "wrong"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._right = tokenizer._reference

    def encode(self, texts: Sequence[str]) -> Encoded:
        found = self._right.encode(texts)
        shift = np.repeat(["document 77" in text for text in texts], found.lengths)
        return Encoded(ids=found.ids + shift.astype(np.uint32), lengths=found.lengths)


def test_a_difference_in_any_sampled_document_gives_the_whole_corpus_to_the_reference(
    source: Path, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = load_tokenizer(Path(job.tokenizer), end_of_document=EOD)
    monkeypatch.setattr("bloomery.data.tokenizer.fast_coder", lambda _: WrongLate(reference))
    done = work(source, tmp_path / "out", job)
    assert done.engines == {"tokenizers": done.pieces} and done.pieces > 4
    assert "document 77" in done.notes[0]
    assert contents(tmp_path / "out") == expected(job, TEXTS)
    assert json.loads(seal_path(tmp_path / "out").read_bytes())["engine"] == "tokenizers"


def test_an_engine_that_is_gone_at_the_second_start_leaves_none_of_its_pieces(
    source: Path, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(source, tmp_path / "out", job, monkeypatch)
    monkeypatch.setattr("bloomery.data.tokenizer.fast_coder", lambda _: "the package is gone")
    done = work(source, tmp_path / "out", job)
    assert (done.engines, done.pieces_kept) == ({"tokenizers": done.pieces}, 0)
    assert "the package is gone" in done.notes[0]


def test_the_report_of_bad_documents_is_streamed_whatever_their_number(
    source: Path, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "KEPT", 2)
    files, report = find_files([str(source)]).files, tmp_path / "bad.jsonl"

    done = tokenize(files, tmp_path / "out", job, workers=1, piece_bytes=300, report=report)

    listed = [json.loads(line) for line in report.read_text().splitlines()]
    assert [(Path(entry["file"]).name, entry["line"]) for entry in listed] == [
        ("a.jsonl", 31),
        ("a.jsonl", 61),
        ("a.jsonl", 91),
    ]
    assert done.bad.count == 3 and len(done.bad.entries) == 2 and done.bad.summary().startswith("3 documents")


@pytest.mark.parametrize("spelt", ["<|endoftext|>", "never there"])
def test_a_text_that_becomes_the_end_of_a_document_is_counted_and_left_out(
    source: Path, job: Job, tmp_path: Path, spelt: str
) -> None:
    """An end-of-document token that is not special is read out of texts, as Hugging Face defines it."""
    content = json.loads(Path(job.tokenizer).read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    loose = tmp_path / "loose.json"
    loose.write_text(json.dumps(content))
    texts = ["one", f"two {spelt} three", "four", spelt, "five"]
    path = tmp_path / "strays.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    job = replace(job, tokenizer=str(loose))

    done = tokenize(find_files([str(path)]).files, tmp_path / "out", job, workers=1)

    strays = [2, 4] if spelt == EOD else []
    assert [entry.line for entry in done.bad.entries] == strays
    (told,) = [note for note in done.notes if "count as bad" in note]  # tried before a text was seen
    assert f"'{EOD}'" in told
    assert {entry.kind for entry in done.bad.entries} <= {"with an end of document inside"}
    good = [text for number, text in enumerate(texts, 1) if number not in strays]
    assert contents(tmp_path / "out") == expected(job, good)
    with pytest.raises(DataError, match=r"strays.jsonl:2: its text becomes") if strays else nullcontext():
        tokenize(find_files([str(path)]).files, tmp_path / "no", replace(job, fail=True), workers=1)


def test_what_was_joined_of_pieces_that_were_made_anew_is_joined_anew(
    source: Path, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr("bloomery.data.tokenize_corpus._put_in_place", interrupted)
        work(source, tmp_path / "out", job)
    work(source, tmp_path / "out", replace(job, fast=False))
    assert json.loads(seal_path(tmp_path / "out").read_bytes())["engine"] == "tokenizers"


def test_a_worker_that_cannot_use_the_engine_of_the_other_pieces_tokenises_none(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prepared_tokenizer(replace(job, engine="fastokens")).engine == "fastokens"
    assert prepared_tokenizer(replace(job, engine="tokenizers")).engine == "tokenizers"
    monkeypatch.setattr("bloomery.data.tokenizer.fast_coder", lambda _: "the package is gone")
    assert prepared_tokenizer(job).engine == "tokenizers"
    with pytest.raises(DataError, match=r"by fastokens, and a worker can only use tokenizers.*is gone"):
        prepared_tokenizer(replace(job, engine="fastokens"))
