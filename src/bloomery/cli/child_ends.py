"""Waits for the ends of child processes without asking for them many times a second."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType

_PAUSE_S = 0.05
"""The wait between two questions where the system does not tell of ends."""


class ChildEnds:
    """Tells when one of some child processes ends. A context manager.

    Linux tells it by descriptors of processes. On other systems `wait` is a short pause, so callers look at
    the processes after each call.
    """

    def __init__(self, children: Sequence[subprocess.Popen[bytes]]) -> None:
        self._poll = select.poll()
        self._descriptors: list[int] = []
        self._are_told = hasattr(os, "pidfd_open")
        for child in children:
            self._follow(child.pid)

    def wait(self, timeout_s: float) -> None:
        """Wait until another child has ended, for `timeout_s` seconds at most."""
        if not self._are_told:
            time.sleep(min(timeout_s, _PAUSE_S))
            return
        for descriptor, _ in self._poll.poll(max(0.0, timeout_s) * 1000):
            self._poll.unregister(descriptor)  # or it would be told again at once

    def __enter__(self) -> ChildEnds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _follow(self, pid: int) -> None:
        if not self._are_told:
            return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            # The child's end was taken already, or the kernel has no such descriptors: callers have to look.
            self._are_told = False
            return
        self._descriptors.append(descriptor)
        self._poll.register(descriptor, select.POLLIN)
