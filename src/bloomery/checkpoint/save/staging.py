"""Stages a save: copies the state into a shared buffer, laid out as data files, while training goes on."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bloomery.checkpoint.format.deadlines import Deadlines
from bloomery.checkpoint.format.state import SaveResult, StateEntry
from bloomery.checkpoint.save.write_plan import RankWritePlan
from bloomery.checkpoint.writer.shared_buffer import SharedBuffer
from bloomery.errors import BloomeryError
from bloomery.native import library

log = logging.getLogger(__name__)

_COPY_BYTES = 4 << 20
_DEVICE_COPY_BYTES = 32 << 20  # each is waited for, which takes as long as a device needs for a few MB
_SPARE = 2.0
"""A paced copy aims at this multiple of the speed that it needs, so as to end well in time."""


class CopyPace:
    """Spreads a copy over the time until the state is written again, so that it disturbs the training less.

    Copying takes memory bandwidth and a core from the step that computes meanwhile. A paced copy pauses while
    it is ahead of its schedule. A thread that waits for the copy calls `stop_pausing`.

    bytes: of the copy, which begins now. window_s: the time it has; 0 where that is not known, and then the
    copy never pauses. throttled: whether to pause at all.
    """

    def __init__(self, bytes: int, *, window_s: float, throttled: bool) -> None:
        self._pauses_no_more = threading.Event()
        self._begun = time.monotonic()
        self._seconds_per_byte = window_s / _SPARE / bytes if bytes and throttled else 0.0

    def stop_pausing(self) -> None:
        """End the current pause, and make no more: somebody waits for the copy."""
        self._pauses_no_more.set()

    def copied(self, bytes: int) -> None:
        """Note that so many bytes of the copy are done, and pause if that is more than its schedule asks."""
        early_s = self._begun + bytes * self._seconds_per_byte - time.monotonic()
        if self._seconds_per_byte and early_s > 0 and not self._pauses_no_more.is_set():
            self._pauses_no_more.wait(early_s)


@dataclass(kw_only=True)
class PendingSave:
    """A save that has begun. failure, seconds and bytes are set once `over` is.

    order: the request to the writer, as JSON values. texts: further fields of it that are JSON texts already.
    buffer: the number of the shared buffer it uses. run_length_steps: for retention; None where unknown.
    window_s: the time over which the copying may spread.
    staged: set when the state was copied. over: set when the writer has answered and the callback returned.
    """

    step: int
    name: str
    run_length_steps: int | None
    plan: RankWritePlan
    order: dict[str, Any]  # Any: JSON
    texts: Mapping[str, str]
    buffer: int
    pace: CopyPace
    window_s: float
    deadlines: Deadlines
    failure: BloomeryError | None = None
    seconds: float = 0.0
    bytes: int = 0
    staged: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def result(self) -> SaveResult:
        """Return how the save ended. Called once it is over."""
        return SaveResult(
            step=self.step, name=self.name, failure=self.failure, seconds=self.seconds, bytes=self.bytes
        )


@dataclass(frozen=True, kw_only=True)
class StateReadyEvent:
    """A CUDA event after which the device's tensors hold the state that is to be saved."""

    device: torch.device
    event: torch.cuda.Event


@torch.no_grad()
def stage(
    plan: RankWritePlan,
    entries: Sequence[StateEntry],
    buffer: SharedBuffer,
    pace: CopyPace,
    *,
    ready: StateReadyEvent | None = None,
) -> None:
    """Copy what `plan` takes of `entries` into the buffer, and advance `buffer.filled` meanwhile.

    Bytes count as filled once they were copied, not when a device was asked to copy them.
    ready: what `record_state_ready` returned at the save; None for tensors in main memory.
    """
    target = torch.frombuffer(buffer.view, dtype=torch.uint8)
    copy = _copy_in_memory if ready is None else _copy_from_device
    with _side_stream(ready) as synchronize:
        for file in plan.files:
            position = file.offset + len(file.header)
            buffer.view[file.offset : position] = file.header
            for item in file.items:
                for piece in _flat_pieces(item.tensor_in(entries), copy_bytes=_copy_bytes(ready)):
                    copy(target[position : position + len(piece)], piece)
                    synchronize()
                    position += len(piece)
                    buffer.filled = position
                    pace.copied(position)
    buffer.filled = plan.bytes


def _copy_in_memory(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy in this thread, without the GIL: torch's copy would use the threads that compute the step.

    The native copy uses streaming stores. It takes half the time of memcpy, which reads each target line
    before it writes it, and evicts the data of the computing threads from the caches.
    """
    native = library()
    if native is None:
        np.copyto(target.numpy(), source.numpy())
        return
    assert target.is_contiguous() and source.is_contiguous() and len(target) == len(source)
    bytes = ctypes.c_int64(len(source))
    native.bloomery_stream_copy(ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(source.data_ptr()), bytes)


def _copy_from_device(target: torch.Tensor, source: torch.Tensor) -> None:
    """Start a copy, which the device's copy engine makes by itself where the buffer is pinned."""
    target.copy_(source, non_blocking=True)


def record_state_ready(device: torch.device) -> StateReadyEvent | None:
    """Return an event after all work queued on the device so far, for `stage`; None for main memory."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return StateReadyEvent(device=device, event=event)


def pin(buffer: SharedBuffer, device: torch.device) -> bool:
    """Pin a buffer's pages for a CUDA device, and return whether that worked. Unpinned copies are slower.

    Called in a short-lived thread: after a refusal, CUDA keeps the error as the thread's last error.
    """
    if device.type != "cuda":
        return False
    memory = torch.frombuffer(buffer.view, dtype=torch.uint8)
    with torch.cuda.device(device):
        refused = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if refused:
        log.warning("%.1f GB cannot be pinned (error %d): copies take longer", memory.nbytes / 1e9, refused)
    return not refused


def unpin(buffer: SharedBuffer) -> None:
    """Unregister from CUDA the pages of a buffer that `pin` pinned, before the buffer is closed."""
    memory = torch.frombuffer(buffer.view, dtype=torch.uint8)
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


@contextmanager
def _side_stream(ready: StateReadyEvent | None) -> Iterator[Callable[[], None]]:
    """Run the copies of the block on a CUDA stream of their own, after `ready`; yields its `synchronize`.

    A new thread's current device is the first one, whatever the trainer uses. The device is therefore set: a
    stream of another device would neither carry the copies nor order them after `ready`.
    """
    if ready is None:
        yield lambda: None
        return
    with torch.cuda.device(ready.device):
        stream = torch.cuda.Stream(ready.device)
        stream.wait_event(ready.event)
        with torch.cuda.stream(stream):
            yield stream.synchronize


def _copy_bytes(ready: StateReadyEvent | None) -> int:
    return _COPY_BYTES if ready is None else _DEVICE_COPY_BYTES


def _flat_pieces(tensor: torch.Tensor, *, copy_bytes: int) -> Iterator[torch.Tensor]:
    """Yield a tensor's bytes in row-major order, on its device: views where it is contiguous, else copies."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).view(torch.uint8).split(copy_bytes)
        return
    rows = max(1, copy_bytes // (tensor[0].numel() * tensor.element_size()))
    for some in tensor.split(rows):
        yield from some.contiguous().reshape(-1).view(torch.uint8).split(copy_bytes)
