"""Loading: from the boxes that were saved to those that are wanted, all verified, nothing unpickled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor, empty, float32

from bloomery.checkpoint.carrying import carry_alone, carry_together
from bloomery.checkpoint.differences import refuse_another_model, refuse_incomplete
from bloomery.checkpoint.manifest import Index, IndexedBox, read_index, read_manifest
from bloomery.checkpoint.memory import element_type
from bloomery.checkpoint.ranks import Ranks
from bloomery.checkpoint.source import Source, source_of
from bloomery.checkpoint.state import Box, Json, StateEntry, whole
from bloomery.checkpoint.transfers import Wish, plan_transfers
from bloomery.errors import BloomeryError, CheckpointError


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
    """Copy a checkpoint into the tensors of `entries`, in place, and return its values by part.

    Any boxes may be filled from any boxes, and an entry may be there for each of several boxes of a tensor.
    strict: the names of all ranks (and `names`) must be the checkpoint's, all of them, with its types.
    Otherwise what only one side has is left alone, and types are converted. Shapes must always agree.
    parts: the first words of the names that are looked at, all by default; `{"model"}` is the weights alone.
    ranks: with whom; collective over them, and then each byte that several want is read by one, who sends it
    to the others. readers: of each file, the ranks that can read it, where that is not everybody.
    count: called with the bytes of each read.

    Raises CheckpointError with what differs, or naming the file, block and tensors that are damaged, on every
    rank when it happened on one; what was copied before that stays. Raises StorageError where the checkpoint
    was not reached, which says nothing of it.
    """
    source, wanted, ranks = source_of(where), tuple(entries), ranks or Ranks()
    mine = [Wish(entry.name, entry.box) for entry in wanted]
    wishes = _everybodys(mine, ranks)
    everything = {wish.name for of_rank in wishes for wish in of_rank} | set(names or ())
    opened: list[tuple[Index, Mapping[str, Mapping[str, Json]]]] = []

    def open_it() -> None:
        opened.append(_opened(source, wanted, strict=strict, names=everything, parts=parts))

    ranks.patiently(open_it)
    ((index, values),) = opened
    saved = _by_name(index.boxes)
    if ranks.world == 1 or ranks.exchange is None:
        units = plan_transfers(saved, [mine])
        ranks.patiently(lambda: carry_alone(source, index, units, wanted, count=count))
        return values
    units = plan_transfers(saved, wishes, readers=readers)
    failure = carry_together(source, index, units, wanted, ranks=ranks, count=count)
    ranks.together(lambda: _raise(failure))
    return values


def read_model(
    where: Path | Source, *, prefix: str = "model.", names: Sequence[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name without `prefix`, whole tensor in fp32) of each of the model's tensors, sorted by name.

    names: those that are wanted, in this order; by default all. Raises CheckpointError when one is not there
    (or none is), or what is read is damaged.
    """
    wanted = None if names is None else [prefix + name for name in names]
    for name, tensor in read_tensors(where, prefix=prefix, names=wanted):
        yield name.removeprefix(prefix), tensor.to(float32)


def read_tensors(
    where: Path | Source, *, prefix: str = "", names: Sequence[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of those whose names begin with `prefix`, sorted by name, one at a time.

    names: those that are wanted, in this order; by default all. Raises CheckpointError when one is not there
    (or none is), or what is read is damaged.
    """
    source = source_of(where)
    index = read_index(source, read_manifest(source))
    saved = _by_name(item for item in index.boxes if item.name.startswith(prefix))
    if not saved:
        raise CheckpointError(
            f"{source.place()} holds no tensors named {prefix}*",
            remedy="It was saved without its model: take another.",
        )
    wanted = sorted(saved) if names is None else names
    missing = [name for name in wanted if name not in saved]
    if missing:
        raise CheckpointError(
            f"{source.place()} lacks {len(missing)} tensors of the model, {missing[0]} among them.",
            remedy="Take the recipe of its run (recipe.toml beside checkpoints/).",
        )
    for name in wanted:
        boxes = saved[name]
        entry = whole(name, empty(boxes[0].global_shape, dtype=element_type(boxes[0].dtype)))
        refuse_incomplete(source.place(), [entry], saved)
        units = plan_transfers({name: boxes}, [[Wish(name, entry.box)]])
        carry_alone(source, index, units, [entry])
        yield name, entry.tensor


def _opened(
    source: Source,
    wanted: Sequence[StateEntry],
    *,
    strict: bool,
    names: Collection[str] | None,
    parts: Collection[str] | None,
) -> tuple[Index, Mapping[str, Mapping[str, Json]]]:
    """Return the index, and the values, once it is known that what is wanted can be filled from it."""
    manifest = read_manifest(source)
    index = read_index(source, manifest)
    saved = _by_name(index.boxes)
    if parts is not None:
        saved = {name: boxes for name, boxes in saved.items() if name.partition(".")[0] in parts}
    refuse_another_model(source.place(), wanted, saved, strict=strict, names=names)
    refuse_incomplete(source.place(), wanted, saved)
    return index, manifest.values


def _everybodys(mine: Sequence[Wish], ranks: Ranks) -> list[list[Wish]]:
    """Return the wishes of each rank. Collective."""
    if ranks.world == 1:
        return [list(mine)]
    told = ranks.gather([[wish.name, wish.box.offset, wish.box.shape] for wish in mine])
    return [
        [Wish(name, Box(tuple(offset), tuple(shape))) for name, offset, shape in wishes] for wishes in told
    ]


def _raise(failure: BloomeryError | None) -> None:
    if failure is not None:
        raise failure


def _by_name(boxes: Iterable[IndexedBox]) -> dict[str, list[IndexedBox]]:
    saved: dict[str, list[IndexedBox]] = {}
    for item in boxes:
        saved.setdefault(item.name, []).append(item)
    return saved
