"""With what an attempt is begun, and what its result or its failure is told to whom."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.agent.agent_parts import LIMITS, listed, run_at
from tests.agent.round_parts import KEYS, Driven, ring_of
from tests.protocol import example

from bloomery.agent import round_driver
from bloomery.agent.ring_attempt import AttemptFailure, AttemptTimeouts
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import Position
from bloomery.protocol.encoding import decode
from bloomery.protocol.rank_messages import (
    Abort,
    AbortAck,
    Committed,
    KeepAverage,
    RankReady,
    RankRingDone,
    RankRingFailed,
)
from bloomery.protocol.records import Done, Failed


@pytest.fixture
def driven(monkeypatch) -> Driven:
    return Driven(monkeypatch)


def test_an_attempt_is_begun_with_the_settings_of_the_peer_and_the_offers_of_its_members(
    driven: Driven,
) -> None:
    snapshot = ring_of(driven)
    driven.driver.ring(snapshot)
    assert not driven.rings, "its ranks have offered nothing"
    for rank in range(2):
        driven.hear(rank, RankReady(ready=example.ready(round=3), number=0))
    driven.driver.ring(snapshot)
    assert not driven.rings, "they have offered a part of another round"
    driven.offer()
    for not_in in (
        replace(snapshot, tried=None),
        replace(snapshot, members={**snapshot.members, "a": listed("a", life=8)}),
        snapshot.without("a"),
        snapshot.without("c"),
    ):
        driven.driver.ring(not_in)
    assert not driven.rings and not driven.driver.is_ringing
    driven.driver.ring(snapshot)
    (ring,) = driven.rings
    assert snapshot.tried is not None and ring.attempt == snapshot.tried.attempt
    send, wake = ring.how.pop("send"), ring.how.pop("wake")
    stall_s = LIMITS.stall_s  # no step overlaps a ring of this run, whatever a member says of its own
    assert ring.how == {
        "me": "a",
        "members": {name: present.member for name, present in snapshot.members.items()},
        "ranks": 2,
        "streams": 3,
        "links": driven.links,
        "timeouts": AttemptTimeouts(connect_s=LIMITS.connect_s, stall_s=stall_s, ring_s=LIMITS.ring_s),
        "norm_limit": 1.5 * 4.0,
    }
    assert wake is driven.context.wake
    send(1, "message")
    assert driven.ranks.sent == [(1, "message")]


def test_a_ring_is_given_ten_times_what_rings_took_and_two_stalls_at_least(monkeypatch) -> None:
    driven = Driven(monkeypatch, overlaps=True)
    driven.offer()
    driven.driver._ring_seconds.extend((1.0, 500.0, 900.0))
    driven.driver.ring(ring_of(driven))
    assert driven.rings[0].how["timeouts"].ring_s == 5000.0
    assert driven.rings[0].how["timeouts"].stall_s == LIMITS.stall_s + 2 * 2.0, "steps of the slowest member"
    driven.driver.stop()
    driven.driver._called_off = 0
    slow = replace(ring_of(driven).readies["b"], ready=example.ready(peer="b", round=4, step_s=3000.0))
    driven.driver.ring(ring_of(driven, readies={"b": slow}))
    timeouts = driven.rings[1].how["timeouts"]
    assert timeouts.stall_s == LIMITS.stall_s + 6000.0 and timeouts.ring_s == 2 * timeouts.stall_s


def test_the_result_of_a_ring_is_announced_once_and_the_round_goes_to_the_journal(
    driven: Driven, monkeypatch, caplog
) -> None:
    moments = iter([100.0, 103.5, 103.5])
    driven.offer()
    driven.driver.seen, driven.driver.overtaken = 3, 2
    snapshot = ring_of(driven, rates={"b": {"a": 10.0}, "a": {"c": 30.0}})
    driven.driver.ring(snapshot)
    for rank in range(2):
        driven.hear(rank, RankRingDone(epoch=6, digest="d4"))
    for _ in range(2):
        driven.driver.ring(snapshot)
    done = Done(peer="a", round=4, epoch=6, digest="d4")
    ((key, text, round),) = driven.listing.offered
    assert (key, decode(text, Done), round) == (KEYS.done(4, 6, "a"), done, 4)
    assert driven.writer.jobs == ["done"]
    driven.rings[0].reducing_s = next(moments)
    monkeypatch.setattr(round_driver.time, "monotonic", lambda: next(moments))
    commit = example.commit(
        round=4,
        epoch=6,
        members=("a", "b"),
        digest="d4",
        position=Position(consumed=12),
        left_out={"c": "its result differs", "a": "it was slow"},
    )
    driven.driver.follow(replace(snapshot, commits={4: commit}))
    assert driven.events == [
        (
            "round",
            {
                "round": 4,
                "epoch": 6,
                "members": ["a", "b"],
                "ring": ["b", "a", "c"],
                "ring_mbit_s": [10.0, 30.0, None],
                "included": True,
                "ring_s": 3.5,
                "consumed": 12,
                "digest": "d4",
                "rewind_to": None,
            },
        ),
        ("parity", {"round": 4, "whom": "c", "why": "its result differs"}),
        ("left_out", {"round": 4, "whom": "a", "why": "it was slow"}),
    ]
    assert caplog.messages == ["left out of round 4: it was slow"], "what concerns this peer alone"
    assert driven.rings[0].ends == [True] and list(driven.driver._ring_seconds) == [3.5]
    assert driven.ranks.sent == [(None, Committed(commit=commit, included=True))]
    assert (driven.driver.held, driven.driver.seen, driven.driver.overtaken) == ((4, "d4"), 4, 0)
    driven.driver.follow(replace(snapshot, commits={4: commit}))
    assert len(driven.ranks.sent) == 1


def test_a_peer_that_was_not_in_a_round_holds_what_it_held_unless_the_run_went_back(driven: Driven) -> None:
    driven.driver.seen, driven.driver.held = 3, (3, "d3")
    driven.hear(0, example.state_held(round=3, digest="d3"))
    driven.hear(1, example.state_held(round=3, digest="d3"))
    driven.driver.follow(run_at(4, "d4"))
    assert driven.events[0][1]["ring_s"] is None and "ring" not in driven.events[0][1]
    assert (driven.driver.held, driven.driver.overtaken) == ((3, "d3"), 1)
    assert driven.local.holding is not None
    back = example.commit(round=5, digest="d3", members=(), rewind_to=3)
    driven.driver.follow(run_at(5, "d3", commits={5: back}))
    assert driven.driver.held is None and driven.local.holding is None
    assert driven.told(Committed)[-1] == Committed(commit=back, included=False)


def test_the_ranks_keep_the_average_of_a_round_that_a_listed_peer_missed(monkeypatch) -> None:
    asked: list[Any] = []

    def places(commit: Any, snapshot: Any, *, ranks: int) -> list[Path]:
        asked.append((commit, snapshot, ranks))
        return [Path("/kept/0"), Path("/kept/1")]

    driven = Driven(monkeypatch, averages=SimpleNamespace(places=places))
    driven.driver.seen = 3
    commit = example.commit(round=4, epoch=6, members=("a",), digest="d4")
    snapshot = run_at(4, "d4", commits={4: commit})
    driven.driver.follow(snapshot)
    assert asked == [] and driven.driver.overtaken == 1, "it was not in it"
    driven.driver.seen, driven.driver._done = 3, (6, "d4")
    driven.ranks.sent.clear()
    driven.driver.follow(snapshot)
    assert asked == [(commit, snapshot, 2)]
    assert driven.ranks.sent == [
        (0, KeepAverage(epoch=6, digest="d4", file=Path("/kept/0"))),
        (1, KeepAverage(epoch=6, digest="d4", file=Path("/kept/1"))),
        (None, Committed(commit=commit, included=True)),
    ]


ABORTED = "aborted"


def failed_by(driven: Driven, snapshot: RunSnapshot) -> list[Failed]:
    """What is reported once the ranks have read the abort."""
    driven.driver.ring(snapshot)
    assert driven.listing.offered == []
    for rank in range(2):
        driven.hear(rank, AbortAck(epoch=6))
    for _ in range(2):
        driven.driver.ring(snapshot)
    return [decode(text, Failed) for _, text, _ in driven.listing.offered]


@pytest.mark.parametrize(
    ("kind", "culprit", "name"), [("stalled", "next", "c"), ("closed", "previous", "b"), ("norm", None, None)]
)
def test_what_fails_in_a_rank_is_reported_with_the_name_of_the_peer_that_it_blames(
    driven: Driven, kind: str, culprit: str | None, name: str | None
) -> None:
    driven.offer()
    driven.driver.ring(ring_of(driven))
    driven.hear(0, RankRingFailed(epoch=6, kind=kind, culprit=culprit, why="x" * 600))
    told = failed_by(driven, ring_of(driven))
    assert told == [Failed(peer="a", round=4, epoch=6, kind=kind, culprit=name, why="x" * 500)]
    ((key, _, round),) = driven.listing.offered
    assert (key, round) == (KEYS.failed(4, 6, "a"), 4)
    assert driven.events == [("ring_failed", {"round": 4, "epoch": 6, "why": "x" * 600})]
    assert driven.told(Abort) == [Abort(epoch=6, why="x" * 600)] and driven.rings[0].ends == [False]


@pytest.mark.parametrize(
    ("failure", "told", "is_in_journal"),
    [
        (AttemptFailure(kind="unreachable", culprit="c", why="no way"), ("unreachable", "c", "no way"), True),
        ("differ", ("parity", None, "the ranks of this peer differ after the ring"), True),
        ("other", (ABORTED, None, "'c' failed: stalled"), False),
        ("gone", (ABORTED, None, "'b' is gone"), False),
        ("another life", (ABORTED, None, "'b' is gone"), False),
    ],
    ids=["unreachable", "ranks differ", "another failed", "a member is gone", "a member came back"],
)
def test_why_an_attempt_cannot_finish_is_reported_and_is_news_only_where_it_began_here(
    driven: Driven, failure: Any, told: tuple[str, str | None, str], is_in_journal: bool
) -> None:
    driven.offer()
    snapshot = ring_of(driven)
    driven.driver.ring(snapshot)
    if isinstance(failure, AttemptFailure):
        driven.rings[0].failure = failure  # type: ignore[assignment]
    elif failure == "differ":
        for rank in range(2):
            driven.hear(rank, RankRingDone(epoch=6, digest=f"of rank {rank}"))
    elif failure == "other":
        own = example.failed(peer="a", round=4, epoch=6, kind="own")
        earlier = example.failed(peer="b", round=4, epoch=5, kind="earlier")
        later = example.failed(peer="c", round=4, epoch=6, kind="stalled")
        snapshot = ring_of(driven, failures=(own, earlier, later))
    else:
        members = {**snapshot.members, "b": listed("b", life=20)}
        snapshot = snapshot.without("b") if failure == "gone" else replace(snapshot, members=members)
    if failure == "differ":  # each rank has finished, so none has to let go of the ring
        driven.driver.ring(snapshot)
        found = [decode(text, Failed) for _, text, _ in driven.listing.offered]
    else:
        found = failed_by(driven, snapshot)
    assert [(one.kind, one.culprit, one.why) for one in found] == [told]
    assert ("ring_failed" in dict(driven.events)) is is_in_journal


def test_a_result_that_comes_after_its_attempt_was_called_off_is_not_announced(driven: Driven) -> None:
    driven.offer()
    driven.driver.ring(ring_of(driven))
    snapshot = ring_of(driven, failures=(example.failed(peer="c", round=4, epoch=6, kind="stalled"),))
    driven.driver.ring(snapshot)
    for rank in range(2):
        driven.hear(rank, RankRingDone(epoch=6, digest="d4"))
    driven.driver.ring(snapshot)
    assert driven.writer.jobs == ["failed"]
    assert [decode(text, Failed).kind for _, text, _ in driven.listing.offered] == [ABORTED]


def test_a_rank_that_was_only_told_to_stop_is_no_reason_for_a_failure(driven: Driven) -> None:
    driven.offer()
    driven.driver.ring(ring_of(driven))
    driven.hear(0, RankRingFailed(epoch=6, kind="cancelled", culprit=None, why="told to"))
    driven.driver.ring(ring_of(driven))
    assert driven.told(Abort) == [] and driven.driver.is_ringing


def test_an_attempt_that_was_called_off_is_not_begun_again_and_a_later_one_is(driven: Driven) -> None:
    driven.offer()
    snapshot = ring_of(driven)
    assert snapshot.tried is not None
    driven.driver.ring(snapshot)
    later = msgspec.structs.replace(
        snapshot.tried, attempt=msgspec.structs.replace(snapshot.tried.attempt, epoch=7)
    )
    driven.driver.ring(replace(snapshot, tried=later))
    assert [ring.attempt.epoch for ring in driven.rings] == [6, 7]
    assert driven.told(Abort) == [Abort(epoch=6, why="the attempt is over")]
    driven.driver.stop()
    assert driven.told(Abort)[1:] == [Abort(epoch=7, why="this peer is out of the round")]
    driven.driver.ring(replace(snapshot, tried=later))
    assert len(driven.rings) == 2
