"""Counts a model's parameters by part and its training FLOPs per token; flags unusual proportions.

A weight in a linear layer costs 2 operations for each token forward and 4 backward. Attention multiplies
queries with keys and weights with values: 4·s·h forward for each token and layer, counted over the whole
square (as published figures do, though a causal kernel needs about half). Lookups, norms, activations and the
optimizer are not counted.

Legend: h hidden, l layers, f ffn, v vocabulary, d channels of a head, kv key/value heads, s sequence length,
B global batch, t seconds per step, n accelerators.
"""

from __future__ import annotations

from collections.abc import Iterator

from bloomery.config.model import ModelSection
from bloomery.frozen import dataclass


@dataclass(frozen=True, kw_only=True)
class BlockParameters:
    """The parameters of one decoder block by part, each with its biases."""

    attention_norm: int
    query_key_norm: int
    attention: int
    mlp_norm: int
    mlp: int
    matrices: int
    """The weights of only the linear layers, which are multiplied for every token."""

    @property
    def total(self) -> int:
        """The number of parameters of one block: 12h² + 13h for the GPT shape."""
        return self.attention_norm + self.query_key_norm + self.attention + self.mlp_norm + self.mlp


@dataclass(frozen=True, kw_only=True)
class ModelParameters:
    """The parameters of a whole model by component.

    head: 0 if the head shares the embedding's weight.
    """

    embedding: int
    positions: int
    embedding_norm: int
    block: BlockParameters
    layers: int
    final_norm: int
    head: int

    @property
    def total(self) -> int:
        """The number of parameters that are stored and trained."""
        ends = self.embedding + self.positions + self.embedding_norm + self.final_norm + self.head
        return ends + self.layers * self.block.total

    @property
    def without_embeddings(self) -> int:
        """The number of parameters of the blocks and the final norm, which are compared between
        vocabularies.
        """
        return self.layers * self.block.total + self.final_norm


def count_parameters(model: ModelSection, *, vocabulary: int, sequence_length: int) -> ModelParameters:
    """Count the parameters of each component, for the logical vocabulary.

    sequence_length: size of learned positions that are 'auto'.
    GPT shape: l(12h² + 13h) + vh + 4h with an embedding norm. Llama shape, for each layer: 2h² + 2·h·kv·d +
    3hf + 2h, and in all h + vh (vh twice if untied).
    """
    hidden = model.hidden
    norm = hidden * (2 if model.norm == "layernorm" else 1)
    positions = sequence_length if model.max_positions == "auto" else model.max_positions
    return ModelParameters(
        embedding=vocabulary * hidden,
        positions=positions * hidden if model.position == "learned" else 0,
        embedding_norm=norm if model.embedding_norm else 0,
        block=_count_block(model, norm=norm),
        layers=model.layers,
        final_norm=norm,
        head=0 if model.tied else vocabulary * hidden,
    )


def kv_heads(model: ModelSection) -> int:
    """Return the number of key/value heads, with 'auto' resolved."""
    return model.heads if model.kv_heads == "auto" else model.kv_heads


def ffn_width(model: ModelSection) -> int:
    """Return the inner width of the MLP, with 'auto' resolved."""
    return 4 * model.hidden if model.ffn == "auto" else model.ffn


def head_size(model: ModelSection) -> int:
    """Return the number of channels of one head."""
    return model.head_width


def query_width(model: ModelSection) -> int:
    """Return the number of channels of all query heads together; it is hidden where head_dim is 'auto'."""
    return model.heads * model.head_width


def _count_block(model: ModelSection, *, norm: int) -> BlockParameters:
    hidden, ffn = model.hidden, ffn_width(model)
    key_value = kv_heads(model) * head_size(model)
    gates = 2 if model.activation == "swiglu" else 1
    attention = 2 * hidden * query_width(model) + 2 * hidden * key_value
    mlp = (gates + 1) * hidden * ffn
    return BlockParameters(
        attention_norm=norm,
        query_key_norm=2 * head_size(model) if model.qk_norm else 0,
        attention=attention + (query_width(model) + hidden + 2 * key_value if model.attention_bias else 0),
        mlp_norm=norm,
        mlp=mlp + (gates * ffn + hidden if model.mlp_bias else 0),
        matrices=attention + mlp,
    )


@dataclass(frozen=True, kw_only=True)
class TokenCost:
    """The floating-point operations to train on one token.

    model: what the mathematics needs, 6 for each weight; for the GPT shape 72·l·h²·(1 + s/(6h) + v/(12·l·h)).
    hardware: the same with what recomputation repeats; 96·l·h²·(1 + s/(6h) + v/(16·l·h)) if all blocks are
    computed again, the head not.
    """

    model: int
    hardware: int


def token_cost(
    model: ModelSection, *, vocabulary: int, sequence_length: int, recompute: str = "none"
) -> TokenCost:
    """Return the operations for each trained token, forward and backward, without and with what
    `recompute` repeats.
    """
    weights = count_parameters(model, vocabulary=vocabulary, sequence_length=sequence_length)
    blocks = 2 * model.layers * weights.block.matrices
    attention = 4 * model.layers * sequence_length * query_width(model)
    head = 2 * vocabulary * model.hidden
    needed = 3 * (blocks + attention + head)
    gates = 2 if model.activation == "swiglu" else 1
    repeated = {
        "none": 0,
        "elementwise": 0,
        "selective": attention,
        "mlp": 2 * model.layers * gates * ffn_width(model) * model.hidden,
        "full": blocks + attention,
    }[recompute]
    return TokenCost(model=needed, hardware=needed + repeated)


def forward_cost(model: ModelSection, *, vocabulary: int, sequence_length: int) -> int:
    """Return the operations for each token of only a forward pass, as in evaluation."""
    return token_cost(model, vocabulary=vocabulary, sequence_length=sequence_length).model // 3


def teraflops(operations_per_token: int, *, tokens: int, seconds: float, accelerators: int = 1) -> float:
    """Return the 10¹² operations per second of each accelerator that trained `tokens` in `seconds`."""
    return operations_per_token * tokens / (seconds * accelerators * 1e12)


def utilisation(achieved_teraflops: float, *, peak_teraflops: float) -> float:
    """Return the share of the peak that was used: MFU from the model's operations, HFU from the
    hardware's.
    """
    return achieved_teraflops / peak_teraflops


LEAST_HIDDEN = 1024
"""Smaller models are made for tests and first steps, in other proportions."""


@dataclass(frozen=True, kw_only=True)
class Proportion:
    """A ratio of two sizes, and the range in which published models of 1B parameters and more have it."""

    name: str
    ratio: float
    lowest_ratio: float
    highest_ratio: float

    @property
    def is_usual(self) -> bool:
        """Whether it lies in the range."""
        return self.lowest_ratio <= self.ratio <= self.highest_ratio


def proportions(model: ModelSection) -> tuple[Proportion, ...]:
    """Return hidden ÷ layers and hidden ÷ heads of a model.

    The ranges are those of GPT-3 (128; 128), OPT-175B (128; 128), BLOOM (205; 128), Gopher (205; 128),
    PaLM (156; 256 by its own head size), MT-NLG (195; 160), Llama (65 to 130; 128) and Qwen3 (57 to 80; 128):
    width against depth matters little within them (Kaplan et al., 2020, figure 5), and a head of fewer than
    64 or more than 256 channels leaves kernels of attention slow.
    """
    return (
        Proportion(
            name="hidden/layers", ratio=model.hidden / model.layers, lowest_ratio=55.0, highest_ratio=210.0
        ),
        Proportion(
            name="hidden/heads", ratio=float(head_size(model)), lowest_ratio=64.0, highest_ratio=256.0
        ),
    )


def unusual_shape(model: ModelSection) -> Iterator[str]:
    """Yield a warning for each proportion of a larger model that published models do not have."""
    if model.hidden < LEAST_HIDDEN:
        return
    for shape in proportions(model):
        if not shape.is_usual:
            yield (
                f"{shape.name} is {shape.ratio:.0f}; published models of 1B parameters and more have "
                f"{shape.lowest_ratio:.0f} to {shape.highest_ratio:.0f}."
            )
