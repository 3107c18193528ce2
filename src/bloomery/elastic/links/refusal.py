"""Connections that are not to be: why, and a log that a flood of them cannot fill."""

from __future__ import annotations

import logging
import threading
import time

log = logging.getLogger(__name__)

_PERIOD_S = 10.0
_LINES_A_PERIOD = 10


class Refused(Exception):
    """The other end is not one of us, or not whom it should be, or this is not the time."""


class RefusalLog:
    """Writes each refusal, and of a flood the first lines and a count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = float("-inf")
        self._lines = self._silent = 0
        self.count = 0

    def write(self, origin: str, why: str) -> None:
        """A connection from `origin` was refused. origin: an address."""
        now = time.monotonic()
        with self._lock:
            self.count += 1
            if now - self._began > _PERIOD_S:
                if self._silent:
                    log.warning("%d more connections were refused", self._silent)
                self._began, self._lines, self._silent = now, 0, 0
            self._lines += 1
            self._silent += self._lines > _LINES_A_PERIOD
            is_told = self._lines <= _LINES_A_PERIOD
        if is_told:
            log.warning("refused a connection from %s: %s", origin, why)
