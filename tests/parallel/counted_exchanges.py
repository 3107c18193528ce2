"""Counts the collectives and messages that this rank begins, at the level of torch's operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.parallel.mesh import Mesh
from bloomery.plan.collectives import Collective, StepShape, step_collectives

Exchanges = Counter[tuple[str, str, int]]
"""How often each (kind, axis, bytes of the payload) was begun."""

# The operator → the kind, and the places of the tensor and of the process group among its arguments.
KINDS = {
    "c10d.allreduce_": ("all_reduce", 0, 1),
    "c10d._allgather_base_": ("all_gather", 0, 2),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "c10d.reduce_": ("reduce", 0, 1),
    "c10d.broadcast_": ("broadcast", 0, 1),
    "c10d.send": ("send", 0, 1),
    "c10d.recv_": ("receive", 0, 1),
    "_c10d_functional.all_reduce": ("all_reduce", 0, 2),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 0, 2),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0, 3),
}
AXES = ("tensor", "shard", "replica", "data", "embedding")


class CountedExchanges(TorchDispatchMode):
    """Counts while it is entered, on the thread that entered it. An operator that it does not know fails."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.exchanges: Exchanges = Counter()
        self._labels = labels_of(mesh)

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        name = str(operation).removesuffix(".default")
        if name.startswith(("c10d.", "_c10d")) and not name.endswith("wait_tensor"):
            kind, tensor_at, group_at = KINDS[name]
            tensor, group = arguments[tensor_at], arguments[group_at]
            if not isinstance(tensor, Tensor):
                (tensor,) = tensor
            size = tensor.numel() * tensor.element_size()
            if name == "_c10d_functional.all_gather_into_tensor":
                size *= arguments[1]
            group_name = group if isinstance(group, str) else dist.ProcessGroup.unbox(group).group_name
            self.exchanges[kind, self._labels[group_name], size] += 1
        return operation(*arguments, **(keywords or {}))


def labels_of(mesh: Mesh) -> dict[str, str]:
    """The name of each process group that this rank is in → its axis, the first that has the group."""
    labels: dict[str, str] = {}
    for axis in AXES:
        group = getattr(mesh, axis).group
        if group is not None:
            labels.setdefault(group.group_name, axis)
    for channel in mesh.channels.values():
        assert channel.group is not None, "a rank's own channels have groups"
        labels[channel.group.group_name] = "pipeline"
    if mesh.world > 1:
        world = dist.group.WORLD
        assert world is not None, "ranks have met"
        labels[world.group_name] = "world"
    return labels


def planned(shape: StepShape, mesh: Mesh) -> Exchanges:
    """What the plan says of this rank, under the same names of axes."""
    labels = labels_of(mesh)

    def label(one: Collective) -> str:
        if one.axis in ("pipeline", "world"):
            return one.axis
        axis = getattr(mesh, one.axis)
        assert axis.degree == one.ranks, "a group is as large as planned"
        return labels[axis.group.group_name]

    counted: Exchanges = Counter()
    for one in step_collectives(shape, pipeline=mesh.pipeline.index):
        counted[one.kind, label(one), one.payload_bytes] += one.times
    return counted


def differences(seen: Exchanges, expected: Exchanges) -> dict[Any, tuple[int, int]]:
    """(kind, axis, bytes) → (seen, planned), where they are not equal."""
    keys: Iterable[tuple[str, str, int]] = sorted({*seen, *expected})
    return {key: (seen[key], expected[key]) for key in keys if seen[key] != expected[key]}


def zeros_for_tolist(tensor: Tensor) -> list[float]:
    """In place of `Tensor.tolist` of what has no values: a report's numbers are not looked at."""
    return torch.zeros(tensor.shape).numpy().tolist()  # type: ignore[no-any-return]
