"""Guards without a history: save intervals, stop limits, and requests from outside."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.events.records import Json, StepReport
from bloomery.guard.verdict import CarryOn, Rewind, Rung, Save, Stop, Verdict


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
