"""Loading: against a bare readv of the same bytes, and against torch.distributed.checkpoint.

    python benchmarks/checkpoint_load.py [--json] [--megabytes 1000] [--rounds 5]

Everything is verified by the block while it is loaded. Cold: the files are dropped from the page cache first
(POSIX_FADV_DONTNEED). All contenders take turns in one process; a ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contract import Measurement, measurement, report

from bloomery.checkpoint.load import load_checkpoint
from bloomery.checkpoint.save import save_checkpoint
from bloomery.checkpoint.state import StateEntry, whole

READ_BYTES = 32 << 20
BARS = {"cold": ">= 0.85", "warm": ">= 0.7"}
DCP_BAR = ">= 2"
OURS, RAW, DCP = "bloomery", "readv", "DCP"


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
    buffers = [memoryview(bytearray(path.stat().st_size)) for path in files]
    contenders: dict[str, Callable[[], object]] = {
        RAW: lambda: _readv(files, buffers),
        OURS: lambda: load_checkpoint(ours, entries),
        DCP: lambda: dcp.load(tensors, checkpoint_id=place / "dcp"),
    }
    found = []
    for heat, bar in BARS.items():
        seconds = _rounds(contenders, place, rounds=options.rounds, cold=heat == "cold")
        told = ", ".join(f"{name} {size / median(times) / 1e9:.2f}" for name, times in seconds.items())
        reference = f"GB/s: {told}; {size / 1e9:.2f} GB, {options.rounds} rounds"
        for name, over, limit in ((OURS, RAW, bar), (OURS, DCP, DCP_BAR), (RAW, DCP, None)):
            pairs = zip(seconds[over], seconds[name], strict=True)
            found.append(
                measurement(
                    f"checkpoint_load: {heat}, {name} against {over}",
                    median(theirs / mine for theirs, mine in pairs),
                    unit="x",
                    reference=reference,
                    bar=limit,
                )
            )
    return found


def _rounds(
    contenders: dict[str, Callable[[], object]], place: Path, *, rounds: int, cold: bool
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for act in contenders.values():
        act()  # pages of the targets, imports, and for the warm heat the cache
    for number in range(rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            if cold:
                _drop(place)
            begun = time.perf_counter()
            contenders[name]()
            seconds[name].append(time.perf_counter() - begun)
    return seconds


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
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default 5)")
    parser.add_argument("--directory", type=Path, help="on the disk that is measured (default: TMPDIR)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
