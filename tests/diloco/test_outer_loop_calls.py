"""What an outer loop asks of its agent, its update and its trainer, call by call, in each kind of round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.diloco.recorder import Recorder
from tests.protocol import example

from bloomery.config.elastic import ElasticSection
from bloomery.data.position import Position
from bloomery.diloco.outer import TrainerHooks, UnderWay
from bloomery.diloco.outer_loop import OuterLoop
from bloomery.errors import PeerError
from bloomery.guard.verdict import CarryOn, Rewind, Save, Stop
from bloomery.protocol.rank_messages import (
    AgentMessage,
    Committed,
    CopyState,
    Reduce,
    StartRound,
    StopTraining,
)
from bloomery.protocol.records import Commit, Ready

SHARE = (range(0, 20),)
START = StartRound(round=1, position=Position(holes=SHARE), live=3, samples=SHARE, number=4)
ATTEMPT = example.attempt(round=1, epoch=7, members=("a",), weights=(1.0,))
REDUCE = Reduce(attempt=ATTEMPT, index=0, hops=(), stall_s=1.0, deadline_s=1.0, norm_limit=None)
COMMIT = example.commit(round=1, epoch=7, members=("a",), position=Position(consumed=8))


@dataclass(frozen=True)
class Training:
    """As much of the training's state as the outer loop reads."""

    position: Position = field(default_factory=Position)
    under_way: UnderWay | None = None
    step: int = 0
    done: bool = False
    why: str = ""

    def halting(self, why: str, *, failed: bool) -> Training:
        return replace(self, done=True, why=f"{why}{' (failed)' if failed else ''}")

    def stepped(self, *samples: range) -> Training:
        return replace(self, step=self.step + 1, position=self.position.after(samples))


class Peer:
    """An outer loop of one rank among recorders: `calls` has all that it asked for."""

    def __init__(self, section: ElasticSection, **trainer: Any) -> None:
        self.calls: list[Any] = []
        self.waiting: list[AgentMessage | Callable[[], AgentMessage]] = []
        """What the agent sends while the rank waits for it; what it had sent by the end of a step: `come`."""
        self.come: list[AgentMessage] = []
        agent = Recorder(
            "agent", self.calls, receive=lambda timeout_s: self._next(), peek=lambda: tuple(self.come)
        )
        usual: dict[str, Any] = dict(batch=4, saves=(5, 6), asked_to_stop="", step_of=9, round_before=None)
        recorder = Recorder("trainer", self.calls, **usual | trainer)
        hooks = TrainerHooks(**{name: getattr(recorder, name) for name in TrainerHooks.__dataclass_fields__})
        self.update = Recorder(
            "update",
            self.calls,
            digest="d0",
            prepare="d1",
            offer=lambda round: lambda: (9.0, 4.0),
            pieces=[range(2)],
            values=lambda weight, piece: (torch.zeros(len(piece)), None),
            state_entries=("an entry",),
        )
        self.update.has_feedback, self.update.digest_is_of_state = True, True
        self.loop = OuterLoop(
            section,
            self.update,  # type: ignore[arg-type]
            agent=agent,  # type: ignore[arg-type]
            rings=lambda reduce: pytest.fail("a peer that is alone has no ring"),
            gather=lambda value: [value],
            peer="a",
            salt="s",
            tokens_per_sample=5,
            identity={"data": "x"},
            trainer=hooks,
        )
        self.loop.load_state_values({})
        self.begun_with = self.loop.state_values()["digest"]
        self.calls.clear()

    def _next(self) -> AgentMessage:
        said = self.come.pop(0) if self.come else self.waiting.pop(0)
        return said() if callable(said) else said

    def taken(self) -> list[Any]:
        """The calls since the last time, without those that only look."""
        calls = [
            call
            for call in self.calls
            if call[1] not in ("receive", "peek", "batch", "asked_to_stop", "enter", "keep_offer")
        ]
        self.calls.clear()
        return calls

    def committed(self, commit: Commit = COMMIT, *, included: bool = True) -> Callable[[], AgentMessage]:
        """A commit with the digest that the rank has told of its ring."""

        def made() -> AgentMessage:
            (told,) = [call[2]["digest"] for call in self.calls if call[1] == "report_ring_done"]
            return Committed(commit=msgspec.structs.replace(commit, digest=told), included=included)

        return made


def told(round: int, digest: str, step: int, position: Position | None) -> tuple[Any, ...]:
    held = dict(round=round, digest=digest, step=step, samples=4, position=position, saves=(5, 6))
    return ("agent", "report_state", held)


def activity(what: str, step: int) -> tuple[Any, ...]:
    return ("agent", "report_activity", what, {"step": step})


def offered(steps: int, spent: Iterable[range], kept: Iterable[range] = ()) -> Ready:
    spent = tuple(spent)
    return example.ready(
        peer="a", round=1, steps=steps, tokens=5 * sum(map(len, spent)), norm=3.0, feedback=2.0,
        spent=spent, kept=tuple(kept),
    )  # fmt: skip


IN_RING = [
    ("update", "pieces"),
    ("update", "values", 1.0, range(2)),
    ("update", "prepare"),
    ("agent", "report_ring_done"),
]


def ended(call: Any) -> None:
    """Wait for what a thread does beside the steps."""
    assert call.is_over(60.0)


def without_results(calls: list[Any]) -> list[Any]:
    """The calls, in which those of a ring are named alone."""
    return [call[:2] if call[1] in ("prepare", "report_ring_done") else call for call in calls]


def test_a_round_of_weights_from_the_first_wait_to_the_state_after_it() -> None:
    peer = Peer(ElasticSection(inner_steps=2, overlap_steps=0))
    peer.waiting = [START]
    assert peer.loop.share.lease == ()
    state = peer.loop.admit(Training())
    assert state == Training(position=START.position, under_way=UnderWay(committed=0, live=3))
    assert peer.taken() == [
        ("agent", "report_data_identity", {"data": "x"}),
        ("trainer", "saves"),
        told(0, peer.begun_with, 0, Position()),
        activity("wait", 0),
        activity("step", 0),
    ]
    assert peer.loop.share.lease == SHARE
    peer.loop.average_gradients(state)
    carries_on = CarryOn(judged_step=3)
    state = state.stepped(range(0, 4))
    assert peer.loop.average(state, carries_on) == (state, carries_on)
    assert peer.taken() == [], "there is another step to make"
    state = state.stepped(range(4, 8))
    peer.waiting = [REDUCE, peer.committed(msgspec.structs.replace(COMMIT, save=True))]
    after, verdict = peer.loop.average(state, CarryOn(judged_step=2))
    assert after == replace(state, position=Position(consumed=8), under_way=None)
    assert verdict == Save(judged_step=2, reason="round 1")
    calls, digest = peer.taken(), peer.loop.state_values()["digest"]
    assert without_results(calls) == [
        ("update", "offer", 1),
        ("agent", "offer_part", offered(2, [range(0, 8)]), {"number": START.number}),
        activity("ring", 2),
        *IN_RING,
        ("trainer", "wait_staged"),
        ("update", "adopt"),
        ("trainer", "saves"),
        told(1, digest, 2, Position(consumed=8)),
        activity("save", 2),
    ]
    assert calls[6] == ("agent", "report_ring_done", {"epoch": 7, "digest": digest})
    assert digest != peer.begun_with
    assert peer.loop.share.lease == () and peer.loop.average(after, carries_on)[1] == carries_on


def test_steps_that_overlap_a_round_are_made_of_the_samples_that_were_kept_and_counted_for_the_next() -> None:
    peer = Peer(ElasticSection(inner_steps=2, overlap_steps=2))
    peer.waiting = [START]
    state = peer.loop.admit(Training()).stepped(range(0, 4))
    state = peer.loop.average(state, CarryOn(judged_step=1))[0].stepped(range(4, 8))
    peer.taken()
    state, _ = peer.loop.average(state, CarryOn(judged_step=2))
    part = offered(2, [range(0, 8)], kept=[range(8, 16)])
    assert peer.taken() == [("update", "offer", 1)], "it is offered once its norm is known"
    assert peer.loop.share.lease == (range(8, 16),)
    peer.loop.average_gradients(state)
    assert peer.calls == [("update", "keep_offer")], "the update waits until the weights are copied"
    peer.come = [REDUCE]
    ended(peer.loop._offer._measuring)
    begin = peer.loop._attempts.begin

    def begin_and_end(reduce: Reduce) -> None:
        begin(reduce)
        ended(peer.loop._attempts._running)

    peer.loop._attempts.begin = begin_and_end  # type: ignore[method-assign]
    state, _ = peer.loop.average(state.stepped(range(8, 12)), CarryOn(judged_step=3))
    calls = without_results(peer.taken())
    assert calls == [("agent", "offer_part", part, {"number": START.number}), *IN_RING]
    peer.calls.append(("agent", "report_ring_done", {"digest": peer.loop._attempts._prepared[1]}))
    peer.come = [peer.committed()()]
    state, _ = peer.loop.average(state.stepped(range(12, 16)), CarryOn(judged_step=4))
    assert peer.loop.state_values()["within"] == [2, 2, [[8, 16]]]
    assert state.position == Position(consumed=8) and ("update", "adopt") in peer.taken()


def test_a_round_of_gradients_is_averaged_before_the_update_and_held_after_it() -> None:
    peer = Peer(ElasticSection(average="gradients", inner_steps=1, overlap_steps=0, codec="fp32"))
    peer.waiting = [START]
    state = peer.loop.admit(Training())
    peer.taken()
    peer.waiting = [REDUCE, peer.committed()]
    peer.loop.average_gradients(state)
    assert without_results(peer.taken()) == [
        ("update", "offer", 1),
        ("agent", "offer_part", offered(1, [range(0, 4)]), {"number": START.number}),
        activity("ring", 0),
        *IN_RING,
        ("trainer", "wait_staged"),
        ("update", "adopt"),
    ]
    after, verdict = peer.loop.average(state.stepped(range(0, 4)), CarryOn(judged_step=1))
    assert (after.position, after.under_way, after.step) == (Position(consumed=8), None, 1)
    held = told(1, peer.loop.state_values()["digest"], 1, Position(consumed=8))
    assert peer.taken() == [("trainer", "saves"), held] and verdict == CarryOn(judged_step=1)


def test_a_step_whose_gradients_are_not_averaged_is_not_made() -> None:
    peer = Peer(ElasticSection(average="gradients", inner_steps=1, overlap_steps=0, codec="fp32"))
    peer.waiting = [START]
    state = peer.loop.admit(Training())
    peer.taken()
    peer.waiting = [Committed(commit=COMMIT, included=False)]
    peer.loop.average_gradients(state)
    assert peer.taken()[-3:] == [activity("ring", 0), ("update", "drop_offer"), ("update", "drop_offer")]
    assert peer.loop.average(state.stepped(range(0, 4)), CarryOn(judged_step=1))[0] == state
    peer.loop.average_gradients(state)  # it is in no round
    assert peer.taken() == [("update", "drop_offer")]
    assert peer.loop.average(state.stepped(range(0, 4)), CarryOn(judged_step=2))[0] == state


@pytest.mark.parametrize("lost", [{"epoch": 99}, {"digest": "another"}])
def test_a_peer_whose_part_is_in_a_commit_that_it_has_not_prepared_ends_and_trains_on_nothing_else(
    lost: dict[str, Any],
) -> None:
    peer = Peer(ElasticSection(inner_steps=1, overlap_steps=0))
    peer.waiting = [START]
    state = peer.loop.admit(Training()).stepped(range(0, 4))

    def committed() -> AgentMessage:
        right = peer.committed()()
        return msgspec.structs.replace(right, commit=msgspec.structs.replace(right.commit, **lost))

    peer.waiting = [REDUCE, committed]
    with pytest.raises(PeerError, match="round 1 was committed with this peer's part") as raised:
        peer.loop.average(state, CarryOn(judged_step=1))
    assert "starts the peer again" in str(raised.value.remedy)
    assert ("update", "adopt") not in peer.taken()


def test_who_is_told_to_stop_before_the_gradients_are_averaged_makes_no_step() -> None:
    peer = Peer(ElasticSection(average="gradients", inner_steps=1, overlap_steps=0, codec="fp32"))
    peer.waiting = [START]
    state = peer.loop.admit(Training())
    peer.taken()
    peer.come = [StopTraining(why="enough", failed=True)]
    peer.loop.average_gradients(state)
    assert peer.taken() == [("update", "drop_offer")]
    after, _ = peer.loop.average(state.stepped(range(0, 4)), CarryOn(judged_step=1))
    assert after == state.halting("enough", failed=True)


def test_a_stop_of_this_peers_guards_leaves_the_run_and_is_carried_out_at_once() -> None:
    peer = Peer(ElasticSection(inner_steps=1, overlap_steps=0))
    peer.waiting = [START]
    state = peer.loop.admit(Training()).stepped(range(0, 4))
    peer.taken()
    stop = Stop(judged_step=1, reason="the loss is not finite", failed=True)
    assert peer.loop.average(state, stop) == (state, stop)
    assert peer.taken() == [("agent", "leave", "the loss is not finite")]


@pytest.mark.parametrize(
    ("known", "wanted_by", "is_new", "round"),
    [
        ({6: 3}, None, False, 3),
        ({6: 3}, 8, True, 3),
        ({8: 4}, 8, True, 4),
        ({}, 8, True, 0),
        ({}, None, True, 0),
        ({8: 4}, None, False, None),
    ],
)
def test_a_rewind_goes_to_the_newest_round_that_is_early_enough_or_ends_the_run(
    known: dict[int, int], wanted_by: int | None, is_new: bool, round: int | None
) -> None:
    hooks = Peer(ElasticSection(), round_before=lambda step: known.get(int(step))).loop._trainer
    wanted = Rewind(
        judged_step=9,
        to_step=6,
        skip=range(4),
        reason="a spike",
        latest_step=wanted_by,
        may_start_anew=is_new,
    )
    assert hooks.round_for(wanted) == round
    why = "a spike; no checkpoint of a round is early enough to go back to"
    stop = Stop(judged_step=9, reason=why, failed=True)
    assert hooks.possible(wanted) == (stop if round is None else wanted)
    assert hooks.possible(Save(judged_step=1, reason="x")) == Save(judged_step=1, reason="x")
    asked = replace(wanted, may_go_on=True)
    assert hooks.possible(asked) == (CarryOn(judged_step=wanted.judged_step) if round is None else asked)


@pytest.mark.parametrize(("rewind_to", "step"), [(0, 0), (3, 9)])
def test_a_rewind_that_all_decide_on_is_carried_out_by_who_can(rewind_to: int, step: int) -> None:
    peer = Peer(ElasticSection(inner_steps=1, overlap_steps=0), round_before=3)
    peer.waiting = [START]
    state = peer.loop.admit(Training()).stepped(range(0, 4))
    peer.taken()
    back = msgspec.structs.replace(COMMIT, members=(), rewind_to=rewind_to, why="a spike")
    peer.waiting = [Committed(commit=back, included=False)]
    wanted = Rewind(judged_step=1, to_step=6, skip=range(2, 3), reason="a spike")
    after, verdict = peer.loop.average(state, wanted)
    part = msgspec.structs.replace(
        offered(1, [range(0, 4)]), rewind_to=3, why="a spike", skip=(range(2, 3),), rung=int(wanted.rung)
    )
    calls = peer.taken()
    assert ("agent", "offer_part", part, {"number": START.number}) in calls and after == state
    assert [call for call in calls if call[1] == "step_of"] == [("trainer", "step_of", 3)] * bool(rewind_to)
    assert isinstance(verdict, Rewind)
    assert (verdict.to_step, verdict.may_start_anew, verdict.judged_step) == (step, rewind_to == 0, 1)


def test_what_is_not_to_be_used_is_asked_for_with_the_next_part() -> None:
    peer = Peer(ElasticSection(inner_steps=1, overlap_steps=0))
    peer.waiting = [START]
    state = peer.loop.admit(Training())
    assert peer.loop.skipping(state, range(30, 32)) is state
    peer.taken()
    peer.waiting = [StopTraining(why="enough", failed=False)]
    peer.loop.average(state.stepped(range(0, 4)), Save(judged_step=1, reason="by the hour"))
    (part,) = [call[2] for call in peer.taken() if call[1] == "offer_part"]
    assert (part.skip, part.wants_save) == ((range(30, 32),), True)


def test_a_newcomer_without_samples_brings_nothing_to_the_ring_and_follows_the_others() -> None:
    for average, codec in (("gradients", "fp32"), ("weights", "int8")):
        section = ElasticSection(average=average, inner_steps=1, overlap_steps=0, codec=codec)
        peer = Peer(section, follow=lambda state: replace(state, step=1))
        enough = StopTraining(why="enough", failed=False)
        peer.waiting = [msgspec.structs.replace(START, samples=()), REDUCE, peer.committed(), enough]
        state = peer.loop.admit(Training())
        calls = peer.taken()[4:]  # what it tells before the round, and that it waits
        assert without_results(calls)[:7] == [
            ("update", "offer_nothing"),
            ("update", "offer", 1),
            ("agent", "offer_part", offered(0, []), {"number": START.number}),
            activity("ring", 0),
            *IN_RING[:3],
        ]
        followed = [call for call in calls if call[1] == "follow"]
        in_round = Training(position=START.position, under_way=UnderWay(committed=0, live=3))
        assert followed == [("trainer", "follow", in_round)] * (average == "gradients")
        assert (state.position, state.under_way) == (Position(consumed=8), None)
        assert state.step == (average == "gradients")


def test_who_stopped_after_its_last_step_of_a_round_offers_it_at_once_and_cannot_go_back_before_a_step() -> (
    None
):
    peer = Peer(ElasticSection(inner_steps=2, overlap_steps=0))
    stored = peer.loop.state_values() | {"inside": True, "within": [1, 2, [[0, 8]]]}
    peer.loop.load_state_values(stored)
    back = msgspec.structs.replace(COMMIT, members=(), rewind_to=3, why="a spike")
    peer.waiting = [START, Committed(commit=back, included=False), StopTraining(why="enough", failed=False)]
    peer.loop.admit(Training(step=2, position=Position(holes=SHARE).after([range(0, 8)])))
    calls = peer.taken()
    assert ("agent", "offer_part", offered(2, [range(0, 8)]), {"number": START.number}) in calls
    assert not [call for call in calls if call[1] == "step_of"]
    few = Peer(ElasticSection(inner_steps=2, overlap_steps=0))
    few.waiting = [msgspec.structs.replace(START, samples=(range(0, 2),))]
    few.loop.admit(Training())  # to make the step that is left to it
    assert not [call for call in few.taken() if call[1] == "offer_part"]


def test_a_step_on_gradients_that_a_stop_cut_off_is_made_before_it_is_offered() -> None:
    peer = Peer(ElasticSection(average="gradients", inner_steps=1, overlap_steps=0, codec="fp32"))
    peer.loop.load_state_values(peer.loop.state_values() | {"inside": True, "within": [1, 1, [[0, 4]]]})
    peer.waiting = [START]
    state = peer.loop.admit(Training(step=1, position=Position(holes=SHARE).after([range(0, 4)])))
    assert peer.loop.share.lease == SHARE and not state.done
    assert not [call for call in peer.taken() if call[1] == "offer_part"]


def test_who_waits_for_samples_goes_back_by_anothers_state_alone() -> None:
    peer = Peer(ElasticSection(inner_steps=1, overlap_steps=0))
    back = msgspec.structs.replace(COMMIT, members=(), rewind_to=3, why="a spike")
    peer.waiting = [Committed(commit=back, included=False), StopTraining(why="enough", failed=False)]
    assert peer.loop.admit(Training()).done
    calls = peer.taken()
    assert not [call for call in calls if call[1] == "step_of"]
    assert ("update", "drop_offer") in calls and calls[-3] == told(0, peer.begun_with, 0, Position())


def test_a_copy_that_is_asked_for_during_a_ring_is_made_once_that_is_over() -> None:
    for overlap_steps in (0, 1):
        peer = Peer(ElasticSection(inner_steps=1, overlap_steps=overlap_steps), copy=Path("/copy"))
        peer.waiting = [START]
        state = peer.loop.admit(Training()).stepped(range(0, 4))
        asked = CopyState(keep=(), makes=peer.begun_with)
        if overlap_steps:
            state = peer.loop.average(state, CarryOn(judged_step=1))[0].stepped(range(4, 8))
            peer.come = [REDUCE, asked]
        else:
            peer.loop._copies.take(asked)
            peer.waiting = [REDUCE]
        peer.waiting += [StopTraining(why="enough", failed=False)]
        peer.loop.average(state, CarryOn(judged_step=2))
        calls = peer.taken()
        copied = ("agent", "report_copy", {"round": 0, "digest": peer.begun_with, "directory": Path("/copy")})
        assert calls.index(copied) > [call[1] for call in calls].index("report_ring_done")
