"""What runs beside the forward and the backward gives the bits of what follows them, in each layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.layouts.comparison import Matrix
from tests.layouts.layouts import BLOOM, GPT, LAYOUTS, LLAMA, Layout
from tests.layouts.styles import recipe_of
from tests.layouts.training import Job, RankResult, build

from bloomery.data_loader.batches import MicroBatch
from bloomery.parallel.mesh import mesh_of
from bloomery.plan.ranks import Degrees

pytestmark = pytest.mark.timeout(900)

SMALL_BUCKETS = "parallel.bucket_mb=0.03"  # several for each group of these models
PARALLEL = [layout for layout in LAYOUTS if "data=" in " ".join(layout.settings)]
COVERED = (
    ("DP 4", GPT),
    ("DP 2, ZeRO 1", LLAMA),
    ("DP 4, ZeRO 3 within 2", BLOOM),
    ("TP 2 + SP × DP 2, ZeRO 1", GPT),
    ("PP 2 × DP 2, ZBV", BLOOM),
    ("DP 2, ZeRO 3, recompute full", LLAMA),
)
NCCL_COVERED = (
    ("DP 4, ZeRO 1", LLAMA),
    ("TP 2 + SP × DP 2, ZeRO 1", BLOOM),
    ("DP 2, ZeRO 2", GPT),
    ("DP 4, ZeRO 3 within 2", LLAMA),
)


@pytest.mark.parametrize(("name", "style"), COVERED)
def test_what_overlaps_gives_the_bits_of_what_follows(matrix: Matrix, name: str, style: str) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    assert_equal_bits(matrix, layout, style)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("layout", PARALLEL, ids=lambda layout: layout.name)
def test_every_layout_gives_the_same_bits_with_and_without_overlap(
    matrix: Matrix, layout: Layout, compiled: str
) -> None:
    assert_equal_bits(matrix, layout, LLAMA, f"train.compile={compiled}")


@pytest.mark.parametrize(("name", "style"), NCCL_COVERED)
def test_the_collectives_of_nccl_train_what_one_process_trains(matrix: Matrix, name: str, style: str) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    found = matrix.difference(layout, style, settings=(SMALL_BUCKETS,), patch="branches of NCCL")
    assert not found.beyond, found


def test_buckets_are_begun_before_the_last_backward_has_ended(matrix: Matrix) -> None:
    counts = matrix.ranks.run(buckets_begun, "train.compile=off", ranks=2)
    for overlapped, serial, buckets in counts:
        assert buckets > 5 and overlapped >= buckets - 2 and serial == 0
        assert overlapped < buckets, "the embedding is never begun early: it may be tied"


@pytest.mark.slow
def test_buckets_of_a_compiled_model_are_begun_before_the_last_backward_has_ended(matrix: Matrix) -> None:
    for overlapped, serial, buckets in matrix.ranks.run(buckets_begun, "train.compile=on", ranks=2):
        assert buckets > 5 and buckets - 2 <= overlapped < buckets and serial == 0


def assert_equal_bits(matrix: Matrix, layout: Layout, style: str, *settings: str) -> None:
    """Train with and without overlap and compare all bits: losses, norms, gradients, state at the end."""
    results = []
    for overlap in ("true", "false"):
        job = Job(
            style=style,
            settings=(*settings, SMALL_BUCKETS, *layout.settings, f"parallel.overlap={overlap}"),
            ranks=layout.ranks,
            steps=4,
            returns=("gradients", "state"),
        )
        results.append(matrix.results(job))
    for one, other in zip(*results, strict=True):
        assert bits(one) == bits(other)


def bits(result: RankResult) -> tuple[object, ...]:
    """All that a rank brought back, comparable bit for bit."""
    boxes = [
        (box.name, box.offset, np.asarray(box.values).tobytes()) for box in (*result.gradients, *result.state)
    ]
    return result.losses, result.norms, boxes


def buckets_begun(compiled: str, rank: int) -> tuple[int, int, int]:
    """The buckets begun by the end of a step's backwards, with and without overlap, and the number of all."""
    begun, buckets = [], 0
    for overlap in ("true", "false"):
        settings = (compiled, "parallel.data=2", SMALL_BUCKETS, f"parallel.overlap={overlap}")
        mesh = mesh_of(Degrees(pipeline=1, data=2, tensor=1), rank=rank, device=torch.device("cpu"))
        model = build(recipe_of(LLAMA, settings), mesh)
        model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
        tokens = torch.arange(64).reshape(2, 32) % 90
        batch = MicroBatch(tokens=tokens, targets=tokens, documents=None, samples=torch.arange(2))
        model.accumulate([batch, batch], 0, weight=1.0)
        begun.append(model.weights.buckets.begun)
        model.weights.reduce()
        buckets = len(model.weights.buckets)
    return begun[0], begun[1], buckets
