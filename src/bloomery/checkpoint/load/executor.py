"""Executes a load plan: reads and verifies units in threads, fills the entries, and exchanges the rest."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice

import torch
from torch import Tensor

from bloomery.checkpoint.format.manifest import Index, IndexedBox
from bloomery.checkpoint.format.source import RemoteCheckpoint, Source, StoredCheckpoint
from bloomery.checkpoint.format.state import ITEM_BYTES, Box, StateEntry
from bloomery.checkpoint.format.verified_reader import Piece, VerifiedReader
from bloomery.checkpoint.load.load_plan import Destination, LoadPlan, ReadItem, ReadUnit
from bloomery.checkpoint.save.direct import element_type, memory_of
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.errors import BloomeryError

THREADS = 4
"""The threads that read and hash: with two, the disk was idle while both of them hashed."""
_ALIGNMENT = 64

Count = Callable[[int], None]


def load_on_one_rank(
    source: Source,
    index: Index,
    units: Sequence[ReadUnit],
    entries: Sequence[StateEntry],
    *,
    count: Count | None = None,
) -> None:
    """Read all units and fill the entries, without other ranks. count: called with the bytes of each read.

    Raises DamagedCheckpoint, and StorageError where the checkpoint cannot be reached.
    """
    with _Reader(source, index, entries, rank=0, count=count) as reading:
        for _ in reading.messages(units):
            pass


def load_on_all_ranks(
    source: Source,
    index: Index,
    plan: LoadPlan,
    entries: Sequence[StateEntry],
    *,
    ranks: Ranks,
    count: Count | None = None,
) -> BloomeryError | None:
    """Fill the entries of every rank, and return this rank's error or None. Collective, also after an error.

    In each round every rank reads its next unit, copies what it wants of it, and sends the other ranks
    theirs. A read from a remote store may take longer than a collective's time-out, so all ranks first wait,
    by polling, until each has read.

    plan: at least the units that this rank reads, or receives something of.
    """
    assert ranks.exchange is not None, "the caller checks this"
    own_units = [unit for unit in plan.units if unit.reader == ranks.rank]
    received_units: dict[int, list[ReadUnit]] = {}
    for unit in plan.units:
        if unit.reader != ranks.rank:
            received_units.setdefault(unit.round, []).append(unit)
    failure: BloomeryError | None = None
    with _Reader(source, index, entries, rank=ranks.rank, count=count) as reading:
        own_messages = reading.messages(own_units, stop_at_damage=False)
        for number in range(plan.rounds):
            read: list[tuple[dict[int, Tensor], BloomeryError | None]] = []

            def read_next(read: list[tuple[dict[int, Tensor], BloomeryError | None]] = read) -> None:
                read.extend(islice(own_messages, 1))

            if isinstance(source, RemoteCheckpoint | StoredCheckpoint):
                ranks.poll_on_all(read_next)
            else:
                read_next()
            sends, damage = read[0] if read else ({}, None)
            failure = failure or damage
            receives: dict[int, Tensor] = {}
            senders = received_units.get(number, ())
            for unit in senders:
                size = _message_bytes(unit, ranks.rank)
                if size:
                    receives[unit.reader] = torch.empty(size, dtype=torch.uint8)
            ranks.exchange(sends, receives)
            for unit in senders:
                if unit.reader in receives:
                    reading.place_message(unit, receives[unit.reader])
    return failure


class _Reader:
    """Reads units for one rank. A context manager: it owns open files, threads, and their buffers."""

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
        for box in index.boxes:
            self._boxes.setdefault(box.file, []).append(box)
        self._files: dict[str, VerifiedReader] = {}
        self._units_left: Counter[str] = Counter()

    def __enter__(self) -> _Reader:
        self._stack = ExitStack()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(THREADS, "checkpoint-load"))
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._stack.close()
        for reader in self._files.values():
            reader.__exit__(None, None, None)

    def messages(
        self, units: Sequence[ReadUnit], *, stop_at_damage: bool = True
    ) -> Iterator[tuple[dict[int, Tensor], BloomeryError | None]]:
        """Read the units in order, a few ahead, and yield for each the bytes that other ranks want of it.

        This rank's own entries are filled by then. stop_at_damage: whether to raise an error of a unit;
        otherwise it is yielded beside meaningless bytes, so that the other ranks' exchanges go on.
        """
        self._units_left.update(unit.file for unit in units)
        ahead: deque[tuple[ReadUnit, Future[dict[int, Tensor]]]] = deque()
        left = iter(units)
        for unit in left:
            ahead.append((unit, self._pool.submit(self._read, unit)))
            if len(ahead) > THREADS:
                yield self._finished(*ahead.popleft(), stop_at_damage=stop_at_damage)
        while ahead:
            yield self._finished(*ahead.popleft(), stop_at_damage=stop_at_damage)

    @torch.no_grad()
    def place_message(self, unit: ReadUnit, message: Tensor) -> None:
        """Copy what another rank read for this one into the entries."""
        position = 0
        for item, destination in _destinations(unit, self._rank):
            size = destination.region.size * ITEM_BYTES[item.saved.dtype]
            packed = message[position : position + size].view(element_type(item.saved.dtype))
            self._target(destination).copy_(packed.view(destination.region.shape))
            position += size + -size % _ALIGNMENT

    def _finished(
        self, unit: ReadUnit, future: Future[dict[int, Tensor]], *, stop_at_damage: bool
    ) -> tuple[dict[int, Tensor], BloomeryError | None]:
        try:
            return future.result(), None
        except BloomeryError as error:
            if stop_at_damage:
                raise
            return {rank: _message(unit, rank) for rank in _others(unit)}, error

    @torch.no_grad()
    def _read(self, unit: ReadUnit) -> dict[int, Tensor]:
        """Read a unit, copy what this rank wants of it, and return the messages for the other ranks."""
        pieces: list[Piece] = []
        tensors: list[tuple[ReadItem, Tensor, Destination | None]] = []
        with self._buffer(sum(_padded(item) for item in unit.items)) as buffer:
            position = 0
            for item in unit.items:
                own = self._in_place(item)
                if own is not None:
                    tensor = self._target(own)
                else:
                    size = item.box.size * ITEM_BYTES[item.saved.dtype]
                    flat = buffer[position : position + size].view(element_type(item.saved.dtype))
                    tensor = flat.view(item.box.shape)
                    position += _padded(item)
                pieces.append((item.span[0], memory_of(tensor)))
                tensors.append((item, tensor, own))
            with self._file(unit.file) as file:
                file.read(pieces)
            for item, tensor, own in tensors:
                for destination in item.destinations:
                    if destination.rank == self._rank and destination is not own:
                        self._target(destination).copy_(_view(tensor, destination.region, within=item.box))
            return self._packed(unit, tensors)

    def _packed(
        self, unit: ReadUnit, tensors: Sequence[tuple[ReadItem, Tensor, Destination | None]]
    ) -> dict[int, Tensor]:
        messages = {}
        for rank in _others(unit):
            message, position = _message(unit, rank), 0
            for item, tensor, _ in tensors:
                for destination in item.destinations:
                    if destination.rank == rank:
                        size = destination.region.size * tensor.element_size()
                        packed = message[position : position + size].view(tensor.dtype)
                        part = _view(tensor, destination.region, within=item.box)
                        packed.view(destination.region.shape).copy_(part)
                        position += size + -size % _ALIGNMENT
            messages[rank] = message
        return messages

    def _in_place(self, item: ReadItem) -> Destination | None:
        """Return this rank's destination, if the file's bytes can be read straight into its memory."""
        for destination in item.destinations:
            if destination.rank == self._rank and destination.region == item.box:
                target = self._target(destination)
                plain = target.device.type == "cpu" and target.is_contiguous()
                if plain and self._entries[destination.wanted].dtype == item.saved.dtype:
                    return destination
        return None

    def _target(self, destination: Destination) -> Tensor:
        entry = self._entries[destination.wanted]
        return _view(entry.tensor.detach(), destination.region, within=entry.box)

    @contextmanager
    def _file(self, name: str) -> Iterator[VerifiedReader]:
        """Provide a file's reader, opened for the first of its units and closed after the last."""
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
        """Provide a buffer, a used one where there is one: the first touch of new pages is slow."""
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
    """Return the view of `tensor` that holds the box `part`, where the tensor holds the box `within`."""
    for dim, (start, first, length) in enumerate(zip(part.offset, within.offset, part.shape, strict=True)):
        tensor = tensor.narrow(dim, start - first, length)
    return tensor


def _destinations(unit: ReadUnit, rank: int) -> Iterator[tuple[ReadItem, Destination]]:
    """Yield a rank's destinations in a unit, in the order in which a message holds them."""
    for item in unit.items:
        for destination in item.destinations:
            if destination.rank == rank:
                yield item, destination


def _others(unit: ReadUnit) -> list[int]:
    """Return the ranks, besides the reader, that want something of a unit."""
    return sorted(
        {destination.rank for item in unit.items for destination in item.destinations} - {unit.reader}
    )


def _message(unit: ReadUnit, rank: int) -> Tensor:
    return torch.empty(_message_bytes(unit, rank), dtype=torch.uint8)


def _message_bytes(unit: ReadUnit, rank: int) -> int:
    sizes = (
        destination.region.size * ITEM_BYTES[item.saved.dtype]
        for item, destination in _destinations(unit, rank)
    )
    return sum(size + -size % _ALIGNMENT for size in sizes)


def _padded(item: ReadItem) -> int:
    size = item.box.size * ITEM_BYTES[item.saved.dtype]
    return size + -size % _ALIGNMENT
