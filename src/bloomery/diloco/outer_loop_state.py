"""The state of a rank's outer loop, and the messages of agent and trainer that change it, as frozen values.

`round_transition.transition` computes the next state and the actions from a message; `outer_loop.OuterLoop`
keeps the state, turns events into messages, and carries the actions out.

phase           what the peer does                                next
--------------  ------------------------------------------------  --------------------------------------------
Loaded          has loaded a checkpoint, or begins the run; the   Admitted → Idle or Resumed
                agent does not know of it yet
Idle            holds a committed state and waits for samples     StartRound → TrainingRound;
                                                                  ReplaceState → Replacing;
                                                                  MissedRoundMade → Idle
Resumed         as Idle, but its weights are of within a round    as Idle
TrainingRound   trains on its samples of a round                  PartMade → AwaitingCommit
AwaitingCommit  has offered its part; may train on samples of     Decided → Idle, Updating or GoingBack;
                the next round meanwhile (elastic.overlap_steps)  StartRound, other samples → TrainingRound
Updating        holds the committed average of the gradients;     UpdateMade → Idle
                the optimizer's update with it comes next
GoingBack       is to load its own checkpoint of an earlier round CheckpointLoaded → WentBack
WentBack        has loaded that checkpoint                        Admitted → Idle or Resumed
Replacing       loads the state that another peer gave            LoadAccepted → Idle;
                                                                  LoadRefused → Idle or Resumed

From both, Decided leads to Idle where this peer's part is not in the commit, and ReplaceState to Replacing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from bloomery.data.position import Position, Ranges, fewer, merged, total, without
from bloomery.diloco.peer_vector import FragmentHistory, fragment_of_round
from bloomery.guard.verdict import Rewind, Save, Verdict
from bloomery.protocol.encoding import FEW_RANGES_AT_MOST
from bloomery.protocol.rank_messages import (
    Abort,
    CatchUp,
    FlushRound,
    Reduce,
    ReplaceState,
    StartRound,
    StopTraining,
)
from bloomery.protocol.records import Commit, Ready


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What this peer did in one round: how many steps it made, and the samples that they used."""

    round: int
    steps: int
    spent: Ranges


@dataclass(frozen=True, kw_only=True)
class HeldState:
    """The committed state that this peer holds.

    round: the round of the commit.
    digest: the digest of the peer's whole shared state.
    position: the position in the stream after the round; None if the checkpoint does not record it.
    """

    round: int
    digest: str
    position: Position | None


@dataclass(frozen=True, kw_only=True)
class Idle:
    """The peer has no samples. ahead: what it did in the next round before that began; None: nothing."""

    ahead: Progress | None = None


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The peer has no samples, and weights from within a round. done: what it did in it; None: unknown."""

    done: Progress | None = None


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint is loaded. rest: the phase that follows once the agent knows what this peer holds."""

    rest: Idle | Resumed


@dataclass(frozen=True, kw_only=True)
class TrainingRound:
    """The peer trains.

    start: the message that began the round.
    steps, spent: how many steps the peer has made in this round, and the samples that they used.
    is_flushed: whether the other peers wait, so that the next step is the last one.
    """

    start: StartRound
    steps: int = 0
    spent: Ranges = ()
    is_flushed: bool = False


@dataclass(frozen=True, kw_only=True)
class AwaitingCommit:
    """The peer has offered its part.

    start: the message that began the round; if the agent has sent it again, the last one.
    ready: the part that was offered.
    steps, spent: as in TrainingRound, but of the next round (elastic.overlap_steps).
    """

    start: StartRound
    ready: Ready
    steps: int = 0
    spent: Ranges = ()


@dataclass(frozen=True, kw_only=True)
class Updating:
    """The round is committed; the optimizer's update with its gradients is not made yet."""


@dataclass(frozen=True, kw_only=True)
class GoingBack:
    """The rank rewinds to its own checkpoint of `commit`. stop: ends the training then; None: it goes on."""

    commit: Commit
    stop: StopTraining | None = None


@dataclass(frozen=True, kw_only=True)
class WentBack:
    """The checkpoint of a rewind is loaded. rest: the phase that it leads to. commit, stop: see GoingBack."""

    commit: Commit
    stop: StopTraining | None
    rest: Idle | Resumed


@dataclass(frozen=True, kw_only=True)
class Replacing:
    """asked: the request. rest: the phase that the loaded checkpoint leads to; None before the load."""

    asked: ReplaceState
    rest: Idle | Resumed | None = None


RoundPhase = (
    Loaded | Idle | Resumed | TrainingRound | AwaitingCommit | Updating | GoingBack | WentBack | Replacing
)


@dataclass(frozen=True, kw_only=True)
class RoundState:
    """All state of the outer loop, as one value.

    averages_gradients: whether a round averages gradients, or else pseudo-gradients (elastic.average).
    is_asynchronous: whether a peer that is not in a round keeps its steps for a later one (elastic.quorum).
    phase, held: what the peer does, and the committed state that it holds.
    wants: the save or rewind that the next part asks for; None: neither.
    skips: the samples of which the next part asks that no peer uses them.
    due: the save or rewind that was decided, to be carried out after the step under way; None: neither.
    fragments: the history of each fragment that rounds average in turn.
    """

    averages_gradients: bool
    is_asynchronous: bool = False
    phase: RoundPhase = field(default_factory=lambda: Loaded(rest=Idle()))
    held: HeldState = field(default_factory=lambda: HeldState(round=0, digest="", position=None))
    wants: Save | Rewind | None = None
    skips: Ranges = ()
    due: Save | Rewind | None = None
    fragments: tuple[FragmentHistory, ...] = (FragmentHistory(),)

    @property
    def samples(self) -> Ranges:
        """The samples that this peer may train on now."""
        match self.phase:
            case TrainingRound(start=start):
                return start.samples
            case AwaitingCommit(ready=ready):
                return ready.kept
        return ()

    @property
    def progress(self) -> Progress | None:
        """What a checkpoint keeps of the round that is not committed; None if it keeps nothing."""
        match self.phase:
            case TrainingRound(start=start, steps=steps, spent=spent):
                return Progress(round=start.round, steps=steps, spent=spent)
            case AwaitingCommit(ready=ready):
                return Progress(round=ready.round, steps=ready.steps, spent=ready.spent)
        match _rest(self.phase):
            case Idle(ahead=progress) | Resumed(done=progress):
                return progress
        return None

    def unused(self, position: Position) -> Ranges:
        """Return those of this peer's samples that it has not used. position: the training's position."""
        return without(self.samples, without(self.samples, position.holes))

    @property
    def is_in_round(self) -> bool:
        """Whether a round has begun and is not decided."""
        return isinstance(self.phase, TrainingRound | AwaitingCommit)

    @property
    def is_within(self) -> bool:
        """Whether the weights may be from within a round; else they are those of a committed state."""
        return self.is_in_round or isinstance(_rest(self.phase), Resumed)

    def fragment_of(self, round: int) -> FragmentHistory:
        """Return the history of the fragment that a round averages."""
        return self.fragments[fragment_of_round(round, count=len(self.fragments))]

    def averaged(self, ready: Ready) -> tuple[FragmentHistory, ...]:
        """Return the histories after the commit of a round that includes this peer's part."""
        averaged = fragment_of_round(ready.round, count=len(self.fragments))
        return tuple(
            past.after(ready, is_averaged=number == averaged) for number, past in enumerate(self.fragments)
        )

    def at_base(self) -> tuple[FragmentHistory, ...]:
        """Return the histories once the weights are the committed ones: no step has moved any fragment."""
        return tuple(replace(past, steps=0, samples=0) for past in self.fragments)

    def asking(self, verdict: Verdict) -> RoundState:
        """Return a state whose next part asks for a save or a rewind. A rewind replaces a save."""
        if isinstance(verdict, Rewind) or (isinstance(verdict, Save) and self.wants is None):
            return replace(self, wants=verdict)
        return self

    def skipping(self, samples: range) -> RoundState:
        """Return a state whose next part asks that no peer uses these samples."""
        return replace(self, skips=merged((*self.skips, samples)))

    def part(self, training: TrainingRound, part: PartMade) -> Ready:
        """Return this peer's part of the round, which is not measured, with what its guards ask of all."""
        wants, skips = self.wants, self.skips
        if isinstance(wants, Rewind):
            skips = merged((*skips, wants.skip))
        before, used = self.fragment_of(training.start.round), total(training.spent)
        has_earlier = bool(used and before.samples)
        return Ready(
            peer=part.peer,
            round=training.start.round,
            steps=training.steps,
            tokens=used * part.tokens_per_sample,
            drift_steps=before.steps + training.steps if has_earlier else 0,
            drift_tokens=(before.samples + used) * part.tokens_per_sample if has_earlier else 0,
            past=before.parts,
            spent=training.spent,
            kept=part.kept,
            norm=None,
            feedback=0.0,
            finite=False,
            wants_save=isinstance(wants, Save),
            rewind_to=part.rewind_to,
            skip=fewer(skips, FEW_RANGES_AT_MOST),
            why=wants.reason if isinstance(wants, Rewind) else "",
            rung=int(wants.rung) if isinstance(wants, Rewind) else 0,
            step_s=0.0,  # the agent fills it in
        )


def _rest(phase: RoundPhase) -> Idle | Resumed | None:
    """Return what a phase records of the next round, if that has not begun; else None."""
    match phase:
        case Idle() | Resumed():
            return phase
        case Loaded(rest=rest) | WentBack(rest=rest) | Replacing(rest=rest):
            return rest
    return None


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The agent's `Committed`, with what only this peer knows.

    commit: the commit.
    is_prepared: whether the commit includes this peer's part, and this peer has prepared the state after it.
    rewind_step: the step of this peer's own checkpoint of the round to which the run goes back; None if there
        is none, or if the training waits for samples and so cannot carry out a verdict.
    step, cursor: how many steps this peer has made, and the cursor of its position.
    is_late: whether the commit averages others' parts without this peer's, for no fault of it.
    """

    commit: Commit
    is_prepared: bool
    rewind_step: int | None
    step: int
    cursor: int
    is_late: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointLoaded:
    """Every part was filled from a checkpoint. rest: Resumed if it was taken within a round, else Idle.

    fragments: the histories in the checkpoint; () if it has none.
    """

    held: HeldState
    rest: Idle | Resumed
    fragments: tuple[FragmentHistory, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """The training asks for samples. position: the position of its state."""

    position: Position


@dataclass(frozen=True, kw_only=True)
class SamplesUsed:
    """A step was made. steps, spent: the steps of the round so far, and all samples that they used."""

    steps: int
    spent: Ranges


@dataclass(frozen=True, kw_only=True)
class PartMade:
    """The part of this peer in the round is fixed. It is offered once it is measured.

    peer: the name of this peer.
    tokens_per_sample: the weight of a sample.
    kept: the samples that this peer uses while the round is decided.
    rewind_to: the round to which this peer's guards want to go back; None: none.
    """

    peer: str
    tokens_per_sample: int
    kept: Ranges
    rewind_to: int | None


@dataclass(frozen=True, kw_only=True)
class StepRefused:
    """The gradients were not averaged, so the step is not made and its samples are unused."""


@dataclass(frozen=True, kw_only=True)
class UpdateMade:
    """The optimizer has made the update with the averaged gradients, so the step counts."""


@dataclass(frozen=True, kw_only=True)
class LoadAccepted:
    """What was loaded is the state that was asked for."""


@dataclass(frozen=True, kw_only=True)
class LoadRefused:
    """What was loaded is another state, and this peer's own checkpoint is loaded again.

    why: the reason, for the log.
    position: the position of this peer's own checkpoint.
    """

    why: str
    position: Position


@dataclass(frozen=True, kw_only=True)
class MissedRoundMade:
    """The state after a missed round is prepared. why: why it is not the run's; "" if it is."""

    asked: CatchUp
    why: str


FromAgent = StartRound | ReplaceState | FlushRound | Reduce | Abort | StopTraining | Decided
FromTrainer = (
    CheckpointLoaded
    | Admitted
    | SamplesUsed
    | PartMade
    | StepRefused
    | UpdateMade
    | LoadAccepted
    | LoadRefused
    | MissedRoundMade
)
Message = FromAgent | FromTrainer
