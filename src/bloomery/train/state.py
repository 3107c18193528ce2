"""How far a run is: the frozen value that the training loop passes from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bloomery.checkpoint.format.state import Json
from bloomery.data.position import Position
from bloomery.diloco.outer import UnderWay
from bloomery.guard.restraint import Restraint, restraint_at, restraints_from_json


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Where the run ends: at the first step that reaches either figure.

    samples, steps: None for no limit.
    """

    samples: int | None = None
    steps: int | None = None

    def is_reached(self, *, step: int, consumed: int) -> bool:
        """Whether the run has reached its end."""
        by_samples = self.samples is not None and consumed >= self.samples
        return by_samples or (self.steps is not None and step >= self.steps)


@dataclass(frozen=True, kw_only=True)
class TrainingOutcome:
    """How training ended.

    failed: it ended though nobody asked for that.
    """

    reason: str
    step: int
    finished: bool
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """How far a run is: steps done, position in the data, and whether it was told to stop.

    under_way: the round between peers that this state is in; None in a run of one peer, and at a commit.
    restraints: limits on learning rate, gradients and attention logits, after rewinds.
    """

    goal: Goal
    step: int = 0
    position: Position = field(default_factory=Position)
    refused_updates: int = 0
    refused_in_a_row: int = 0
    nan_losses: int = 0
    stopped: TrainingOutcome | None = None
    under_way: UnderWay | None = None
    restraints: tuple[Restraint, ...] = ()

    @property
    def restraint(self) -> Restraint:
        """What restrains the next step, as one restraint."""
        return restraint_at(self.restraints, self.consumed())

    @property
    def done(self) -> bool:
        """Whether nothing is left to train, or the run was told to stop. Within a round something is
        always left.
        """
        reached = self.goal.is_reached(step=self.step, consumed=self.position.consumed)
        return (reached and self.under_way is None) or self.stopped is not None

    def halting(self, reason: str, *, failed: bool) -> TrainState:
        """Return the state of a run that ends here.

        failed: nobody asked for the end.
        """
        outcome = TrainingOutcome(reason=reason, step=self.step, finished=False, failed=failed)
        return replace(self, stopped=outcome)

    def consumed(self, *, beyond: int = 0) -> int:
        """Return the number of samples that the run has used, which schedules read.

        beyond: number of samples that this peer takes besides.
        Within a round nobody knows what the other peers did; they are assumed to do what this peer does.
        """
        own = self.position.consumed + beyond
        if self.under_way is None:
            return own
        return self.under_way.committed + self.under_way.live * (own - self.under_way.committed)

    def after(self, span: Sequence[range]) -> TrainState:
        """Return the state one step further, with `span` consumed."""
        return replace(self, step=self.step + 1, position=self.position.after(tuple(span)))

    def counting(self, *, applied: bool, loss_is_nan: bool) -> TrainState:
        """Return the same state with the outcome of its last step counted."""
        return replace(
            self,
            refused_updates=self.refused_updates + (not applied),
            refused_in_a_row=0 if applied else self.refused_in_a_row + 1,
            nan_losses=self.nan_losses + loss_is_nan,
        )

    def to_json(self) -> dict[str, Json]:
        """Return what a checkpoint keeps of the state; goal and stop belong to the process."""
        return {
            "step": self.step,
            "position": self.position.to_json(),
            "refused_updates": self.refused_updates,
            "refused_in_a_row": self.refused_in_a_row,
            "nan_losses": self.nan_losses,
            "restraints": [restraint.to_json() for restraint in self.restraints],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, goal: Goal) -> TrainState:
        """Return the state that `to_json` wrote, under today's goal."""
        return cls(
            goal=goal,
            step=int(values["step"]),
            position=Position.from_json(values["position"]),
            refused_updates=int(values["refused_updates"]),
            refused_in_a_row=int(values["refused_in_a_row"]),
            nan_losses=int(values["nan_losses"]),
            restraints=restraints_from_json(values.get("restraints", ())),  # absent before they were known
        )
