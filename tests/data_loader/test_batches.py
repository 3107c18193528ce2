"""Batches: the same global batch whatever the ranks, equal to a slow gather from the file."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch

from bloomery.data import native_kernels
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.order import Order
from bloomery.data_loader import batches as batches_module
from bloomery.data_loader.batches import IGNORED, Batches, MicroBatch, held_out_batches
from bloomery.errors import DataError

EOD, LENGTH, MICRO_BATCH = 0, 8, 2


def written(prefix: Path, documents: list[list[int]]) -> IndexedDataset:
    with IndexedWriter(prefix, dtype="<u2") as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


@pytest.fixture
def datasets(tmp_path: Path) -> list[IndexedDataset]:
    draw = np.random.default_rng(1)
    sizes = draw.integers(1, 20, size=60)
    documents = [[*draw.integers(1, 500, size=size).tolist(), EOD] for size in sizes]
    return [written(tmp_path / "large", documents), written(tmp_path / "tiny", documents[:3])]


@pytest.fixture
def order(datasets: list[IndexedDataset]) -> Order:
    return Order([dataset.window_count(LENGTH) for dataset in datasets], [0.7, 0.3], 5)


def batches(order: Order, datasets: list[IndexedDataset], **changed: object) -> Batches:
    settings: dict[str, object] = {
        "sequence_length": LENGTH,
        "mask_documents": True,
        "rank": 0,
        "degree": 1,
        "eod": EOD,
        "prefetch": 0,
    }
    return Batches(order, datasets, **{**settings, **changed})  # type: ignore[arg-type]  — checked where written


def test_a_batch_equals_a_slow_gather(order: Order, datasets: list[IndexedDataset]) -> None:
    span = (range(3, 9), range(40, 46))
    micro_batches = batches(order, datasets).batch(span, 12)
    (batch,) = micro_batches
    which, windows = order.locate(span)
    assert batch.samples.tolist() == [*range(3, 9), *range(40, 46)]
    assert batch.documents is not None and batch.documents.dtype == torch.int32
    for row in range(12):
        start = int(windows[row]) * LENGTH
        tokens = datasets[int(which[row])].window(start, LENGTH + 1).tolist()
        assert batch.tokens[row].tolist() == tokens[:-1] and batch.targets[row].tolist() == tokens[1:]
        counted = [tokens[: i + 1].count(EOD) for i in range(LENGTH)]
        assert batch.documents[row].tolist() == counted
    assert batch.tokens.dtype == batch.targets.dtype == batch.samples.dtype == torch.int64


@pytest.mark.parametrize(("degree", "micro_batch"), [(1, 1), (1, 4), (2, 3), (3, 2), (4, 1), (6, 2)])
def test_any_ranks_and_micro_batches_share_out_the_same_global_batch(
    order: Order, datasets: list[IndexedDataset], degree: int, micro_batch: int
) -> None:
    span = (range(100, 124),)
    (whole,) = batches(order, datasets).batch(span, 24)
    ranks = [
        batches(order, datasets, rank=rank, degree=degree, mask_documents=False).batch(span, micro_batch)
        for rank in range(degree)
    ]
    in_order = [micro for step in zip(*ranks, strict=True) for micro in step]
    assert all(micro.documents is None and micro.tokens.shape == (micro_batch, LENGTH) for micro in in_order)
    for part in ("tokens", "targets", "samples"):
        assert torch.equal(torch.cat([getattr(micro, part) for micro in in_order]), getattr(whole, part))


def test_read_ahead_or_not_the_batches_are_the_same(order: Order, datasets: list[IndexedDataset]) -> None:
    spans = [(range(start, start + 12),) for start in range(0, 120, 12)]
    plain = batches(order, datasets)
    assert (plain.queue.ready, plain.queue.waited_s) == (0, 0.0)
    with batches(order, datasets, prefetch=2) as ahead:
        for number, span in enumerate(spans):
            for later in spans[number : number + 4]:  # more than may wait
                ahead.expect(later, MICRO_BATCH)
            for one, other in zip(
                ahead.batch(span, MICRO_BATCH), plain.batch(span, MICRO_BATCH), strict=True
            ):
                assert torch.equal(one.tokens, other.tokens) and torch.equal(one.samples, other.samples)
        ahead.expect(spans[3], MICRO_BATCH)
        back = ahead.batch(spans[0], MICRO_BATCH)  # a rewind: something else than expected
        assert back[0].samples.tolist() == [0, 1]


def test_what_was_read_ahead_in_another_order_is_not_given(
    order: Order, datasets: list[IndexedDataset]
) -> None:
    other, span = Order(order.windows, [0.3, 0.7], 6), (range(0, 12),)
    with batches(order, datasets, prefetch=2) as ahead:
        before = ahead.batch(span, 12)[0].tokens
        ahead.expect(span, 12)
        wait(ahead._expected.values())
        ahead.follow(other)
        (found,) = ahead.batch(span, 12)
    (wanted,) = batches(other, datasets).batch(span, 12)
    assert torch.equal(found.tokens, wanted.tokens) and not torch.equal(found.tokens, before)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_batch_that_cannot_be_divided_is_refused(
    order: Order, datasets: list[IndexedDataset], prefetch: int
) -> None:
    with batches(order, datasets, degree=3, prefetch=prefetch) as refusing:
        refusing.expect((range(0, 8),), MICRO_BATCH)
        with pytest.raises(DataError, match=r"8 samples cannot be divided .* 2 on 3") as refused:
            refusing.batch((range(0, 8),), MICRO_BATCH)
    assert "multiple of 6" in refused.value.remedy


def test_an_error_of_the_reading_thread_surfaces_in_the_caller(
    order: Order, datasets: list[IndexedDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(self: IndexedDataset, start: int, count: int) -> None:
        raise TimeoutError("the mount is gone")

    monkeypatch.setattr(native_kernels, "_functions", dict)
    monkeypatch.setattr(IndexedDataset, "window", torn)
    with batches(order, datasets, prefetch=1) as failing:
        failing.expect((range(0, 12),), MICRO_BATCH)
        with pytest.raises(TimeoutError, match="the mount is gone"):
            failing.batch((range(0, 12),), MICRO_BATCH)


def test_ids_beyond_the_vocabulary_are_refused_with_dataset_and_place(tmp_path: Path) -> None:
    dataset = written(tmp_path / "pair", [[5] * 20 + [77] + [5] * 20])
    order, span = Order([dataset.window_count(LENGTH)], [1.0], 5), (range(0, 5),)
    whole = 5
    assert batches(order, [dataset], vocabulary_size=78).batch(span, whole)
    with pytest.raises(DataError, match=r"pair has token id 77 within tokens 16 to 24, .* ends at 76"):
        batches(order, [dataset], vocabulary_size=77).batch(span, whole)


def test_a_wait_that_takes_too_long_names_the_dataset(
    order: Order, datasets: list[IndexedDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = Event(), Event()
    read = IndexedDataset.window

    def slow(self: IndexedDataset, start: int, count: int) -> object:
        reading.set()
        assert go_on.wait(60)
        return read(self, start, count)

    monkeypatch.setattr(native_kernels, "_functions", dict)
    monkeypatch.setattr(IndexedDataset, "window", slow)
    with batches(order, datasets, prefetch=1, timeout_s=0.05) as stuck:
        stuck.expect((range(0, 12),), MICRO_BATCH)
        assert reading.wait(60)
        with pytest.raises(DataError, match=r"Waited .* for samples of .*(large|tiny)"):
            stuck.batch((range(0, 12),), MICRO_BATCH)
        go_on.set()


def slow_held_out(documents: list[list[int]], length: int) -> Iterator[tuple[list[int], list[int]]]:
    for document in documents:
        inputs = [EOD, *document[:-1]]
        for start in range(0, len(document), length):
            yield inputs[start : start + length], document[start : start + length]


def rows_of(batch: MicroBatch) -> Iterator[tuple[int, list[int], list[int]]]:
    for tokens, targets, sample in zip(batch.tokens, batch.targets, batch.samples, strict=True):
        kept = targets != IGNORED
        assert kept[: int(kept.sum())].all()  # padding at the end only
        yield int(sample), tokens[kept].tolist(), targets[kept].tolist()


@pytest.mark.parametrize("at_once", [1, 2, 1 << 20])
def test_held_out_batches_hold_every_token_once_without_context_across_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(batches_module, "_DOCUMENTS_AT_ONCE", at_once)
    draw = np.random.default_rng(3)
    sizes = [0, 1, 7, 8, 9, 16, 17, 40, 3, 0, 5]
    documents = [[*draw.integers(1, 500, size=size).tolist(), EOD] if size else [] for size in sizes]
    dataset = written(tmp_path / "kept", documents)
    expected = list(slow_held_out(documents, LENGTH))
    found: dict[int, tuple[list[int], list[int]]] = {}
    widths = []
    for batch in held_out_batches(dataset, sequence_length=LENGTH, rows=4, eod=EOD):
        assert batch.tokens.shape == batch.targets.shape and batch.tokens.shape[0] == 4
        widths.append(batch.tokens.shape[1])
        for sample, inputs, targets in rows_of(batch):
            if sample < 0:
                assert not targets
            else:
                found[sample] = (inputs, targets)
    assert [found[number] for number in range(len(expected))] == expected
    some = list(held_out_batches(dataset, sequence_length=LENGTH, rows=4, eod=EOD, limit=6))
    numbers = sorted(int(sample) for batch in some for sample in batch.samples if sample >= 0)
    assert numbers == [number * len(expected) // 6 for number in range(6)]
    assert widths == sorted(widths, reverse=True) and widths[0] == LENGTH and widths[-1] < LENGTH
    assert list(held_out_batches(written(tmp_path / "none", []), sequence_length=8, rows=2, eod=EOD)) == []


def test_windows_of_one_length_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    dataset = written(tmp_path / "alike", [[7] * (1 + number % 2) for number in range(100)])
    batches = held_out_batches(dataset, sequence_length=LENGTH, rows=10, eod=EOD)
    numbers = [number for batch in batches for number in batch.samples.tolist()]
    assert numbers == [*range(1, 100, 2), *range(0, 100, 2)], "the longer ones first"


def test_widths_of_held_out_batches_can_be_split_over_the_ranks_of_a_sequence(tmp_path: Path) -> None:
    documents = [[*range(1, size), EOD] for size in range(1, 121, 7)]
    dataset = written(tmp_path / "kept", documents)
    batches = held_out_batches(dataset, sequence_length=120, rows=2, eod=EOD, divisor=4)
    widths = [batch.tokens.shape[1] for batch in batches]
    assert set(widths) == {16, 32, 48, 64, 80, 96, 112, 120}


def test_some_held_out_windows_take_memory_for_some_documents_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200,000 documents, of which 64 windows are taken: a row of numbers for each would take megabytes."""
    monkeypatch.setattr(batches_module, "_DOCUMENTS_AT_ONCE", 1_000)
    with IndexedWriter(tmp_path / "many", dtype=np.dtype("<u2")) as writer:
        writer.add_documents(np.ones(400_000, dtype=np.uint16), np.full(200_000, 2, dtype=np.int64))
    dataset = IndexedDataset(tmp_path / "many")
    tracemalloc.start()
    some = held_out_batches(dataset, sequence_length=8, rows=4, eod=0, limit=64)
    rows = sum(len(batch.samples) for batch in some)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows == 64 and most < 3_000_000, "the numbers of all windows take 1.6 MB, the rest 8 KB a thousand"


@pytest.mark.parametrize("documents", [range(0, 9), range(3, 7)])
def test_beginnings_of_some_documents_are_those_among_all(tmp_path: Path, documents: range) -> None:
    sizes = [3, 0, 1, 5, 0, 0, 2, 4, 0]
    written(tmp_path / "some", [[1] * size for size in sizes])
    dataset = IndexedDataset(tmp_path / "some").part(documents)
    expected = np.append(0, np.cumsum([sizes[number] for number in documents]))
    assert dataset.document_starts.tolist() == expected.tolist()
    for begin in range(len(documents)):
        for stop in range(begin, len(documents) + 1):
            assert dataset.starts_between(begin, stop).tolist() == expected[begin : stop + 1].tolist()


def test_of_more_batches_than_may_wait_the_one_expected_first_gives_way(
    order: Order, datasets: list[IndexedDataset]
) -> None:
    _, second, third = spans = [(range(start, start + 12),) for start in (0, 12, 24)]
    with batches(order, datasets, prefetch=2) as ahead:
        for span in spans:
            ahead.expect(span, MICRO_BATCH)
        assert [span for span, _ in ahead._expected] == [second, third]
        wait(ahead._expected.values())
        ahead.batch(third, MICRO_BATCH)
        assert ahead.queue.ready == 2
