"""Pipelines at work: gradients in fp32 in every schedule, tied ends, evaluation, a stage that is gone.

That they train what one process trains is the layout matrix' to show (tests/layouts).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.layouts.training import Job, train
from tests.layouts.workers import Ranks
from tests.parallel.lines import spawn
from tests.parallel.stage_tasks import accumulate_many, computed, held_out, reductions, wait_for_one_that_left

# Two jobs of ranks, however slow the machine: they have deadlines of their own.
pytestmark = pytest.mark.timeout(900)

TWO = "parallel.pipeline=2"
SCHEDULES = {
    "1f1b": (TWO,),
    "gpipe": (TWO, "parallel.schedule=gpipe"),
    "interleaved": (TWO, "parallel.schedule=interleaved", "parallel.chunks=2"),
    "zero-bubble": (TWO, "parallel.schedule=zero-bubble"),
    "zero-bubble interleaved": (TWO, "parallel.schedule=zero-bubble", "parallel.chunks=2"),
    "zbv": (TWO, "parallel.schedule=zbv", "parallel.chunks=2"),
}
MICRO_BATCHES = 64


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.mark.parametrize("schedule", ["none", *SCHEDULES])
def test_many_micro_batches_on_bf16_weights_add_up_as_in_fp64(ranks: Ranks, schedule: str) -> None:
    settings = SCHEDULES.get(schedule, ())
    found = ranks.run(accumulate_many, "bloom", settings, MICRO_BATCHES, ranks=2 if settings else 1)
    both_ends = schedule in ("none", "zbv")  # the tied embedding gets a gradient from each of its uses
    for rank, parameters in enumerate(found):
        assert len(parameters) > 10
        for name, one in parameters.items():
            twice = name == "embedding.weight" and both_ends and rank == 0
            assert one.times == MICRO_BATCHES * (2 if twice else 1), name
            assert one.error < 1e-6, (name, one)
        assert max(one.error_in_bf16 for one in parameters.values()) > 1e-3


def test_sharded_gradients_are_summed_once_a_micro_batch_those_of_a_tied_embedding_too(ranks: Ranks) -> None:
    settings = ("parallel.data=2", "parallel.zero=2")
    for times in ranks.run(reductions, "bloom", settings, 4, ranks=2):
        assert "embedding.weight" in times and set(times.values()) == {4}, times


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "zbv"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_what_is_computed_again_is_so_once_a_micro_batch_and_changes_no_bit(
    ranks: Ranks, schedule: str, recompute: str
) -> None:
    settings = SCHEDULES[schedule]
    kept = ranks.run(computed, "gpt", settings, 4, "none", ranks=2)
    again = ranks.run(computed, "gpt", settings, 4, recompute, ranks=2)
    for (times, gradients), (twice, same) in zip(kept, again, strict=True):
        assert (times, twice) == (4, 8)
        assert gradients.keys() == same.keys()
        assert all(torch.equal(gradients[name], same[name]) for name in gradients)


def test_each_stage_computes_again_what_is_said_of_it(ranks: Ranks) -> None:
    kept = ranks.run(computed, "gpt", SCHEDULES["1f1b"], 4, "none", ranks=2)
    settings = (*SCHEDULES["1f1b"], 'parallel.recompute_per_stage=["full", "none"]')
    found = ranks.run(computed, "gpt", settings, 4, "selective", ranks=2)
    assert [times for times, _ in found] == [8, 4]
    for (_, gradients), (_, same) in zip(kept, found, strict=True):
        assert all(torch.equal(gradients[name], same[name]) for name in gradients)


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, SCHEDULES["1f1b"]),
        (4, (*SCHEDULES["zero-bubble"], "parallel.data=2", "parallel.zero=1")),
    ],
)
def test_tied_ends_are_the_same_bits_after_twenty_steps_and_so_are_their_moments(
    ranks: Ranks, world: int, settings: tuple[str, ...]
) -> None:
    job = Job(style="bloom", settings=settings, ranks=world, steps=20, returns=("state",))
    results = ranks.run(train, job, ranks=world)
    half = world // 2
    for first, last in zip(results[:half], results[half:], strict=True):
        mine = {(box.name, box.offset): box.values for box in first.state if "embedding.weight" in box.name}
        theirs = {(box.name, box.offset): box.values for box in last.state if "embedding.weight" in box.name}
        assert mine.keys() == theirs.keys() and len({name for name, _ in mine}) == 3
        for key, values in mine.items():
            assert values.any() and np.array_equal(values, theirs[key]), key


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_the_held_out_loss_of_a_pipeline_is_that_of_one_process(ranks: Ranks, schedule: str) -> None:
    ((nats, tokens),) = ranks.run(held_out, "gpt", (), ranks=1)
    for found, counted in ranks.run(held_out, "gpt", SCHEDULES[schedule], ranks=2):
        assert found == pytest.approx(nats, rel=1e-6)
        assert counted == tokens


def test_who_waits_for_a_stage_that_is_gone_says_for_whom(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 died"):
        spawn(2, wait_for_one_that_left, tmp_path, SCHEDULES["1f1b"], tmp_path / "told")
    told = (tmp_path / "told").read_text()
    assert "Rank 0 waited for rank 1" in told and "number 1 of its pipeline" in told
    assert "goes on from the newest checkpoint" in told
