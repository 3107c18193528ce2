"""Describes the state that a checkpoint saves: boxes of logical tensors, JSON values, overlaps of boxes.

Of a tensor, 1,024 ranks may have thousands of boxes, saved and wanted: comparing each with each takes hours.
`BoxOverlaps` and `all_overlaps` find those that overlap in time linear in the overlaps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
from msgspec.structs import force_setattr

from bloomery.errors import BloomeryError
from bloomery.events.records import Json as Json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Scope = Literal["shared", "peer"]
"""shared: equal on all peers of an elastic run (weights, position); peer: its own (inner optimizer)."""

OPTIONAL_PREFIXES = ("outer.residual.", "optim.limit.")
"""Prefixes of tensors that may be in only one of checkpoint and run: a resume may change their setting."""

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""The element types that a checkpoint can hold, as torch names them, and their sizes."""


class Box(msgspec.Struct, frozen=True, gc=False):
    """A rectangular piece of a tensor: `offset` of its first element in the whole tensor, and `shape`.

    There may be a million boxes: a struct is made, hashed and compared in a third of a dataclass's time.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if type(self.offset) is not tuple or type(self.shape) is not tuple:
            force_setattr(self, "offset", tuple(self.offset))
            force_setattr(self, "shape", tuple(self.shape))
        offset, shape = self.offset, self.shape
        if len(offset) != len(shape) or (offset and (min(offset) < 0 or min(shape) < 0)):
            raise ValueError(f"not a box: offset {offset}, shape {shape}")

    @property
    def size(self) -> int:
        """Elements in the box."""
        return prod(self.shape)

    @property
    def window(self) -> tuple[slice, ...]:
        """The slices that index the whole tensor to give the box."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """Return the box that two boxes of one tensor have in common; None where they have nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        stops = tuple(map(min, self._stop(), other._stop()))
        shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return None if min(shape, default=1) <= 0 else Box(starts, shape)

    def is_within(self, global_shape: tuple[int, ...]) -> bool:
        """Say whether the box lies in a tensor of this shape."""
        if self.shape == global_shape and not any(self.offset):  # most boxes are whole tensors
            return True
        return len(global_shape) == len(self.shape) and all(
            stop <= size for stop, size in zip(self._stop(), global_shape, strict=True)
        )

    def _stop(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True)
class StateEntry:
    """One box of one logical tensor, and the tensor that holds its values.

    name: dotted, beginning with the name of its part of the run. dtype: a key of ITEM_BYTES.
    tensor: of shape `box.shape`, on any device, with any strides. Saving reads it, loading writes it in
        place.
    scope: "shared" where all peers of an elastic run have equal values, else "peer".
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    box: Box
    tensor: Any  # a torch.Tensor; this module must not load torch
    scope: Scope = "shared"

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", tuple(self.global_shape))
        shape = tuple(self.tensor.shape)
        if shape != self.box.shape:
            raise ValueError(f"{self.name}: the tensor has shape {shape}, its box {self.box.shape}")
        if not self.box.is_within(self.global_shape):
            raise ValueError(f"{self.name}: {self.box} does not lie in {self.global_shape}")
        if self.dtype not in ITEM_BYTES or dtype_of(self.tensor) != self.dtype:
            raise ValueError(f"{self.name}: a tensor of {dtype_of(self.tensor)} was declared {self.dtype}")

    @property
    def nbytes(self) -> int:
        """Bytes that the box takes in a checkpoint."""
        return self.box.size * ITEM_BYTES[self.dtype]


class Stateful(Protocol):
    """Interface of a component whose state is saved in checkpoints, such as the model or the optimizer."""

    def state_entries(self) -> Iterable[StateEntry]:
        """Yield the tensors. Loading writes them in place, so they are the part's own, not copies."""

    def state_values(self) -> Mapping[str, Json]:
        """Return the rest of the state, as small JSON values."""

    def load_state_values(self, values: Mapping[str, Json]) -> None:
        """Take what `state_values` returned at the save. Called after the tensors were loaded."""


@dataclass(frozen=True, kw_only=True)
class CollectedState:
    """The state of a run at one moment: tensors by reference, values by part."""

    entries: tuple[StateEntry, ...]
    values: dict[str, dict[str, Json]]


@dataclass(frozen=True, kw_only=True)
class StateSnapshot:
    """The state that is to be saved: tensors by reference, everything else as it is now.

    values: the small JSON values of each part of the run. about: facts for people.
    run_length_steps: the length of the run, for retention; None where it is not known.
    """

    step: int
    incarnation: int
    state: CollectedState
    values: Mapping[str, Mapping[str, Json]]
    about: Mapping[str, Json]
    run_length_steps: int | None


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """How a save ended.

    failure: the error; None when it is committed, as far as this rank knows.
    seconds, bytes: how long this rank's writer took, and for how many bytes; 0 for a save at once.
    """

    step: int
    name: str
    failure: BloomeryError | None = None
    seconds: float = 0.0
    bytes: int = 0


def whole(name: str, tensor: Any, *, scope: Scope = "shared") -> StateEntry:  # Any: a torch.Tensor
    """Return the entry of a tensor that this rank holds in full."""
    shape = tuple(tensor.shape)
    box = Box((0,) * len(shape), shape)
    return StateEntry(
        name=name, global_shape=shape, dtype=dtype_of(tensor), box=box, tensor=tensor, scope=scope
    )


def collect(parts: Mapping[str, Stateful]) -> CollectedState:
    """Return the state of all parts. parts: by name.

    Raises ValueError for a tensor whose name does not begin with its part's, and for one that comes twice:
    such a mistake in a part would lose state silently.
    """
    entries: list[StateEntry] = []
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for part, stateful in parts.items():
        for entry in stateful.state_entries():
            if not entry.name.startswith(f"{part}."):
                raise ValueError(
                    f"part {part!r} has a tensor named {entry.name!r}: it must begin with {part!r}."
                )
            if (entry.name, entry.box.offset) in seen:
                raise ValueError(f"{entry.name} at {entry.box.offset} is there twice")
            seen.add((entry.name, entry.box.offset))
            entries.append(entry)
    values = {part: dict(stateful.state_values()) for part, stateful in parts.items()}
    return CollectedState(entries=tuple(entries), values=values)


def dtype_of(tensor: Any) -> str:  # Any: a torch.Tensor
    """Return the element type's name as in ITEM_BYTES."""
    return _dtype_name(tensor.dtype)


@cache
def _dtype_name(dtype: Any) -> str:  # Any: a torch.dtype
    return str(dtype).removeprefix("torch.")


class BoxOverlaps:
    """Finds which of many boxes of a tensor overlap a given one, without a test of every box.

    The boxes are sorted along the dimension in which they begin at the most different places. `_reach[i]` is
    the farthest end of the boxes 0 to i, so that both ends of the range of candidates are found by bisection.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._dim = _dim_of_most_starts(boxes)
        dim = self._dim
        self._boxes = list(boxes) if dim is None else sorted(boxes, key=lambda box: box.offset[dim])
        if dim is not None:
            self._starts = [box.offset[dim] for box in self._boxes]
            self._reach = list(accumulate((box.offset[dim] + box.shape[dim] for box in self._boxes), max))

    def with_box(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """Yield (box of the many, what it has in common with `box`), where that is not empty."""
        candidates = self._boxes
        if self._dim is not None:
            start = box.offset[self._dim]
            first = bisect_right(self._reach, start)
            candidates = candidates[first : bisect_left(self._starts, start + box.shape[self._dim])]
        for candidate in candidates:
            common = candidate.intersection(box)
            if common is not None and common.size:
                yield candidate, common


@dataclass(frozen=True, kw_only=True)
class Overlaps:
    """Which wanted boxes have elements in common with each saved box.

    saved: the numbers of the saved boxes that overlap any. wanted: the numbers of the wanted boxes of the
    first of them, then of the second, and so on; those of saved[i] end before stops[i]. start, stop: for each
    of `wanted`, what it has in common with the saved box along the first dimension, as [start, stop).
    """

    saved: NDArray[np.intp]
    wanted: NDArray[np.intp]
    stops: NDArray[np.intp]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]


def all_overlaps(saved: Sequence[Box], wanted: Sequence[Box]) -> Overlaps:
    """Return which boxes of one tensor overlap. There is at least one of either."""
    import numpy as np  # here, because looking at checkpoints must not take the time to load it

    dim = _dim_of_most_starts(wanted)
    if dim is None:  # a tensor without dimensions: each box is its one element
        wanted_numbers = np.tile(np.arange(len(wanted)), len(saved))
        return Overlaps(
            saved=np.arange(len(saved)),
            wanted=wanted_numbers,
            stops=len(wanted) * np.arange(1, len(saved) + 1),
            start=np.zeros_like(wanted_numbers),
            stop=np.ones_like(wanted_numbers),
        )
    saved_start, saved_stop = _starts_and_stops(saved)
    wanted_start, wanted_stop = _starts_and_stops(wanted)
    order = np.argsort(wanted_start[:, dim], kind="stable")
    reach = np.maximum.accumulate(wanted_stop[order, dim])
    first = np.searchsorted(reach, saved_start[:, dim], side="right")
    last = np.searchsorted(wanted_start[order, dim], saved_stop[:, dim], side="left")
    candidates = np.maximum(last - first, 0)
    pair_saved = np.repeat(np.arange(len(saved)), candidates)
    within = np.arange(len(pair_saved)) - np.repeat(np.cumsum(candidates) - candidates, candidates)
    pair_wanted = order[np.repeat(first, candidates) + within]
    start = np.maximum(saved_start[pair_saved], wanted_start[pair_wanted])
    stop = np.minimum(saved_stop[pair_saved], wanted_stop[pair_wanted])
    overlap = (start < stop).all(axis=1)
    counts = np.bincount(pair_saved[overlap], minlength=len(saved))
    numbers = np.flatnonzero(counts)
    return Overlaps(
        saved=numbers,
        wanted=pair_wanted[overlap],
        stops=np.cumsum(counts[numbers]),
        start=start[overlap, 0],
        stop=stop[overlap, 0],
    )


def _starts_and_stops(boxes: Sequence[Box]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two arrays of shape [boxes, dimensions]."""
    starts = numbers_of([box.offset for box in boxes])
    return starts, starts + numbers_of([box.shape for box in boxes])


def numbers_of(tuples: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    """Return tuples of equal lengths, at least one, as an array of shape [tuples, length]."""
    import numpy as np

    length = len(tuples[0])
    return np.fromiter(chain.from_iterable(tuples), np.int64, len(tuples) * length).reshape(
        len(tuples), length
    )


def _dim_of_most_starts(boxes: Sequence[Box]) -> int | None:
    """Return the dimension in which the boxes begin at the most places; None for boxes without dimensions."""
    dims = len(boxes[0].offset) if boxes else 0
    return max(range(dims), key=lambda dim: len({box.offset[dim] for box in boxes}), default=None)
