"""Staging: the state copied into an arena as the data files it will be, while the training goes on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bloomery.checkpoint.datafile import DataFile
from bloomery.checkpoint.imagefile import PAGE_BYTES
from bloomery.checkpoint.memory import pieces_of

_STEP_BYTES = 4 << 20
_FIRST_RATE = 1e9
_LEAST_SHARE = 0.1
_SPARE = 2.0
"""A copy that is paced aims at being done this many times sooner than it must."""
_NICENESS = 10


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which files lie where in an arena. offsets: multiples of a page, one for each file."""

    files: tuple[DataFile, ...]
    offsets: tuple[int, ...]
    bytes: int

    @property
    def state_bytes(self) -> int:
        """Bytes of the tensors alone."""
        return sum(entry.nbytes for file in self.files for entry in file.entries)


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
    time takes it easy. Whoever waits for it calls `hurry`.
    """

    def __init__(self, *, throttled: bool) -> None:
        self.throttled = throttled
        self._window_s = 0.0
        self._rate = _FIRST_RATE
        self._share = 1.0
        self._hurried = threading.Event()

    def begin(self, bytes: int, *, window_s: float) -> None:
        """A copy of so many bytes begins, and has about so much time; 0 where that is not known."""
        self._hurried.clear()
        needed_s = bytes / self._rate
        spread = window_s / _SPARE
        self._share = max(_LEAST_SHARE, min(1.0, needed_s / spread)) if spread > 0 else 1.0

    def hurry(self) -> None:
        """Somebody waits: no more pauses."""
        self._hurried.set()

    def worked(self, seconds: float) -> None:
        """A piece was copied in so many seconds: pause as the pace wants it."""
        if self.throttled and self._share < 1.0 and not self._hurried.is_set():
            self._hurried.wait(seconds * (1 / self._share - 1))

    def ended(self, bytes: int, *, worked_s: float) -> None:
        """A copy is done, and took so long without its pauses: the next one is paced by that."""
        if worked_s > 0 and bytes:
            self._rate = bytes / worked_s


@torch.no_grad()
def stage(plan: Plan, arena: memoryview, pace: Pace, *, ready: Any = None) -> float:
    """Copy a plan's entries into an arena, and return the seconds of copying, without pauses.

    ready: an event of the device's stream, after which the tensors hold what is to be saved.
    """
    target = np.frombuffer(arena, dtype=np.uint8)
    worked_s = 0.0
    with _side_stream(ready):
        for file, offset in zip(plan.files, plan.offsets, strict=True):
            position = offset + len(file.header)
            target[offset:position] = np.frombuffer(file.header, dtype=np.uint8)
            for entry in file.entries:
                for piece in pieces_of(entry.tensor):
                    source = np.frombuffer(piece, dtype=np.uint8)
                    for start in range(0, len(source), _STEP_BYTES):
                        part = source[start : start + _STEP_BYTES]
                        begun = time.perf_counter()
                        np.copyto(target[position : position + len(part)], part)  # without Python's lock
                        seconds = time.perf_counter() - begun
                        position += len(part)
                        worked_s += seconds
                        pace.worked(seconds)
    return worked_s


def be_nice() -> None:
    """Let this thread stand back behind those that compute."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


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
