"""A clock for commands that wait for hours: their waits move it on."""

from __future__ import annotations

import pytest


class Clock:
    """A clock that waits move on; the signal comes with wait number `ends_at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ends_at: int) -> None:
        self.now, self.waits, self.ends_at = 1_000.0, list[float](), ends_at
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        return len(self.waits) >= self.ends_at
