"""Hugging Face models: export with the logits verified, and import.

Three families cover what our decoder can be: Llama, BLOOM and GPT-2. Tensors are streamed, one at a time, and
the logits are compared in a process of its own (see `agreement`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from bloomery.checkpoint.agreement import Way, agreement
from bloomery.checkpoint.families import (
    HfTensor,
    family_of,
    hf_config,
    hf_tensors,
    joined,
    section_from,
    separated,
)
from bloomery.checkpoint.load import read_model
from bloomery.checkpoint.shards import Planned, files_of_tensors, write_shards
from bloomery.config.model import ModelSection
from bloomery.errors import CheckpointError
from bloomery.model.decoder import Decoder, logical_parameters
from bloomery.model.names import logical_shapes
from bloomery.model.resolve import ResolvedModel, resolve

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Describe = Callable[..., dict[str, Any]]  # Any: a JSON object


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export wrote, and how far its logits were from ours."""

    directory: Path
    family: str
    parameters: int
    largest_difference: float
    tolerance: float


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A Hugging Face model in our words. `tensors` reads the files as it is iterated."""

    model: ModelSection
    resolved: ResolvedModel
    family: str
    tensors: Iterator[tuple[str, Tensor]]
    tokenizer: Path | None


def export(
    model: ResolvedModel,
    checkpoint: Path,
    directory: Path,
    *,
    tokenizer: Path | None = None,
    end_of_document: str = "<|endoftext|>",
    dtype: str = "fp32",
    max_shard_bytes: int = 4 * 2**30,
    describe: Describe = hf_config,
    way: Way = "auto",
) -> Exported:
    """Write the model saved at `checkpoint` in the form that transformers loads, and prove it.

    directory: must not exist; it appears only once the files were loaded by transformers and gave our logits.
    dtype: of the stored weights; other than fp32 it rounds, and what is verified is the rounded model.
    describe: makes config.json's contents. way: how the logits are compared. Holds the largest tensor and
    little else. Raises ExportRefused, leaving nothing behind.
    """
    if directory.exists():
        raise CheckpointError(
            f"{directory} exists already.", remedy="Choose another directory, or remove it."
        )
    family = family_of(model.section, kv_heads=model.kv_heads, ffn=model.ffn)
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    partial.mkdir(parents=True)
    stored = DTYPES[dtype]
    try:
        entries = tuple(hf_tensors(model, family))
        planned = [
            Planned(name=entry.name, shape=shape, dtype=stored)
            for entry, shape in zip(entries, _hf_shapes(model, entries), strict=True)
        ]
        names = [part for entry in entries for part in entry.parts]
        tensors = _in_hf_form(model, entries, read_model(checkpoint, names=names), stored)
        write_shards(partial, planned, tensors, max_shard_bytes=max_shard_bytes)
        eod_id = _write_tokenizer(partial, tokenizer, end_of_document, model)
        _write_config(partial, describe(model, family=family, dtype=stored, end_of_document=eod_id))
        found = agreement(model, checkpoint, partial, dtype=stored, way=way)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already if it was renamed
    return Exported(
        directory=directory,
        family=family,
        parameters=sum(torch.Size(shape).numel() for shape in logical_shapes(model).values()),
        largest_difference=found.largest,
        tolerance=found.tolerance,
    )


def import_(directory: Path) -> Imported:
    """Read a Hugging Face model of one of the three families, as a model section and logical tensors.

    Raises CheckpointError for what our decoder does not compute, naming the setting.
    """
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise CheckpointError(
            f"{directory} has no config.json.", remedy="Give a directory written by save_pretrained."
        )
    config = json.loads(config_file.read_text(encoding="utf-8"))
    section = section_from(config)
    resolved = resolve(section, vocabulary=int(section.vocabulary), sequence_length=1)
    family = family_of(section, kv_heads=resolved.kv_heads, ffn=resolved.ffn)
    tokenizer = directory / "tokenizer.json"
    return Imported(
        model=section,
        resolved=resolved,
        family=family,
        tensors=_read_logical(directory, resolved, family),
        tokenizer=tokenizer if tokenizer.is_file() else None,
    )


def fill(decoder: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy logical tensors into `decoder`. Raises CheckpointError unless they are exactly its own."""
    missing = {logical.name: logical for logical in logical_parameters(decoder)}
    for name, tensor in tensors:
        logical = missing.pop(name, None)
        if logical is None:
            raise CheckpointError(
                f"The tensor {name} does not belong to this model, or comes twice.",
                remedy="Check that the recipe and the weights are of the same run.",
            )
        if logical.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} is {tuple(tensor.shape)}, but the model's is {logical.shape}.",
                remedy="Check that the recipe and the weights are of the same run.",
            )
        logical.tensor.copy_(tensor)
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors are missing, {next(iter(missing))} among them.",
            remedy="Check that the recipe and the weights are of the same run.",
        )


def _hf_shapes(model: ResolvedModel, entries: Iterable[HfTensor]) -> Iterator[tuple[int, ...]]:
    """The shape of each HF tensor, found out on the device 'meta'."""
    shapes = logical_shapes(model)
    for entry in entries:
        parts = [torch.empty(shapes[part], device="meta") for part in entry.parts]
        yield tuple(joined(entry, parts, model).shape)


def _in_hf_form(
    model: ResolvedModel,
    entries: Iterable[HfTensor],
    tensors: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Each HF tensor, from its logical parts, which come in the order of the entries."""
    for entry in entries:
        parts = []
        for wanted in entry.parts:
            name, tensor = next(tensors)
            assert name == wanted, "read in this order"
            parts.append(tensor.to(dtype))
        yield entry.name, joined(entry, parts, model)


def _write_tokenizer(
    directory: Path, tokenizer: Path | None, end_of_document: str, model: ResolvedModel
) -> int | None:
    """Copy the tokenizer in the form transformers loads; the end-of-document token's id, if there is one."""
    if tokenizer is None:
        return None
    content = json.loads(tokenizer.read_text(encoding="utf-8"))
    vocabulary = dict(content["model"]["vocab"])
    vocabulary.update({added["content"]: added["id"] for added in content.get("added_tokens", ())})
    if end_of_document not in vocabulary:
        raise CheckpointError(
            f"{tokenizer} has no token {end_of_document!r}.",
            remedy="Set data.end_of_document_token to the token that ends a document.",
        )
    shutil.copyfile(tokenizer, directory / "tokenizer.json")
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_document,
        "eos_token": end_of_document,
        "clean_up_tokenization_spaces": False,
    }
    if model.section.position == "learned":
        settings["model_max_length"] = model.max_positions
    _write_json(directory / "tokenizer_config.json", settings)
    return int(vocabulary[end_of_document])


def _write_config(directory: Path, config: Mapping[str, Any]) -> None:
    _write_json(directory / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
    _write_json(directory / "generation_config.json", generation)


def _read_logical(directory: Path, model: ResolvedModel, family: str) -> Iterator[tuple[str, Tensor]]:
    file_of = files_of_tensors(directory)
    if file_of is None:
        raise CheckpointError(
            f"{directory} has no model.safetensors.",
            remedy="Convert it with transformers: model.save_pretrained(directory).",
        )
    for entry in hf_tensors(model, family):
        stored = _stored_name(entry, file_of, directory)
        with safe_open(directory / file_of[stored], framework="pt") as file:
            tensor = file.get_tensor(stored).float()
        yield from zip(entry.parts, separated(entry, tensor, model), strict=True)


def _stored_name(entry: HfTensor, file_of: Mapping[str, str], directory: Path) -> str:
    """The entry's name in the files: those of a bare base model leave out its prefix."""
    for name in (entry.name, entry.name.partition(".")[2]):
        if name in file_of:
            return name
    raise CheckpointError(
        f"{directory} lacks the tensor {entry.name}.", remedy="Check that all of its files are there."
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
