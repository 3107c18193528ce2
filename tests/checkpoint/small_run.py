"""A small state to save: two parts, several element types, a tensor in pieces, a value; threads as ranks."""

import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from bloomery.checkpoint.format.state import Box, StateEntry, whole
from bloomery.config.checkpoint import CheckpointSection
from bloomery.events.run_directory import RunDirectory
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave


class Weights:
    """A part with tensors of several types; `fill` gives them values that depend on a number."""

    def __init__(self, *, rows: int = 64, width: int = 96) -> None:
        self.tensors = {
            "model.embedding.weight": torch.zeros(rows, width),
            "model.blocks.0.attention.query.weight": torch.zeros(width, rows),
            "model.scale": torch.zeros(()),
            "model.mask": torch.zeros(5, dtype=torch.bool),
            "model.half": torch.zeros(7, 3, dtype=torch.bfloat16),
            "model.nothing": torch.zeros(0, 4),
        }

    def fill(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for tensor in self.tensors.values():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) > 0.5 if tensor.dtype is torch.bool
                         else torch.randn(tensor.shape, generator=generator))  # fmt: skip

    def state_entries(self) -> Iterable[StateEntry]:
        return [whole(name, tensor) for name, tensor in self.tensors.items()]

    def state_values(self) -> Mapping[str, Any]:
        return {}

    def load_state_values(self, values: Mapping[str, Any]) -> None:
        assert values == {}


class Moments:
    """A peer's own part: one flat buffer that two logical tensors live in, and a count."""

    def __init__(self, *, size: int = 4096) -> None:
        self.flat = torch.zeros(2 * size)
        self.updates = 0
        self._size = size

    def fill(self, number: int) -> None:
        self.flat.copy_(torch.arange(self.flat.numel()) * 0.5 + number)
        self.updates = number

    def state_entries(self) -> Iterable[StateEntry]:
        for number, name in enumerate(("optim.first", "optim.second")):
            tensor = self.flat.narrow(0, number * self._size, self._size).view(-1, 64)
            shape = tuple(tensor.shape)
            yield StateEntry(
                name=name,
                global_shape=shape,
                dtype="float32",
                box=Box((0, 0), shape),
                tensor=tensor,
                scope="peer",
            )

    def state_values(self) -> Mapping[str, Any]:
        return {"updates": self.updates}

    def load_state_values(self, values: Mapping[str, Any]) -> None:
        self.updates = values["updates"]


class Run:
    """Both parts, filled from one number."""

    def __init__(self, *, size: int = 4096) -> None:
        self.weights, self.moments = Weights(), Moments(size=size)
        self.parts = {"model": self.weights, "optim": self.moments}

    def fill(self, number: int) -> "Run":
        self.weights.fill(number)
        self.moments.fill(number)
        return self

    def equals(self, other: "Run") -> bool:
        return (
            all(torch.equal(self.weights.tensors[name], it) for name, it in other.weights.tensors.items())
            and torch.equal(self.moments.flat, other.moments.flat)
            and self.moments.updates == other.moments.updates
        )


class Ranks:
    """Threads as ranks: `gather` returns all values to all, in order."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world, timeout=120)
        self._values: list[object] = [None] * world

    def gather_of(self, rank: int):
        def gather(value):
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return gather

    @staticmethod
    def run(world: int, act) -> list[object]:
        results: list[object] = [None] * world

        def target(rank: int) -> None:
            try:
                results[rank] = act(rank)
            except Exception as error:  # noqa: BLE001  — the test looks at it
                results[rank] = error

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def save_and_sleep(path: str) -> None:
    """Be a trainer that saves once in the background, says who its writer is, and is killed."""
    store = Store(RunDirectory(Path(path)), CheckpointSection(background="on"))
    run = Run()
    store.restore(run.parts)
    store.save(RunStateToSave(run.fill(1).parts, step=1))
    background = store._saver.background
    assert background is not None
    Path(path, "writer").write_text(str(background.writer_pid))
    time.sleep(600)
