"""Exports models to Hugging Face directories, with the logits verified, and imports them.

Four families cover what our decoder can be: Llama, Qwen3, BLOOM and GPT-2. Tensors are streamed, one at a
time, and a separate process compares the logits (see `logits_check`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bloomery import durable
from bloomery.checkpoint.load.loader import read_model
from bloomery.config.model import ModelSection
from bloomery.data.tokenizer import load_tokenizer
from bloomery.data.tokenizer_files import is_json, tokenizer_in
from bloomery.errors import CheckpointError, storage_error
from bloomery.events.records import ProgressCallback, counting, ignore_progress
from bloomery.interchange.directories import partial_directory, read_object
from bloomery.interchange.families import family_in, family_of, hf_config, hf_tensors, section_from
from bloomery.interchange.families.family import Family, HfTensor, stored_shape
from bloomery.interchange.generation_files import (
    export_generation_files,
    export_sentencepiece_model,
    token_ids,
)
from bloomery.interchange.logits_check import CompareMethod, check_logits
from bloomery.interchange.quantised_weights import scheme_of
from bloomery.interchange.tensor_matching import (
    Match,
    as_stored,
    join_parts,
    matches,
    read_logical,
    refuse_non_finite,
)
from bloomery.interchange.weight_files import (
    PlannedTensor,
    WeightFiles,
    check_checksums,
    open_weights,
    write_checksums,
    write_shards,
)
from bloomery.model.decoder import Decoder
from bloomery.model.logical_parameters import logical_parameters
from bloomery.model.shape import ResolvedModel, logical_shapes, resolve

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
    """A Hugging Face model as the settings of a recipe's [model] and as logical tensors.

    tensors: pairs of a name and a tensor; each is read from the files when it is asked for.
    """

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
    way: CompareMethod = "auto",
    companions: Path | None = None,
    progress: ProgressCallback = ignore_progress,
) -> Exported:
    """Write the model saved at `checkpoint` in the form that transformers loads, and check that it does.

    directory: must not exist; it appears only once transformers loaded the files and computed our logits.
    dtype: type of the stored weights; other types than fp32 round, and then the rounded model is verified.
    max_shard_bytes: largest size of one file.
    describe: makes the contents of config.json.
    way: how the logits are compared.
    companions: the files of an imported model that are given back (`generation_files_of`); None for none.
    progress: called with the bytes that are read.
    It holds little more than the largest tensor in memory. Raises ExportRefused, leaving nothing behind.
    """
    if directory.exists():
        raise CheckpointError(
            f"{directory} exists already.", remedy="Choose another directory, or remove it."
        )
    family = family_of(model.section, kv_heads=model.kv_heads, ffn=model.ffn)
    stored = DTYPES[dtype]
    parameters = sum(torch.Size(shape).numel() for shape in logical_shapes(model).values())
    read = counting(progress, "exporting", 4 * parameters)
    with partial_directory(directory) as partial:
        entries = tuple(hf_tensors(model, family))
        shapes = logical_shapes(model)
        planned = [
            PlannedTensor(name=entry.name, shape=stored_shape(entry, shapes), dtype=stored)
            for entry in entries
        ]
        names = [part for entry in entries for part in entry.parts]
        weights = watched(read_model(checkpoint, names=names), read)
        tensors = _in_hf_form(model, entries, weights, stored, checkpoint)
        checksums = write_shards(partial, planned, tensors, max_shard_bytes=max_shard_bytes)
        eod_id = _write_tokenizer(partial, tokenizer, end_of_document, model)
        config = describe(
            model, family=family, dtype=str(stored).removeprefix("torch."), end_of_document=eod_id
        )
        _write_config(partial, config | (token_ids(companions) if companions else {}))
        if companions:
            export_generation_files(companions, partial)
        write_checksums(partial, known=checksums)
        check = check_logits(model, checkpoint, partial, dtype=stored, way=way)
        _publish(partial, directory)
    return Exported(
        directory=directory,
        family=family,
        parameters=parameters,
        largest_difference=check.largest,
        tolerance=check.tolerance,
    )


def watched(
    tensors: Iterator[tuple[str, Tensor]], read: Callable[[int], None]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) pairs unchanged. read: called with the number of bytes of each tensor."""
    for name, tensor in tensors:
        read(tensor.nbytes)
        yield name, tensor
        del tensor  # or it would be held while the next one is read


@dataclass(frozen=True, kw_only=True)
class MatchedModel:
    """A Hugging Face model: our model section, and where its files hold our tensors. No values are read."""

    section: ModelSection
    resolved: ResolvedModel
    family: Family
    files: WeightFiles
    matched: tuple[Match, ...]


def import_(directory: Path) -> Imported:
    """Read a Hugging Face model of a known family, as a model section and logical tensors.

    Raises CheckpointError for what our decoder does not compute, naming the setting or the tensor, and for
    files that are damaged or do not belong together. Weights are checked to be finite as they are read.
    """
    check_checksums(directory)
    opened = open_model(directory)
    return Imported(
        model=opened.section,
        resolved=opened.resolved,
        family=opened.family.name,
        tensors=read_logical(opened.matched, model=opened.resolved, files=opened.files),
        tokenizer=tokenizer_in(directory),
    )


def open_model(directory: Path, *, section: ModelSection | None = None) -> MatchedModel:
    """Read config.json and the headers of the weights, and match them with our tensors.

    section: the model to fill, whose shape is that of config.json; None takes config.json's.
    Raises CheckpointError as `import_`.
    """
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise CheckpointError(
            f"{directory} has no config.json.", remedy="Give a directory written by save_pretrained."
        )
    if (directory / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{directory} has an adapter beside the model (adapter_config.json).",
            remedy="Merge it first: model.merge_and_unload(), then model.save_pretrained(directory).",
        )
    content = read_object(config_file)
    family = family_in(content)
    scheme = scheme_of(content, transposes=family.transposes)
    own = section_from(content)
    files = open_weights(directory, scheme=scheme)
    own = as_stored(own, family, files)
    if section is not None and section.tied and not own.tied:
        raise CheckpointError(
            f"{directory} stores a head that differs from its embedding, and model.tied is true.",
            remedy="Set model.tied = false, or leave it out.",
        )
    vocabulary = int(own.vocabulary)
    resolved = resolve(section or own, vocabulary=vocabulary, sequence_length=1)
    return MatchedModel(
        section=own,
        resolved=resolved,
        family=family,
        files=files,
        matched=matches(tuple(hf_tensors(resolved, family.name)), model=resolved, family=family, files=files),
    )


def fill(decoder: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy each (name, tensor) into the decoder's parameter of that logical name.

    Raises CheckpointError unless the names and shapes are exactly those of the decoder.
    """
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


def _in_hf_form(
    model: ResolvedModel,
    entries: Iterable[HfTensor],
    tensors: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype,
    checkpoint: Path,
) -> Iterator[tuple[str, Tensor]]:
    """Yield each Hugging Face tensor, made from its logical parts, which come in the order of the entries.

    Raises CheckpointError for NaN and infinities, including those that only rounding makes.
    """
    for entry in entries:
        parts = []
        for wanted in entry.parts:
            name, tensor = next(tensors)
            assert name == wanted, "read in this order"
            refuse_non_finite(name, tensor, where=str(checkpoint))
            parts.append(tensor.to(dtype))
            refuse_non_finite(name, parts[-1], where=f"{checkpoint}, rounded to {dtype},")
        yield entry.name, join_parts(entry, parts, model)


def _write_tokenizer(
    directory: Path, tokenizer: Path | None, end_of_document: str, model: ResolvedModel
) -> int | None:
    """Copy the tokenizer in the form that transformers loads, and return the end-of-document token's id or
    None.
    """
    if tokenizer is None:
        return None
    if not is_json(tokenizer.read_bytes()):
        return export_sentencepiece_model(directory, tokenizer, end_of_document)
    eod = load_tokenizer(tokenizer, end_of_document=end_of_document).eod
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
    return eod


def _write_config(directory: Path, config: Mapping[str, Any]) -> None:
    _write_json(directory / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
    _write_json(directory / "generation_config.json", generation)


def _publish(partial: Path, directory: Path) -> None:
    try:
        durable.publish(partial, directory)
    except OSError as error:
        raise storage_error(error, path=directory, doing="Exporting a model") from error


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    durable.write_new(path, json.dumps(content, indent=2) + "\n")
