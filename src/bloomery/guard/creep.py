"""Guards of what goes wrong slowly: a held-out loss that rises in spite of training, memory that grows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bloomery.events.records import Json, StepReport
from bloomery.guard.level import median
from bloomery.guard.verdict import CarryOn, Rung, Verdict, Watch

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HeldOutRise:
    """Warns once that the held-out loss rose at three evaluations in a row while the training loss did not.

    The run then learns its training data by heart, or one of both losses is computed from wrong data.
    """

    RISES = 3
    SHARE = 0.01
    LOSSES = 50
    name: str = "held_out"

    def fresh(self) -> Json:
        """Return the history before the first step."""
        return {"losses": [], "points": [], "told": False}

    def judge(self, history: Json, report: StepReport) -> tuple[Json, Verdict]:
        """Judge the newest held-out losses, each against the median of the training losses before it."""
        carry_on = CarryOn(judged_step=report.step)
        past: Any = history if isinstance(history, dict) else self.fresh()  # Any: written here
        losses = past["losses"]
        if report.update_applied and math.isfinite(report.loss):
            losses = [*losses, report.loss][-self.LOSSES :]
        held_out = report.held_out_loss
        if held_out is None or not math.isfinite(held_out) or not losses:
            return {**past, "losses": losses}, carry_on
        earlier = [point for point in past["points"] if point[0] < report.step]
        points = [*earlier, [report.step, held_out, median(losses)]][-self.RISES - 1 :]
        rises = len(points) > self.RISES and all(later[1] > before[1] for before, later in pairwise(points))
        is_reported = past["told"] and rises
        first, last = points[0], points[-1]
        kept: dict[str, Json] = {"losses": losses, "points": points, "told": is_reported}
        if is_reported or not rises or last[1] < (1.0 + self.SHARE) * first[1] or last[2] > first[2]:
            return kept, carry_on
        reason = (
            f"the held-out loss rose at {self.RISES} evaluations in a row, from {first[1]:.4f} at step "
            f"{first[0]} to {last[1]:.4f}, while the training loss went from {first[2]:.4f} to {last[2]:.4f}"
        )
        numbers = {"held_out": last[1], "held_out_before": first[1], "loss": last[2], "loss_before": first[2]}
        verdict = Watch(judged_step=report.step, kind="held-out loss", reason=reason, numbers=numbers)
        return {**kept, "told": True}, verdict

    def resumed(self, history: Json) -> Json:
        """Return the history as it was: a resumed run goes on."""
        return history

    def rewound(self, before: Json, restored: Json, *, rung: Rung) -> Json:
        """Return the history of the checkpoint."""
        return restored


@dataclass(frozen=True, kw_only=True)
class MemoryCreep:
    """Warns once that the ranks' memory grew from each block of steps to the next.

    The first block of a process is left out, for it fills caches.
    """

    BLOCK_STEPS = 100
    RISES = 6
    SHARE, LEAST_BYTES = 0.05, 32 * MIB
    name: str = "memory"

    def fresh(self) -> Json:
        """Return the history before the first step."""
        return {"means": [], "sum": 0.0, "count": 0, "started": False, "told": False}

    def judge(self, history: Json, report: StepReport) -> tuple[Json, Verdict]:
        """Judge the mean memory of a block of steps when the block is complete."""
        carry_on = CarryOn(judged_step=report.step)
        if report.memory_bytes is None:
            return history, carry_on
        past: Any = history if isinstance(history, dict) else self.fresh()  # Any: written here
        total, count = past["sum"] + report.memory_bytes, past["count"] + 1
        if count < self.BLOCK_STEPS:
            return {**past, "sum": total, "count": count}, carry_on
        means = [*past["means"], total / count][-self.RISES - 1 :] if past["started"] else []
        kept = {**past, "means": means, "sum": 0.0, "count": 0, "started": True}
        rises = len(means) > self.RISES and all(later > before for before, later in pairwise(means))
        grown = means[-1] - means[0] if rises else 0.0
        if past["told"] or grown < max(self.SHARE * (means[0] if means else 0.0), self.LEAST_BYTES):
            return kept, carry_on
        steps = self.RISES * self.BLOCK_STEPS
        reason = (
            f"the memory of a rank grew by {grown / MIB:,.0f} MiB in {steps} steps, on average to "
            f"{means[-1] / MIB:,.0f} MiB, and in each part of them: something is kept that should be freed"
        )
        numbers = {"bytes": means[-1], "bytes_before": means[0], "bytes_a_step": grown / steps}
        verdict = Watch(judged_step=report.step, kind="memory", reason=reason, numbers=numbers)
        return {**kept, "told": True}, verdict

    def resumed(self, history: Json) -> Json:
        """Return an empty history: another process has memory of its own."""
        return self.fresh()

    def rewound(self, before: Json, restored: Json, *, rung: Rung) -> Json:
        """Return the history of before the rewind: the process is the same."""
        return before
