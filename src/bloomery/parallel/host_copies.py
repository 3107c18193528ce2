"""Masters and gradients of a group in the CPU's memory, and the copies between there and the device.

On a GPU these buffers are pinned, and copies run on streams of their own: while the CPU updates one piece,
the gradients of later pieces come down and the masters of earlier pieces go up, where they are rounded
(after ZeRO-Offload, Ren et al. 2021). On CPUs the same copies are made at once, in the same order.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bloomery.parallel.device_wait import DeviceEvent, wait_for_event

PIECE_NUMEL = 2**24
"""The elements of a group that are copied and updated at a time: 64 MiB of fp32, a millisecond of PCIe."""

log = logging.getLogger(__name__)


class Arrival(Protocol):
    """A copy under way."""

    def synchronize(self) -> None:
        """Wait until it is made. Raises RankLost where the device waits for another rank for too long."""
        ...


class HostLink(Protocol):
    """Copies between the CPU's memory and a device. Buffers must live until their copy is made."""

    def zeros(self, numel: int) -> Tensor:
        """Return fp32 zeros [numel] in the CPU's memory, from which the device copies by itself."""
        ...

    def release(self, memory: Sequence[Tensor]) -> None:
        """End what `zeros` took beside the memory."""
        ...

    def wait_unless_pinned(self, memory: Tensor) -> None:
        """Wait for the device where a copy of this memory would wait for it, which has no deadline.

        Raises RankLost where the device waits for another rank for too long.
        """
        ...

    def down(self, into: Tensor, source: Tensor) -> Arrival:
        """Begin to copy from the device, after what it was told to compute so far."""
        ...

    def up(self, into: Tensor, source: Tensor) -> Arrival:
        """Begin to copy to the device and round there, after what it was told to compute so far."""
        ...

    def follow(self) -> None:
        """Have the device compute what it is told from now on after all copies up."""
        ...

    def follow_down(self) -> None:
        """Have the device compute what it is told from now on after all copies down."""
        ...

    def up_in_order(self, into: Tensor, source: Tensor) -> None:
        """Copy to the device and round there between what it was told before and what comes next."""
        ...


class _Made:
    def synchronize(self) -> None:
        """Return at once."""


@dataclass(frozen=True)
class _UnderWay:
    event: DeviceEvent

    def synchronize(self) -> None:
        """See Arrival. The host asks the event, since a call that waits for it would have no deadline."""
        wait_for_event(self.event)


class CopiesAtOnce:
    """The link to a CPU device."""

    def zeros(self, numel: int) -> Tensor:
        """See HostLink."""
        return torch.zeros(numel)

    def release(self, memory: Sequence[Tensor]) -> None:
        """See HostLink."""

    def wait_unless_pinned(self, memory: Tensor) -> None:
        """See HostLink. A copy on a CPU is made by the caller."""

    def down(self, into: Tensor, source: Tensor) -> Arrival:
        """See HostLink."""
        into.copy_(source)
        return _Made()

    def up(self, into: Tensor, source: Tensor) -> Arrival:
        """See HostLink."""
        into.copy_(source)
        return _Made()

    def follow(self) -> None:
        """See HostLink."""

    def follow_down(self) -> None:
        """See HostLink."""

    def up_in_order(self, into: Tensor, source: Tensor) -> None:
        """See HostLink."""
        into.copy_(source)


class CopiesOnStreams:
    """The link to a GPU: a stream for copies down and one for copies up, which its copy engines run at once.

    cuda: `torch.cuda`, or what stands for it where there is no GPU.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:  # Any: a module
        self._device, self._cuda = device, cuda
        self._down, self._up = cuda.Stream(device), cuda.Stream(device)
        self._pinned = set[int]()

    def zeros(self, numel: int) -> Tensor:
        """See HostLink. Pages are registered: torch's pinned memory is rounded up to a power of two bytes."""
        memory = torch.zeros(numel)
        if not numel:
            return memory
        with self._cuda.device(self._device):
            refused = int(self._cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if not refused:
            self._pinned.add(memory.data_ptr())
        else:
            log.warning(
                "%.1f GB cannot be pinned (error %d): copies take longer", memory.nbytes / 1e9, refused
            )
        return memory

    def release(self, memory: Sequence[Tensor]) -> None:
        """See HostLink."""
        for address in {tensor.data_ptr() for tensor in memory} & self._pinned:
            self._pinned.remove(address)
            self._cuda.cudart().cudaHostUnregister(address)

    def wait_unless_pinned(self, memory: Tensor) -> None:
        """See HostLink. memory: what `zeros` returned, or a part of it."""
        if memory.untyped_storage().data_ptr() not in self._pinned:
            self._event(self._cuda.current_stream(self._device)).synchronize()

    def down(self, into: Tensor, source: Tensor) -> Arrival:
        """See HostLink."""
        self.wait_unless_pinned(into)
        self._down.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._down):
            into.copy_(source, non_blocking=True)
        return self._event(self._down)

    def up(self, into: Tensor, source: Tensor) -> Arrival:
        """See HostLink."""
        self._up.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._up):
            self.up_in_order(into, source)
        return self._event(self._up)

    def follow(self) -> None:
        """See HostLink."""
        self._cuda.current_stream(self._device).wait_stream(self._up)

    def follow_down(self) -> None:
        """See HostLink."""
        self._cuda.current_stream(self._device).wait_stream(self._down)

    def up_in_order(self, into: Tensor, source: Tensor) -> None:
        """See HostLink. torch would round on the CPU, into memory that is not pinned, and wait."""
        self.wait_unless_pinned(source)
        into.copy_(source.to(self._device, non_blocking=True))

    def _event(self, stream: Any) -> Arrival:
        event = self._cuda.Event()
        stream.record_event(event)
        return _UnderWay(event)


def link_to(device: torch.device) -> HostLink:
    """Return the link between the CPU's memory and a device."""
    return CopiesOnStreams(device) if device.type == "cuda" else CopiesAtOnce()


class OffloadedShard:
    """One rank's shard of a group's masters and gradients in the CPU's memory.

    master, gradient: fp32, flat. pieces: the elements that are copied and updated at a time.
    """

    def __init__(self, numel: int, *, link: HostLink) -> None:
        self._link = link
        self.master, self.gradient = link.zeros(numel), link.zeros(numel)
        # At the end of the process the driver's context may be gone, and all is released in any case.
        weakref.finalize(self, link.release, (self.master, self.gradient)).atexit = False
        self.pieces = tuple(
            range(start, min(start + PIECE_NUMEL, numel)) for start in range(0, numel, PIECE_NUMEL)
        )
        self._coming = dict[range, Arrival]()
        self._going = dict[range, Arrival]()

    def begin_down(self, reduced: Tensor) -> None:
        """Begin to copy the reduced gradient from the device."""
        for piece in self.pieces:
            self._coming[piece] = self._link.down(_part(self.gradient, piece), _part(reduced, piece))

    def wait_for_gradient(self, elements: range | None = None) -> None:
        """Wait until these elements of the gradient are here; None for all."""
        for piece in self._within(elements):
            if piece in self._coming:
                self._coming.pop(piece).synchronize()

    def begin_up(self, elements: range, working: Tensor) -> None:
        """Begin to round these elements of the masters to the device's working weights of this shard."""
        for piece in self._within(elements):
            self._going[piece] = self._link.up(_part(working, piece), _part(self.master, piece))

    def finish_up(self, working: Tensor) -> None:
        """Round what was not begun since the masters changed, and wait for all: they may then change again.

        What the device computes from now on finds the working weights there.
        """
        for piece in self.pieces:
            if piece not in self._going:
                self.begin_up(piece, working)
        self._link.follow()
        self.forget_up()

    def forget_up(self) -> None:
        """Wait for copies up, and have `finish_up` make them again: the masters are about to change."""
        for arrival in self._going.values():
            arrival.synchronize()
        self._going.clear()

    def round_in_order(self, working: Tensor) -> None:
        """Round all masters to working weights of this shard that the device needs next."""
        self._link.up_in_order(working, self.master)

    def _within(self, elements: range | None) -> Iterator[range]:
        for piece in self.pieces:
            if elements is None or (elements.start <= piece.start and piece.stop <= elements.stop):
                yield piece


def _part(flat: Tensor, elements: range) -> Tensor:
    return flat[elements.start : elements.stop]
