"""Loading: against a bare readv of the same bytes, torch.distributed.checkpoint, and what the disk can do.

    python benchmarks/checkpoint_load.py [--json] [--megabytes 1000] [--rounds 11]

Everything is verified by the block while it is loaded. Cold: the files are dropped from the page cache first
(POSIX_FADV_DONTNEED). All contenders take turns in one process; a ratio is the median over the rounds. The
disk's limit is the quickest of some ways to read, in each round anew: no loader reads cold files faster.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contract import Measurement, measurement, report

from bloomery.checkpoint.format.state import StateEntry, whole
from bloomery.checkpoint.load.loader import load_checkpoint
from bloomery.checkpoint.save.direct import save_checkpoint

READ_BYTES = 32 << 20
OURS, RAW, DCP, LIMIT = "bloomery", "readv", "DCP", "the disk's limit"
ROWS: dict[str, tuple[tuple[str, str, str | None], ...]] = {
    # Cold, DCP reads at half of the disk's limit or more, so that nobody can be twice as fast.
    "cold": ((OURS, RAW, ">= 0.85"), (OURS, LIMIT, ">= 0.85"), (OURS, DCP, None), (LIMIT, DCP, None)),
    "warm": ((OURS, RAW, ">= 0.7"), (OURS, DCP, ">= 2"), (RAW, DCP, None)),
}
WAYS = (
    {"at_once": 2, "piece_bytes": 64 << 20, "flags": 0},
    {"at_once": 4, "piece_bytes": 8 << 20, "flags": 0},
    {"at_once": 4, "piece_bytes": 8 << 20, "flags": os.O_DIRECT},
    {"at_once": 8, "piece_bytes": 2 << 20, "flags": os.O_DIRECT},
)
"""Of reading cold files."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    place = Path(tempfile.mkdtemp(prefix="bench-load-", dir=options.directory))
    try:
        dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=0, world_size=1)
        return report(_measured(place, options), as_json=options.json)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        shutil.rmtree(place, ignore_errors=True)


def state(megabytes: int) -> list[StateEntry]:
    """A model of blocks with its moments: matrices, and vectors that share their blocks with neighbours."""
    entries: list[StateEntry] = []
    width, number = 1024, 0
    while sum(entry.nbytes for entry in entries) < megabytes * 1_000_000:
        for part in ("model", "optim.first", "optim.second"):
            for name, shape in (("up", (4 * width, width)), ("out", (width, width)), ("norm", (width,))):
                entries.append(whole(f"{part}.blocks.{number}.{name}", torch.randn(shape)))
        number += 1
    return entries


def _measured(place: Path, options: argparse.Namespace) -> list[Measurement]:
    entries = state(options.megabytes)
    size = sum(entry.nbytes for entry in entries)
    ours = save_checkpoint(place / "ours", entries, step=1, incarnation=1)
    tensors = {entry.name: entry.tensor for entry in entries}
    dcp.save(tensors, checkpoint_id=place / "dcp")
    files = sorted(ours.glob("*.safetensors"))
    buffers = [memoryview(mmap.mmap(-1, path.stat().st_size)) for path in files]
    contenders: dict[str, Callable[[], object]] = {
        RAW: lambda: _readv(files, buffers),
        OURS: lambda: load_checkpoint(ours, entries),
        DCP: lambda: dcp.load(tensors, checkpoint_id=place / "dcp"),
    }
    found = []
    for heat, rows in ROWS.items():
        is_cold = heat == "cold"
        before = partial(_drop, place) if is_cold else lambda: None
        timed = {name: partial(_timed, act, before=before) for name, act in contenders.items()}
        if is_cold:
            timed[LIMIT] = partial(_quickest, files, buffers, before=before)
        seconds = _rounds(timed, rounds=options.rounds)
        told = ", ".join(f"{name} {size / median(times) / 1e9:.2f}" for name, times in seconds.items())
        reference = f"GB/s: {told}; {size / 1e9:.2f} GB, {options.rounds} rounds"
        for name, over, bar in rows:
            pairs = zip(seconds[over], seconds[name], strict=True)
            found.append(
                measurement(
                    f"checkpoint_load: {heat}, {name} against {over}",
                    median(theirs / mine for theirs, mine in pairs),
                    unit="x",
                    reference=reference,
                    bar=bar,
                )
            )
    return found


def _rounds(timed: dict[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    names = list(timed)
    for name in names:
        timed[name]()  # pages of the targets, imports, and for the warm heat the cache
    for number in range(rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            seconds[name].append(timed[name]())
    return seconds


def _timed(act: Callable[[], object], *, before: Callable[[], None]) -> float:
    before()
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def _quickest(files: Sequence[Path], buffers: Sequence[memoryview], *, before: Callable[[], None]) -> float:
    return min(_timed(partial(_read_at_once, files, buffers, **way), before=before) for way in WAYS)


def _read_at_once(
    files: Sequence[Path], buffers: Sequence[memoryview], *, at_once: int, piece_bytes: int, flags: int
) -> None:
    with ThreadPoolExecutor(at_once) as pool:
        for path, buffer in zip(files, buffers, strict=True):
            file = os.open(path, os.O_RDONLY | flags)
            starts = range(0, len(buffer), piece_bytes)
            list(pool.map(partial(_read_piece, file, buffer, piece_bytes), starts))
            os.close(file)


def _read_piece(file: int, buffer: memoryview, piece_bytes: int, start: int) -> None:
    view = buffer[start : start + piece_bytes]
    while view and (count := os.preadv(file, [view], start)):
        start, view = start + count, view[count:]


def _readv(files: Sequence[Path], buffers: Sequence[memoryview]) -> None:
    for path, buffer in zip(files, buffers, strict=True):
        file, position = os.open(path, os.O_RDONLY), 0
        while position < len(buffer):
            position += os.preadv(file, [buffer[position : position + READ_BYTES]], position)
        os.close(file)


def _drop(place: Path) -> None:
    for path in place.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the state (default 1000)")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each contender (default 11)")
    parser.add_argument("--directory", type=Path, help="on the disk that is measured (default: TMPDIR)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
