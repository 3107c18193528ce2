"""Reads and writes the safetensors files of a transformers directory, and the xxh128 sums of its files.

Files are checked against their index before use. The list of checksums has the form of `xxh128sum`, so that
an import finds files that were damaged in transit.

Written files have the header of data files (`format.data_file.safetensors_header`). The bytes are not written
by `HashingWriter`, because an export needs one hash for each file and none for each block, and its tensors
come one after another from an iterator, after the header is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bloomery import durable
from bloomery.checkpoint.format.data_file import safetensors_header
from bloomery.checkpoint.save.direct import memory_of
from bloomery.errors import CheckpointError, require_space, storage_error
from bloomery.interchange.directories import read_object, refuse_damaged
from bloomery.interchange.quantised_weights import Scheme, is_row_format

PLAIN_TYPES = ("F32", "BF16", "F16")
"""The types whose numbers are the weights themselves, not codes for them."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor is, and what its file's header says of it.

    dtype: the name that safetensors gives the type.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """The tensors of a directory by name. Their values are read when they are asked for.

    scheme: how tensors that are codes become weights; None where config.json names no such scheme.
    """

    directory: Path
    tensors: Mapping[str, StoredTensor]
    scheme: Scheme | None = None

    def is_coded(self, name: str) -> bool:
        """Whether a tensor holds codes of the scheme, with their scales beside it."""
        scheme, stored = self.scheme, self.tensors[name]
        if scheme is None or stored.dtype != scheme.dtype or scheme.scale_of(name) not in self.tensors:
            return False
        scale = self.tensors[scheme.scale_of(name)]
        return scale.dtype in PLAIN_TYPES and scale.shape in scheme.scale_shapes(stored.shape)

    def read(self, name: str) -> Tensor:
        """Return a tensor in its stored type, or fp32 weights for codes. Raises CheckpointError if it cannot
        be read.
        """
        if self.scheme is None or not self.is_coded(name):
            return self._stored(name)
        for beside in self.scheme.claims(name):
            is_format = beside.endswith(".weight_format") and beside in self.tensors
            if is_format and not is_row_format(self._stored(beside)):
                where = self.directory / self.tensors[beside].file
                refuse_damaged(where, f"holds {beside}, which says that {name} does not lie row by row")
        return self.scheme.read(name, self._stored)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor that holds no codes, in its stored type."""
        with _opened(self.directory / self.tensors[name].file) as file:
            part: Tensor = file.get_slice(name)[start:stop]
        return part

    def _stored(self, name: str) -> Tensor:
        with _opened(self.directory / self.tensors[name].file) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def are_equal(self, name: str, other: str, *, slice_bytes: int = 64 << 20) -> bool:
        """Whether two tensors have the same shape and values, compared slice by slice."""
        first, second = self.tensors[name], self.tensors[other]
        if first.shape != second.shape:
            return False
        if self.is_coded(name) or self.is_coded(other):
            return torch.equal(self.read(name).float(), self.read(other).float())
        row_bytes = 4 * max(1, torch.Size(first.shape[1:]).numel())
        step = max(1, slice_bytes // row_bytes)
        with (
            _opened(self.directory / first.file) as file,
            _opened(self.directory / second.file) as other_file,
        ):
            mine, theirs = file.get_slice(name), other_file.get_slice(other)
            return all(
                torch.equal(mine[row : row + step].float(), theirs[row : row + step].float())
                for row in range(0, first.shape[0], step)
            )


def open_weights(directory: Path, *, scheme: Scheme | None = None) -> WeightFiles:
    """Return what the files of `directory` hold, read only from their headers.

    scheme: how codes become weights, if config.json says it.
    Raises CheckpointError for files that are missing, damaged, or do not hold what the index says.
    """
    index, single = directory / INDEX, directory / SINGLE
    if index.is_file() and single.is_file():
        raise CheckpointError(
            f"{directory} has both {SINGLE} and {INDEX}.",
            remedy="Programs differ in which of them they take. Remove the one that is not the model.",
        )
    if single.is_file():
        return WeightFiles(directory=directory, tensors=_header(directory, SINGLE), scheme=scheme)
    if not index.is_file():
        raise CheckpointError(
            f"{directory} has no {SINGLE}.",
            remedy="Convert it with transformers: model.save_pretrained(directory).",
        )
    file_of = _weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    for file in dict.fromkeys(file_of.values()):
        for name, stored in _header(directory, file).items():
            if file_of.get(name) != file:
                refuse_damaged(index, f"does not say that {file} holds {name}")
            tensors[name] = stored
    missing = [name for name in file_of if name not in tensors]
    if missing:
        refuse_damaged(index, f"says that {file_of[missing[0]]} holds {missing[0]}, which it does not")
    return WeightFiles(directory=directory, tensors=tensors, scheme=scheme)


def _weight_map(index: Path) -> dict[str, str]:
    file_of = read_object(index).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        refuse_damaged(index, "has no weight_map")
    for name, file in file_of.items():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            refuse_damaged(index, f"puts {name} into {file!r}, which is no file of this directory")
    return dict(file_of)


def _header(directory: Path, file: str) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    with _opened(directory / file) as opened:
        for name in opened.keys():  # noqa: SIM118  — it is not a mapping
            part = opened.get_slice(name)
            tensors[name] = StoredTensor(file=file, dtype=part.get_dtype(), shape=tuple(part.get_shape()))
    return tensors


@contextmanager
def _opened(path: Path) -> Iterator[Any]:  # Any: safetensors has no stubs
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        problem = f"cannot be read: {error}" if path.is_file() else "is missing"
        refuse_damaged(path, problem, error)


CHECKSUMS = "checksums.xxh128"
_LINE = re.compile(r"([0-9a-f]{32})  ([^/\0]+)")
_BLOCK_BYTES = 8 << 20


def write_checksums(directory: Path, *, known: Mapping[str, str]) -> None:
    """List every file of `directory` with its checksum.

    known: checksums that were computed while files were written, by file name.
    """
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    lines = [f"{known.get(name) or _checksum(directory / name)}  {name}\n" for name in names]
    durable.write_new(directory / CHECKSUMS, "".join(lines))


def check_checksums(directory: Path) -> None:
    """Raise CheckpointError if a listed file is missing or was changed; a directory may have no list."""
    path = directory / CHECKSUMS
    if not path.is_file():
        return
    try:
        lines = path.read_bytes().decode("utf-8").splitlines()
    except ValueError as error:
        raise _listrefuse_damaged(path) from error
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            raise _listrefuse_damaged(path)
        file = directory / match[2]
        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing: {path} lists it.", remedy="Fetch or copy the directory again."
            )
        if _checksum(file) != match[1]:
            raise CheckpointError(
                f"{file} is not what was exported: its checksum differs from the one in {path}.",
                remedy="Fetch or copy it again; or if it was changed on purpose, remove its line from there.",
            )


def _listrefuse_damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: a line is not a checksum and a name.",
        remedy="Fetch or copy the directory again; or remove the list if its files are known to be whole.",
    )


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


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
        """The size of the tensor in the file, in bytes."""
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
        require_space(directory, doing="Exporting a model", bytes_needed=total + _MARGIN_BYTES)
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
