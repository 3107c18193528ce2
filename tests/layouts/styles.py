"""Three tiny models, each with what its family has: the matrix trains every layout with each.

Sizes: 4 blocks or 5, so that stages are even in two styles and uneven in one; 8 query heads; vocabularies
that 2 and 4 divide, and one that they do not. Adam's epsilon is above the rounding of the gradients: at 1e-8
an element whose gradient is nothing but rounding moves as far as any other, and one process with other
micro-batches drifts away from itself by 5e-5 within 20 steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bloomery.config.load import parse_recipe
from bloomery.config.recipe import Recipe
from bloomery.config.validate import check_recipe

COMMON = """
[run]
name = "layouts"
[data]
sources = ["python:stdlib"]
sequence_length = 32
[train]
steps = 20
global_batch = 8
micro_batch = 2
precision = "fp32"
compile = "off"
loss_chunk = 48
[optim]
learning_rate = 4e-3
epsilon = 1e-6
[schedule]
shape = "constant"
unit = "steps"
warmup = 4
[loss]
z_loss = 1e-3
[model]
"""

MODELS: Mapping[str, str] = {
    "llama": """
layers = 4
hidden = 64
heads = 8
kv_heads = 4
ffn = 96
vocabulary = 96
""",
    "bloom": """
layers = 5
hidden = 64
heads = 8
vocabulary = 99
norm = "layernorm"
position = "alibi"
activation = "gelu"
bias = true
tied = true
embedding_norm = true
hidden_dropout = 0.1
""",
    "gpt": """
layers = 4
hidden = 64
heads = 8
vocabulary = 100
norm = "layernorm"
position = "learned"
activation = "gelu_tanh"
bias = true
tied = true
hidden_dropout = 0.1
attention_dropout = 0.1
""",
}


def recipe_of(style: str, settings: Sequence[str] = ()) -> Recipe:
    """The tiny recipe of a style, with overrides. Raises ConfigError as a start would."""
    loaded = parse_recipe(COMMON + MODELS[style], settings, label=style)
    check_recipe(loaded.recipe, dict(loaded.sources))
    return loaded.recipe
