"""Writes the plans for several numbers of accelerators: a table with a line for each, or JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bloomery.cli.plan_figures import as_figures
from bloomery.cli.plan_tables import GIB, days_text, rows_text
from bloomery.cli.tables import COLUMNS
from bloomery.errors import Mistake
from bloomery.plan.counts import PlannedCount
from bloomery.plan.overview import Plan

LAYOUT, COST, LAST = 2, 7, 9
"""Places of columns."""


def counts_text(counts: Sequence[PlannedCount]) -> str:
    """Return one line for each number that can be planned, and beneath them why the others cannot."""
    plans = [count.plan for count in counts if count.plan is not None]
    head = ["GPUs", "nodes", "layout", "s/step", "tokens/s", "MFU", "time", "cost", "GiB", ""]
    head[COST] = f"cost, {plans[0].whole.currency}"
    rows, left = [head, *map(_row, plans)], (LAYOUT, LAST)
    if not any(plan.whole.cost for plan in plans):
        rows, left = [row[:COST] + row[COST + 1 :] for row in rows], (LAYOUT, LAST - 1)
    lines = [*textwrap.wrap(_heading(plans[0]), COLUMNS, subsequent_indent="  "), ""]
    lines.append(rows_text(rows, left=left))
    refused = [f"{count.accelerators:,} GPUs: {_words(told)}" for count in counts for told in count.mistakes]
    for line in refused:
        lines += ["", *textwrap.wrap(line, COLUMNS, subsequent_indent="  ")]
    return "\n".join(lines)


def counts_as_figures(counts: Sequence[PlannedCount]) -> list[dict[str, Any]]:
    """Return for each number what `--json` has of it alone, or the number and why it cannot be planned."""
    return [
        as_figures(count.plan)
        if count.plan is not None
        else {"accelerators": count.accelerators, "mistakes": [asdict(mistake) for mistake in count.mistakes]}
        for count in counts
    ]


def _heading(plan: Plan) -> str:
    draft = plan.draft
    recipe, work = draft.request.recipe, draft.work
    whose = f" in each of {recipe.elastic.peers} peers" if recipe.elastic.inner_steps else ""
    return (
        f"{recipe.run.name} on {draft.request.hardware.name}{whose}: global batch "
        f"{draft.course[-1].global_batch:,}, {work.sequence_length:,} tokens a sample, "
        f"{plan.whole.steps:,} steps, {draft.room_bytes / GIB:.1f} GiB each"
    )


def _words(mistake: Mistake) -> str:
    what = "" if mistake.key == "--gpus" else f"{mistake.key} = {mistake.value!r}: "
    return f"{what}{mistake.problem}. {mistake.remedy}"


def _row(plan: Plan) -> list[str]:
    draft, whole = plan.draft, plan.whole
    layout = draft.work.layout
    return [
        f"{layout.world:,}",
        f"{layout.nodes:,}",
        str(layout) + ("·SP" if layout.sequence else ""),
        f"{plan.speed.step_s:.3g}",
        f"{plan.speed.tokens_per_s:,.0f}",
        f"{plan.speed.mfu:.1%}",
        days_text(whole.days),
        f"{whole.cost:,.0f}" if whole.cost else "-",
        f"{draft.peak_bytes / GIB:.1f}",
        "fits" if plan.fits else "does not fit",
    ]
