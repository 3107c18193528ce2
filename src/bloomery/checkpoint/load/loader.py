"""Loads a checkpoint into the entries of a state, in whatever layout, with every byte verified.

A checkpoint that does not fit the state is refused before anything is read, with the list of all names,
shapes and types that differ. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

from torch import Tensor, empty, float32

from bloomery.checkpoint.format.manifest import Index, IndexedBox, read_index, read_manifest
from bloomery.checkpoint.format.source import Source, source_of
from bloomery.checkpoint.format.state import (
    ITEM_BYTES,
    OPTIONAL_PREFIXES,
    Box,
    BoxOverlaps,
    Json,
    StateEntry,
    whole,
)
from bloomery.checkpoint.load.executor import load_on_all_ranks, load_on_one_rank
from bloomery.checkpoint.load.load_plan import WantedBox, plan_load
from bloomery.checkpoint.save.direct import element_type
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.errors import BloomeryError, CheckpointError

_SHOWN = 10


def refuse_another_model(
    place: str,
    wanted: Sequence[StateEntry],
    saved: Mapping[str, Sequence[IndexedBox]],
    *,
    strict: bool,
    names: Collection[str] | None,
) -> None:
    """Raise CheckpointError, listing all differences, unless `wanted` can be filled from `saved`.

    strict: whether names and types must be the same on both sides, those under OPTIONAL_PREFIXES excepted.
    names: further tensor names of the state, of entries that other ranks hold.
    """
    differences = []
    for entry in wanted:
        if entry.name not in saved:
            continue
        saved_entry = saved[entry.name][0]
        if saved_entry.global_shape != entry.global_shape:
            shapes = f"saved {_shape(saved_entry.global_shape)}, here {_shape(entry.global_shape)}"
            differences.append(f"{entry.name}: {shapes}")
        elif strict and saved_entry.dtype != entry.dtype:
            differences.append(f"{entry.name}: saved as {saved_entry.dtype}, here {entry.dtype}")
    problems = []
    if strict:
        required = _required({entry.name for entry in wanted} | set(names or ()))
        problems += _listed("missing in the checkpoint", sorted(required - set(saved)))
        problems += _listed("only in the checkpoint", sorted(_required(saved) - required))
    problems += _listed("different", sorted(set(differences)))
    if problems:
        raise CheckpointError(
            f"{place} is a checkpoint of another model:\n" + "\n".join(problems),
            remedy="Train with the recipe of its run (recipe.toml beside checkpoints/), or another --run.",
        )


def refuse_incomplete(
    place: str, wanted: Sequence[StateEntry], saved: Mapping[str, Sequence[IndexedBox]]
) -> None:
    """Raise CheckpointError unless the saved boxes fill every wanted box of the tensors that are saved."""
    overlaps: dict[str, BoxOverlaps] = {}
    for entry in wanted:
        if entry.name not in saved:
            continue
        if entry.name not in overlaps:
            overlaps[entry.name] = BoxOverlaps([item.box for item in saved[entry.name]])
        if sum(part.size for _, part in overlaps[entry.name].with_box(entry.box)) != entry.box.size:
            raise _unfilled(place, entry.name, f"a part of {entry.box}")


def _refuse_too_few(place: str, name: str, boxes: Sequence[IndexedBox]) -> None:
    """Raise CheckpointError where a tensor has fewer elements in its files than its shape says.

    It comes before the memory is taken: a forged shape may ask for any amount.
    """
    if sum(item.size for item in boxes) < prod(boxes[0].global_shape):
        raise _unfilled(place, name, "a part of it")


def _unfilled(place: str, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{place} does not hold all of {name}: its boxes leave {what} unfilled",
        remedy="It was saved by another program, or incompletely: use another checkpoint.",
    )


def _required(names: Collection[str]) -> set[str]:
    """Return the names without those of state that only one side may have."""
    return {name for name in names if not name.startswith(OPTIONAL_PREFIXES)}


def _listed(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    shown = [f"    {item}" for item in items[:_SHOWN]]
    more = len(items) - _SHOWN
    return [f"  {len(items)} {title}:", *shown, *([f"    and {more} more"] if more > 0 else [])]


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def load_checkpoint(
    where: Path | Source,
    entries: Iterable[StateEntry],
    *,
    strict: bool = True,
    names: Collection[str] | None = None,
    parts: Collection[str] | None = None,
    ranks: Ranks | None = None,
    readers: Mapping[str, Sequence[int]] | None = None,
    count: Callable[[int], None] | None = None,
) -> Mapping[str, Mapping[str, Json]]:
    """Copy a checkpoint into the tensors of `entries`, in place, and return its JSON values by part.

    The boxes of the entries need not be those that were saved, and there may be several of one tensor.

    strict: whether the names of all ranks' entries (and `names`) and their types must be exactly the saved
        ones. Otherwise tensors that only one side has are left alone, and types are converted. Shapes must
        agree.
    parts: the parts of the run to load, as {"model"} for the weights alone; None for all.
    ranks: the ranks that load together, collectively: bytes that several of them want are read by one, which
        sends them to the others. None for this process alone.
    readers: for each file, the ranks that can read it; None where every rank can.
    count: called with the number of bytes of each read.

    Raises, on every rank, CheckpointError with the differences, or DamagedCheckpoint naming file, block and
    tensors; what was copied before stays. Raises StorageError where the checkpoint cannot be reached.
    """
    source, wanted, ranks = source_of(where), tuple(entries), ranks or Ranks()
    own_boxes = [WantedBox(entry.name, entry.box) for entry in wanted]
    wanted_by_rank = _gather_wanted(own_boxes, ranks)
    all_names = {box.name for boxes in wanted_by_rank for box in boxes} | set(names or ())
    opened: list[tuple[Index, Mapping[str, Mapping[str, Json]]]] = []

    def open_checkpoint() -> None:
        opened.append(_opened(source, wanted, strict=strict, names=all_names, parts=parts))

    ranks.poll_on_all(open_checkpoint)
    ((index, values),) = opened
    saved = _by_name(index.boxes)
    if ranks.world == 1 or ranks.exchange is None:
        units = plan_load(saved, [own_boxes]).units
        ranks.poll_on_all(lambda: load_on_one_rank(source, index, units, wanted, count=count))
        return values
    plan = plan_load(saved, wanted_by_rank, readers=readers, rank=ranks.rank)
    failure = load_on_all_ranks(source, index, plan, wanted, ranks=ranks, count=count)
    ranks.run_on_all(lambda: _raise(failure))
    return values


def read_model(
    where: Path | Source, *, prefix: str = "model.", names: Sequence[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name without `prefix`, whole tensor in fp32) of the model's tensors, sorted by name.

    names: the tensors to read, in this order; None for all. Raises CheckpointError where one is missing,
    where there is none at all, and where it is damaged.
    """
    wanted = None if names is None else [prefix + name for name in names]
    for name, tensor in read_tensors(where, prefix=prefix, names=wanted):
        yield name.removeprefix(prefix), tensor.to(float32)


def read_tensors(
    where: Path | Source, *, prefix: str = "", names: Sequence[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of the tensors under `prefix`, sorted by name, one at a time.

    names: the tensors to read, in this order; None for all. Raises CheckpointError where one is missing,
    where there is none at all, and where it is damaged.
    """
    source = source_of(where)
    index = read_index(source, read_manifest(source))
    saved = _by_name(item for item in index.boxes if item.name.startswith(prefix))
    if not saved:
        raise CheckpointError(
            f"{source.place()} holds no tensors named {prefix}*",
            remedy="It was saved without its model: use another checkpoint.",
        )
    wanted = sorted(saved) if names is None else names
    missing = [name for name in wanted if name not in saved]
    if missing:
        raise CheckpointError(
            f"{source.place()} lacks {len(missing)} tensors of the model, {missing[0]} among them.",
            remedy="Use the recipe of its run (recipe.toml beside checkpoints/).",
        )
    for name in wanted:
        boxes = saved[name]
        _refuse_too_few(source.place(), name, boxes)
        entry = whole(name, empty(boxes[0].global_shape, dtype=element_type(boxes[0].dtype)))
        refuse_incomplete(source.place(), [entry], saved)
        units = plan_load({name: boxes}, [[WantedBox(name, entry.box)]]).units
        load_on_one_rank(source, index, units, [entry])
        yield name, entry.tensor


def read_in_pieces(where: Path | Source, *, prefix: str, piece_bytes: int) -> Iterator[StateEntry]:
    """Yield the tensors under `prefix`, sorted by name, as entries of whole rows of at most `piece_bytes`.

    A single row beyond that comes whole. The index is read once. Raises CheckpointError where there is no
    such tensor, and where one is damaged.
    """
    source = source_of(where)
    index = read_index(source, read_manifest(source))
    saved = _by_name(item for item in index.boxes if item.name.startswith(prefix))
    if not saved:
        raise CheckpointError(
            f"{source.place()} holds no tensors named {prefix}*", remedy="Take another checkpoint."
        )
    for name, boxes in sorted(saved.items()):
        _refuse_too_few(source.place(), name, boxes)
        shape, dtype = boxes[0].global_shape, boxes[0].dtype
        row_bytes = prod(shape[1:]) * ITEM_BYTES[dtype]
        rows = max(1, piece_bytes // max(1, row_bytes)) if shape else 1
        for start in range(0, max(1, shape[0]) if shape else 1, rows):  # an empty tensor is one piece too
            offset = (start, *(0 for _ in shape[1:])) if shape else ()
            size = (min(rows, shape[0] - start), *shape[1:]) if shape else ()
            box = Box(offset, size)
            entry = StateEntry(
                name=name,
                global_shape=shape,
                dtype=dtype,
                box=box,
                tensor=empty(size, dtype=element_type(dtype)),
                scope=boxes[0].scope,
            )
            refuse_incomplete(source.place(), [entry], saved)
            units = plan_load({name: boxes}, [[WantedBox(name, box)]]).units
            load_on_one_rank(source, index, units, [entry])
            yield entry
            del entry  # or it would be held while the next one is read


def _opened(
    source: Source,
    wanted: Sequence[StateEntry],
    *,
    strict: bool,
    names: Collection[str] | None,
    parts: Collection[str] | None,
) -> tuple[Index, Mapping[str, Mapping[str, Json]]]:
    """Return the index and the values, once it is known that `wanted` can be filled from the checkpoint."""
    manifest = read_manifest(source)
    index = read_index(source, manifest)
    saved = _by_name(index.boxes)
    if parts is not None:
        saved = {name: boxes for name, boxes in saved.items() if name.partition(".")[0] in parts}
    refuse_another_model(source.place(), wanted, saved, strict=strict, names=names)
    refuse_incomplete(source.place(), wanted, saved)
    return index, manifest.values


def _gather_wanted(own_boxes: Sequence[WantedBox], ranks: Ranks) -> list[list[WantedBox]]:
    """Return the boxes that each rank wants. Collective."""
    if ranks.world == 1:
        return [list(own_boxes)]
    gathered = ranks.gather([[wanted.name, wanted.box.offset, wanted.box.shape] for wanted in own_boxes])
    return [
        [WantedBox(name, Box(tuple(offset), tuple(shape))) for name, offset, shape in boxes]
        for boxes in gathered
    ]


def _raise(failure: BloomeryError | None) -> None:
    if failure is not None:
        raise failure


def _by_name(boxes: Iterable[IndexedBox]) -> dict[str, list[IndexedBox]]:
    saved: dict[str, list[IndexedBox]] = {}
    for item in boxes:
        saved.setdefault(item.name, []).append(item)
    return saved
