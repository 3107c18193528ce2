"""A model's resolved sizes, and the names and shapes of its logical tensors.

`resolve` replaces every 'auto' of a `[model]` section by a number. Checkpoints, optimizers and exports
speak of logical tensors, which are unfused (query, key, value, gate, up), whatever a module stores them in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bloomery.config.model import ModelSection
from bloomery.errors import ConfigError, Mistake


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """What the decoder is built from: a `[model]` section, with a number for each 'auto'."""

    section: ModelSection
    kv_heads: int
    ffn: int
    vocabulary: int
    max_positions: int
    init_std: float

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.section.head_width


def resolve(model: ModelSection, *, vocabulary: int, sequence_length: int) -> ResolvedModel:
    """Return `model` with the numbers that it leaves to the tokenizer and the data.

    vocabulary: number of the tokenizer's ids.
    sequence_length: number of tokens in one sample.
    Raises ConfigError if the model cannot hold them.
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


Shape = tuple[int, ...]


def logical_shapes(model: ResolvedModel) -> dict[str, Shape]:
    """Return each logical tensor's name and shape, in the order in which a token meets them."""
    hidden = model.section.hidden
    shapes: dict[str, Shape] = {"embedding.weight": (model.vocabulary, hidden)}
    if model.section.position == "learned":
        shapes["positions.weight"] = (model.max_positions, hidden)
    if model.section.embedding_norm:
        shapes.update(_norm("embedding_norm", model))
    for block in range(model.section.layers):
        shapes.update(_block(f"blocks.{block}", model))
    shapes.update(_norm("final_norm", model))
    if not model.section.tied:
        shapes["head.weight"] = (model.vocabulary, hidden)
    return shapes


def is_residual_output(name: str) -> bool:
    """Whether `name` is a projection whose result is added to the residual stream."""
    return name.endswith((".attention.output.weight", ".mlp.down.weight"))


def is_qk_norm(name: str) -> bool:
    """Whether `name` is a QK norm, whose weight all heads share."""
    return name.endswith((".attention.query_norm.weight", ".attention.key_norm.weight"))


def _block(prefix: str, model: ResolvedModel) -> Iterator[tuple[str, Shape]]:
    section, hidden, ffn = model.section, model.section.hidden, model.ffn
    query, kv = model.section.heads * model.head_dim, model.kv_heads * model.head_dim
    yield from _norm(f"{prefix}.attention_norm", model)
    for part, rows, columns in (
        ("query", query, hidden),
        ("key", kv, hidden),
        ("value", kv, hidden),
    ):
        yield from _linear(f"{prefix}.attention.{part}", rows, columns, bias=section.attention_bias)
    if model.section.qk_norm:
        for part in ("query_norm", "key_norm"):
            yield f"{prefix}.attention.{part}.weight", (model.head_dim,)
    yield from _linear(f"{prefix}.attention.output", hidden, query, bias=section.attention_bias)
    yield from _norm(f"{prefix}.mlp_norm", model)
    if model.section.activation == "swiglu":
        yield from _linear(f"{prefix}.mlp.gate", ffn, hidden, bias=section.mlp_bias)
    yield from _linear(f"{prefix}.mlp.up", ffn, hidden, bias=section.mlp_bias)
    yield from _linear(f"{prefix}.mlp.down", hidden, ffn, bias=section.mlp_bias)


def _norm(prefix: str, model: ResolvedModel) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.weight", (model.section.hidden,)
    if model.section.norm == "layernorm":
        yield f"{prefix}.bias", (model.section.hidden,)


def _linear(prefix: str, rows: int, columns: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.weight", (rows, columns)
    if bias:
        yield f"{prefix}.bias", (rows,)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How frequencies are scaled, as the section `[model]` says.

    kind: 'linear', 'dynamic', 'yarn' or 'llama3'.
    factor: how many times longer the context becomes.
    positions: longest context of the model, in tokens.
    original_positions: context that the model was trained on, in tokens.
    low_rotations, high_rotations: numbers of full turns within the original context below which a frequency
    is scaled, and above which it is kept.
    attention_factor: factor for cosines and sines.
    """

    kind: str
    factor: float
    positions: int
    original_positions: int
    low_rotations: float
    high_rotations: float
    attention_factor: float


def scaling_of(model: ResolvedModel) -> RopeScaling | None:
    """Return the scaling of a model; None if its frequencies are not scaled."""
    section = model.section
    if section.rope_scaling == "none":
        return None
    original = section.rope_original_positions
    return RopeScaling(
        kind=section.rope_scaling,
        factor=section.rope_factor,
        positions=model.max_positions,
        original_positions=model.max_positions if original == "auto" else original,
        low_rotations=section.rope_low_rotations,
        high_rotations=section.rope_high_rotations,
        attention_factor=section.rope_attention_factor,
    )
