import pytest

from bloomery.config.load import load_recipe
from bloomery.config.model import ModelSection
from bloomery.plan.parameters import forward_cost, teraflops, token_cost, utilisation

BLOOM = load_recipe("tr11-176b").recipe.model


@pytest.mark.parametrize(("batch", "seconds", "published"), [(16, 15.23, 8.04), (2048, 104.70, 149.76)])
def test_hardware_teraflops_of_bloom_are_those_of_its_log(batch, seconds, published):
    cost = token_cost(BLOOM, vocabulary=250_880, sequence_length=2048, recompute="full")
    assert (
        round(teraflops(cost.hardware, tokens=batch * 2048, seconds=seconds, accelerators=384), 2)
        == published
    )


@pytest.mark.parametrize("name", ["tr1-13b", "tr11-176b"])
def test_the_gpt_shape_costs_what_the_formula_says(name):
    recipe = load_recipe(name).recipe
    layers, h, s, v = recipe.model.layers, recipe.model.hidden, 2048, recipe.model.vocabulary
    cost = token_cost(recipe.model, vocabulary=v, sequence_length=s, recompute="full")
    assert cost.hardware == pytest.approx(
        96 * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h)), rel=1e-12
    )
    assert cost.model == pytest.approx(
        72 * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h)), rel=1e-12
    )


def products(model, vocabulary, sequence_length):
    """(rows, inner, columns) of every matmul of one forward pass over one sample."""
    s, d = sequence_length, model.hidden // model.heads
    narrow = model.kv_heads * d
    for _ in range(model.layers):
        yield from [(s, model.hidden, model.hidden)] * 2 + [(s, model.hidden, narrow)] * 2
        yield from [(s, d, s), (s, s, d)] * model.heads
        yield from [(s, model.hidden, model.ffn)] * 2 + [(s, model.ffn, model.hidden)]
    yield s, model.hidden, vocabulary


def test_the_cost_of_a_llama_is_that_of_its_matrix_products_counted_one_by_one():
    model = ModelSection(layers=3, hidden=24, heads=6, kv_heads=2, ffn=40)
    counted = sum(2 * rows * inner * columns for rows, inner, columns in products(model, 50, 16))
    assert forward_cost(model, vocabulary=50, sequence_length=16) * 16 == counted
    assert token_cost(model, vocabulary=50, sequence_length=16).model * 16 == 3 * counted


def test_recomputation_costs_hardware_and_not_the_model():
    model = ModelSection(layers=3, hidden=24, heads=6, ffn=40)
    none, selective, full = (
        token_cost(model, vocabulary=50, sequence_length=16, recompute=recompute)
        for recompute in ("none", "selective", "full")
    )
    assert none.model == selective.model == full.model == none.hardware
    assert selective.hardware - none.hardware == 4 * 3 * 16 * 24
    head = 2 * 50 * 24
    assert full.hardware - none.hardware == none.model // 3 - head


def test_utilisation_is_a_share_of_the_peak():
    assert utilisation(149.76, peak_teraflops=312.0) == pytest.approx(0.48)
