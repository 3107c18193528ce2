"""How long an agent waits for its next event."""

from __future__ import annotations

import queue
import time
from types import SimpleNamespace

import pytest

from bloomery.agent.agent import Agent


class Mailbox:
    """Holds some events; notes how long it was waited for the first one."""

    def __init__(self, *events: str) -> None:
        self.events, self.waits = list(events), list[float]()

    def get(self, timeout: float) -> str:
        self.waits.append(timeout)
        return self.get_nowait()

    def get_nowait(self) -> str:
        if not self.events:
            raise queue.Empty
        return self.events.pop(0)


@pytest.mark.parametrize(("ahead_s", "waits_s"), [(50.0, 50.0), (0.0, 0.0), (-50.0, 0.0)])
def test_it_waits_until_the_moment_that_it_was_given_and_takes_all_that_came(
    ahead_s: float, waits_s: float
) -> None:
    mailbox, taken = Mailbox("one", "two", "three"), list[str]()
    Agent._take_events(
        SimpleNamespace(_mailbox=mailbox, _take=taken.append),
        time.monotonic() + ahead_s,
    )
    assert taken == ["one", "two", "three"]
    (waited,) = mailbox.waits
    assert waited == pytest.approx(waits_s, abs=25.0) and waited <= waits_s
