"""The state of a peer in the rounds of a run, and the messages that change it: frozen values.

`round_transition.transition` says which state and which actions follow from a message; `outer_loop.OuterLoop`
keeps the state, makes messages of what happens, and carries the actions out.

phase           what the peer does                                next
--------------  ------------------------------------------------  --------------------------------------------
Loaded          has loaded a checkpoint, or begins the run; the   Admitted → Idle or Resumed
                agent does not know of it yet
Idle            holds a committed state and waits for samples     StartRound → TrainingRound;
                                                                  ReplaceState → Replacing
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

From TrainingRound and AwaitingCommit, Decided leads to Idle where this peer's part is not in the commit, and
ReplaceState to Replacing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from bloomery.checkpoint.format.state import Json
from bloomery.data.position import Position, Ranges, from_pairs, merged, to_pairs, without
from bloomery.guard.verdict import Rewind, Save, Verdict
from bloomery.protocol.rank_messages import Abort, FlushRound, Reduce, ReplaceState, StartRound, StopTraining
from bloomery.protocol.records import Commit, Ready


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What this peer did of one round: the steps that it made, and the samples that they used."""

    round: int
    steps: int
    spent: Ranges


@dataclass(frozen=True, kw_only=True)
class HeldState:
    """The committed state that this peer holds.

    digest: of the peer's whole shared state. position: after the round; None where no checkpoint tells it.
    """

    round: int
    digest: str
    position: Position | None


@dataclass(frozen=True, kw_only=True)
class Idle:
    """No samples. ahead: what was done of the next round before it was given out; None: nothing."""

    ahead: Progress | None = None


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """No samples yet, and the weights are of within a round. done: what was done of it; None: not known."""

    done: Progress | None = None


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """rest: the phase that follows once the agent knows what is held."""

    rest: Idle | Resumed


@dataclass(frozen=True, kw_only=True)
class TrainingRound:
    """steps, spent: of this round so far. is_flushed: the others wait, so the next step is the last one."""

    start: StartRound
    steps: int = 0
    spent: Ranges = ()
    is_flushed: bool = False


@dataclass(frozen=True, kw_only=True)
class AwaitingCommit:
    """ready: the part that was offered. steps, spent: of the next round so far (elastic.overlap_steps)."""

    start: StartRound
    ready: Ready
    steps: int = 0
    spent: Ranges = ()


@dataclass(frozen=True, kw_only=True)
class Updating:
    """The round is committed; the update with its gradients is not made yet."""


@dataclass(frozen=True, kw_only=True)
class GoingBack:
    """commit: the one that goes back. stop: what to end the training with afterwards; None: it goes on."""

    commit: Commit
    stop: StopTraining | None = None


@dataclass(frozen=True, kw_only=True)
class WentBack:
    """commit, stop: as in GoingBack. rest: what the checkpoint says of the round after its own."""

    commit: Commit
    stop: StopTraining | None
    rest: Idle | Resumed


@dataclass(frozen=True, kw_only=True)
class Replacing:
    """rest: what the checkpoint that was loaded last says; None before one was."""

    asked: ReplaceState
    rest: Idle | Resumed | None = None


Phase = Loaded | Idle | Resumed | TrainingRound | AwaitingCommit | Updating | GoingBack | WentBack | Replacing


@dataclass(frozen=True, kw_only=True)
class RoundState:
    """All that changes in the outer loop, as one value.

    averages_gradients: whether a round averages gradients: pseudo-gradients otherwise (elastic.average).
    wants: the save or rewind to ask for with the next part; None: neither.
    skips: samples to ask for with it that nobody is to use.
    due: the save or rewind that was decided, to be carried out after the step under way; None: neither.
    """

    averages_gradients: bool
    phase: Phase = field(default_factory=lambda: Loaded(rest=Idle()))
    held: HeldState = field(default_factory=lambda: HeldState(round=0, digest="", position=None))
    wants: Save | Rewind | None = None
    skips: Ranges = ()
    due: Save | Rewind | None = None

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
        """What a checkpoint keeps of the round that is not committed; None where there is nothing."""
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
        """The samples of this peer that it has not trained on. position: of the training."""
        return without(self.samples, without(self.samples, position.holes))

    @property
    def is_in_round(self) -> bool:
        """Whether a round was begun and is not decided yet."""
        return isinstance(self.phase, TrainingRound | AwaitingCommit)

    @property
    def is_within(self) -> bool:
        """Whether the weights may be of within a round: a committed round's otherwise."""
        return self.is_in_round or isinstance(_rest(self.phase), Resumed)

    def to_json(self, *, has_feedback: bool) -> dict[str, Json]:
        """What a checkpoint keeps: the round that is held and, within the next one, what was done of it."""
        held, progress, within = self.held, self.progress, cast(Json, None)
        if progress is not None:
            within = [progress.round, progress.steps, cast(Json, to_pairs(progress.spent))]
        return {
            "round": held.round,
            "digest": held.digest,
            "feedback": has_feedback,
            "inside": self.is_within,
            "within": within,
            "position": None if held.position is None else held.position.to_json(),
        }

    def asking(self, verdict: Verdict) -> RoundState:
        """Ask for a save or a rewind with the next part; a rewind outweighs a save."""
        if isinstance(verdict, Rewind) or (isinstance(verdict, Save) and self.wants is None):
            return replace(self, wants=verdict)
        return self

    def skipping(self, samples: range) -> RoundState:
        """Ask with the next part that nobody uses these samples."""
        return replace(self, skips=merged((*self.skips, samples)))


def _rest(phase: Phase) -> Idle | Resumed | None:
    """What a phase says of the round after the one that is held, where no round was begun."""
    match phase:
        case Idle() | Resumed():
            return phase
        case Loaded(rest=rest) | WentBack(rest=rest) | Replacing(rest=rest):
            return rest
    return None


# Messages: some of them are the agent's own (`protocol.requests`).


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The agent's `Committed`, with what only this peer knows.

    is_prepared: whether the commit has this peer's part, and this peer holds what follows from it.
    rewind_step: the step of this peer's own checkpoint of the round that the run goes back to; None where
    there is none, or where nobody would carry a verdict out since the training waits to be admitted.
    step, cursor: where this peer stands.
    """

    commit: Commit
    is_prepared: bool
    rewind_step: int | None
    step: int
    cursor: int


@dataclass(frozen=True, kw_only=True)
class CheckpointLoaded:
    """Every part was filled from a checkpoint. rest: Resumed for one that was taken within a round."""

    held: HeldState
    rest: Idle | Resumed

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CheckpointLoaded:
        """From what `RoundState.to_json` wrote; KeyError, TypeError or ValueError for anything else."""
        held = HeldState(
            round=int(values["round"]),
            digest=str(values["digest"]),
            position=Position.from_json(values["position"]) if values.get("position") else None,
        )
        progress = None
        if values["within"] is not None:
            round, steps, spent = values["within"]
            progress = Progress(round=int(round), steps=int(steps), spent=from_pairs(spent))
        return cls(held=held, rest=Resumed(done=progress) if values["inside"] else Idle(ahead=progress))


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """The loop asks for samples. position: of the state that it has."""

    position: Position


@dataclass(frozen=True, kw_only=True)
class SamplesUsed:
    """steps, spent: all of the round under way, with what was trained on now."""

    steps: int
    spent: Ranges


@dataclass(frozen=True, kw_only=True)
class PartMade:
    """The part of this peer in the round is fixed, and may be offered.

    tokens_per_sample: what a sample weighs. squares: the sum of the squares of the part's elements.
    kept: samples that this peer goes on to use while the round is decided. rewind_to: the round that this
    peer's guards want to go back to; None: none.
    """

    peer: str
    tokens_per_sample: int
    squares: float
    kept: Ranges
    rewind_to: int | None


@dataclass(frozen=True, kw_only=True)
class StepRefused:
    """The gradients were not averaged, so the step is not made: its samples are unused."""


@dataclass(frozen=True, kw_only=True)
class UpdateMade:
    """The optimizer made the update with the average."""


@dataclass(frozen=True, kw_only=True)
class LoadAccepted:
    """What was loaded is the state that was asked for."""


@dataclass(frozen=True, kw_only=True)
class LoadRefused:
    """What was loaded is another state, and this peer's own checkpoint is loaded again.

    why: for people. position: of that checkpoint.
    """

    why: str
    position: Position


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
)
Message = FromAgent | FromTrainer
