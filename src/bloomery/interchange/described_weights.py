"""Reads the model settings of the weights that `init.from` names, from config.json or a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from bloomery.checkpoint.format.catalogue import checkpoints, with_its_run
from bloomery.checkpoint.format.manifest import MANIFEST
from bloomery.checkpoint.format.suspects import newest_trusted
from bloomery.config.begin_from import DescribedWeights, weights_directory
from bloomery.config.find import is_run
from bloomery.config.load import load_recipe
from bloomery.config.model import ModelSection
from bloomery.data.tokenizer_files import tokenizer_in
from bloomery.errors import BloomeryError, CheckpointError, ConfigError, Mistake
from bloomery.events.run_directory import RunDirectory
from bloomery.interchange.directories import read_object
from bloomery.interchange.families import section_from
from bloomery.model.shape import resolve

_CONFIG, _TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"


def described_weights(place: str) -> Iterator[DescribedWeights]:
    """Yield what the directory at `place` says of the settings of a run that begins with its weights.

    The first is quick. For a transformers directory a second one follows, for which torch opens the weight
    files: only they show whether a stored head is tied to the embedding.
    Raises ConfigError where there is no model that we know, and CheckpointError for what our decoder does not
    compute.
    """
    directory = weights_directory(place)
    if is_run_or_checkpoint(directory):
        yield _described_run(place, directory)
        return
    if not (directory / _CONFIG).is_file():
        raise _refused(place, *_unknown(place, directory))
    tokenizer = tokenizer_in(directory)
    by_config = DescribedWeights(
        place=place,
        model=_numbers(section_from(read_object(directory / _CONFIG)), sequence_length=0),
        tokenizer=str(tokenizer or ""),
        end_of_document=end_of_document_of(directory) or "",
    )
    yield by_config
    from bloomery.interchange.huggingface import open_model  # loads torch

    yield replace(by_config, model=_numbers(open_model(directory).section, sequence_length=0))


def is_run_or_checkpoint(directory: Path) -> bool:
    """Return whether the directory is a run, or a checkpoint of one."""
    return (directory / MANIFEST).is_file() or is_run(directory)


def newest_checkpoint_in(directory: Path) -> Path:
    """Return the newest checkpoint of a run that is not suspect; a checkpoint itself is the newest. Raises
    CheckpointError if there is none.
    """
    if (directory / MANIFEST).is_file():
        return with_its_run(directory)
    newest = newest_trusted(checkpoints(RunDirectory(directory)))
    if newest is None:
        raise CheckpointError(
            f"{directory} has no checkpoints yet.", remedy="Let it save first: bloomery save RUN."
        )
    return newest.directory


def end_of_document_of(directory: Path) -> str | None:
    """Return the eos_token that tokenizer_config.json names; None if it names none."""
    settings = directory / _TOKENIZER_CONFIG
    content = read_object(settings) if settings.is_file() else {}
    eos = content.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    return text if isinstance(text, str) else None


def _described_run(place: str, directory: Path) -> DescribedWeights:
    rundir = RunDirectory(newest_checkpoint_in(directory).parent.parent)
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

    sequence_length: the value of `model.max_positions` where that is 'auto'.
    """
    resolved = resolve(section, vocabulary=2, sequence_length=1)
    values = {field.name: getattr(section, field.name) for field in fields(section)}
    values |= {"kv_heads": resolved.kv_heads, "ffn": resolved.ffn, "head_dim": section.head_width}
    if section.max_positions == "auto" and (section.position == "learned" or section.rope_scaling != "none"):
        values["max_positions"] = sequence_length
    return {name: value for name, value in values.items() if value != "auto"}


def _unknown(place: str, directory: Path) -> tuple[str, str]:
    """Return the problem and the remedy of a directory without config.json that is none of ours."""
    from bloomery.interchange.tensor_matching import is_foreign

    if is_foreign(directory):
        return (
            "is a checkpoint of another program, which does not describe its model",
            f"Make a run of it first, `bloomery ckpt import {place} --recipe RECIPE --tokenizer FILE RUN`, "
            "and begin from RUN.",
        )
    return (
        f"holds no {_CONFIG}, and is neither a run nor a checkpoint of ours",
        "Give a directory written by save_pretrained, runs/NAME, or runs/NAME/checkpoints/step-….",
    )


def _refused(place: str, problem: str, remedy: str) -> BloomeryError:
    return ConfigError(
        [Mistake(key="init.from", value=place, source="init.from", problem=problem, remedy=remedy)]
    )
