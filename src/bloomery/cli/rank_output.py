"""Shows and logs what the ranks of one machine print.

The pipe of a rank is read until the rank ends, whatever happens to the log and the screen, because a rank
blocks when its pipe is full. A full disk therefore costs lines of a log, and a closed terminal costs what
would have been shown; neither stops a rank.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from bloomery.cli.standard_output import LastingOutput, tell

_JOIN_S = 10.0
_LONGEST_LINE = 1 << 16
"""A longer line is shown and kept in parts: a program that draws a bar may never end its line."""


class RankOutput:
    """Shows and logs what ranks print, with a thread for each rank that reads its pipe until it closes.

    file_of: returns the path of a rank's log file, to which lines are appended.
    on_unlogged: called with a rank and a line that its log did not take; None where nobody else needs it.
    """

    def __init__(
        self, file_of: Callable[[int], Path], *, on_unlogged: Callable[[int, str], None] | None = None
    ) -> None:
        self._file_of, self._on_unlogged = file_of, on_unlogged
        self._screen = LastingOutput(_lost)
        self._threads: list[threading.Thread] = []

    def follow(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Show and log what `process` prints from now on."""
        assert process.stdout is not None, "its output goes to a pipe"
        arguments = (process.stdout, rank, _RankLog(self._file_of(rank)))
        thread = threading.Thread(target=self._copy, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self) -> None:
        """Wait for the last lines of ranks that have ended.

        What a rank had started, and the kernel cannot end while a disk hangs, may keep its pipe open: the
        restart waits once for all of them.
        """
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _copy(self, pipe: IO[bytes], rank: int, log: _RankLog) -> None:
        log.write(b"")  # a rank that says nothing has a log too
        with pipe:
            while line := pipe.readline(_LONGEST_LINE):
                text = line.decode(errors="replace")
                if not log.write(line) and self._on_unlogged is not None:
                    self._on_unlogged(rank, text)
                self._screen.write(f"[rank {rank}] {text}")
        log.close()


class _RankLog:
    """A log file that survives a full disk: it notes the number of lines that could not be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._lines_lost, self._is_reported = 0, False

    def write(self, line: bytes) -> bool:
        """Append a line; return whether the log has it."""
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            if self._lines_lost:
                _write(self._file, f"[{self._lines_lost} lines are missing here]\n".encode())
            _write(self._file, line)
            self._lines_lost, self._is_reported = 0, False
        except OSError as refused:
            if not self._is_reported:
                _warn(f"{self._path} cannot be written ({refused.strerror}): its next lines are only shown")
            self._is_reported = True
            self._lines_lost += 1 if line else 0
            return False
        return True

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


def _write(file: IO[bytes], content: bytes) -> None:
    while content:
        content = content[file.write(content) :]


def _lost(reason: str) -> None:
    _warn(f"what ranks print is no longer shown ({reason}); their logs have it")


def _warn(line: str) -> None:
    tell(f"bloomery launch: {line}")
