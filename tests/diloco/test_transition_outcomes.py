"""What follows from each message to the last field: the whole state, and each action with what it carries."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed
from tests.diloco.test_round_transition import (
    ASKED,
    ATTEMPT,
    BACK,
    COMMIT,
    MISSED,
    READY,
    SAMPLES,
    START,
    state_in,
)

from bloomery.data.position import Position, without
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
    RoundState,
    SamplesUsed,
    StepRefused,
    TrainingRound,
    UpdateMade,
    Updating,
    WentBack,
)
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
    transition,
)
from bloomery.guard.verdict import CarryOn, Rewind, Rung, Save, Watch
from bloomery.protocol.encoding import FEW_RANGES_AT_MOST
from bloomery.protocol.rank_messages import Abort, FlushRound, Reduce, StartRound, StopTraining

PASTS = (FragmentHistory(steps=5, samples=20, parts=((2, 0.5),)), FragmentHistory(steps=7, samples=28))
AT_BASE = (FragmentHistory(parts=((2, 0.5),)), FragmentHistory())
WANTS = Save(judged_step=2, reason="by the hour")
DUE = Save(judged_step=1, reason="an earlier round")
BEGUN: StartRound = changed(START, live=3)
IN_ROUND = UnderWay(committed=4, live=3)
AHEAD = Progress(round=2, steps=2, spent=(range(4, 6),))
TRAINING = TrainingRound(start=BEGUN, steps=2, spent=(range(4, 6),))
AWAITING = AwaitingCommit(start=BEGUN, ready=READY, steps=2, spent=(range(8, 10),))
HELD_TWO = HeldState(round=2, digest="two", position=Position(consumed=8))
HELD_BACK = HeldState(round=2, digest="zero", position=BACK.position)
HELD_NOWHERE = HeldState(round=1, digest="one", position=None)
REDUCE = Reduce(attempt=ATTEMPT, index=0, hops=(), stall_s=1.0, deadline_s=2.0, norm_limit=None)
FAILED = StopTraining(why="a disk is full", failed=True)
SEND_HELD = (Do.SEND_IDENTITY, Do.HOLD)


def before(phase: object, **fields: object) -> RoundState:
    """A state in which every field has a value that a message could lose."""
    whole = dict(fragments=PASTS, wants=WANTS, skips=(range(90, 92),), due=DUE)
    return replace(state_in(phase), **whole | fields)  # type: ignore[arg-type]


def decided(**fields: object) -> Decided:
    usual = dict(commit=COMMIT, is_prepared=False, rewind_step=None, step=31, cursor=77)
    return Decided(**usual | fields)  # type: ignore[arg-type]


def assert_follows(
    state: RoundState, message: Message, actions: tuple[Action, ...], **changes: object
) -> None:
    """Assert these actions, and that of the state only the named fields have changed."""
    assert transition(state, message) == (replace(state, **changes), actions)


@pytest.mark.parametrize("phase", [Idle(ahead=AHEAD), Resumed(done=AHEAD), TRAINING])
def test_a_round_goes_on_with_what_was_done_in_it_behind_the_samples_that_were_used(phase: object) -> None:
    position = Position(consumed=6, holes=(range(6, 8),))
    assert_follows(before(phase), BEGUN, (MoveTo(position=position, under_way=IN_ROUND),), phase=TRAINING)


@pytest.mark.parametrize("phase", [Idle(), Resumed()])
def test_a_round_before_which_nothing_was_done_begins_at_its_position(phase: object) -> None:
    moves = (MoveTo(position=BEGUN.position, under_way=IN_ROUND),)
    assert_follows(before(phase), BEGUN, moves, phase=TrainingRound(start=BEGUN))


@pytest.mark.parametrize(
    ("done", "is_asynchronous", "counts"),
    [
        (replace(AHEAD, round=1), False, False),
        (replace(AHEAD, round=1), True, True),
        (replace(AHEAD, spent=(range(4, 6), range(8, 9))), False, False),
        (replace(AHEAD, spent=(range(4, 6), range(8, 9))), True, False),
    ],
)
def test_what_was_done_in_another_round_or_with_others_samples_is_undone(
    done: Progress, is_asynchronous: bool, counts: bool
) -> None:
    state = before(Idle(ahead=done), is_asynchronous=is_asynchronous)
    if counts:
        position = Position(consumed=6, holes=(range(6, 8),))
        assert_follows(state, BEGUN, (MoveTo(position=position, under_way=IN_ROUND),), phase=TRAINING)
    else:
        actions = (Do.RESET_UPDATE, MoveTo(position=BEGUN.position, under_way=IN_ROUND))
        assert_follows(state, BEGUN, actions, phase=TrainingRound(start=BEGUN), fragments=AT_BASE)


def test_an_offer_is_repeated_only_where_its_samples_are_still_this_peers() -> None:
    more = changed(BEGUN, samples=(range(4, 12),), number=7)
    answer = SendReady(ready=READY, number=7)
    assert_follows(before(AWAITING), more, (answer,), phase=replace(AWAITING, start=more))
    fewer = changed(BEGUN, samples=(range(4, 7),))
    moves = MoveTo(position=BEGUN.position, under_way=IN_ROUND)
    assert_follows(
        before(AWAITING),
        fewer,
        (Do.DROP_RING, Do.RESET_UPDATE, moves),
        phase=TrainingRound(start=fewer),
        fragments=AT_BASE,
    )


def test_a_round_is_hurried_by_its_own_number_alone_and_before_the_offer_alone() -> None:
    assert_follows(before(TRAINING), FlushRound(round=2), (), phase=replace(TRAINING, is_flushed=True))
    assert_follows(before(TRAINING), FlushRound(round=3), ())
    assert_follows(before(AWAITING), FlushRound(round=2), ())


def test_a_ring_is_begun_and_cancelled_as_the_agent_says() -> None:
    assert_follows(before(AWAITING), REDUCE, (BeginRing(reduce=REDUCE),))
    for phase in (TRAINING, AWAITING):
        assert_follows(before(phase), Abort(epoch=6, why="a test"), (CancelRing(epoch=6),))


@pytest.mark.parametrize("phase", [TRAINING, AWAITING])
def test_steps_are_counted_until_they_are_refused(phase: TrainingRound | AwaitingCommit) -> None:
    used = SamplesUsed(steps=9, spent=(range(4, 5),))
    assert_follows(before(phase), used, (), phase=replace(phase, steps=9, spent=(range(4, 5),)))
    assert_follows(before(phase), StepRefused(), (), phase=TrainingRound(start=BEGUN))


def test_a_stop_says_why_and_whether_an_error_is_the_cause_also_after_a_rewind() -> None:
    halt = Halt(why="a disk is full", failed=True)
    assert_follows(before(TRAINING), FAILED, (halt,))
    going, went = GoingBack(commit=BACK), WentBack(commit=BACK, stop=None, rest=Idle(ahead=AHEAD))
    assert_follows(before(going), FAILED, (halt,), phase=replace(going, stop=FAILED))
    assert_follows(before(went), FAILED, (halt,), phase=replace(went, stop=FAILED))
    admitted, held = Admitted(position=Position(consumed=1)), HELD_BACK
    for stop, halts in ((None, ()), (FAILED, (halt,))):
        actions = (MoveTo(position=BACK.position), Do.HOLD, *halts)
        assert_follows(
            before(replace(went, stop=stop)), admitted, actions, phase=Idle(ahead=AHEAD), held=held
        )


@pytest.mark.parametrize("phase", [Idle(ahead=AHEAD), TRAINING, AWAITING])
def test_another_peers_state_takes_the_place_of_all_that_this_peer_did(phase: object) -> None:
    actions = (Do.DROP_RING, LoadState(asked=ASKED))
    assert_follows(before(phase), ASKED, actions, phase=Replacing(asked=ASKED), wants=None)
    loaded = CheckpointLoaded(held=HELD_TWO, rest=Idle(), fragments=PASTS[::-1])
    replaced = Replacing(asked=ASKED, rest=Idle())
    assert_follows(
        before(Replacing(asked=ASKED)), loaded, (), phase=replaced, held=HELD_TWO, fragments=PASTS[::-1]
    )
    taken = (MoveTo(position=Position(consumed=8)), Do.HOLD)
    assert_follows(before(replaced), LoadAccepted(), taken, phase=Idle(), held=HELD_TWO, fragments=AT_BASE)


def test_who_refuses_anothers_state_tells_why_and_is_where_its_own_checkpoint_was() -> None:
    refused = LoadRefused(why="other tensors", position=Position(consumed=5))
    told = SendRefused(why="other tensors")
    rest = Idle(ahead=AHEAD)
    assert_follows(before(Replacing(asked=ASKED, rest=rest)), refused, (told, Do.HOLD), phase=rest)
    within = Resumed(done=AHEAD)
    back = MoveTo(position=Position(consumed=5), under_way=UnderWay(committed=5, live=1))
    assert_follows(before(Replacing(asked=ASKED, rest=within)), refused, (back, told, Do.HOLD), phase=within)


@pytest.mark.parametrize("phase", [Idle(ahead=AHEAD), Resumed(done=AHEAD), Idle()])
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_missed_round_keeps_steps_only_where_no_round_waits_for_them(
    phase: Idle | Resumed, is_asynchronous: bool
) -> None:
    state, made = before(phase, is_asynchronous=is_asynchronous), MissedRoundMade(asked=MISSED, why="")
    moves = (MoveTo(position=Position(consumed=8)), Do.HOLD)
    if is_asynchronous and phase == Idle(ahead=AHEAD):
        assert_follows(state, made, (Do.REBASE_UPDATE, *moves), held=HELD_TWO)
    else:
        actions = (Do.ADOPT_UPDATE, *moves)
        assert_follows(state, made, actions, phase=Idle(), held=HELD_TWO, fragments=AT_BASE)
    wrong = MissedRoundMade(asked=MISSED, why="another state")
    assert_follows(state, wrong, (Do.REFUSE_UPDATE, SendRefused(why="another state"), Do.HOLD))


def test_a_commit_with_this_peers_part_is_held_and_nothing_is_asked_for_twice() -> None:
    committed = dict(wants=None, skips=(), held=HELD_TWO)
    moves = (Do.ADOPT_UPDATE, MoveTo(position=Position(consumed=8)))
    # READY is of round 2, which averages the second of two fragments, and has one step.
    pasts = (replace(PASTS[0], steps=6, samples=24), FragmentHistory(parts=((1, 1.0),)))
    ahead = Idle(ahead=Progress(round=3, steps=2, spent=(range(8, 10),)))
    with_part = decided(is_prepared=True)
    assert_follows(before(AWAITING), with_part, (*moves, Do.HOLD), phase=ahead, fragments=pasts, **committed)
    none_ahead = replace(AWAITING, steps=0, spent=())
    assert_follows(
        before(none_ahead), with_part, (*moves, Do.HOLD), phase=Idle(), fragments=pasts, **committed
    )
    saving = decided(is_prepared=True, commit=changed(COMMIT, save=True))
    due = Save(judged_step=31, reason="round 2")
    assert_follows(
        before(none_ahead, averages_gradients=True), saving, moves,
        phase=Updating(), fragments=pasts, due=due, **committed,
    )  # fmt: skip
    after = (MoveTo(position=Position(consumed=8)), Do.HOLD)
    assert_follows(before(Updating(), held=HELD_TWO), UpdateMade(), after, phase=Idle())


@pytest.mark.parametrize(
    ("phase", "skips"), [(AWAITING, READY.skip), (TRAINING, ()), (Idle(ahead=AHEAD), ()), (Resumed(), ())]
)
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_commit_without_this_peers_part_ends_its_round_and_keeps_what_it_asked_for(
    phase: object, skips: tuple[range, ...], is_asynchronous: bool
) -> None:
    state = before(phase, is_asynchronous=is_asynchronous)
    resets = (Do.RESET_UPDATE,) if is_asynchronous and state.is_in_round else ()
    following = Idle() if state.is_in_round else phase
    actions = (Do.DROP_RING, Do.REFUSE_UPDATE, *resets)
    assert_follows(state, decided(), actions, phase=following, wants=None, skips=skips)


@pytest.mark.parametrize("phase", [Idle(ahead=AHEAD), Resumed(done=AHEAD)])
def test_a_late_peer_that_waits_keeps_its_steps_and_what_it_asks_for(phase: object) -> None:
    late = decided(is_late=True)
    assert_follows(before(phase, is_asynchronous=True), late, (Do.DROP_RING, Do.REFUSE_UPDATE))
    dropped = (Do.DROP_RING, Do.REFUSE_UPDATE)  # where all rounds wait for it, late is as refused
    assert_follows(before(phase), late, dropped, wants=None, skips=())


def test_a_commit_of_a_round_before_the_held_one_ends_the_training_without_a_failure() -> None:
    state = before(TRAINING, held=HeldState(round=3, digest="two", position=None))
    why = "round 2 was committed, but this peer holds round 3 already: the coordinator has lost rounds"
    assert_follows(state, decided(), (Halt(why=why, failed=False),))


@pytest.mark.parametrize(
    ("rung", "expected"), [(Rung.SLOW, Rung.SLOW), (Rung.CLAMP, Rung.CLAMP), (Rung.STOP, Rung.CLAMP)]
)
def test_a_run_that_goes_back_skips_nothing_at_this_peer_and_never_stops_by_its_rung(
    rung: Rung, expected: Rung
) -> None:
    for rewind_to, step, anew in ((0, 0, True), (1, 12, False)):
        commit = changed(BACK, rewind_to=rewind_to, rung=int(rung))
        due = Rewind(
            judged_step=31,
            to_step=step,
            skip=range(77, 77),
            rung=expected,
            reason="a spike",
            may_start_anew=anew,
        )
        message = decided(commit=commit, rewind_step=step)
        for phase in (TRAINING, AWAITING, Idle(), Resumed()):
            assert_follows(
                before(phase), message, (Do.REFUSE_UPDATE,),
                phase=GoingBack(commit=commit), due=due, wants=None, skips=(),
            )  # fmt: skip


def test_a_peer_without_a_checkpoint_of_the_rewind_waits_for_anothers_state() -> None:
    message = decided(commit=BACK)
    for phase, following in ((TRAINING, Idle()), (AWAITING, Idle()), (Resumed(done=AHEAD), None)):
        actions = (Do.REFUSE_UPDATE, Do.HOLD)
        assert_follows(before(phase), message, actions, phase=following or phase, wants=None, skips=())


@pytest.mark.parametrize("fragments", [(), PASTS[:1], PASTS[::-1], PASTS * 2])
def test_histories_of_as_many_fragments_are_taken_from_a_checkpoint_and_others_begin_anew(
    fragments: tuple[FragmentHistory, ...],
) -> None:
    rest = Resumed(done=AHEAD)
    loaded = CheckpointLoaded(held=HELD_TWO, rest=rest, fragments=fragments)
    taken = fragments if len(fragments) == 2 else (FragmentHistory(), FragmentHistory())
    for phase, following in (
        (Loaded(rest=Idle()), Loaded(rest=rest)),
        (GoingBack(commit=BACK, stop=FAILED), WentBack(commit=BACK, stop=FAILED, rest=rest)),
        (Replacing(asked=ASKED), Replacing(asked=ASKED, rest=rest)),
    ):
        assert_follows(before(phase), loaded, (), phase=following, held=HELD_TWO, fragments=taken)


def test_who_is_admitted_holds_the_position_of_its_checkpoint_or_else_that_of_the_training() -> None:
    admitted, unknown = Admitted(position=Position(consumed=3)), HELD_NOWHERE
    idle = Idle(ahead=AHEAD)
    assert_follows(before(Loaded(rest=idle)), admitted, SEND_HELD, phase=idle)
    known = HeldState(round=1, digest="one", position=Position(consumed=3))
    assert_follows(before(Loaded(rest=idle), held=unknown), admitted, SEND_HELD, phase=idle, held=known)
    within = Resumed(done=AHEAD)
    back = MoveTo(position=Position(consumed=3), under_way=UnderWay(committed=3, live=1))
    actions = (Do.SEND_IDENTITY, back, Do.HOLD)
    assert_follows(before(Loaded(rest=within), held=unknown), admitted, actions, phase=within)


@pytest.mark.parametrize(
    ("phase", "samples", "progress", "is_in_round", "is_within"),
    [
        (Idle(ahead=AHEAD), (), AHEAD, False, False),
        (Resumed(done=AHEAD), (), AHEAD, False, True),
        (TRAINING, SAMPLES, AHEAD, True, True),
        (
            replace(AWAITING, ready=changed(READY, steps=4, kept=(range(8, 12),))),
            (range(8, 12),),
            Progress(round=2, steps=4, spent=SAMPLES),
            True,
            True,
        ),
        (Updating(), (), None, False, False),
        (GoingBack(commit=BACK), (), None, False, False),
        (Loaded(rest=Resumed(done=AHEAD)), (), AHEAD, False, True),
        (WentBack(commit=BACK, stop=None, rest=Idle(ahead=AHEAD)), (), AHEAD, False, False),
        (Replacing(asked=ASKED), (), None, False, False),
        (Replacing(asked=ASKED, rest=Resumed()), (), None, False, True),
    ],
)
def test_a_phase_says_which_samples_are_to_be_used_and_what_a_checkpoint_keeps(
    phase: object,
    samples: tuple[range, ...],
    progress: Progress | None,
    is_in_round: bool,
    is_within: bool,
) -> None:
    state = before(phase)
    assert (state.samples, state.progress) == (samples, progress)
    assert (state.is_in_round, state.is_within) == (is_in_round, is_within)


def test_the_first_save_is_asked_for_and_the_last_rewind() -> None:
    later = Save(judged_step=9, reason="again")
    rewinds = [Rewind(judged_step=n, to_step=0, skip=range(0), reason="") for n in (1, 2)]
    state = RoundState(averages_gradients=False)
    for nothing in (CarryOn(judged_step=9), Watch(judged_step=9, kind="", reason="")):
        assert state.asking(nothing) == state
    assert state.asking(WANTS).asking(later).wants == WANTS
    assert state.asking(WANTS).asking(rewinds[0]).asking(rewinds[1]).asking(later).wants == rewinds[1]


def test_a_part_asks_for_no_more_ranges_to_skip_than_a_record_may_hold() -> None:
    scattered = tuple(range(3 * number, 3 * number + 1) for number in range(FEW_RANGES_AT_MOST + 9))
    part = PartMade(peer="a", tokens_per_sample=1, kept=(), rewind_to=None)
    asked = replace(before(TRAINING), skips=scattered).part(TRAINING, part).skip
    assert len(asked) == FEW_RANGES_AT_MOST and without(scattered, asked) == ()


def test_samples_to_be_skipped_add_up_and_those_in_use_are_the_holes_of_the_position() -> None:
    state = before(TRAINING).skipping(range(92, 95)).skipping(range(10, 11))
    assert state.skips == (range(10, 11), range(90, 95))
    position = Position(consumed=4, holes=(range(0, 2), range(5, 20)))
    assert state.unused(position) == (range(5, 8),)
