"""What a step of all groups' optimizers does to each group, and what a refused step leaves."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.checkpoint.format.state import Box
from bloomery.config.optim import OptimSection
from bloomery.errors import TrainingFailed
from bloomery.optim.clip import CountedGradient, examine
from bloomery.optim.groups import ParameterPiece, lay_out
from bloomery.parallel import optimizers as optimizers_module
from bloomery.parallel.axis import Axis
from bloomery.parallel.loss_scale import LossScale
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.optimizers import Optimizers, QueryKeyClip

SHAPES = {
    "embedding.weight": (8, 4),
    "blocks.0.mlp.down.weight": (4, 4),
    "blocks.0.norm.weight": (4,),
    "blocks.0.mlp.down.bias": (4,),
    "head.weight": (8, 4),
}


def weights_of(optim: OptimSection, *, shards: int = 1, split: bool = False) -> SimpleNamespace:
    """Masters and gradients of one rank, by the groups that `optim` makes, with values from a seed.

    split: whether another rank has the other half of each matrix.
    """
    pieces = [
        ParameterPiece(
            name=name,
            parameter_name=name,
            row_start=0,
            shape=shape,
            global_shape=(shape[0] * 2, *shape[1:]) if split else shape,
            offset=(0,) * len(shape),
        )
        for name, shape in SHAPES.items()
    ]
    layouts = lay_out(SHAPES.items(), pieces, optim, shards=shards)
    generator = torch.Generator().manual_seed(4)
    master = [torch.randn(len(group.held), generator=generator) for group in layouts]
    return SimpleNamespace(
        layouts=layouts,
        master=master,
        gradient=[torch.zeros_like(m) for m in master],
        names=tuple(SHAPES),
        norms_by_tensor=None,  # which no limit of these tests asks for
        scale_gradients=None,
        parts_to_update=lambda index, *, divides: [range(len(master[index]))],
        device=torch.device("cpu"),
    )


def step(optimizers: Optimizers, weights: SimpleNamespace, learning_rate: float = 0.1) -> None:
    facts = examine([CountedGradient(gradient=flat) for flat in weights.gradient], limit=0.0, unscale=1.0)
    optimizers.step(facts, learning_rate=learning_rate)


def by_name(weights: SimpleNamespace) -> dict[str, torch.Tensor]:
    return {
        place.name: flat[place.start : place.start + place.numel].clone()
        for group, flat in zip(weights.layouts, weights.master, strict=True)
        for place in group.parameters
    }


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_without_gradients_decays_matrices_and_leaves_norms_and_biases(name: str) -> None:
    weights = weights_of(optim := OptimSection(name=name, learning_rate=0.1, weight_decay=0.5))
    before = by_name(weights)
    step(Optimizers(weights, optim), weights)
    for parameter, after in by_name(weights).items():
        kept = 1.0 if len(SHAPES[parameter]) == 1 else 1.0 - 0.1 * 0.5
        assert torch.allclose(after, kept * before[parameter]), parameter


@pytest.mark.parametrize(
    ("layout", "remedy"), [({"shards": 2}, "parallel.zero = 0"), ({"split": True}, "parallel.tensor = 1")]
)
def test_muon_is_refused_where_a_rank_holds_parts_of_matrices(layout: dict, remedy: str) -> None:
    optim = OptimSection(name="muon", learning_rate=0.1)
    with pytest.raises(TrainingFailed) as refused:
        Optimizers(weights_of(optim, **layout), optim)
    assert "whole matrices" in refused.value.message and remedy in str(refused.value.remedy)
    Optimizers(weights_of(OptimSection(learning_rate=0.1), **layout), OptimSection(learning_rate=0.1))


def test_after_a_refused_step_the_optimizers_go_on_as_if_it_had_not_been() -> None:
    results = []
    for poisons in (set(), {1}):
        weights = weights_of(optim := OptimSection(learning_rate=0.1))
        optimizers, generator = Optimizers(weights, optim), torch.Generator().manual_seed(5)
        for number in range(3 + len(poisons)):
            for flat in weights.gradient:
                refused = number in poisons
                flat.copy_(
                    torch.full_like(flat, math.nan)
                    if refused
                    else torch.randn(flat.shape, generator=generator)
                )
            step(optimizers, weights)
        results.append([*weights.master, *(entry.tensor for entry in optimizers.state_entries())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_optimizers_that_begin_anew_have_forgotten_every_step() -> None:
    optim = OptimSection(name="muon", learning_rate=0.1, clip_method="z-score", skip_outliers=6.0)
    weights = weights_of(optim)
    optimizers = Optimizers(weights, optim)
    for flat in weights.gradient:
        flat.fill_(1.0)
    facts = examine([CountedGradient(gradient=flat) for flat in weights.gradient], limit=0.0, unscale=1.0)
    optimizers.step(optimizers.limit(facts, unscale=1.0), learning_rate=0.1)
    state = {entry.name: entry.tensor for entry in optimizers.state_entries()}
    assert all(state[f"optim.limit.{name}"].any() for name in ("norm_mean", "norms_seen", "norm_window"))
    optimizers.reset()
    assert not any(tensor.any() for tensor in state.values())


@pytest.mark.parametrize(
    ("setting", "scaled"),
    [("embedding_learning_rate", "embedding.weight"), ("head_learning_rate", "head.weight")],
)
def test_a_learning_rate_of_its_own_scales_the_updates_of_that_group_alone(setting: str, scaled: str) -> None:
    moved = []
    for own in ({}, {setting: 0.4}):
        weights = weights_of(optim := OptimSection(learning_rate=0.1, weight_decay=0.0, **own))
        before, generator = by_name(weights), torch.Generator().manual_seed(6)
        for flat in weights.gradient:
            flat.copy_(torch.randn(flat.shape, generator=generator))
        step(Optimizers(weights, optim), weights, learning_rate=0.05)
        moved.append({name: after - before[name] for name, after in by_name(weights).items()})
    for name in SHAPES:
        factor = 4.0 if name == scaled else 1.0
        assert torch.allclose(moved[1][name], factor * moved[0][name], atol=1e-6), name


def test_the_loss_scale_doubles_at_the_thousandth_good_step_in_a_row_and_counts_anew_after_an_overflow() -> (
    None
):
    good, overflow = torch.tensor(True), torch.tensor(False)
    scale = LossScale(torch.device("cpu"))
    start = float(scale.scale)
    for _ in range(999):
        scale.update(good)
    assert float(scale.scale) == start
    scale.update(good)
    assert float(scale.scale) == 2 * start
    for _ in range(500):
        scale.update(good)
    scale.update(overflow)
    assert float(scale.scale) == start
    for _ in range(LossScale.GROWTH_INTERVAL - 1):
        scale.update(good)
    assert float(scale.scale) == start
    scale.update(good)
    assert float(scale.scale) == 2 * start


def test_embeddings_and_head_are_not_decayed_where_the_recipe_says_so() -> None:
    weights = weights_of(
        optim := OptimSection(name="adamw", learning_rate=0.1, weight_decay=0.5, decay_embeddings=False)
    )
    before = by_name(weights)
    step(Optimizers(weights, optim), weights)
    after = by_name(weights)
    decayed = {name for name in SHAPES if not torch.equal(after[name], before[name])}
    assert decayed == {"blocks.0.mlp.down.weight"}


@pytest.mark.parametrize("decays", [True, False])
def test_adamw_has_the_rates_of_averaging_and_the_epsilon_of_the_recipe(
    decays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[int, dict[str, Any]] = {}

    def adamw(master: torch.Tensor, gradient: torch.Tensor, **settings: Any) -> SimpleNamespace:
        made[id(master)] = settings
        assert gradient.shape == master.shape and gradient is not master
        return SimpleNamespace()

    monkeypatch.setattr(optimizers_module, "FlatAdamW", adamw)
    optim = OptimSection(
        learning_rate=0.1, beta1=0.8, beta2=0.7, epsilon=1e-3, weight_decay=0.5, decay_embeddings=decays
    )
    weights = weights_of(optim)
    optimizers = Optimizers(weights, optim)
    found = {}
    for group, master in zip(weights.layouts, weights.master, strict=True):
        settings = made[id(master)]
        assert (settings["betas"], settings["epsilon"]) == ((0.8, 0.7), 1e-3)
        assert settings["updates"] is optimizers._updates[group.rule]
        found[group.rule] = settings["weight_decay"]
    of_ends = 0.5 if decays else 0.0
    assert found == {"matrix": 0.5, "embedding": of_ends, "head": of_ends, "plain": 0.0}


def test_heads_are_rescaled_by_their_number_among_those_that_a_tensor_parallel_rank_holds() -> None:
    model = SimpleNamespace(kv_heads=4, head_dim=2, section=SimpleNamespace(heads=4))
    block = SimpleNamespace(index=5, attention=SimpleNamespace(heads=2, logit_maxima=None, logit_stride=1))
    decoder: Any = SimpleNamespace(model=model, heads=range(2, 4), blocks=[block])

    def rows(part: str, first: int, count: int) -> SimpleNamespace:
        name = f"model.blocks.5.attention.{part}"
        return SimpleNamespace(name=name, box=Box((first, 0), (count, 1)), tensor=torch.ones(count, 1))

    entries = [rows("query.weight", 4, 3), rows("query.weight", 7, 1), rows("key.weight", 4, 4)]
    entries += [rows("value.weight", 4, 4), rows("output.weight", 0, 4)]
    told: list[str] = []
    weights: Any = SimpleNamespace(
        state_entries=lambda: entries, before_masters_change=lambda: told.append("changes")
    )
    mesh = Mesh(device=torch.device("cpu"), tensor=Axis(index=1, ranks=(0, 1)))
    clip = QueryKeyClip(decoder, weights, mesh=mesh, optim=OptimSection(learning_rate=0.1, qk_clip=4.0))
    clip._maxima[0].copy_(torch.tensor([2.0, 16.0]))
    clip.apply(torch.tensor(True))
    assert told == ["changes"], "a copy under way is waited for"
    assert [entry.tensor.flatten().tolist() for entry in entries] == [
        [1.0, 1.0, 0.5],
        [0.5],
        [1.0, 1.0, 0.5, 0.5],
        [1.0] * 4,
        [1.0] * 4,
    ]


def test_moments_counts_and_limits_belong_to_each_peer_alone() -> None:
    optim = OptimSection(name="muon", learning_rate=0.1, clip_method="z-score", skip_outliers=6.0)
    entries = list(Optimizers(weights_of(optim), optim).state_entries())
    assert {entry.name.rpartition(".")[2] for entry in entries} >= {"momentum", "second_moment", "updates"}
    assert {entry.scope for entry in entries} == {"peer"}


def test_muon_multiplies_where_the_masters_are_and_limits_lie_where_gradients_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(optimizers_module, "multiplies_bf16", lambda device: bool(asked.append(device)))
    optim = OptimSection(name="muon", learning_rate=0.1, clip_method="tensor", skip_outliers=6.0)
    weights = weights_of(optim)
    weights.device = torch.device("meta")
    limits = [
        entry.tensor
        for entry in Optimizers(weights, optim, precision="bf16").state_entries()
        if "limit" in entry.name
    ]
    assert asked == [torch.device("cpu")], "offloaded masters are updated there"
    assert {tensor.device for tensor in limits} == {torch.device("meta")}
    assert (len(SHAPES),) in {tuple(tensor.shape) for tensor in limits}, "a reference for each tensor"


@pytest.mark.parametrize(("scale", "left"), [(4.0, 2.0), (2.0, 1.0), (1.0, 1.0)])
def test_an_overflow_halves_the_loss_scale_down_to_one(scale: float, left: float) -> None:
    made = LossScale(torch.device("cpu"))
    made.scale.fill_(scale)
    made.update(torch.tensor(False))
    assert float(made.scale) == left
