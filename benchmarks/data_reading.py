"""Reading samples of 2,048 tokens: ours against a gather of documents one by one, warm and cold.

The peer does what loaders of Megatron's files do: it looks each document of a sample up and copies it out of
`np.memmap`. Both give int32 inputs and targets. Warm rounds take turns; each cold pass is a process of its
own that drops the file from the page cache first, and counts what it reads from the disk in /proc/self/io.
The same tokens with and without a seal say what it costs to check each page when a sample first touches it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
from contract import Measurement, measurement, report

from bloomery.cli.train import MALLOC
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.native_kernels import page_sums
from bloomery.data.order import Order
from bloomery.data.pair_files import bin_path, idx_path, sums_path
from bloomery.data.sealing import seal
from bloomery.data_loader.reading import Samples
from bloomery.native import library

LENGTH, BATCH, SEED, ITEM = 2048, 256, 1234, 2
"""BATCH: a replica's part of a step, which the loader reads at once; of tr11-176b 2,048 samples over 8."""
WARM_BATCHES = 16
"""Of one turn, for a loader reads on and on: the first batch finds the caches as the other side left them."""
ORDERS = ("bloomery", "megatron")
WARM_BARS = {"bloomery": ">= 20", "megatron": ">= 4"}
COLD_BARS = {"bloomery": "<= 2.5", "megatron": None}
SEALED = "sealed"
CHECK_BAR = "<= 1.03"
SUMMED_PAGES, SUMMED_TIMES = 256, 64
"""What is summed over and over for the least that a check can take: one mebibyte, which stays in a cache."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--samples", type=int, default=2048, help="of one cold pass")
    parser.add_argument("--passes", type=int, default=5, help="cold passes with and without a seal")
    parser.add_argument("--directory", type=Path, help="where the file is written; a disk, not memory")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cold", choices=(*ORDERS, "peer", SEALED), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.cold:
        order, name = ("bloomery", SEALED) if options.cold == SEALED else (options.cold, "pair")
        print(json.dumps(_cold(order, options.directory / name, options.samples)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        prefix = Path(directory) / "pair"
        _write(prefix, options.tokens)
        found = [*_warm(prefix, options.rounds), *_cold_passes(prefix, options.samples)]
        found += _page_checks(prefix, options.rounds, options.samples, options.passes)
    return report(found, as_json=options.json)


class Peer:
    """Samples gathered from np.memmap, one document after the other, in the megatron order."""

    def __init__(self, prefix: Path, dataset: IndexedDataset, order: MegatronOrder) -> None:
        self._tokens = np.memmap(bin_path(prefix), dtype="<u2", mode="r")
        self._pointers = np.array(dataset.pointers)
        self._row, self._order = order.rows[0], order

    def read(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = [self._one(int(sample)) for sample in self._order.locate_samples(samples)[1]]
        return np.stack([row[:-1] for row in rows]), np.stack([row[1:] for row in rows])

    def _one(self, sample: int) -> np.ndarray:
        pieces = []
        for document, first, count in self._row.pieces(sample):
            begin = int(self._pointers[document]) // ITEM + first
            pieces.append(self._tokens[begin : begin + count])
        return np.concatenate(pieces).astype(np.int32)


def _warm(prefix: Path, rounds: int) -> list[Measurement]:
    dataset = IndexedDataset(prefix)
    int(dataset.flat.max())  # every page is in memory and mapped
    readers = {name: _reader(name, prefix, dataset) for name in (*ORDERS, "peer")}
    assert all(
        np.array_equal(one, other)
        for one, other in zip(*(readers[name](0) for name in ("megatron", "peer")), strict=True)
    )
    times: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(rounds):
        for name, read in readers.items():
            began = time.perf_counter()
            for batch in range(turn * WARM_BATCHES, (turn + 1) * WARM_BATCHES):
                read(batch)
            times[name].append((time.perf_counter() - began) / (BATCH * WARM_BATCHES) * 1e6)
    found = []
    for name in ORDERS:
        ratio = median(theirs / ours for theirs, ours in zip(times["peer"], times[name], strict=True))
        beside = (
            f"µs a sample: ours {median(times[name]):.1f}, peer {median(times['peer']):.1f}; {_library()}"
        )
        found.append(
            measurement(f"data_reading: {name}, warm", ratio, unit="x", reference=beside, bar=WARM_BARS[name])
        )
    return found


def _page_checks(prefix: Path, rounds: int, samples: int, passes: int) -> list[Measurement]:
    """What reading takes with a seal, over the same without.

    A sample lies on two pages or more, and its neighbours share them: so the first samples of a pass check
    almost twice the bytes that they read, and a whole pass checks each page once.
    """
    sealed = prefix.with_name(SEALED)
    for path in (bin_path, idx_path):
        path(sealed).hardlink_to(path(prefix))
    seal(sealed, vocabulary_size=32_000, end_of_document_id=None)
    batches = {"a whole pass": 0, "its first 4,096 samples": WARM_BATCHES, "read again": WARM_BATCHES}
    times: dict[tuple[str, str], list[float]] = {}
    pairs = [("plain", prefix), (SEALED, sealed)]
    for turn in range(rounds):
        for name, pair in pairs[:: 1 if turn % 2 else -1]:
            dataset = IndexedDataset(pair)
            read = _reader("bloomery", pair, dataset)
            whole = batches["a whole pass"] = dataset.window_count(LENGTH) // BATCH
            seconds = _seconds(read, range(WARM_BATCHES))
            spent = {"its first 4,096 samples": seconds}
            spent["a whole pass"] = seconds + _seconds(read, range(WARM_BATCHES, whole))
            spent["read again"] = _seconds(read, range(WARM_BATCHES))
            for part, seconds in spent.items():
                times.setdefault((name, part), []).append(seconds / (BATCH * batches[part]) * 1e6)
    whole_pass = batches["a whole pass"] * BATCH
    for _ in range(passes):
        for name, order in (("plain", "bloomery"), (SEALED, SEALED)):
            for part, count in (("a whole pass, cold", whole_pass), ("its first samples, cold", samples)):
                times.setdefault((name, part), []).append(_cold_pass(order, prefix, count)["us"])
    found = []
    for part in (*batches, "a whole pass, cold", "its first samples, cold"):
        plain, checked = times["plain", part], times[SEALED, part]
        ratio = median(one / other for one, other in zip(checked, plain, strict=True))
        beside = f"µs a sample: {median(checked):.2f}, without a seal {median(plain):.2f}; {_library()}"
        name = f"data_reading: pages checked, {part}"
        found.append(measurement(name, ratio, unit="x", reference=beside, bar=CHECK_BAR))
    found.append(_least_of_checks(median(times["plain", "a whole pass"]), rounds))
    return found


def _least_of_checks(sample_us: float, rounds: int) -> Measurement:
    """What a whole pass would take if each page were in a cache when it is summed, over one without sums.

    sample_us: what a sample takes without. There is about one page of 2,048 tokens to a sample.
    """
    pages = np.random.default_rng(SEED).integers(0, 256, SUMMED_PAGES * 4096, dtype=np.uint8)
    sums, each = np.empty(SUMMED_PAGES, np.uint32), list[float]()
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(SUMMED_TIMES):
            page_sums(pages, sums)
        each.append((time.perf_counter() - began) / (SUMMED_TIMES * SUMMED_PAGES) * 1e6)
    return measurement(
        "data_reading: pages checked, a whole pass, if memory took no time",
        1.0 + median(each) * (LENGTH * ITEM / 4096) / sample_us,
        unit="x",
        reference=f"the sum of a page that is in a cache: {median(each):.3f} µs; {_library()}",
    )


def _seconds(read: Callable[[int], object], batches: range) -> float:
    began = time.perf_counter()
    for batch in batches:
        read(batch)
    return time.perf_counter() - began


def _cold_pass(name: str, prefix: Path, samples: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--cold", name, "--directory", str(prefix.parent)]
    ended = subprocess.run(
        [*command, "--samples", str(samples)], capture_output=True, text=True, check=True, timeout=600
    )
    answer: dict[str, float] = json.loads(ended.stdout)
    return answer


def _cold_passes(prefix: Path, samples: int) -> list[Measurement]:
    passes = {name: _cold_pass(name, prefix, samples) for name in (*ORDERS, "peer")}
    found, peer = [], passes["peer"]
    for name in ORDERS:
        one = passes[name]
        beside = (
            f"bytes from the disk a useful byte, {samples:,} samples; µs a sample: ours {one['us']:.0f}, "
            f"peer {peer['us']:.0f} with {peer['read']:.1f} bytes; {_library()}"
        )
        found.append(
            measurement(
                f"data_reading: {name}, cold", one["read"], unit="B/B", reference=beside, bar=COLD_BARS[name]
            )
        )
    return found


def _cold(name: str, prefix: Path, samples: int) -> dict[str, float]:
    """One pass in this process, which has not touched the file yet."""
    for path in (bin_path(prefix), sums_path(prefix)):
        if path.exists():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read = _reader(name, prefix, IndexedDataset(prefix))
    with _counted() as told:
        began = time.perf_counter()
        for turn in range(samples // BATCH):
            read(turn)
        seconds = time.perf_counter() - began
    useful = samples // BATCH * BATCH * (LENGTH + 1) * ITEM
    return {"us": seconds / samples * 1e6, "read": told[0] / useful}


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Bytes that this process fetches from the disk inside the block."""

    def fetched() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))

    before, told = fetched(), [0]
    yield told
    told[0] = fetched() - before


def _reader(
    name: str, prefix: Path, dataset: IndexedDataset
) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """A function that reads the n-th batch of an order."""
    samples = dataset.window_count(LENGTH)
    if name == "bloomery":
        order: Order | MegatronOrder = Order([samples], [1.0], SEED)
    else:
        order = MegatronOrder(
            [dataset.sequence_lengths], None, samples=samples - 1, sequence_length=LENGTH, seed=SEED
        )
    if name == "peer":
        assert isinstance(order, MegatronOrder)
        source: Samples | Peer = Peer(prefix, dataset, order)
    else:
        source = Samples(order, [dataset], sequence_length=LENGTH)
    batches = max(1, (samples - 1) // BATCH)
    return lambda turn: source.read(np.arange(BATCH) + turn % batches * BATCH)


def _write(prefix: Path, tokens: int) -> None:
    """Documents of random tokens, with lengths spread as those of web text are (mean about 660)."""
    draw = np.random.default_rng(1)
    text = draw.integers(0, 32_000, 1 << 22, dtype=np.uint16)
    with IndexedWriter(prefix, dtype="<u2") as writer:
        while writer.token_count < tokens:
            for size in (draw.lognormal(6.0, 1.0, 1000).astype(np.int64) + 1).clip(max=1 << 20).tolist():
                start = int(draw.integers(0, text.size - size))
                writer.add_document(text[start : start + size])


def _library() -> str:
    return "native library" if library() else "without the native library"


if __name__ == "__main__":
    if not MALLOC.items() <= os.environ.items():  # as `bloomery train` gives itself; here to both sides
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})
    raise SystemExit(main())
