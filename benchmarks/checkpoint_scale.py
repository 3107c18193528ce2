"""Measures what one process does for a checkpoint of many ranks, with the real notes and no tensors.

The commit: rank 0 reads the notes of 384 ranks about 2.2 TB of files, checks that the boxes fill each tensor,
and writes index and manifest; each rank reads the index at a start. The load plan: a rank plans to load
1,024 ranks' ZeRO 3 shards as 768.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from contract import Measurement, measurement, report

from bloomery.checkpoint.format import commit
from bloomery.checkpoint.format.manifest import (
    BLOCK_BYTES,
    FileRecord,
    IndexedBox,
    read_index,
    read_manifest,
    without_garbage_collection,
)
from bloomery.checkpoint.format.state import Box
from bloomery.checkpoint.load.load_plan import WantedBox, plan_load

ITEM_BYTES = 4
STATES = ("model", "optim.first", "optim.second")


def main() -> int:
    """Measure both, print them, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    return report([*commits(), load_plan()], as_json=parser.parse_args().json)


def commits(*, layers: int = 70, world: int = 384, hidden: int = 14336) -> list[Measurement]:
    """Measure a commit from the notes of all ranks: processor time and memory."""
    with tempfile.TemporaryDirectory() as directory:
        partial = Path(directory) / "step-000001.i001.partial"
        partial.mkdir()
        boxes = 0
        for rank, part in enumerate(_parts(layers, world, hidden, 3 * hidden)):
            commit.write_part_record(partial, rank, part)
            boxes += len(part.boxes)
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begun_s, deadline = time.process_time(), time.monotonic() + 600
        with without_garbage_collection():
            parts = [
                commit.wait_for_part_record(
                    partial, rank, until=deadline, stall_s=60.0, progressed=lambda count: None
                )
                for rank in range(world)
            ]
            saved_bytes = sum(file.bytes for part in parts for file in part.files)
            final = commit.commit(
                partial, parts, time=0.0, values={}, records=[], step=1, incarnation=1, about={}
            )
        spent_s = time.process_time() - begun_s
        grown_gb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1e6
        del parts
        begun_s = time.process_time()
        read_index(final, read_manifest(final))
        read_s = time.process_time() - begun_s
    reference = f"{world} ranks, {boxes:,} boxes, {saved_bytes / 1e12:.2f} TB"
    return [
        measurement("commit: rank 0's processor time", spent_s, unit="s", reference=reference, bar="<= 2"),
        measurement("commit: growth of memory", grown_gb, unit="GB", reference=reference, bar="<= 1"),
        measurement("index: a rank's processor time to read it", read_s, unit="s", reference=reference),
    ]


def load_plan(*, layers: int = 32, before: int = 1024, after: int = 768) -> Measurement:
    """Measure one rank's plan of a load in another layout."""
    saved: dict[str, list[IndexedBox]] = {}
    for part in _parts(layers, before, 4096, 11008):
        for box in part.boxes:
            saved.setdefault(box.name, []).append(box)
    wanted: list[list[WantedBox]] = [[] for _ in range(after)]
    for rank, name, _, box in _shards(layers, after, 4096, 11008):
        wanted[rank].append(WantedBox(name, box))
    boxes = sum(map(len, saved.values())) + sum(map(len, wanted))
    begun_s = time.process_time()
    plan_load(saved, wanted, rank=0)
    return measurement(
        "load plan: a rank's processor time",
        time.process_time() - begun_s,
        unit="s",
        reference=f"{before} ranks' ZeRO 3 shards of 7B for {after} ranks, {boxes:,} boxes",
        bar="<= 2",
    )


def _parts(layers: int, world: int, hidden: int, inner: int) -> list[commit.Part]:
    """Return what each rank would have written: one file each."""
    boxes: list[list[IndexedBox]] = [[] for _ in range(world)]
    ends = [0] * world
    for rank, name, shape, box in _shards(layers, world, hidden, inner):
        begin, ends[rank] = ends[rank], ends[rank] + box.size * ITEM_BYTES
        boxes[rank].append(
            IndexedBox(
                name=name,
                dtype="float32",
                global_shape=shape,
                offset=box.offset,
                shape=box.shape,
                scope="shared",
                file=f"r{rank:05d}.safetensors",
                begin=begin,
                end=ends[rank],
            )
        )
    return [
        commit.Part(
            files=(
                FileRecord(
                    name=f"r{rank:05d}.safetensors",
                    bytes=ends[rank],
                    xxh3_128="0" * 32,
                    blocks="0" * 16 * -(-ends[rank] // BLOCK_BYTES),
                ),
            ),
            boxes=tuple(boxes[rank]),
        )
        for rank in range(world)
    ]


def _shards(
    layers: int, world: int, hidden: int, inner: int
) -> Iterator[tuple[int, str, tuple[int, int], Box]]:
    """Yield (rank, tensor, shape, box) of layers that are cut flat over all ranks, as ZeRO 3 cuts them."""
    shapes = {
        **{name: (hidden, hidden) for name in ("query", "key", "value", "out")},
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    size = -(-sum(rows * columns for rows, columns in shapes.values()) // world)
    for layer in range(layers):
        base = 0
        for name, shape in shapes.items():
            elements = shape[0] * shape[1]
            for rank in range(base // size, min(world, -(-(base + elements) // size))):
                first, stop = max(rank * size, base) - base, min((rank + 1) * size, base + elements) - base
                for box in _flat_boxes(shape, first, stop):
                    for state in STATES:
                        yield rank, f"{state}.layers.{layer}.{name}", shape, box
            base += elements


def _flat_boxes(shape: tuple[int, int], first: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of the row-major elements [first, stop) of a matrix: at most three."""
    columns = shape[1]
    while first < stop:
        row, column = divmod(first, columns)
        if column or stop - first < columns:
            length = min(columns - column, stop - first)
            yield Box((row, column), (1, length))
        else:
            length = (stop - first) // columns * columns
            yield Box((row, 0), (length // columns, columns))
        first += length


if __name__ == "__main__":
    sys.exit(main())
