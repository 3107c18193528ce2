"""Every pair of a phase and a message: which phase follows, with which actions, or that it cannot arrive."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed
from tests.protocol import example

from bloomery.data.position import Position
from bloomery.diloco.kept_states import restored_rounds, stored_rounds
from bloomery.diloco.outer import UnderWay
from bloomery.diloco.outer_loop_state import (
    Admitted,
    AwaitingCommit,
    CheckpointLoaded,
    Decided,
    GoingBack,
    HeldState,
    Idle,
    LoadAccepted,
    Loaded,
    LoadRefused,
    Message,
    MissedRoundMade,
    PartMade,
    Progress,
    Replacing,
    Resumed,
    RoundPhase,
    RoundState,
    SamplesUsed,
    StepRefused,
    TrainingRound,
    UpdateMade,
    Updating,
    WentBack,
)
from bloomery.diloco.part_offer import measured
from bloomery.diloco.peer_vector import FragmentHistory
from bloomery.diloco.round_transition import (
    Action,
    BeginRing,
    CancelRing,
    Do,
    Halt,
    LoadState,
    MoveTo,
    SendReady,
    SendRefused,
    UnexpectedMessage,
    transition,
)
from bloomery.guard.verdict import Rewind, Rung, Save
from bloomery.protocol.rank_messages import (
    Abort,
    CatchUp,
    FlushRound,
    Reduce,
    ReplaceState,
    StartRound,
    StopTraining,
)

SAMPLES = (range(4, 8),)
BEFORE = Position(consumed=4, holes=SAMPLES)
START = StartRound(round=2, position=BEFORE, live=1, samples=SAMPLES, number=0)
READY = example.ready(round=2, tokens=4, spent=SAMPLES, skip=(range(9, 10),))
COMMIT = example.commit(round=2, digest="two", position=Position(consumed=8))
BACK = changed(COMMIT, members=(), digest="zero", rewind_to=0, why="a spike")
ASKED = ReplaceState(round=2, digest="two", position=Position(consumed=8), directory=Path("x"), why="behind")
MISSED = CatchUp(round=2, digest="two", position=Position(consumed=8), file=Path("x"))
ATTEMPT = example.attempt(round=2)
STOP = StopTraining(why="asked to", failed=False)

PHASES: dict[str, RoundPhase] = {
    "loaded": Loaded(rest=Idle()),
    "loaded within": Loaded(rest=Resumed()),
    "idle": Idle(),
    "resumed": Resumed(),
    "training": TrainingRound(start=START),
    "awaiting": AwaitingCommit(start=START, ready=READY),
    "updating": Updating(),
    "going back": GoingBack(commit=BACK),
    "went back": WentBack(commit=BACK, stop=None, rest=Idle()),
    "replacing": Replacing(asked=ASKED),
    "replaced": Replacing(asked=ASKED, rest=Idle()),
    "replaced within": Replacing(asked=ASKED, rest=Resumed()),
}
MESSAGES: dict[str, Message] = {
    "start": START,
    "start of other samples": changed(START, samples=(range(20, 24),)),
    "start of another round": changed(START, round=3),
    "replace": ASKED,
    "flush": FlushRound(round=2),
    "reduce": Reduce(attempt=ATTEMPT, index=0, hops=(), stall_s=1.0, deadline_s=1.0, norm_limit=None),
    "abort": Abort(epoch=1, why=""),
    "stop": STOP,
    "decided with": Decided(commit=COMMIT, is_prepared=True, rewind_step=None, step=3, cursor=8),
    "decided without": Decided(commit=COMMIT, is_prepared=False, rewind_step=None, step=3, cursor=8),
    "decided back": Decided(commit=BACK, is_prepared=False, rewind_step=0, step=3, cursor=8),
    "decided back elsewhere": Decided(commit=BACK, is_prepared=False, rewind_step=None, step=3, cursor=8),
    "checkpoint": CheckpointLoaded(held=HeldState(round=1, digest="one", position=None), rest=Idle()),
    "admitted": Admitted(position=Position(consumed=4)),
    "used": SamplesUsed(steps=1, spent=SAMPLES),
    "part": PartMade(peer="a", tokens_per_sample=1, kept=(), rewind_to=None),
    "step refused": StepRefused(),
    "update made": UpdateMade(),
    "accepted": LoadAccepted(),
    "refused": LoadRefused(why="another", position=Position(consumed=4)),
    "missed round": MissedRoundMade(asked=MISSED, why=""),
    "wrong average": MissedRoundMade(asked=MISSED, why="another state"),
}

Expected = tuple[str, str]
"""(the phase that follows, the actions); the phase stays where it is "="."""
BEGINS: Expected = ("TrainingRound", "MoveTo")
RESTARTS: Expected = ("TrainingRound", "RESET_UPDATE MoveTo")
REPLACES: Expected = ("Replacing", "DROP_RING LoadState")
REDUCES: Expected = ("=", "BeginRing")
LEFT_OUT: Expected = ("=", "DROP_RING REFUSE_UPDATE")
LOSES_ROUND: Expected = ("Idle", "DROP_RING REFUSE_UPDATE")
GOES_BACK: Expected = ("GoingBack", "REFUSE_UPDATE")
ASKS_FOR_STATE: Expected = ("=", "REFUSE_UPDATE HOLD")
STAYS: Expected = ("=", "")

WAITING: dict[str, Expected] = {
    **dict.fromkeys(("start", "start of other samples", "start of another round"), BEGINS),
    "replace": REPLACES,
    "decided with": LEFT_OUT,
    "decided without": LEFT_OUT,
    "decided back": GOES_BACK,
    "decided back elsewhere": ASKS_FOR_STATE,
    "step refused": STAYS,
    "admitted": STAYS,
    "missed round": ("Idle", "ADOPT_UPDATE MoveTo HOLD"),
    "wrong average": ("=", "REFUSE_UPDATE SendRefused HOLD"),
}
ALWAYS: dict[str, Expected] = {
    "flush": STAYS,
    "abort": ("=", "CancelRing"),
    "stop": ("=", "Halt"),
    "used": STAYS,
}
TABLE: dict[str, dict[str, Expected]] = {
    "loaded": {"checkpoint": ("Loaded", ""), "admitted": ("Idle", "SEND_IDENTITY HOLD")},
    "loaded within": {
        "checkpoint": ("Loaded", ""),
        "admitted": ("Resumed", "SEND_IDENTITY MoveTo HOLD"),
    },
    "idle": WAITING,
    "resumed": WAITING,
    "training": {
        "start": BEGINS,
        "start of other samples": BEGINS,
        "start of another round": RESTARTS,
        "replace": REPLACES,
        "flush": ("TrainingRound", ""),
        "decided with": LOSES_ROUND,
        "decided without": LOSES_ROUND,
        "decided back": GOES_BACK,
        "decided back elsewhere": ("Idle", "REFUSE_UPDATE HOLD"),
        "admitted": STAYS,
        "used": ("TrainingRound", ""),
        "part": ("AwaitingCommit", "SendReady"),
        "step refused": STAYS,
    },
    "awaiting": {
        "start": ("=", "SendReady"),
        "start of other samples": ("TrainingRound", "DROP_RING RESET_UPDATE MoveTo"),
        "replace": REPLACES,
        "reduce": REDUCES,
        "decided with": ("Idle", "ADOPT_UPDATE MoveTo HOLD"),
        "decided without": LOSES_ROUND,
        "decided back": GOES_BACK,
        "decided back elsewhere": ("Idle", "REFUSE_UPDATE HOLD"),
        "admitted": STAYS,
        "used": ("AwaitingCommit", ""),
        "step refused": ("TrainingRound", ""),
    },
    "updating": {"admitted": STAYS, "update made": ("Idle", "MoveTo HOLD")},
    "going back": {
        **dict.fromkeys(
            ("decided with", "decided without", "decided back", "decided back elsewhere"), LEFT_OUT
        ),
        "stop": ("GoingBack", "Halt"),
        "checkpoint": ("WentBack", ""),
        "admitted": STAYS,
        "step refused": STAYS,
    },
    "went back": {"stop": ("WentBack", "Halt"), "admitted": ("Idle", "MoveTo HOLD")},
    "replacing": {"checkpoint": ("Replacing", "")},
    "replaced": {
        "checkpoint": ("Replacing", ""),
        "accepted": ("Idle", "MoveTo HOLD"),
        "refused": ("Idle", "SendRefused HOLD"),
    },
    "replaced within": {
        "checkpoint": ("Replacing", ""),
        "refused": ("Resumed", "MoveTo SendRefused HOLD"),
    },
}


def state_in(phase: RoundPhase) -> RoundState:
    held = HeldState(round=1, digest="one", position=Position(consumed=4))
    return RoundState(averages_gradients=False, phase=phase, held=held)


def names(actions: tuple[Action, ...]) -> str:
    return " ".join(action.name if isinstance(action, Do) else type(action).__name__ for action in actions)


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("phase", PHASES)
def test_each_message_in_each_phase_has_the_outcome_of_the_table_or_is_refused(
    phase: str, message: str
) -> None:
    state, expected = state_in(PHASES[phase]), {**ALWAYS, **TABLE[phase]}.get(message)
    if expected is None:
        with pytest.raises(UnexpectedMessage, match=type(MESSAGES[message]).__name__) as told:
            transition(state, MESSAGES[message])
        assert "same command starts the peer again" in told.value.remedy
        return
    following, actions = transition(state, MESSAGES[message])
    assert names(actions) == expected[1]
    if expected[0] == "=":
        assert following.phase == state.phase
    else:
        assert type(following.phase).__name__ == expected[0]


def test_the_table_names_every_phase_and_every_action() -> None:
    assert {type(phase) for phase in PHASES.values()} == set(RoundPhase.__args__)
    walked = " ".join(actions for row in (ALWAYS, *TABLE.values()) for _, actions in row.values()).split()
    others = (SendReady, SendRefused, BeginRing, CancelRing, MoveTo, LoadState, Halt)
    in_asynchronous_rounds = {"REBASE_UPDATE"}
    named = {action.name for action in Do} | {kind.__name__ for kind in others}
    assert set(walked) == named - in_asynchronous_rounds


def test_a_part_that_is_in_the_commit_makes_its_round_the_held_one_and_keeps_the_steps_ahead() -> None:
    offered = AwaitingCommit(start=START, ready=READY, steps=1, spent=(range(8, 12),))
    decided = replace(MESSAGES["decided with"], commit=changed(COMMIT, save=True))
    state, actions = transition(replace(state_in(offered), skips=(range(9, 10),)), decided)
    assert state.held == HeldState(round=2, digest="two", position=Position(consumed=8))
    assert state.phase == Idle(ahead=Progress(round=3, steps=1, spent=(range(8, 12),)))
    assert state.due == Save(judged_step=3, reason="round 2") and state.skips == ()
    assert MoveTo(position=Position(consumed=8)) in actions


def test_averaged_gradients_are_held_once_the_optimizer_made_the_update_with_them() -> None:
    state = replace(state_in(PHASES["awaiting"]), averages_gradients=True)
    state, actions = transition(state, MESSAGES["decided with"])
    assert isinstance(state.phase, Updating) and Do.HOLD not in actions
    state, actions = transition(state, UpdateMade())
    assert state.phase == Idle() and actions == (MoveTo(position=Position(consumed=8)), Do.HOLD)


def test_a_part_that_was_left_out_asks_again_for_what_is_to_be_skipped() -> None:
    state, _ = transition(state_in(PHASES["awaiting"]), MESSAGES["decided without"])
    assert state.skips == READY.skip and state.held.round == 1


def test_work_that_was_done_before_a_round_is_given_out_counts_if_its_samples_are_this_peers() -> None:
    done = Progress(round=2, steps=1, spent=(range(4, 6),))
    under_way = UnderWay(committed=4, live=1)
    state, actions = transition(state_in(Resumed(done=done)), START)
    assert state.phase == TrainingRound(start=START, steps=1, spent=(range(4, 6),))
    position = Position(consumed=6, holes=(range(6, 8),))
    assert actions == (MoveTo(position=position, under_way=under_way),)
    state, actions = transition(state_in(Resumed(done=done)), MESSAGES["start of other samples"])
    assert state.phase == TrainingRound(start=MESSAGES["start of other samples"])
    assert actions == (Do.RESET_UPDATE, MoveTo(position=BEFORE, under_way=under_way))


def test_a_newcomer_that_is_given_its_first_samples_after_it_offered_nothing_trains_on_them() -> None:
    nothing = AwaitingCommit(
        start=changed(START, samples=()), ready=changed(READY, steps=0, tokens=0, spent=())
    )
    state, actions = transition(state_in(nothing), START)
    assert state.phase == TrainingRound(start=START) and actions[0] is Do.DROP_RING
    state, actions = transition(state_in(nothing), nothing.start)
    assert state.phase == nothing and actions == (SendReady(ready=nothing.ready, number=0),)


def test_a_part_says_what_the_guards_want_and_a_rewind_outweighs_a_save() -> None:
    rewind = Rewind(judged_step=3, to_step=1, skip=range(4, 6), reason="a spike")
    state = state_in(TrainingRound(start=START, steps=1, spent=SAMPLES)).asking(
        Save(judged_step=3, reason="")
    )
    part = replace(MESSAGES["part"], rewind_to=1)
    saving, _ = transition(state, part)
    going_back, _ = transition(state.asking(rewind).skipping(range(9, 10)), part)
    assert saving.phase.ready.wants_save
    ready = going_back.phase.ready
    assert (ready.wants_save, ready.rewind_to, ready.why) == (False, 1, "a spike")
    assert ready.skip == (range(4, 6), range(9, 10)) and ready.tokens == 4


@pytest.mark.parametrize("rung", [rung for rung in Rung if rung is not Rung.STOP])
def test_each_rung_is_asked_for_with_the_part_and_carried_out_by_all_as_committed(rung: Rung) -> None:
    rewind = Rewind(judged_step=3, to_step=1, skip=range(4, 6), rung=rung, reason="a spike")
    training = state_in(TrainingRound(start=START, steps=1, spent=SAMPLES)).asking(rewind)
    asking, _ = transition(training, replace(MESSAGES["part"], rewind_to=1))
    assert asking.phase.ready.rung == rung
    decided = replace(MESSAGES["decided back"], commit=changed(BACK, rung=int(rung)))
    for state in (asking, state_in(PHASES["awaiting"])):  # who asked, and who found nothing itself
        back, _ = transition(state, decided)
        assert isinstance(back.due, Rewind) and back.due.rung is rung


def test_a_commit_that_is_known_changes_nothing_and_another_one_of_its_round_ends_the_training() -> None:
    known = replace(MESSAGES["decided with"], commit=changed(COMMIT, round=1, digest="one"))
    state = state_in(PHASES["awaiting"])
    assert transition(state, known) == (state, ())
    _, (halt,) = transition(state, replace(known, commit=changed(known.commit, digest="other")))
    assert isinstance(halt, Halt) and "has lost rounds" in halt.why and not halt.failed


def test_a_stop_that_comes_while_the_run_goes_back_stops_it_once_it_went_back() -> None:
    state, _ = transition(state_in(PHASES["awaiting"]), MESSAGES["decided back"])
    assert isinstance(state.due, Rewind) and state.due.may_start_anew and state.due.to_step == 0
    for message in (STOP, MESSAGES["checkpoint"]):
        state, _ = transition(state, message)
    state, actions = transition(state, MESSAGES["admitted"])
    assert actions == (MoveTo(position=BACK.position), Do.HOLD, Halt(why="asked to", failed=False))
    assert state.phase == Idle() and (state.held.round, state.held.digest) == (2, "zero")


@pytest.mark.parametrize("phase", PHASES)
def test_a_checkpoint_that_was_taken_in_a_phase_is_loaded_as_what_it_was(phase: str) -> None:
    state = state_in(PHASES[phase])
    loaded = restored_rounds(stored_rounds(state, has_feedback=False))
    assert loaded.held == state.held
    assert isinstance(loaded.rest, Resumed) == state.is_within
    again, _ = transition(state_in(Loaded(rest=Idle())), loaded)
    assert again.progress == state.progress


def test_with_fragments_a_part_weighs_the_tokens_since_its_fragment_was_averaged_last() -> None:
    state = replace(state_in(Idle()), fragments=(FragmentHistory(), FragmentHistory()))
    weights, position = [], BEFORE.consumed
    for round, steps in ((2, 1), (3, 3), (4, 2), (5, 1)):
        samples = (range(position, position + 2 * steps),)
        position += 2 * steps
        start = StartRound(
            round=round, position=Position(consumed=position), live=1, samples=samples, number=0
        )
        state, _ = transition(replace(state, phase=Idle()), start)
        state, _ = transition(state, SamplesUsed(steps=steps, spent=samples))
        part = PartMade(peer="a", tokens_per_sample=8, kept=(), rewind_to=None)
        state, (offered,) = transition(state, part)
        assert isinstance(offered, SendReady)
        ready = measured(offered.ready, squares=4.0, feedback=0.0)
        state = replace(state, phase=replace(state.phase, ready=ready))
        weights.append((ready.tokens, ready.weight_tokens, ready.steps, ready.spanned_steps, ready.past))
        commit = changed(COMMIT, round=round, position=Position(consumed=position))
        decided = Decided(commit=commit, is_prepared=True, rewind_step=None, step=round, cursor=position)
        state, _ = transition(state, decided)
    assert weights == [
        (16, 16, 1, 1, ()),
        (48, 64, 3, 4, ()),
        (32, 80, 2, 5, ((1, 2.0),)),
        (16, 48, 1, 3, ((4, 2.0),)),
    ]
    held = restored_rounds(json.loads(json.dumps(stored_rounds(state, has_feedback=False))))
    assert held.fragments == state.fragments
    # A newcomer takes over this state, and counts none of the steps that its source made.
    newcomer = replace(state_in(Replacing(asked=ASKED)), fragments=(FragmentHistory(), FragmentHistory()))
    newcomer, _ = transition(newcomer, held)
    newcomer, _ = transition(newcomer, LoadAccepted())
    assert [(past.steps, past.samples) for past in newcomer.fragments] == [(0, 0), (0, 0)]


def asynchronous(phase: RoundPhase) -> RoundState:
    held = HeldState(round=1, digest="one", position=BEFORE)
    return RoundState(averages_gradients=False, is_asynchronous=True, phase=phase, held=held)


TWO_STEPS = changed(READY, steps=2, spent=(range(4, 6),))
LATE = Decided(commit=COMMIT, is_prepared=False, rewind_step=None, step=3, cursor=8, is_late=True)


@pytest.mark.parametrize(
    ("phase", "progress"),
    [
        (TrainingRound(start=START, steps=2, spent=(range(4, 6),)), (2, (range(4, 6),))),
        (
            AwaitingCommit(
                start=START,
                ready=changed(READY, steps=2, spent=(range(4, 6),)),
                steps=1,
                spent=(range(6, 7),),
            ),
            (3, (range(4, 7),)),
        ),
        (TrainingRound(start=START), None),
    ],
    ids=["training", "awaiting", "no step made"],
)
def test_a_late_peer_keeps_its_steps_through_missed_rounds_and_counts_them_in_a_later_one(
    phase: RoundPhase, progress: tuple | None
) -> None:
    state, actions = transition(asynchronous(phase), LATE)
    assert actions == (Do.DROP_RING, Do.REFUSE_UPDATE)
    ahead = Progress(round=2, steps=progress[0], spent=progress[1]) if progress else None
    assert state.phase == Idle(ahead=ahead)
    again, actions = transition(state, replace(LATE, commit=changed(COMMIT, round=3)))
    assert again == state and Do.RESET_UPDATE not in actions
    state, actions = transition(state, MissedRoundMade(asked=MISSED, why=""))
    assert (Do.REBASE_UPDATE if progress else Do.ADOPT_UPDATE) in actions
    assert state.held.round == 2 and state.phase == Idle(ahead=ahead)
    later = changed(START, round=3, position=Position(consumed=8, holes=SAMPLES))
    state, actions = transition(state, later)
    assert Do.RESET_UPDATE not in actions
    assert (
        state.phase == TrainingRound(start=later, steps=progress[0], spent=progress[1]) if progress else True
    )


def test_a_late_peer_whose_samples_were_given_to_others_drops_its_steps() -> None:
    ahead = Progress(round=2, steps=2, spent=(range(4, 6),))
    state, actions = transition(asynchronous(Idle(ahead=ahead)), changed(START, samples=(range(20, 24),)))
    assert Do.RESET_UPDATE in actions
    assert isinstance(state.phase, TrainingRound) and state.phase.steps == 0


def test_a_peer_whose_part_was_refused_drops_its_steps_before_a_missed_average_moves_its_weights() -> None:
    phase = AwaitingCommit(start=START, ready=READY)
    state, actions = transition(asynchronous(phase), replace(LATE, is_late=False))
    assert Do.RESET_UPDATE in actions and state.phase == Idle()
