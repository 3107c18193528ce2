"""Reads Megatron-DeepSpeed checkpoints (`layer_LL-model_TT-model_states.pt`).

The names and shapes are BLOOM's, whose transformers form differs only by prefixes. Files are read by
torch.load(weights_only=True), which refuses anything else that they hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bloomery.errors import CheckpointError
from bloomery.interchange.dcp import load_plain

PATTERN = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_SPLIT_BY_COLUMNS = ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight")
_WHOLE = ("norm.weight", "norm.bias", "dense.bias", "dense_4h_to_h.bias")
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
    """Return every tensor by the name that transformers' BLOOM gives it; its ranks' parts are joined when it
    is read.

    Replicated parts (norms, biases after a reduction) must be equal on all ranks up to rounding. Their mean
    is taken, as the tools of that run did. Raises CheckpointError.
    """
    layers: dict[int, dict[int, Path]] = {}
    for path in sorted(directory.glob("layer_*.pt")):
        if match := PATTERN.fullmatch(path.name):
            layers.setdefault(int(match[1]), {})[int(match[2])] = path
    ranks = max((max(files) for files in layers.values()), default=-1) + 1
    for layer, files in layers.items():
        missing = sorted(set(range(ranks)) - set(files))
        if missing:
            raise CheckpointError(
                f"{directory} lacks layer_{layer:02d}-model_{missing[0]:02d}-model_states.pt.",
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
    parts = [_load(path)[name] for path in files]
    if len(parts) == 1:
        return parts[0]
    if name in ("weight", "bias") or name.endswith(_WHOLE) or name.startswith("position_embeddings"):
        return _mean(files, name, parts)
    return torch.cat(parts, dim=1 if name.endswith(_SPLIT_BY_COLUMNS) else 0)


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
