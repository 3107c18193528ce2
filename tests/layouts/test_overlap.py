"""What runs beside the forward and the backward gives the bits of what follows them, in some layouts.

`make soak PART=overlap` compares them in every layout, compiled and not.
"""

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
from bloomery.plan.ranks import Degrees, degrees_of

pytestmark = pytest.mark.timeout(900)

SMALL_BUCKETS = "parallel.bucket_mb=0.03"  # several for each group of these models
FP8, BY_ROW = ("train.precision=fp8",), ("train.precision=fp8", "train.fp8_scaling=row")
COVERED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("DP 4", GPT, ()),
    ("DP 2, ZeRO 1", LLAMA, ()),
    ("DP 4, ZeRO 3 within 2", BLOOM, ()),
    ("TP 2 + SP × DP 2, ZeRO 1", GPT, BY_ROW),
    ("PP 2 × DP 2, ZBV", BLOOM, ()),
    ("DP 2, ZeRO 3, recompute full", LLAMA, ()),
    ("DP 2, ZeRO 2", BLOOM, FP8),
    ("PP 2 × DP 2, ZeRO 3", LLAMA, ()),
)
NCCL_COVERED = (
    ("DP 4, ZeRO 1", LLAMA),
    ("TP 2 + SP × DP 2, ZeRO 1", BLOOM),
    ("DP 2, ZeRO 2", GPT),
    ("DP 4, ZeRO 3 within 2", LLAMA),
)


@pytest.mark.parametrize(("name", "style", "settings"), COVERED)
def test_what_overlaps_gives_the_bits_of_what_follows(
    matrix: Matrix, name: str, style: str, settings: tuple[str, ...]
) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    assert_equal_bits(matrix, layout, style, *settings)


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


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_updated_weights_are_gathered_while_the_next_forward_runs(matrix: Matrix, zero: int) -> None:
    for begun, at_blocks, after in matrix.ranks.run(weights_under_way, zero, ranks=2):
        assert begun >= 3 and after == 0
        assert at_blocks == sorted(at_blocks, reverse=True)
        if zero < 3:  # whose blocks are gathered on the way, so that the ends alone are there after an update
            assert begun > at_blocks[0] > at_blocks[-1] > 0


def assert_equal_bits(matrix: Matrix, layout: Layout, style: str, *settings: str) -> None:
    """Train with and without overlap and compare all bits: losses, norms, gradients, state at the end."""
    serial, *overlapped = (
        matrix.results(
            Job(
                style=style,
                settings=(*settings, SMALL_BUCKETS, *layout.settings, *overlap),
                ranks=layout.ranks,
                steps=4,
                returns=("gradients", "state"),
            )
        )
        for overlap in (("parallel.overlap=false",), *overlaps_of(layout))
    )
    for results in overlapped:
        for one, other in zip(results, serial, strict=True):
            assert bits(one) == bits(other)


def overlaps_of(layout: Layout) -> list[tuple[str, ...]]:
    """The settings that overlap: with sharded weights, those of one, two and three blocks ahead."""
    if "parallel.zero=3" not in layout.settings:
        return [("parallel.overlap=true",)]
    return [("parallel.overlap=true", f"parallel.prefetch_blocks={ahead}") for ahead in (1, 2, 3)]


def bits(result: RankResult) -> tuple[object, ...]:
    """All that a rank brought back, comparable bit for bit."""
    boxes = [
        (box.name, box.offset, np.asarray(box.values).tobytes()) for box in (*result.gradients, *result.state)
    ]
    return result.losses, result.norms, boxes


def weights_under_way(zero: int, rank: int) -> tuple[int, list[int], int]:
    """The ranges of updated weights whose gather is under way: after an update, when each block of the next
    forward begins, and at its end.
    """
    settings = ("parallel.data=2", f"parallel.zero={zero}", "parallel.bucket_mb=0.004")
    mesh = mesh_of(
        degrees_of(recipe_of(LLAMA, settings).parallel, world=2), rank=rank, device=torch.device("cpu")
    )
    model = build(recipe_of(LLAMA, settings), mesh)
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    begun, at_blocks = model.weights.updated.under_way, list[int]()
    for block in model.decoder.blocks:
        block.register_forward_pre_hook(lambda *_: at_blocks.append(model.weights.updated.under_way))
    tokens = torch.arange(64).reshape(2, 32) % 90
    model.entropy([MicroBatch(tokens=tokens, targets=tokens, documents=None, samples=torch.arange(2))])
    return begun, at_blocks, model.weights.updated.under_way


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
