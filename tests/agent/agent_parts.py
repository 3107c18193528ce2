"""An agent whose ranks, coordinator and connections are given, and which notes what it tells them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.protocol import example

from bloomery.agent import agent as agent_module
from bloomery.agent.admission import fingerprint
from bloomery.agent.agent import Agent
from bloomery.agent.agent_context import PeerSettings
from bloomery.agent.rank_server import RankSent
from bloomery.agent.timeouts import timeouts_of
from bloomery.config.elastic import ElasticSection
from bloomery.coordination.eligibility import RoundSettings
from bloomery.coordination.etcd import TransactionResult
from bloomery.coordination.snapshot import ListedMember, ListedShares, RunSnapshot
from bloomery.data.position import Position
from bloomery.protocol.rank_messages import DataIdentity, Hello, StateHeld
from bloomery.protocol.records import Member, RoundShares

SHARED = {"run.seed": "1", "data": "x"}
"""The settings that all peers have, those of the stream of samples included."""
LIMITS = timeouts_of(ElasticSection())
SETTINGS = PeerSettings(
    run="r",
    peer="a",
    incarnation="a1",
    settings={"run.seed": "1"},
    rounds=RoundSettings(inner_steps=4, total_samples=1000, grace_s=60.0),
    timeouts=LIMITS,
    streams=3,
)


class Ranks:
    """Stands for the server of the ranks: notes what each was sent, with None for all of them."""

    path = Path("/nowhere/parent")

    def __init__(self, on_event: Callable[[Any], None], notes: list[Any]) -> None:
        self.sent: list[tuple[int | None, Any]] = []
        self._notes = notes

    def send(self, message: Any, *, rank: int | None = None) -> None:
        self.sent.append((rank, message))

    def wait_until_gone(self, timeout_s: float) -> None:
        self._notes.append(("ranks gone?", timeout_s))

    def close(self) -> None:
        self._notes.append("ranks closed")


class Writer:
    """Runs each job at once. jobs: their names, with those that come first or are tried once marked."""

    def __init__(self, *, wake: Callable[[], None], failed: Callable[[Any], None], notes: list[Any]) -> None:
        self.jobs: list[str] = []
        self.busy: set[str] = set()
        self._notes = notes

    def write(self, name: str, run: Callable[[], None], *, repeats: bool = True, first: bool = False) -> None:
        self.jobs.append(name + (" first" if first else "") + ("" if repeats else " once"))
        run()

    def is_at(self, name: str) -> bool:
        return name in self.busy

    def close(self, *, within_s: float) -> None:
        self._notes.append(("writer closed", within_s))


class Listing:
    """Stands for the membership: notes what was written on its lease."""

    def __init__(self, etcd: Any, keys: Any, **how: Any) -> None:
        self.how, self.lease, self.round_trip_s = how, 0, 0.25
        self.listed: list[Member] = []
        self.kept: list[tuple[str, str]] = []
        self.offered: list[tuple[str, str, int]] = []
        self.withdrawn = 0

    def join(self, member: Member) -> None:
        self.lease = 77
        self.listed.append(member)

    def update(self, member: Member) -> None:
        self.listed.append(member)

    def withdraw(self) -> None:
        self.lease, self.withdrawn = 0, self.withdrawn + 1

    def keep(self, key: str, value: str) -> None:
        self.kept.append((key, value))

    def offer(self, key: str, value: str, *, round: int, is_report: bool = False) -> None:
        assert is_report == ("/done/" in key or "/failed/" in key)
        self.offered.append((key, value, round))


class Led:
    """An agent 'a', what its parts were made with, and what it has told whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, settings: PeerSettings, **more: Any) -> None:
        self.notes: list[Any] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.view: Any = SimpleNamespace(
            snapshot=RunSnapshot(),
            start=lambda **how: self.notes.append(("view started", how)),
            close=lambda: self.notes.append("view closed"),
        )
        self.listener: Any = SimpleNamespace(
            start=lambda version: self.notes.append(("listener started", version)),
            note_cost=lambda seconds: None,
            close=lambda: self.notes.append("listener closed"),
        )
        self.made: dict[str, Any] = {}
        self.transactions: list[tuple[Any, Any]] = []

        def view(etcd: Any, keys: Any, **how: Any) -> Any:
            self.made["view"] = how
            return self.view

        def membership(etcd: Any, keys: Any, **how: Any) -> Any:
            self.made["membership"] = how
            return Listing(etcd, keys)

        monkeypatch.setattr(agent_module, "RankServer", lambda put: Ranks(put, self.notes))
        monkeypatch.setattr(agent_module, "CoordinatorWriter", lambda **how: Writer(**how, notes=self.notes))
        monkeypatch.setattr(agent_module, "Membership", membership)
        monkeypatch.setattr(agent_module, "RunView", view)
        monkeypatch.setattr(agent_module, "SnapshotListener", lambda view, **how: self.listener)
        self.pool_kept: list[set[tuple[str, str]]] = []
        self.connections: Any = SimpleNamespace(
            addresses=("a:1",),
            pool=SimpleNamespace(keep=self.pool_kept.append),
            reach=None,
            revoke=lambda serials: None,
            relays_for=lambda me: [],
            keep_reverse_connections=lambda points, serve: None,
        )
        self.knowledge: Any = SimpleNamespace(
            remembered=None,
            note=lambda snapshot: None,
            contradiction=lambda snapshot, holding: None,
            recovery_record=lambda snapshot, holding: None,
        )
        server: Any = SimpleNamespace(
            urls=("http://a:2",), is_serving=False, serve=None, keep=lambda kept: None
        )
        self.agent = Agent(
            settings,
            etcd=SimpleNamespace(transact=self._transact, get=lambda key: None),  # type: ignore[arg-type]
            connection_manager=self.connections,
            server=server,
            fetch=None,  # type: ignore[arg-type]
            events=SimpleNamespace(write=self._note),  # type: ignore[arg-type]
            knowledge=self.knowledge,
            **more,
        )
        self.ranks: Any = self.agent._rank_server
        self.listing: Any = self.agent._membership
        self.writer: Any = self.agent._writer

    def hear(self, rank: int, message: Any) -> None:
        self.agent._take(RankSent(rank=rank, message=message))

    def begin(self, *, world: int = 2, round: int = 0, digest: str = "d0") -> None:
        """Its ranks are here, and hold this state."""
        for rank in range(world):
            self.hear(rank, Hello(rank=rank, world=world, process=1))
        self.hear(0, DataIdentity(identity={"data": "x"}))
        self.hold(world=world, round=round, digest=digest)

    def hold(self, *, world: int = 2, round: int = 0, digest: str = "d0") -> None:
        for rank in range(world):
            self.hear(rank, held(round=round, digest=digest))

    def step(self, snapshot: RunSnapshot, now: float | None = None) -> float:
        self.view.snapshot = snapshot
        return self.agent._step(snapshot, time.monotonic() if now is None else now)

    def _transact(self, conditions: Any, operations: Any) -> TransactionResult:
        self.transactions.append((conditions, operations))
        return TransactionResult.DONE

    def _note(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))


def held(*, round: int, digest: str) -> StateHeld:
    return example.state_held(
        round=round, digest=digest, samples=4, position=Position(consumed=40), saves=(0, 3)
    )


def listed(name: str, *, life: int = 1, **fields: Any) -> ListedMember:
    usual = {"incarnation": f"{name}1", "digest": "d0", "ranks": 2, "recipe": fingerprint(SHARED)}
    member = example.member(peer=name, **usual | fields)
    return ListedMember(member=member, life=life, modified=life, seen_s=0.0, said_s=0.0)


def run_at(round: int, digest: str, *, share: bool = True, consumed: int = 0, **changed: Any) -> RunSnapshot:
    """Round `round` is committed with this state, and 'a' is listed."""
    position = Position(consumed=consumed, holes=(range(consumed, consumed + 16),))
    shares = RoundShares(
        round=round + 1, position=position, shares={"a": position.holes} if share else {}, live=1
    )
    usual: dict[str, Any] = dict(
        epoch=round,
        own_highest=round,
        members={"a": listed("a")},
        commits={round: example.commit(round=round, digest=digest, members=("b",), position=position)},
        commit_revision=30 + round,
        standing=ListedShares(shares=shares, modified=1),
    )
    return RunSnapshot(**usual | changed)
