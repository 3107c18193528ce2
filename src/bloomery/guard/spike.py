"""The spike guard: finds losses that jump or climb and stay up, which the ladder then undoes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from bloomery.events.records import Json, StepReport
from bloomery.guard.robust_window import (
    BLOCK,
    RobustWindow,
    is_extreme,
    is_high,
    median,
    push,
    window_from_json,
)
from bloomery.guard.verdict import Anomaly, CarryOn, Rung, Watch

FLOOR = 0.001
"""The spread is at least this share of the loss."""
HIGH = 3.0
"""The robust z-score (spreads above the centre) beyond which a loss is high."""
START_UP_STEPS, FIRST_STEPS = 200, 20
"""In the first START_UP_STEPS steps the spread is taken for wider; the first FIRST_STEPS are not judged."""
GAP = 20
"""The gap after which a log counts as another run's, as a multiple of the usual distance between reports."""
MOST_DISTANCE = 1000
"""The most steps that the usual distance between reports may be."""
EXCUSED_REPORTS = 100
"""The number of reports after a known change for which the spread is widened."""
ACCEPTED_STEPS = 500
"""The steps for which a judged spike must stay high before its loss becomes the new normal."""
_WIDER = 3.0
_RATE_RISE = 1.25
_BLOCKS = 64
_SLOW, _SLOW_SHARE = 6.0, 0.02
_DIVERGING, _DIVERGING_SHARE = 12.0, 0.05
_AS_LOW = 0.5
"""The spreads within which block medians are as low as the lowest: a climb begins at the last of those."""


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A spike that is under way.

    first_step, first_loss: the first step with a high loss, and that loss.
    level, spread: the centre and the spread of the losses before it.
    peak: the largest median of three losses so far.
    newest: the newest losses, at most three.
    high_steps: for how many steps the loss was high.
    calm: the reports in a row in which it was not.
    judged: whether the spike was reported as an anomaly.
    """

    first_step: int
    first_loss: float
    level: float
    spread: float
    peak: float
    newest: tuple[float, ...]
    high_steps: int
    calm: int = 0
    judged: bool = False


@dataclass(frozen=True, kw_only=True)
class _Past:
    step: int = 0
    distance: int = 0
    batch: int = 0
    rate: float = 0.0
    circumstances: str = ""
    excused_until: int = 0
    climbs: bool = False
    level: RobustWindow = field(default_factory=RobustWindow)
    blocks: tuple[tuple[int, float], ...] = ()
    """(last step, median) of each block of calm losses."""
    spike: Spike | None = None


@dataclass(frozen=True, kw_only=True)
class SpikeGuard:
    """Holds each loss against the centre of those before it, in units of their own spread.

    Fast: several of the newest losses are high together (or one that is the mean of several steps and far
    out), which is told; it is an anomaly when it stays for `patience` steps and does not come back by itself.
    Slow: the medians of blocks climb from their lowest. Diverging: they climb on. Nothing depends on the
    model's size or the unit of the loss; three losses are a past. Batch, learning rate, precision, mixture
    and peers are in the report: for a while after they changed, a loss has to be higher. Losses that are not
    finite or of refused updates count neither way: another guard watches those.
    """

    patience: int
    name: str = "spike"

    def fresh(self) -> Json:
        """Return the history before the first step."""
        return _to_json(_Past())

    def judge(self, history: Json, report: StepReport) -> tuple[Json, CarryOn | Watch | Anomaly]:
        """Judge the loss of this step against those before it."""
        past, verdict = self.judged(_from_json(history), report)
        return _to_json(past), verdict

    def resumed(self, history: Json) -> Json:
        """Return the history with its spike not judged: a stop came before the rewind that it asked for."""
        past = _from_json(history)
        spike = None if past.spike is None else replace(past.spike, judged=False)
        return _to_json(replace(past, spike=spike))

    def rewound(self, before: Json, restored: Json, *, rung: Rung) -> Json:
        """Return the checkpoint's history with no spike under way."""
        return _to_json(replace(_from_json(restored), spike=None, climbs=False))

    def climb_since(self, history: Json) -> int | None:
        """Return the last step before the loss began to climb, the newest one where it does not climb.

        None where too few block medians are known.
        """
        past = _from_json(history)
        return _last_low(past.blocks, spread=past.level.spread) if len(past.blocks) > 1 else None

    def begin(self) -> _Past:
        """Return the past before the first step."""
        return _Past()

    def is_plain(self, past: _Past, *, step: int, rate: float) -> bool:
        """Return whether no spike is under way and a learning rate of at most `rate` is no known change."""
        settled = past.spike is None and step > max(past.excused_until, START_UP_STEPS) and past.rate > 0.0
        return settled and rate <= _RATE_RISE * past.rate and step == past.step + past.distance

    def after_block(
        self, past: _Past, level: RobustWindow, *, step: int, rate: float, batch: int
    ) -> tuple[_Past, CarryOn | Watch | Anomaly]:
        """Return the past after a block of calm losses, and the verdict on the rise of block medians.

        step, rate, batch: those of the last report of the block.
        """
        return self._climbing(replace(past, level=level, step=step), step=step, rate=rate, batch=batch)

    def judged(self, past: _Past, report: StepReport) -> tuple[_Past, CarryOn | Watch | Anomaly]:
        """Return the past after `report`, and the verdict."""
        line_steps = past.distance or 1
        past = _continued(past, report)
        carry_on = CarryOn(judged_step=report.step)
        if not report.update_applied or not math.isfinite(report.loss):
            return past, carry_on
        if past.spike is not None:
            return self._watched(past, past.spike, report, line_steps)
        level, block_is_full = push(past.level, report.loss, floor=FLOOR, widen=_widened(past, report))
        past = replace(past, level=level)
        if report.step <= FIRST_STEPS:
            return past, carry_on
        share = (report.loss - past.level.centre) / max(abs(past.level.centre), 1e-12)
        if is_high(level.heights, line_steps=line_steps, share=share):
            return self._begun(past, report, line_steps, share=share)
        if block_is_full:
            rate, batch = report.learning_rate, report.global_batch
            return self._climbing(past, step=report.step, rate=rate, batch=batch)
        return past, carry_on

    def _begun(
        self, past: _Past, report: StepReport, line_steps: int, *, share: float
    ) -> tuple[_Past, CarryOn | Watch | Anomaly]:
        """Begin a spike: remove its losses from the past, and return the past and the verdict."""
        level = past.level
        high = [loss for loss, height in zip(level.recent, level.heights, strict=True) if height > HIGH]
        back = next(index for index, height in enumerate(level.heights) if height > HIGH)
        ago = len(level.heights) - 1 - back
        calm = level.recent[:back]
        centre, spread = replace(level, recent=calm).expected()
        before = replace(level, window=(*level.window, *calm)[-96:], recent=(), heights=())
        spike = Spike(
            first_step=max(report.step - ago * line_steps, 1),
            first_loss=high[0],
            level=centre,
            spread=spread,
            peak=median(high[-3:]),
            newest=tuple(high[-3:]),
            high_steps=len(high) * line_steps,
        )
        past = replace(past, level=before, spike=spike)
        is_alone = len(high) == 1 and not is_extreme(level.heights[-1], share=share)
        if spike.high_steps >= self.patience and not is_alone:
            return self._asked(past, spike, report)
        reason = f"a fast spike begins: {_described(spike, report)}"
        return past, Watch(
            judged_step=report.step, kind="fast spike", reason=reason, numbers=_numbers(spike, report)
        )

    def _watched(
        self, past: _Past, spike: Spike, report: StepReport, line_steps: int
    ) -> tuple[_Past, CarryOn | Watch | Anomaly]:
        """Judge one more report of a spike: it is over, goes on, becomes an anomaly, or is the new level."""
        carry_on = CarryOn(judged_step=report.step)
        is_up = report.loss > spike.level + HIGH * spike.spread
        newest = (*spike.newest, report.loss)[-3:]
        spike = replace(
            spike,
            newest=newest,
            peak=max(spike.peak, median(newest)),
            high_steps=spike.high_steps + (line_steps if is_up else 0),
            calm=0 if is_up else spike.calm + 1,
        )
        if spike.calm >= 3:
            lasted = f"{spike.high_steps} steps"
            end = "it came down after it was judged" if spike.judged else "it recovered by itself: left alone"
            reason = (
                f"the spike from step {spike.first_step} (peak {spike.peak:.3f}, {lasted}) is over; {end}"
            )
            verdict = Watch(
                judged_step=report.step, kind="recovered", reason=reason, numbers=_numbers(spike, report)
            )
            return replace(past, spike=None), verdict
        if spike.judged:
            if spike.high_steps < ACCEPTED_STEPS:
                return replace(past, spike=spike), carry_on
            reason = (
                f"the loss stayed at {median(newest):.3f} since step {spike.first_step}: judged anew there"
            )
            verdict = Watch(
                judged_step=report.step, kind="new level", reason=reason, numbers=_numbers(spike, report)
            )
            return replace(past, spike=None, level=RobustWindow(), blocks=()), verdict
        comes_back = median(newest) - spike.level < 0.5 * (spike.peak - spike.level)
        if not is_up or spike.high_steps < self.patience * (3 if comes_back else 1):
            return replace(past, spike=spike), carry_on
        return self._asked(past, spike, report)

    def _asked(
        self, past: _Past, spike: Spike, report: StepReport
    ) -> tuple[_Past, CarryOn | Watch | Anomaly]:
        rises = median(spike.newest) > spike.first_loss + 2.0 * spike.spread and len(spike.newest) == 3
        kind = "diverging" if rises else "fast spike"
        reason = f"{kind}: {_described(spike, report)}"
        verdict = Anomaly(
            judged_step=report.step,
            first_bad=spike.first_step,
            reason=reason,
            numbers=_numbers(spike, report),
        )
        return replace(past, spike=replace(spike, judged=True)), verdict

    def _climbing(
        self, past: _Past, *, step: int, rate: float, batch: int
    ) -> tuple[_Past, CarryOn | Watch | Anomaly]:
        """Judge the medians of blocks, whose rise is too slow to be seen within one window."""
        block = median(past.level.window[-BLOCK:])
        is_excused = step <= past.excused_until + BLOCK * (past.distance or 1)
        blocks = () if is_excused else (*past.blocks, (step, block))[-_BLOCKS:]
        batch = batch if step > past.excused_until else past.batch
        past = replace(past, blocks=blocks, rate=rate, batch=batch)
        carry_on = CarryOn(judged_step=step)
        if len(blocks) < 4:
            return past, carry_on
        pairs = _pairs(blocks)
        lowest = min(pairs)
        rise, spread = pairs[-1] - lowest, past.level.spread
        if rise < max(_SLOW * spread, _SLOW_SHARE * lowest):
            if past.climbs and rise <= 0.5 * _SLOW * spread:
                past = replace(past, climbs=False)
            return past, carry_on
        since = _last_low(blocks, spread=spread)
        numbers = {"level": lowest, "loss": pairs[-1], "spread": spread, "since_step": float(since)}
        climb = (
            f"the loss climbed from {lowest:.3f} at step {since} to {pairs[-1]:.3f}, "
            f"{rise / spread:.1f} spreads of {spread:.4f}"
        )
        if rise >= max(_DIVERGING * spread, _DIVERGING_SHARE * lowest):
            verdict = Anomaly(
                judged_step=step, first_bad=since + 1, reason=f"diverging: {climb}", numbers=numbers
            )
            return replace(past, blocks=(), climbs=False), verdict
        if past.climbs:
            return past, carry_on
        reason = f"a slow spike: {climb}"
        return replace(past, climbs=True), Watch(
            judged_step=step, kind="slow spike", reason=reason, numbers=numbers
        )


def _pairs(blocks: tuple[tuple[int, float], ...]) -> list[float]:
    """Return the mean of each two neighbouring block medians."""
    return [0.5 * (earlier[1] + later[1]) for earlier, later in pairwise(blocks)]


def _last_low(blocks: tuple[tuple[int, float], ...], *, spread: float) -> int:
    """Return the last step of the newest two blocks whose medians are about as low as the lowest.

    Of a level loss the lowest medians may lie anywhere in the past, long before a climb begins.
    """
    pairs = _pairs(blocks)
    limit = min(pairs) + _AS_LOW * spread
    return max(later[0] for later, pair in zip(blocks[1:], pairs, strict=True) if pair <= limit)


def _continued(past: _Past, report: StepReport) -> _Past:
    """Return the past to judge this report by: empty after a gap, excused after a known change."""
    circumstances = f"{report.precision} {report.peers} {report.mixture}"
    ahead = report.step - past.step
    if past.step and 0 < ahead <= (GAP * past.distance or MOST_DISTANCE):
        distance = min(past.distance, ahead) if past.distance else ahead
    elif past.step and ahead <= 0:  # made again, from a checkpoint: the losses before it still count
        distance = past.distance
        # A run's history is that of its checkpoint; a log has the losses up to where it broke off, which were
        # lower than those far before.
        is_near = -ahead < BLOCK * max(past.distance, 1)
        level = replace(past.level, recent=(), heights=()) if is_near else RobustWindow()
        blocks = tuple(block for block in past.blocks if block[0] < report.step)
        past = replace(past, spike=None, level=level, blocks=blocks)
    else:
        distance = 0  # it is known from the next report on
        past = replace(past, spike=None, level=RobustWindow(), blocks=(), climbs=False)
    excused_until = report.step + EXCUSED_REPORTS * max(distance, 1)
    if past.excused_until < report.step and report.global_batch < past.batch:
        past = replace(past, excused_until=excused_until, blocks=())
    if past.circumstances not in ("", circumstances):
        past = replace(past, excused_until=excused_until, blocks=())
    if past.rate and report.learning_rate > _RATE_RISE * past.rate:
        past = replace(past, excused_until=excused_until, blocks=(), rate=report.learning_rate)
    return replace(
        past,
        step=report.step,
        distance=distance,
        circumstances=circumstances,
        batch=past.batch or report.global_batch,
        rate=past.rate or report.learning_rate,
    )


def _widened(past: _Past, report: StepReport) -> float:
    """Return the factor by which the spread is widened, for smaller batches are noisier."""
    smaller = math.sqrt(past.batch / report.global_batch) if report.global_batch else 1.0
    return max(smaller, 1.0) * (_WIDER if report.step <= max(past.excused_until, START_UP_STEPS) else 1.0)


def _described(spike: Spike, report: StepReport) -> str:
    above = report.loss - spike.level
    return (
        f"loss {report.loss:.3f} is {above:.3f} above {spike.level:.3f}, {above / spike.spread:.1f} of its "
        f"usual spreads of {spike.spread:.4f}, and has been high for {spike.high_steps} steps "
        f"since step {spike.first_step}"
    )


def _numbers(spike: Spike, report: StepReport) -> dict[str, float]:
    return {
        "loss": report.loss,
        "level": spike.level,
        "spread": spike.spread,
        "spreads": (report.loss - spike.level) / spike.spread,
        "peak": spike.peak,
        "first_step": float(spike.first_step),
        "high_steps": float(spike.high_steps),
    }


def _to_json(past: _Past) -> Json:
    spike = past.spike
    values: dict[str, Json] = {name: getattr(past, name) for name in _PLAIN}
    values["level"] = past.level.to_json()
    values["blocks"] = [list(pair) for pair in past.blocks]
    values["spike"] = None if spike is None else {**vars(spike), "newest": list(spike.newest)}
    return values


def _from_json(value: Json) -> _Past:
    if not isinstance(value, dict) or "level" not in value:
        return _Past()  # an earlier version wrote a history with other fields
    fields: dict[str, Any] = {name: value[name] for name in _PLAIN}  # Any: written by _to_json
    spike: Any = value["spike"]
    blocks: Any = value["blocks"]
    return _Past(
        **fields,
        level=window_from_json(value["level"]),
        blocks=tuple((step, loss) for step, loss in blocks),
        spike=None if spike is None else Spike(**{**spike, "newest": tuple(spike["newest"])}),
    )


_PLAIN = ("step", "distance", "batch", "rate", "circumstances", "excused_until", "climbs")
