"""A run as its journal remembers it: the steps that count, and the ranks that each life of it had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bloomery.events.incarnation import Base, read_incarnations, visible
from bloomery.events.journal import read_journal
from bloomery.events.records import StepReport
from bloomery.events.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that is part of the run, and the incarnation that made it."""

    incarnation: int
    report: StepReport


@dataclass(frozen=True, kw_only=True)
class History:
    """`steps` in order, each once. `ranks`: of each incarnation that said how many it has.

    span_s: from the journal's first event to its last.
    """

    steps: tuple[Step, ...]
    ranks: Mapping[int, int]
    span_s: float

    @property
    def newest_ranks(self) -> int:
        """Of the incarnation that made the newest step; 1 where it did not say."""
        return self.ranks.get(self.steps[-1].incarnation, 1) if self.steps else 1

    @property
    def alike(self) -> tuple[StepReport, ...]:
        """The newest steps that were made by as many ranks, with as large a batch, as the last."""
        found: list[StepReport] = []
        for step in reversed(self.steps):
            ranks, last = self.ranks.get(step.incarnation, 1), self.steps[-1].report
            if ranks != self.newest_ranks or step.report.global_batch != last.global_batch:
                break
            found.append(step.report)
        return tuple(reversed(found))


def read_history(rundir: RunDir) -> History:
    """What the first rank's journal says; a run without one has an empty history."""
    found: dict[Base, StepReport] = {}
    ranks: dict[int, int] = {}
    times: list[float] = []
    for event in read_journal(rundir.journal()):
        times.append(float(event.get("time", 0.0)))
        if event["event"] == "step":
            found[event["step"], event["incarnation"]] = StepReport.from_json(event)
        elif event["event"] == "start":
            ranks[event["incarnation"]] = int(event.get("ranks", 1))
    newest = {base[0]: base for base in sorted(visible(found, read_incarnations(rundir)))}
    steps = tuple(Step(incarnation=newest[step][1], report=found[newest[step]]) for step in sorted(newest))
    return History(steps=steps, ranks=ranks, span_s=max(times) - min(times) if times else 0.0)
