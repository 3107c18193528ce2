"""Silent corruption: 40 planted bit flips on one of four ranks, 10,000 clean steps, and every layout.

`make soak PART=corruption`; figures in benchmarks/README.md. BLOOMERY_SOAK_STEPS sets the clean steps.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.tiny_run import TINY
from tests.train.bit_flips import plan_flips
from tests.train.real_ranks import train_on_ranks
from tests.train.test_corruption import SETTINGS, assert_found, trained
from tests.train.test_loop import events

from bloomery.config.load import LoadedRecipe
from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory

pytestmark = pytest.mark.slow
Start = Callable[..., tuple[LoadedRecipe, Path]]
FLIPS, EVERY = 40, 8
DEADLINE_S = 7000.0
CLEAN_STEPS = int(os.environ.get("BLOOMERY_SOAK_STEPS", "10000"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_forty_flips_are_found_within_the_interval_and_the_right_rank_is_named(
    start: Start, precision: str
) -> None:
    flips = tuple(plan_flips(FLIPS, ranks=4, first=EVERY, every=EVERY, seed=1))
    steps = EVERY * (FLIPS + 2)
    settings = (f"train.steps={steps}", f"train.precision={precision}", f"checkpoint.every_steps={EVERY}")
    path = trained(
        start,
        "flipped",
        *settings,
        f"guard.corruption_steps={EVERY}",
        flips=flips,
        deadline_s=DEADLINE_S,
    )
    clean = trained(start, "clean", *settings, "guard.corruption_steps=0", deadline_s=DEADLINE_S)
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
        "train.global_batch=4",
        "guard.corruption_steps=2",
        "checkpoint.every_steps=2500",
        "evaluate.at_end=false",
        "guard.plateau=false",
        "guard.spike=false",
        deadline_s=DEADLINE_S,
    )
    steps = events(path, "step")
    checks = sum(record["corruption_checked"] for record in steps)
    print(f"\n{len(steps)} steps, {checks} checks, {len(events(path, 'corruption'))} alarms")
    assert len(steps) == CLEAN_STEPS and checks == (CLEAN_STEPS - 1) // 2
    assert events(path, "corruption") == [] == events(path, "corruption_check")


LAYOUTS = (
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
)
OWN = (
    "optim.name=adamw",
    "model.layers=4",
    "train.steps=9",
    "train.global_batch=16",
    "checkpoint.every_steps=0",
)


class OneAfterAnother:
    """Trains several runs on each rank of `train_on_ranks`, before its own, in the same processes."""

    def __init__(self, runs: list[tuple[str, str, tuple[str, ...]]]) -> None:
        self.runs = runs

    def __call__(self, rank: int) -> None:
        from bloomery.config.load import parse_recipe
        from bloomery.train.loop import train
        from bloomery.train.settings import StartOptions

        own = os.environ["BLOOMERY_RENDEZVOUS_FILE"]
        for meeting, path, settings in self.runs:
            os.environ["BLOOMERY_RENDEZVOUS_FILE"] = meeting
            loaded = parse_recipe(TINY, settings, label="tiny")
            assert train(loaded, RunDirectory(Path(path)), StartOptions(say=lambda line: None)).finished
        os.environ["BLOOMERY_RENDEZVOUS_FILE"] = own  # a second meeting at one place finds stale addresses


def test_checks_agree_in_each_layout_and_change_nothing(start: Start, tmp_path: Path) -> None:
    runs: list[tuple[str, str, tuple[str, ...]]] = []
    paths: dict[tuple[str, int], Path] = {}
    for number, layout in enumerate(LAYOUTS):
        for every in (2, 0):
            loaded, path = start(name=f"run-{number}-{every}")
            degree = () if "parallel.data" in layout else ("parallel.data=2",)
            settings = (*SETTINGS, *OWN, *degree, *layout.split(), f"guard.corruption_steps={every}")
            sources = f"data.sources={loaded.recipe.data.sources[0]}"
            # SETTINGS ask for four replicas
            settings = tuple(one for one in settings if one != "parallel.data=4" or one in layout)
            runs.append((str(tmp_path / f"meeting-{number}-{every}"), str(path), (sources, *settings)))
            paths[layout, every] = path
    path = Path(runs[-1][1]).with_name("last")
    start(name="last")
    ends = train_on_ranks(4, path, *runs[-1][2], plant=OneAfterAnother(runs), deadline_s=DEADLINE_S)
    assert set(ends) == {"the samples are done"}, ends
    for layout in LAYOUTS:
        checked, unchecked = paths[layout, 2], paths[layout, 0]
        assert events(checked, "corruption") == [] == events(checked, "corruption_check"), layout
        assert sum(record["corruption_checked"] for record in events(checked, "step")) == 4, layout
        assert loss_curve(RunDirectory(checked)) == loss_curve(RunDirectory(unchecked)), layout
        print(f"{layout}: checks agree, losses as without them")
