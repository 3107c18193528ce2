"""The driver of a peer's rounds, with all that it tells others."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.agent.agent_parts import LIMITS, SETTINGS, Listing, Ranks, Writer, listed, run_at
from tests.protocol import example

from bloomery.agent import round_driver
from bloomery.agent.rank_server import RankSent
from bloomery.agent.rank_state import LocalRanks, RankProgress
from bloomery.agent.registration import Registration
from bloomery.agent.ring_attempt import AttemptStage
from bloomery.agent.round_driver import RoundDriver
from bloomery.coordination.snapshot import ListedOffer, RunSnapshot
from bloomery.protocol.keys import Keys
from bloomery.protocol.rank_messages import (
    Hello,
    RankReady,
    StartRound,
)
from bloomery.protocol.records import Failed, ProposedAttempt, Ready

KEYS = Keys("r")


class Ring:
    """Stands for an attempt: notes with what it was begun and how it ended."""

    def __init__(self, attempt: Any, **how: Any) -> None:
        self.attempt, self.how, self.ends = attempt, how, list[bool]()
        self.stage, self.failure = AttemptStage.REDUCING, None
        self.began_s = self.reducing_s = time.monotonic()

    def end(self, *, went_well: bool) -> None:
        self.ends.append(went_well)
        self.stage = AttemptStage.OVER


class Driven:
    """The driver of peer 'a' of two ranks, listed in the coordinator, with all that it tells others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, averages: Any = None, **settings: Any) -> None:
        notes: list[Any] = []
        self.rings: list[Ring] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.ranks: Any = Ranks(lambda event: None, notes)
        self.writer = Writer(wake=lambda: None, failed=lambda error: None, notes=notes)
        self.listing = Listing(None, KEYS)
        self.local = LocalRanks(RankProgress(LIMITS))
        for rank in range(2):
            self.hear(rank, Hello(rank=rank, world=2, process=1))
        self.links = object()
        self.context: Any = SimpleNamespace(
            me="a",
            local=self.local,
            keys=KEYS,
            etcd="etcd",
            settings=replace(SETTINGS, **settings),
            connection_manager=SimpleNamespace(pool=self.links),
            rank_server=self.ranks,
            writer=self.writer,
            events=SimpleNamespace(write=lambda event, **fields: self.events.append((event, fields))),
            wake=lambda: None,
        )
        self.registration = Registration(self.context, self.listing)  # type: ignore[arg-type]
        self.registration.publish(example.member(peer="a", incarnation="a1"), after=0)
        self.writer.jobs.clear()
        monkeypatch.setattr(round_driver, "RingAttempt", self._ring)
        self.driver = RoundDriver(self.context, self.registration, self.listing, averages)  # type: ignore[arg-type]

    def hear(self, rank: int, message: Any) -> None:
        self.local.take(RankSent(rank=rank, message=message), now=0.0)

    def offer(self, **fields: Any) -> Ready:
        """Both ranks offer this part, as the answer to the newest StartRound."""
        ready, starts = example.ready(round=4, **fields), self.told(StartRound)
        for rank in range(2):
            self.hear(rank, RankReady(ready=ready, number=starts[-1].number if starts else 0))
        return ready

    def told(self, kind: type) -> list[Any]:
        return [message for _, message in self.ranks.sent if isinstance(message, kind)]

    def _ring(self, attempt: Any, **how: Any) -> Ring:
        self.rings.append(Ring(attempt, **how))
        return self.rings[-1]


def ring_of(driven: Driven, *, failures: tuple[Failed, ...] = (), **changed: Any) -> RunSnapshot:
    """Round 4 with an attempt of 'b', 'a' and 'c' under way, whose offers are known."""
    attempt = example.attempt(round=4, epoch=6, members=("b", "a", "c"), weights=(0.5, 0.25, 0.25))
    members = {name: listed(name, life=life) for life, name in enumerate("abc", start=1)}
    steps_s = {"a": 0.5, "b": 2.0, "c": 1.0}
    readies = {
        name: ListedOffer(
            ready=example.ready(peer=name, round=4, norm=4.0, step_s=steps_s[name]), modified=1, seen_s=0.0
        )
        for name in "abc"
    }
    tried = ProposedAttempt(attempt=attempt, lives=(2, 1, 3), offers=(1, 1, 1))
    usual: dict[str, Any] = dict(members=members, readies=readies, tried=tried, failures=failures)
    return run_at(3, "d3", **usual | changed)
