"""What ranks print: each line prefixed by its rank, and in one file a rank."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

_JOIN_S = 10.0


class RankOutput:
    """Reads the pipes of ranks until they close. file_of: a rank's log file; it is appended to."""

    def __init__(self, file_of: Callable[[int], Path]) -> None:
        self._file_of = file_of
        self._threads: list[threading.Thread] = []

    def follow(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Show and keep what `process` prints from now on."""
        assert process.stdout is not None, "its output goes to a pipe"
        path = self._file_of(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        thread = threading.Thread(target=_copy, args=(process.stdout, rank, path), daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self) -> None:
        """Wait for the last lines of ranks that have ended."""
        for thread in self._threads:
            thread.join(_JOIN_S)


def _copy(pipe: IO[bytes], rank: int, path: Path) -> None:
    with pipe, path.open("ab") as kept:
        for line in pipe:
            kept.write(line)
            kept.flush()
            # One write a line, so that lines of two ranks do not mix.
            sys.stdout.write(f"[rank {rank}] {line.decode(errors='replace')}")
            sys.stdout.flush()
