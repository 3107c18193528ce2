"""Makes a rank fail from within: Python imports this at its start where its directory is in PYTHONPATH.

A thread waits for the file `$PLANTED_FAULTS/rank-N`, which names a function of the program and has code that
runs once before it, when an expression is true; where it names none, the code runs in the thread. Both see
the function's `arguments`, a list.
"""

from __future__ import annotations

import functools
import importlib
import json
import mmap
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.05


def _await_plant(directory: Path, rank: str) -> None:
    while "bloomery.train.loop" not in sys.modules:  # a process beside the rank never imports it
        time.sleep(_POLL_S)
    while True:
        with suppress(OSError, ValueError):
            plant = json.loads((directory / f"rank-{rank}").read_text())
            (directory / f"rank-{rank}").unlink()
            if plant["place"]:
                _replace_once(plant["place"], plant.get("when", "True"), plant["code"])
            else:
                _run(plant["code"], [])
        time.sleep(_POLL_S)


def _replace_once(place: str, when: str, code: str) -> None:
    module, _, path = place.partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)

    @functools.wraps(original)
    def planted(*given, **named):
        arguments = list(given)
        if eval(when, globals() | {"arguments": arguments}):
            setattr(owner, name, original)
            _run(code, arguments)
        return original(*arguments, **named)

    setattr(owner, name, planted)


def _run(code: str, arguments: list) -> None:
    exec(compile(code, "<planted>", "exec"), globals() | {"__name__": "planted", "arguments": arguments})


def fill_shared_memory() -> None:
    """Take all free space of /dev/shm, which the test gave to this run alone."""
    facts = os.statvfs("/dev/shm")
    assert facts.f_blocks * facts.f_frsize < 1 << 30, "not a private one"
    with Path("/dev/shm/planted").open("ab", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 65536):
            pass


def touch_missing_page() -> None:
    """Write to a page of /dev/shm for which there is no space: SIGBUS."""
    with Path("/dev/shm/sparse").open("w+b") as file:
        file.truncate(1 << 22)
        with mmap.mmap(file.fileno(), 1 << 22) as pages:
            for start in range(0, 1 << 22, 4096):
                pages[start] = 1


def use_up_memory() -> None:
    """Take memory until the kernel kills this process."""
    taken = []
    while True:
        taken.append(bytearray(1 << 24))


class GreedyDataset:
    """A dataset whose worker process takes memory until the kernel kills it, or returns tensors of 64 MB."""

    def __init__(self, *, memory: bool) -> None:
        self._memory = memory

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> object:
        import torch

        if self._memory:
            use_up_memory()
        return torch.ones(1 << 24)


def load_with_worker(*, memory: bool) -> None:
    """Load through torch's DataLoader with one worker, which dies."""
    from torch.utils.data import DataLoader

    for _ in DataLoader(GreedyDataset(memory=memory), num_workers=1, timeout=60):
        pass


def cut_connections() -> None:
    """Shut down every TCP connection of this process."""
    for number in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError), socket.socket(fileno=os.dup(int(number.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # raises for a socket that listens, which no cut touches
                connection.shutdown(socket.SHUT_RDWR)


def raise_errno(number: int, path: str) -> None:
    """Raise what a call of the system raises that fails with this number."""
    raise OSError(number, os.strerror(number), path)


if "PLANTED_FAULTS" in os.environ and "RANK" in os.environ:
    threading.Thread(
        target=_await_plant, args=(Path(os.environ["PLANTED_FAULTS"]), os.environ["RANK"]), daemon=True
    ).start()
