from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.config.model import ModelSection
from bloomery.model.decoder import build
from bloomery.model.initial_filling import initialise
from bloomery.model.initial_values import InitialRule, initial_rows, initial_rule
from bloomery.model.logical_parameters import logical_parameters
from bloomery.model.shape import ResolvedModel, resolve

SECTION = ModelSection(layers=8, hidden=96, heads=4, norm="layernorm", bias=True)


def resolved(**changes: object) -> ResolvedModel:
    return resolve(replace(SECTION, **changes), vocabulary=1000, sequence_length=32)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["normal", "uniform", "constant"]))
def test_any_rows_equal_that_slice_of_the_whole(data: st.DataObject, kind: str) -> None:
    height = data.draw(st.integers(1, 300))
    start = data.draw(st.integers(0, height))
    stop = data.draw(st.integers(start, height))
    rule = InitialRule(kind=kind, scale=0.5)
    whole = initial_rows("some.weight", (height, 5), rows=range(height), rule=rule, seed=7)
    part = initial_rows("some.weight", (height, 5), rows=range(start, stop), rule=rule, seed=7)
    assert np.array_equal(part, whole[start:stop])


def test_values_depend_on_seed_name_and_block() -> None:
    rule = InitialRule(kind="normal", scale=1.0)
    one = initial_rows("a.weight", (128, 64), rows=range(128), rule=rule, seed=1)
    for other in (
        initial_rows("a.weight", (128, 64), rows=range(128), rule=rule, seed=2),
        initial_rows("b.weight", (128, 64), rows=range(128), rule=rule, seed=1),
        np.roll(one, 64, axis=0),
    ):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.05


def test_values_do_not_change_with_the_release_of_numpy() -> None:
    rule = InitialRule(kind="normal", scale=1.0)
    values = initial_rows("blocks.0.mlp.up.weight", (70, 2), rows=range(63, 66), rule=rule, seed=1234)
    assert values.dtype == np.float32
    np.testing.assert_allclose(values.ravel(), PINNED, rtol=1e-6)


PINNED = [
    0.7868220210075378,
    0.1264873594045639,
    0.7238585948944092,
    0.02364329807460308,
    0.1170938313,
    1.9197619,
]


def test_each_rule_has_its_moments() -> None:
    spread = {
        "embedding.weight": 0.02,
        "blocks.3.mlp.up.weight": 0.02,
        "blocks.3.mlp.down.weight": 0.02 / math.sqrt(16),
        "blocks.3.attention.output.weight": 0.02 / math.sqrt(16),
    }
    for name, expected in spread.items():
        values = initial_rows(name, (1000, 96), rows=range(1000), rule=initial_rule(name, resolved()), seed=1)
        assert values.std() == np.float32(expected).item() or abs(values.std() / expected - 1) < 0.02
        assert abs(values.mean()) < 4 * expected / math.sqrt(values.size)


def test_the_standard_deviation_may_be_a_function_of_the_width() -> None:
    assert resolved(init_std="sqrt(1/3h)").init_std == math.sqrt(1 / 288)
    assert resolved(init_std="sqrt(2/5h)").init_std == math.sqrt(2 / 480)
    down = initial_rule("blocks.0.mlp.down.weight", resolved(residual_init="same"))
    assert down == InitialRule(kind="normal", scale=0.02)


def test_a_xavier_embedding_is_uniform_within_its_bound() -> None:
    rule = initial_rule("embedding.weight", resolved(embedding_init="xavier_uniform"))
    bound = math.sqrt(6 / (1000 + 96))
    assert rule == InitialRule(kind="uniform", scale=bound)
    values = initial_rows("embedding.weight", (1000, 96), rows=range(1000), rule=rule, seed=1)
    assert 0.99 * bound < np.abs(values).max() <= bound
    assert abs(values.std() / (bound / math.sqrt(3)) - 1) < 0.02


def test_norms_start_as_ones_and_biases_as_zeros() -> None:
    decoder = build(SECTION, vocabulary=100, sequence_length=8)
    initialise(decoder, seed=1)
    for logical in logical_parameters(decoder):
        if logical.name.endswith("bias"):
            assert not logical.tensor.any()
        elif "norm" in logical.name:
            assert torch.equal(logical.tensor, torch.ones(logical.shape))
        else:
            assert logical.tensor.std() > 0
