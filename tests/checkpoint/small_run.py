"""A small state to save: two parts, several element types, a tensor in pieces, a value."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bloomery.checkpoint.state import Box, StateEntry, whole


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
