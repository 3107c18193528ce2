"""Decides where a rewind goes, which batches are skipped, and when a person is called instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bloomery.events.json_floats import Json
from bloomery.events.records import StepReport
from bloomery.guard.verdict import Rewind, Stop, Verdict


@dataclass(frozen=True, kw_only=True)
class Trail:
    """Where the data stood after each of the newest steps, and how often the run was rewound.

    cursors: (step, stream index after it), ascending. healthy_steps: since the last rewind that counts.
    """

    cursors: tuple[tuple[int, int], ...] = ()
    rewinds: int = 0
    healthy_steps: int = 0

    def to_json(self) -> dict[str, Json]:
        """Return what `trail_from_json` reads."""
        return {
            "cursors": [list(pair) for pair in self.cursors],
            "rewinds": self.rewinds,
            "healthy_steps": self.healthy_steps,
        }


def trail_from_json(values: object) -> Trail:
    """Return the trail that a history holds; an empty one where it holds none."""
    if not isinstance(values, dict):
        return Trail()
    cursors = tuple((step, cursor) for step, cursor in values["cursors"])
    return Trail(cursors=cursors, rewinds=values["rewinds"], healthy_steps=values["healthy_steps"])


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Go back `rewind_steps` before what went wrong and skip `skip_steps` steps' samples, and all up to it.

    As PaLM did: about 100 steps back, 200 to 500 batches. rewinds: after so many that did not help the run
    stops; each is forgotten after `forget_steps` healthy steps.
    """

    rewind_steps: int
    skip_steps: int
    rewinds: int
    forget_steps: int

    def after_healthy(self, trail: Trail, *, steps: int = 1) -> Trail:
        """Return the trail with healthy steps counted, and rewinds forgotten that are long past."""
        if not trail.rewinds:
            return trail
        healthy, rewinds = trail.healthy_steps + steps, trail.rewinds
        while rewinds and healthy >= self.forget_steps:
            rewinds, healthy = rewinds - 1, healthy - self.forget_steps
        return Trail(cursors=trail.cursors, rewinds=rewinds, healthy_steps=healthy if rewinds else 0)

    def after_step(self, trail: Trail, *, step: int, cursor: int) -> Trail:
        """Return the trail with the cursor of one step more; of a step made again, the newer counts."""
        known = trail.cursors
        if known and known[-1][0] >= step:
            known = tuple(pair for pair in known if pair[0] < step)
        cursors = (*known, (step, cursor))[-(self.rewind_steps + 64) :]
        return Trail(cursors=cursors, rewinds=trail.rewinds, healthy_steps=trail.healthy_steps)

    def rewound(self, before: Trail, restored: Trail) -> Trail:
        """Return the trail of a checkpoint, with the rewinds of before it and this one."""
        return Trail(cursors=restored.cursors, rewinds=before.rewinds + 1)

    def verdict(
        self, trail: Trail, report: StepReport, *, first_bad: int, reason: str, numbers: Mapping[str, float]
    ) -> Verdict:
        """Return the rewind to before `first_bad`, or a stop where rewinds did not help."""
        if trail.rewinds >= self.rewinds:
            reason = f"{reason}; {trail.rewinds} rewinds did not help"
            return Stop(judged_step=report.step, reason=reason, failed=True, numbers=numbers)
        to_step = max(first_bad - 1 - self.rewind_steps, 0)
        start = _cursor_after(trail, to_step)
        stop = max(start + self.skip_steps * report.global_batch, report.cursor)
        return Rewind(
            judged_step=report.step,
            to_step=to_step,
            latest_step=first_bad - 1,
            skip=range(start, stop),
            reason=reason,
            numbers=numbers,
        )


def _cursor_after(trail: Trail, step: int) -> int:
    """Return where the data stood after `step`, or at the nearest later known step; 0 at the start."""
    if step == 0:
        return 0
    return next((cursor for known, cursor in trail.cursors if known >= step), 0)
