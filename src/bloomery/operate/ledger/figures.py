"""Turns a ledger into plain figures for programs, and compares it with the forecast of a plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bloomery.errors import ConfigError, Mistake
from bloomery.operate.ledger.run_ledger import RunLedger

HOUR_S = 3600.0
DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What a plan expects of a run.

    goodput: training days as a share of all days.
    days: the days from its start to its end.
    """

    tokens_per_s: float
    tokens: int
    days: float
    goodput: float


def read_plan(path: Path) -> PlannedRun:
    """Return the forecast in a file that `bloomery plan … --json` wrote. Raises ConfigError."""
    try:
        figures = json.loads(path.read_text())
        run = figures["run"]
        days = float(run["days"])
        return PlannedRun(
            tokens_per_s=float(figures["speed"]["tokens_per_s"]),
            tokens=int(run["tokens"]),
            days=days,
            goodput=float(run["training_days"]) / days if days else 0.0,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            [
                Mistake(
                    key="--plan",
                    value=str(path),
                    source="command line",
                    problem=f"is not a plan that can be read ({type(error).__name__}: {error})",
                    remedy="Write one: bloomery plan RECIPE --json > plan.json",
                )
            ],
            of="the command line",
        ) from error


def ledger_figures(ledger: RunLedger, plan: PlannedRun | None = None) -> dict[str, Any]:
    """Return all figures of a ledger as JSON; `_s` means seconds, shares are of all ranks' time."""
    history, total_s = ledger.history, ledger.total_s
    figures: dict[str, Any] = {
        "begin": ledger.begin,
        "end": ledger.end,
        "ranks": len(ledger.ranks),
        "elapsed_s": ledger.end - ledger.begin,
        "rank_seconds": total_s,
        "seconds": {str(kind): seconds for kind, seconds in ledger.seconds.items()},
        "shares": {str(kind): seconds / total_s for kind, seconds in ledger.seconds.items()},
        "effective_time": ledger.effective_time,
        "ettr": ledger.ettr,
        "token_goodput": ledger.token_goodput(),
        "best_tokens_per_s": ledger.best_tokens_per_s,
        "step": history.step,
        "kept_steps": history.kept_steps,
        "kept_tokens": history.kept_tokens,
        "causes": {
            cause: {"incidents": number, "seconds": seconds, "steps_lost": steps}
            for cause, (number, seconds, steps) in ledger.by_cause().items()
        },
        "incidents": [
            asdict(incident) | {"seconds": seconds}
            for incident, seconds in zip(history.incidents, ledger.incident_s, strict=True)
        ],
        "by_rank": {
            name: {str(kind): value for kind, value in spent.items()} for name, spent in ledger.ranks.items()
        },
    }
    return figures | ({"plan": plan_figures(ledger, plan)} if plan is not None else {})


def plan_figures(ledger: RunLedger, plan: PlannedRun) -> dict[str, float | None]:
    """Return the forecast beside what came; `days` of the run are extrapolated from its pace so far."""
    elapsed_s = ledger.end - ledger.begin
    pace = ledger.history.kept_tokens / elapsed_s if elapsed_s else 0.0
    return {
        "planned_goodput": plan.goodput,
        "goodput": ledger.effective_time,
        "planned_tokens_per_s": plan.tokens_per_s,
        "tokens_per_s": ledger.best_tokens_per_s,
        "token_goodput_of_plan": ledger.token_goodput(plan.tokens_per_s),
        "planned_days": plan.days,
        "days": plan.tokens / pace / DAY_S if pace else None,
    }


def duration(seconds: float) -> str:
    """Return seconds in the unit that a person would use: "12.0 s", "4.5 min", "31.0 h"."""
    for limit, unit_s, unit in ((120.0, 1.0, "s"), (2 * HOUR_S, 60.0, "min"), (3 * DAY_S, HOUR_S, "h")):
        if seconds < limit:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds / DAY_S:,.1f} days"


def percentages(seconds: Sequence[float]) -> list[float]:
    """Return shares in percent with one decimal, that sum to 100.0 exactly (largest remainders)."""
    total = sum(seconds)
    if total <= 0.0:
        return [0.0] * len(seconds)
    exact = [1000.0 * value / total for value in seconds]
    whole = [int(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda place: whole[place] - exact[place])
    for place in order[: 1000 - sum(whole)]:
        whole[place] += 1
    return [value / 10.0 for value in whole]
