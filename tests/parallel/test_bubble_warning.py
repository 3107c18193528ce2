from __future__ import annotations

import pytest

from bloomery.config.load import load_recipe
from bloomery.parallel.pipeline_schedule import bubble_warning


def told(*settings: str, data_degree: int = 1, consumed: int = 0) -> str:
    plain = ("train.global_batch=32", "train.micro_batch=2", "train.ramp_up=[]", "model.layers=8")
    recipe = load_recipe("demo", [*plain, *settings]).recipe
    return bubble_warning(recipe.train, recipe.parallel, data_degree=data_degree, consumed=consumed)


def test_many_micro_batches_and_no_pipeline_are_not_worth_a_word() -> None:
    assert told("parallel.pipeline=4") == ""  # 16 micro-batches: 3 of 19
    assert told("train.global_batch=2") == ""
    ramp_up = ("parallel.pipeline=4", "train.samples=640", "train.ramp_up=[8, 8, 96]")
    assert told(*ramp_up) and told(*ramp_up, consumed=96) == "", "its small batches are behind it"


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


@pytest.mark.parametrize(
    ("settings", "data_degree", "warning"),
    [
        (
            ("parallel.pipeline=4",),
            4,
            "warning: a batch of 32 has 4 micro-batches on each of 4 data-parallel ranks, and 4 pipeline "
            "ranks wait 43% of a step (1f1b); a "
            "larger batch, a smaller micro-batch or fewer stages wait less",
        ),
        (
            ("parallel.pipeline=2", "parallel.schedule=gpipe", "train.global_batch=2"),
            1,
            "warning: a batch of 2 has 1 micro-batch on each of 1 data-parallel ranks, and 2 pipeline ranks "
            "wait 50% of a step (gpipe); a larger batch, a smaller micro-batch or fewer stages wait less",
        ),
    ],
)
def test_a_warning_names_the_batch_the_ranks_the_schedule_and_what_waits_less(
    settings: tuple[str, ...], data_degree: int, warning: str
) -> None:
    assert told(*settings, data_degree=data_degree) == warning
