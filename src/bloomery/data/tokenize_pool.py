"""Runs the worker processes that tokenise pieces of a corpus, and passes on their progress."""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bloomery.data.tokenize_worker import Job, TextPiece
from bloomery.errors import DataError, StorageError

log = logging.getLogger(__name__)

ENGINE_THREADS = "RAYON_NUM_THREADS"  # both engines read this variable once, when they first work
_SILENCE_S = 900.0  # a batch is a mebibyte, for which the slowest engine needs seconds
_LEAST_SHARE = 0.01
"""Of the time without a message, for which the workers together compute if one is at a long document."""
_ENDING_S = 10.0
_SHOWN = 200


@dataclass(frozen=True, kw_only=True)
class BatchDone:
    """The size of one batch that is done."""

    text_bytes: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class PieceDone:
    """A piece whose pair and result are on the disk."""

    number: int


def tokenize_pieces(
    pieces: Sequence[TextPiece], job: Job, *, processes: int, threads: int, held_open: Sequence[int]
) -> Iterator[BatchDone | PieceDone]:
    """Have worker processes tokenise the pieces; yield each batch and piece that they finish.

    processes, threads: number of processes, and of threads in each.
    held_open: file descriptors that stay open as long as any worker lives, such as a lock's.
    Raises what a worker refused (DataError, StorageError), or DataError for a worker that died or fell
    silent; then all others end.
    """
    waiting: queue.SimpleQueue[TextPiece] = queue.SimpleQueue()
    for piece in pieces:
        waiting.put(piece)
    messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()  # Any: plain JSON
    at_work: dict[int, TextPiece] = {}
    count = min(processes, len(pieces))
    with _started(job, count=count, threads=threads, held_open=held_open) as started:
        for process in started:
            threading.Thread(target=_tend, args=(process, waiting, messages, at_work), daemon=True).start()
        left = len(pieces)
        while left:
            event = _next(messages, at_work)
            if "refused" in event:
                _raise(event["refused"])
            elif "batch" in event:
                size, tokens = event["batch"]
                yield BatchDone(text_bytes=size, tokens=tokens)
            else:
                left -= 1
                yield PieceDone(number=event["done"])


@contextmanager
def _started(
    job: Job, *, count: int, threads: int, held_open: Sequence[int]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start workers, send them the job, and make sure that they are gone when the block ends."""
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        ENGINE_THREADS: str(threads),
        "OMP_NUM_THREADS": "1",
    }
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "bloomery.data.tokenize_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                encoding="utf-8",
                pass_fds=tuple(held_open),
            )
            processes.append(process)
            _give(process, asdict(job))
        yield processes
    finally:
        for process in processes:
            _end(process)


def _give(process: subprocess.Popen[str], what: dict[str, Any]) -> None:
    assert process.stdin is not None, "workers are started with pipes"
    # the worker is gone; its output ends too, and the error is reported there
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        # the system holds the process, which ends when its disk answers
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def _tend(
    process: subprocess.Popen[str],
    waiting: queue.SimpleQueue[TextPiece],
    messages: queue.SimpleQueue[dict[str, Any]],
    at_work: dict[int, TextPiece],
) -> None:
    """Give a worker piece after piece, and pass on its messages. It runs in a thread of its own for each
    worker.
    """
    assert process.stdout is not None, "workers are started with pipes"
    while True:
        try:
            piece = waiting.get_nowait()
        except queue.Empty:
            at_work.pop(process.pid, None)
            return
        at_work[process.pid] = piece
        _give(process, piece.to_json())
        for line in process.stdout:
            try:
                event = json.loads(line)
            except ValueError:  # a worker that is killed may leave half a message: its output ends then
                log.warning("a worker wrote what is no message: %r", line[:_SHOWN])
                continue
            messages.put(event)
            if "done" in event:
                break
            if "refused" in event:
                return
        else:
            messages.put({"refused": {"kind": "data", **_death(process, piece)}})
            return


def _death(process: subprocess.Popen[str], piece: TextPiece) -> dict[str, str]:
    try:
        status = process.wait(_ENDING_S)
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    except subprocess.TimeoutExpired:
        how = f"(process {process.pid}) closed its output and does not end"
    first = piece.files[0]
    return {
        "message": f"A worker {how} while it tokenised {first.path} (piece {piece.number}).",
        "remedy": "If it ran out of memory, give fewer --workers. Finished pieces are kept: start again.",
    }


def _next(
    messages: queue.SimpleQueue[dict[str, Any]],
    at_work: dict[int, TextPiece],
    *,
    silence_s: float = _SILENCE_S,
) -> dict[str, Any]:
    """Return the next message of any worker, for which those that compute are waited for without a limit.

    silence_s: seconds without a message and without a worker that computes after which to give up.
    """
    while True:
        before_s = _computed_s(at_work)
        try:
            return messages.get(timeout=silence_s)
        except queue.Empty:
            busy = ", ".join(f"{pid} at {piece.files[0].path}" for pid, piece in sorted(at_work.items()))
        if _computed_s(at_work) - before_s <= _LEAST_SHARE * silence_s:
            raise DataError(
                f"No worker has reported for {silence_s:.0f} s (process {busy or 'unknown'}).",
                remedy="Look at the disk they read from. Finished pieces are kept: start again.",
            )
        log.warning(
            "no worker has reported for %.0f s, but they compute (process %s): a very long document?",
            *(silence_s, busy),
        )


def _computed_s(at_work: Iterable[int]) -> float:
    """The seconds for which these processes have computed."""
    seconds = 0.0
    for pid in tuple(at_work):
        with suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            seconds += times.user + times.system
    return seconds


def _raise(refused: dict[str, str]) -> None:
    kind = StorageError if refused["kind"] == "storage" else DataError
    raise kind(refused["message"], remedy=refused["remedy"])
