"""Begins a run with weights that are there already: a transformers directory, a run, or a checkpoint of ours.

`describe_weights` says what they are, and `fill_from` copies the boxes that a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.format.manifest import MANIFEST
from bloomery.checkpoint.format.state import StateEntry
from bloomery.checkpoint.format.suspects import newest_trusted
from bloomery.checkpoint.load.loader import load_checkpoint
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.config.begin_from import DescribedWeights, weights_directory
from bloomery.config.find import is_run
from bloomery.config.load import load_recipe
from bloomery.config.model import ModelSection
from bloomery.data.tokenizer import tokenizer_in
from bloomery.errors import BloomeryError, CheckpointError, ConfigError, Mistake
from bloomery.events.run_directory import RunDirectory
from bloomery.interchange.huggingface import MatchedModel, open_model
from bloomery.interchange.tensor_matching import Match, is_foreign, read_match, read_rows
from bloomery.interchange.weight_files import check_checksums, read_object
from bloomery.model.shape import ResolvedModel, resolve

_PREFIX = "model."
_CONFIG, _TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"


def describe_weights(place: str) -> DescribedWeights:
    """Return what the directory at `place` says of the settings of a run that begins with its weights.

    Raises ConfigError where there is no model that we know, and CheckpointError for what our decoder does not
    compute.
    """
    directory = weights_directory(place)
    if _is_ours(directory):
        return _described_run(place, directory)
    if (directory / _CONFIG).is_file():
        section = open_model(directory).section
        tokenizer = tokenizer_in(directory)
        return DescribedWeights(
            place=place,
            model=_numbers(section, sequence_length=0),
            tokenizer=str(tokenizer or ""),
            end_of_document=end_of_document_of(directory) or "",
        )
    if is_foreign(directory):
        raise _refused(
            place,
            "is a checkpoint of another program, which does not describe its model",
            f"Make a run of it first, `bloomery ckpt import {place} --recipe RECIPE --tokenizer FILE RUN`, "
            "and begin from RUN.",
        )
    raise _refused(
        place,
        f"holds no {_CONFIG}, and is neither a run nor a checkpoint of ours",
        "Give a directory written by save_pretrained, runs/NAME, or runs/NAME/checkpoints/step-….",
    )


def end_of_document_of(directory: Path) -> str | None:
    """Return the eos_token that tokenizer_config.json names; None if it names none."""
    settings = directory / _TOKENIZER_CONFIG
    content = read_object(settings) if settings.is_file() else {}
    eos = content.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    return text if isinstance(text, str) else None


def fill_from(place: str, entries: Iterable[StateEntry], *, model: ResolvedModel, ranks: Ranks) -> str:
    """Copy the weights at `place` into the boxes of `entries`, and return what they were, in words.

    Each rank reads the tensors that it holds boxes of, one at a time; plain matrices by their rows. From a
    checkpoint of ours, bytes that several ranks want are read once.

    entries: fp32 masters, named model.… as in checkpoints. model: the recipe's. Collective over `ranks`.
    Raises CheckpointError on every rank for weights that are damaged, or not of this model.
    """
    directory = Path(place).expanduser()
    wanted = tuple(entries)
    if _is_ours(directory):
        checkpoint = Path(ranks.run_on_first(lambda: str(_newest(directory))))
        load_checkpoint(checkpoint, wanted, parts={"model"}, ranks=ranks)
        return str(checkpoint)
    ranks.poll_on_first(lambda: check_checksums(directory))
    ranks.poll_on_all(lambda: _fill_from_transformers(directory, wanted, model=model))
    return str(directory)


def _is_ours(directory: Path) -> bool:
    return (directory / MANIFEST).is_file() or is_run(directory)


def _newest(directory: Path) -> Path:
    if (directory / MANIFEST).is_file():
        return directory
    newest = newest_trusted(checkpoints(RunDirectory(directory)))
    if newest is None:
        raise CheckpointError(
            f"{directory} has no checkpoints yet.", remedy="Let it save first: bloomery save RUN."
        )
    return newest.directory


def _described_run(place: str, directory: Path) -> DescribedWeights:
    rundir = RunDirectory(_newest(directory).parent.parent)
    if not rundir.recipe.is_file():
        raise _refused(
            place,
            f"does not lie in a run: there is no {rundir.recipe}",
            "Give a checkpoint where its run left it, RUN/checkpoints/step-….",
        )
    recipe = load_recipe(str(rundir.recipe)).recipe
    elsewhere = "" if recipe.data.tokenizer == "train" else recipe.data.tokenizer
    return DescribedWeights(
        place=place,
        model=_numbers(recipe.model, sequence_length=recipe.data.sequence_length),
        tokenizer=str(tokenizer_in(rundir.data) or elsewhere),
        end_of_document=recipe.data.end_of_document_token,
    )


def _numbers(section: ModelSection, *, sequence_length: int) -> dict[str, Any]:
    """Return the settings of a model by name, with numbers for 'auto', and without what stays 'auto'.

    sequence_length: what a number of positions that is 'auto' is.
    """
    resolved = resolve(section, vocabulary=2, sequence_length=1)
    values = {field.name: getattr(section, field.name) for field in fields(section)}
    values |= {"kv_heads": resolved.kv_heads, "ffn": resolved.ffn, "head_dim": section.head_width}
    if section.max_positions == "auto" and (section.position == "learned" or section.rope_scaling != "none"):
        values["max_positions"] = sequence_length
    return {name: value for name, value in values.items() if value != "auto"}


def _fill_from_transformers(directory: Path, wanted: Sequence[StateEntry], *, model: ResolvedModel) -> None:
    """Fill the boxes of this rank. Raises CheckpointError."""
    opened = open_model(directory, section=model.section)
    boxes: dict[str, list[StateEntry]] = {}
    for entry in wanted:
        boxes.setdefault(entry.name.removeprefix(_PREFIX), []).append(entry)
    for match in opened.matched:
        own_boxes = {part: boxes[part] for part in match.entry.parts if part in boxes}
        if own_boxes:
            _fill_match(match, own_boxes, opened)


@torch.no_grad()
def _fill_match(match: Match, held: Mapping[str, Sequence[StateEntry]], opened: MatchedModel) -> None:
    """Copy one stored tensor into the boxes of its logical tensors.

    held: this rank's boxes of each logical tensor.
    """
    if match.entry.layout == "plain" and not opened.files.is_coded(match.stored):
        for entry in held[match.entry.parts[0]]:
            first = entry.box.offset[0]
            rows = read_rows(match, files=opened.files, start=first, stop=first + entry.box.shape[0])
            entry.tensor.copy_(rows[(slice(None), *entry.box.window[1:])])
        return
    parts = dict(read_match(match, model=opened.resolved, files=opened.files))
    for part, entries in held.items():
        for entry in entries:
            entry.tensor.copy_(parts[part][entry.box.window])


def _refused(place: str, problem: str, remedy: str) -> BloomeryError:
    return ConfigError(
        [Mistake(key="init.from", value=place, source="init.from", problem=problem, remedy=remedy)]
    )
