"""Lets every guard judge each step's report; the strongest verdict counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from bloomery.config.checkpoint import CheckpointSection, GuardSection
from bloomery.events.records import Json, StepReport, as_json
from bloomery.guard.basic_guards import LossScaleCollapse, NotFinite, Requests, SaveIntervals, StopLimits
from bloomery.guard.corruption import SilentCorruption
from bloomery.guard.creep import HeldOutRise, InnerGrowth, MemoryCreep
from bloomery.guard.ladder import Ladder, LadderState, ladder_from_json
from bloomery.guard.parity import ResumeParity
from bloomery.guard.spike import SpikeGuard
from bloomery.guard.trend import GradientNormRise, Plateau, ThroughputDrop
from bloomery.guard.verdict import Anomaly, Rewind, Rung, Stop, Verdict, Watch, worst

log = logging.getLogger(__name__)

T = TypeVar("T")


class Guard(Protocol):
    """Judges a run's reports as a pure function: all that a guard remembers is in the history it returns.

    Histories are JSON, small, and stored with each checkpoint, so that a resumed run judges as the
    unbroken one.
    """

    @property
    def name(self) -> str:
        """The key of this guard's history; unique among the guards."""

    def fresh(self) -> Json:
        """Return the history of a run that has not begun."""

    def judge(self, history: Json, report: StepReport) -> tuple[Json, Verdict | Anomaly]:
        """Return the history after `report`, and what this guard asks for or finds."""

    def rewound(self, before: Json, restored: Json, *, rung: Rung) -> Json:
        """Return the history to go on with after a rewind.

        before: as it was when the rewind was decided; restored: as the checkpoint holds it.
        rung: the rung of the rewind.
        """

    def resumed(self, history: Json) -> Json:
        """Return the history to go on with in another process. history: as the checkpoint holds it."""


class Guards:
    """The guards of a run with their histories, and the run's rung on the ladder. Equal on every rank."""

    def __init__(self, guards: Sequence[Guard], *, ladder: Ladder) -> None:
        self.guards, self.ladder = tuple(guards), ladder
        self._histories: dict[str, Json] = {guard.name: guard.fresh() for guard in guards}
        if len(self._histories) != len(self.guards):
            raise ValueError("two guards have the same name")
        self._on_ladder = LadderState()
        self.findings: tuple[tuple[str, Watch | Rewind | Stop], ...] = ()
        """(guard, verdict) of each guard that warned or asked for something at the last report."""

    def judge(self, report: StepReport) -> Verdict:
        """Show `report` to every guard, keep their histories, and return the strongest verdict.

        When several guards find an anomaly, the ladder answers the one that began first.
        """
        judgements: list[tuple[str, Verdict | Anomaly]] = []
        for guard in self.guards:
            self._histories[guard.name], verdict = _with_history(
                guard.name,
                partial(guard.judge, self._histories[guard.name], report),
                without=partial(guard.judge, guard.fresh(), report),
            )
            judgements.append((guard.name, verdict))
        is_calm = report.update_applied and not any(
            isinstance(judgement, Watch | Anomaly) for _, judgement in judgements
        )
        self._on_ladder, shown = _with_history(
            LADDER,
            partial(self.ladder.after_step, self._on_ladder, report, is_calm=is_calm),
            without=partial(self.ladder.after_step, LadderState(), report, is_calm=is_calm),
        )
        judgements += [(LADDER, each) for each in shown]
        verdicts = _answered(judgements, lambda anomaly: self._answer(anomaly, report))
        reported = []
        for name, verdict in verdicts:
            if isinstance(verdict, Watch | Rewind) or (isinstance(verdict, Stop) and verdict.failed):
                reported.append((name, verdict))
        self.findings = tuple(reported)
        return worst(verdict for _, verdict in verdicts)

    def _answer(self, anomaly: Anomaly, report: StepReport) -> Rewind | Stop:
        return _with_history(
            LADDER,
            partial(self.ladder.answer, self._on_ladder, anomaly, report),
            without=partial(self.ladder.answer, LadderState(), anomaly, report),
        )

    def rewound(self, before: Mapping[str, Json], *, rung: Rung) -> None:
        """Go on after a rewind. Called when the checkpoint's histories are loaded.

        before: the `state_values` at the time when the rewind was decided.
        rung: the rung of the rewind.
        """
        for guard in self.guards:
            restored = self._histories[guard.name]
            known = before.get(guard.name, guard.fresh())
            self._histories[guard.name] = _with_history(
                guard.name, partial(guard.rewound, known, restored, rung=rung), without=guard.fresh
            )
        was = _ladder_of(before)
        self._on_ladder = _with_history(
            LADDER,
            partial(self.ladder.rewound, was, self._on_ladder, rung),
            without=partial(self.ladder.rewound, was, LadderState(), rung),
        )

    def resumed(self) -> None:
        """Go on in another process. Called once the histories of its checkpoint are loaded."""
        for guard in self.guards:
            history = self._histories[guard.name]
            self._histories[guard.name] = _with_history(
                guard.name, partial(guard.resumed, history), without=guard.fresh
            )

    def step_before_climb(self) -> int | None:
        """Return the latest step to go back to should the loss climb, or go on climbing; None: unknown."""
        guard = next((guard for guard in self.guards if isinstance(guard, SpikeGuard)), None)
        if guard is None:
            return None
        history = self._histories[guard.name]
        since = _with_history(guard.name, partial(guard.climb_since, history), without=lambda: None)
        return None if since is None else max(since - self.ladder.section.spike_rewind_steps, 0)

    def state_entries(self) -> tuple[()]:
        """Return (), for guards have no tensors."""
        return ()

    def state_values(self) -> dict[str, Json]:
        """Return each guard's history by its name. Histories are never changed in place."""
        return {**self._histories, LADDER: self._on_ladder.to_json()}

    def load_state_values(self, values: Mapping[str, Json]) -> None:
        """Take the histories of a checkpoint; a guard without one starts with an empty history."""
        for guard in self.guards:
            self._histories[guard.name] = values.get(guard.name, guard.fresh())
        self._on_ladder = _ladder_of(values)


LADDER = "ladder"
"""The key of the ladder's state beside the histories of the guards."""


_FAILURES = (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What a guard raises that finds other values in its history than it writes."""


def _with_history(name: str, call: Callable[[], T], *, without: Callable[[], T]) -> T:
    """Return what a guard makes of its history; if it can make nothing of that, what it says without one.

    The history may be another peer's: the digest of a state covers tensors alone, and one that ends the
    training would do so after each restart from what this peer saved.
    """
    try:
        return call()
    except _FAILURES:
        log.warning("%s begins anew: it cannot judge by its history", name, exc_info=True)
        return without()


def _ladder_of(values: Mapping[str, Json]) -> LadderState:
    """Return the state that values of guards hold; one without history where nothing can be made of it."""
    return _with_history(LADDER, partial(ladder_from_json, values.get(LADDER)), without=LadderState)


def _answered(
    judgements: Sequence[tuple[str, Verdict | Anomaly]], answer: Callable[[Anomaly], Rewind | Stop]
) -> list[tuple[str, Verdict]]:
    """Return the verdicts of the guards, with the ladder's answer in place of the anomaly that began first.

    Other anomalies are left out. answer: the ladder's answer to an anomaly.
    """
    anomalies = [verdict for _, verdict in judgements if isinstance(verdict, Anomaly)]
    first = min(anomalies, key=lambda anomaly: anomaly.first_bad, default=None)
    verdicts: list[tuple[str, Verdict]] = []
    for name, verdict in judgements:
        if not isinstance(verdict, Anomaly):
            verdicts.append((name, verdict))
        elif verdict is first:
            verdicts.append((name, answer(verdict)))
    return verdicts


def judge(guards: Guards, report: StepReport) -> Verdict:
    """Return the strongest verdict of all guards on `report`. Equal on every rank, as the report is."""
    return guards.judge(report)


def build_guards(*, checkpoint: CheckpointSection, guard: GuardSection) -> Guards:
    """Return the guards that two sections ask for. Of equally strong verdicts, the first guard's counts."""
    return Guards(
        (
            *watching_guards(guard),
            Requests(),
            StopLimits(at_step=guard.stop_at_step, after_minutes=guard.stop_after_minutes),
            SaveIntervals(
                every_steps=checkpoint.every_steps,
                every_samples=checkpoint.every_samples,
                every_minutes=checkpoint.every_minutes,
            ),
        ),
        ladder=Ladder(section=guard),
    )


def watching_guards(section: GuardSection) -> tuple[Guard, ...]:
    """Return the guards that judge how the training goes, which can also judge an old log."""
    known: tuple[tuple[bool, Guard], ...] = (
        (
            bool(section.not_finite_losses or section.refused_updates),
            NotFinite(losses=section.not_finite_losses, updates=section.refused_updates),
        ),
        (
            bool(section.corruption_steps),
            SilentCorruption(faults=section.corruption_faults, forget_steps=section.forget_rewind_steps),
        ),
        (section.resume_parity, ResumeParity()),
        (section.spike, SpikeGuard(patience=section.spike_patience)),
        (section.gradient_norm, GradientNormRise()),
        (section.loss_scale, LossScaleCollapse()),
        (section.throughput, ThroughputDrop()),
        (section.plateau, Plateau()),
        (section.held_out, HeldOutRise()),
        (section.memory, MemoryCreep()),
        (bool(section.growth_steps), InnerGrowth()),
    )
    return tuple(guard for is_on, guard in known if is_on)


def replay(guards: Guards, records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[StepReport, Verdict]]:
    """Yield the verdict of `guards` on each `step` event of a journal, in its order."""
    for record in records:
        if record.get("event") == "step":
            report = StepReport.from_json(record)
            yield report, guards.judge(report)


def described(verdict: Watch | Rewind | Stop) -> dict[str, Json]:
    """Return a verdict as the journal's `guard` event holds it: what is done, why, and by which numbers."""
    fields: dict[str, Json] = {
        "action": type(verdict).__name__.lower(),
        "reason": verdict.reason,
        "numbers": as_json(verdict.numbers),
    }
    if isinstance(verdict, Watch):
        fields["kind"] = verdict.kind
    if isinstance(verdict, Rewind):
        skip: Json = [verdict.skip.start, verdict.skip.stop]
        fields |= {"rung": verdict.rung.name.lower(), "to_step": verdict.to_step, "skip": skip}
    return fields
