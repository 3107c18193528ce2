"""The guards without statistics: on losses, updates and the loss scale; for saves, limits and requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bloomery.events.records import Json, StepReport
from bloomery.guard.verdict import Anomaly, CarryOn, Rewind, Rung, Save, Stop, Verdict, Watch

START_UP_STEPS = 200
"""The first steps, in which refused updates are normal while the loss scale is still being found."""


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    """Finds an anomaly when `losses` losses in a row were not finite, or `updates` updates were refused.

    A first loss that is not finite gives a warning. Updates that are refused while a run starts up and its
    loss scale is being found do not count.

    losses, updates: how many in a row; 0: never.
    """

    losses: int
    updates: int
    name: str = "not_finite"

    def fresh(self) -> Json:
        """Return the history before the first step."""
        return _row_of_bad()

    def judge(self, history: Json, report: StepReport) -> tuple[Json, CarryOn | Watch | Anomaly]:
        """Judge by the number of losses or updates in a row that were not finite."""
        carry_on = CarryOn(judged_step=report.step)
        past: Any = history if isinstance(history, dict) else _row_of_bad()  # Any: written here
        finite, applied = math.isfinite(report.loss), report.update_applied
        is_sought = report.step <= START_UP_STEPS and (report.loss_scale or 0.0) > 1.0
        if (finite and applied) or (is_sought and not applied):
            return _row_of_bad(), carry_on
        in_a_row = 0 if finite else past["in_a_row"] + 1
        first, asked = past["first"] or report.step, past["asked"]
        numbers = {"losses_in_a_row": float(in_a_row), "refused_in_a_row": float(report.refused_in_a_row)}
        reason = ""
        if self.losses and in_a_row >= self.losses:
            reason = f"{in_a_row} losses in a row were not finite, from step {first} on"
        elif self.updates and report.refused_in_a_row >= self.updates:
            reason = f"{report.refused_in_a_row} updates in a row were not finite, from step {first} on"
        if reason and not asked:
            verdict = Anomaly(judged_step=report.step, first_bad=first, reason=reason, numbers=numbers)
            return _row_of_bad(in_a_row=in_a_row, first=first, asked=True), verdict
        kept = _row_of_bad(in_a_row=in_a_row, first=first, asked=asked)
        if self.losses and in_a_row == 1 and not asked:
            reason = f"the loss of step {report.step} is {report.loss}"
            return kept, Watch(judged_step=report.step, kind="not finite", reason=reason, numbers=numbers)
        return kept, carry_on

    def resumed(self, history: Json) -> Json:
        """Return the history with nothing asked: a stop came before what the last process asked for."""
        past: Any = history if isinstance(history, dict) else _row_of_bad()  # Any: written here
        return {**past, "asked": False}

    def rewound(self, before: Json, restored: Json, *, rung: Rung) -> Json:
        """Return the history of a run in which nothing is wrong yet."""
        return _row_of_bad()


def _row_of_bad(*, in_a_row: int = 0, first: int = 0, asked: bool = False) -> Json:
    """Return a history.

    in_a_row: the losses in a row that were not finite.
    first: the first bad step; 0: there is none.
    asked: whether the anomaly was reported already.
    """
    return {"in_a_row": in_a_row, "first": first, "asked": asked}


@dataclass(frozen=True, kw_only=True)
class LossScaleCollapse:
    """Warns of a loss scale that falls to 1, or to an eighth of what it was within `STEPS` steps.

    Gradients of fp16 then overflow again and again, which often precedes a divergence. A scale that has
    neither grown nor stayed the same for `SETTLED` steps is still being found, as at a run's start.
    """

    STEPS = 200
    SETTLED = 100
    FALL = 8.0
    name: str = "loss_scale"

    def fresh(self) -> Json:
        """Return the history before the first step."""
        return {"step": 0, "scale": 0.0, "since": 0, "settled": False, "high": 0.0, "high_step": 0, "told": 0}

    def judge(self, history: Json, report: StepReport) -> tuple[Json, CarryOn | Watch]:
        """Judge the scale against its highest of the last steps."""
        carry_on = CarryOn(judged_step=report.step)
        if report.loss_scale is None:
            return history, carry_on
        past: dict[str, Any] = dict(history) if isinstance(history, dict) else self.fresh()  # type: ignore[assignment]  # Any: written here
        scale, step = report.loss_scale, report.step
        if step <= past["step"] or step - past["step"] > 10 * self.STEPS:
            past |= {
                "scale": scale,
                "since": step,
                "settled": False,
                "high": scale,
                "high_step": step,
                "told": 0,
            }
        stayed = scale == past["scale"] and step - past["since"] >= self.SETTLED
        settled = past["settled"] or stayed or scale > past["scale"] > 0.0
        since = past["since"] if scale == past["scale"] else step
        high, high_step = past["high"], past["high_step"]
        if scale >= high or step - high_step > self.STEPS or not settled:
            high, high_step = max(scale, past["scale"] if settled else 0.0), step
        kept = {"step": step, "scale": scale, "since": since, "settled": settled}
        kept |= {"high": high, "high_step": high_step, "told": past["told"]}
        fell = settled and (scale * self.FALL <= high or (scale <= 1.0 < past["scale"]))
        if not fell or (past["told"] and step - past["told"] <= self.STEPS):
            return kept, carry_on
        reason = f"the loss scale fell from {high:g} to {scale:g} within {step - high_step} steps"
        numbers = {"loss_scale": scale, "highest": high}
        verdict = Watch(judged_step=step, kind="loss scale", reason=reason, numbers=numbers)
        return {**kept, "told": step, "high": scale, "high_step": step}, verdict

    def resumed(self, history: Json) -> Json:
        """Return the history as it was: a resumed run goes on."""
        return history

    def rewound(self, before: Json, restored: Json, *, rung: Rung) -> Json:
        """Return the history of the checkpoint."""
        return restored


@dataclass(frozen=True, kw_only=True)
class _WithoutMemory:
    """The methods of a guard that has no history."""

    def fresh(self) -> Json:
        """Return the empty history."""
        return None

    def rewound(self, before: Json, restored: Json, *, rung: Rung) -> Json:
        """Return the empty history."""
        return None

    def resumed(self, history: Json) -> Json:
        """Return the empty history."""
        return None


@dataclass(frozen=True, kw_only=True)
class SaveIntervals(_WithoutMemory):
    """Asks for checkpoints at intervals; an interval of 0 means never.

    every_steps: a checkpoint is due at each multiple of this number of steps.
    every_samples: a checkpoint is due when a multiple of this number of samples was passed.
    every_minutes: the minutes after which the next checkpoint is due.
    """

    every_steps: int
    every_samples: int
    every_minutes: float
    name: str = "save_intervals"

    def judge(self, history: Json, report: StepReport) -> tuple[Json, Verdict]:
        """Judge by the step, and by the clock that the ranks agreed on."""
        step = report.step
        if self.every_steps and step % self.every_steps == 0:
            return history, Save(judged_step=step, reason=f"every {self.every_steps} steps")
        before = report.consumed_samples - report.global_batch * report.peers
        if (
            self.every_samples
            and before // self.every_samples < report.consumed_samples // self.every_samples
        ):
            return history, Save(judged_step=step, reason=f"every {self.every_samples:,} samples")
        if self.every_minutes and report.facts.minutes_since_save >= self.every_minutes:
            return history, Save(judged_step=step, reason=f"every {self.every_minutes:g} minutes")
        return history, CarryOn(judged_step=step)


@dataclass(frozen=True, kw_only=True)
class StopLimits(_WithoutMemory):
    """Asks the run to stop at a limit; a limit of 0 means never.

    at_step: the step after which the run stops.
    after_minutes: the minutes that this process may train.
    """

    at_step: int
    after_minutes: float
    name: str = "stop_limits"

    def judge(self, history: Json, report: StepReport) -> tuple[Json, Verdict]:
        """Judge by the step, and by the clock that the ranks agreed on."""
        step = report.step
        if self.at_step and step >= self.at_step:
            return history, Stop(
                judged_step=step, reason=f"guard.stop_at_step = {self.at_step}", failed=False
            )
        if self.after_minutes and report.facts.minutes_running >= self.after_minutes:
            reason = f"guard.stop_after_minutes = {self.after_minutes:g}"
            return history, Stop(judged_step=step, reason=reason, failed=False)
        return history, CarryOn(judged_step=step)


@dataclass(frozen=True, kw_only=True)
class Requests(_WithoutMemory):
    """Asks for what a person, a signal or a supervisor has requested."""

    name: str = "requests"

    def judge(self, history: Json, report: StepReport) -> tuple[Json, Verdict]:
        """Judge by the facts that the ranks agreed on."""
        facts = report.facts
        if facts.stop_requested:
            reason = facts.stop_reason or "asked to stop"
            return history, Stop(judged_step=report.step, reason=reason, failed=False)
        if facts.rewind_requested:
            to_step, start, stop = facts.rewind_requested
            reason = f"asked to go back to step {to_step} by hand (control/rewind)"
            return history, Rewind(
                judged_step=report.step,
                to_step=to_step,
                skip=range(start, stop),
                reason=reason,
                may_go_on=True,
            )
        if facts.save_requested:
            return history, Save(judged_step=report.step, reason="asked to save")
        return history, CarryOn(judged_step=report.step)
