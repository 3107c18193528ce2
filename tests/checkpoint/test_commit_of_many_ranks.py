"""What the commit of a checkpoint costs its first rank, counted in calls: 384 ranks write 240,000 boxes."""

import sys
import time

import numpy  # noqa: F401  — a commit loads it, once in a process

from bloomery.checkpoint.format import commit
from bloomery.checkpoint.format.manifest import FileRecord, IndexedBox, read_index, read_manifest

RANKS, TENSORS, ROWS = 40, 10, 12


def part_of(rank: int) -> commit.Part:
    """Each rank's ROWS boxes, a row each, of every tensor."""
    boxes = tuple(
        IndexedBox(
            name=f"model.layers.{tensor}.w",
            dtype="float32",
            global_shape=(RANKS * ROWS, 8),
            offset=(rank * ROWS + row, 0),
            shape=(1, 8),
            scope="shared",
            file=f"r{rank}.safetensors",
            begin=32 * (tensor * ROWS + row),
            end=32 * (tensor * ROWS + row + 1),
        )
        for tensor in range(TENSORS)
        for row in range(ROWS)
    )
    size = 32 * TENSORS * ROWS
    record = FileRecord(name=f"r{rank}.safetensors", bytes=size, xxh3_128="0" * 32, blocks="0" * 16)
    return commit.Part(files=(record,), boxes=boxes)


def python_calls(work) -> int:
    """How many functions of Python, not of C, `work` calls."""
    count = 0

    def seen(frame, event, argument) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_notes_and_commit_of_many_ranks_take_few_calls_a_box(tmp_path):
    partial = tmp_path / "step-000001.i001.partial"
    commit.begin_partial(partial)
    boxes = RANKS * TENSORS * ROWS
    parts = [part_of(rank) for rank in range(RANKS)]

    written = python_calls(
        lambda: [commit.write_part_record(partial, rank, part) for rank, part in enumerate(parts)]
    )
    read: list[commit.Part] = []
    waited = python_calls(
        lambda: read.extend(
            commit.wait_for_part_record(
                partial, rank, until=time.monotonic() + 60, stall_s=60, progressed=lambda count: None
            )
            for rank in range(RANKS)
        )
    )
    committed = python_calls(
        lambda: commit.commit(partial, read, step=1, incarnation=1, time=0.0, values={}, about={})
    )

    assert read == parts
    assert written < boxes, "a note is encoded as a whole; a box field by field took 86"
    assert waited < boxes, "a note is decoded in C; it took a call a box"
    assert committed < boxes, "boxes are checked as arrays and encoded in C; it took five calls a box"
    directory = tmp_path / "step-000001.i001"
    index = read_index(directory, read_manifest(directory))
    assert [item.box.offset[0] for item in index.boxes[: RANKS * ROWS]] == list(range(RANKS * ROWS))
    assert set(index.boxes) == {box for part in parts for box in part.boxes}
