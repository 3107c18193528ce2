"""The optimizers against slow references, and their gate."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from bloomery.config.optim import OptimSection
from bloomery.optim.clip import CountedGradient, examine
from bloomery.optim.groups import ParameterPiece, Placement, block_of, lay_out, rectangles, rule_of
from bloomery.optim.update_rules import FlatAdamW, FlatMuon, orthogonalise

MATRICES = (Placement(name="a", start=0, shape=(4, 8)), Placement(name="b", start=64, shape=(8, 4)))


def whole(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {"shape": shape, "global_shape": shape, "offset": (0,) * len(shape)}


def facts_of(gradient: torch.Tensor, limit: float = 0.0, unscale: float = 1.0):
    return examine([CountedGradient(gradient=gradient)], limit=limit, unscale=unscale)


def muon() -> tuple[FlatMuon, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    master = torch.randn(128, generator=generator)
    gradient = torch.randn(128, generator=generator)
    return (
        FlatMuon(master, gradient, MATRICES, momentum=0.9, weight_decay=0.1, iterations=5),
        master,
        gradient,
    )


@pytest.mark.parametrize("epsilon", [1e-8, 1e-2])
def test_adamw_equals_the_textbook_in_double_precision(epsilon: float) -> None:
    generator = torch.Generator().manual_seed(1)
    master = torch.randn(50, generator=generator)
    gradient = torch.zeros(50)
    expected, m, v = master.double().clone(), torch.zeros(50).double(), torch.zeros(50).double()
    updates = torch.zeros(())
    adamw = FlatAdamW(master, gradient, betas=(0.9, 0.95), epsilon=epsilon, weight_decay=0.1, updates=updates)
    for step in range(1, 6):
        gradient.copy_(torch.randn(50, generator=generator))
        facts = facts_of(gradient, limit=2.0)
        clipped = gradient.double() * min(1.0, 2.0 / float(gradient.double().norm()))
        m, v = 0.9 * m + 0.1 * clipped, 0.95 * v + 0.05 * clipped**2
        expected = expected * (1 - 0.01 * 0.1)
        expected -= 0.01 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + epsilon)
        updates += 1
        adamw.step(facts, learning_rate=0.01)
    assert torch.allclose(master.double(), expected, atol=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(poison: float) -> None:
    master = torch.ones(8)
    gradient = torch.full((8,), 0.5)
    updates = torch.zeros(())
    adamw = FlatAdamW(master, gradient, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1, updates=updates)
    updates += 1
    adamw.step(facts_of(gradient), learning_rate=0.1)
    orthogonal, weights, slopes = muon()
    orthogonal.step(facts_of(slopes), learning_rate=0.1)
    states = [
        master,
        adamw.first_moment,
        adamw.second_moment,
        weights,
        orthogonal.momentum_buffer,
    ]
    before = [tensor.clone() for tensor in states]
    gradient[3] = slopes[7] = poison
    updates += 1
    adamw.step(facts_of(gradient), learning_rate=0.1)
    orthogonal.step(facts_of(slopes), learning_rate=0.1)
    assert all(torch.equal(tensor, old) for tensor, old in zip(states, before, strict=True))


def test_muon_equals_one_matrix_at_a_time() -> None:
    optimizer, master, gradient = muon()
    start, momentum = master.clone(), torch.zeros(128)
    generator = torch.Generator().manual_seed(9)
    for _ in range(3):
        # Another direction each time: of a constant gradient, momentum alone has the same directions.
        gradient.copy_(torch.randn(128, generator=generator))
        optimizer.step(facts_of(gradient), learning_rate=0.02)
        momentum = 0.9 * momentum + gradient
        ahead = gradient + 0.9 * momentum
        start = start * (1 - 0.02 * 0.1)
        for place in MATRICES:
            span = slice(place.start, place.start + place.numel)
            update = orthogonalise(ahead[span].view(1, *place.shape), iterations=5)[0]
            start[span] -= 0.02 * 0.2 * math.sqrt(8) * update.flatten()
    used = torch.cat([torch.arange(p.start, p.start + p.numel) for p in MATRICES])
    assert torch.allclose(master[used], start[used], atol=1e-6)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (32, 32)])
def test_orthogonalising_brings_singular_values_near_one_and_keeps_the_directions(
    shape: tuple[int, int],
) -> None:
    matrix = torch.randn(2, *shape, generator=torch.Generator().manual_seed(5))
    result = orthogonalise(matrix, iterations=6)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.5
    assert values.max() < 1.3
    u, _, v = torch.linalg.svd(matrix[0], full_matrices=False)
    turned = u.T @ result[0] @ v.T
    assert (turned - torch.diag(torch.diagonal(turned))).abs().max() < 1e-3


def test_products_of_16_bits_give_updates_of_32() -> None:
    matrix = torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(5))
    rounded = orthogonalise(matrix, iterations=5, matmul_dtype=torch.bfloat16)
    whole = orthogonalise(matrix, iterations=5)
    assert rounded.dtype == torch.float32 and rounded.shape == matrix.shape
    assert not torch.equal(rounded, whole) and (rounded - whole).abs().max() < 0.1
    unscaled = orthogonalise(1000 * matrix, iterations=5)
    assert torch.allclose(unscaled, whole, atol=1e-4), "only directions count"


def test_a_refused_update_leaves_weights_moments_and_momentum() -> None:
    optimizer, master, gradient = muon()
    optimizer.step(facts_of(gradient), learning_rate=0.1)
    before = master.clone(), optimizer.momentum_buffer.clone()
    facts = facts_of(gradient)
    refused = replace(facts, applies=torch.tensor(False))
    optimizer.step(refused, learning_rate=0.1)
    assert torch.equal(master, before[0]) and torch.equal(optimizer.momentum_buffer, before[1])
    assert optimizer.moments == {"momentum": optimizer.momentum_buffer}


def test_adamw_names_its_moments_and_begins_with_none() -> None:
    adamw = FlatAdamW(
        torch.ones(4), torch.full((4,), 2.0), betas=(0.9, 0.75), epsilon=1e-8, weight_decay=0.0,
        updates=torch.ones(()),
    )  # fmt: skip
    assert not adamw.moments["first_moment"].any() and not adamw.moments["second_moment"].any()
    adamw.step(facts_of(torch.full((4,), 2.0)), learning_rate=0.0)
    assert adamw.moments["first_moment"].tolist() == pytest.approx([0.2] * 4)
    assert adamw.moments["second_moment"].tolist() == pytest.approx([1.0] * 4)


@pytest.mark.parametrize(
    ("name", "shape", "adamw", "orthogonal"),
    [
        ("blocks.3.mlp.up.weight", (8, 4), "matrix", "muon"),
        ("blocks.3.mlp_norm.weight", (4,), "plain", "plain"),
        ("embedding.weight", (8, 4), "embedding", "embedding"),
        ("positions.weight", (8, 4), "embedding", "embedding"),
        ("head.weight", (8, 4), "head", "head"),
        ("final_norm.weight", (4,), "plain", "plain"),
    ],
)
def test_the_rule_of_a_tensor_follows_from_its_place_and_shape(
    name: str, shape: tuple[int, ...], adamw: str, orthogonal: str
) -> None:
    piece = ParameterPiece(name=name, parameter_name=name, row_start=0, **whole(shape))
    assert rule_of(piece, OptimSection(name="adamw", learning_rate=0.1)) == adamw
    assert rule_of(piece, OptimSection(name="muon", learning_rate=0.1)) == orthogonal
    assert block_of(name) == ("blocks.3" if name.startswith("blocks.") else "")


def test_a_stretch_of_a_matrix_is_a_rows_end_whole_rows_and_a_rows_beginning() -> None:
    assert list(rectangles((9,), 2, 7)) == [(2, (2,), (5,))]
    assert list(rectangles((5, 4), 6, 18)) == [(6, (1, 2), (1, 2)), (8, (2, 0), (2, 4)), (16, (4, 0), (1, 2))]
    assert list(rectangles((5, 4), 5, 7)) == [(5, (1, 1), (1, 2))]
    assert list(rectangles((5, 4), 4, 12)) == [(4, (1, 0), (2, 4))]


def test_shards_of_a_group_are_equal_and_a_block_may_have_a_group_of_its_own() -> None:
    names = ("blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight", "embedding.weight")
    shapes = dict(zip(names, ((7, 9), (3, 5), (10, 4)), strict=True))
    pieces = [
        ParameterPiece(name=name, parameter_name=name, row_start=0, **whole(shape))
        for name, shape in shapes.items()
    ]
    optim = OptimSection(name="adamw", learning_rate=0.1)
    together = lay_out(shapes.items(), pieces, optim, shards=3, shard=1)
    assert [(group.rule, group.bucket, group.numel, group.held) for group in together] == [
        ("matrix", "", 192, range(64, 128)),
        ("embedding", "", 192, range(64, 128)),
    ]
    # The second shard of the blocks is the last of them, whose fifteen elements begin at 64.
    assert [(place.name, place.start, place.shape) for place in together[0].held_logical()] == [
        ("blocks.1.mlp.up.weight", 0, (3, 5))
    ]
    assert together[0].padding == 64 - 15 and together[1].padding == 64
    apart = lay_out(shapes.items(), pieces, optim, by_block=True)
    assert [group.bucket for group in apart] == ["blocks.0", "blocks.1", ""]


def test_clipping_and_unscaling_meet_in_one_coefficient() -> None:
    gradient = torch.full((4,), 1024.0)
    facts = facts_of(gradient, limit=1.0, unscale=256.0)
    assert float(facts.norm) == pytest.approx(8.0)
    assert float((gradient * facts.coefficient).norm()) == pytest.approx(1.0, rel=1e-5)


def test_zeros_do_not_count_the_padding() -> None:
    gradient = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0])
    assert int(examine([CountedGradient(gradient=gradient, padding=2)], limit=0.0, unscale=1.0).zeros) == 1


def test_norms_and_biases_are_never_decayed_and_embeddings_never_go_to_muon() -> None:
    optim = OptimSection(name="muon", learning_rate=0.1)
    shapes = [("e", (10, 4)), ("n", (4,)), ("qkv", (12, 4))]
    pieces = [
        ParameterPiece(name="embedding.weight", parameter_name="e", row_start=0, **whole((10, 4))),
        ParameterPiece(name="blocks.0.attention_norm.weight", parameter_name="n", row_start=0, **whole((4,))),
        *(
            ParameterPiece(
                name=f"blocks.0.attention.{part}.weight",
                parameter_name="qkv",
                row_start=4 * i,
                **whole((4, 4)),
            )
            for i, part in enumerate(("query", "key", "value"))
        ),
    ]
    groups = {group.rule: group for group in lay_out(shapes, pieces, optim)}
    assert [p.name for p in groups["embedding"].logical] == ["embedding.weight"]
    assert [p.name for p in groups["plain"].logical] == ["blocks.0.attention_norm.weight"]
    assert [p.start for p in groups["muon"].logical] == [0, 16, 32]


def test_every_parameter_starts_at_a_multiple_of_256_bytes() -> None:
    shapes = {
        "blocks.0.mlp.down.weight": (3, 5),
        "blocks.0.mlp.up.weight": (7, 9),
        "blocks.1.mlp.down.weight": (8, 8),
    }
    pieces = [
        ParameterPiece(name=name, parameter_name=name, row_start=0, **whole(s)) for name, s in shapes.items()
    ]
    (group,) = lay_out(shapes.items(), pieces, OptimSection(name="adamw", learning_rate=0.1))
    starts = [placement.start for placement in group.parameters]
    assert starts == [0, 64, 128] and group.numel % 64 == 0
    assert group.held == range(group.numel), "nothing is sharded unless somebody says so"
    assert group.padding == group.numel - (3 * 5 + 7 * 9 + 8 * 8)


def test_a_matrix_of_zeros_stays_zeros_when_it_is_orthogonalised() -> None:
    assert not orthogonalise(torch.zeros(2, 3, 4), iterations=5).any()
