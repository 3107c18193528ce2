"""Deadlines that messages move, and reports of which some ranks have sent others."""

from __future__ import annotations

import pytest
from tests.agent.test_local import LIMITS, holding, ranks_of, ready, say
from tests.protocol import example

from bloomery.agent.rank_server import RankGone
from bloomery.agent.rank_state import LocalRanks, RankProgress
from bloomery.protocol.rank_messages import (
    DataIdentity,
    Hello,
    Moving,
    RankReady,
    RankRingDone,
    RankRingFailed,
    StateCopied,
    StateRefused,
)


def moves(local: LocalRanks, rank: int, *activities: tuple[str, float]) -> float | None:
    """Let a rank report activities, each at a moment; return the next deadline."""
    for activity, now in activities:
        say(local, rank, Moving(activity=activity, step=3), now=now)
    return local.progress.next_deadline()


def test_a_copy_takes_from_when_its_rank_began_it_however_often_it_says_so():
    local = ranks_of(1)
    deadline = moves(local, 0, ("offer", 100.0), ("offer", 150.0), ("wait", 160.0), ("offer", 1000.0))
    assert deadline == 1000.0 + 10 * 60.0


def test_each_message_of_a_rank_at_work_moves_its_deadline():
    local = ranks_of(1)
    moves(local, 0, ("save", 100.0))
    say(local, 0, holding("x"), now=150.0)
    assert local.progress.next_deadline() == 150.0 + LIMITS.save_s
    say(local, 0, RankRingDone(epoch=1, digest="x"), now=160.0)
    assert local.progress.next_deadline() == 160.0 + LIMITS.save_s


def test_what_comes_before_the_work_that_a_rank_was_told_to_do_gives_it_time_and_the_work_itself_ends_that():
    local = ranks_of(1)
    assert moves(local, 0, ("wait", 0.0)) is None
    say(local, 0, holding("x"), now=5.0)
    assert local.progress.next_deadline() is None, "nothing is expected of it"
    local.progress.expect(now=10.0)
    assert local.progress.next_deadline() == 10.0 + LIMITS.step_s
    for activity, now in (("offer", 20.0), ("save", 30.0), ("wait", 40.0)):
        moves(local, 0, (activity, now), ("ring", now + 1.0))
        assert local.progress.next_deadline() is None, "a ring is the work"
        moves(local, 0, ("wait", now + 2.0))
        local.progress.expect(now=now + 3.0)
        assert moves(local, 0, (activity, now + 4.0), ("wait", now + 5.0)) == now + 5.0 + LIMITS.step_s
    assert moves(local, 0, ("step", 90.0), ("wait", 91.0)) is None


@pytest.mark.parametrize(
    "message", [holding("x"), StateCopied(round=9, digest="y", directory=None)], ids=["holds", "copied"]
)
def test_who_tells_of_its_state_has_not_done_what_it_was_told_and_has_a_deadline_from_then(message):
    local = ranks_of(1)
    moves(local, 0, ("wait", 0.0))
    local.progress.expect(now=10.0)
    say(local, 0, message, now=20.0)
    assert local.progress.next_deadline() == 20.0 + LIMITS.step_s
    say(local, 0, RankReady(ready=ready(), number=0), now=30.0)
    assert local.progress.next_deadline() is None, "this was the answer"


def test_the_first_rank_that_is_due_sets_the_deadline_and_no_rank_is_stuck_at_it():
    local = ranks_of(2)
    moves(local, 1, ("compile", 7.0))
    deadline = moves(local, 0, ("save", 0.0))
    assert deadline == 7.0 + LIMITS.compile_s
    assert local.progress.stuck(deadline) == {}
    assert local.progress.stuck(deadline + 0.5) == {1: f"compile 3 for {LIMITS.compile_s:.0f} s"}
    assert list(local.progress.stuck(1e6)) == [0, 1]
    other = ranks_of(0)
    for rank in (1, 0):
        say(other, rank, Hello(rank=rank, world=2, process=1))
    assert other.progress.stuck(LIMITS.start_s + 1.0) == {
        0: f"start 0 for {LIMITS.start_s + 1.0:.0f} s",
        1: f"start 0 for {LIMITS.start_s + 1.0:.0f} s",
    }
    assert list(other.progress.stuck(1e6)) == [0, 1], "in the order of ranks"


def test_ranks_are_here_once_as_many_have_come_as_the_first_one_says():
    local = LocalRanks(RankProgress(LIMITS))
    assert not local.are_here and not local.are_gone and local.world is None
    say(local, 1, Hello(rank=1, world=2, process=1))
    assert local.world == 2 and not local.are_here
    say(local, 0, Hello(rank=0, world=2, process=1))
    assert local.are_here


def test_the_stream_of_samples_is_what_a_rank_said_last():
    local = ranks_of(1)
    assert local.reading == {}
    for name in ("x", "y"):
        say(local, 0, DataIdentity(identity={"data": name}))
    assert local.reading == {"data": "y"}


def test_of_reports_that_may_differ_that_of_the_first_rank_counts():
    local = LocalRanks(RankProgress(LIMITS))
    for rank in (1, 0):
        say(local, rank, Hello(rank=rank, world=2, process=1))
    for rank in (1, 0):
        say(local, rank, example.state_held(round=1, digest="x", saves=(rank,)))
        say(local, rank, RankReady(ready=example.ready(round=2, why=f"of rank {rank}"), number=0))
        say(local, rank, StateRefused(why=f"rank {rank} refuses"))
    assert local.holding is not None and local.holding.saves == (0,)
    assert local.ready is not None and local.ready.why == "of rank 0"
    assert local.take_refusal() == "rank 0 refuses"


def test_parts_of_different_rounds_are_no_part_of_the_peer():
    local = ranks_of(2)
    say(local, 0, RankReady(ready=ready(round=2), number=0))
    say(local, 1, RankReady(ready=ready(round=3), number=0))
    assert local.ready is None


def test_what_is_to_be_reported_anew_is_not_known_until_it_is():
    local = ranks_of(2)
    for rank in range(2):
        say(local, rank, holding("x"))
        say(local, rank, RankReady(ready=ready(), number=0))
    local.forget_states()
    number = local.next_start()
    for _ in range(2):
        assert local.holding is None and local.ready is None
        say(local, 0, holding("x"))
        say(local, 0, RankReady(ready=ready(), number=number))
    say(local, 1, holding("x"))
    say(local, 1, RankReady(ready=ready(), number=number))
    assert local.holding == holding("x") and local.ready == ready()


def test_a_part_that_was_offered_before_the_round_was_begun_again_does_not_count():
    local = ranks_of(2)
    first, second = local.next_start(), local.next_start()
    for rank in range(2):
        say(local, rank, RankReady(ready=ready(finite=False), number=first))
    assert local.ready is None
    for rank in range(2):
        say(local, rank, RankReady(ready=ready(), number=second))
    assert local.ready == ready()


def test_a_copy_or_a_refusal_changes_nothing_of_what_a_rank_holds_and_offers():
    local = ranks_of(1)
    say(local, 0, holding("x"))
    say(local, 0, RankReady(ready=ready(), number=0))
    say(local, 0, StateCopied(round=9, digest="y", directory=None))
    say(local, 0, StateRefused(why="no"))
    assert local.holding == holding("x") and local.ready == ready()


@pytest.mark.parametrize("last", [RankRingDone(epoch=4, digest="x"), RankRingDone(epoch=3, digest="x")])
def test_a_rank_that_has_done_an_earlier_ring_alone_may_still_use_the_connections_of_this_one(last):
    local = ranks_of(2)
    assert local.failure_of(4) is None
    say(local, 0, RankRingFailed(epoch=5, kind="closed", culprit=None, why=""))
    say(local, 1, last)
    assert local.have_stopped_reducing(4) is (last.epoch == 4)
    local.take(RankGone(rank=0, why="it ended"), now=0.0)
    assert not local.have_stopped_reducing(4), "who is gone has not said so"
