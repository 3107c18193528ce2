"""Two ranks that hold halves of a model learn what one rank with the whole model learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.parallel.halves import CASES, compiled_and_eager, trained_halves
from tests.parallel.lines import spawn
from tests.parallel.small import CPU, MODELS, Held, Trained, build, train

from bloomery.parallel.mesh import Mesh
from bloomery.parallel.tensor import split_of, split_range
from bloomery.plan.pipeline_stages import padded_rows


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Trained]]:
    return spawn(2, trained_halves, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Trained]:
    mesh = Mesh(device=CPU)
    return {style: train(build(style, mesh), mesh) for style in MODELS}


@pytest.mark.parametrize(("style", "layout"), CASES)
def test_losses_norms_and_the_held_out_loss_are_those_of_one_rank(
    ranks: list[dict[Any, Trained]], alone: dict[str, Trained], style: str, layout: str
) -> None:
    for rank in ranks:
        assert np.allclose(rank[style, layout].steps, alone[style].steps, rtol=1e-5, atol=1e-6)
        assert rank[style, layout].held_out == pytest.approx(alone[style].held_out, rel=1e-5)


@pytest.mark.parametrize(("style", "layout"), CASES)
def test_every_parameters_gradient_is_that_of_one_rank(
    ranks: list[dict[Any, Trained]], alone: dict[str, Trained], style: str, layout: str
) -> None:
    for rank in ranks:
        for name, mine in rank[style, layout].gradients.items():
            whole = alone[style].gradients[name].values
            # Softmax does not see a key's bias: its gradient is rounding, and is held against the query's.
            scale = np.linalg.norm(alone[style].gradients[name.replace("key.bias", "query.bias")].values)
            assert np.linalg.norm(mine.values - whole[_window(mine)]) < 1e-5 * scale, name


@pytest.mark.parametrize(("style", "layout"), CASES)
def test_initial_weights_are_slices_of_the_whole_bit_for_bit_and_cover_it(
    ranks: list[dict[Any, Trained]], alone: dict[str, Trained], style: str, layout: str
) -> None:
    for name, whole in alone[style].initial.items():
        covered = np.zeros(whole.values.shape, dtype=int)
        for rank in ranks:
            mine = rank[style, layout].initial[name]
            assert mine.global_shape == whole.values.shape
            assert np.array_equal(mine.values, whole.values[_window(mine)]), name
            covered[_window(mine)] += 1
        assert np.all(covered == (1 if split_of(name) else 2)), name


def test_what_every_rank_holds_whole_stays_equal_to_the_last_bit(ranks: list[dict[Any, Trained]]) -> None:
    for key, mine in ranks[0].items():
        for name, held in mine.weights.items():
            if split_of(name) is None:
                assert np.array_equal(held.values, ranks[1][key].weights[name].values), (key, name)


def test_the_vocabularys_padding_is_never_stored_and_stays_zero(ranks: list[dict[Any, Trained]]) -> None:
    assert padded_rows(101, degree=2) == 56
    for rank, rows in zip(ranks, (50, 51), strict=True):
        for trained in rank.values():
            assert trained.weights["embedding.weight"].values.shape == (rows, 32)
            assert trained.padding == 0


@pytest.mark.parametrize(("size", "degree"), [(101, 4), (8, 8), (250_880, 4), (7, 3)])
def test_parts_are_as_even_as_they_divide_and_fit_their_padding(size: int, degree: int) -> None:
    parts = [split_range(size, index=index, degree=degree) for index in range(degree)]
    assert [number for one in parts for number in one] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert max(map(len, parts)) <= padded_rows(size, degree=degree)


def test_a_block_compiles_as_a_whole_with_its_collectives_inside(tmp_path: Path) -> None:
    for rank in spawn(2, compiled_and_eager, tmp_path):
        for eager, traced in rank:
            assert np.allclose(eager, traced, rtol=1e-5, atol=1e-6)


def _window(held: Held) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + size) for start, size in zip(held.offset, held.values.shape, strict=True)
    )
