"""Staging: the state copied into an arena as the data files it will be, while the training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from bloomery.checkpoint.arena import Arena
from bloomery.checkpoint.memory import pieces_of
from bloomery.checkpoint.share import Share
from bloomery.checkpoint.state import StateEntry

_STEP_BYTES = 4 << 20
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


@torch.no_grad()
def stage(
    share: Share, entries: Sequence[StateEntry], arena: Arena, pace: Pace, *, ready: Any = None
) -> None:
    """Copy what a share has of `entries` into an arena, telling it how far it is.

    ready: what `mark_ready` returned, for tensors on a device.
    """
    target = np.frombuffer(arena.view, dtype=np.uint8)
    with _beside(ready):
        for file in share.files:
            position = file.offset + len(file.header)
            target[file.offset : position] = np.frombuffer(file.header, dtype=np.uint8)
            for one in file.pieces:
                for piece in pieces_of(one.tensor_in(entries)):
                    source = np.frombuffer(piece, dtype=np.uint8)
                    for start in range(0, len(source), _STEP_BYTES):
                        part = source[start : start + _STEP_BYTES]
                        np.copyto(target[position : position + len(part)], part)  # without Python's lock
                        position += len(part)
                        arena.filled = position
                        pace.copied(position)
    arena.filled = share.bytes


def mark_ready(device: torch.device) -> Any:
    """Return what `stage` waits for on this device: everything that was asked of it so far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _beside(ready: Any) -> AbstractContextManager[Any]:
    """Copy beside the device's own work, not behind it."""
    if ready is None:
        return nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_event(ready)
    return torch.cuda.stream(stream)
