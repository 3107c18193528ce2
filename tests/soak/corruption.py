"""Silent corruption: 40 planted bit flips on one of four ranks, 10,000 clean steps, and every layout.

`make soak PART=corruption`; figures in benchmarks/README.md. BLOOMERY_SOAK_STEPS sets the clean steps.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.train.bit_flips import plan_flips
from tests.train.test_corruption import assert_found, trained
from tests.train.test_loop import events

from bloomery.config.load import LoadedRecipe
from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory

pytestmark = pytest.mark.slow
Start = Callable[..., tuple[LoadedRecipe, Path]]
FLIPS, EVERY = 40, 8
CLEAN_STEPS = int(os.environ.get("BLOOMERY_SOAK_STEPS", "10000"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_forty_flips_are_found_within_the_interval_and_the_right_rank_is_named(
    start: Start, precision: str
) -> None:
    flips = tuple(plan_flips(FLIPS, ranks=4, first=EVERY, every=EVERY, seed=1))
    steps = EVERY * (FLIPS + 2)
    settings = (f"train.steps={steps}", f"train.precision={precision}", f"checkpoint.every_steps={EVERY}")
    path = trained(start, "flipped", *settings, f"guard.corruption_steps={EVERY}", flips=flips)
    clean = trained(start, "clean", *settings, "guard.corruption_steps=0")
    sites = Counter(flip.site for flip in flips)
    found = [record["step"] for record in events(path, "corruption")]
    print(f"\n{precision}: {len(found)} of {len(flips)} flips found: {dict(sites)}")
    assert_found(path, flips, every=EVERY)
    assert loss_curve(RunDirectory(path)) == loss_curve(RunDirectory(clean))


def test_clean_steps_raise_no_alarm(start: Start) -> None:
    path = trained(
        start,
        "clean",
        f"train.steps={CLEAN_STEPS}",
        "guard.corruption_steps=2",
        "checkpoint.every_steps=2500",
        "evaluate.at_end=false",
        "guard.plateau=false",
        "guard.spike=false",
    )
    steps = events(path, "step")
    checks = sum(record["corruption_checked"] for record in steps)
    print(f"\n{len(steps)} steps, {checks} checks, {len(events(path, 'corruption'))} alarms")
    assert len(steps) == CLEAN_STEPS and checks == (CLEAN_STEPS - 1) // 2
    assert events(path, "corruption") == [] == events(path, "corruption_check")


@pytest.mark.parametrize(
    "layout",
    [
        "parallel.tensor=2",
        "parallel.tensor=2 parallel.sequence=true",
        "parallel.pipeline=2",
        "parallel.pipeline=2 parallel.chunks=2 parallel.schedule=interleaved",
        "parallel.pipeline=2 parallel.chunks=2 parallel.schedule=zero-bubble",
        "parallel.pipeline=2 parallel.chunks=2 parallel.schedule=zbv",
        "parallel.zero=1 parallel.data=4",
        "parallel.zero=2 parallel.data=4",
        "parallel.zero=3 parallel.data=4",
        "parallel.tensor=2 parallel.zero=3",
        "parallel.offload=cpu parallel.data=4 parallel.zero=1",
        "train.recompute=full parallel.data=4 train.precision=fp8",
    ],
)
def test_checks_agree_in_each_layout_and_change_nothing(start: Start, layout: str) -> None:
    own = ["model.layers=4", "train.steps=9", "train.global_batch=16", "checkpoint.every_steps=0"]
    if "parallel.data" not in layout:
        own.append("parallel.data=2")
    curves = []
    for every in (2, 0):
        path = trained(start, f"every{every}", *own, *layout.split(), f"guard.corruption_steps={every}")
        assert events(path, "corruption") == [] == events(path, "corruption_check")
        checks = sum(record["corruption_checked"] for record in events(path, "step"))
        assert checks == (4 if every else 0)
        curves.append(loss_curve(RunDirectory(path)))
    assert curves[0] == curves[1]
