from __future__ import annotations

import pytest

from bloomery.config.load import load_recipe
from bloomery.parallel.pipeline_schedule import bubble_warning


def told(*settings: str, data_degree: int = 1) -> str:
    plain = ("train.global_batch=32", "train.micro_batch=2", "train.ramp_up=[]", "model.layers=8")
    recipe = load_recipe("demo", [*plain, *settings]).recipe
    return bubble_warning(recipe.train, recipe.parallel, data_degree=data_degree)


def test_many_micro_batches_and_no_pipeline_are_not_worth_a_word() -> None:
    assert told("parallel.pipeline=4") == ""  # 16 micro-batches: 3 of 19
    assert told("train.global_batch=2") == ""


@pytest.mark.parametrize(
    ("settings", "data_degree", "share"),
    [
        (("parallel.pipeline=4",), 4, "43%"),  # 4 micro-batches: 3/(4 + 3)
        (("parallel.pipeline=4", "parallel.schedule=interleaved", "parallel.chunks=2"), 4, "27%"),
        (("parallel.pipeline=4", "train.samples=640", "train.ramp_up=[8, 8, 96]"), 1, "43%"),
    ],
)
def test_few_micro_batches_are_told_with_the_share_of_a_step_that_ranks_wait(
    settings: tuple[str, ...], data_degree: int, share: str
) -> None:
    warning = told(*settings, data_degree=data_degree)
    assert f"wait {share} of a step" in warning and "4 micro-batches" in warning
