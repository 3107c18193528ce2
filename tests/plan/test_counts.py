"""Plans for several numbers of accelerators, against the plan of each number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bloomery.config.load import load_recipe
from bloomery.errors import ConfigError
from bloomery.plan.counts import plan_counts
from bloomery.plan.hardware import load_hardware
from bloomery.plan.overview import make_plan
from bloomery.plan.request import Request

REQUEST = Request(loaded=load_recipe("tr1-13b"), hardware=load_hardware("v100-32g"))


def requests(*counts: int, request: Request = REQUEST) -> list[Request]:
    return [replace(request, accelerators=count) for count in counts]


def test_each_number_has_the_plan_that_it_has_alone_or_what_is_impossible_with_it() -> None:
    planned, refused = plan_counts(requests(128, 100))
    assert (planned.accelerators, planned.mistakes) == (128, ())
    assert planned.plan == make_plan(replace(REQUEST, accelerators=128))
    assert (refused.accelerators, refused.plan) == (100, None)
    assert [mistake.key for mistake in refused.mistakes] == ["--gpus"]


def test_where_none_can_be_planned_each_mistake_is_told_once() -> None:
    wrong = replace(REQUEST, loaded=load_recipe("tr1-13b", ["model.heads=99"]))
    with pytest.raises(ConfigError) as refused:
        plan_counts(requests(0, 100, request=wrong))
    keys = [mistake.key for mistake in refused.value.mistakes]
    assert keys.count("--gpus") == 2 and keys.count("model.heads") == 1
    assert "mistakes in the plan:" in refused.value.message
