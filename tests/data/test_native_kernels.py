"""Where the native library is, it does the work. Its slow doubles give the same, so nothing else tells."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bloomery.data import native_kernels
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.order import Order, derive_key, permute
from bloomery.data.seal import SealFacts, page_sums
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


def test_of_a_library_that_was_built_before_it_had_a_function_the_others_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = SimpleNamespace(bloomery_permute=SimpleNamespace(), bloomery_shuffle=SimpleNamespace())
    monkeypatch.setattr(native_kernels, "library", lambda: older)
    functions = native_kernels._functions.__wrapped__()
    assert functions == {"permute": older.bloomery_permute, "shuffle": older.bloomery_shuffle}
    assert len(older.bloomery_shuffle.argtypes) == 4 and older.bloomery_shuffle.restype is ctypes.c_int32
    monkeypatch.setattr(native_kernels, "library", lambda: None)
    assert native_kernels._functions.__wrapped__() == {}


def test_every_second_number_of_an_array_is_taken_as_a_copy_of_these_would_be(tmp_path: Path) -> None:
    numbers, keys = np.arange(40)[::2], derive_key(3, np.arange(40))[::2]
    assert permute(numbers, 40, keys).tolist() == permute(numbers.copy(), 40, keys.copy()).tolist()
    content = np.arange(3 * 8192, dtype=np.uint32).astype(np.uint8)[::2]
    assert np.array_equal(page_sums(content), page_sums(content.copy()))
    with IndexedWriter(tmp_path / "pair", dtype="<u2", seal=SealFacts()) as writer:
        writer.add_document(np.zeros(5 * 2048, dtype=np.uint16))
    pages = IndexedDataset(tmp_path / "pair").pages
    assert pages is not None
    ends = np.array([[0, 4096], [16_384, 20_480]])
    pages.check(ends[:, 0], ends[:, 1])
    assert pages.checked_pages == 2
