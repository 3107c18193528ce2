"""Catches the signals that end a long-running command, such as `bloomery watch`."""

from __future__ import annotations

import select
import signal
import socket


class EndSignal:
    """Notices SIGINT and SIGTERM from its making on; only the main thread may make one.

    The handler takes no lock. One that sets a `threading.Event` can wait forever, for the thread that it
    interrupts may hold that event's lock.
    """

    def __init__(self) -> None:
        self._came = False
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.settimeout(0.0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)

    def _note(self, number: int, frame: object) -> None:
        self._came = True

    def wait(self, seconds: float) -> bool:
        """Wait for a signal, at most `seconds`; returns whether one has come."""
        if not self._came and select.select([self._woken], [], [], max(0.0, seconds))[0]:
            self._woken.recv(4096)
        return self._came
