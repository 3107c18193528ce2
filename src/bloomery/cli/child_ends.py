"""Waits for child processes to exit, and for signals, on Linux without polling."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from types import TracebackType

_PAUSE_S = 0.05
"""The seconds of one wait where the system has no descriptors of processes."""


class ChildEnds:
    """Tells when one of some child processes ends, or a signal comes. A context manager.

    Linux tells it by descriptors of processes. On other systems `wait` is a short pause, so callers poll
    the processes after each call.

    A signal ends `wait` by the descriptor that Python writes to. One that comes just before the wait begins,
    or to another thread, interrupts no system call of this thread: its handler would run after the wait.
    """

    def __init__(self, children: Sequence[subprocess.Popen[bytes]]) -> None:
        self._poll = select.poll()
        self._descriptors: list[int] = []
        self._are_told = hasattr(os, "pidfd_open")
        self._signalled, self._signals = socket.socketpair()
        for end in (self._signalled, self._signals):
            end.settimeout(0.0)
        self._poll.register(self._signalled, select.POLLIN)
        self._is_on_main_thread = threading.current_thread() is threading.main_thread()
        if self._is_on_main_thread:  # the only one that may ask for it, and that runs the handlers
            self._wakeup_before = signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        for child in children:
            self._follow(child.pid)

    def wait(self, timeout_s: float) -> None:
        """Wait until another child has ended or a signal has come, for `timeout_s` seconds at most."""
        if not self._are_told:
            time.sleep(max(0.0, min(timeout_s, _PAUSE_S)))
            return
        for descriptor, _ in self._poll.poll(max(0.0, timeout_s) * 1000):
            if descriptor == self._signalled.fileno():
                self._signalled.recv(4096)
            else:
                self._poll.unregister(descriptor)  # or it would be told again at once

    def __enter__(self) -> ChildEnds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_on_main_thread:
            signal.set_wakeup_fd(self._wakeup_before)
        self._signalled.close()
        self._signals.close()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _follow(self, pid: int) -> None:
        if not self._are_told:
            return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            # The child's end was taken already, or the kernel has no such descriptors: callers have to poll.
            self._are_told = False
            return
        self._descriptors.append(descriptor)
        self._poll.register(descriptor, select.POLLIN)
