"""Judging: every guard looks at every report, and the strongest verdict counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from bloomery.config.keeping import CheckpointSection, GuardSection
from bloomery.events.numbers import Json
from bloomery.events.records import StepReport
from bloomery.guard.limits import RefusedUpdates, Requests, SaveIntervals, StopLimits
from bloomery.guard.spike import SpikeGuard
from bloomery.guard.verdict import Verdict, worst


class Guard(Protocol):
    """A pure decision from what a run reports. All it remembers is in the history it returns.

    Histories are JSON, small, and stored with each checkpoint, so that a resumed run judges as the
    unbroken one.
    """

    @property
    def name(self) -> str:
        """The key of this guard's history; unique among the guards."""

    def fresh(self) -> Json:
        """Return the history of a run that has not begun."""

    def judge(self, history: Json, report: StepReport) -> tuple[Json, Verdict]:
        """Return the history after `report`, and what this guard asks for."""

    def rewound(self, before: Json, restored: Json) -> Json:
        """Return the history to go on with after a rewind.

        before: as it was when the rewind was decided; restored: as the checkpoint holds it.
        """


class Guards:
    """The guards of a run with their histories. A part of the state, equal on every rank."""

    def __init__(self, guards: Sequence[Guard]) -> None:
        self.guards = tuple(guards)
        self._histories: dict[str, Json] = {guard.name: guard.fresh() for guard in guards}
        if len(self._histories) != len(self.guards):
            raise ValueError("two guards have the same name")

    def judge(self, report: StepReport) -> Verdict:
        """Show `report` to every guard, keep their histories, and return the strongest verdict."""
        verdicts = []
        for guard in self.guards:
            history, verdict = guard.judge(self._histories[guard.name], report)
            self._histories[guard.name] = history
            verdicts.append(verdict)
        return worst(verdicts)

    def rewound(self, before: Mapping[str, Json]) -> None:
        """Go on after a rewind. Called when the checkpoint's histories are loaded; `before`: `state_values`
        as they were when the rewind was decided.
        """
        for guard in self.guards:
            restored = self._histories[guard.name]
            self._histories[guard.name] = guard.rewound(before.get(guard.name, guard.fresh()), restored)

    def state_entries(self) -> tuple[()]:
        """Guards have no tensors."""
        return ()

    def state_values(self) -> dict[str, Json]:
        """Return each guard's history by its name. Histories are never changed in place."""
        return dict(self._histories)

    def load_state_values(self, values: Mapping[str, Json]) -> None:
        """Take the histories of a checkpoint; a guard it does not know starts afresh."""
        for guard in self.guards:
            self._histories[guard.name] = values.get(guard.name, guard.fresh())


def judge(guards: Guards, report: StepReport) -> Verdict:
    """Return the strongest verdict of all guards on `report`. Equal on every rank, as the report is."""
    return guards.judge(report)


def build_guards(*, checkpoint: CheckpointSection, guard: GuardSection) -> Guards:
    """Return the guards that two sections ask for. The order settles ties: the first reason is told."""
    return Guards(
        (
            RefusedUpdates(limit=guard.refused_updates),
            SpikeGuard(
                threshold=guard.spike_threshold,
                patience=guard.spike_patience,
                window=guard.spike_window,
                rewind_steps=guard.spike_rewind_steps,
                skip_steps=guard.spike_skip_steps,
                rewinds=guard.spike_rewinds,
            ),
            Requests(),
            StopLimits(at_step=guard.stop_at_step, after_minutes=guard.stop_after_minutes),
            SaveIntervals(
                every_steps=checkpoint.every_steps,
                every_samples=checkpoint.every_samples,
                every_minutes=checkpoint.every_minutes,
            ),
        )
    )


def replay(guards: Guards, records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[StepReport, Verdict]]:
    """Yield what `guards` would have said to each `step` event of a journal, in its order."""
    for record in records:
        if record.get("event") == "step":
            report = StepReport.from_json(record)
            yield report, guards.judge(report)
