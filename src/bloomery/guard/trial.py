"""Trials: a remedy is tried on a fork of the run for some steps beyond the problem, then adopted or not.

The fork is the incarnation that a rewind begins. The checkpoint that it began from is kept while it is on
trial, so that the next remedy begins there too, and no step that was made with a discarded one remains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bloomery.events.records import Json, StepReport, as_float, as_json
from bloomery.guard.robust_window import median, window_statistics
from bloomery.guard.verdict import Anomaly, Rung, Watch

ADOPTED = "remedy adopted"
"""The kind of the message that a trial went well."""
HIGHEST = 3.0
"""The most spreads by which the median loss at the end of a trial may exceed that from before the problem."""
_LEAST, _FLOOR = 16, 0.001


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A remedy on trial.

    rung: the remedy.
    base_step: the step of the checkpoint that it began from.
    problem_step: the step at which the problem was judged; losses after it count.
    last_step: the trial is over after this step.
    usual, spread: median and spread of the losses before the trial; a spread of 0: too few are known.
    losses: the losses after `problem_step`.
    refused: how many updates were refused since the beginning.
    held_out: the newest held-out loss of the trial; None: there is none.
    is_over: whether it was judged.
    """

    rung: Rung
    base_step: int
    problem_step: int
    last_step: int
    usual: float
    spread: float
    losses: tuple[float, ...] = ()
    refused: int = 0
    held_out: float | None = None
    is_over: bool = False

    @property
    def limit(self) -> float:
        """The highest median loss with which the remedy is adopted."""
        return self.usual + HIGHEST * self.spread if self.spread else math.inf

    def evidence(self) -> dict[str, float]:
        """Return the numbers by which the trial is judged."""
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        numbers = {
            "rung": float(self.rung),
            "base_step": float(self.base_step),
            "steps_beyond": float(len(self.losses)),
            "median": median(self.losses) if len(finite) == len(self.losses) > 0 else math.nan,
            "highest": max(finite, default=math.nan),
            "usual": self.usual,
            "limit": self.limit,
            "refused_updates": float(self.refused),
        }
        return numbers if self.held_out is None else {**numbers, "held_out": self.held_out}

    def to_json(self) -> Json:
        """Return what `trial_from_json` reads."""
        return {
            "rung": int(self.rung),
            "base_step": self.base_step,
            "problem_step": self.problem_step,
            "last_step": self.last_step,
            "usual": self.usual,
            "spread": self.spread,
            "losses": [as_json(loss) for loss in self.losses],
            "refused": self.refused,
            "held_out": None if self.held_out is None else as_json(self.held_out),
            "is_over": self.is_over,
        }


def trial_from_json(values: Any) -> Trial | None:  # Any: written by `to_json`
    """Return the trial that a checkpoint holds; None where nothing was on trial."""
    if not isinstance(values, dict):
        return None
    held_out = values["held_out"]
    return Trial(
        rung=Rung(values["rung"]),
        base_step=int(values["base_step"]),
        problem_step=int(values["problem_step"]),
        last_step=int(values["last_step"]),
        usual=as_float(values["usual"]),
        spread=as_float(values["spread"]),
        losses=tuple(as_float(loss) for loss in values["losses"]),
        refused=int(values["refused"]),
        held_out=None if held_out is None else as_float(held_out),
        is_over=bool(values["is_over"]),
    )


def begin_trial(
    rung: Rung, *, base_step: int, problem_step: int, steps: int, losses_before: Sequence[float]
) -> Trial:
    """Return the trial of a remedy, which has just gone back.

    steps: how many steps beyond the problem are tried.
    losses_before: the newest losses up to the step that it went back to.
    """
    calm = [loss for loss in losses_before if math.isfinite(loss)]
    usual, spread, _ = window_statistics(calm, floor=_FLOOR) if len(calm) >= _LEAST else (math.nan, 0.0, 0.0)
    return Trial(
        rung=rung,
        base_step=base_step,
        problem_step=problem_step,
        last_step=problem_step + steps,
        usual=usual,
        spread=spread,
    )


def after_step(trial: Trial, report: StepReport) -> tuple[Trial | None, Watch | Anomaly | None]:
    """Return the trial after a step (None once its remedy is adopted), and the verdict if it ended."""
    if trial.is_over:  # the run has not gone back yet, as between peers
        return trial, None
    counts = report.step > trial.problem_step
    held_out = report.held_out_loss
    trial = replace(
        trial,
        losses=(*trial.losses, report.loss) if counts else trial.losses,
        refused=trial.refused + (not report.update_applied),
        held_out=trial.held_out if held_out is None else held_out,
    )
    if report.step < trial.last_step:
        return trial, None
    numbers = trial.evidence()
    end = numbers["median"]
    told = (
        f"{rung_words(trial.rung)} was tried on a fork of step {trial.base_step}, until {len(trial.losses)} "
        f"steps beyond the problem, where the median loss is {end:.4f}"
    )
    if trial.spread:
        told = f"{told} (before the problem {trial.usual:.4f}, at most {trial.limit:.4f} is taken)"
    if end <= trial.limit:  # False where a loss was not finite
        return None, Watch(
            judged_step=report.step, kind=ADOPTED, reason=f"{told}: it is adopted", numbers=numbers
        )
    return replace(trial, is_over=True), Anomaly(
        judged_step=report.step,
        first_bad=trial.base_step + 1,
        reason=f"{told}: it is discarded",
        numbers=numbers,
    )


def rung_words(rung: Rung) -> str:
    """Return a remedy in words."""
    return {
        Rung.REPEAT: "Making the same steps again",
        Rung.SKIP: "Leaving samples out",
        Rung.SLOW: "Leaving samples out at a lower learning rate",
        Rung.CLAMP: "Leaving samples out with clamps",
    }[rung]
