"""Joins logical tensors into a tensor of a Hugging Face model, and splits it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bloomery.model.shape import ResolvedModel, Shape

Layout = Literal["plain", "transposed", "stacked", "stacked_transposed", "interleaved"]


@dataclass(frozen=True, kw_only=True)
class HfTensor:
    """One tensor of a Hugging Face model: its name, our tensors that it is made of, and how."""

    name: str
    parts: tuple[str, ...]
    layout: Layout = "plain"


def stored_shape(entry: HfTensor, shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape of the Hugging Face tensor.

    shapes: shapes of the logical tensors (`logical_shapes`).
    """
    first = shapes[entry.parts[0]]
    rows = sum(shapes[part][0] for part in entry.parts)
    whole = (rows, *first[1:])
    return whole[::-1] if entry.layout in ("transposed", "stacked_transposed") else whole


def join_parts(entry: HfTensor, parts: Sequence[Tensor], model: ResolvedModel) -> Tensor:
    """Return the Hugging Face tensor made of our `parts`."""
    if entry.layout == "plain":
        return parts[0]
    if entry.layout == "transposed":
        return parts[0].t()
    if entry.layout == "stacked":
        return torch.cat(list(parts))
    if entry.layout == "stacked_transposed":
        return torch.cat(list(parts)).t()
    by_head = [part.unflatten(0, (-1, model.head_dim)) for part in parts]  # [heads, d, …]
    return torch.stack(by_head, dim=1).flatten(0, 2)  # [heads · 3 · d, …]


def split_parts(entry: HfTensor, tensor: Tensor, model: ResolvedModel) -> tuple[Tensor, ...]:
    """Return our parts of the Hugging Face `tensor`, the reverse of `join_parts`."""
    if entry.layout == "plain":
        return (tensor,)
    if entry.layout == "transposed":
        return (tensor.t(),)
    if entry.layout == "stacked":
        return tensor.chunk(len(entry.parts))
    if entry.layout == "stacked_transposed":
        return tensor.t().chunk(len(entry.parts))
    by_head = tensor.unflatten(0, (-1, len(entry.parts), model.head_dim))
    return tuple(part.flatten(0, 1) for part in by_head.unbind(1))
