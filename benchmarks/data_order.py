"""The order of samples: Megatron's against the same algorithm in NumPy, and ours against the clock.

Both of Megatron's orders are made one after the other in one process, and must be equal array for array.
"""

from __future__ import annotations

import argparse
import math
import resource
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
from contract import Measurement, measurement, report

from bloomery.data.indexed import IndexedDataset
from bloomery.data.megatron_order import DocumentRow
from bloomery.data.mixture import BLOCK
from bloomery.data.order import Order
from bloomery.native import library

T = TypeVar("T")
LENGTH, MEAN_TOKENS, SEED, DATASETS = 2048, 800, 1234, 46


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=160, help="of the mixture that are timed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    # First what must take no memory: later peaks would hide it.
    found = [*_ready(options.documents), *_megatron(options.documents, options.rounds)]
    return report([*found, *_blend(options.blocks)], as_json=options.json)


def _megatron(documents: int, rounds: int) -> list[Measurement]:
    lengths = np.random.default_rng(1).integers(1, 2 * MEAN_TOKENS, documents, dtype=np.int32)
    samples = int(lengths.sum(dtype=np.int64)) // LENGTH - 1
    ratios, ours, theirs, per_document = [], [], [], 0.0
    for _ in range(rounds):
        slow_s, slow = _timed(lambda: numpy_reference(lengths, samples))
        quick_s, row = _timed(
            lambda: DocumentRow(lengths, samples=samples, sequence_length=LENGTH, seed=SEED)
        )
        kept = row.order.nbytes + row.ends.nbytes
        per_document, shuffle_bytes = kept / documents, (row.nbytes - kept) / row.sample_count
        some = np.arange(0, row.sample_count, max(1, row.sample_count // 100_000))
        assert np.array_equal(row.order, slow[0]) and np.array_equal(row.shuffled(some), slow[2][some])
        starts = np.searchsorted(row.ends, some * LENGTH, "right")
        assert np.array_equal(row.order[starts], slow[0][slow[1][some, 0]])
        ratios.append(quick_s / slow_s)
        ours.append(quick_s)
        theirs.append(slow_s)
    beside = f"{documents:,} documents, NumPy {median(theirs):.2f} s, {_library()}"
    title = "data_order: megatron"
    return [
        measurement(f"{title}, against NumPy", median(ratios), unit="x", reference=beside, bar="<= 0.5"),
        measurement(f"{title}, made in", median(ours), unit="s", reference=beside),
        measurement(f"{title}, kept", per_document, unit="B/document", reference=beside, bar="<= 16"),
        measurement(f"{title}, kept beside", shuffle_bytes, unit="B/sample", reference=beside, bar="<= 8"),
    ]


def numpy_reference(lengths: np.ndarray, samples: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Document order, (place, offset) where each sample begins, sample order: as published, in NumPy."""
    random, tokens = np.random.RandomState(SEED), int(lengths.sum(dtype=np.int64))
    epochs = -(-(samples * LENGTH + 1) // tokens)
    assert epochs == 1, "the benchmark is of one epoch"
    order = np.arange(lengths.size, dtype=np.int32)
    random.shuffle(order)
    count = (tokens - 1) // LENGTH
    ends = np.cumsum(lengths[order], dtype=np.int64)
    at = np.arange(count, dtype=np.int64) * LENGTH
    places = np.searchsorted(ends, at, "right")
    begins = np.where(places > 0, ends[np.maximum(places, 1) - 1], 0)
    starts = np.stack([places, at - begins], axis=1).astype(np.int32)
    shuffled = np.arange(count, dtype=np.uint32)
    random.shuffle(shuffled)
    return order, starts, shuffled


def _ready(documents: int) -> list[Measurement]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory) / "pair"
        _write_sparse(prefix, documents)
        opened_s, dataset = _timed(lambda: IndexedDataset(prefix))
        windows = dataset.window_count(LENGTH)
    seconds, order = _timed(lambda: Order([windows], [1.0], SEED))
    first_s, _ = _timed(lambda: order.locate((range(1024), range(windows - 1024, windows))))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    mixed_s, mixed = _timed(lambda: Order([windows] * DATASETS, _weights(), SEED))
    far = 5 * 10**9  # samples of 2,048 tokens: 10**13 tokens
    far_s, _ = _timed(lambda: mixed.locate((range(far, far + 1024),)))
    beside, title = f"{documents:,} documents, {_library()}", "data_order: bloomery"
    return [
        measurement(
            f"{title}, ready in", opened_s + seconds + first_s, unit="s", reference=beside, bar="<= 1"
        ),
        measurement(f"{title}, kept", grown / documents, unit="B/document", reference=beside, bar="<= 1"),
        measurement(
            f"{title}, {DATASETS} datasets at 10^13 tokens ready in",
            mixed_s + far_s,
            unit="s",
            reference=_library(),
        ),
    ]


def _write_sparse(prefix: Path, documents: int) -> None:
    """A pair of so many documents, of which only what is read at its opening takes room on the disk."""
    tokens = documents * MEAN_TOKENS
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
        for offset, form, value in (
            (4 * (documents - 1), "<i", MEAN_TOKENS),
            (12 * documents - 8, "<q", 2 * (tokens - MEAN_TOKENS)),
            (20 * documents, "<q", documents),
        ):
            file.seek(34 + offset)
            file.write(struct.pack(form, value))
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(2 * tokens)


def _blend(blocks: int) -> list[Measurement]:
    """Fair mixtures (rule 3) in turns with mixtures that are shuffled block by block (rule 2)."""
    weights = _weights()
    windows = [10**6 + number for number in range(DATASETS)]
    fair = Order(windows, weights, SEED)
    located = [Order(windows, weights, SEED, rule=rule) for rule in (2, 3)]
    splits: list[float] = []
    wholes: list[list[float]] = [[], []]
    for block in range(blocks):
        samples = np.arange(block * BLOCK, (block + 1) * BLOCK)
        splits.append(_timed(lambda samples=samples: fair.split(samples))[0])
        for order, seconds in zip(located, wholes, strict=True):
            seconds.append(_timed(lambda order=order, samples=samples: order.locate_samples(samples))[0])
    ratio = median(wholes[1]) / median(wholes[0])
    given = np.zeros(DATASETS)
    worst, due = 0.0, np.array(weights) / math.fsum(weights)
    for block in range(min(blocks, 16)):
        datasets, _ = fair.split(np.arange(block * BLOCK, (block + 1) * BLOCK))
        for at, dataset in enumerate(datasets.tolist(), block * BLOCK + 1):
            given[dataset] += 1
            worst = max(worst, float(np.abs(given - due * at).max()))
    beside = f"{DATASETS} datasets, {blocks} blocks of {BLOCK:,}, {_library()}"
    title = "data_order: blend"
    return [
        measurement(title, BLOCK / median(splits) / 1e6, unit="M samples/s", reference=beside, bar=">= 10"),
        measurement(f"{title}, windows found", ratio, unit="x rule 2", reference=beside, bar="<= 1.4"),
        measurement(f"{title}, worst position", worst, unit="samples off", reference=beside, bar="<= 1"),
    ]


def _weights() -> list[float]:
    return (np.random.default_rng(2).random(DATASETS) ** 3 + 1e-6).tolist()


def _library() -> str:
    return "native library" if library() else "without the native library"


def _timed(make: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    made = make()
    return time.perf_counter() - began, made


if __name__ == "__main__":
    raise SystemExit(main())
