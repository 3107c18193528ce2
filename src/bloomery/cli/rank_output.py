"""What ranks print: each line prefixed by its rank, and in one file a rank.

Reading never ends before a rank does: a rank whose pipe nobody reads stands still at one of its next lines.
So a full disk costs lines of a log, and a screen that is gone what would have been shown.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

_JOIN_S = 10.0


class RankOutput:
    """Reads the pipes of ranks until they close. file_of: a rank's log file; it is appended to."""

    def __init__(self, file_of: Callable[[int], Path]) -> None:
        self._file_of = file_of
        self._shown = _Shown()
        self._threads: list[threading.Thread] = []

    def follow(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Show and keep what `process` prints from now on."""
        assert process.stdout is not None, "its output goes to a pipe"
        arguments = (process.stdout, rank, _Kept(self._file_of(rank)), self._shown)
        thread = threading.Thread(target=_copy, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self) -> None:
        """Wait for the last lines of ranks that have ended."""
        for thread in self._threads:
            thread.join(_JOIN_S)


def _copy(pipe: IO[bytes], rank: int, kept: _Kept, shown: _Shown) -> None:
    kept.take(b"")  # a rank that says nothing has a log too
    with pipe:
        for line in pipe:
            kept.take(line)
            shown.take(f"[rank {rank}] {line.decode(errors='replace')}")
    kept.close()


class _Kept:
    """A log that takes lines while the disk does, and says how many it did not take."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._missing, self._told = 0, False

    def take(self, line: bytes) -> None:
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            if self._missing:
                _write(self._file, f"[{self._missing} lines are missing here]\n".encode())
            _write(self._file, line)
            self._missing, self._told = 0, False
        except OSError as refused:
            if not self._told:
                _tell(f"{self._path} cannot be written ({refused.strerror}): its next lines are only shown")
            self._told = True
            self._missing += 1 if line else 0

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


class _Shown:
    """Our output, until it is closed or takes no more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gone = False

    def take(self, line: str) -> None:
        with self._lock:  # so that lines of two ranks do not mix
            if self._gone:
                return
            try:
                sys.stdout.write(line)
                sys.stdout.flush()
            except OSError as refused:
                self._gone = True
                _tell(f"what ranks print is no longer shown ({refused.strerror}); their logs have it")
                with suppress(OSError):  # what is buffered would be tried again at the end, and fail there
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write(file: IO[bytes], content: bytes) -> None:
    while content:
        content = content[file.write(content) :]


def _tell(line: str) -> None:
    with suppress(OSError):
        print(f"bloomery launch: {line}", file=sys.stderr, flush=True)
