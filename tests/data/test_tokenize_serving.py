"""What the workers that tokenise are told and say, and how the process that runs them takes it."""

from __future__ import annotations

import io
import json
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.data import tokenize_pool, tokenize_worker
from bloomery.data.documents import Document
from bloomery.data.pair_files import bin_path, idx_path
from bloomery.data.readers import Reading, SourceFile
from bloomery.data.tokenize_pool import BatchDone, PieceDone, tokenize_pieces
from bloomery.data.tokenize_worker import Job, TextPiece, result_path, sampled_texts, serve, total_bytes
from bloomery.data.tokenizer import train_tokenizer
from bloomery.errors import BloomeryError, DataError, StorageError

EOD = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the 256 bytes alone, so that each byte of text is a token."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(["a"], vocabulary=257, end_of_document=EOD).save(path)
    return str(path)


@pytest.fixture
def job(tokenizer: str, tmp_path: Path) -> Job:
    (tmp_path / "parts").mkdir()
    return Job(directory=str(tmp_path / "parts"), tokenizer=tokenizer, end_of_document=EOD, fast=False)


def piece(number: int, *paths: Path) -> TextPiece:
    files = tuple(SourceFile(key=path.name, path=path) for path in paths)
    return TextPiece(number=number, files=files, size_bytes=total_bytes(files))


def written(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def served(monkeypatch: pytest.MonkeyPatch, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """What a worker says that is given these messages."""
    given, said = "".join(json.dumps(message) + "\n" for message in messages), io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    serve(said)
    return [json.loads(line) for line in said.getvalue().splitlines()]


def plain(job: Job) -> dict[str, Any]:
    return dict(vars(job))


def test_a_worker_tells_each_batch_and_each_piece_and_ends_with_its_input(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bloomery.data.documents._BATCH_BYTES", 4)
    first = piece(3, written(tmp_path / "a.jsonl", "ab", "cdé", "e"), written(tmp_path / "b.jsonl", "fg"))
    second = piece(7, written(tmp_path / "c.jsonl", "x"))
    assert served(monkeypatch, plain(job), first.to_json(), second.to_json()) == [
        {"batch": [6, 8]},
        {"batch": [3, 5]},
        {"done": 3},
        {"batch": [1, 2]},
        {"done": 7},
    ]
    parts = tmp_path / "parts"
    assert json.loads(result_path(parts, 3).read_bytes()) == {
        "text_bytes": 9,
        "held_out_bytes": 0,
        "lines": [3, 1],
        "engine": "tokenizers",
        "sizes": {
            "000003.bin": bin_path(parts / "000003").stat().st_size,
            "000003.idx": idx_path(parts / "000003").stat().st_size,
            "000003-bad.jsonl": 0,
        },
    }
    assert bin_path(parts / "000003").stat().st_size == 2 * (9 + 4)
    assert served(monkeypatch) == []


def test_a_worker_that_waits_for_text_names_the_file_that_it_reads(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bloomery.data.documents._BATCH_BYTES", 1)
    asked, counts = list[str](), list[int]()

    def in_turn(
        batches: Iterator[list[Document]], *, count: int, what: Callable[[], str]
    ) -> Iterator[list[Document]]:
        asked.append(what())
        counts.append(count)
        for batch in batches:
            asked.append(what())
            yield batch

    monkeypatch.setattr(tokenize_worker, "read_ahead", in_turn)
    files = [written(tmp_path / f"{name}.jsonl", name) for name in "ab"]
    served(monkeypatch, plain(job), piece(3, *files).to_json())
    assert asked == ["text of the first file", *(f"text of {file}" for file in files)] and counts == [4]


@pytest.mark.parametrize("storage", [False, True])
def test_a_worker_that_cannot_go_on_says_why_and_takes_no_further_piece(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: bool
) -> None:
    wrong = piece(0, written(tmp_path / "a.jsonl", "x"))
    if storage:
        (tmp_path / "parts" / "000000.bin.partial").mkdir()
    else:
        (tmp_path / "a.jsonl").unlink()
    after = piece(1, written(tmp_path / "b.jsonl", "y"))
    (told,) = served(monkeypatch, plain(job), wrong.to_json(), after.to_json())
    refused = told["refused"]
    assert refused["kind"] == ("storage" if storage else "data") and refused["remedy"]
    wanted = "000000.bin.partial" if storage else f"Cannot read {tmp_path / 'a.jsonl'}"
    assert wanted in refused["message"]
    assert not result_path(tmp_path / "parts", 1).exists()
    with pytest.raises(StorageError if storage else DataError) as raised:
        tokenize_pool._raise(refused)
    assert (raised.value.message, raised.value.remedy) == (refused["message"], refused["remedy"])


@pytest.mark.parametrize("end", [BrokenPipeError, KeyboardInterrupt])
def test_a_worker_whose_reader_is_gone_or_ending_ends_without_a_word(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise end

    messages = [plain(job), piece(0, written(tmp_path / "a.jsonl", "x")).to_json()]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(one) + "\n" for one in messages)))
    serve(Gone())


def test_what_is_held_out_is_counted_in_bytes_and_written_apart(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"abc", "é"}
    monkeypatch.setattr(tokenize_worker, "is_held_out", lambda key, *, one_in: key in keys_of(held))
    file = written(tmp_path / "a.jsonl", "abc", "de", "é", "", "f")
    served(monkeypatch, plain(replace(job, held_out_every=2)), piece(0, file).to_json())
    result = json.loads(result_path(tmp_path / "parts", 0).read_bytes())
    assert (result["text_bytes"], result["held_out_bytes"], result["lines"]) == (8, 5, [5])
    names = ["000000.bin", "000000.idx", "000000-held-out.bin", "000000-held-out.idx", "000000-bad.jsonl"]
    sizes = {name: (tmp_path / "parts" / name).stat().st_size for name in names}
    assert result["sizes"] == sizes and sizes["000000-bad.jsonl"] > 0
    assert (sizes["000000.bin"], sizes["000000-held-out.bin"]) == (2 * (3 + 2), 2 * (5 + 2))


def keys_of(texts: set[str]) -> set[str]:
    import hashlib

    return {hashlib.sha256(text.encode()).hexdigest() for text in texts}


def test_the_settings_of_a_job_are_those_of_its_reading_and_a_piece_comes_back_from_its_json() -> None:
    job = Job(
        directory="d", tokenizer="t", end_of_document="e", text_field="a.b", prompt_field="p",
        separator="%%", longest_line_mib=3,
    )  # fmt: skip
    assert job.reading == Reading(text_field="a.b", prompt_field="p", separator="%%", longest_line_mib=3)
    files = (
        SourceFile(key="a/b.jsonl", path=Path("/x/a/b.jsonl"), start=5, stop=9),
        SourceFile(key="c.txt", path=Path("/x/c.txt")),
    )
    whole = TextPiece(number=4, files=files, size_bytes=17)
    assert TextPiece.from_json(json.loads(json.dumps(whole.to_json()))) == whole


def test_texts_are_sampled_from_pieces_all_over_a_corpus(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize_worker, "_SAMPLED_PIECES", 3)
    monkeypatch.setattr(tokenize_worker, "_SAMPLED_DOCUMENTS", 7)
    monkeypatch.setattr(tokenize_worker, "_SAMPLED_CHARACTERS", 7 * 4)
    pieces = []
    for number in range(6):
        texts = [f"{number}{letter}xyz" for letter in "abcd"]
        files = [written(tmp_path / f"{number}-0.jsonl", *texts[:2]), tmp_path / f"{number}-1.jsonl"]
        written(files[1], *texts[2:])
        pieces.append(piece(number, *files))
    pieces[2].files[0].path.unlink()  # its loss is told when it is its turn
    assert list(sampled_texts(pieces, job)) == ["0axy", "0bxy", "0cxy", "4axy", "4bxy", "4cxy"]
    assert list(sampled_texts(pieces[5:], job)) == ["5axy", "5bxy", "5cxy", "5dxy"]


def test_a_file_that_is_gone_when_its_size_is_asked_is_named(tmp_path: Path) -> None:
    files = [SourceFile(key="a", path=written(tmp_path / "a.jsonl", "x"))] * 2
    assert total_bytes(files) == 2 * len('{"text": "x"}\n')
    gone = SourceFile(key="b", path=tmp_path / "gone.txt")
    with pytest.raises(DataError, match=rf"Cannot read {tmp_path / 'gone.txt'}: No such file"):
        total_bytes([*files, gone])


class Worker:
    """A process that is none: it says what it is told to. killed: whether it was ended."""

    def __init__(self, words: list[str], **settings: Any) -> None:
        self.words, self.settings = words, settings
        self.stdin, self.ended, self.returncode = io.StringIO(), False, 0
        self.stdout = io.StringIO(self.said.pop(0))
        self.pid = len(self.all)
        self.all.append(self)

    all: list[Worker]
    said: list[str]

    def terminate(self) -> None:
        self.ended = True
        self.given = [json.loads(line) for line in self.stdin.getvalue().splitlines()]

    def wait(self, timeout: float) -> int:
        return self.returncode


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> type[Worker]:
    kind = type("Workers", (Worker,), {"all": [], "said": []})
    monkeypatch.setattr(subprocess, "Popen", kind)
    return kind


def test_workers_get_the_job_then_pieces_and_an_engine_of_their_threads(
    workers: type[Worker], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    workers.said = ['{"batch": [10, 3]}\n{"batch": [4, 1]}\n{"done": 5}\n{"batch": [1, 2]}\n{"done": 6}\n']
    pieces = [piece(5, Path(__file__)), piece(6, Path(__file__))]
    events = list(tokenize_pieces(pieces, job, processes=1, threads=3, held_open=[0, 2]))
    assert events == [
        BatchDone(text_bytes=10, tokens=3),
        BatchDone(text_bytes=4, tokens=1),
        PieceDone(number=5),
        BatchDone(text_bytes=1, tokens=2),
        PieceDone(number=6),
    ]
    (worker,) = workers.all
    assert worker.words == [sys.executable, "-P", "-m", "bloomery.data.tokenize_worker"]
    assert worker.given == [plain(job), pieces[0].to_json(), pieces[1].to_json()]
    environment = worker.settings.pop("env")
    package = str(Path(tokenize_pool.__file__).parents[2])
    assert environment["PYTHONPATH"] == f"{package}{os.pathsep}/mine"
    assert (environment["RAYON_NUM_THREADS"], environment["OMP_NUM_THREADS"]) == ("3", "1")
    assert worker.settings == {
        "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8", "pass_fds": (0, 2),
    }  # fmt: skip
    assert worker.ended and worker.stdin.closed and worker.stdout.closed


def test_no_more_workers_are_started_than_there_are_pieces(workers: type[Worker], job: Job) -> None:
    workers.said = ['{"done": 4}\n{"done": 4}\n'] * 2  # whichever of them gets a piece, or both
    pieces = [piece(number, Path(__file__)) for number in range(2)]
    events = list(tokenize_pieces(pieces, job, processes=8, threads=1, held_open=[]))
    assert events == [PieceDone(number=4)] * 2
    assert len(workers.all) == 2 and all(worker.ended for worker in workers.all)


def test_what_one_worker_refuses_is_raised_and_all_others_end(workers: type[Worker], job: Job) -> None:
    refused = {"kind": "storage", "message": "The disk is full.", "remedy": "Free some space."}
    workers.said = [json.dumps({"refused": refused}) + "\n", ""]
    pieces = [piece(number, Path(__file__)) for number in range(2)]
    with pytest.raises(BloomeryError):
        list(tokenize_pieces(pieces, job, processes=2, threads=1, held_open=[]))
    assert [worker.ended for worker in workers.all] == [True, True]


@pytest.mark.parametrize(
    ("status", "how"),
    [(-9, "was killed by signal 9"), (3, "ended with status 3"), (None, "(process 71) closed its output")],
)
def test_the_death_of_a_worker_is_told_with_the_first_file_of_its_piece(status: int | None, how: str) -> None:
    def wait(timeout: float) -> int | None:
        if status is None:
            raise subprocess.TimeoutExpired("worker", timeout)
        return status

    process: Any = SimpleNamespace(pid=71, wait=wait)
    told = tokenize_pool._death(process, piece(4, Path(__file__), Path(os.__file__)))
    assert told["message"].startswith(f"A worker {how}")
    assert told["message"].endswith(f"while it tokenised {__file__} (piece 4).")
    assert "--workers" in told["remedy"]


def test_a_worker_without_a_piece_is_not_told_among_those_that_are_silent() -> None:
    worker: Any = SimpleNamespace(
        pid=9, stdin=io.StringIO(), stdout=io.StringIO('{"done": 1}\n{"done": 2}\n')
    )
    waiting, at_work = queue.SimpleQueue[TextPiece](), dict[int, TextPiece]()
    pieces = [piece(number, Path(__file__)) for number in (1, 2)]
    for one in pieces:
        waiting.put(one)
    seen: list[dict[int, int]] = []
    messages: Any = SimpleNamespace(
        put=lambda event: seen.append({pid: one.number for pid, one in at_work.items()})
    )
    tokenize_pool._tend(worker, waiting, messages, at_work)
    assert seen == [{9: 1}, {9: 2}] and at_work == {}
    with pytest.raises(DataError, match=r"No worker has reported for 0 s \(process unknown\)"):
        tokenize_pool._next(queue.SimpleQueue(), at_work, silence_s=0.0)


def test_a_piece_of_bad_documents_alone_is_a_piece(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "a.jsonl", *[""] * 1001)
    tokenize_worker.bad_path(tmp_path / "parts", 0).write_text("of a worker that was killed")
    assert served(monkeypatch, plain(job), piece(0, file).to_json()) == [{"done": 0}]
    assert len(tokenize_worker.bad_path(tmp_path / "parts", 0).read_text().splitlines()) == 1001


@pytest.mark.parametrize(("computed_s", "is_given_up"), [(9.0, True), (9.1, False)])
def test_workers_that_compute_for_less_than_a_hundredth_of_the_time_are_given_up(
    computed_s: float, is_given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, messages = iter([100.0, 100.0 + computed_s, 200.0]), iter([{"done": 1}])
    asked = list[float]()

    def get(*, timeout: float) -> dict[str, int]:
        asked.append(timeout)
        if len(asked) == 1:
            raise queue.Empty
        return next(messages)

    monkeypatch.setattr(tokenize_pool, "_computed_s", lambda at_work: next(seconds))
    silent: Any = SimpleNamespace(get=get)
    if is_given_up:
        with pytest.raises(DataError, match="No worker has reported for 900 s"):
            tokenize_pool._next(silent, {})
    else:
        assert tokenize_pool._next(silent, {}) == {"done": 1} and asked == [900.0, 900.0]
