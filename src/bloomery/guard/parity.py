"""Stops a run whose first losses or samples after a resume do not continue those before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bloomery.events.records import Json, StepReport
from bloomery.guard.robust_window import median
from bloomery.guard.verdict import CarryOn, Rung, Stop, Verdict

SHARE = 0.01
"""A loss that is higher than before the resume by more than this share fails the run."""
SPREADS = 5.0  # standard errors by which losses must differ
LEAST, MOST = 5, 50
"""At least LEAST and at most MOST losses after a resume are compared, until their noise is below SHARE."""
REMEMBERED = 50  # losses before the resume


@dataclass(frozen=True, kw_only=True)
class ResumeParity:
    """Fails a run whose losses after a resume are 1% above those before it, beyond their spread.

    It also fails a run that goes on with other samples than those that come next. Losses are compared until
    1% is SPREADS standard errors, so noisy losses take longer. When the learning rate, batch, precision,
    mixture or number of peers has changed, or the checkpoint was taken within a spike, another loss is
    expected, and only the samples are compared.
    """

    name: str = "resume_parity"

    def fresh(self) -> Json:
        """Return the history before the first step."""
        past: dict[str, Json] = {"losses": [], "step": 0, "consumed": 0, "about": "", "rate": 0.0}
        return {**past, "after": None, "most_peers": 1}

    def resumed(self, history: Json) -> Json:
        """Return the history of a checkpoint that a process goes on from."""
        past: Any = history if isinstance(history, dict) else self.fresh()  # Any: written here
        return {**past, "after": [] if past["step"] else None}

    def rewound(self, before: Json, restored: Json, *, rung: Rung) -> Json:
        """Return the history of the checkpoint: a rewind, too, goes on from where it was.

        Where samples were left out, another loss is expected: if it is high, the ladder has to answer.
        """
        past: Any = self.resumed(restored)
        return {**past, "after": None} if rung >= Rung.SKIP else past

    def judge(self, history: Json, report: StepReport) -> tuple[Json, Verdict]:
        """Judge the first losses after a resume, and the samples of the first."""
        past: Any = history if isinstance(history, dict) else self.fresh()  # Any: written here
        carry_on = CarryOn(judged_step=report.step)
        now = {
            "step": report.step,
            "consumed": report.consumed_samples,
            "about": f"{report.global_batch} {report.precision} {report.peers} {report.mixture}",
            "rate": report.learning_rate,
            "most_peers": max(int(past.get("most_peers", 1)), report.peers),
        }
        after = past["after"]
        verdict: Verdict = carry_on
        counts = report.update_applied and math.isfinite(report.loss)
        if after == [] and past["step"]:
            verdict = self._samples(past, report)
            same_rate = abs(report.learning_rate - past["rate"]) <= 0.1 * max(past["rate"], 1e-30)
            moves = _was_moving(past["losses"])
            if now["about"] != past["about"] or not same_rate or moves:
                after = None
        if after is not None and counts:
            after = [*after, report.loss]
            if verdict is carry_on and len(after) >= LEAST:
                verdict, done = self._losses(past["losses"], after, report)
                if done:
                    past, after = {**past, "losses": [*past["losses"], *after][-REMEMBERED:]}, None
            return {**past, **now, "after": after}, verdict
        losses = [*past["losses"], report.loss][-REMEMBERED:] if counts else past["losses"]
        return {**past, **now, "losses": losses, "after": after}, verdict

    def _samples(self, past: Any, report: StepReport) -> Verdict:
        expected = past["consumed"] + report.global_batch * report.peers
        # Between peers the samples of a step depend on who takes part in its round, not on the step alone.
        is_alone = max(int(past.get("most_peers", 1)), report.peers) == 1
        if report.step == past["step"] + 1 and report.consumed_samples != expected and is_alone:
            reason = (
                f"resume parity: step {report.step} ends at {report.consumed_samples:,} samples, but the "
                f"checkpoint says {expected:,}. The resumed run reads other data than it should"
            )
            numbers = {"consumed": float(report.consumed_samples), "expected": float(expected)}
            return Stop(judged_step=report.step, reason=reason, failed=True, numbers=numbers)
        return CarryOn(judged_step=report.step)

    def _losses(self, before: list[float], after: list[float], report: StepReport) -> tuple[Verdict, bool]:
        """Return the verdict, and whether the comparison is over."""
        carry_on: Verdict = CarryOn(judged_step=report.step)
        compared = before[-max(len(after), 20) :]
        was, now = median(compared), median(after)
        error = math.hypot(_error(compared, was), _error(after, now))
        rise = (now - was) / abs(was) if was else 0.0
        if rise > SHARE and now - was > SPREADS * error:
            reason = (
                f"resume parity: the first {len(after)} losses after the resume have the median {now:.4f}, "
                f"{rise:+.1%} over {was:.4f} before it ({(now - was) / error:.1f} standard errors). Weights, "
                "optimizer state or data are not those that were saved"
            )
            numbers = {"after": now, "before": was, "rise": rise, "standard_error": error}
            return Stop(judged_step=report.step, reason=reason, failed=True, numbers=numbers), True
        is_clear = SPREADS * error < SHARE * abs(was)
        return carry_on, is_clear or len(after) >= MOST


def _was_moving(losses: list[float]) -> bool:
    """Return whether the newest loss before the resume was unusually high, or there are too few to tell."""
    if len(losses) < LEAST:
        return True
    centre = median(losses[-20:])
    spread = 1.4826 * median([abs(value - centre) for value in losses[-20:]])
    return losses[-1] - centre > max(3.0 * spread, SHARE * abs(centre))


def _error(values: list[float], centre: float) -> float:
    """Return the standard error of a median, from the median deviation; at least 0.05% of the centre."""
    spread = 1.4826 * median([abs(value - centre) for value in values])
    return max(1.25 * spread * (1 + 4 / len(values)) / math.sqrt(len(values)), 0.0005 * abs(centre))
