"""A `[model]` section with nothing left open: every 'auto' is a number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bloomery.config.model import ModelSection
from bloomery.errors import ConfigError, Mistake


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """What the decoder is built from: the section, and the sizes that the section left to others."""

    section: ModelSection
    kv_heads: int
    ffn: int
    vocabulary: int
    max_positions: int
    init_std: float

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.section.hidden // self.section.heads


def resolve(model: ModelSection, *, vocabulary: int, sequence_length: int) -> ResolvedModel:
    """Fill in what `model` leaves to the tokenizer and the data.

    vocabulary: the tokenizer's; sequence_length: tokens of one sample. Raises ConfigError where the model
    cannot hold them.
    """
    mistakes = []
    if model.vocabulary != "auto" and model.vocabulary < vocabulary:
        mistakes.append(
            Mistake(
                key="model.vocabulary",
                value=model.vocabulary,
                source="resolved recipe",
                problem=f"the tokenizer has {vocabulary} tokens",
                remedy=f"Set it to 'auto', or to {vocabulary} or more.",
            )
        )
    too_short = model.max_positions != "auto" and model.max_positions < sequence_length
    if model.position == "learned" and too_short:
        mistakes.append(
            Mistake(
                key="model.max_positions",
                value=model.max_positions,
                source="resolved recipe",
                problem=f"a sample has {sequence_length} tokens, and each needs its learned position",
                remedy=f"Set it to 'auto', or to {sequence_length} or more.",
            )
        )
    if mistakes:
        raise ConfigError(mistakes)
    return ResolvedModel(
        section=model,
        kv_heads=model.heads if model.kv_heads == "auto" else model.kv_heads,
        ffn=4 * model.hidden if model.ffn == "auto" else model.ffn,
        vocabulary=vocabulary if model.vocabulary == "auto" else model.vocabulary,
        max_positions=sequence_length if model.max_positions == "auto" else model.max_positions,
        init_std=_standard_deviation(model.init_std, hidden=model.hidden),
    )


def _standard_deviation(init_std: float | str, *, hidden: int) -> float:
    if init_std == "sqrt(1/3h)":
        return math.sqrt(1.0 / (3.0 * hidden))
    if init_std == "sqrt(2/5h)":
        return math.sqrt(2.0 / (5.0 * hidden))
    return float(init_std)
