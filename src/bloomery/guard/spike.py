"""The spike guard: a loss that jumps and stays up sends the run back, past the data that did it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from bloomery.events.numbers import Json
from bloomery.events.records import StepReport
from bloomery.guard.verdict import CarryOn, Rewind, Stop, Verdict


@dataclass(frozen=True, kw_only=True)
class SpikeGuard:
    """Rewinds when the loss was `threshold` nats above its running median for `patience` steps in a row.

    The median is of the last `window` losses that were applied and were no spike; nothing is judged before
    half a window. The rewind goes to `rewind_steps` before the first high loss, and skips the samples of
    `skip_steps` steps from there, and in any case all up to the spike (as PaLM did: 100 steps, 200–500
    batches). After `rewinds` of them a spike stops the run. threshold 0: never.
    Losses of refused updates and not-finite ones count neither way: another guard watches those.
    """

    threshold: float
    patience: int
    window: int
    rewind_steps: int
    skip_steps: int
    rewinds: int
    name: str = "spike"

    def fresh(self) -> Json:
        """Return the history before the first step."""
        return _to_json(_History())

    def judge(self, history: Json, report: StepReport) -> tuple[Json, Verdict]:
        """Judge the loss of this step against those before it."""
        carry_on = CarryOn(judged_step=report.step)
        if not self.threshold:
            return history, carry_on
        past = self._with_cursor(_from_json(history), report)
        if not report.update_applied or not math.isfinite(report.loss):
            return _to_json(past), carry_on
        if not self._is_high(past, report.loss):
            losses = (*past.losses, report.loss)[-self.window :]
            return _to_json(replace(past, losses=losses, high_in_a_row=0, first_high=0)), carry_on
        past = replace(
            past,
            high_in_a_row=past.high_in_a_row + 1,
            first_high=past.first_high if past.high_in_a_row else report.step,
        )
        if past.high_in_a_row < self.patience:
            return _to_json(past), carry_on
        return _to_json(past), self._verdict(past, report)

    def rewound(self, before: Json, restored: Json) -> Json:
        """Return the checkpoint's history with one more rewind counted, and no spike under way."""
        count = _from_json(before).rewinds + 1
        return _to_json(replace(_from_json(restored), rewinds=count, high_in_a_row=0, first_high=0))

    def _is_high(self, past: _History, loss: float) -> bool:
        if len(past.losses) < max(self.window // 2, 1):
            return False
        return loss > median(past.losses) + self.threshold

    def _with_cursor(self, past: _History, report: StepReport) -> _History:
        """Remember where the data stood after each step, as far back as a rewind may go."""
        kept = self.rewind_steps + self.patience + 1
        cursors = tuple(item for item in past.cursors if item[0] < report.step)
        return replace(past, cursors=(*cursors, (report.step, report.cursor))[-kept:])

    def _verdict(self, past: _History, report: StepReport) -> Verdict:
        level = median(past.losses)
        what = (
            f"loss {report.loss:.3f} is {report.loss - level:.3f} above its median {level:.3f}, "
            f"and has been high for {past.high_in_a_row} steps"
        )
        if past.rewinds >= self.rewinds:
            reason = f"{what}; {past.rewinds} rewinds did not help"
            return Stop(judged_step=report.step, reason=reason, failed=True)
        to_step = max(past.first_high - 1 - self.rewind_steps, 0)
        start = _cursor_after(past, to_step)
        stop = max(start + self.skip_steps * report.global_batch, report.cursor)
        return Rewind(judged_step=report.step, to_step=to_step, skip=range(start, stop), reason=what)


@dataclass(frozen=True, kw_only=True)
class _History:
    losses: tuple[float, ...] = ()
    cursors: tuple[tuple[int, int], ...] = ()
    """(step, stream index after it), ascending."""
    high_in_a_row: int = 0
    first_high: int = 0
    rewinds: int = 0


def _cursor_after(past: _History, step: int) -> int:
    """Return where the data stood after `step`, or at the nearest step remembered; 0 at the run's start."""
    if step == 0:
        return 0
    return next((cursor for known, cursor in past.cursors if known >= step), 0)


def _to_json(history: _History) -> Json:
    values: dict[str, Any] = asdict(history)
    return {**values, "losses": list(history.losses), "cursors": [list(pair) for pair in history.cursors]}


def _from_json(value: Json) -> _History:
    if not isinstance(value, dict):
        return _History()
    fields: dict[str, Any] = dict(value)  # Any: written by _to_json
    fields["losses"] = tuple(fields["losses"])
    fields["cursors"] = tuple((step, cursor) for step, cursor in fields["cursors"])
    return _History(**fields)
