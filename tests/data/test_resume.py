"""A global batch is a function of the position: not of ranks, micro-batches or earlier batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.order import Order
from bloomery.data.position import Position
from bloomery.data_loader.batches import Batches
from bloomery.data_loader.reading import Samples

LENGTH, SAMPLES = 16, 4000


@pytest.fixture
def datasets(tmp_path: Path) -> list[IndexedDataset]:
    draw, made = np.random.default_rng(1), []
    for number in range(3):
        with IndexedWriter(tmp_path / str(number), dtype="<u2") as writer:
            for size in draw.integers(1, 60, size=400):
                writer.add_document(draw.integers(1, 500, size=size))
        made.append(IndexedDataset(tmp_path / str(number)))
    return made


@pytest.mark.parametrize("kind", ["bloomery", "megatron"])
def test_fifty_resumes_with_other_ranks_and_batches_go_on_with_the_very_next_sample(
    datasets: list[IndexedDataset], kind: str
) -> None:
    weights = [0.5, 0.3, 0.2]

    def order() -> Order | MegatronOrder:  # anew for each resume: nothing may be carried over
        if kind == "bloomery":
            return Order([one.window_count(LENGTH) for one in datasets], weights, 8)
        return MegatronOrder(
            [one.sequence_lengths for one in datasets],
            weights,
            samples=SAMPLES,
            sequence_length=LENGTH,
            seed=8,
        )

    unbroken, _ = Samples(order(), datasets, sequence_length=LENGTH).read(np.arange(SAMPLES))
    draw = np.random.default_rng(5)
    skips = (range(700, 760), range(1500, 1501), range(2000, 2300))
    left = [sample for sample in range(SAMPLES) if not any(sample in skip for skip in skips)]
    for _ in range(50):
        ranks, micro_batch, steps = draw.integers(1, 9), draw.integers(1, 5), draw.integers(1, 4)
        global_batch = int(ranks * micro_batch * steps)
        consumed = int(draw.integers(0, len(left) - 200))
        resumed = order()
        span = resumed.next_span(Position(consumed=consumed, skips=skips), global_batch)
        parts = [
            Batches(
                resumed,
                datasets,
                sequence_length=LENGTH,
                mask_documents=False,
                rank=rank,
                degree=int(ranks),
                eod=0,
                prefetch=0,
            ).batch(span, int(micro_batch))
            for rank in range(ranks)
        ]
        rows = np.concatenate([micro.tokens.numpy() for step in zip(*parts, strict=True) for micro in step])
        expected = left[consumed : consumed + global_batch]
        assert np.array_equal(rows, unbroken[expected])
