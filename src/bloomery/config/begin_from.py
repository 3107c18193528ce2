"""Completes a recipe with what the directory of `init.from` holds: the model's shape and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bloomery.config.convert import BadValue, toml_value
from bloomery.config.find import from_home
from bloomery.errors import ConfigError, Mistake
from bloomery.frozen import dataclass

_OF_TRAINING = ("hidden_dropout", "attention_dropout", "init_std", "residual_init", "embedding_init")
"""Settings of `[model]` that are no part of the weights: the recipe's own value counts."""
_OF_POSITIONS = (
    "max_positions",
    "rope_theta",
    "rope_scaling",
    "rope_factor",
    "rope_original_positions",
    "rope_low_rotations",
    "rope_high_rotations",
    "rope_attention_factor",
)
"""Settings that the recipe may change on purpose, for instance for a longer context; a note says so."""

_OF_WEIGHTS = ("config.json", "manifest.json", "recipe.toml", ".metadata", "*.pt")
"""Files by which a directory may hold weights; what they are is seen when they are read."""


@dataclass(frozen=True, kw_only=True)
class DescribedWeights:
    """What a directory of weights says of the settings of a run that begins with them.

    place: the directory, as it was given.
    model: settings of `[model]` by name, with numbers in place of 'auto'.
    tokenizer: path of its tokenizer; '' if there is none.
    end_of_document: the token that ends a document; '' if none is named.
    """

    place: str
    model: Mapping[str, Any]
    tokenizer: str
    end_of_document: str


DescribeWeights = Callable[[str], Iterator[DescribedWeights]]
"""Reads a directory, given as `init.from` names it, and describes it more than once if a first description is
quicker; the last one counts. Raises BloomeryError for what is no model we know.
"""


def weights_directory(place: str) -> Path:
    """Return the directory of `init.from`. Raises ConfigError if it does not exist or holds no weights."""
    directory = from_home(place)
    if not directory.is_dir():
        problem = "there is no such directory"
        remedy = (
            "Check the path. A run that began with these weights goes on without them: bloomery train RUN."
        )
    elif any(path for pattern in _OF_WEIGHTS for path in directory.glob(pattern)):
        return directory
    else:
        problem = "holds no config.json, and is neither a run nor a checkpoint of ours"
        remedy = "Give a directory written by save_pretrained, runs/NAME, or runs/NAME/checkpoints/step-…."
    raise ConfigError(
        [Mistake(key="init.from", value=place, source="init.from", problem=problem, remedy=remedy)]
    )


def take_described(
    raw: dict[str, Any], places: dict[str, str], descriptions: Iterator[DescribedWeights]
) -> tuple[list[BadValue], tuple[str, ...]]:
    """Write into the recipe's tables what it leaves to the weights' directory.

    raw, places: the recipe as TOML, and where each key was written; both are completed.
    descriptions: see `DescribeWeights`. The first that the recipe contradicts is the last that is asked for.
    Returns what contradicts the weights, and sentences about what differs from them on purpose.
    """
    model, data = raw.setdefault("model", {}), raw.setdefault("data", {})
    if not isinstance(model, dict) or not isinstance(data, dict):
        return [], ()  # they are refused when they are converted
    for described in descriptions:
        wrongs = [*_contradictions(model, described), *_tokenizer_mistakes(data, described)]
        if wrongs:
            return wrongs, ()
    notes = tuple(_changed_on_purpose(model, described))
    taken = {
        f"model.{name}": value for name, value in described.model.items() if model.get(name) in (None, "auto")
    }
    for name, value in (
        ("tokenizer", described.tokenizer),
        ("end_of_document_token", described.end_of_document),
    ):
        if name not in data and value:
            taken[f"data.{name}"] = value
    for key, value in taken.items():
        section, _, name = key.partition(".")
        raw[section][name] = value
        places[key] = described.place
    return [], notes


def _differing(model: Mapping[str, Any], described: DescribedWeights) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, the recipe's value, the weights' value) of what the recipe writes and they contradict."""
    for name, value in described.model.items():
        own = model.get(name)
        if own in (None, "auto") or own == value or isinstance(own, str) != isinstance(value, str):
            continue  # a value of another type is refused when it is converted
        yield name, own, value


def _contradictions(model: Mapping[str, Any], described: DescribedWeights) -> Iterator[BadValue]:
    learned = described.model["position"] == "learned"
    for name, own, value in _differing(model, described):
        may_differ = name in _OF_TRAINING or (name in _OF_POSITIONS and not learned)
        # Weights whose config.json ties the head may hold a head of their own: loading compares them.
        if may_differ or (name == "tied" and own is False):
            continue
        yield BadValue(
            key=f"model.{name}",
            value=own,
            problem=f"the weights in {described.place} have {toml_value(value)}",
            remedy="Leave it out, or begin from weights of this shape.",
        )


def _changed_on_purpose(model: Mapping[str, Any], described: DescribedWeights) -> Iterator[str]:
    if described.model["position"] != "rotary":
        return
    for name, own, value in _differing(model, described):
        if name in _OF_POSITIONS and name != "max_positions":
            weights = f"the weights in {described.place} had {toml_value(value)}"
            yield f"model.{name} is {toml_value(own)}; {weights}"


def _tokenizer_mistakes(data: Mapping[str, Any], described: DescribedWeights) -> Iterator[BadValue]:
    trains = data.get("tokenizer") == "train"
    if trains or ("tokenizer" not in data and not described.tokenizer):
        yield BadValue(
            key="data.tokenizer",
            value="train",
            problem=f"a new tokenizer would give other ids than those that {described.place} was trained on",
            remedy="Leave it out to take the tokenizer from there."
            if described.tokenizer
            else "No tokenizer is there: set data.tokenizer to the path of the model's tokenizer.json.",
        )
