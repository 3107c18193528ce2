"""Another peer's state: taken or refused, call by call; and what a commit means for who was not in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.diloco.test_outer_loop_calls import COMMIT, Peer, Training, activity, told

from bloomery.config.elastic import ElasticSection
from bloomery.data.position import Position
from bloomery.diloco.kept_states import restored_rounds, stored_rounds
from bloomery.diloco.outer_loop import _UNUSABLE
from bloomery.diloco.outer_loop_state import HeldState, Idle, Resumed, RoundState
from bloomery.errors import CheckpointError
from bloomery.protocol.rank_messages import Abort, Committed, ReplaceState, StopTraining


class OfAnother:
    """A trainer's load and reload, for a peer that is given another's state."""

    def __init__(self, peer: Peer, *, digest: str = "", error: Exception | None = None) -> None:
        self.peer, self.digest, self.error = peer, digest, error

    def load(self, directory: Path, why: str, check: Callable[[], None]) -> Training:
        if self.error is not None:
            raise self.error
        self.peer.loop.load_state_values(self.stored(self.digest))
        check()
        return Training(step=21)

    def reload(self, why: str) -> Training:
        self.peer.loop.load_state_values(self.stored("own"))
        return Training(step=2, position=Position(consumed=1))

    def stored(self, digest: str) -> dict[str, Any]:
        usual = dict(round=3, digest=digest, feedback=True, feedback_of="average", inside=False, within=None)
        return usual | dict(position=None, fragments=[])


def asked_for(digest: str) -> ReplaceState:
    return ReplaceState(
        round=3, digest=digest, position=Position(consumed=12), directory=Path("/given"), why="behind"
    )


def given_a_state(digest: str, error: Exception | None = None) -> tuple[Peer, Training]:
    """A peer that waits and is then given a state; the digest is what it would make of its tensors."""
    peer = Peer(ElasticSection(inner_steps=2))
    of = OfAnother(peer, digest="as stored", error=error)
    hooks = peer.loop._trainer
    peer.loop._trainer = replace(
        hooks,
        load=lambda *given: (hooks.load(*given[:2]), of.load(*given))[1],
        reload=lambda why: (hooks.reload(why), of.reload(why))[1],
    )
    peer.waiting = [asked_for(digest), StopTraining(why="enough", failed=False)]
    return peer, peer.loop.admit(Training())


def test_another_peers_state_is_taken_without_what_is_only_that_peers_own() -> None:
    digest = Peer(ElasticSection(inner_steps=2)).begun_with  # of the same tensors
    peer, state = given_a_state(digest)
    assert state == Training(step=21, position=Position(consumed=12)).halting("enough", failed=False)
    calls = peer.taken()
    begin = calls.index(activity("save", 0))
    assert calls[begin:] == [
        activity("save", 0),
        ("trainer", "wait_staged"),
        ("trainer", "load", Path("/given"), "behind"),
        ("update", "digest"),
        ("update", "follow_loaded"),
        ("trainer", "saves"),
        told(3, digest, 21, Position(consumed=12)),
        activity("wait", 21),
        activity("step", 21),
    ]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, "its tensors are the state {} and wrong of round 3 was asked for"),
        (CheckpointError("it has no manifest"), "it has no manifest"),
        (ValueError("x" * 600), ("ValueError: " + "x" * 600)[:500]),
        (KeyError("round"), "KeyError: 'round'"),
        (TypeError("no number"), "TypeError: no number"),
        (OverflowError("infinite"), "OverflowError: infinite"),
        (AttributeError("no table"), "AttributeError: no table"),
        (AssertionError("no list"), "AssertionError: no list"),
    ],
)
def test_a_state_that_cannot_be_used_is_refused_with_the_reason_and_the_own_one_is_loaded_again(
    error: Exception | None, why: str
) -> None:
    own = Peer(ElasticSection(inner_steps=2)).begun_with
    peer, state = given_a_state("wrong", error)
    assert (state.step, state.position, state.why) == (2, Position(consumed=1), "enough")
    calls = peer.taken()
    expected = why.format(f"{own[:12]},")
    refusals = [call[2] for call in calls if call[1] == "refuse_state"]
    assert refusals == [expected]
    (reason,) = [call[2] for call in calls if call[1] == "reload"]
    assert reason.startswith(f"another peer's state was refused: {expected}")
    assert ("update", "follow_loaded") not in calls
    assert calls[-3:] == [told(3, "own", 2, None), activity("wait", 2), activity("step", 2)]


@pytest.mark.parametrize("hostile", [float("inf"), float("nan"), "x", [], {}, None])
@pytest.mark.parametrize("name", ["round", "within", "position", "fragments"])
def test_values_that_no_peer_writes_are_refused_by_an_error_of_the_state(name: str, hostile: Any) -> None:
    values = stored_rounds(RoundState(averages_gradients=False), has_feedback=False)
    try:
        restored_rounds({**values, name: hostile})
    except _UNUSABLE:
        return
    assert name != "round", "the others may be empty"


def test_an_error_that_is_no_fault_of_the_state_is_not_taken_for_one() -> None:
    with pytest.raises(OSError, match="the disk"):
        given_a_state("wrong", OSError("the disk is full"))


def test_a_state_from_within_a_round_is_not_what_was_asked_for() -> None:
    peer = Peer(ElasticSection(inner_steps=2))
    held = HeldState(round=3, digest="x", position=None)
    peer.loop._rounds = replace(peer.loop._rounds, phase=Resumed(), held=held)
    with pytest.raises(CheckpointError, match=f"{peer.begun_with[:12]} within a round, and") as refused:
        peer.loop._check(asked_for(peer.begun_with))
    assert "memory or disk may be failing" in refused.value.remedy
    peer.loop._rounds = replace(peer.loop._rounds, phase=Idle())
    peer.loop._check(asked_for(peer.begun_with))


@pytest.mark.parametrize(
    ("feedback", "unit", "forgets"), [(True, "average", 0), (True, "part", 1), (False, "average", 1)]
)
def test_a_quantisation_error_of_another_unit_or_of_no_checkpoint_is_forgotten(
    feedback: bool, unit: str, forgets: int
) -> None:
    peer = Peer(ElasticSection(inner_steps=2))
    stored = OfAnother(peer).stored("own") | {"feedback": feedback, "feedback_of": unit}
    peer.loop.load_state_values(stored)
    assert peer.taken() == [("update", "forget_feedback")] * forgets
    assert peer.loop.state_entries() == ("an entry",)
    assert peer.loop.state_values()["feedback"] is True


def test_an_attempt_that_is_cancelled_is_that_of_its_epoch() -> None:
    peer = Peer(ElasticSection(inner_steps=1, overlap_steps=0))
    cancelled = list[int]()
    peer.loop._attempts.cancel = cancelled.append  # type: ignore[method-assign]
    peer.loop._obey(Training(), Abort(epoch=6, why="a test"), can_rewind=False)
    assert cancelled == [6]


@pytest.mark.parametrize(
    ("members", "left_out", "is_late"),
    [(("b",), {}, True), (("b",), {"a": "slow"}, False), (("a", "b"), {}, False), ((), {}, False)],
)
def test_a_peer_is_late_where_others_were_averaged_without_it_for_no_fault_of_its_own(
    members: tuple[str, ...], left_out: dict[str, str], is_late: bool
) -> None:
    peer = Peer(ElasticSection(inner_steps=1, overlap_steps=0))
    told = list[Any]()
    peer.loop._handle = lambda state, message: told.append(message)  # type: ignore[method-assign]
    commit = msgspec.structs.replace(COMMIT, members=members, left_out=left_out, rewind_to=4)
    state = Training(step=6, position=Position(consumed=5, holes=(range(5, 7),)))
    for included, fits, can_rewind in ((True, True, True), (False, True, False), (False, False, False)):
        peer.loop._attempts.fits = lambda asked, fits=fits: asked == commit and fits  # type: ignore[method-assign]
        peer.loop._obey(state, Committed(commit=commit, included=included), can_rewind=can_rewind)
        decided = told.pop()
        assert (decided.commit, decided.is_prepared) == (commit, included)
        assert decided.rewind_step == (9 if can_rewind else None)
        assert (decided.step, decided.cursor, decided.is_late) == (6, state.position.cursor, is_late)
