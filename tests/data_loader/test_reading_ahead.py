"""How batches are read ahead: which are asked for, what is waited for, and what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.order import Order
from bloomery.data_loader import batches as batches_module
from bloomery.data_loader.batches import Batches, MicroBatch, QueueStatus, held_out_batches
from bloomery.data_loader.packs import IGNORED
from bloomery.errors import DataError

LENGTH, EOD = 8, 0


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    with IndexedWriter(tmp_path / "pair", dtype="<u2") as writer:
        writer.add_document(np.arange(1, 1000))
    return IndexedDataset(tmp_path / "pair")


def batches(dataset: IndexedDataset, **changed: Any) -> Batches:
    settings: dict[str, Any] = {
        "sequence_length": LENGTH,
        "mask_documents": False,
        "rank": 0,
        "degree": 1,
        "eod": EOD,
        "prefetch": 0,
    }
    order = Order([dataset.window_count(LENGTH)], [1.0], 5)
    return Batches(order, [dataset], **{**settings, **changed})


class Pool:
    """Reads when it is asked to, and not before."""

    def __init__(self, most: int, *, thread_name_prefix: str) -> None:
        self.most, self.name = most, thread_name_prefix
        self.jobs: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.futures: list[Future[Any]] = []
        self.ended: dict[str, bool] = {}
        self.all.append(self)

    all: list[Pool]

    def submit(self, act: Callable[..., Any], *given: Any) -> Future[Any]:
        self.jobs.append((act, given))
        self.futures.append(Future())
        return self.futures[-1]

    def read(self, number: int) -> None:
        act, given = self.jobs[number]
        self.futures[number].set_result(act(*given))

    def shutdown(self, **settings: bool) -> None:
        self.ended = settings


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> type[Pool]:
    kind = type("Pools", (Pool,), {"all": []})
    monkeypatch.setattr(batches_module, "ThreadPoolExecutor", kind)
    return kind


SPANS = [(range(start, start + 4),) for start in range(0, 40, 4)]


@pytest.mark.parametrize(("prefetch", "threads", "most"), [(3, 2, 2), (1, 4, 1), (5, 5, 5)])
def test_as_many_threads_read_as_are_given_and_have_something_to_read(
    dataset: IndexedDataset, pool: type[Pool], prefetch: int, threads: int, most: int
) -> None:
    with batches(dataset, prefetch=prefetch, threads=threads):
        (made,) = pool.all
        assert (made.most, made.name, made.ended) == (most, "bloomery-read", {})
    assert made.ended == {"wait": False, "cancel_futures": True}
    batches(dataset, prefetch=0).expect(SPANS[0], 2)
    assert len(pool.all) == 1


def test_a_batch_that_is_expected_is_asked_for_once_and_then_forgotten(
    dataset: IndexedDataset, pool: type[Pool]
) -> None:
    ahead = batches(dataset, prefetch=3)
    (made,) = pool.all
    for _ in range(2):
        ahead.expect(SPANS[0], 2)
        ahead.expect(SPANS[1], 2)
    ahead.expect(SPANS[0], 4)  # the same samples in other micro-batches are another batch
    assert [given for _, given in made.jobs] == [(SPANS[0], 2), (SPANS[1], 2), (SPANS[0], 4)]
    made.read(0)
    made.read(2)
    first = ahead.batch(SPANS[0], 2)
    assert [one.samples.tolist() for one in first] == [[0, 1], [2, 3]] and ahead.queue.ready == 2
    (whole,) = ahead.batch(SPANS[0], 4)
    assert whole.samples.tolist() == [0, 1, 2, 3] and ahead.queue.ready == 1
    ahead.expect(SPANS[0], 2)
    assert len(made.jobs) == 4, "it was taken, so it is read again"
    assert not made.futures[1].cancelled()


def test_what_was_expected_is_let_go_where_something_else_is_asked_for(
    dataset: IndexedDataset, pool: type[Pool]
) -> None:
    ahead = batches(dataset, prefetch=3)
    (made,) = pool.all
    for span in SPANS[:3]:
        ahead.expect(span, 2)
    assert [one.samples.tolist() for one in ahead.batch(SPANS[7], 2)] == [[28, 29], [30, 31]]
    assert all(future.cancelled() for future in made.futures)
    ahead.expect(SPANS[0], 2)
    assert len(made.jobs) == 4
    ahead.follow(Order([dataset.window_count(LENGTH)], [1.0], 6))
    assert made.futures[3].cancelled()
    ahead.expect(SPANS[0], 2)
    ahead.close()
    assert made.futures[4].cancelled() and made.ended


def test_the_oldest_batch_gives_way_and_its_reading_is_called_off(
    dataset: IndexedDataset, pool: type[Pool]
) -> None:
    ahead = batches(dataset, prefetch=2)
    (made,) = pool.all
    for span in SPANS[:3]:
        ahead.expect(span, 2)
    assert [future.cancelled() for future in made.futures] == [True, False, False]


def test_how_long_a_batch_was_waited_for_is_told(
    dataset: IndexedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([10.0, 12.5])
    monkeypatch.setattr(batches_module, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    plain = batches(dataset)
    plain.batch(SPANS[0], 2)
    assert plain.queue == QueueStatus(ready=0, waited_s=2.5)


def test_a_batch_that_does_not_come_is_told_with_the_dataset_and_the_time(
    dataset: IndexedDataset, pool: type[Pool]
) -> None:
    ahead = batches(dataset, prefetch=1, timeout_s=0.0)
    ahead.expect(SPANS[0], 2)
    with pytest.raises(DataError) as refused:
        ahead.batch(SPANS[0], 2)
    assert refused.value.message == "Waited 0 s for samples of no dataset yet."
    assert refused.value.remedy == "Check the disk or network mount that holds it, then start again."
    ahead.batch(SPANS[0], 2)
    ahead.expect(SPANS[0], 2)
    with pytest.raises(DataError, match=f"for samples of {dataset.prefix}"):
        ahead.batch(SPANS[0], 2)
    assert ahead._timeout_s == 0.0 and batches(dataset)._timeout_s == 600.0


def prompts_alone(prefix: Path) -> IndexedDataset:
    """The first three windows of two documents are prompt, the others answer."""
    with IndexedWriter(prefix, dtype="<u2") as writer:
        writer.add_documents(np.arange(1, 66), np.array([65]), prompts=np.array([25]))
    return IndexedDataset(prefix)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_batch_of_prompts_alone_is_told_once_and_by_the_first_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    dataset = prompts_alone(tmp_path / "pair")
    order = Order([8], [1.0], 5)
    _, windows = order.locate_samples(np.arange(24))
    early = np.flatnonzero(windows < 3).tolist()
    spans = [
        tuple(range(one, one + 1) for one in sorted(pair)) for pair in (early[:2], early[2:4], early[4:6])
    ]
    counts = np.array([0, 0, 0, 8, 8, 8, 8, 8])
    reader = Batches(
        order,
        [dataset],
        sequence_length=LENGTH,
        mask_documents=False,
        rank=rank,
        degree=2,
        eod=EOD,
        prefetch=0,
        answers_alone=True,
    )
    with caplog.at_level(logging.WARNING, logger=batches_module.__name__):
        for span in spans:
            (micro,) = reader.batch(span, 1)
            assert micro.global_targets == 0 and (micro.targets == IGNORED).all()
    told = [record.getMessage() for record in caplog.records if record.name == batches_module.__name__]
    first = spans[0][0].start
    assert len(told) == (1 if rank == 0 else 0)
    for line in told:
        assert line.startswith(f"the 2 samples from {first} on are all prompt: no token of their step")
    (some,) = reader.batch((range(0, 2),), 1)
    assert some.global_targets == counts[windows[:2]].sum()


def test_a_micro_batch_on_a_device_has_wide_ids_and_the_same_count() -> None:
    small = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    batch = MicroBatch(
        tokens=small, targets=small + 1, documents=small * 0, samples=torch.tensor([4, 5]), global_targets=9
    )
    there = batch.to(torch.device("cpu"))
    assert there.tokens.dtype == there.targets.dtype == torch.int64
    assert there.documents is not None and there.documents.dtype == torch.int32
    assert there.tokens.tolist() == [[0, 1, 2], [3, 4, 5]] and there.targets.tolist() == [
        [1, 2, 3],
        [4, 5, 6],
    ]
    assert there.documents.tolist() == [[0] * 3] * 2 and there.samples.tolist() == [4, 5]
    assert there.global_targets == 9
    bare = MicroBatch(tokens=small, targets=small, documents=None, samples=torch.tensor([1]))
    assert bare.to(torch.device("cpu")).documents is None and bare.global_targets == 0


def test_windows_of_held_out_documents_lie_in_rows_from_the_longest_to_the_shortest(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "kept", dtype="<u2") as writer:
        for document in ([5, 6, EOD], [*range(11, 21), EOD], [9, EOD]):
            writer.add_document(document)
    dataset = IndexedDataset(tmp_path / "kept")
    first, second = held_out_batches(dataset, sequence_length=8, rows=3, eod=EOD)
    assert first.samples.tolist() == [1, 0, 2] and second.samples.tolist() == [3, -1, -1]
    no = IGNORED
    assert first.targets.tolist() == [
        [11, 12, 13, 14, 15, 16, 17, 18],
        [5, 6, EOD, no, no, no, no, no],
        [19, 20, EOD, no, no, no, no, no],
    ]
    assert first.tokens.tolist() == [
        [EOD, 11, 12, 13, 14, 15, 16, 17],
        [EOD, 5, 6, EOD, EOD, EOD, EOD, EOD],
        [18, 19, 20, EOD, EOD, EOD, EOD, EOD],
    ]
    assert second.targets.tolist() == [[9, EOD], [no, no], [no, no]]
    assert second.tokens.tolist() == [[EOD, 9], [EOD, EOD], [EOD, EOD]]
    assert first.documents is None and first.global_targets == 0
    limited = list(held_out_batches(dataset, sequence_length=8, rows=3, eod=EOD, limit=2))
    assert [batch.samples.tolist() for batch in limited] == [[0, 2, -1]]
    assert len(list(held_out_batches(dataset, sequence_length=8, rows=3, eod=EOD, limit=99))) == 2
    assert list(held_out_batches(dataset, sequence_length=8, rows=3, eod=EOD, limit=0)) == []


@pytest.mark.parametrize(
    ("length", "divisor", "width"),
    [(64, 1, 16), (64, 3, 18), (60, 1, 14), (7, 1, 7), (64, 16, 16), (64, 32, 32)],
)
def test_a_batch_is_as_wide_as_its_longest_window_up_to_an_eighth(
    tmp_path: Path, length: int, divisor: int, width: int
) -> None:
    with IndexedWriter(tmp_path / "kept", dtype="<u2") as writer:
        writer.add_document(np.arange(1, min(length, 13) + 1))
    (batch,) = held_out_batches(
        IndexedDataset(tmp_path / "kept"), sequence_length=length, rows=1, eod=EOD, divisor=divisor
    )
    assert batch.tokens.shape == (1, width)


@pytest.mark.parametrize(("device", "is_pinned"), [("cpu", False), ("cuda", True)])
def test_batches_for_a_gpu_lie_in_memory_that_it_can_copy_from_while_the_host_goes_on(
    dataset: IndexedDataset, monkeypatch: pytest.MonkeyPatch, device: str, is_pinned: bool
) -> None:
    pinned = list[torch.Tensor]()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    with batches(dataset, device=device, mask_documents=True) as made:
        (micro,) = made._read(SPANS[0], 4)
    held = [micro.documents, micro.tokens, micro.targets, micro.samples]
    assert len(pinned) == (4 if is_pinned else 0) and {*map(id, pinned)} <= {*map(id, held)}
