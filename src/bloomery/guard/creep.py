"""Guards against slow trouble: a rising held-out loss, and memory or inner tensors that keep growing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bloomery.events.records import Json, StepReport
from bloomery.guard.robust_window import median
from bloomery.guard.verdict import CarryOn, Rung, Verdict, Watch

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HeldOutRise:
    """Warns once that the held-out loss rose at three evaluations in a row while the training loss did not.

    The run then overfits, or one of the two losses is computed from wrong data.
    """

    RISES = 3  # evaluations in a row
    LEAST_RISE = 0.01  # of the held-out loss, as a share
    LOSSES = 50  # training losses, whose median is compared
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
        if is_reported or not rises or last[1] < (1.0 + self.LEAST_RISE) * first[1] or last[2] > first[2]:
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
    RISES = 6  # blocks in a row
    LEAST_SHARE, LEAST_BYTES = 0.05, 32 * MIB  # of growth, to be reported
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
        if past["told"] or grown < max(self.LEAST_SHARE * (means[0] if means else 0.0), self.LEAST_BYTES):
            return kept, carry_on
        steps = self.RISES * self.BLOCK_STEPS
        reason = (
            f"memory per rank (mean over the ranks) grew by {grown / MIB:,.0f} MiB in {steps} steps to "
            f"{means[-1] / MIB:,.0f} MiB, and in every {self.BLOCK_STEPS} of them: probably a memory leak"
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


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """How sizes of one kind are judged.

    words: what they are. remedy: what bounds them. floor: smaller ones do no harm.
    factor: growth by less, within `InnerGrowth.RISES` medians, is no finding.
    limit: sizes above it are a finding, however they came about.
    """

    words: str
    remedy: str
    floor: float
    factor: float
    limit: float = math.inf


_KINDS = {
    "logit": _Kind(
        words="the largest attention logit",
        remedy="optim.qk_clip bounds it from the next start on (where peers do not average gradients), and "
        "model.qk_norm, beside which it is not needed, in a new run",
        floor=20.0,
        factor=2.5,
        limit=200.0,
    ),
    "hidden": _Kind(
        words="the largest hidden state",
        remedy="a lower optim.learning_rate or more optim.weight_decay holds it back",
        floor=50.0,
        factor=4.0,
    ),
    "weight": _Kind(
        words="the root mean square of the weights",
        remedy="a lower optim.learning_rate or more optim.weight_decay holds it back",
        floor=0.0,
        factor=1.5,
    ),
}


@dataclass(frozen=True, kw_only=True)
class InnerGrowth:
    """Warns that an inner tensor grows ever faster, long before the loss shows it.

    Each size is judged by medians of MEASURED measurements, on a logarithmic scale. In a training that goes
    well sizes grow like a power of the steps or saturate, and so ever more slowly on that scale. A finding is
    growth that does not slow down over RISES medians, and is NOISES times how far measurements usually lie
    from their median; or newest measurements that are all JUMP times what was usual, or above a limit. The
    past begins anew while the learning rate rises, and after a change of batch, precision, peers or mixture,
    for then sizes may change. A warning is repeated when the size has doubled since.
    """

    MEASURED = 3
    RISES = 7
    JUMP = 4.0
    NOISES = 8.0
    REMEMBERED = 0.8
    LARGEST_RISE_SHARE = 0.6  # of the whole growth, by one median: more is a jump
    LEAST_PACE = 0.7  # of the second half of the growth, relative to the first: less slows down
    name: str = "growth"

    def fresh(self) -> Json:
        """Return the history before the first step."""
        return {
            "about": "",
            "step": 0,
            "rate": 0.0,
            "newest": {},
            "count": 0,
            "medians": {},
            "noise": {},
            "told": {},
        }

    def judge(self, history: Json, report: StepReport) -> tuple[Json, Verdict]:
        """Judge the sizes of a step that measured them."""
        carry_on, sizes = CarryOn(judged_step=report.step), report.inner_sizes
        if not sizes or not report.update_applied:
            return history, carry_on
        past: Any = history if isinstance(history, dict) else self.fresh()  # Any: written here
        about = f"{report.global_batch} {report.precision} {report.peers} {report.mixture}"
        goes_on = about == past["about"] and report.step > past["step"]
        if not goes_on or report.learning_rate > (1.0 + 1e-6) * past["rate"]:
            past = {**past, "newest": {}, "count": 0, "medians": {}, "noise": {}}
        past = {**past, "about": about, "step": report.step, "rate": report.learning_rate}
        newest = {
            kind: [*past["newest"].get(kind, []), [*values]][-self.MEASURED :]
            for kind, values in sizes.items()
            if kind in _KINDS and all(map(math.isfinite, values))
        }
        past |= {"newest": newest, "count": past["count"] + 1}
        is_whole = past["count"] % self.MEASURED == 0
        verdict: Verdict = carry_on
        for kind, measured in newest.items():
            if len(measured) < self.MEASURED:
                continue
            medians = past["medians"].get(kind, [])
            verdict = self._jump(kind, measured, medians, past["told"], report.step) or verdict
            if is_whole:
                medians = [*medians, [median(values) for values in zip(*measured, strict=True)]]
                past["medians"] = {**past["medians"], kind: medians[-self.RISES - 1 :]}
                noise = [_scatter(values) for values in zip(*measured, strict=True)]
                before = past["noise"].get(kind, noise)
                kept = self.REMEMBERED
                noise = [kept * old + (1.0 - kept) * new for old, new in zip(before, noise, strict=True)]
                past["noise"] = {**past["noise"], kind: noise}
                verdict = self._growth(kind, past, report.step) or verdict
        if isinstance(verdict, Watch):
            kind = next(kind for kind in _KINDS if verdict.numbers.get(kind))
            past["told"] = {**past["told"], kind: verdict.numbers[kind]}
        return past, verdict

    def _growth(self, kind: str, past: Any, step: int) -> Watch | None:  # Any: written by `judge`
        """Return a warning of the block whose size grew most and does not slow down; None for none."""
        worst, medians = None, zip(*past["medians"][kind], strict=True)
        for block, (path, noise) in enumerate(zip(medians, past["noise"][kind], strict=True)):
            if len(path) > self.RISES and min(path) > 0.0 and _grows_faster(path, self):
                grown = path[-1] / path[0]
                least = max(_KINDS[kind].factor, math.exp(self.NOISES * noise))
                if grown >= least and (worst is None or grown > worst[1]):
                    worst = block, grown, path
        if worst is None:
            return None
        block, grown, path = worst
        measurements = self.RISES * self.MEASURED
        how = f"grew {grown:.1f}-fold in the last {measurements} measurements and does not slow down"
        how = f"{how}: from {path[0]:.3g} to {path[-1]:.3g}"
        return _warning(kind, block, now=path[-1], how=how, told=past["told"], step=step)

    def _jump(
        self, kind: str, measured: list[list[float]], medians: list[list[float]], told: Any, step: int
    ) -> Watch | None:
        """Return a warning of the block whose newest sizes are far above its usual one, or above a limit."""
        least = [min(values) for values in zip(*measured, strict=True)]
        block, limit = max(range(len(least)), key=least.__getitem__), _KINDS[kind].limit
        if least[block] > limit:
            how = f"is above {limit:g} ({least[block]:.0f}): bf16 resolves no fractions above 128"
            return _warning(kind, block, now=least[block], how=how, told=told, step=step)
        if len(medians) < 3:
            return None
        usual = [max(values) for values in zip(*medians, strict=True)]
        times = [now / before if before > 0.0 else 0.0 for now, before in zip(least, usual, strict=True)]
        block = max(range(len(times)), key=times.__getitem__)
        if times[block] < self.JUMP:
            return None
        how = f"was at least {times[block]:.1f} times its usual size at the last {self.MEASURED} measurements"
        how = f"{how}: {least[block]:.3g}, usually {usual[block]:.3g}"
        return _warning(kind, block, now=least[block], how=how, told=told, step=step)

    def resumed(self, history: Json) -> Json:
        """Return the history as it was: a resumed run goes on."""
        return history

    def rewound(self, before: Json, restored: Json, *, rung: Rung) -> Json:
        """Return the history of the checkpoint."""
        return restored


def _scatter(values: tuple[float, ...]) -> float:
    """Return how far logarithms of values lie from their median; 0 where a value is not above 0."""
    if min(values) <= 0.0:
        return 0.0
    middle = math.log(median(values))
    return sum(abs(math.log(value) - middle) for value in values) / len(values)


def _grows_faster(path: tuple[float, ...], guard: InnerGrowth) -> bool:
    """Whether logarithms of sizes rise nearly always, not by one jump, and no more slowly than before."""
    rises = [math.log(later / before) for before, later in pairwise(path)]
    whole, half = sum(rises), len(rises) // 2
    is_steady = (
        sum(rise > 0.0 for rise in rises) >= len(rises) - 1 and max(rises) <= guard.LARGEST_RISE_SHARE * whole
    )
    return is_steady and sum(rises[-half:]) >= guard.LEAST_PACE * sum(rises[:half])


def _warning(kind: str, block: int, *, now: float, how: str, told: Any, step: int) -> Watch | None:
    """Return the warning; None for a size that does no harm, or that has not doubled since the last one."""
    rule = _KINDS[kind]
    if now < rule.floor or now < 2.0 * told.get(kind, 0.0):
        return None
    reason = f"{rule.words} of block {block} {how}; {rule.remedy}"
    return Watch(judged_step=step, kind="inner growth", reason=reason, numbers={kind: now, "block": block})
