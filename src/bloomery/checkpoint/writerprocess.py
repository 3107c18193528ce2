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
from bloomery.errors import BloomeryError, CheckpointError, StorageError

log = logging.getLogger(__name__)

_TRIES = 2
_TICK_S = 0.5
_END_S = 5.0
_START_S = 60.0


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
        """Start it, unless it lives."""
        if self._process is not None and self._process.poll() is None:
            return
        files = [arena.file for arena in self._arenas]
        facts = [str(fact) for arena in self._arenas for fact in (arena.file, arena.bytes)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bloomery.checkpoint.writer", *facts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=files,
            start_new_session=True,  # Ctrl-C is the trainer's, who waits for its writer then
            env={name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")},
        )
        if self._keep is not None:
            self.port = self._exchange({"keep": self._keep}, deadline_s=_START_S)["port"]

    def write(self, order: Mapping[str, Any], *, deadline_s: float) -> dict[str, Any]:
        """Have an order carried out and return the answer; a writer that dies over it is replaced once.

        Raises the error that the writer met, or CheckpointError when it died twice or did not answer in time.
        """
        with self._turn:
            for attempt in range(1, _TRIES + 1):
                if self._closed:
                    break
                try:
                    return _judged(self._ask(order, deadline_s=deadline_s))
                except WriterLost as lost:
                    log.warning("%s (attempt %d of %d): it is started again", lost, attempt, _TRIES)
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
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # it died with an order in the pipe
                    continue
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _ask(self, order: Mapping[str, Any], *, deadline_s: float) -> dict[str, Any]:
        self.start()
        return self._exchange(order, deadline_s=deadline_s)

    def _exchange(self, order: Mapping[str, Any], *, deadline_s: float) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        pid = process.pid
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            answer = _line(process, deadline=time.monotonic() + deadline_s)
        except (OSError, ValueError) as error:  # the pipe broke, or was closed under us
            raise WriterLost(f"the writer (process {pid}) has ended") from error
        return dict(json.loads(answer))


def _line(process: subprocess.Popen[bytes], *, deadline: float) -> bytes:
    """Return the next line that a writer says. Raises OSError when it ends, CheckpointError in time."""
    assert process.stdout is not None
    file, received = process.stdout.fileno(), b""
    while not received.endswith(b"\n"):
        if select.select([file], [], [], _TICK_S)[0]:
            more = os.read(file, 1 << 16)
            if not more:
                process.wait()
                raise OSError("the writer has ended")
            received += more
        elif time.monotonic() > deadline:
            process.kill()  # it would answer to a question of the past
            process.wait()
            raise CheckpointError(
                f"The writer (process {process.pid}) did not finish a checkpoint in time and was ended.",
                remedy="Is the disk stuck (dmesg)? Training went on; the next save is tried as usual.",
            )
    return received


def _judged(answer: dict[str, Any]) -> dict[str, Any]:
    failure = answer.get("failure")
    if failure is None:
        return answer
    kind: type[BloomeryError] = StorageError if failure["kind"] == "storage" else CheckpointError
    raise kind(failure["message"], remedy=failure["remedy"])
