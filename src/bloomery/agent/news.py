"""Wakes an agent's loop when the run has changed, so rarely that looking at it takes a part of one core."""

from __future__ import annotations

import threading
from collections.abc import Callable

from bloomery.coordination.run_view import RunView
from bloomery.errors import CoordinatorError, reporting_errors

_PAUSES = 3.0
"""A look at the run is followed by a pause of so many times the processor time that it took.

Hundreds of members write thousands of keys a round, and a look costs in proportion to the members. So the
looks of a round cost in proportion to the members too, and not to their square.
"""
_WAIT_S = 60.0


class News:
    """Follows a view on a thread of its own, from `start` until `close`.

    wake: called whenever a newer snapshot can be looked at.
    failed: called with the error that ended the view.
    """

    def __init__(
        self, view: RunView, *, wake: Callable[[], None], failed: Callable[[CoordinatorError], None]
    ) -> None:
        self._view, self._wake, self._failed = view, wake, failed
        self._ended = threading.Event()
        self._look_s = 0.0

    def start(self, version: int) -> None:
        """Begin to follow the view. version: of the snapshot that was looked at last."""
        bring = reporting_errors(lambda: self._bring(version), name="news", on_error=self._failed)
        threading.Thread(target=bring, name="news", daemon=True).start()

    def looked(self, seconds: float) -> None:
        """Note how much processor time the last look at the run took."""
        self._look_s = seconds

    def close(self) -> None:
        """Follow the view no longer."""
        self._ended.set()

    def _bring(self, version: int) -> None:
        while not self._ended.is_set():
            newest = self._view.wait(version, timeout_s=_WAIT_S)
            if newest > version:
                version = newest
                self._wake()
                self._ended.wait(_PAUSES * self._look_s)
