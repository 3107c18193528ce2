"""Saving by one layout and loading by another, each rank of it in a thread."""

from collections.abc import Iterator
from pathlib import Path
from threading import Lock

import torch
from tests.checkpoint.layout_maps import MOMENTS, Layout, Part, Shape, entry_of, parts_of
from tests.checkpoint.thread_ranks import Threads

from bloomery.checkpoint.format.commit import begin_partial, commit, partial_directory
from bloomery.checkpoint.format.data_file import lay_out
from bloomery.checkpoint.format.manifest import BLOCK_BYTES, IndexedBox
from bloomery.checkpoint.load.load_plan import WantedBox, plan_load
from bloomery.checkpoint.load.loader import load_checkpoint
from bloomery.checkpoint.save.direct import FILE_BYTES, write_part
from bloomery.checkpoint.writer.ranks import Ranks

State = dict[str, torch.Tensor]


def state_of(shape: Shape, *, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        prefix + name: torch.randn(size, generator=generator)
        for name, size in shape.tensors().items()
        for prefix in ("model.", *MOMENTS)
    }


def saved_by(shape: Shape, layout: Layout, directory: Path, *, seed: int) -> tuple[Path, State]:
    """Save a random state as a layout's ranks would; return the checkpoint and the state."""
    state = state_of(shape, seed=seed)
    partial = partial_directory(directory, step=seed, incarnation=1)
    begin_partial(partial)
    written = []
    for rank, parts in enumerate(_writers(shape, layout)):
        entries = [entry_of(part, cut(state[part.name], part)) for part in parts]
        written.append(write_part(partial, entries, rank=rank, world=layout.world))
    final = commit(partial, written, step=seed, incarnation=1, time=0.0, values={}, about={})
    return final, state


def loaded_everywhere(shape: Shape, layout: Layout, directory: Path, state: State) -> tuple[list[str], int]:
    """Load into every rank of a layout; return what differs from the state, and the bytes that were read."""
    read, lock = [0], Lock()

    def count(amount: int) -> None:
        with lock:
            read[0] += amount

    def load(ranks: Ranks) -> list[str]:
        parts = parts_of(shape, layout, ranks.rank)
        entries = [entry_of(part, torch.full(part.box.shape, torch.nan)) for part in parts]
        load_checkpoint(directory, entries, names=state.keys(), ranks=ranks, count=count)
        return [
            f"rank {ranks.rank}: {part.name} {part.box}"
            for part, entry in zip(parts, entries, strict=True)
            if not torch.equal(entry.tensor, cut(state[part.name], part))
        ]

    wrong: list[str] = []
    for result in Threads(layout.world).run(load):
        if isinstance(result, Exception):
            raise result
        wrong += result
    return wrong, read[0]


def bytes_of_reading(shape: Shape, before: Layout, after: Layout) -> int:
    """Return the bytes that a load would read, in whole blocks, on all ranks together: arithmetic alone."""
    saved: dict[str, list[IndexedBox]] = {}
    for rank, parts in enumerate(_writers(shape, before)):
        entries = [entry_of(part, torch.empty(part.box.shape, device="meta")) for part in parts]
        for file in lay_out(entries, rank=rank, world=before.world, file_bytes=FILE_BYTES):
            for box in file.boxes:
                saved.setdefault(box.name, []).append(box)
    wishes = [
        [WantedBox(part.name, part.box) for part in parts_of(shape, after, rank)]
        for rank in range(after.world)
    ]
    read = 0
    for unit in plan_load(saved, wishes).units:
        blocks = set[int]()
        for read_item in unit.items:
            begin, end = read_item.span
            blocks.update(range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)))
        read += len(blocks) * BLOCK_BYTES
    return read


def cut(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    return tensor[
        tuple(slice(start, start + size) for start, size in zip(part.box.offset, part.box.shape, strict=True))
    ]


def _writers(shape: Shape, layout: Layout) -> Iterator[list[Part]]:
    """Yield what each rank writes: of replicas, the first."""
    taken = set()
    for rank in range(layout.world):
        mine = []
        for part in parts_of(shape, layout, rank):
            key = (part.name, part.box)
            if part.saved and key not in taken:
                taken.add(key)
                mine.append(part)
        yield mine
