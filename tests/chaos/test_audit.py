"""Counting what a rehearsal kept and lost, and seeing what must never be."""

import pytest
from msgspec.structs import replace
from tests.protocol import example

from bloomery.chaos.audit import audit
from bloomery.data.position import Position
from bloomery.protocol.records import Commit


def _commit(round: int, consumed: int, *, holes: tuple[range, ...] = ()) -> Commit:
    return example.commit(
        round=round,
        epoch=round,
        members=("a", "b") if round else (),
        digest="d",
        position=Position(consumed=consumed, holes=holes),
        sources=("a",),
    )


COMMITS = [_commit(0, 0), _commit(1, 32), _commit(2, 64)]
STEPS = [{"event": "start"}, *({"event": "step", "global_batch": 8, "loss": 2.0} for _ in range(5))]


def test_what_was_computed_and_is_in_no_commit_is_lost() -> None:
    account = audit(COMMITS, {"a": STEPS, "b": STEPS}, samples=64)
    assert (account.rounds, account.peers, account.consumed, account.computed) == (2, 2.0, 64, 80)
    assert account.lost_share == pytest.approx(0.2)
    assert account.mistakes == ()


def test_a_sample_that_was_given_out_and_never_came_back_is_seen() -> None:
    (mistake,) = audit(
        [*COMMITS[:2], _commit(2, 64, holes=(range(3, 5),))], {"a": STEPS}, samples=64
    ).mistakes
    assert "2 samples" in mistake


def test_a_round_that_is_missing_and_one_that_goes_back_are_seen() -> None:
    assert "follows" in audit([COMMITS[0], COMMITS[2]], {}, samples=64).mistakes[0]
    back = [COMMITS[0], COMMITS[1], replace(_commit(2, 16), rewind_to=None)]
    assert "less" in audit(back, {}, samples=16).mistakes[0]
    assert audit([*back[:2], replace(back[2], rewind_to=0, members=())], {}, samples=16).mistakes == ()


def test_a_run_that_did_not_end_is_seen() -> None:
    assert "64 of 100" in audit(COMMITS, {}, samples=100).mistakes[0]


def test_a_run_adds_up_over_its_rounds_and_peers() -> None:
    commits = [_commit(0, 0), replace(_commit(3, 32), epoch=9, members=("a", "b", "c")), _commit(4, 50)]
    lost = {"event": "step", "global_batch": 100, "loss": 4.0, "held_out_loss": None}
    told = [
        {"event": "step", "global_batch": 8, "loss": 2.0, "held_out_loss": 3.5},
        {"event": "evaluation", "held_out_loss": 3.0},
        {"event": "step", "global_batch": 8, "loss": 1.0, "held_out_loss": None},
    ]
    account = audit(commits, {"a": told, "b": [lost, lost | {"loss": 5.0}], "c": []}, samples=50)
    assert (account.rounds, account.attempts, account.peers) == (2, 9, 2.5)
    assert (account.consumed, account.computed, account.loss) == (50, 216, (3.0 + 5.0) / 2)
    assert account.to_json()["lost_share"] == account.lost_share == 1 - 50 / 216
    nothing = audit([], {}, samples=5)
    assert (nothing.loss, nothing.peers, nothing.consumed, nothing.lost_share) == (None, 0.0, 0, 0.0)
    assert nothing.mistakes == ("no round was ever committed",)


def test_two_rounds_of_one_attempt_are_seen_and_so_are_the_first_mistakes_of_many() -> None:
    twice = [COMMITS[1], replace(COMMITS[2], epoch=1)]
    (mistake,) = audit(twice, {}, samples=64).mistakes
    assert "no epoch of its own" in mistake
    beginning = [replace(COMMITS[0], epoch=1), COMMITS[1]]
    assert audit(beginning, {}, samples=32).mistakes == (), "the state that all begin with was no attempt"
    many = [_commit(2 * number, number) for number in range(1, 9)]
    mistakes = audit(many, {}, samples=8).mistakes
    assert len(mistakes) == 5 and mistakes[0] == "round 4 follows round 2"


def test_a_run_that_went_back_has_consumed_what_its_newest_state_has_and_needs_no_new_epoch() -> None:
    back = replace(_commit(2, 16), epoch=1, rewind_to=0, members=())
    account = audit([*COMMITS[:2], back], {}, samples=16)
    assert (account.consumed, account.rounds, account.mistakes) == (16, 1, ())
