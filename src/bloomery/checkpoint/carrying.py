"""Carrying a load out: units are read by some threads, placed, and passed on to the ranks that want them."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice

import torch
from torch import Tensor

from bloomery.checkpoint.manifest import Index, IndexedBox
from bloomery.checkpoint.memory import element_type, memory_of
from bloomery.checkpoint.ranks import Ranks
from bloomery.checkpoint.reading import Piece, VerifiedReader
from bloomery.checkpoint.remote import RemoteCheckpoint
from bloomery.checkpoint.source import Source
from bloomery.checkpoint.state import ITEM_BYTES, Box, StateEntry
from bloomery.checkpoint.transfers import Portion, Slab, Unit
from bloomery.errors import BloomeryError

THREADS = 4
"""They mostly wait for the disk: with two, it had nothing to do while both hashed."""
_ALIGNMENT = 64

Count = Callable[[int], None]


def carry_alone(
    source: Source,
    index: Index,
    units: Sequence[Unit],
    entries: Sequence[StateEntry],
    *,
    count: Count | None = None,
) -> None:
    """Fill the entries. Raises DamagedCheckpoint; StorageError where the checkpoint was not reached."""
    with _Reading(source, index, entries, rank=0, count=count) as reading:
        for _ in reading.messages(units):
            pass


def carry_together(
    source: Source,
    index: Index,
    units: Sequence[Unit],
    entries: Sequence[StateEntry],
    *,
    ranks: Ranks,
    count: Count | None = None,
) -> BloomeryError | None:
    """Fill the entries of every rank; return what failed here. Collective, also when something fails.

    In each round every rank reads its next unit, keeps what it wants of it, and sends others theirs. A line
    may be slower than a collective has patience: from elsewhere, all have read before any exchanges.
    """
    assert ranks.exchange is not None, "the caller has looked"
    turns = [[unit for unit in units if unit.reader == rank] for rank in range(ranks.world)]
    failure: BloomeryError | None = None
    with _Reading(source, index, entries, rank=ranks.rank, count=count) as reading:
        mine = reading.messages(turns[ranks.rank], stop_at_damage=False)
        for number in range(max(map(len, turns), default=0)):
            read: list[tuple[dict[int, Tensor], BloomeryError | None]] = []

            def read_next(read: list[tuple[dict[int, Tensor], BloomeryError | None]] = read) -> None:
                read.extend(islice(mine, 1))

            if isinstance(source, RemoteCheckpoint):
                ranks.patiently(read_next)
            else:
                read_next()
            sends, damage = read[0] if read else ({}, None)
            failure = failure or damage
            receives: dict[int, Tensor] = {}
            for reader, turn in enumerate(turns):
                size = _message_bytes(turn[number], ranks.rank) if number < len(turn) else 0
                if size and reader != ranks.rank:
                    receives[reader] = torch.empty(size, dtype=torch.uint8)
            ranks.exchange(sends, receives)
            for reader, message in receives.items():
                reading.place_message(turns[reader][number], message)
    return failure


class _Reading:
    """One rank's part of a load. A context manager: it owns the open files, the threads and their buffers."""

    def __init__(
        self,
        source: Source,
        index: Index,
        entries: Sequence[StateEntry],
        *,
        rank: int,
        count: Count | None,
    ) -> None:
        self._source, self._index, self._entries = source, index, entries
        self._rank, self._count = rank, count
        self._buffers: list[Tensor] = []
        self._lock = threading.Lock()
        self._boxes: dict[str, list[IndexedBox]] = {}
        for item in index.boxes:
            self._boxes.setdefault(item.file, []).append(item)
        self._files: dict[str, VerifiedReader] = {}
        self._units_left: Counter[str] = Counter()

    def __enter__(self) -> _Reading:
        self._stack = ExitStack()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(THREADS, "checkpoint-load"))
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._stack.close()
        for reader in self._files.values():
            reader.__exit__(None, None, None)

    def messages(
        self, units: Sequence[Unit], *, stop_at_damage: bool = True
    ) -> Iterator[tuple[dict[int, Tensor], BloomeryError | None]]:
        """Read the units in order, a few ahead; yield what each holds for others, once all is placed here.

        stop_at_damage: raise what is wrong with a unit; otherwise yield it, beside bytes that mean nothing.
        """
        self._units_left.update(unit.file for unit in units)
        ahead: deque[tuple[Unit, Future[dict[int, Tensor]]]] = deque()
        left = iter(units)
        for unit in left:
            ahead.append((unit, self._pool.submit(self._read, unit)))
            if len(ahead) > THREADS:
                yield self._finished(*ahead.popleft(), stop_at_damage=stop_at_damage)
        while ahead:
            yield self._finished(*ahead.popleft(), stop_at_damage=stop_at_damage)

    @torch.no_grad()
    def place_message(self, unit: Unit, message: Tensor) -> None:
        """Place what another rank read for this one."""
        position = 0
        for slab, portion in _portions(unit, self._rank):
            size = portion.part.size * ITEM_BYTES[slab.saved.dtype]
            packed = message[position : position + size].view(element_type(slab.saved.dtype))
            self._target(portion).copy_(packed.view(portion.part.shape))
            position += size + -size % _ALIGNMENT

    def _finished(
        self, unit: Unit, future: Future[dict[int, Tensor]], *, stop_at_damage: bool
    ) -> tuple[dict[int, Tensor], BloomeryError | None]:
        try:
            return future.result(), None
        except BloomeryError as error:
            if stop_at_damage:
                raise
            return {rank: _message(unit, rank) for rank in _others(unit)}, error

    @torch.no_grad()
    def _read(self, unit: Unit) -> dict[int, Tensor]:
        """Read a unit, place what this rank wants of it, and return what the others want."""
        pieces: list[Piece] = []
        held: list[tuple[Slab, Tensor, Portion | None]] = []
        with self._buffer(sum(_padded(slab) for slab in unit.slabs)) as buffer:
            position = 0
            for slab in unit.slabs:
                own = self._in_place(slab)
                if own is not None:
                    tensor = self._target(own)
                else:
                    size = slab.box.size * ITEM_BYTES[slab.saved.dtype]
                    flat = buffer[position : position + size].view(element_type(slab.saved.dtype))
                    tensor = flat.view(slab.box.shape)
                    position += _padded(slab)
                pieces.append((slab.span[0], memory_of(tensor)))
                held.append((slab, tensor, own))
            with self._file(unit.file) as file:
                file.read(pieces)
            for slab, tensor, own in held:
                for portion in slab.portions:
                    if portion.rank == self._rank and portion is not own:
                        self._target(portion).copy_(_view(tensor, portion.part, within=slab.box))
            return self._packed(unit, held)

    def _packed(self, unit: Unit, held: Sequence[tuple[Slab, Tensor, Portion | None]]) -> dict[int, Tensor]:
        messages = {}
        for rank in _others(unit):
            message, position = _message(unit, rank), 0
            for slab, tensor, _ in held:
                for portion in slab.portions:
                    if portion.rank == rank:
                        size = portion.part.size * tensor.element_size()
                        packed = message[position : position + size].view(tensor.dtype)
                        part = _view(tensor, portion.part, within=slab.box)
                        packed.view(portion.part.shape).copy_(part)
                        position += size + -size % _ALIGNMENT
            messages[rank] = message
        return messages

    def _in_place(self, slab: Slab) -> Portion | None:
        """Return the portion of this rank into whose memory the slab can be read as it is."""
        for portion in slab.portions:
            if portion.rank == self._rank and portion.part == slab.box:
                target = self._target(portion)
                plain = target.device.type == "cpu" and target.is_contiguous()
                if plain and self._entries[portion.wish].dtype == slab.saved.dtype:
                    return portion
        return None

    def _target(self, portion: Portion) -> Tensor:
        entry = self._entries[portion.wish]
        return _view(entry.tensor.detach(), portion.part, within=entry.box)

    @contextmanager
    def _file(self, name: str) -> Iterator[VerifiedReader]:
        """Lend a file's reader; it is opened for the first of its units and closed after the last."""
        with self._lock:
            if name not in self._files:
                self._files[name] = VerifiedReader(
                    self._source,
                    self._index.files[name],
                    boxes=self._boxes.get(name, ()),
                    count=self._count,
                )
            reader = self._files[name]
        try:
            yield reader
        finally:
            with self._lock:
                self._units_left[name] -= 1
                if not self._units_left[name]:
                    self._files.pop(name).__exit__(None, None, None)

    @contextmanager
    def _buffer(self, size: int) -> Iterator[Tensor]:
        """Lend memory that was used before, where there is some: the first touch of a page is slow."""
        with self._lock:
            buffer = self._buffers.pop() if self._buffers else torch.empty(0, dtype=torch.uint8)
        if len(buffer) < size:
            buffer = torch.empty(size, dtype=torch.uint8)
        try:
            yield buffer
        finally:
            with self._lock:
                self._buffers.append(buffer)


def _view(tensor: Tensor, part: Box, *, within: Box) -> Tensor:
    """Return the view of `tensor`, which holds the box `within`, that is `part`."""
    for dim, (start, first, length) in enumerate(zip(part.offset, within.offset, part.shape, strict=True)):
        tensor = tensor.narrow(dim, start - first, length)
    return tensor


def _portions(unit: Unit, rank: int) -> Iterator[tuple[Slab, Portion]]:
    """Yield what a rank takes of a unit, in the order in which a message holds it."""
    for slab in unit.slabs:
        for portion in slab.portions:
            if portion.rank == rank:
                yield slab, portion


def _others(unit: Unit) -> list[int]:
    """Return the ranks, other than its reader, that want something of a unit."""
    return sorted({portion.rank for slab in unit.slabs for portion in slab.portions} - {unit.reader})


def _message(unit: Unit, rank: int) -> Tensor:
    return torch.empty(_message_bytes(unit, rank), dtype=torch.uint8)


def _message_bytes(unit: Unit, rank: int) -> int:
    sizes = (portion.part.size * ITEM_BYTES[slab.saved.dtype] for slab, portion in _portions(unit, rank))
    return sum(size + -size % _ALIGNMENT for size in sizes)


def _padded(slab: Slab) -> int:
    size = slab.box.size * ITEM_BYTES[slab.saved.dtype]
    return size + -size % _ALIGNMENT
