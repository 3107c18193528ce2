"""The settings of `[model]`: the decoder's shape and initial values. Sizes do not include padding."""

from __future__ import annotations

from typing import Literal

from bloomery.config.setting import setting
from bloomery.frozen import dataclass

Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The shape and parts of a decoder-only transformer; Llama, BLOOM and GPT-2 differ only in these."""

    layers: int = setting(kind="fixed", minimum=1, help="Number of decoder blocks.")
    hidden: int = setting(kind="fixed", minimum=1, help="Width of the residual stream, in channels.")
    heads: int = setting(
        kind="fixed", minimum=1, help="Number of query heads; it must divide hidden unless head_dim is given."
    )
    kv_heads: int | Auto = setting(
        "auto",
        kind="fixed",
        minimum=1,
        help="Number of key/value heads (grouped-query attention); 'auto' is one for each query head.",
    )
    head_dim: int | Auto = setting(
        "auto", kind="fixed", minimum=1, help="Channels of each head; 'auto' is hidden / heads."
    )
    ffn: int | Auto = setting(
        "auto", kind="fixed", minimum=1, help="Inner width of the MLP, in channels; 'auto' is 4 × hidden."
    )
    vocabulary: int | Auto = setting(
        "auto",
        kind="fixed",
        minimum=2,
        help="Entries of the vocabulary without padding; 'auto' is the tokenizer's.",
    )
    max_positions: int | Auto = setting(
        "auto",
        kind="fixed",
        minimum=1,
        help="Number of learned positions, or of rotary ones that were trained on; 'auto' is "
        "data.sequence_length.",
    )
    norm: str = setting(
        "rmsnorm", kind="fixed", choices=("rmsnorm", "layernorm"), help="Kind of normalisation."
    )
    norm_epsilon: float = setting(1e-5, kind="fixed", above=0.0, help="Added to the variance in each norm.")
    position: str = setting(
        "rotary",
        kind="fixed",
        choices=("rotary", "alibi", "learned"),
        help="How the model represents positions.",
    )
    rope_theta: float = setting(10_000.0, kind="fixed", above=0.0, help="Base of the rotary frequencies.")
    rope_scaling: str = setting(
        "none",
        kind="fixed",
        choices=("none", "linear", "dynamic", "llama3", "yarn"),
        help="How rotary frequencies are scaled for contexts longer than those the model was trained with.",
    )
    rope_factor: float = setting(
        1.0,
        kind="fixed",
        minimum=1.0,
        help="How many times longer the contexts are, where model.rope_scaling is not 'none'.",
    )
    rope_original_positions: int | Auto = setting(
        "auto",
        kind="fixed",
        minimum=1,
        help="For 'llama3' and 'yarn': positions that the model was trained with; 'auto' is "
        "model.max_positions.",
    )
    rope_low_rotations: float = setting(
        1.0,
        kind="fixed",
        above=0.0,
        help="For 'llama3' and 'yarn': channels that rotate fewer times than this within the original "
        "positions are scaled in full.",
    )
    rope_high_rotations: float = setting(
        4.0,
        kind="fixed",
        above=0.0,
        help="For 'llama3' and 'yarn': channels that rotate more times than this are not scaled.",
    )
    rope_attention_factor: float = setting(
        1.0, kind="fixed", above=0.0, help="For 'yarn': factor of the cosines and sines."
    )
    activation: str = setting(
        "swiglu",
        kind="fixed",
        choices=("swiglu", "gelu", "gelu_tanh"),
        help="Activation of the MLP. 'gelu' is the exact form with erf, 'gelu_tanh' the approximation of "
        "GPT-2 and BLOOM.",
    )
    bias: bool = setting(False, kind="fixed", help="Whether the blocks' linear layers have biases.")
    bias_in: str = setting(
        "blocks",
        kind="fixed",
        choices=("blocks", "attention", "mlp"),
        help="Which of the blocks' linear layers have biases where model.bias is true.",
    )
    tied: bool = setting(False, kind="fixed", help="Whether the output head shares the embedding's weight.")
    embedding_norm: bool = setting(
        False, kind="fixed", help="Whether a norm follows the embedding, as in BLOOM."
    )
    qk_norm: bool = setting(
        False,
        kind="fixed",
        help="Whether each head's queries and keys are normalised (RMSNorm over the head's channels) before "
        "positions and scores, so that attention logits cannot grow without bound.",
    )
    hidden_dropout: float = setting(
        0.0,
        kind="journalled",
        minimum=0.0,
        maximum=0.999,
        help="Probability of dropout after the embedding and on each residual branch.",
    )
    attention_dropout: float = setting(
        0.0,
        kind="journalled",
        minimum=0.0,
        maximum=0.999,
        help="Probability of dropout on attention weights. Above 0 the fused kernel is not used, which is "
        "slower.",
    )
    init_std: float | str = setting(
        0.02,
        kind="fixed",
        above=0.0,
        choices=("sqrt(1/3h)", "sqrt(2/5h)"),
        help="Standard deviation of initial weights: a number, 'sqrt(1/3h)' or 'sqrt(2/5h)', with h for "
        "hidden.",
    )
    residual_init: str = setting(
        "scaled",
        kind="fixed",
        choices=("scaled", "same", "zero"),
        help="Initial standard deviation of the projections onto the residual stream: 'scaled' is init_std "
        "/ sqrt(2·layers), 'same' is init_std, 'zero' is 0.",
    )
    embedding_init: str = setting(
        "normal",
        kind="fixed",
        choices=("normal", "xavier_uniform", "bigram"),
        help="Initial values of the embedding: 'normal' with init_std; 'xavier_uniform' as in BLOOM; "
        "'bigram', factors of the training text's bigram statistics for embedding and head, which helps "
        "short runs and needs tied = false.",
    )

    @property
    def attention_bias(self) -> bool:
        """Whether query, key, value and attention's output have biases."""
        return self.bias and self.bias_in != "mlp"

    @property
    def mlp_bias(self) -> bool:
        """Whether the MLP's linear layers have biases."""
        return self.bias and self.bias_in != "attention"

    @property
    def head_width(self) -> int:
        """The number of channels of one head, with 'auto' resolved."""
        return self.hidden // self.heads if self.head_dim == "auto" else self.head_dim
