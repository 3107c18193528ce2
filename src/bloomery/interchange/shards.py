"""Writes the safetensors files of an export, as transformers names them, one tensor at a time.

They have the header of data files (`format.data_file.safetensors_header`). The bytes are not written by
`HashingWriter`, because an export needs one hash for each file and none for each block, and its tensors come
one after another from an iterator, after the header is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash
from torch import Tensor

from bloomery import durable
from bloomery.checkpoint.format.data_file import safetensors_header
from bloomery.checkpoint.save.direct import memory_of
from bloomery.errors import free_bytes, no_space, storage_error

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ALIGNMENT = 8
_MARGIN_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """A tensor that will be written, as the file's header describes it before the values exist."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The number of bytes that the tensor takes in the file."""
        return prod(self.shape) * self.dtype.itemsize


def write_shards(
    directory: Path,
    planned: Sequence[PlannedTensor],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    max_shard_bytes: int,
) -> dict[str, str]:
    """Write `tensors` into files of at most `max_shard_bytes`, and return each file's xxh3-128 by name.

    tensors: (name, values), in the order of `planned`.
    The files are synced; the caller syncs the directory. Raises StorageError before the first byte is written
    if the disk has not enough space.
    """
    shards = _cut(planned, max_shard_bytes)
    names = _file_names(len(shards))
    total = sum(tensor.bytes for tensor in planned)
    checksums: dict[str, str] = {}
    try:
        if free_bytes(directory) < total + _MARGIN_BYTES:
            raise no_space(directory, doing="Exporting a model", bytes_needed=total + _MARGIN_BYTES)
        coming = iter(tensors)
        for name, shard in zip(names, shards, strict=True):
            with durable.open_new(directory / name) as file:
                checksums[name] = _write_one(file, shard, coming)
        if len(shards) > 1:
            weight_map = {
                tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
            }
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            durable.write_new(directory / INDEX, json.dumps(index, indent=2) + "\n")
    except OSError as error:
        raise storage_error(error, path=directory, doing="Exporting a model", bytes_needed=total) from error
    return checksums


def _write_one(file: BinaryIO, shard: Sequence[PlannedTensor], coming: Iterable[tuple[str, Tensor]]) -> str:
    described = [(plan.name, str(plan.dtype).removeprefix("torch."), plan.shape) for plan in shard]
    header, _ = safetensors_header(described, alignment=_ALIGNMENT)
    digest = xxhash.xxh3_128()

    def write(content: bytes | memoryview) -> None:
        file.write(content)
        digest.update(content)

    write(header)
    for plan, (name, tensor) in zip(shard, coming, strict=False):
        assert (name, tuple(tensor.shape), tensor.dtype) == (plan.name, plan.shape, plan.dtype), (
            "out of order"
        )
        write(memory_of(tensor.contiguous()))
    return digest.hexdigest()


def _cut(planned: Sequence[PlannedTensor], max_shard_bytes: int) -> list[list[PlannedTensor]]:
    shards: list[list[PlannedTensor]] = [[]]
    filled = 0
    for tensor in planned:
        if shards[-1] and filled + tensor.bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.bytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
