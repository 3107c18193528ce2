"""Loading: from the boxes that were saved to those that are wanted, all verified, nothing unpickled."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from bloomery.checkpoint.datafile import VerifiedReader
from bloomery.checkpoint.manifest import Index, IndexedBox, read_index, read_manifest
from bloomery.checkpoint.memory import PIECE_BYTES, memory_of
from bloomery.checkpoint.state import ITEM_BYTES, Box, Json, StateEntry, whole
from bloomery.errors import CheckpointError

_DIFFERENCES_SHOWN = 10


def load_checkpoint(
    directory: Path,
    entries: Iterable[StateEntry],
    *,
    strict: bool = True,
    names: Collection[str] | None = None,
) -> Mapping[str, Mapping[str, Json]]:
    """Copy a checkpoint into the tensors of `entries`, in place, and return its values by part.

    Any boxes may be filled from any boxes. strict: the names must be the checkpoint's, all of them (`names`
    are those of the whole state, where this rank holds a part of it), with its types. Otherwise what only one
    side has is left alone, and types are converted. Shapes must always agree.
    Raises CheckpointError with what differs, or naming the file, block and tensors that are damaged; what was
    copied before that stays.
    """
    wanted = tuple(entries)
    manifest = read_manifest(directory)
    index = read_index(directory, manifest)
    saved: dict[str, list[IndexedBox]] = {}
    for item in index.boxes:
        saved.setdefault(item.name, []).append(item)
    _refuse_another_model(directory, wanted, saved, strict=strict, names=names)
    copies = [copy for entry in wanted for copy in _copies(entry, saved.get(entry.name, ()))]
    _carry_out(directory, index, copies)
    return manifest.values


def read_model(directory: Path, *, prefix: str = "model.") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name without `prefix`, whole tensor in fp32) of each of the model's tensors, sorted by name.

    Raises CheckpointError when there is none, or what is read is damaged.
    """
    index = read_index(directory, read_manifest(directory))
    saved: dict[str, list[IndexedBox]] = {}
    for item in index.boxes:
        if item.name.startswith(prefix):
            saved.setdefault(item.name, []).append(item)
    if not saved:
        raise CheckpointError(
            f"{directory} holds no tensors named {prefix}*",
            remedy="It was saved without its model: take another.",
        )
    for name, boxes in sorted(saved.items()):
        tensor = torch.empty(boxes[0].global_shape, dtype=getattr(torch, boxes[0].dtype))
        _carry_out(directory, index, _copies(whole(name, tensor), boxes))
        yield name.removeprefix(prefix), tensor.float()


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A stretch of rows of a saved box, of which `part` goes to the same place of `entry`'s tensor."""

    entry: StateEntry
    saved: IndexedBox
    part: Box

    @property
    def span(self) -> tuple[int, int]:
        """Bytes [begin, end) of the file: the rows of the saved box that `part` lies in."""
        if not self.part.shape:
            return self.saved.begin, self.saved.end
        row = prod(self.saved.box.shape[1:]) * ITEM_BYTES[self.saved.dtype]
        first = self.saved.begin + (self.part.offset[0] - self.saved.box.offset[0]) * row
        return first, first + self.part.shape[0] * row


def _copies(entry: StateEntry, boxes: Sequence[IndexedBox]) -> list[_Copy]:
    """Return what fills an entry, in pieces that fit in memory easily. It is complete: saving checked."""
    copies = []
    for saved in boxes:
        part = saved.box.intersection(entry.box)
        if part is None:
            continue
        row_bytes = prod(saved.box.shape[1:]) * ITEM_BYTES[saved.dtype]
        rows = max(1, PIECE_BYTES // row_bytes)
        length = part.shape[0] if part.shape else 1
        for start in range(0, length, rows):
            piece = part
            if part.shape:
                offset = (part.offset[0] + start, *part.offset[1:])
                piece = Box(offset, (min(rows, length - start), *part.shape[1:]))
            copies.append(_Copy(entry=entry, saved=saved, part=piece))
    return copies


@torch.no_grad()
def _carry_out(directory: Path, index: Index, copies: Iterable[_Copy]) -> None:
    """Read file after file, front to back, so that a block between two tensors is read once."""
    files: dict[str, list[_Copy]] = {}
    for copy in copies:
        files.setdefault(copy.saved.file, []).append(copy)
    for name, members in sorted(files.items()):
        boxes = [item for item in index.boxes if item.file == name]

        def touched(begin: int, end: int, boxes: Sequence[IndexedBox] = boxes) -> list[str]:
            return [item.name for item in boxes if item.begin < end and begin < item.end]

        with VerifiedReader(directory, index.files[name], touched=touched) as reader:
            for copy in sorted(members, key=lambda item: item.span):
                _fill(copy, reader)


def _fill(copy: _Copy, reader: VerifiedReader) -> None:
    begin, end = copy.span
    target = _place(copy.entry.tensor.detach(), copy.part, within=copy.entry.box)
    dtype = getattr(torch, copy.saved.dtype)
    full_rows = copy.part.shape[1:] == copy.saved.box.shape[1:]
    if full_rows and target.is_contiguous() and target.device.type == "cpu" and target.dtype == dtype:
        reader.read_into(memory_of(target), begin=begin)
        return
    rows = torch.empty((end - begin) // dtype.itemsize, dtype=dtype)
    reader.read_into(memory_of(rows), begin=begin)
    box = copy.saved.box
    if copy.part.shape:
        box = Box((copy.part.offset[0], *box.offset[1:]), (copy.part.shape[0], *box.shape[1:]))
    target.copy_(_place(rows.reshape(box.shape), copy.part, within=box))


def _place(tensor: torch.Tensor, part: Box, *, within: Box) -> torch.Tensor:
    """Return the view of `tensor`, which holds the box `within`, that is `part`."""
    for dim, (start, first, length) in enumerate(zip(part.offset, within.offset, part.shape, strict=True)):
        tensor = tensor.narrow(dim, start - first, length)
    return tensor


def _refuse_another_model(
    directory: Path,
    wanted: Sequence[StateEntry],
    saved: Mapping[str, Sequence[IndexedBox]],
    *,
    strict: bool,
    names: Collection[str] | None,
) -> None:
    differences = []
    for entry in wanted:
        if entry.name not in saved:
            continue
        there = saved[entry.name][0]
        if there.global_shape != entry.global_shape:
            shapes = f"saved {_shape(there.global_shape)}, here {_shape(entry.global_shape)}"
            differences.append(f"{entry.name}: {shapes}")
        elif strict and there.dtype != entry.dtype:
            differences.append(f"{entry.name}: saved as {there.dtype}, here {entry.dtype}")
    found = []
    if strict:
        here = {entry.name for entry in wanted} | set(names or ())
        found += _listed("missing in the checkpoint", sorted(here - set(saved)))
        found += _listed("only in the checkpoint", sorted(set(saved) - here))
    found += _listed("different", sorted(set(differences)))
    if found:
        raise CheckpointError(
            f"{directory} is a checkpoint of another model:\n" + "\n".join(found),
            remedy="Train with the recipe of its run (recipe.toml beside checkpoints/), or another --run.",
        )


def _listed(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    shown = [f"    {item}" for item in items[:_DIFFERENCES_SHOWN]]
    more = len(items) - _DIFFERENCES_SHOWN
    return [f"  {len(items)} {title}:", *shown, *([f"    and {more} more"] if more > 0 else [])]


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"
