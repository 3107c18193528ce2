"""Hugging Face models: export with the logits verified, and import.

Three families cover what our decoder can be: Llama, BLOOM and GPT-2. Tensors are streamed: no more than one
shard of them is held beside the model that verifies.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bloomery.checkpoint.families import (
    HfTensor,
    family_of,
    hf_config,
    hf_tensors,
    joined,
    section_from,
    separated,
)
from bloomery.config.model import ModelSection
from bloomery.errors import CheckpointError, ExportRefused
from bloomery.model.decoder import Decoder, logical_parameters
from bloomery.model.resolve import ResolvedModel, resolve

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_RELATIVE_TOLERANCE = 1e-5
_PROBE = (2, 64)

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
    tensors: Iterable[tuple[str, Tensor]],
    directory: Path,
    *,
    tokenizer: Path | None = None,
    end_of_document: str = "<|endoftext|>",
    dtype: str = "fp32",
    max_shard_bytes: int = 4 * 2**30,
    describe: Describe = hf_config,
) -> Exported:
    """Write `tensors` (logical name, fp32 values) as a model that transformers loads, and prove it.

    directory: must not exist; it appears only once the files were loaded by transformers and gave our logits.
    dtype: of the stored weights; other than fp32 it rounds, and what is verified is the rounded model.
    describe: makes config.json's contents. Raises ExportRefused, leaving nothing behind.
    """
    if directory.exists():
        raise CheckpointError(
            f"{directory} exists already.", remedy="Choose another directory, or remove it."
        )
    family = family_of(model.section, kv_heads=model.kv_heads, ffn=model.ffn)
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    partial.mkdir(parents=True)
    try:
        ours = Decoder(model, device=torch.device("cpu"), dtype=torch.float32)
        rounded = _kept_in(ours, _rounded(tensors, DTYPES[dtype]))
        _write_shards(partial, _in_hf_form(model, family, rounded), max_shard_bytes)
        eod_id = _write_tokenizer(partial, tokenizer, end_of_document, model)
        _write_config(partial, describe(model, family=family, dtype=DTYPES[dtype], end_of_document=eod_id))
        difference, tolerance = _verify(ours, partial)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already if it was renamed
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    return Exported(
        directory=directory,
        family=family,
        parameters=parameters,
        largest_difference=difference,
        tolerance=tolerance,
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
    for _ in _kept_in(decoder, tensors):
        pass


def _kept_in(decoder: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Pass `tensors` on, each copied into `decoder` on the way."""
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
        yield name, tensor
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors are missing, {next(iter(missing))} among them.",
            remedy="Check that the recipe and the weights are of the same run.",
        )


def _rounded(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor.to(dtype)


def _in_hf_form(
    model: ResolvedModel, family: str, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Each HF tensor as soon as all its logical parts have come."""
    entry_of = {part: entry for entry in hf_tensors(model, family) for part in entry.parts}
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        entry = entry_of[name]
        parts = waiting.setdefault(entry.name, {})
        parts[name] = tensor
        if len(parts) == len(entry.parts):
            del waiting[entry.name]
            yield entry.name, joined(entry, [parts[part] for part in entry.parts], model)


def _write_shards(directory: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    held_bytes = total_bytes = 0

    def flush() -> None:
        save_file(held, directory / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if held and held_bytes + size > max_shard_bytes:
            flush()
            held_bytes = 0
        held[name] = tensor.contiguous()
        held_bytes, total_bytes = held_bytes + size, total_bytes + size
    flush()
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{number}").rename(directory / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


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


def _verify(ours: Decoder, directory: Path) -> tuple[float, float]:
    """Largest difference between our logits and those of the written files, and what is tolerated."""
    theirs = load_with_transformers(directory)
    tokens = _probe_tokens(ours.model)
    with torch.no_grad():
        own_logits = ours.logits(ours(tokens))
        their_logits = theirs(tokens).logits
    if own_logits.shape != their_logits.shape:
        raise ExportRefused(
            f"Its logits are {tuple(their_logits.shape)}, ours {tuple(own_logits.shape)}.",
            remedy="Check vocab_size in the exported configuration.",
        )
    difference = (own_logits - their_logits).abs().nan_to_num(nan=float("inf"))
    largest = float(difference.max())
    tolerance = _RELATIVE_TOLERANCE * max(1.0, float(own_logits.abs().max()))
    if not largest <= tolerance:
        raise ExportRefused(
            f"The exported model's logits differ from ours by up to {largest:.3g} "
            f"(tolerated: {tolerance:.1g}), "
            f"{_where(difference, tolerance)}",
            remedy="Nothing was kept. Please report this with the run's recipe.toml.",
        )
    return largest, tolerance


def load_with_transformers(directory: Path) -> Any:  # Any: a transformers model
    """The fp32 model that transformers makes of `directory`, from its files alone."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # its bar would stand in the middle of our output
        model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
    return model.float().eval()


def _probe_tokens(model: ResolvedModel) -> Tensor:
    """Tokens from the whole vocabulary, the same each time."""
    rows, length = _PROBE
    if model.section.position == "learned":
        length = min(length, model.max_positions)
    spread = torch.arange(rows * length) * 2654435761 % 2**32
    return (spread % model.vocabulary).view(rows, length)


def _where(difference: Tensor, tolerance: float) -> str:
    """Where they part, and what that usually means."""
    worst = difference.amax(dim=(0, 2))  # over the batch and the vocabulary: [s]
    first = int((~(worst <= tolerance)).nonzero()[0])
    place = f"most at position {int(worst.argmax())} of the probe, first at position {first}. "
    if first == 0:
        return (
            place + "A first token attends to itself alone, so the likely cause is the activation, "
            "a norm's epsilon, or a wrongly mapped weight."
        )
    return place + "The first tokens agree, so the likely cause is how positions enter attention."


def _read_logical(directory: Path, model: ResolvedModel, family: str) -> Iterator[tuple[str, Tensor]]:
    file_of = _files_of_tensors(directory)
    for entry in hf_tensors(model, family):
        stored = _stored_name(entry, file_of, directory)
        with safe_open(directory / file_of[stored], framework="pt") as file:
            tensor = file.get_tensor(stored).float()
        yield from zip(entry.parts, separated(entry, tensor, model), strict=True)


def _files_of_tensors(directory: Path) -> dict[str, str]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    single = directory / "model.safetensors"
    if not single.is_file():
        raise CheckpointError(
            f"{directory} has no model.safetensors.",
            remedy="Convert it with transformers: model.save_pretrained(directory).",
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single.name)


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
