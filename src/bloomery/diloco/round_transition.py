"""Computes what a peer does upon each message in a round: a pure function of its state and the message.

It returns the next state and the actions to carry out. `is_last_step` tells when the peer has made its
steps. The table of phases is in `outer_loop_state`; tests/diloco/test_round_transition.py tests every pair.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from bloomery.config.elastic import ElasticSection
from bloomery.data.position import Position, merged, without
from bloomery.diloco.outer import UnderWay
from bloomery.diloco.outer_loop_state import (
    Admitted,
    AwaitingCommit,
    CheckpointLoaded,
    Decided,
    FromAgent,
    FromTrainer,
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
from bloomery.diloco.peer_vector import FragmentHistory
from bloomery.errors import PeerError
from bloomery.guard.verdict import Rewind, Rung, Save
from bloomery.protocol.rank_messages import Abort, FlushRound, Reduce, ReplaceState, StartRound, StopTraining
from bloomery.protocol.records import Commit, Ready


class Do(Enum):
    """Actions without parameters."""

    SEND_IDENTITY = auto()
    """Tell the agent what identifies the stream of samples."""
    HOLD = auto()
    """Tell the agent which committed state is held, or was held when the round began."""
    DROP_RING = auto()
    """Cancel any all_reduce under way, and drop the result of the last one."""
    RESET_UPDATE = auto()
    """Go back to the committed weights."""
    REFUSE_UPDATE = auto()
    """Drop the part that was offered."""
    ADOPT_UPDATE = auto()
    """Continue from the result of the all_reduce."""
    REBASE_UPDATE = auto()
    """Continue from the state after a missed round, with this peer's own steps since the state before."""


@dataclass(frozen=True, kw_only=True)
class SendReady:
    """Offer a part to the agent. number: that of the StartRound that it answers."""

    ready: Ready
    number: int


@dataclass(frozen=True, kw_only=True)
class SendRefused:
    """Tell the agent that this peer refuses the state that it was to load."""

    why: str


@dataclass(frozen=True, kw_only=True)
class BeginRing:
    """Begin the all_reduce of an attempt."""

    reduce: Reduce


@dataclass(frozen=True, kw_only=True)
class CancelRing:
    """Cancel the all_reduce of this epoch, if it is under way."""

    epoch: int


@dataclass(frozen=True, kw_only=True)
class MoveTo:
    """Set the position of the training. under_way: the round that it is in; None: a committed state."""

    position: Position
    under_way: UnderWay | None = None


@dataclass(frozen=True, kw_only=True)
class LoadState:
    """Load another peer's state, and answer with LoadAccepted or LoadRefused."""

    asked: ReplaceState


@dataclass(frozen=True, kw_only=True)
class Halt:
    """End the training. failed: whether an error is the cause."""

    why: str
    failed: bool


Action = Do | SendReady | SendRefused | BeginRing | CancelRing | MoveTo | LoadState | Halt


Outcome = tuple[RoundState, tuple[Action, ...]]


class UnexpectedMessage(PeerError):
    """A message that cannot arrive in this phase: the agent or the trainer breaks the order of a round."""

    def __init__(self, state: RoundState, message: Message) -> None:
        super().__init__(
            f"{type(message).__name__} came while this peer was in the phase {type(state.phase).__name__} "
            f"after round {state.held.round}.",
            remedy="The same command starts the peer again. Please report it with the agent's log.",
        )


def transition(state: RoundState, message: Message) -> Outcome:
    """Return the next state, and the actions to carry out in order. Raises UnexpectedMessage."""
    if isinstance(message, FromAgent):
        return _from_agent(state, message)
    if isinstance(message, MissedRoundMade):
        return _missed_round_made(state, message)
    return _from_trainer(state, message)


def _from_agent(state: RoundState, message: FromAgent) -> Outcome:
    match message:
        case StartRound():
            return _start_round(state, message)
        case ReplaceState():
            return _replace_state(state, message)
        case FlushRound(round=round):
            return _flush(state, round), ()
        case Reduce():
            if not isinstance(state.phase, AwaitingCommit):
                raise UnexpectedMessage(state, message)
            return state, (BeginRing(reduce=message),)
        case Abort(epoch=epoch):
            return state, (CancelRing(epoch=epoch),)
        case StopTraining():
            return _stop(state, message)
        case Decided():
            return _decided(state, message)


def _from_trainer(state: RoundState, message: FromTrainer) -> Outcome:
    match state.phase, message:
        case _, CheckpointLoaded():
            return _loaded(state, message)
        case _, Admitted():
            return _admitted(state, message)
        case TrainingRound() | AwaitingCommit() as phase, SamplesUsed(steps=steps, spent=spent):
            return replace(state, phase=replace(phase, steps=steps, spent=spent)), ()
        case _, SamplesUsed():
            return state, ()
        case TrainingRound() as training, PartMade():
            ready = state.part(training, message)
            # From now on, steps and samples are those of the next round.
            state = replace(state, phase=AwaitingCommit(start=training.start, ready=ready))
            return state, (SendReady(ready=ready, number=training.start.number),)
        case ((TrainingRound() | AwaitingCommit() as phase), StepRefused()):
            return replace(state, phase=TrainingRound(start=phase.start)), ()
        case Idle() | Resumed() | GoingBack(), StepRefused():
            return state, ()
        case Updating(), UpdateMade():
            assert state.held.position is not None, "a commit tells the position"
            return replace(state, phase=Idle()), (MoveTo(position=state.held.position), Do.HOLD)
        case Replacing(asked=asked, rest=Idle()), LoadAccepted():
            held_state = HeldState(round=asked.round, digest=asked.digest, position=asked.position)
            # Steps that the source of the state made since its last commits are not this peer's.
            state = replace(state, phase=Idle(), held=held_state, fragments=state.at_base())
            return state, (MoveTo(position=asked.position), Do.HOLD)
        case Replacing(rest=Idle() as rest), LoadRefused(why=why):
            return replace(state, phase=rest), (SendRefused(why=why), Do.HOLD)
        case Replacing(rest=Resumed() as rest), LoadRefused(why=why, position=position):
            return replace(state, phase=rest), (_resume_at(position), SendRefused(why=why), Do.HOLD)
    raise UnexpectedMessage(state, message)


def _missed_round_made(state: RoundState, made: MissedRoundMade) -> Outcome:
    """Continue from the state after a round that this peer was not in, if it is the run's."""
    if not isinstance(state.phase, Idle | Resumed):
        raise UnexpectedMessage(state, made)
    if made.why:
        return state, (Do.REFUSE_UPDATE, SendRefused(why=made.why), Do.HOLD)
    asked = made.asked
    held_state = HeldState(round=asked.round, digest=asked.digest, position=asked.position)
    if state.is_asynchronous and isinstance(state.phase, Idle) and state.phase.ahead is not None:
        return replace(state, held=held_state), (Do.REBASE_UPDATE, MoveTo(position=asked.position), Do.HOLD)
    state = replace(state, phase=Idle(), held=held_state, fragments=state.at_base())
    return state, (Do.ADOPT_UPDATE, MoveTo(position=asked.position), Do.HOLD)


def _start_round(state: RoundState, start: StartRound) -> Outcome:
    """Begin a round with its samples, or continue it if this peer has trained in it already."""
    match state.phase:
        case Idle(ahead=done) | Resumed(done=done):
            return _begin(state, start, done)
        case TrainingRound():
            return _begin(state, start, state.progress)
        case AwaitingCommit(start=begun, ready=ready) as awaiting if ready.round == start.round:
            has_first_share = bool(start.samples) and not begun.samples
            if not has_first_share and not without(ready.spent, start.samples):
                # The agent's lease ended, and the offer with it.
                state = replace(state, phase=replace(awaiting, start=start))
                return state, (SendReady(ready=ready, number=start.number),)
            state, actions = _begin(state, start, state.progress)
            return state, (Do.DROP_RING, *actions)
    raise UnexpectedMessage(state, start)


def _begin(state: RoundState, start: StartRound, done: Progress | None) -> Outcome:
    """Begin a round. done: what this peer did before; it counts if it was this round with these samples."""
    training, position, resets = TrainingRound(start=start), start.position, tuple[Action, ...]()
    is_of_round = done is not None and (state.is_asynchronous or done.round == start.round)
    if done is not None and is_of_round and not without(done.spent, start.samples):
        training = replace(training, steps=done.steps, spent=done.spent)
        position = position.after(done.spent)
    elif done is not None:
        resets = (Do.RESET_UPDATE,)
        state = replace(state, fragments=state.at_base())
    under_way = UnderWay(committed=start.position.consumed, live=start.live)
    return replace(state, phase=training), (*resets, MoveTo(position=position, under_way=under_way))


def _replace_state(state: RoundState, asked: ReplaceState) -> Outcome:
    if not isinstance(state.phase, Idle | Resumed | TrainingRound | AwaitingCommit):
        raise UnexpectedMessage(state, asked)
    state = replace(state, phase=Replacing(asked=asked), wants=None)
    return state, (Do.DROP_RING, LoadState(asked=asked))


def _flush(state: RoundState, round: int) -> RoundState:
    phase = state.phase
    if isinstance(phase, TrainingRound) and phase.start.round == round:
        return replace(state, phase=replace(phase, is_flushed=True))
    return state


def _stop(state: RoundState, stop: StopTraining) -> Outcome:
    halt = Halt(why=stop.why, failed=stop.failed)
    if isinstance(state.phase, GoingBack | WentBack):
        # The state that the rewind loads is not halted, so it is halted again afterwards.
        return replace(state, phase=replace(state.phase, stop=stop)), (halt,)
    return state, (halt,)


def _decided(state: RoundState, decided: Decided) -> Outcome:
    """Continue from the commit, go back, or wait for another peer's state."""
    if not isinstance(state.phase, Idle | Resumed | TrainingRound | AwaitingCommit | GoingBack):
        raise UnexpectedMessage(state, decided)
    commit, held_state, phase = decided.commit, state.held, state.phase
    if commit.round <= held_state.round:
        if (commit.round, commit.digest) == (held_state.round, held_state.digest):
            return state, ()
        why = f"round {commit.round} was committed, but this peer holds round {held_state.round} already"
        # Not a failure, so that the state, which is right, is saved.
        return state, (Halt(why=f"{why}: the coordinator has lost rounds", failed=False),)
    offered = phase if isinstance(phase, AwaitingCommit) else None
    if state.is_asynchronous and decided.is_late:
        late = Idle(ahead=_steps_so_far(phase)) if state.is_in_round else phase
        return replace(state, phase=late), (Do.DROP_RING, Do.REFUSE_UPDATE)
    state = replace(state, wants=None, skips=())
    if commit.rewind_to is not None and not isinstance(phase, GoingBack):
        return _go_back(state, decided)
    if offered is not None and decided.is_prepared:
        return _adopt(state, decided, offered)
    # In asynchronous rounds a missed average moves the weights, which must not hold steps that do not count.
    drops = (Do.RESET_UPDATE,) if state.is_asynchronous and state.is_in_round else ()
    state = _without_round(replace(state, skips=offered.ready.skip if offered else ()))
    return state, (Do.DROP_RING, Do.REFUSE_UPDATE, *drops)


def _steps_so_far(phase: RoundPhase) -> Progress | None:
    """Return what a peer did in a round that was decided without it, for a later one; None for nothing."""
    assert isinstance(phase, TrainingRound | AwaitingCommit), "the peer is in a round"
    steps, spent = phase.steps, phase.spent
    if isinstance(phase, AwaitingCommit):
        steps, spent = steps + phase.ready.steps, merged((*phase.ready.spent, *spent))
    return Progress(round=phase.start.round, steps=steps, spent=spent) if steps else None


def _adopt(state: RoundState, decided: Decided, offered: AwaitingCommit) -> Outcome:
    """Continue from the commit, which includes this peer's part."""
    commit, actions = decided.commit, (Do.ADOPT_UPDATE, MoveTo(position=decided.commit.position))
    due = Save(judged_step=decided.step, reason=f"round {commit.round}") if commit.save else state.due
    state = replace(state, held=_held(commit), due=due, fragments=state.averaged(offered.ready))
    if state.averages_gradients:
        return replace(state, phase=Updating()), actions
    ahead = Progress(round=commit.round + 1, steps=offered.steps, spent=offered.spent)
    return replace(state, phase=Idle(ahead=ahead if offered.steps else None)), (*actions, Do.HOLD)


def _go_back(state: RoundState, decided: Decided) -> Outcome:
    """Rewind from this peer's own checkpoint of the round; without one, wait for another peer's state."""
    commit, step = decided.commit, decided.rewind_step
    if step is None:
        return _without_round(state), (Do.REFUSE_UPDATE, Do.HOLD)
    due = Rewind(
        judged_step=decided.step,
        to_step=step,
        skip=range(decided.cursor, decided.cursor),
        rung=Rung(min(commit.rung, Rung.CLAMP)),
        reason=commit.why,
        may_start_anew=commit.rewind_to == 0,
    )
    return replace(state, phase=GoingBack(commit=commit), due=due), (Do.REFUSE_UPDATE,)


def _loaded(state: RoundState, loaded: CheckpointLoaded) -> Outcome:
    match state.phase:
        case Loaded():
            phase: Loaded | WentBack | Replacing = Loaded(rest=loaded.rest)
        case GoingBack(commit=commit, stop=stop):
            phase = WentBack(commit=commit, stop=stop, rest=loaded.rest)
        case Replacing(asked=asked):
            phase = Replacing(asked=asked, rest=loaded.rest)
        case _:
            raise UnexpectedMessage(state, loaded)
    fragments = loaded.fragments if len(loaded.fragments) == len(state.fragments) else _unknown(state)
    return replace(state, phase=phase, held=loaded.held, fragments=fragments), ()


def _admitted(state: RoundState, admitted: Admitted) -> Outcome:
    match state.phase:
        case Loaded(rest=Idle() as rest):
            held_state = replace(state.held, position=state.held.position or admitted.position)
            return replace(state, phase=rest, held=held_state), (Do.SEND_IDENTITY, Do.HOLD)
        case Loaded(rest=Resumed() as rest):
            actions = (Do.SEND_IDENTITY, _resume_at(admitted.position), Do.HOLD)
            return replace(state, phase=rest), actions
        case WentBack(commit=commit, stop=stop, rest=rest):
            halts = () if stop is None else (Halt(why=stop.why, failed=stop.failed),)
            actions = (MoveTo(position=commit.position), Do.HOLD, *halts)
            return replace(state, phase=rest, held=_held(commit)), actions
        case Replacing():
            raise UnexpectedMessage(state, admitted)
    # This includes GoingBack: if no checkpoint could be loaded, the training has ended.
    return state, ()


def _resume_at(position: Position) -> MoveTo:
    """Return to the middle of a round that is not committed and of which only the position is known."""
    return MoveTo(position=position, under_way=UnderWay(committed=position.consumed, live=1))


def _without_round(state: RoundState) -> RoundState:
    """Return the state without the round under way, if there is one."""
    return replace(state, phase=Idle()) if state.is_in_round else state


def _unknown(state: RoundState) -> tuple[FragmentHistory, ...]:
    """Return the histories of a run that begins, or of a checkpoint of an earlier version, which has none."""
    return tuple(FragmentHistory() for _ in state.fragments)


def _held(commit: Commit) -> HeldState:
    return HeldState(round=commit.round, digest=commit.digest, position=commit.position)


def is_last_step(rounds: RoundState, section: ElasticSection, *, unused: int, batch: int) -> bool:
    """Return whether no step is left before the part is offered, or while the round is decided.

    rounds: the state of a round that is under way.
    unused: how many samples the peer has left. batch: how many a step uses.
    """
    phase = rounds.phase
    if unused < batch or isinstance(rounds.wants, Rewind):
        return True
    if isinstance(phase, AwaitingCommit):
        # In asynchronous rounds the others go on meanwhile: a peer that was hurried must not keep the ring
        # waiting for the end of another of its slow steps.
        was_hurried = rounds.is_asynchronous and phase.ready.steps < section.round_steps
        return was_hurried or phase.steps >= section.overlap_steps
    assert isinstance(phase, TrainingRound), "asked within a round alone"
    return phase.is_flushed or phase.steps >= section.round_steps
