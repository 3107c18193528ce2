"""Where the native library is, it does the work. Its slow doubles give the same, so nothing else tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.data import native_kernels
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.order import Order, derive_key, permute
from bloomery.data.seal import SealFacts
from bloomery.data_loader.reading import Samples

LENGTH, SAMPLES = 16, 100


def test_orders_and_reading_use_every_function_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = native_kernels._functions()
    if not functions:
        pytest.skip("the native library is not built")
    used: dict[str, int] = {}

    def counted(name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            used[name] = used.get(name, 0) + 1
            return int(functions[name](*arguments))

        return call

    monkeypatch.setattr(native_kernels, "_functions", lambda: {name: counted(name) for name in functions})
    with IndexedWriter(tmp_path / "pair", dtype="<u2", seal=SealFacts()) as writer:
        writer.add_documents(np.arange(4000) % 300, np.full(80, 50))
    dataset = IndexedDataset(tmp_path / "pair")
    dataset.window(0, 10)
    windows, indices = [dataset.window_count(LENGTH), 50], np.arange(SAMPLES)
    for rule in (2, 3):
        Order(windows, [0.999999, 0.000001], 3, rule=rule).locate_samples(indices + (1 << 17))
    permute(indices, SAMPLES, derive_key(3))
    Samples(Order(windows[:1], [1.0], 3), [dataset], sequence_length=LENGTH).read(indices)
    lengths = [dataset.sequence_lengths] * 2
    blend = MegatronOrder(lengths, [0.7, 0.3], samples=SAMPLES, sequence_length=LENGTH, seed=3)
    Samples(blend, [dataset] * 2, sequence_length=LENGTH).read(indices)
    assert used.keys() == functions.keys(), "some of the work was done by a slow double"


def test_indices_of_64_bits_are_left_to_numpy() -> None:
    """Rows of more documents or samples than 32 bits count have them."""
    wide, before = np.arange(9), np.arange(9)
    words, place = np.zeros(624, dtype=np.uint32), np.zeros(1, dtype=np.int32)
    assert not native_kernels.shuffle(words, place, wide)
    assert not native_kernels.cumulate(np.ones(9, dtype=np.int32), wide, wide)
    row = np.zeros((1, 3), dtype=np.int32)
    assert not native_kernels.gather_documents(
        np.zeros(9, dtype=np.uint16), np.zeros(1, dtype=np.int64), 8, wide[:1], wide[:1], 0, None,
        order=np.zeros(1, dtype=np.int64), ends=np.array([9]), out=row, largest=np.zeros(1, dtype=np.uint64),
    )  # fmt: skip
    assert np.array_equal(wide, before)


def test_documents_of_more_tokens_together_than_32_bits_count_are_added_up() -> None:
    lengths, order = np.array([2**30, 5, 2**31 - 1], dtype=np.int32), np.array([2, 0, 1, 2], dtype=np.uint32)
    ends = np.zeros(4, dtype=np.int64)
    assert native_kernels.cumulate(lengths, order, ends)
    assert ends.tolist() == np.cumsum(lengths[order], dtype=np.int64).tolist()


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (native_kernels._OUTSIDE, IndexError),
        (native_kernels._DAMAGED, native_kernels.DamagedPage),
        (native_kernels._NO_MEMORY, MemoryError),
        (99, AssertionError),
    ],
)
def test_what_the_library_refuses_is_raised_and_never_taken_for_done(
    status: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = np.zeros(3, dtype=np.int64)
    monkeypatch.setattr(native_kernels, "_functions", lambda: {"permute": lambda *given: status})
    with pytest.raises(error):
        native_kernels.permute(numbers, 5, np.zeros(1, dtype=np.uint64), numbers)
    monkeypatch.setattr(native_kernels, "_functions", lambda: {"permute": lambda *given: 0})
    assert native_kernels.permute(numbers, 5, np.zeros(1, dtype=np.uint64), numbers)
    monkeypatch.setattr(native_kernels, "_functions", dict)
    assert not native_kernels.permute(numbers, 5, np.zeros(1, dtype=np.uint64), numbers)
