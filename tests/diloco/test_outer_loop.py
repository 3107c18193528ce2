"""What the outer loop takes from a checkpoint."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from tests.diloco.test_outer_loop_calls import Peer
from tests.diloco.test_pseudo_gradient import OneTensor
from tests.protocol import example
from torch import Tensor

from bloomery.config.elastic import ElasticSection
from bloomery.data.position import Position
from bloomery.diloco.all_reduce import RingFailed
from bloomery.diloco.outer_loop import OuterLoop
from bloomery.diloco.outer_loop_state import HeldState, Idle, Updating
from bloomery.diloco.peer_vector import FragmentHistory
from bloomery.diloco.pseudo_gradient import PseudoGradient
from bloomery.errors import CheckpointError
from bloomery.events.heartbeat import RankActivity, ignore_activity
from bloomery.protocol.rank_messages import Committed, CopyState, Reduce, StartRound, StopTraining

DEADLINE_S = 60.0


@dataclass(frozen=True)
class State:
    """As much of the training's state as a copy needs."""

    under_way: str | None
    step: int = 0


class Update:
    """Notes how often it was begun and how often it forgot its quantisation error."""

    has_feedback = True
    digest_is_of_state = False

    def __init__(self) -> None:
        self.begun = self.forgotten = 0

    def begin(self) -> None:
        self.begun += 1

    def forget_feedback(self) -> None:
        self.forgotten += 1

    def digest(self) -> str:
        return "0" * 32


def loop_of(update: object, **given: object) -> OuterLoop:
    """The loop of a peer of one rank."""
    usual = dict(agent=None, rings=None, trainer=SimpleNamespace(asked_to_stop=str, enter=ignore_activity))
    usual |= dict(gather=lambda value: [value], peer="a", salt="", tokens_per_sample=4, identity={})
    return OuterLoop(ElasticSection(inner_steps=3), update, **usual | given)  # type: ignore[arg-type]


@pytest.mark.parametrize("had_feedback", [True, False])
def test_a_checkpoint_without_quantisation_error_leaves_none_of_what_went_before(had_feedback: bool) -> None:
    update = Update()
    loop = loop_of(update)
    loop.load_state_values({})
    assert (update.begun, update.forgotten) == (1, 0)
    update.has_feedback = had_feedback
    stored = json.loads(json.dumps(loop.state_values()))
    loop.load_state_values(stored)
    assert (update.begun, update.forgotten) == (1, 0 if had_feedback else 1)
    assert json.loads(json.dumps(loop.state_values())) == stored


@pytest.mark.parametrize("is_of_state", [True, False])
def test_another_peers_state_is_judged_by_its_tensors_where_they_have_a_digest(is_of_state: bool) -> None:
    update = Update()
    update.digest_is_of_state = is_of_state
    loop = loop_of(update)
    of_tensors = loop._digest_of(update.digest())
    loop._rounds = replace(loop._rounds, held=HeldState(round=3, digest="as stored", position=None))
    right, wrong = (of_tensors, "as stored") if is_of_state else ("as stored", of_tensors)
    loop._check(SimpleNamespace(digest=right))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):
        loop._check(SimpleNamespace(digest=wrong, directory="x", round=3))  # type: ignore[arg-type]


class HeldRing:
    """A ring that goes on until it is cancelled."""

    codec = "fp32"

    def __init__(self) -> None:
        self.cancelled, self.closed = threading.Event(), threading.Event()

    def all_reduce(self, values: Tensor, *, weight: float, residual: Tensor | None) -> None:
        assert self.cancelled.wait(DEADLINE_S)
        raise RingFailed("cancelled", kind="cancelled")

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.closed.set()


def test_a_ring_that_is_under_way_when_a_checkpoint_is_loaded_ends_and_nothing_comes_of_it() -> None:
    """As when the whole run goes back: what the ring averages is of steps that do not count."""
    ring, update = HeldRing(), PseudoGradient(OneTensor(64), ElasticSection(inner_steps=3))
    loop = loop_of(update, rings=lambda reduce: ring)
    loop.load_state_values({})
    update.offer(1)
    attempt = example.attempt(round=1, epoch=7, members=("a", "b"), weights=(0.5, 0.5))
    loop._attempts.begin(
        Reduce(attempt=attempt, index=0, hops=(), stall_s=1.0, deadline_s=1.0, norm_limit=None)
    )
    loop.load_state_values({})
    assert ring.closed.wait(DEADLINE_S) and not loop._attempts.is_under_way


@pytest.mark.parametrize("needs", ["the ring", "the update", "nothing"])
def test_a_copy_that_is_asked_for_while_the_weights_are_needed_is_made_once_they_are_not(needs: str) -> None:
    copied, state = list[str | None](), State(under_way="a round")
    trainer = SimpleNamespace(
        asked_to_stop=str,
        enter=ignore_activity,
        wait_staged=lambda: None,
        copy=lambda state: copied.append(state.under_way),
        remove_copy=pytest.fail,
    )
    agent = SimpleNamespace(report_activity=lambda *told, **more: None, report_copy=lambda **told: None)
    loop = loop_of(PseudoGradient(OneTensor(64), ElasticSection(inner_steps=3)), agent=agent, trainer=trainer)
    loop.load_state_values({})
    asked = CopyState(keep=(), makes=loop._rounds.held.digest)
    before = loop._rounds
    if needs == "the ring":
        loop._attempts = SimpleNamespace(is_under_way=True)  # type: ignore[assignment]
    elif needs == "the update":
        loop._rounds = replace(before, phase=Updating())
    assert loop._obey(state, asked, can_rewind=False) is state
    assert copied == ([None] if needs == "nothing" else [])
    loop._attempts, loop._rounds = SimpleNamespace(is_under_way=False), before  # type: ignore[assignment]
    loop._copy_if_asked(state)
    loop._copy_if_asked(state)
    assert copied == [None], "it is made once, of the committed state"
    assert loop._rounds == before


@dataclass(frozen=True)
class Training:
    """As much of the training's state as a peer needs that waits for samples."""

    position: Position = field(default_factory=Position)
    under_way: object = None
    step: int = 0
    done: bool = False

    def halting(self, why: str, *, failed: bool) -> Training:
        return replace(self, done=True)


def test_a_newcomer_that_has_nothing_when_the_run_goes_back_is_given_a_state_and_goes_back_to_none() -> None:
    """It has made no step, so there is nothing of its own to go back to."""
    commit = example.commit(round=1, members=(), digest="another", rewind_to=0)
    commands = [
        StartRound(round=1, position=Position(), live=2, samples=(), number=0),
        Committed(commit=commit, included=False),
        StopTraining(why="the test is over", failed=False),
    ]
    held = list[int]()
    agent = SimpleNamespace(
        report_activity=lambda *told, **more: None,
        report_state=lambda *, round, **more: held.append(round),
        offer_part=lambda ready, number: None,
        receive=lambda timeout_s: commands.pop(0),
    )
    trainer = SimpleNamespace(
        asked_to_stop=str, enter=ignore_activity, batch=lambda state: 4, saves=tuple, step_of=pytest.fail
    )
    loop = loop_of(PseudoGradient(OneTensor(64), ElasticSection(inner_steps=3)), agent=agent, trainer=trainer)
    loop.load_state_values({})
    assert loop.admit(Training()).done and not commands
    assert loop._rounds.phase == Idle() and loop._rounds.due is None
    assert held == [0, 0], "it tells again what it holds, and is given the run's state"


@pytest.mark.parametrize(
    ("section", "averages_gradients", "is_asynchronous", "fragments"),
    [
        (ElasticSection(inner_steps=3), False, False, 1),
        (ElasticSection(inner_steps=4, fragments=2), False, False, 2),
        (ElasticSection(inner_steps=4, quorum=1, overlap_steps=1), False, True, 1),
        (ElasticSection(inner_steps=1, average="gradients", codec="fp32"), True, False, 1),
    ],
)
def test_rounds_are_of_the_kind_that_the_recipe_says(
    section: ElasticSection, averages_gradients: bool, is_asynchronous: bool, fragments: int
) -> None:
    rounds = Peer(section).loop._rounds
    assert (rounds.averages_gradients, rounds.is_asynchronous) == (averages_gradients, is_asynchronous)
    assert rounds.fragments == (FragmentHistory(),) * fragments


def test_a_wait_for_a_round_is_told_to_the_heartbeat_and_looks_whether_the_rank_is_asked_to_stop() -> None:
    peer = Peer(ElasticSection(inner_steps=1, overlap_steps=0), asked_to_stop="signal 15")
    peer.waiting = [StopTraining(why="signal 15", failed=False)]
    assert peer.loop.admit(Training()).done
    assert ("agent", "leave", "signal 15") in peer.calls
    entered = [call[2] for call in peer.calls if call[:2] == ("trainer", "enter")]
    assert entered == [RankActivity.WAITING_FOR_PEERS, RankActivity.BETWEEN_STEPS]
