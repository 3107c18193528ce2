"""The guard against silent data corruption: rewinds, or stops the run if one rank is blamed repeatedly."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from bloomery.events.records import Json, StepReport
from bloomery.guard.verdict import CarryOn, Rewind, Rung, Stop, Verdict

CORRUPTION = "corruption"
"""The name of this guard."""
CLEAN_STEP = "clean step"
"""Among the numbers of its verdicts: the last step whose weights were found clean."""


@dataclass(frozen=True, kw_only=True)
class SilentCorruption:
    """Goes back to before the last clean check when a check found bits that differ; see `digests`.

    faults: stop when one rank was named this often, or when nobody could be named more often than that.
    forget_steps: the number of steps for which a fault counts.
    """

    faults: int
    forget_steps: int
    name: str = CORRUPTION

    def fresh(self) -> Json:
        """Return the history before the first step.

        clean: the last step whose weights are taken for clean; None until a step is judged: then it is the
            one before, so 0, the initial weights, only for a run that began under this guard.
        named: [step, rank] of each fault. undecided: the steps where bits differed and nobody was named.
        """
        return {"clean": None, "named": [], "undecided": []}

    def judge(self, history: Json, report: StepReport) -> tuple[Json, Verdict]:
        """Judge what this step's check found, if there was one."""
        past: dict[str, Any] = self._past(history)
        before = report.step - 1  # a check looks at the weights that the step began with
        if past["clean"] is None:
            past["clean"] = before
        if not report.corruption_checked:
            return past, CarryOn(judged_step=report.step)
        if not report.corruption:
            return {**past, "clean": before}, CarryOn(judged_step=report.step)
        named = [(step, rank) for step, rank in past["named"] if report.step - step < self.forget_steps]
        named += [(report.step, rank) for rank in report.corrupt_ranks]
        undecided = [step for step in past["undecided"] if report.step - step < self.forget_steps]
        undecided += [] if report.corrupt_ranks else [report.step]
        kept: Json = {**past, "named": [[step, rank] for step, rank in named], "undecided": undecided}
        counts = Counter(rank for _, rank in named)
        worst = max(counts.values(), default=0)
        clean = min(past["clean"], before)
        numbers = {f"faults of rank {rank}": float(count) for rank, count in counts.items()}
        numbers[CLEAN_STEP] = float(clean)
        reason = f"silent corruption at step {report.step}: {report.corruption}. Its update was refused"
        if worst >= self.faults:
            often = ", ".join(str(rank) for rank, count in counts.items() if count == worst)
            reason = f"{reason}. Rank {often} was named {worst} times: take its machine out of the run"
            return kept, Stop(judged_step=report.step, reason=reason, failed=True, numbers=numbers)
        if len(undecided) > self.faults:
            reason = (
                f"{reason}. That happened {len(undecided)} times within {self.forget_steps} steps: test the "
                "machines of these ranks, or replace them (the journal's `corruption` records name all)"
            )
            return kept, Stop(judged_step=report.step, reason=reason, failed=True, numbers=numbers)
        return kept, Rewind(
            judged_step=report.step,
            to_step=clean,
            skip=range(0),
            may_start_anew=clean == 0,  # from initial values, which nothing has spoiled
            reason=f"{reason}. The run goes back to step {clean}, the last that was found clean, or before",
            numbers=numbers,
        )

    def rewound(self, before: Json, restored: Json, *, rung: Rung) -> Json:
        """Return the history with the faults that are known, and the clean step of the checkpoint."""
        return {**self._past(before), "clean": self._past(restored)["clean"]}

    def _past(self, history: Json) -> dict[str, Any]:  # Any: written here
        """Return a history that has all entries; those of earlier versions lack some."""
        fresh: Any = self.fresh()
        return {**fresh, **(history if isinstance(history, dict) else {})}

    def resumed(self, history: Json) -> Json:
        """Return the history as it was: a resumed run goes on."""
        return history
