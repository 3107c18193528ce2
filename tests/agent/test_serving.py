"""Which copies of states are offered for joining peers, and what becomes of one that cannot be."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.agent.test_ring_attempt import ATTEMPT, DEADLINE_S, Gathered
from tests.agent.test_state_copies import HOLDERS, listed, run
from tests.protocol import example

from bloomery.agent.ring_attempt import AttemptFailure, AttemptStage, AttemptTimeouts, RingAttempt
from bloomery.agent.state_serving import CopyKeeper, PeerStateServer, ReverseConnections, copies_wanted
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.errors import PeerError
from bloomery.protocol.rank_messages import CopyState, StateCopied


def test_a_copy_is_put_among_the_states_under_its_digest() -> None:
    put: list[Any] = []
    states = SimpleNamespace(put=lambda digest, directory, *, round: put.append((digest, directory, round)))
    server: Any = SimpleNamespace(_states=states)
    PeerStateServer.offer(server, Path("/copy"), round=4, digest="d4")
    assert put == [("d4", Path("/copy"), 4)]


@pytest.mark.parametrize("error", [PeerError("no room"), OSError("no room")])
def test_a_copy_that_cannot_be_served_is_told_and_not_named(error: Exception, caplog) -> None:
    def refuse(directory: Path, *, round: int, digest: str) -> None:
        raise error

    copies = [StateCopied(round=5, digest="d5", directory=Path("/copy"))]
    server: Any = SimpleNamespace(offer=refuse, keep=lambda kept: None)
    local: Any = SimpleNamespace(take_copies=lambda: [copies.pop()] if copies else [])
    sent: list[CopyState] = []
    keeper = CopyKeeper(server, SimpleNamespace(send=sent.append), local, me="p00")  # type: ignore[arg-type]
    keeper.update(run())
    assert keeper.made == () and sent == []
    assert caplog.messages == ["round 5 is not served: no room"]


def test_a_copy_is_named_once_and_the_newer_one_last() -> None:
    reported: list[StateCopied] = []
    served: list[str] = []
    server: Any = SimpleNamespace(
        offer=lambda directory, *, round, digest: served.append(digest),
        keep=lambda kept: served.append("kept"),
    )
    local: Any = SimpleNamespace(take_copies=lambda: [reported.pop(0)] if reported else [])
    keeper = CopyKeeper(server, SimpleNamespace(send=lambda told: None), local, me="p00")  # type: ignore[arg-type]
    wanting = [listed("s", digest="own", wants="d4"), listed("t", digest="own", wants="d5")]
    for digest in ("d4", "d4", "d5"):
        reported.append(StateCopied(round=5, digest=digest, directory=Path("/copy")))
        keeper.update(run(*wanting))
    assert keeper.made == ("d4", "d5") and served == ["d4", "d5"]
    keeper.update(run(wanting[1]))
    assert keeper.made == ("d5",) and served[-1] == "kept"


def test_only_who_holds_the_newest_state_and_is_listed_with_an_address_copies_it() -> None:
    newcomer = listed("p10x", digest="own", wants="d5", overtaken=9)
    assert copies_wanted(run(newcomer), me="p00", made=()).makes == "d5"
    assert copies_wanted(run(newcomer), me="p00", made=("d5",)) == CopyState(keep=("d5",), makes="")
    assert copies_wanted(run(newcomer), me="p10x", made=()).makes == ""
    older = listed("p10x", digest="own", wants="d4", overtaken=9)
    assert copies_wanted(run(older), me="p00", made=()).makes == ""
    nothing_committed = RunSnapshot(members=run(newcomer, holders=HOLDERS[:3]).members)
    assert copies_wanted(nothing_committed, me="p00", made=()) == CopyState(keep=(), makes="")
    assert copies_wanted(run(newcomer, holders=HOLDERS[1:]), me="p00", made=()).makes == ""


def test_a_peer_serves_at_its_urls_before_it_has_looked_at_a_run() -> None:
    server: Any = SimpleNamespace(urls=["http://m:1"], serve=None, is_serving=False)
    assert ReverseConnections(SimpleNamespace(), server, [], me="m").serves == ("http://m:1",)  # type: ignore[arg-type]


def begun(attempt: Any, links: Gathered, send: Any) -> RingAttempt:
    """The attempt of peer 'a', of two ranks, once it has told its ranks or failed."""
    woken: queue.SimpleQueue[None] = queue.SimpleQueue()
    made = RingAttempt(
        attempt,
        me="a",
        members={name: example.member(peer=name) for name in attempt.members},
        ranks=2,
        streams=1,
        links=links,  # type: ignore[arg-type]
        timeouts=AttemptTimeouts(connect_s=1.0, stall_s=2.0, ring_s=3.0),
        norm_limit=None,
        send=send,
        wake=lambda: woken.put(None),
    )
    woken.get(timeout=DEADLINE_S)
    return made


def test_a_ring_of_one_needs_no_connections() -> None:
    links, sent = Gathered(), list[Any]()
    alone = example.attempt(round=3, epoch=8, members=("a",))
    attempt = begun(alone, links, lambda rank, reduce: sent.append((rank, reduce.hops, reduce.index)))
    assert sent == [(0, (), 0), (1, (), 0)] and links.asked == {}
    assert attempt.stage is AttemptStage.REDUCING and attempt.failure is None


def test_an_attempt_whose_connections_cannot_be_handed_over_fails_without_a_culprit(caplog) -> None:
    def refuse(rank: int, reduce: Any) -> None:
        raise PeerError("no descriptor is left")

    failed = begun(ATTEMPT, Gathered(), refuse)
    why = "no descriptor is left"
    assert failed.failure == AttemptFailure(kind="unreachable", culprit=None, why=why)
    assert caplog.messages == [f"epoch 8: {why}"]
