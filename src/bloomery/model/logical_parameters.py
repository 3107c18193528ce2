"""The logical tensors of a decoder, as checkpoints and exports name them, and where modules store them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from bloomery.model.attention import Attention
from bloomery.model.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class LogicalParameter:
    """One logical tensor, and where it is stored: rows `row_start` … of `parameter`, with all columns."""

    name: str
    parameter: nn.Parameter
    parameter_name: str
    row_start: int
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical tensor's shape."""
        return (self.rows, *self.parameter.shape[1:])

    @property
    def tensor(self) -> Tensor:
        """A view of the rows as they are stored now; writing to it writes the parameter."""
        return self.parameter.data[self.row_start : self.row_start + self.rows]


def logical_parameters(decoder: Decoder) -> Iterator[LogicalParameter]:
    """Yield every parameter's logical tensors, in the order of `decoder.named_parameters()`.

    Together they cover each stored parameter's rows exactly once.
    """
    for stored, parameter in decoder.named_parameters():
        row_start = 0
        for name, rows in _rows_within(decoder, stored, parameter):
            yield LogicalParameter(
                name=name, parameter=parameter, parameter_name=stored, row_start=row_start, rows=rows
            )
            row_start += rows


def _rows_within(decoder: Decoder, stored: str, parameter: nn.Parameter) -> Iterator[tuple[str, int]]:
    """Yield the logical names and row counts inside one stored parameter, in order."""
    owner_name, _, rest = stored.rpartition("attention.qkv.")
    if owner_name:
        attention = cast(Attention, decoder.get_submodule(f"{owner_name}attention"))
        for part, heads in (
            ("query", attention.heads),
            ("key", attention.kv_heads),
            ("value", attention.kv_heads),
        ):
            yield f"{owner_name}attention.{part}.{rest}", heads * attention.head_dim
        return
    owner_name, _, rest = stored.rpartition("mlp.expand.")
    if owner_name:
        parts = ("gate", "up") if decoder.model.section.activation == "swiglu" else ("up",)
        for part in parts:
            yield f"{owner_name}mlp.{part}.{rest}", parameter.shape[0] // len(parts)
        return
    yield stored, parameter.shape[0]
