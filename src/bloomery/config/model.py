"""`[model]`: the decoder's shape. Sizes are logical: padding for a layout is the layout's business."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bloomery.config.setting import setting

Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """One decoder-only transformer. Llama, BLOOM and GPT-2 are three ways of filling this in."""

    layers: int = setting(kind="fixed", minimum=1, help="Decoder blocks.")
    hidden: int = setting(kind="fixed", minimum=1, help="Width of the residual stream.")
    heads: int = setting(kind="fixed", minimum=1, help="Query heads; hidden must be divisible by it.")
    kv_heads: int | Auto = setting(
        "auto",
        kind="fixed",
        minimum=1,
        help="Key/value heads (grouped-query attention); 'auto' is one for each query head.",
    )
    ffn: int | Auto = setting(
        "auto", kind="fixed", minimum=1, help="Inner width of the MLP; 'auto' is 4 × hidden."
    )
    vocabulary: int | Auto = setting(
        "auto", kind="fixed", minimum=2, help="Logical vocabulary; 'auto' is the tokenizer's."
    )
    max_positions: int | Auto = setting(
        "auto",
        kind="fixed",
        minimum=1,
        help="Size of the table of learned positions; 'auto' is data.sequence_length.",
    )
    norm: str = setting("rmsnorm", kind="fixed", choices=("rmsnorm", "layernorm"), help="Normalisation.")
    norm_epsilon: float = setting(1e-5, kind="fixed", above=0.0, help="Added to the variance in each norm.")
    position: str = setting(
        "rotary", kind="fixed", choices=("rotary", "alibi", "learned"), help="How positions enter."
    )
    rope_theta: float = setting(10_000.0, kind="fixed", above=0.0, help="Base of the rotary frequencies.")
    activation: str = setting(
        "swiglu",
        kind="fixed",
        choices=("swiglu", "gelu", "gelu_tanh"),
        help="MLP activation. 'gelu' is the exact erf form, 'gelu_tanh' the approximation in GPT-2, BLOOM.",
    )
    bias: bool = setting(False, kind="fixed", help="Biases in the linear layers of the blocks.")
    tied: bool = setting(False, kind="fixed", help="The output head shares the embedding's weight.")
    embedding_norm: bool = setting(
        False, kind="fixed", help="A norm right after the embedding (BLOOM's stabiliser)."
    )
    hidden_dropout: float = setting(
        0.0,
        kind="journalled",
        minimum=0.0,
        maximum=0.999,
        help="Dropout after the embedding and on each residual branch.",
    )
    attention_dropout: float = setting(
        0.0,
        kind="journalled",
        minimum=0.0,
        maximum=0.999,
        help="Dropout on attention weights. Above 0 the weights are formed explicitly: slower.",
    )
    init_std: float | str = setting(
        0.02,
        kind="fixed",
        above=0.0,
        choices=("sqrt(1/3h)", "sqrt(2/5h)"),
        help="Standard deviation of initial weights: a number, 'sqrt(1/3h)' or 'sqrt(2/5h)'.",
    )
    residual_init: str = setting(
        "scaled",
        kind="fixed",
        choices=("scaled", "same", "zero"),
        help="Std of the projections onto the residual stream: init_std / sqrt(2·layers), init_std, or 0.",
    )
    embedding_init: str = setting(
        "normal",
        kind="fixed",
        choices=("normal", "xavier_uniform", "bigram"),
        help="Initial embedding: normal with init_std, uniform Xavier (BLOOM), or with an untied head the "
        "factors of the training text's bigram statistics, a head start for short runs.",
    )
