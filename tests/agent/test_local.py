"""What ranks say, put together; and deadlines by phase, on a clock that the test moves."""

from __future__ import annotations

from tests.protocol import example

from bloomery.agent.rank_server import RankGone, RankSent
from bloomery.agent.rank_state import LocalRanks, RankProgress
from bloomery.agent.timeouts import timeouts_of
from bloomery.config.elastic import ElasticSection
from bloomery.protocol.rank_messages import (
    AbortAck,
    Hello,
    Moving,
    RankLeaves,
    RankReady,
    RankRingDone,
    RankRingFailed,
    StateCopied,
    StateHeld,
    StateRefused,
)
from bloomery.protocol.records import Ready

LIMITS = timeouts_of(ElasticSection())


def ranks_of(world: int) -> LocalRanks:
    local = LocalRanks(RankProgress(LIMITS))
    for rank in range(world):
        say(local, rank, Hello(rank=rank, world=world, process=1))
    return local


def say(local: LocalRanks, rank: int, message, *, now: float = 0.0) -> None:
    local.take(RankSent(rank=rank, message=message), now=now)


def holding(digest: str, round: int = 1) -> StateHeld:
    return example.state_held(round=round, digest=digest, step=3, samples=4)


def ready(*, finite: bool = True, round: int = 2) -> Ready:
    return example.ready(peer="a", round=round, steps=1, tokens=8, spent=(range(8),), norm=1.0, finite=finite)


def test_a_peer_holds_what_all_of_its_ranks_hold():
    local = ranks_of(2)
    say(local, 0, holding("x"))
    assert local.holding is None
    say(local, 1, holding("y"))
    assert local.holding is None
    say(local, 1, holding("x"))
    assert local.holding == holding("x")


def test_a_state_is_refused_once_when_all_ranks_have_refused_it():
    local = ranks_of(2)
    say(local, 0, StateRefused(why="other tensors"))
    assert local.take_refusal() is None
    say(local, 1, StateRefused(why="other tensors"))
    assert local.take_refusal() == "other tensors"
    assert local.take_refusal() is None


def test_a_peer_is_ready_when_all_ranks_are_and_one_that_is_not_finite_spoils_it():
    local = ranks_of(2)
    say(local, 0, RankReady(ready=ready(), number=0))
    assert local.ready is None
    say(local, 1, RankReady(ready=ready(finite=False), number=0))
    assert local.ready is not None and not local.ready.finite
    say(local, 1, holding("x", round=2))  # the round is over for it
    assert local.ready is None


def test_a_ring_is_done_when_all_ranks_say_the_same():
    local = ranks_of(2)
    say(local, 0, RankRingDone(epoch=4, digest="x"))
    assert local.digest_of(4) is None
    say(local, 1, RankRingDone(epoch=4, digest="x"))
    assert local.digest_of(4) == "x" and local.digest_of(5) is None
    say(local, 1, RankRingDone(epoch=4, digest="y"))
    assert local.digest_of(4) == ""


def test_ranks_have_stopped_reducing_when_each_has_failed_finished_or_read_the_abort():
    local = ranks_of(3)
    say(local, 0, RankRingFailed(epoch=4, kind="closed", culprit=None, why=""))
    say(local, 1, RankRingDone(epoch=4, digest="x"))
    assert not local.have_stopped_reducing(4)
    say(local, 2, AbortAck(epoch=4))
    assert local.have_stopped_reducing(4) and not local.have_stopped_reducing(5)


def test_who_names_a_culprit_is_heard_first():
    local = ranks_of(2)
    say(local, 0, RankRingFailed(epoch=4, kind="closed", culprit=None, why=""))
    say(local, 1, RankRingFailed(epoch=4, kind="stalled", culprit="b", why=""))
    assert local.failure_of(4).culprit == "b"
    assert local.failure_of(5) is None


def test_a_rank_that_is_gone_or_leaves_is_known():
    local = ranks_of(2)
    assert local.are_here
    say(local, 1, RankLeaves(why="SIGTERM"))
    assert local.leaves == "SIGTERM"
    local.take(RankGone(rank=1, why="it ended"), now=0.0)
    assert not local.are_here and not local.are_gone
    local.take(RankGone(rank=0, why="it ended"), now=0.0)
    assert local.are_gone


def test_a_rank_that_is_gone_is_not_waited_for():
    local = ranks_of(2)
    say(local, 0, Moving(activity="wait", step=0))
    assert local.progress.next_deadline() == LIMITS.start_s  # the other one still starts
    local.take(RankGone(rank=1, why="it ended"), now=1.0)
    assert local.progress.next_deadline() is None and not local.progress.stuck(1e9)


def test_nothing_is_said_for_a_peer_of_which_a_rank_is_missing():
    local = ranks_of(2)
    for rank in (0, 1):
        say(local, rank, holding("x"))
        say(local, rank, RankReady(ready=ready(), number=0))
        say(local, rank, RankRingDone(epoch=4, digest="y"))
        say(local, rank, StateRefused(why="other tensors"))
    assert local.holding and local.ready and local.digest_of(4) == "y"
    local.take(RankGone(rank=1, why="it ended"), now=0.0)
    assert local.holding is None and local.ready is None
    assert local.digest_of(4) is None and local.take_refusal() is None


def test_a_rank_is_stuck_past_the_deadline_of_its_phase():
    local = ranks_of(1)
    progress = local.progress
    assert not progress.stuck(LIMITS.start_s - 1) and progress.stuck(LIMITS.start_s + 1)
    say(local, 0, Moving(activity="step", step=0), now=10.0)
    assert not progress.stuck(10.0 + LIMITS.compile_s - 1)  # the first step may compile
    say(local, 0, Moving(activity="step", step=1), now=12.0)
    assert not progress.stuck(12.0 + LIMITS.step_s - 1)
    assert list(progress.stuck(12.0 + LIMITS.step_s + 1)) == [0]
    say(local, 0, Moving(activity="step", step=2), now=500.0)
    assert not progress.stuck(501.0)


def test_a_rank_that_compiles_has_the_time_of_that_and_no_more():
    local = ranks_of(1)
    say(local, 0, Moving(activity="compile", step=0), now=5.0)
    assert local.progress.next_deadline() == 5.0 + LIMITS.compile_s
    assert not local.progress.stuck(5.0 + LIMITS.compile_s - 1)
    assert list(local.progress.stuck(5.0 + LIMITS.compile_s + 1)) == [0]


def test_a_rank_that_evaluates_has_the_time_of_a_save_and_no_more():
    local = ranks_of(1)
    say(local, 0, Moving(activity="evaluate", step=3), now=5.0)
    assert local.progress.next_deadline() == 5.0 + LIMITS.save_s


def test_steps_that_usually_take_long_are_given_more():
    local = ranks_of(1)
    for step in range(5):
        say(local, 0, Moving(activity="step", step=step), now=30.0 * step)
    assert not local.progress.stuck(120.0 + 299.0) and local.progress.stuck(120.0 + 301.0)


def test_copies_for_newcomers_are_given_what_they_usually_take_and_the_first_the_time_of_a_save():
    local = ranks_of(1)
    say(local, 0, Moving(activity="offer", step=0), now=0.0)
    assert not local.progress.stuck(LIMITS.save_s - 1)
    say(local, 0, holding("x"), now=20.0)
    say(local, 0, Moving(activity="wait", step=0), now=20.0)
    say(local, 0, Moving(activity="offer", step=3), now=100.0)
    assert not local.progress.stuck(299.0) and local.progress.stuck(301.0)


def test_who_waits_for_others_is_never_stuck():
    local = ranks_of(2)
    for rank, phase in enumerate(("wait", "ring")):
        say(local, rank, Moving(activity=phase, step=5), now=0.0)
    assert not local.progress.stuck(1e9) and local.progress.next_deadline() is None


def test_who_waits_and_was_told_to_do_something_is_stuck_when_it_does_not():
    local = ranks_of(2)
    for rank in range(2):
        say(local, rank, Moving(activity="wait", step=5), now=0.0)
    local.progress.expect(now=10.0)
    local.progress.expect(now=20.0)
    say(local, 0, Moving(activity="step", step=5), now=20.0)
    say(local, 0, Moving(activity="wait", step=6), now=21.0)
    assert list(local.progress.stuck(10.0 + LIMITS.step_s + 1)) == [1]
    say(local, 1, holding("x"), now=30.0)  # what it was told comes after this
    assert not local.progress.stuck(30.0 + LIMITS.step_s - 1)
    assert list(local.progress.stuck(30.0 + LIMITS.step_s + 1)) == [1]
    say(local, 1, RankRingDone(epoch=4, digest="x"), now=40.0)
    assert not local.progress.stuck(1e9)
    local.progress.expect(now=50.0)
    local.progress.satisfied()
    assert not local.progress.stuck(1e9)


def test_the_usual_step_of_a_peer_is_the_median_of_its_slowest_rank():
    local = ranks_of(2)
    assert local.progress.usual_step_s() == 0.0
    for rank, seconds in ((0, 1.0), (1, 3.0)):
        for step in range(4):
            say(local, rank, Moving(activity="step", step=step), now=seconds * step)
        say(local, rank, Moving(activity="step", step=4), now=seconds * 3 + 100.0)
    assert local.progress.usual_step_s() == 3.0
    say(local, 0, Moving(activity="step", step=9), now=1e6)  # others lie between: no step took so long
    say(local, 0, Moving(activity="evaluate", step=9), now=2e6)
    say(local, 0, Moving(activity="step", step=10), now=3e6)
    assert local.progress.usual_step_s() == 3.0


def test_the_time_until_a_step_that_does_not_follow_the_last_one_is_that_of_no_step():
    local = ranks_of(1)
    for activity, step, now in (("step", 5, 0.0), ("step", 6, 1.0), ("save", 6, 2.0), ("step", 7, 900.0)):
        say(local, 0, Moving(activity=activity, step=step), now=now)
    assert local.progress.usual_step_s() == 1.0
    say(local, 0, Moving(activity="step", step=9), now=2000.0)
    assert local.progress.usual_step_s() == 1.0


def test_who_holds_the_same_in_other_rounds_holds_nothing_together():
    local = ranks_of(2)
    say(local, 0, holding("x", round=1))
    say(local, 1, holding("x", round=2))
    assert local.holding is None


def test_copies_are_told_once():
    local = ranks_of(2)
    copies = [StateCopied(round=round, digest=f"d{round}", directory=None) for round in (1, 2, 1)]
    for rank, copied in zip((0, 0, 1), copies, strict=True):
        say(local, rank, copied)
    assert local.take_copies() == copies and local.take_copies() == []


def test_an_offer_of_an_earlier_round_is_gone_with_the_state_that_follows_and_a_later_one_stays():
    local = ranks_of(1)
    say(local, 0, RankReady(ready=ready(round=2), number=0))
    say(local, 0, holding("x", round=1))
    assert local.ready is not None
    say(local, 0, holding("x", round=2))
    assert local.ready is None


def test_an_abort_that_was_read_stays_read_when_an_earlier_one_is_told_late():
    local = ranks_of(1)
    say(local, 0, AbortAck(epoch=4))
    say(local, 0, AbortAck(epoch=3))
    assert local.have_stopped_reducing(4) and local.have_stopped_reducing(2)
    say(local, 0, RankRingDone(epoch=6, digest="x"))
    assert local.have_stopped_reducing(5)
