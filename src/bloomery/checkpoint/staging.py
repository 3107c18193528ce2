"""Staging: the state copied into an arena as the data files it will be, while the training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bloomery.checkpoint.arena import Arena
from bloomery.checkpoint.datafile import DataFile
from bloomery.checkpoint.imagefile import PAGE_BYTES
from bloomery.checkpoint.memory import pieces_of

_STEP_BYTES = 4 << 20
_SPARE = 2.0
"""A copy that is paced aims at being done so many times sooner than it must."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which files lie where in an arena. offsets: multiples of a page, one for each file."""

    files: tuple[DataFile, ...]
    offsets: tuple[int, ...]
    bytes: int


def place(files: Sequence[DataFile]) -> Plan:
    """Return where each file lies: one after the other, each from a page on."""
    offsets, position = [], 0
    for file in files:
        offsets.append(position)
        position += file.bytes + -file.bytes % PAGE_BYTES
    return Plan(files=tuple(files), offsets=tuple(offsets), bytes=position)


class Pace:
    """How fast to copy: all at once, or spread over the time until the state is written again.

    Copying takes memory bandwidth and a core from the computing beside it, so a copy that has a whole step's
    time takes it easy, but never falls behind its schedule. Whoever waits for it calls `hurry`.
    """

    def __init__(self, *, throttled: bool) -> None:
        self.throttled = throttled
        self._hurried = threading.Event()
        self._begun = self._seconds_per_byte = 0.0

    def begin(self, bytes: int, *, window_s: float) -> None:
        """A copy of so many bytes begins, and has about so much time; 0 where that is not known."""
        self._hurried.clear()
        self._begun = time.monotonic()
        self._seconds_per_byte = window_s / _SPARE / bytes if bytes else 0.0

    def hurry(self) -> None:
        """Somebody waits: no more pauses."""
        self._hurried.set()

    def copied(self, bytes: int) -> None:
        """So many bytes of this copy are done: pause if that is more than must be by now."""
        early_s = self._begun + bytes * self._seconds_per_byte - time.monotonic()
        if self.throttled and early_s > 0 and not self._hurried.is_set():
            self._hurried.wait(early_s)


@torch.no_grad()
def stage(plan: Plan, arena: Arena, pace: Pace, *, ready: Any = None) -> None:
    """Copy a plan's entries into an arena, telling it how far it is.

    ready: an event of the device's stream, after which the tensors hold what is to be saved.
    """
    target = np.frombuffer(arena.view, dtype=np.uint8)
    with _side_stream(ready):
        for file, offset in zip(plan.files, plan.offsets, strict=True):
            position = offset + len(file.header)
            target[offset:position] = np.frombuffer(file.header, dtype=np.uint8)
            for entry in file.entries:
                for piece in pieces_of(entry.tensor):
                    source = np.frombuffer(piece, dtype=np.uint8)
                    for start in range(0, len(source), _STEP_BYTES):
                        part = source[start : start + _STEP_BYTES]
                        np.copyto(target[position : position + len(part)], part)  # without Python's lock
                        position += len(part)
                        arena.filled = position
                        pace.copied(position)
    arena.filled = plan.bytes


def mark_ready(device: torch.device) -> Any:
    """Return what `stage` waits for on this device: everything that was asked of it so far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _side_stream(ready: Any) -> Any:
    """Copy beside the device's own work, not behind it."""
    if ready is None:
        return torch.no_grad()
    stream = torch.cuda.Stream()
    stream.wait_event(ready)
    return torch.cuda.stream(stream)
