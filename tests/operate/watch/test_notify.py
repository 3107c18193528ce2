"""Which address an alert is sent to, when again, and what is known of one that came too late."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest

from bloomery.operate.watch import notify
from bloomery.operate.watch.alerts import Alert, AlertWord, WatchCondition
from bloomery.operate.watch.notify import AlertSender

ALERT = Alert(
    run="mine", word=AlertWord.RAISED, condition=WatchCondition(kind="gone", line="no process"), began=0.0
)


class Addresses:
    """Three addresses, of which those of `living` take what is sent; and the clock of their sender."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.living, self.asked = 0.0, set[str](), list[str]()
        monkeypatch.setattr(notify, "send", self._send)
        self.sender = AlertSender("abc", clock=lambda: self.now)

    def _send(self, addresses: list[str], *, title: str, body: str) -> list[int]:
        assert (title, body) == ("[mine] new: gone", "no process")
        self.asked.append("".join(addresses))
        return [place for place, address in enumerate(addresses) if address in self.living]

    def send_at(self, now: float, alert: Alert) -> Alert | None:
        self.now = now
        return self.sender.send(alert)


def test_each_address_is_waited_for_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    them = Addresses(monkeypatch)
    them.living = {"b"}
    owed = them.send_at(0.0, ALERT)
    assert owed is not None and owed.owed == (0, 2)
    assert them.send_at(14.9, owed) == owed and them.asked == ["abc"], "both are left alone for now"
    them.living = {"b", "c"}
    owed = them.send_at(15.0, owed)
    assert owed is not None and owed.owed == (0,) and them.asked == ["abc", "ac"]
    assert them.send_at(45.0, ALERT) is not None and them.asked[2:] == ["abc"], "another alert is owed to all"
    them.living = {"a", "b"}
    owed = them.send_at(110.0, ALERT)
    assert owed is not None and owed.owed == (2,)
    for now, asked in ((124.0, "b"), (125.0, "bc")):
        them.living = {"b"}
        them.asked.clear()
        them.sender._due_s[0] = 1e9
        assert them.send_at(now, ALERT) is not None and them.asked == [asked], (
            "c has failed once since it took"
        )


def test_an_address_that_took_an_alert_waits_as_briefly_as_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    them, waits = Addresses(monkeypatch), list[float]()
    last = 0.0
    for second in range(0, 6000, 5):
        them.asked.clear()
        them.send_at(float(second), ALERT)
        if them.asked:
            waits.append(second - last)
            last = second
    assert waits == [0.0, 15.0, 30.0, 60.0, 120.0, 240.0, 480.0, *[900.0] * len(waits[7:])] and len(waits) > 9
    them.living = set("abc")
    assert them.send_at(10_000.0, ALERT) is None
    them.living = set()
    them.send_at(10_001.0, ALERT)
    assert set(them.sender._due_s.values()) == {10_016.0}


def test_only_places_of_the_addresses_count_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(notify, "_ask", lambda request: asked.append(request) or (4, "1\n0\nbye 1\n2\n-1\n"))
    assert notify.send(["x", "y"], title="t", body="b") == [0, 1]
    assert asked == [{"addresses": ["x", "y"], "title": "t", "body": "b"}]


def test_who_took_an_alert_before_the_time_was_over_does_not_get_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(command: list[str], **more: Any) -> None:
        raise subprocess.TimeoutExpired(command, more["timeout"], output=b"1\n")

    monkeypatch.setattr(subprocess, "run", late)
    assert notify.send(["x", "y"], title="t", body="b") == [1]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: [][0])
    with pytest.raises(IndexError):
        notify.send(["x"], title="t", body="b")


def test_an_alert_that_is_owed_to_nobody_is_sent_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    them = Addresses(monkeypatch)
    assert them.send_at(0.0, replace(ALERT, owed=())) is None and them.asked == []
