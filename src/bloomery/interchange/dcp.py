"""Reads checkpoints of torch.distributed.checkpoint (DCP), and torch.save files, without running their code.

The metadata of DCP are a pickle. It is unpickled into records without behaviour: class names must be in a
closed list, and none of them becomes the real class. Tensors are read by torch.load(weights_only=True).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bloomery.errors import CheckpointError


def load_plain(path: Path, *, begin: int = 0, length: int | None = None) -> object:
    """Return what torch.save wrote to `path`, or to bytes [begin, begin + length) of it.

    Raises CheckpointError for damage, and for content whose loading would run code of the file.
    """
    try:
        if length is None:
            return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        with path.open("rb") as file:
            file.seek(begin)
            content = file.read(length)
        return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as bad:
        place = f" at byte {begin:,}" if length is not None else ""
        raise CheckpointError(
            f"{path} cannot be read{place} without running what it holds, or is damaged: "
            f"{str(bad).splitlines()[0]}",
            remedy="Take another copy; or save its tensors alone: torch.save({name: tensor}, file).",
        ) from bad


METADATA = ".metadata"
_OF_METADATA = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
KNOWN = frozenset(
    {("torch.distributed.checkpoint.metadata", name) for name in _OF_METADATA}
    | {("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")}
    | {("torch", name) for name in ("Size", "float32", "float64", "float16", "bfloat16", "int64", "int32")}
    | {("torch", name) for name in ("uint8", "int8", "int16", "bool", "float8_e4m3fn", "float8_e5m2")}
    | {("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}
    # Python 3.11.2 pickles a member of an enumeration as getattr(class, name), which becomes a record too.
    | {("builtins", "getattr")}
    | {("pathlib", name) for name in ("PosixPath", "PurePosixPath", "Path")}
)


_DAMAGE = (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, AttributeError, TypeError)
"""The errors that a damaged pickle makes the unpickler raise."""


class PickledObject:
    """Stands for an object of the pickle: it holds its arguments and state, and has no behaviour."""

    def __new__(cls, *arguments: Any) -> PickledObject:  # Any: whatever the pickle says
        """Keep the arguments from which the object would have been made."""
        made = super().__new__(cls)
        made.arguments = arguments
        made.state = {}
        return made

    def __init__(self, *arguments: Any) -> None:
        self.arguments: tuple[Any, ...]
        self.state: dict[str, Any]

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:  # an OrderedDict is filled so
        self.state[key] = value


def read_dcp(directory: Path) -> Mapping[str, Callable[[], Tensor]]:
    """Return every tensor of a DCP directory by name, each read when it is asked for.

    Raises CheckpointError for metadata that are damaged, name an unknown class, or refer to files outside.
    """
    metadata = _metadata(directory / METADATA)
    try:
        stored = dict(_stored(metadata))
        tensors: dict[str, Callable[[], Tensor]] = {}
        for name, described in metadata.state["state_dict_metadata"].items():
            if not isinstance(described, PickledObject) or "chunks" not in described.state:
                continue  # bytes, such as a step number or a data loader's state
            size = _numbers(described.state["size"])
            chunks = [
                (_numbers(chunk.state["offsets"]), _numbers(chunk.state["sizes"]))
                for chunk in described.state["chunks"]
            ]
            places = [stored[name, offsets] for offsets, _ in chunks]
            tensors[name] = partial(_assembled, directory, str(name), size, chunks, places)
    except (KeyError, AttributeError, TypeError) as odd:
        raise CheckpointError(
            f"{directory / METADATA} does not describe a checkpoint as torch 2 writes them ({odd!r}).",
            remedy="Save it again with torch.distributed.checkpoint.save of a recent torch.",
        ) from odd
    return tensors


class _Unpickler(pickle.Unpickler):
    """Resolves known names to records without behaviour, and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:  # Any: pickle's contract
        if (module, name) not in KNOWN:
            raise CheckpointError(
                f"The metadata name {module}.{name}, which does not belong there; nothing of it was called.",
                remedy="Do not use this file unless you know who wrote it, and why it says that.",
            )
        return type(name, (PickledObject,), {})


def _metadata(path: Path) -> PickledObject:
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except _DAMAGE as bad:
        raise CheckpointError(
            f"{path} is damaged: {bad}", remedy="Take another copy of the checkpoint."
        ) from bad
    if not isinstance(metadata, PickledObject):
        raise CheckpointError(f"{path} holds no metadata.", remedy="Take another copy of the checkpoint.")
    return metadata


def _stored(metadata: PickledObject) -> Iterator[tuple[tuple[str, tuple[int, ...]], tuple[str, int, int]]]:
    """Yield (name, offsets) → (file, first byte, bytes) for each chunk."""
    for index, info in metadata.state["storage_data"].items():
        offset = index.state.get("offset")
        place = (str(info.state["relative_path"]), int(info.state["offset"]), int(info.state["length"]))
        yield (index.state["fqn"], _numbers(offset) if offset is not None else ()), place


def _numbers(size: Any) -> tuple[int, ...]:  # Any: a torch.Size's record, or a tuple
    values = size.arguments[0] if isinstance(size, PickledObject) else size
    return tuple(int(value) for value in values)


def _assembled(
    directory: Path,
    name: str,
    size: tuple[int, ...],
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]],
    places: list[tuple[str, int, int]],
) -> Tensor:
    whole: Tensor | None = None
    for (offsets, sizes), (file, begin, length) in zip(chunks, places, strict=True):
        part = _read(directory, file, begin, length)
        if tuple(part.shape) != sizes:
            raise CheckpointError(
                f"{directory / file} holds {tuple(part.shape)} for {name}, and its metadata say {sizes}.",
                remedy="Take another copy of the checkpoint.",
            )
        if sizes == size:
            return part
        whole = torch.empty(size, dtype=part.dtype) if whole is None else whole
        target = whole
        for dim, (start, count) in enumerate(zip(offsets, sizes, strict=True)):
            if start < 0 or start + count > size[dim]:
                raise CheckpointError(
                    f"A chunk of {name} lies outside of it.", remedy="Take another copy of the checkpoint."
                )
            target = target.narrow(dim, start, count)
        target.copy_(part)
    if whole is None or sum(torch.Size(sizes).numel() for _, sizes in chunks) != whole.numel():
        raise CheckpointError(
            f"The chunks of {name} do not fill it.", remedy="Take another copy of the checkpoint."
        )
    return whole


def _read(directory: Path, file: str, begin: int, length: int) -> Tensor:
    if Path(file).name != file:
        raise CheckpointError(
            f"The metadata of {directory} name the file {file!r}, outside of it.",
            remedy="Do not use this checkpoint unless you know who wrote it.",
        )
    loaded = load_plain(directory / file, begin=begin, length=length)
    if not isinstance(loaded, Tensor):
        raise CheckpointError(
            f"{directory / file} holds no tensor at byte {begin}.",
            remedy="Take another copy of the checkpoint.",
        )
    return loaded
