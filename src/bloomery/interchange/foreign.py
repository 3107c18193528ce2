"""Matches a DCP or Megatron-DeepSpeed checkpoint's tensors, whatever their prefix, with a recipe's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bloomery.config.model import ModelSection
from bloomery.errors import CheckpointError
from bloomery.interchange.families.family import split_parts
from bloomery.interchange.families.known import family_of, hf_tensors
from bloomery.interchange.foreign_files import METADATA, is_megatron, read_dcp, read_megatron
from bloomery.interchange.tensor_matching import refuse_non_finite
from bloomery.model.shape import ResolvedModel, logical_shapes, resolve

_PLAIN = (torch.float32, torch.bfloat16, torch.float16)

Lazy = Mapping[str, Callable[[], Tensor]]


def is_foreign(directory: Path) -> bool:
    """Whether the directory is a DCP or a Megatron-DeepSpeed checkpoint."""
    return (directory / METADATA).is_file() or is_megatron(directory)


def read_foreign(
    directory: Path, section: ModelSection, *, vocabulary: int, sequence_length: int
) -> tuple[ResolvedModel, Iterator[tuple[str, Tensor]]]:
    """Return the model of `section` with the values of a foreign checkpoint: (logical name, fp32 tensor), in
    order.

    Tensors may have our names or those of transformers, behind any prefix. Rows that pad the vocabulary are
    left out. Raises CheckpointError, with everything that does not fit, before any tensor is read.
    """
    model = resolve(section, vocabulary=vocabulary, sequence_length=sequence_length)
    lazy = read_dcp(directory) if (directory / METADATA).is_file() else read_megatron(directory)
    own = logical_shapes(model)
    prefix = _prefix(lazy, next(iter(own)))
    if prefix is not None:
        _refuse_missing(directory, lazy, [prefix + name for name in own])
        return model, (
            (name, _fitting(directory, name, lazy[prefix + name](), shape)) for name, shape in own.items()
        )
    family = family_of(section, kv_heads=model.kv_heads, ffn=model.ffn)
    entries = tuple(hf_tensors(model, family))
    prefix = _prefix(lazy, entries[0].name)
    if prefix is None:
        raise CheckpointError(
            f"{directory} has neither {next(iter(own))} nor {entries[0].name}, behind any prefix.",
            remedy=f"It has {_some(sorted(lazy))}. Is it a model of another family than the recipe's?",
        )
    _refuse_missing(directory, lazy, [prefix + entry.name for entry in entries])

    def read() -> Iterator[tuple[str, Tensor]]:
        for entry in entries:
            tensor = lazy[prefix + entry.name]()
            wanted = own[entry.parts[0]]
            if len(entry.parts) == 1 and entry.layout == "plain":
                yield entry.parts[0], _fitting(directory, entry.name, tensor, wanted)
                continue
            _refuse_codes(directory, entry.name, tensor)
            for part, value in zip(entry.parts, split_parts(entry, tensor, model), strict=True):
                yield part, _fitting(directory, part, value, own[part])

    return model, read()


def _prefix(lazy: Lazy, name: str) -> str | None:
    """Return what precedes `name` in the checkpoint; None if it is not there. Of several, the shortest
    counts.
    """
    ends = [key.removesuffix(name) for key in lazy if key == name or key.endswith(f".{name}")]
    return min(ends, key=len, default=None)


def _refuse_missing(directory: Path, lazy: Lazy, names: list[str]) -> None:
    missing = [name for name in names if name not in lazy]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} of the recipe's {len(names)} tensors: {_some(missing)}.",
            remedy="Give the recipe of this model: model.layers, tied, bias and so on must be its own.",
        )


def _fitting(directory: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor in fp32, without rows that pad the vocabulary."""
    pads = name.endswith(("embedding.weight", "head.weight", "word_embeddings.weight", "embed_tokens.weight"))
    pads = pads or name.endswith(("lm_head.weight", "wte.weight"))
    if pads and tensor.shape[0] > shape[0] and tuple(tensor.shape[1:]) == shape[1:]:
        tensor = tensor[: shape[0]]
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{name} of {directory} is {tuple(tensor.shape)}, and the recipe's is {shape}.",
            remedy="Give the recipe of this model.",
        )
    _refuse_codes(directory, name, tensor)
    refuse_non_finite(name, tensor, where=str(directory))
    return tensor.float()


def _refuse_codes(directory: Path, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _PLAIN:
        raise CheckpointError(
            f"{name} of {directory} is stored as {tensor.dtype}: codes of quantised weights, or another type "
            "than fp32, bf16 and fp16.",
            remedy="Save the weights themselves in one of these types.",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
