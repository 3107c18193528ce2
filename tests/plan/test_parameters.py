import pytest

from bloomery.config.load import load_recipe
from bloomery.config.model import ModelSection
from bloomery.plan.parameters import count_parameters

BLOOM = load_recipe("tr11-176b").recipe.model
INTELLECT = load_recipe("intellect1-10b").recipe.model


def test_bloom_has_the_published_sizes():
    count = count_parameters(BLOOM, vocabulary=250_880, sequence_length=2048)
    h, layers, v = 14336, 70, 250_880
    assert count.embedding == v * h == 3_596_615_680
    assert count.block.total == 12 * h**2 + 13 * h == 2_466_437_120
    assert count.total == layers * (12 * h**2 + 13 * h) + v * h + 4 * h == 176_247_271_424
    assert count.head == 0
    assert count.block.matrices == 12 * h**2


def test_the_llama_shape_has_the_published_size():
    count = count_parameters(INTELLECT, vocabulary=128_256, sequence_length=8192)
    h, layers, f, v, kv, d = 4096, 42, 14336, 128_256, 8, 128
    per_layer = 2 * h * h + 2 * h * kv * d + 3 * h * f + 2 * h
    assert count.block.total == per_layer
    assert count.total == layers * per_layer + h + 2 * v * h == 10_211_381_248


def test_learned_positions_are_counted_and_the_vocabulary_may_be_the_tokenizers():
    model = ModelSection(
        layers=2,
        hidden=8,
        heads=2,
        norm="layernorm",
        position="learned",
        activation="gelu",
        bias=True,
        tied=True,
    )
    count = count_parameters(model, vocabulary=11, sequence_length=16)
    assert count.positions == 16 * 8
    assert count.total == 2 * (12 * 64 + 13 * 8) + 11 * 8 + 16 * 8 + 2 * 8


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("kv_heads", ["auto", 1])
def test_the_total_is_the_sum_of_the_logical_tensors(tied, bias, activation, kv_heads):
    model = ModelSection(
        layers=3,
        hidden=12,
        heads=3,
        kv_heads=kv_heads,
        ffn=20,
        norm="layernorm",
        activation=activation,
        bias=bias,
        tied=tied,
        embedding_norm=True,
        position="alibi",
    )
    narrow = 12 if kv_heads == "auto" else 4
    matrices = [(12, 12), (narrow, 12), (narrow, 12), (12, 12), (20, 12), (12, 20)]
    if activation == "swiglu":
        matrices.append((20, 12))
    block = sum(rows * columns + (rows if bias else 0) for rows, columns in matrices) + 4 * 12
    expected = 3 * block + 7 * 12 * (1 if tied else 2) + 2 * 12 + 2 * 12
    assert count_parameters(model, vocabulary=7, sequence_length=5).total == expected
