"""Reads checkpoints of torch.distributed.checkpoint (DCP) and Megatron-DeepSpeed, without running code.

A file of torch.save is one as well. The metadata of DCP are a pickle. It is unpickled into records without
behaviour: class names must be in a closed list, and none of them becomes the real class. Tensors are read by
torch.load(weights_only=True), which refuses anything else that the files hold.

Megatron-DeepSpeed's files are `layer_LL-model_TT-model_states.pt`. Their names and shapes are BLOOM's, whose
transformers form differs only by prefixes.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bloomery.errors import CheckpointError

_DAMAGE = (
    *(pickle.UnpicklingError, EOFError, ValueError, LookupError, AttributeError, TypeError),
    *(OverflowError, MemoryError),  # of lengths that the file does not have
)
"""The errors that a damaged pickle makes the unpickler raise."""


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
    except (OSError, RuntimeError, *_DAMAGE) as bad:
        place = f" at byte {begin:,}" if length is not None else ""
        said = str(bad).strip().partition("\n")[0] or type(bad).__name__
        raise CheckpointError(
            f"{path} cannot be read{place} without running what it holds, or is damaged: {said}",
            remedy="Take another copy; or save only its tensors: torch.save({name: tensor}, file).",
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
    except (LookupError, AttributeError, TypeError, ValueError) as odd:
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
        if not len(offsets) == len(sizes) == len(size) or any(
            start < 0 or start + count > end for start, count, end in zip(offsets, sizes, size, strict=True)
        ):
            raise CheckpointError(
                f"A chunk of {name} lies outside of it.", remedy="Take another copy of the checkpoint."
            )
        if whole is None:
            if sum(prod(sizes) for _, sizes in chunks) != prod(size):
                raise _unfilled(name)
            whole = torch.empty(size, dtype=part.dtype)
        target = whole
        for dim, (start, count) in enumerate(zip(offsets, sizes, strict=True)):
            target = target.narrow(dim, start, count)
        target.copy_(part)
    if whole is None:
        raise _unfilled(name)
    return whole


def _unfilled(name: str) -> CheckpointError:
    return CheckpointError(
        f"The chunks of {name} do not fill it.", remedy="Take another copy of the checkpoint."
    )


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


PATTERN = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_SPLIT_BY_COLUMNS = ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight")
_WHOLE = ("norm.weight", "norm.bias", "dense.bias", "dense_4h_to_h.bias")
_SHOWN = 8
"""The most shapes that a message names."""
_RENAMED = {
    "word_embeddings.weight": "transformer.word_embeddings.weight",
    "word_embeddings.norm.weight": "transformer.word_embeddings_layernorm.weight",
    "word_embeddings.norm.bias": "transformer.word_embeddings_layernorm.bias",
    "position_embeddings.weight": "transformer.wpe.weight",
}


def is_megatron(directory: Path) -> bool:
    """Whether the directory looks like a Megatron-DeepSpeed checkpoint."""
    return any(PATTERN.fullmatch(path.name) for path in directory.glob("layer_*.pt"))


def read_megatron(directory: Path) -> Mapping[str, Callable[[], Tensor]]:
    """Return a function for each tensor, by the name that transformers' BLOOM gives it.

    The function reads the parts of all tensor-parallel ranks and returns the whole tensor.

    Replicated parts (norms, biases after a reduction) must be equal on all ranks up to rounding. Their mean
    is taken, as the tools of that run did. Raises CheckpointError.
    """
    layers: dict[int, dict[int, Path]] = {}
    for path in sorted(directory.glob("layer_*.pt")):
        if match := PATTERN.fullmatch(path.name):
            layers.setdefault(int(match[1]), {})[int(match[2])] = path
    ranks = max((max(files) for files in layers.values()), default=-1) + 1
    for layer, files in layers.items():
        missing = next((rank for rank in range(ranks) if rank not in files), None)
        if missing is not None:
            raise CheckpointError(
                f"{directory} lacks layer_{layer:02d}-model_{missing:02d}-model_states.pt.",
                remedy="Bring all files of the checkpoint into one directory.",
            )
    tensors: dict[str, Callable[[], Tensor]] = {}
    block = 0
    for _, files in sorted(layers.items()):
        ordered = [files[rank] for rank in range(ranks)]
        names = tuple(_load(ordered[0]))
        is_block = "input_layernorm.weight" in names
        for name in names:
            tensors[_hugging_face_name(name, names, block)] = partial(_joined, ordered, name)
        block += is_block
    return tensors


def _hugging_face_name(name: str, names: Sequence[str], block: int) -> str:
    if "input_layernorm.weight" in names:
        return f"transformer.h.{block}.{name}"
    if name in _RENAMED:
        return _RENAMED[name]
    return f"transformer.ln_f.{name}" if name in ("weight", "bias") else name


def _joined(files: Sequence[Path], name: str) -> Tensor:
    parts = [_part(path, name) for path in files]
    if len(parts) == 1:
        return parts[0]
    try:
        if name in ("weight", "bias") or name.endswith(_WHOLE) or name.startswith("position_embeddings"):
            return _mean(files, name, parts)
        return torch.cat(parts, dim=1 if name.endswith(_SPLIT_BY_COLUMNS) else 0)
    except (RuntimeError, IndexError) as apart:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts[:_SHOWN])
        raise CheckpointError(
            f"{name} of {files[0].name} and of the other ranks do not fit together: {shapes}.",
            remedy="Check that all files are of one checkpoint.",
        ) from apart


def _part(path: Path, name: str) -> Tensor:
    tensors = _load(path)
    if name not in tensors:
        raise CheckpointError(
            f"{path} lacks the tensor {name}, which other ranks have.",
            remedy="Check that all files are of one checkpoint.",
        )
    return tensors[name]


def _mean(files: Sequence[Path], name: str, parts: Sequence[Tensor]) -> Tensor:
    stacked = torch.stack([part.float() for part in parts])
    mean = stacked.mean(0)
    apart = float((stacked - mean).abs().max())
    if apart > 1e-2 * max(1.0, float(mean.abs().max())):
        raise CheckpointError(
            f"{name} of {files[0].name} should be equal on all ranks, and differs by {apart:.3g}.",
            remedy="Check that all files are of one checkpoint.",
        )
    return mean.to(parts[0].dtype)


def _load(path: Path) -> Mapping[str, Tensor]:
    return dict(_tensors(path, load_plain(path)))


def _tensors(path: Path, content: object) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds no tensors by name.", remedy="Take another copy of the file.")
    for name, value in content.items():
        if isinstance(value, Tensor):
            yield str(name), value
