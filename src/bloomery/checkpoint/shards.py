"""Safetensors files written tensor by tensor: never more than one of them is held."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from bloomery.checkpoint.memory import memory_of
from bloomery.events.storage import free_bytes, no_space, storage_error

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ALIGNMENT = 8
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_MARGIN_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A tensor that will come: what a file's header must say before its bytes are there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """What it takes in the file."""
        return prod(self.shape) * self.dtype.itemsize


def write_shards(
    directory: Path,
    planned: Sequence[Planned],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    max_shard_bytes: int,
) -> None:
    """Write `tensors`, which come in the order of `planned`, as transformers names its files.

    Raises StorageError; refuses before the first byte where the space is not there.
    """
    shards = _cut(planned, max_shard_bytes)
    names = _file_names(len(shards))
    total = sum(one.bytes for one in planned)
    try:
        if free_bytes(directory) < total + _MARGIN_BYTES:
            raise no_space(directory, doing="Exporting a model", bytes_needed=total + _MARGIN_BYTES)
        coming = iter(tensors)
        for name, shard in zip(names, shards, strict=True):
            with (directory / name).open("xb") as file:
                _write_one(file, shard, coming)
        if len(shards) > 1:
            weight_map = {one.name: name for name, shard in zip(names, shards, strict=True) for one in shard}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise storage_error(error, path=directory, doing="Exporting a model", bytes_needed=total) from error


def files_of_tensors(directory: Path) -> Mapping[str, str] | None:
    """File of each tensor of a directory that transformers can load; None where it has no safetensors."""
    from safetensors import safe_open

    if (directory / INDEX).is_file():
        return dict(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"])
    if not (directory / SINGLE).is_file():
        return None
    with safe_open(directory / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), SINGLE)


def _write_one(file: BinaryIO, shard: Sequence[Planned], coming: Iterable[tuple[str, Tensor]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for one in shard:
        span = (position, position + one.bytes)
        header[one.name] = {"dtype": _NAMES[one.dtype], "shape": one.shape, "data_offsets": span}
        position += one.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for one, (name, tensor) in zip(shard, coming, strict=False):
        assert (name, tuple(tensor.shape), tensor.dtype) == (one.name, one.shape, one.dtype), "out of order"
        file.write(memory_of(tensor.contiguous()))


def _cut(planned: Sequence[Planned], max_shard_bytes: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    filled = 0
    for one in planned:
        if shards[-1] and filled + one.bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(one)
        filled += one.bytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
