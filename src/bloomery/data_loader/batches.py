"""The data loader: reads this data-parallel rank's micro-batches of a span in threads, ahead of time.

Legend: b samples of a micro-batch, s tokens of a sample.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bloomery.data.answers import AnswerTokens
from bloomery.data.indexed import IndexedDataset
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.order import Order, sample_indices
from bloomery.data.position import Ranges
from bloomery.data.sample_layout import Layout
from bloomery.data_loader.packs import IGNORED, SampleRows
from bloomery.data_loader.reading import Samples
from bloomery.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The samples of one forward pass.

    tokens, targets: [b, s], int32 in main memory, int64 once they are on a device.
    documents: int32 [b, s], the number of each token's document in its sample; a token attends within its
    document. None if tokens attend across documents.
    samples: int64 [b], stream indices.
    global_targets: number of targets that count in the loss of the whole global batch, on all ranks; 0 where
    the batch is no part of one.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None
    samples: Tensor
    global_targets: int = 0

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on `device`; from pinned memory the host does not wait for it."""
        return MicroBatch(
            tokens=self.tokens.to(device, non_blocking=True).long(),
            targets=self.targets.to(device, non_blocking=True).long(),
            documents=None if self.documents is None else self.documents.to(device, non_blocking=True),
            samples=self.samples.to(device, non_blocking=True),
            global_targets=self.global_targets,
        )


@dataclass(frozen=True, kw_only=True)
class QueueStatus:
    """The state of the queue when the last batch was asked for.

    ready: number of batches that had been read ahead.
    waited_s: how long the caller waited for the batch, in seconds.
    """

    ready: int = 0
    waited_s: float = 0.0


class Batches:
    """The micro-batches of any span. Owns reading threads; close it, or use it in a `with` block.

    `prefetch`: global batches read ahead, by up to `threads` threads; with 0 a batch is read when asked for.

    `vocabulary_size`: token ids at or above it are refused; None refuses none.

    `layouts`: how each dataset's tokens become samples, see `Samples`.

    `answers_alone`: the datasets are prompts with answers, and targets that belong to prompts do not count.
    """

    def __init__(
        self,
        order: Order | MegatronOrder,
        datasets: Sequence[IndexedDataset],
        *,
        sequence_length: int,
        mask_documents: bool,
        rank: int,
        degree: int,
        eod: int,
        prefetch: int,
        threads: int = 2,
        vocabulary_size: int | None = None,
        layouts: Sequence[Layout] = (),
        answers_alone: bool = False,
        device: torch.device | str = "cpu",
        timeout_s: float = 600.0,
    ) -> None:
        self.datasets = tuple(datasets)
        self._sequence_length = sequence_length
        self._vocabulary_size, self._layouts = vocabulary_size, tuple(layouts)
        self._eod = eod
        self._answers = tuple(AnswerTokens(dataset) for dataset in datasets) if answers_alone else ()
        self._samples = self._reading_in(order)
        self._mask_documents = mask_documents
        self._rank, self._degree = rank, degree
        self.prefetch = prefetch
        self.queue = QueueStatus()
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        self._reading = "no dataset yet"
        self._told_that_nothing_counts = False
        self._expected: dict[tuple[Ranges, int], Future[tuple[MicroBatch, ...]]] = {}
        self._readers = (
            ThreadPoolExecutor(min(prefetch, threads), thread_name_prefix="bloomery-read")
            if prefetch
            else None
        )

    def batch(self, span: Ranges, micro_batch: int) -> Sequence[MicroBatch]:
        """Return this rank's micro-batches of a global batch, in order.

        span: the sample indices of the global batch, as ranges.
        micro_batch: samples in one forward pass on one rank (m).

        With D data-parallel ranks, each accumulation step takes D·m consecutive samples, and rank r the r-th
        m of them. So the global batch does not depend on D or m. An error of a reading thread is raised here.
        """
        asked = time.perf_counter()
        ahead = sum(future.done() for future in self._expected.values())
        future = self._expected.pop((span, micro_batch), None)
        if future is None:
            # after a rewind or a change of phase, what was read ahead will not be asked for
            self._forget_expected()
            ready = self._read(span, micro_batch)
        else:
            try:
                ready = future.result(timeout=self._timeout_s)
            except TimeoutError as late:
                if not future.done():
                    raise self._too_late() from late
                ready = future.result()  # either it is done, or the error is the reader's own
        self.queue = QueueStatus(ready=ahead, waited_s=time.perf_counter() - asked)
        return tuple(future.to(self._device) for future in ready)

    def expect(self, span: Ranges, micro_batch: int) -> None:
        """Start to read a batch that will be asked for soon. At most `prefetch` batches are kept."""
        wanted = (span, micro_batch)
        if self._readers is None or wanted in self._expected:
            return
        while len(self._expected) >= self.prefetch:
            self._expected.pop(next(iter(self._expected))).cancel()
        self._expected[wanted] = self._readers.submit(self._read, span, micro_batch)

    def follow(self, order: Order | MegatronOrder) -> None:
        """Read in another order from now on."""
        self._forget_expected()
        self._samples = self._reading_in(order)

    def close(self) -> None:
        """End the reading threads."""
        self._forget_expected()
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forget_expected(self) -> None:
        for future in self._expected.values():
            future.cancel()
        self._expected.clear()

    def _too_late(self) -> DataError:
        return DataError(
            f"Waited {self._timeout_s:.0f} s for samples of {self._reading}.",
            remedy="Check the disk or network mount that holds it, then start again.",
        )

    def _read(self, span: Ranges, micro_batch: int) -> tuple[MicroBatch, ...]:
        samples = sample_indices(span)
        per_step = micro_batch * self._degree
        if not samples.size or samples.size % per_step:
            raise DataError(
                f"A global batch of {samples.size} samples cannot be divided into micro-batches of "
                f"{micro_batch} on {self._degree} data-parallel ranks.",
                remedy=f"Make train.global_batch a multiple of {per_step}, or change train.micro_batch.",
            )
        own = samples.reshape(-1, self._degree, micro_batch)[:, self._rank]  # [A, m]
        rows = self._samples.rows(own.reshape(-1), beginning=self._begin)
        counted = self._samples.counted(samples)
        if not counted:
            self._tell_that_nothing_counts(samples)
        return tuple(
            self._micro_batch(
                rows, slice(start, start + micro_batch), own[start // micro_batch], global_targets=counted
            )
            for start in range(0, own.size, micro_batch)
        )

    def _tell_that_nothing_counts(self, samples: npt.NDArray[np.int64]) -> None:
        """Warn once of a global batch that teaches nothing: its loss is 0, and not for being learned."""
        if self._rank == 0 and not self._told_that_nothing_counts:
            self._told_that_nothing_counts = True
            log.warning(
                "the %d samples from %d on are all prompt: no token of their step counts, and its loss is 0 "
                "(momentum and weight decay still move the weights). Raise data.sequence_length, or leave "
                "documents out whose prompts are that long.",
                samples.size,
                samples[0],
            )

    def _reading_in(self, order: Order | MegatronOrder) -> Samples:
        return Samples(
            order,
            self.datasets,
            sequence_length=self._sequence_length,
            vocabulary_size=self._vocabulary_size,
            layouts=self._layouts,
            eod=self._eod,
            answers=self._answers,
        )

    def _begin(self, dataset: str) -> None:
        self._reading = dataset

    def _micro_batch(
        self, rows: SampleRows, part: slice, samples: npt.NDArray[np.int64], *, global_targets: int
    ) -> MicroBatch:
        tokens, documents = rows.tokens[part], None
        if rows.documents is not None:
            documents = self._tensor(rows.documents[part])
        elif self._mask_documents:  # the end-of-document token starts the next document
            documents = self._tensor(np.cumsum(tokens == self._eod, axis=1, dtype=np.int32))
        return MicroBatch(
            tokens=self._tensor(tokens),
            targets=self._tensor(rows.targets[part]),
            documents=documents,
            samples=self._tensor(samples.copy()),
            global_targets=global_targets,
        )

    def _tensor(self, values: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


_DOCUMENTS_AT_ONCE = 1 << 20


def held_out_batches(
    dataset: IndexedDataset,
    *,
    sequence_length: int,
    rows: int,
    eod: int,
    limit: int | None = None,
    answers_alone: bool = False,
    divisor: int = 1,
) -> Iterator[MicroBatch]:
    """Yield every token of every document as a target exactly once, in windows without context across
    documents.

    rows: number of rows in each batch.
    limit: largest number of windows, spread evenly over the file; None takes all.
    answers_alone: the documents are prompts with answers, and targets that belong to prompts do not count.
    divisor: what divides the width of every batch, as it does `sequence_length`.

    A document's inputs are the end-of-document token and all its tokens except the last; windows do not
    overlap. Windows of similar length share a batch, longest first; a batch is padded to the next eighth of
    `sequence_length` with targets that do not count. `samples` holds the window's number, or −1 in a row that
    only fills up the batch.
    """
    taken, windows = _held_out_windows(dataset, sequence_length, limit=limit)
    answers = AnswerTokens(dataset) if answers_alone else None
    longest_first = np.argsort(-windows[:, 1], kind="stable")
    grain = -(-max(1, sequence_length // 8) // divisor) * divisor
    for start in range(0, len(taken), rows):
        chosen = longest_first[start : start + rows]
        width = min(sequence_length, -(-int(windows[chosen[0], 1]) // grain) * grain)
        tokens = np.full((rows, width), eod, dtype=np.int64)
        targets = np.full((rows, width), IGNORED, dtype=np.int64)
        samples = np.full(rows, -1, dtype=np.int64)
        for row, place in enumerate(chosen.tolist()):
            first, length, opens = windows[place].tolist()
            targets[row, :length] = dataset.window(first, length)
            tokens[row, 0] = eod if opens else dataset.window(first - 1, 1)[0]
            tokens[row, 1:length] = targets[row, : length - 1]
            if answers is not None:
                targets[row, :length][~answers.mask(first, length)] = IGNORED
            samples[row] = taken[place]
        yield MicroBatch(
            tokens=torch.from_numpy(tokens),
            targets=torch.from_numpy(targets),
            documents=None,
            samples=torch.from_numpy(samples),
        )


def _held_out_windows(
    dataset: IndexedDataset, sequence_length: int, *, limit: int | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the numbers, in file order, of the windows that are taken, and of each the first target token,
    its length, and whether it opens its document; [n] and [n, 3].

    Beside these it holds the beginnings of _DOCUMENTS_AT_ONCE documents, whatever the number of documents.
    """
    count = sum(int(counts.sum()) for _, counts in _windows_by_document(dataset, sequence_length))
    wanted = count if limit is None else min(limit, count)
    taken = np.arange(wanted, dtype=np.int64) * count // max(wanted, 1)
    windows, before = np.empty((len(taken), 3), dtype=np.int64), 0
    for starts, counts in _windows_by_document(dataset, sequence_length):
        ends = before + np.cumsum(counts)
        begin, stop = np.searchsorted(taken, [before, ends[-1]]).tolist()
        numbers = taken[begin:stop]
        document = np.searchsorted(ends, numbers, side="right")
        place = numbers - (ends[document] - counts[document])
        first = starts[document] + place * sequence_length
        windows[begin:stop, 0] = first
        windows[begin:stop, 1] = np.minimum(sequence_length, starts[document + 1] - first)
        windows[begin:stop, 2] = place == 0
        before = int(ends[-1])
    return taken, windows


def _windows_by_document(
    dataset: IndexedDataset, sequence_length: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield, for some documents at a time, where each begins, and at the end where the last ends, and how
    many windows each has; [documents + 1] and [documents].
    """
    for begin in range(0, dataset.document_count, _DOCUMENTS_AT_ONCE):
        starts = dataset.starts_between(begin, min(begin + _DOCUMENTS_AT_ONCE, dataset.document_count))
        yield starts, -(-np.diff(starts) // sequence_length)
