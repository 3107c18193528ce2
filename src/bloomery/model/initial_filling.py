"""Writes initial values into tensors, drawn by several threads straight to where they are needed.

Each block of rows has a generator of its own (see `initial_values`), and NumPy draws without the
interpreter's lock. So threads draw blocks at once, with the bits of one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from bloomery.model.decoder import Decoder
from bloomery.model.initial_values import ROWS_PER_BLOCK, InitialRule, initial_rule, write_values
from bloomery.model.logical_parameters import logical_parameters
from bloomery.model.shape import ResolvedModel

NUMBERS_AT_ONCE = 2**18
"""The numbers that a thread draws at one time, or 64 rows if they have more. To draw these takes about 5 ms,
and to hand them to a thread 0.1 ms.
"""
MOST_THREADS = 32
"""With more, threads would wait for the interpreter's lock, which each needs for some 0.1 ms in 5."""


@dataclass(frozen=True, kw_only=True)
class InitialBox:
    """A box of a logical tensor that is to get its initial values.

    tensor: where they are written, in place and in its dtype; its shape is the box's.
    name: the logical tensor's. global_shape: of the whole logical tensor. offset: of the box in it.
    """

    tensor: Tensor
    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


def initialise(decoder: Decoder, *, seed: int) -> None:
    """Give every parameter of `decoder` its initial value, in place and in its own dtype."""
    boxes = (
        InitialBox(
            tensor=logical.tensor,
            name=logical.name,
            global_shape=logical.shape,
            offset=(0,) * len(logical.shape),
        )
        for logical in logical_parameters(decoder)
    )
    fill_initial(boxes, model=decoder.model, seed=seed)


def fill_initial(boxes: Iterable[InitialBox], *, model: ResolvedModel, seed: int, threads: int = 1) -> None:
    """Write the initial values of all `boxes`, which may lie on any device.

    threads: how many threads draw; the values do not depend on it.
    No tensor of a device exists as a whole on the host: beside the tensors each thread holds up to three
    pieces of `NUMBERS_AT_ONCE` numbers, or of 64 rows.
    """
    threads = max(1, min(threads, MOST_THREADS))
    # With two stages for a thread it draws into one while the device copies the other.
    free = deque(_Stage() for _ in range(2 * threads))
    under_way: deque[tuple[_Piece, _Stage, Future[None]]] = deque()

    def deliver() -> None:
        piece, stage, drawn = under_way.popleft()
        drawn.result()
        stage.deliver(piece)
        free.append(stage)

    with ThreadPoolExecutor(threads, thread_name_prefix="initial-values") as pool:
        for piece in _pieces(boxes, model):
            if not free:
                deliver()
            stage = free.popleft()
            under_way.append((piece, stage, pool.submit(piece.draw, stage.room_for(piece), seed)))
        while under_way:
            deliver()


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Some rows of a box, in whole blocks where the box has whole blocks. rows: their numbers in the tensor.

    part: the rows of the box's tensor.
    """

    box: InitialBox
    rule: InitialRule
    rows: range
    part: Tensor

    @property
    def is_drawn_in_place(self) -> bool:
        """Whether the tensor itself is memory that NumPy can write."""
        return self.part.device.type == "cpu" and self.part.dtype == torch.float32

    def draw(self, values: np.ndarray, seed: int) -> None:
        """Write the piece's values into `values`, fp32, of its shape."""
        box, sizes = self.box, self.part.shape[1:]
        columns = tuple(slice(start, start + size) for start, size in zip(box.offset[1:], sizes, strict=True))
        write_values(
            *(values, box.name, box.global_shape),
            rows=self.rows,
            columns=columns,
            rule=self.rule,
            seed=seed,
        )


def _pieces(boxes: Iterable[InitialBox], model: ResolvedModel) -> Iterator[_Piece]:
    """Cut the boxes between blocks; a box of constants is filled at once instead."""
    for box in boxes:
        rule, tensor = initial_rule(box.name, model), box.tensor.detach()
        if rule.kind == "constant":
            tensor.fill_(rule.scale)
            continue
        blocks = max(1, NUMBERS_AT_ONCE // (ROWS_PER_BLOCK * max(1, prod(box.global_shape[1:]))))
        start, end = box.offset[0], box.offset[0] + tensor.shape[0]
        while start < end:
            stop = min(end, (start // ROWS_PER_BLOCK + blocks) * ROWS_PER_BLOCK)
            part = tensor[start - box.offset[0] : stop - box.offset[0]]
            yield _Piece(box=box, rule=rule, rows=range(start, stop), part=part)
            start = stop


class _Stage:
    """Host memory for a piece on its way to a tensor that NumPy cannot write; pinned on the way to a GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._copied: torch.cuda.Event | None = None

    def room_for(self, piece: _Piece) -> np.ndarray:
        """Return the array that the piece's values belong into, once the device has read the last ones."""
        if piece.is_drawn_in_place:
            return piece.part.numpy()
        if self._copied is not None:
            self._copied.synchronize()
        if self._memory.numel() < piece.part.numel():
            self._memory = torch.empty(piece.part.numel(), pin_memory=piece.part.device.type == "cuda")
        return self._values(piece).numpy()

    def deliver(self, piece: _Piece) -> None:
        """Copy the drawn values to the tensor, without waiting for a GPU."""
        if piece.is_drawn_in_place:
            return
        # A copy between dtypes and devices would round on the host and wait; the device rounds by itself.
        values = self._values(piece)
        if piece.part.device.type == "cuda":
            values = values.to(piece.part.device, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(piece.part.device))
        piece.part.copy_(values)

    def _values(self, piece: _Piece) -> Tensor:
        return self._memory[: piece.part.numel()].view(piece.part.shape)
