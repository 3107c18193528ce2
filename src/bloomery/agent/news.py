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
_BURST_S, _BURST_AT_MOST_S = 1.5e-4, 0.02
"""It lasts also this time for each member, up to so much: all of them write at nearly the same moment, and
most of what an agent spends on a change is the look that it causes. No round waits longer for it."""
_WAIT_S = 60.0


def pause_s(look_s: float, *, members: int) -> float:
    """Return how long the run is not looked at after a look, seconds.

    look_s: the processor time of that look. members: how many are listed.
    """
    return max(_PAUSES * look_s, min(_BURST_S * members, _BURST_AT_MOST_S))


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
        self._pause_s = 0.0

    def start(self, version: int) -> None:
        """Begin to follow the view. version: of the snapshot that was looked at last."""
        bring = reporting_errors(lambda: self._bring(version), name="news", on_error=self._failed)
        threading.Thread(target=bring, name="news", daemon=True).start()

    def looked(self, seconds: float, *, members: int) -> None:
        """Note how much processor time the last look at the run took, and how many members it saw."""
        self._pause_s = pause_s(seconds, members=members)

    def close(self) -> None:
        """Follow the view no longer."""
        self._ended.set()

    def _bring(self, version: int) -> None:
        while not self._ended.is_set():
            newest = self._view.wait(version, timeout_s=_WAIT_S)
            if newest > version:
                version = newest
                self._wake()
                self._ended.wait(self._pause_s)
