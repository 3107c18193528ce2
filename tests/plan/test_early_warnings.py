"""The warnings with which a training starts: a plan's where its machine is known, else the recipe's."""

from __future__ import annotations

import pytest

from bloomery.config.load import load_recipe
from bloomery.plan.early_warnings import warnings_of
from bloomery.plan.hardware import load_hardware
from bloomery.plan.overview import make_plan
from bloomery.plan.request import Request

LARGE = ("model.vocabulary=250_680", "run.hardware=a100-80g")


def test_a_plan_of_the_recipes_machine_gives_its_warnings() -> None:
    loaded = load_recipe("tr11-176b", [*LARGE, "checkpoint.every_minutes=0.0", "checkpoint.every_steps=5000"])
    request = Request(loaded=loaded, hardware=load_hardware("a100-80g"), accelerators=192)
    wanted = make_plan(request).warnings
    assert warnings_of(loaded, accelerators=192) == wanted
    assert any("On 48 accelerators" in text for text in warnings_of(loaded)), "the recipe's own number"
    assert any(text.startswith("Saving every") for text in wanted)


@pytest.mark.parametrize("accelerators", [None, 7])
def test_without_a_machine_or_a_plan_those_that_need_none_are_left(accelerators: int | None) -> None:
    settings = list(LARGE if accelerators else ("model.vocabulary=250_680", "run.hardware=''"))
    told = warnings_of(load_recipe("tr11-176b", settings), accelerators=accelerators)
    (warning,) = told
    assert "padded to 250,880 (a multiple of 64 × TP)" in warning, "by the recipe's four tensor ranks"


def test_a_machine_that_is_not_known_is_told_beside_them() -> None:
    told = warnings_of(load_recipe("tr11-176b", [LARGE[0], "run.hardware=a100-81g"]))
    assert len(told) == 2 and "padded" in told[0]
    assert "'a100-81g'" in told[1] and "a100-80g" in told[1]


def test_a_check_tells_why_no_plan_is_made_for_the_machine() -> None:
    loaded = load_recipe("tr11-176b", [LARGE[0], "run.hardware=v100-32g"])
    padded, without = warnings_of(loaded)
    assert "padded" in padded and warnings_of(loaded, accelerators=384) == (padded,)
    wanted = "run.hardware = 'v100-32g': train.precision = 'bf16': v100-32g has no units for bf16, so no plan"
    assert without.startswith(wanted)


def test_a_run_that_is_past_its_ramp_up_is_planned_on_more_ranks_than_that_allowed() -> None:
    loaded = load_recipe("tr11-176b", LARGE)
    ramp_up = loaded.recipe.train.ramp_up[2]
    (padded,) = warnings_of(loaded, accelerators=768)
    later = warnings_of(loaded, accelerators=768, consumed=ramp_up)
    assert padded in later and len(later) > 1
