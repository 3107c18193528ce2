"""Staging: the state copied into an arena as the data files it will be, while the training goes on."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from bloomery.checkpoint.arena import Arena
from bloomery.checkpoint.share import Share
from bloomery.checkpoint.state import StateEntry
from bloomery.native import library

log = logging.getLogger(__name__)

_STEP_BYTES = 4 << 20
_DEVICE_STEP_BYTES = 32 << 20  # each is waited for, which takes as long as a device needs for a few MB
_SPARE = 2.0
"""A copy that is paced aims at being done so many times sooner than it must."""


class Pace:
    """How fast to copy: all at once, or spread over the time until the state is written again.

    Copying takes memory bandwidth and a core from the computing beside it, so a copy that has a whole step's
    time takes it easy, but never falls behind its schedule. Whoever waits for it calls `hurry`; each copy has
    a pace of its own, so that nothing takes that back. bytes: of the copy, which begins now; window_s: the
    time it has, 0 where that is not known.
    """

    def __init__(self, bytes: int, *, window_s: float, throttled: bool) -> None:
        self._hurried = threading.Event()
        self._begun = time.monotonic()
        self._seconds_per_byte = window_s / _SPARE / bytes if bytes and throttled else 0.0

    def hurry(self) -> None:
        """Somebody waits: no more pauses."""
        self._hurried.set()

    def copied(self, bytes: int) -> None:
        """So many bytes of this copy are done: pause if that is more than must be by now."""
        early_s = self._begun + bytes * self._seconds_per_byte - time.monotonic()
        if self._seconds_per_byte and early_s > 0 and not self._hurried.is_set():
            self._hurried.wait(early_s)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The moment at which a device's tensors hold what is to be saved."""

    device: torch.device
    event: torch.cuda.Event


@torch.no_grad()
def stage(
    share: Share, entries: Sequence[StateEntry], arena: Arena, pace: Pace, *, ready: Ready | None = None
) -> None:
    """Copy what a share has of `entries` into an arena, telling it how far it is.

    ready: what `mark_ready` returned, for tensors on a device. What is told was copied, not only asked for.
    """
    target = torch.frombuffer(arena.view, dtype=torch.uint8)
    copy = _copy_here if ready is None else _copy_from_device
    with _beside(ready) as finished:
        for file in share.files:
            position = file.offset + len(file.header)
            arena.view[file.offset : position] = file.header
            for one in file.pieces:
                for piece in _flat_pieces(one.tensor_in(entries), step_bytes=_step_bytes(ready)):
                    copy(target[position : position + len(piece)], piece)
                    finished()
                    position += len(piece)
                    arena.filled = position
                    pace.copied(position)
    arena.filled = share.bytes


def _copy_here(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy with this thread alone, and without Python's lock: torch would take threads that compute.

    The native copy takes half the time of memcpy's, which reads what it will write, and drives what others
    compute with out of their caches.
    """
    native = library()
    if native is None:
        np.copyto(target.numpy(), source.numpy())
        return
    assert target.is_contiguous() and source.is_contiguous() and len(target) == len(source)
    bytes = ctypes.c_int64(len(source))
    native.bloomery_stream_copy(ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(source.data_ptr()), bytes)


def _copy_from_device(target: torch.Tensor, source: torch.Tensor) -> None:
    """Ask for a copy, which a device's own engine makes where the arena is pinned."""
    target.copy_(source, non_blocking=True)


def mark_ready(device: torch.device) -> Ready | None:
    """Return what `stage` waits for on this device: everything that was asked of it so far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return Ready(device=device, event=event)


def pin(arena: Arena, device: torch.device) -> bool:
    """Let a device copy into an arena by itself, and return whether it can. Else it is slower, and as right.

    For a thread that ends soon: what the driver refuses it remembers of the thread.
    """
    if device.type != "cuda":
        return False
    memory = torch.frombuffer(arena.view, dtype=torch.uint8)
    with torch.cuda.device(device):
        refused = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if refused:
        log.warning("%.1f GB cannot be pinned (error %d): copies take longer", memory.nbytes / 1e9, refused)
    return not refused


def unpin(arena: Arena) -> None:
    """Take `pin` back, before the arena is closed."""
    memory = torch.frombuffer(arena.view, dtype=torch.uint8)
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


@contextmanager
def _beside(ready: Ready | None) -> Iterator[Callable[[], None]]:
    """Copy beside a device's own work, not behind it; yields what waits for the copies asked for so far.

    A new thread's device is the first one, whatever the trainer's is: a stream of that one would neither
    carry the copies of another, nor hold them back until they are ready.
    """
    if ready is None:
        yield lambda: None
        return
    with torch.cuda.device(ready.device):
        stream = torch.cuda.Stream(ready.device)
        stream.wait_event(ready.event)
        with torch.cuda.stream(stream):
            yield stream.synchronize


def _step_bytes(ready: Ready | None) -> int:
    return _STEP_BYTES if ready is None else _DEVICE_STEP_BYTES


def _flat_pieces(tensor: torch.Tensor, *, step_bytes: int) -> Iterator[torch.Tensor]:
    """Yield a tensor's bytes in row-major order, on its device: views where it is plain, else copies."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).view(torch.uint8).split(step_bytes)
        return
    rows = max(1, step_bytes // (tensor[0].numel() * tensor.element_size()))
    for some in tensor.split(rows):
        yield from some.contiguous().reshape(-1).view(torch.uint8).split(step_bytes)
