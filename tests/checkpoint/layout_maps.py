"""What each rank of a layout holds of a model and its Adam moments, as boxes."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from bloomery.checkpoint.format.state import Box, StateEntry


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama-like model: grouped queries, tied or untied embedding."""

    hidden: int
    inner: int
    layers: int
    vocabulary: int
    key_rows: int
    tied: bool = True

    def tensors(self) -> dict[str, tuple[int, ...]]:
        h, found = self.hidden, {"embedding.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            block = f"blocks.{layer}"
            found |= {
                f"{block}.attention.query.weight": (h, h),
                f"{block}.attention.key.weight": (self.key_rows, h),
                f"{block}.attention.value.weight": (self.key_rows, h),
                f"{block}.attention.output.weight": (h, h),
                f"{block}.mlp.gate.weight": (self.inner, h),
                f"{block}.mlp.up.weight": (self.inner, h),
                f"{block}.mlp.down.weight": (h, self.inner),
                f"{block}.norm.weight": (h,),
            }
        found["norm.weight"] = (h,)
        if not self.tied:
            found["head.weight"] = (self.vocabulary, h)
        return found


@dataclass(frozen=True, kw_only=True)
class Layout:
    """tensor: degree; stages: blocks of each pipeline stage; data: degree; zero: 0, 1 or 3.

    key_heads: where the tensor degree is larger, key and value are replicated over neighbours.
    """

    tensor: int = 1
    stages: tuple[int, ...] = (5,)
    data: int = 1
    zero: int = 0
    key_heads: int = 2

    @property
    def world(self) -> int:
        return self.tensor * len(self.stages) * self.data

    def __str__(self) -> str:
        named = [f"tensor {self.tensor}"] if self.tensor > 1 else []
        named += ["stages " + "+".join(map(str, self.stages))] if len(self.stages) > 1 else []
        named += [f"data {self.data}" + (f", ZeRO {self.zero}" if self.zero else "")] if self.data > 1 else []
        return ", ".join(named) or "one rank"


LAYOUTS = (
    Layout(),
    Layout(tensor=2),
    Layout(tensor=4),
    Layout(stages=(2, 3)),
    Layout(stages=(1, 3, 1)),
    Layout(data=2),
    Layout(data=2, zero=1),
    Layout(data=4, zero=1),
    Layout(data=2, zero=3),
    Layout(data=3, zero=3),
    Layout(tensor=2, stages=(3, 2)),
    Layout(tensor=2, data=2, zero=1),
    Layout(tensor=2, data=2, zero=3),
    Layout(stages=(4, 1), data=2, zero=3),
    Layout(tensor=2, stages=(2, 3), data=2, zero=1),
    Layout(tensor=4, stages=(3, 2), data=2, zero=3),
)
MOMENTS = ("optim.first.", "optim.second.")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A box that a rank holds; `saved` where it is this rank's kind to save it."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    saved: bool


def parts_of(shape: Shape, layout: Layout, rank: int) -> list[Part]:
    """Return what a rank holds. Ranks count tensor fastest, then stage, then data."""
    tensor, rest = rank % layout.tensor, rank // layout.tensor
    stage, data = rest % len(layout.stages), rest // len(layout.stages)
    local = list(_local(shape, layout, tensor, stage))
    parts = []
    for prefix in ("model.", *MOMENTS):
        flat = layout.zero == 3 or (layout.zero == 1 and prefix != "model.")
        kept = _flat_share(local, data, layout.data) if flat else [(*item, item[2]) for item in local]
        for name, global_shape, _, box in kept:
            saved = (
                name != "embedding.weight" or stage == 0
            )  # the other copy of a tied embedding is not saved
            parts.append(Part(name=prefix + name, global_shape=global_shape, box=box, saved=saved))
    return parts


def entry_of(part: Part, tensor: torch.Tensor) -> StateEntry:
    return StateEntry(
        name=part.name, global_shape=part.global_shape, dtype="float32", box=part.box, tensor=tensor
    )


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that elements [start, stop) of a row-major tensor are: at most three of a matrix."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,) if shape else (), (stop - start,) if shape else ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _of_row(shape, start // row, start % row, start % row + stop - start)
        return
    if start % row:
        yield from _of_row(shape, start // row, start % row, row)
    if last > first:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if stop % row:
        yield from _of_row(shape, last, 0, stop % row)


def _of_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    for box in flat_boxes(shape[1:], start, stop):
        yield Box((index, *box.offset), (1, *box.shape))


def _local(shape: Shape, layout: Layout, tensor: int, stage: int) -> Iterator[tuple[str, tuple, Box]]:
    """Yield (name, global shape, box) of a tensor-parallel rank of a stage."""
    first = sum(layout.stages[:stage])
    last_stage = stage == len(layout.stages) - 1
    for name, size in shape.tensors().items():
        if name.startswith("blocks."):
            here = first <= int(name.split(".")[1]) < first + layout.stages[stage]
        elif name.startswith("embedding"):
            here = stage == 0 or (last_stage and shape.tied)
        else:
            here = last_stage
        if here:
            yield name, size, _tensor_box(name, size, layout, tensor)


def _tensor_box(name: str, size: tuple[int, ...], layout: Layout, rank: int) -> Box:
    degree = layout.tensor
    if len(size) == 1:
        return Box((0,), size)
    if name.endswith(("output.weight", "down.weight")):
        columns = size[1] // degree
        return Box((0, rank * columns), (size[0], columns))
    if name.endswith(("key.weight", "value.weight")) and degree > layout.key_heads:
        rank, degree = rank * layout.key_heads // degree, layout.key_heads
    start, stop = size[0] * rank // degree, size[0] * (rank + 1) // degree
    return Box((start, 0), (stop - start, size[1]))


def _flat_share(local: list, index: int, degree: int) -> Iterator[tuple[str, tuple, Box, Box]]:
    """Cut the rank's tensors, laid end to end, into equal shares, wherever that cuts them."""
    total = sum(box.size for _, _, box in local)
    start, stop = total * index // degree, total * (index + 1) // degree
    position = 0
    for name, global_shape, box in local:
        begin, end = max(start, position), min(stop, position + box.size)
        for piece in flat_boxes(box.shape, begin - position, end - position):
            offset = tuple(a + b for a, b in zip(box.offset, piece.offset, strict=True))
            yield name, global_shape, box, Box(offset, piece.shape)
        position += box.size
