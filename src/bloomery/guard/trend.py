"""Guards that only warn: rising gradient norms, slower steps, a loss that no longer falls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bloomery.events.records import Json, StepReport
from bloomery.guard.robust_window import RobustWindow, is_high, push, window_from_json
from bloomery.guard.verdict import CarryOn, Rung, Verdict, Watch

QUIET_STEPS = 200
"""The number of steps for which a guard does not repeat a warning."""
MOST_GAP_STEPS = 1000
"""The number of unreported steps after which the past of a quantity begins anew."""
THROUGHPUT = "throughput"
"""The name of the guard whose warnings make ranks compare how long each worked by itself."""
LEAST_VALUES = 16
"""The fewest past values with which a guard warns."""


@dataclass(frozen=True, kw_only=True)
class _LevelHistory:
    """The past of one quantity.

    level: its level.
    step: the newest step.
    warned_step: the step of the last warning; 0: there was none.
    about: the batch, precision and peers that the level belongs to.
    """

    level: RobustWindow
    step: int = 0
    warned_step: int = 0
    about: str = ""

    def to_json(self) -> dict[str, Json]:
        return {
            "level": self.level.to_json(),
            "step": self.step,
            "told": self.warned_step,  # the name that checkpoints have for it
            "about": self.about,
        }

    def with_value(
        self, value: float, report: StepReport, *, floor: float, least_spread: float
    ) -> _LevelHistory:
        """Return the past and `value`; it begins anew after a gap or a change of batch, precision or peers.

        floor: of the level's spread.
        least_spread: a level that spreads less is widened to it.
        """
        about = f"{report.global_batch} {report.precision} {report.peers}"
        is_other = report.step <= self.step or report.step > self.step + MOST_GAP_STEPS or about != self.about
        level = RobustWindow() if is_other else self.level
        widen = max(1.0, least_spread / level.spread) if least_spread and level.is_known else 1.0
        level, _ = push(level, value, floor=floor, widen=widen)
        return replace(self, level=level, about=about, step=report.step)

    def may_warn(self, step: int) -> bool:
        """Return whether the level is known well enough, and the last warning is long enough ago."""
        is_quiet = self.warned_step and step - self.warned_step < QUIET_STEPS
        return len(self.level.window) >= LEAST_VALUES and not is_quiet

    def warned(
        self, step: int, *, kind: str, reason: str, numbers: Mapping[str, float]
    ) -> tuple[_LevelHistory, Verdict]:
        """Return the past after a warning at `step`, and the warning."""
        verdict = Watch(judged_step=step, kind=kind, reason=reason, numbers=numbers)
        return replace(self, warned_step=step), verdict


def _history_from_json(values: Any) -> _LevelHistory:  # Any: written by `to_json`
    if not isinstance(values, dict):
        return _LevelHistory(level=RobustWindow())
    return _LevelHistory(
        level=window_from_json(values["level"]),
        step=values["step"],
        warned_step=values["told"],
        about=values["about"],
    )


@dataclass(frozen=True, kw_only=True)
class GradientNormRise:
    """Warns early that the newest gradient norms are far above those before them.

    It judges logarithms, for norms differ by factors. A norm of 0 was not measured. The past begins anew
    after a change of batch, precision or peers, and after a gap.
    """

    START_UP_STEPS = 200
    FLOOR = 0.0
    LEAST_SPREAD = 0.05
    name: str = "gradient_norm"

    def fresh(self) -> Json:
        """Return the history before the first step."""
        return _LevelHistory(level=RobustWindow()).to_json()

    def judge(self, history: Json, report: StepReport) -> tuple[Json, Verdict]:
        """Judge the logarithm of the norm."""
        past, verdict = self.judged(_history_from_json(history), report)
        return past.to_json(), verdict

    def begin(self) -> _LevelHistory:
        """Return the past before the first step."""
        return _LevelHistory(level=RobustWindow())

    def judged(self, past: _LevelHistory, report: StepReport) -> tuple[_LevelHistory, Verdict]:
        """Return the past after `report`, and the verdict."""
        carry_on, norm = CarryOn(judged_step=report.step), report.gradient_norm
        if not report.update_applied or not (math.isfinite(norm) and norm > 0.0):
            return past, carry_on
        past = past.with_value(math.log(norm), report, floor=self.FLOOR, least_spread=self.LEAST_SPREAD)
        level = past.level
        if report.step <= self.START_UP_STEPS or not past.may_warn(report.step):
            return past, carry_on
        times = math.exp(math.log(norm) - level.centre)
        if times < 2.0 or not is_high(level.heights, line_steps=1, share=0.0):
            return past, carry_on
        reason = (
            f"the gradient norm {norm:.3g} is {times:.1f} times its usual {math.exp(level.centre):.3g}, and "
            "so were those before it: a spike of the loss may follow"
        )
        numbers = {"gradient_norm": norm, "usual": math.exp(level.centre), "times": times}
        return past.warned(report.step, kind="gradient norm", reason=reason, numbers=numbers)

    def resumed(self, history: Json) -> Json:
        """Return the history as it was: a resumed run goes on."""
        return history

    def rewound(self, before: Json, restored: Json, *, rung: Rung) -> Json:
        """Return the history of the checkpoint."""
        return restored


@dataclass(frozen=True, kw_only=True)
class ThroughputDrop:
    """Warns that three reports in a row were at least 5% slower than before, and clearly beyond their spread.

    It judges the seconds that all ranks know (`shared_seconds`), never a rank's own clock.
    """

    FLOOR = 0.01
    LEAST_SPREAD = 0.0
    SHARE = 0.05
    SPREADS = 5.0
    REPORTS = 3
    name: str = THROUGHPUT

    def fresh(self) -> Json:
        """Return the history before the first step."""
        return _LevelHistory(level=RobustWindow()).to_json()

    def judge(self, history: Json, report: StepReport) -> tuple[Json, Verdict]:
        """Judge the seconds of a step."""
        past, verdict = self.judged(_history_from_json(history), report)
        return past.to_json(), verdict

    def begin(self) -> _LevelHistory:
        """Return the past before the first step."""
        return _LevelHistory(level=RobustWindow())

    def judged(self, past: _LevelHistory, report: StepReport) -> tuple[_LevelHistory, Verdict]:
        """Return the past after `report`, and the verdict."""
        carry_on, seconds = CarryOn(judged_step=report.step), report.shared_seconds
        if seconds is None or not seconds > 0.0:
            return past, carry_on
        past = past.with_value(seconds, report, floor=self.FLOOR, least_spread=self.LEAST_SPREAD)
        level = past.level
        if not past.may_warn(report.step):
            return past, carry_on
        bound = level.centre + max(
            self.SHARE * level.centre / (1.0 - self.SHARE), self.SPREADS * level.spread
        )
        least = min(level.recent[-self.REPORTS :])
        if least < bound:
            return past, carry_on
        reason = (
            f"the last {self.REPORTS} steps took at least {least:.3f} s, "
            f"{1.0 - level.centre / least:.1%} less throughput than at the usual {level.centre:.3f} s"
        )
        numbers = {"seconds": least, "usual": level.centre, "spread": level.spread}
        return past.warned(report.step, kind="throughput", reason=reason, numbers=numbers)

    def resumed(self, history: Json) -> Json:
        """Return the history as it was: a resumed run goes on."""
        return history

    def rewound(self, before: Json, restored: Json, *, rung: Rung) -> Json:
        """Return the history of the checkpoint."""
        return restored


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """Warns once that the loss has stopped falling, judged over doublings of the run's length.

    A loss that follows a power law falls by nearly as much in each doubling. It has stopped when the newest
    doubling brought less than a tenth of the fall of the one before, and less than LEAST_SHARE of the loss,
    at a learning rate of at least half of its highest.
    """

    LEAST_SHARE = 0.005

    FIRST_STEP = 8192
    name: str = "plateau"

    def fresh(self) -> Json:
        """Return the history before the first step."""
        return {
            "step": 0,
            "sum": 0.0,
            "squares": 0.0,
            "count": 0,
            "means": [],
            "peak_rate": 0.0,
            "told": False,
        }

    def judge(self, history: Json, report: StepReport) -> tuple[Json, Verdict]:
        """Add the loss to its doubling, and judge when a doubling is complete."""
        carry_on = CarryOn(judged_step=report.step)
        past: Any = dict(history) if isinstance(history, dict) else self.fresh()  # Any: written here
        if not report.update_applied or not math.isfinite(report.loss):
            return history, carry_on
        verdict: Verdict = carry_on
        if past["step"] and report.step.bit_length() > past["step"].bit_length():
            past, verdict = self._doubled(past, report)
        elif past["step"] and report.step <= past["step"]:
            past |= {"sum": 0.0, "squares": 0.0, "count": 0}
        return {
            **past,
            "step": report.step,
            "sum": past["sum"] + report.loss,
            "squares": past["squares"] + report.loss * report.loss,
            "count": past["count"] + 1,
            "peak_rate": max(past["peak_rate"], report.learning_rate),
        }, verdict

    def resumed(self, history: Json) -> Json:
        """Return the history as it was: a resumed run goes on."""
        return history

    def rewound(self, before: Json, restored: Json, *, rung: Rung) -> Json:
        """Return the history of the checkpoint."""
        return restored

    def absorbed(
        self, history: Json, *, losses: Any, peak_rate: float, step: int
    ) -> Json:  # Any: an array, and this module needs none
        """Return the history after many losses of one doubling, of which `step` is the last."""
        past: Any = history  # Any: written by `judge`
        return {
            **past,
            "step": step,
            "sum": past["sum"] + float(losses.sum()),
            "squares": past["squares"] + float((losses * losses).sum()),
            "count": past["count"] + len(losses),
            "peak_rate": max(past["peak_rate"], peak_rate),
        }

    def _doubled(self, past: Any, report: StepReport) -> tuple[Any, Verdict]:
        carry_on = CarryOn(judged_step=report.step)
        count = past["count"]
        mean = past["sum"] / count
        error = math.sqrt(max(past["squares"] / count - mean * mean, 0.0) / count)
        means = [*past["means"], [mean, error]][-3:]
        past = {**past, "sum": 0.0, "squares": 0.0, "count": 0, "means": means}
        if past["told"] or len(means) < 3 or report.step < self.FIRST_STEP or count < 100:
            return past, carry_on
        before, newest = means[0][0] - means[1][0], means[1][0] - means[2][0]
        uncertain = math.hypot(means[0][1], means[1][1])
        is_clear = before > 10.0 * uncertain and before > 0.01 * mean
        most = min(0.1 * before, self.LEAST_SHARE * mean)
        if not is_clear or newest > most or report.learning_rate < 0.5 * past["peak_rate"]:
            return past, carry_on
        reason = (
            f"the loss no longer falls: by {newest:.4f} to {mean:.4f} in the steps since half of the way, by "
            f"{before:.4f} in as large a part of the run before"
        )
        numbers = {"fall": newest, "fall_before": before, "loss": mean}
        return {**past, "told": True}, Watch(
            judged_step=report.step, kind="plateau", reason=reason, numbers=numbers
        )
