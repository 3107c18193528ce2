"""The table of plans for several numbers of accelerators: every figure in its place."""

from __future__ import annotations

from dataclasses import replace

from tests.cli.made_plan import made_plan

from bloomery.cli.plan_counts import counts_as_figures, counts_text
from bloomery.cli.plan_figures import as_figures
from bloomery.errors import Mistake
from bloomery.plan.counts import PlannedCount

PLAN = made_plan()
REFUSED = PlannedCount(
    accelerators=1_000,
    plan=None,
    mistakes=(
        Mistake(key="--gpus", value=1_000, source="here", problem="is too many", remedy="Take less."),
        Mistake(key="a.b", value="c", source="there", problem="is odd", remedy="Make it even."),
    ),
)
TEXT = """\
made on a100-80g: global batch 16, 32 tokens a sample, 3,000 steps, 80.0 GiB each

GPUs  nodes  layout               s/step  tokens/s    MFU      time  cost, EUR   GiB
──────────────────────────────────────────────────────────────────────────────────────────
  24      3  TP2·PP3×2·DP4·Z1·SP     346    22,346  29.0%  7.1 days      6,543  31.0  fits

1,000 GPUs: is too many. Take less.

1,000 GPUs: a.b = 'c': is odd. Make it even."""


def counted(plan: object) -> PlannedCount:
    return PlannedCount(accelerators=24, plan=plan)  # type: ignore[arg-type]


def test_every_number_has_a_line_and_what_cannot_be_is_told_beneath() -> None:
    assert counts_text([counted(PLAN), REFUSED]) == TEXT
    assert counts_as_figures([counted(PLAN), REFUSED])[0] == as_figures(PLAN)
    assert counts_as_figures([REFUSED])[0]["mistakes"][1]["remedy"] == "Make it even."


def test_without_a_price_there_is_no_column_of_costs_and_peers_are_told() -> None:
    recipe = PLAN.draft.request.recipe
    elastic = replace(recipe.elastic, inner_steps=5, peers=3)
    loaded = replace(PLAN.draft.request.loaded, recipe=replace(recipe, elastic=elastic))
    hardware = replace(
        PLAN.draft.request.hardware,
        accelerator=replace(PLAN.draft.request.hardware.accelerator, memory_gib=3.0),
    )
    request = replace(PLAN.draft.request, loaded=loaded, hardware=hardware)
    free = replace(PLAN, whole=replace(PLAN.whole, cost=None), draft=replace(PLAN.draft, request=request))
    head, _, names, _, row = counts_text([counted(free)]).splitlines()
    assert head.startswith("made on a100-80g in each of 3 peers: ")
    assert "cost" not in names and row.endswith("7.1 days  31.0  does not fit")
    assert "6,543" in counts_text([counted(free), counted(PLAN)]) and "  -  " in counts_text(
        [counted(free), counted(PLAN)]
    )
