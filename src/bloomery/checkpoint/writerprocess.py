"""The trainer's end of the writer: starts it, gives it orders, and starts it again when it has died."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bloomery.checkpoint.arena import Arena
from bloomery.checkpoint.deadlines import WRITER_END_S, WRITER_START_S
from bloomery.errors import BloomeryError, CheckpointError, StorageError

log = logging.getLogger(__name__)

_TRIES = 2
_TICK_S = 0.5


class WriterLost(Exception):
    """The writer died before it answered."""


class WriterProcess:
    """One writer with the arenas it may read. Orders are carried out one after the other.

    keep: what it needs to keep parts of others in memory (see `partner.Keeper`).
    """

    def __init__(self, arenas: Sequence[Arena], *, keep: Mapping[str, Any] | None = None) -> None:
        self.port: int | None = None
        """Where it takes what others want kept in this node's memory; None where it was not told to."""
        self._arenas, self._keep = tuple(arenas), keep
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process's number while there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it, unless it lives. Raises CheckpointError where the system refuses, WriterLost."""
        if self._process is not None and self._process.poll() is None:
            return
        files = [arena.file for arena in self._arenas]
        facts = [str(fact) for arena in self._arenas for fact in (arena.file, arena.bytes)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bloomery.checkpoint.writer", *facts],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=files,
                start_new_session=True,  # Ctrl-C is the trainer's, who waits for its writer then
                env={name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")},
            )
        except OSError as error:
            raise CheckpointError(
                f"The process that writes checkpoints could not be started: {error.strerror or error}.",
                remedy="Is there memory, and may this user start more processes (ulimit -u)?",
            ) from error
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a writer that is stuck reads nothing
        if self._keep is not None:
            line = json.dumps({"keep": self._keep}).encode() + b"\n"
            self.port = self._exchange(line, deadline_s=WRITER_START_S)["port"]

    def write(
        self, order: Mapping[str, Any], *, deadline_s: float, texts: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Have an order carried out and return the answer; a writer that dies over it is replaced once.

        texts: fields of the order that are JSON already. Raises the error that the writer met, or
        CheckpointError when it died twice or did not answer in time.
        """
        if not self._turn.acquire(timeout=deadline_s):
            raise _too_late("The writer is still busy with an earlier checkpoint")
        try:
            deadline = time.monotonic() + deadline_s
            for attempt in range(1, _TRIES + 1):
                if self._closed:
                    break
                line = json.dumps({**order, "attempt": attempt})[:-1]
                line += "".join(f", {json.dumps(key)}: {text}" for key, text in (texts or {}).items())
                try:
                    self.start()
                    left_s = deadline - time.monotonic()
                    return _judged(self._exchange(line.encode() + b"}\n", deadline_s=left_s))
                except WriterLost as lost:
                    log.warning("%s (attempt %d of %d): it is started again", lost, attempt, _TRIES)
        finally:
            self._turn.release()
        raise CheckpointError(
            "The process that writes checkpoints died while it was writing this one.",
            remedy="Was it killed for want of memory (dmesg)? The next save is tried with a new one.",
        )

    def close(self) -> None:
        """End it. What it is writing is not committed then."""
        self._closed = True
        process, self._process = self._process, None
        if process is None:
            return
        _kill(process)
        # Whoever waits for an answer sees the end of the pipe, and lets go of it before we close it.
        if self._turn.acquire(timeout=WRITER_END_S):
            _close_pipes(process)
            self._turn.release()

    def _exchange(self, line: bytes, *, deadline_s: float) -> dict[str, Any]:
        process, deadline = self._process, time.monotonic() + deadline_s
        assert process is not None
        try:
            _say(process, line, deadline=deadline)
            return dict(json.loads(_answer(process, deadline=deadline)))
        except TimeoutError as late:
            # Whatever it would still say answers a question of the past.
            self._process = None
            _kill(process)
            _close_pipes(process)
            raise _too_late(f"The writer (process {process.pid}) did not finish a checkpoint") from late
        except (OSError, ValueError) as error:  # the pipe broke, or was closed under us
            self._process = None
            _kill(process)
            _close_pipes(process)
            raise WriterLost(f"the writer (process {process.pid}) has ended") from error


def _say(process: subprocess.Popen[bytes], line: bytes, *, deadline: float) -> None:
    """Give a writer a line. Raises OSError when it has ended, TimeoutError when it does not read."""
    assert process.stdin is not None
    file, left = process.stdin.fileno(), memoryview(line)
    while left:
        if select.select([], [file], [], _TICK_S)[1]:
            left = left[os.write(file, left) :]
        elif time.monotonic() > deadline:
            raise TimeoutError


def _answer(process: subprocess.Popen[bytes], *, deadline: float) -> bytes:
    """Return the next line that a writer says. Raises OSError when it ends, TimeoutError."""
    assert process.stdout is not None
    file, received = process.stdout.fileno(), b""
    while not received.endswith(b"\n"):
        if select.select([file], [], [], _TICK_S)[0]:
            more = os.read(file, 1 << 16)
            if not more:
                raise OSError("the writer has ended")
            received += more
        elif time.monotonic() > deadline:
            raise TimeoutError
    return received


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a writer. One that the system cannot end, because its disk does not answer, is left behind."""
    process.kill()
    if not _has_ended(process):
        log.warning(
            "process %d, a writer of checkpoints, does not end though it was killed: is the disk stuck?",
            process.pid,
        )


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(WRITER_END_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # it died with an order in the pipe
                continue


def _too_late(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what} in time; it was given up.",
        remedy="Is the disk stuck (dmesg)? Training went on; the next save is tried as usual.",
    )


def _judged(answer: dict[str, Any]) -> dict[str, Any]:
    failure = answer.get("failure")
    if failure is None:
        return answer
    kind: type[BloomeryError] = StorageError if failure["kind"] == "storage" else CheckpointError
    raise kind(failure["message"], remedy=failure["remedy"])
