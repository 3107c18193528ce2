"""The tokens that steps train on are those that the order says, also where the mixture changes on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.train.test_loop import events, go
from tests.train.test_mixtures_in_a_run import mixed

from bloomery.config.load import LoadedRecipe
from bloomery.train import loop

__all__ = ["mixed"]
Start = Callable[..., tuple[LoadedRecipe, Path]]
LENGTH = 32


@pytest.fixture
def datasets_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """For each step the datasets of its samples, after their tokens were compared with the datasets' own."""
    steps: list[list[int]] = []
    real_build, real_step = loop.build_trainer, loop.train_step
    trainers: list[Any] = []

    @contextmanager
    def build_trainer(*arguments: Any) -> Iterator[Any]:
        with real_build(*arguments) as trainer:
            trainers.append(trainer)
            yield trainer

    def train_step(parts: Any, micro_batches: Any, state: Any) -> Any:
        order, batches = trainers[-1].order, trainers[-1].batches
        samples = np.concatenate([batch.samples.numpy() for batch in micro_batches])
        found = np.concatenate([batch.tokens.numpy() for batch in micro_batches])
        datasets, windows = order.locate_samples(samples)
        for dataset, window, tokens in zip(datasets, windows, found, strict=True):
            own = batches.datasets[dataset].window(int(window) * LENGTH, LENGTH)
            assert tokens.tolist() == own.tolist()
        steps.append([int(dataset) for dataset in datasets])
        return real_step(parts, micro_batches, state)

    monkeypatch.setattr(loop, "build_trainer", build_trainer)
    monkeypatch.setattr(loop, "train_step", train_step)
    return steps


def test_a_mixture_that_changed_at_a_start_is_what_steps_are_given_from_there_on(
    mixed: Start, datasets_of_steps: list[list[int]]
) -> None:
    settings = ("train.ramp_up=[]", "evaluate.every_steps=0", "data.prefetch=2")
    go(*mixed(*settings, "guard.stop_at_step=3", second=", weight = 0.0"))
    assert [set(step) for step in datasets_of_steps] == [{0}] * 3
    datasets_of_steps.clear()
    go(*mixed(*settings, "guard.stop_at_step=6", second=", weight = 3.0"))
    given = [dataset for step in datasets_of_steps for dataset in step]
    assert len(given) == 24 and given.count(1) == pytest.approx(18, abs=1)


def test_a_budget_that_is_spread_anew_over_a_shorter_run_reaches_the_batches(
    mixed: Start, datasets_of_steps: list[list[int]]
) -> None:
    settings = ("train.ramp_up=[]", "evaluate.every_steps=0", "data.prefetch=2", "log.every_steps=1")
    loaded, path = mixed(*settings, second=", tokens = 640")

    def ask() -> None:
        (path / "control").mkdir(exist_ok=True)
        (path / "control" / "set").write_text("train.samples = 48\n")

    go(loaded, path, while_it_starts=ask)
    assert len(events(path, "mixture")) >= 1 and len(datasets_of_steps) == 6
    given = [dataset for step in datasets_of_steps for dataset in step]
    assert given.count(1) == pytest.approx(20, abs=1), "640 tokens are 20 samples, however long the run is"
