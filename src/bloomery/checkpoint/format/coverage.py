"""Checks that the boxes of a checkpoint fill each tensor exactly once, fast enough for 240,000 boxes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import prod
from typing import TYPE_CHECKING

from bloomery.checkpoint.format.manifest import IndexedBox
from bloomery.checkpoint.format.state import numbers_of
from bloomery.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PAIRS_AT_ONCE = 1 << 20
"""The pairs of boxes that are compared at a time, which bounds the memory."""


def check_coverage(boxes: Iterable[IndexedBox]) -> None:
    """Raise CheckpointError unless the boxes of each tensor fill it exactly, each element once."""
    tensors: dict[str, list[IndexedBox]] = {}
    for item in boxes:
        tensors.setdefault(item.name, []).append(item)
    by_dims: dict[int, list[list[IndexedBox]]] = {}
    for name, pieces in tensors.items():
        if len({(item.global_shape, item.dtype, item.scope) for item in pieces}) > 1:
            raise _incomplete(name, "is declared differently by different ranks")
        by_dims.setdefault(len(pieces[0].global_shape), []).append(pieces)
    for dims, alike in by_dims.items():
        _check_tensors(dims, alike)


def _check_tensors(dims: int, tensors: Sequence[Sequence[IndexedBox]]) -> None:
    """Check tensors of so many dimensions, all at once."""
    import numpy as np  # here, because looking at checkpoints must not take the time to load it

    items = list(chain.from_iterable(tensors))
    for item in items:
        if not len(item.offset) == len(item.shape) == dims:
            raise _incomplete(item.name, "has a box of other dimensions")
    counts = np.fromiter(map(len, tensors), np.int64, len(tensors))
    owner = np.repeat(np.arange(len(tensors)), counts)
    start = numbers_of([item.offset for item in items])
    size = numbers_of([item.shape for item in items])
    whole = numbers_of([pieces[0].global_shape for pieces in tensors])

    filled = np.add.reduceat(size.prod(axis=1), np.cumsum(counts) - counts)
    lacking = filled != [prod(pieces[0].global_shape) for pieces in tensors]
    outside = (start + size > whole[owner]).any(axis=1)
    lacking[owner[outside]] = True
    for number in np.flatnonzero(lacking)[:1]:
        item = tensors[number][0]
        raise _incomplete(item.name, f"of shape {item.global_shape} is not filled exactly by its boxes")

    kept = size.all(axis=1)  # a box without elements overlaps nothing
    start, stop, owner = start[kept], (start + size)[kept], owner[kept]
    for first, second in _neighbours(start, stop, owner, whole):
        overlap = np.maximum(start[first], start[second]) < np.minimum(stop[first], stop[second])
        for pair in np.flatnonzero(overlap.all(axis=1))[:1]:
            raise _incomplete(tensors[owner[first[pair]]][0].name, "has boxes that overlap")


def _neighbours(
    start: NDArray[np.int64], stop: NDArray[np.int64], owner: NDArray[np.int64], whole: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Yield the pairs of boxes of one tensor that overlap along one dimension, as two arrays of numbers.

    The dimension of a tensor is that in which its boxes begin at the most places. The tensors are laid behind
    each other on one line, so one sweep over it finds the pairs of all of them. start, stop, whole: of shape
    [boxes, dimensions] and [tensors, dimensions]. owner: the tensor of each box, ascending.
    """
    import numpy as np

    if not start.shape[1]:
        yield _all_pairs(owner)
        return
    places = np.stack([_places(column, owner, len(whole)) for column in start.T], axis=1)
    chosen = places.argmax(axis=1)
    length = np.take_along_axis(whole, chosen[:, None], axis=1)[:, 0]
    base = (np.cumsum(length) - length)[owner]
    along = chosen[owner][:, None]
    begin = base + np.take_along_axis(start, along, axis=1)[:, 0]
    end = base + np.take_along_axis(stop, along, axis=1)[:, 0]
    order = np.argsort(begin, kind="stable")
    behind = np.arange(1, len(order) + 1)
    candidates = np.searchsorted(begin[order], end[order], side="left") - behind
    total = np.cumsum(candidates)
    at = 0
    while at < len(order):
        until = max(at + 1, int(np.searchsorted(total, total[at] - candidates[at] + _PAIRS_AT_ONCE, "right")))
        number = candidates[at:until]
        first = np.repeat(np.arange(at, until), number)
        within = np.arange(len(first)) - np.repeat(np.cumsum(number) - number, number)
        yield order[first], order[first + 1 + within]
        at = until


def _all_pairs(owner: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return each box and the next one of the same tensor without dimensions, where there is one."""
    import numpy as np

    first = np.flatnonzero(owner[1:] == owner[:-1])
    return first, first + 1


def _places(start: NDArray[np.int64], owner: NDArray[np.int64], tensors: int) -> NDArray[np.intp]:
    """Return in how many places the boxes of each tensor begin."""
    import numpy as np

    order = np.lexsort((start, owner))
    changes = (np.diff(start[order]) != 0) | (np.diff(owner[order]) != 0)
    is_new = np.concatenate([[True], changes])[: len(start)]
    return np.bincount(owner[order], weights=is_new, minlength=tensors).astype(np.intp)


def _incomplete(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint was not saved: {name} {what}",
        remedy="This is a mistake in bloomery, not in your run: please report it with the recipe.",
    )
