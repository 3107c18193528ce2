"""The trainer's client of the writer process: starts it, sends write requests, and restarts it if it dies."""

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
from math import inf
from typing import Any

from bloomery.checkpoint.format.deadlines import PROGRESS, WRITER_END_S, WRITER_START_S
from bloomery.checkpoint.writer.shared_buffer import SharedBuffer
from bloomery.errors import BloomeryError, CheckpointError, RunBusy, StorageError

log = logging.getLogger(__name__)

_TRIES = 2
_TICK_S = 0.5


class WriterLost(Exception):
    """The writer process died before it answered."""


class WriterProcess:
    """A writer process with the shared buffers that it may read. It carries out one order after the other.

    replica_server: settings with which the writer accepts replicas of other ranks' parts (see
        `partner.ReplicaServer`), as JSON values; None where it accepts none.
    """

    def __init__(
        self, buffers: Sequence[SharedBuffer], *, replica_server: Mapping[str, Any] | None = None
    ) -> None:
        self.port: int | None = None
        """The port on which the writer accepts replicas; None where it accepts none, and before `start`."""
        self._buffers, self._replica_server = tuple(buffers), replica_server
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()

    @property
    def pid(self) -> int | None:
        """The process id; None while there is no process."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process unless it is alive. Raises CheckpointError where it cannot be, and WriterLost."""
        if self._process is not None and self._process.poll() is None:
            return
        files = [buffer.file for buffer in self._buffers]
        facts = [str(fact) for buffer in self._buffers for fact in (buffer.file, buffer.bytes)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bloomery.checkpoint.writer.process", *facts],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=files,
                start_new_session=True,  # Ctrl-C goes to the trainer alone, which then waits for its writer
                env={name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")},
            )
        except OSError as error:
            raise CheckpointError(
                f"The process that writes checkpoints could not be started: {error.strerror or error}.",
                remedy="Is there memory, and may this user start more processes (ulimit -u)?",
            ) from error
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a stuck writer would block the trainer here
        if self._replica_server is not None:
            line = json.dumps({"replica_server": self._replica_server}).encode() + b"\n"
            self.port = self._exchange(line, deadline_s=WRITER_START_S)["port"]

    def write(
        self,
        order: Mapping[str, Any],
        *,
        deadline_s: float,
        silence_s: float = inf,
        texts: Mapping[str, str] | None = None,
        tries: int = _TRIES,
    ) -> dict[str, Any]:
        """Send an order and return the writer's answer. A writer that dies meanwhile is replaced.

        order: JSON values. texts: further fields of the order that are JSON texts already.
        deadline_s: for everything, in seconds. silence_s: for the next sign of progress.
        tries: how many writers may be tried.
        Raises the error that the writer answered with, or CheckpointError where all died or one was late.
        """
        if not self._turn.acquire(timeout=deadline_s):
            raise _too_late("The writer is still busy with an earlier checkpoint")
        try:
            deadline = time.monotonic() + deadline_s
            for attempt in range(1, tries + 1):
                if self._closing.is_set():
                    break
                line = json.dumps({**order, "attempt": attempt})[:-1]
                line += "".join(f", {json.dumps(key)}: {text}" for key, text in (texts or {}).items())
                try:
                    self.start()
                    left_s = deadline - time.monotonic()
                    answer = self._exchange(line.encode() + b"}\n", deadline_s=left_s, silence_s=silence_s)
                    return _answer_or_raise(answer)
                except WriterLost as lost:
                    if self._closing.is_set():  # `close` ended it while it read a checkpoint back
                        break
                    log.warning("%s (attempt %d of %d)", lost, attempt, tries)
        finally:
            self._turn.release()
        raise CheckpointError(
            "The process that writes checkpoints died while it was writing this one.",
            remedy="Was it killed for want of memory (dmesg)? The next save is tried with a new one.",
        )

    def close(self) -> None:
        """End the process. What it is writing is not committed."""
        self._closing.set()
        process, self._process = self._process, None
        if process is None:
            return
        _kill(process)
        # A thread that waits for an answer sees the end of the pipe; it must be done before the pipe is
        # closed.
        if self._turn.acquire(timeout=WRITER_END_S):
            _close_pipes(process)
            self._turn.release()

    def _exchange(self, line: bytes, *, deadline_s: float, silence_s: float = inf) -> dict[str, Any]:
        process, deadline = self._process, time.monotonic() + deadline_s
        if process is None:
            raise WriterLost("the writer was ended")
        try:
            _send_line(process, line, deadline=min(deadline, time.monotonic() + silence_s))
            return _receive_answer(process, deadline=deadline, silence_s=silence_s)
        except TimeoutError as late:
            # A later answer would be taken for that to the next order, so this writer is not used again.
            self._process = None
            _kill(process)
            _close_pipes(process)
            raise _too_late(
                f"The writer (process {process.pid}) did not finish a checkpoint", why=str(late)
            ) from late
        except (OSError, ValueError) as error:  # the pipe broke, or was closed under us
            self._process = None
            _kill(process)
            _close_pipes(process)
            raise WriterLost(f"the writer (process {process.pid}) has ended") from error


def _send_line(process: subprocess.Popen[bytes], line: bytes, *, deadline: float) -> None:
    """Send a line to a writer. Raises OSError when it has ended, TimeoutError when it does not read."""
    assert process.stdin is not None
    file, left = process.stdin.fileno(), memoryview(line)
    while left:
        if _is_ready(file, select.POLLOUT):
            left = left[os.write(file, left) :]
        elif time.monotonic() > deadline:
            raise TimeoutError


def _receive_answer(process: subprocess.Popen[bytes], *, deadline: float, silence_s: float) -> dict[str, Any]:
    """Return a writer's answer; lines that only say that it goes on are skipped.

    Raises OSError when it has ended, and TimeoutError, with the reason, at the deadline or when the writer
    has made no progress for `silence_s`.
    """
    assert process.stdout is not None
    file, received, heard = process.stdout.fileno(), b"", time.monotonic()
    while True:
        while b"\n" not in received:
            if _is_ready(file, select.POLLIN):
                more = os.read(file, 1 << 16)
                if not more:
                    raise OSError("the writer has ended")
                received += more
            elif time.monotonic() > deadline:
                raise TimeoutError
            elif time.monotonic() - heard > silence_s:
                raise TimeoutError(f"it has made no progress for {silence_s:,.0f} s")
        line, _, received = received.partition(b"\n")
        answer = dict(json.loads(line))
        if PROGRESS not in answer:
            return answer
        heard = time.monotonic()


def _is_ready(file: int, event: int) -> bool:
    """Wait up to _TICK_S until a pipe can be read or written, or has ended; say whether it can."""
    poll = select.poll()  # select takes no descriptor above 1,023
    poll.register(file, event)
    return bool(poll.poll(_TICK_S * 1000))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a writer, and wait a few seconds for its end. One that hangs on a stuck disk is left behind."""
    process.kill()
    if not _has_ended(process):
        log.warning(
            "process %d, a writer of checkpoints, was killed and has not ended: is the disk stuck?",
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


def _too_late(what: str, *, why: str = "") -> CheckpointError:
    return CheckpointError(
        f"{what} in time{f': {why}' if why else ''}; the save was abandoned.",
        remedy="Is the disk stuck (dmesg)? Training goes on, and the next save is tried as usual.",
    )


def _answer_or_raise(answer: dict[str, Any]) -> dict[str, Any]:
    failure = answer.get("failure")
    if failure is None:
        return answer
    kinds: Mapping[str, type[BloomeryError]] = {"storage": StorageError, "busy": RunBusy}
    raise kinds.get(failure["kind"], CheckpointError)(failure["message"], remedy=failure["remedy"])
