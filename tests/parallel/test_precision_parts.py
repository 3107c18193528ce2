"""What precision a run computes in, whose elements count, and what the device's best speed is."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.parallel.test_building import LLAMA, model_of
from tests.parallel.test_flat_parts import Noted
from torch import nn

from bloomery.config.model import ModelSection
from bloomery.config.optim import OptimSection
from bloomery.config.parallel import ParallelSection
from bloomery.errors import TrainingFailed
from bloomery.optim.clip import Clamps, CountedGradient, examine
from bloomery.parallel import block_weights
from bloomery.parallel import optimizers as optimizers_module
from bloomery.parallel import precision as precision_module
from bloomery.parallel.axis import Axis
from bloomery.parallel.flat import FlatGroup
from bloomery.parallel.loss_scale import LossScale
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.optimizers import Optimizers
from bloomery.parallel.precision import MasterWeights, measure_peak_flops, resolve_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(("has_units", "auto"), [(True, "bf16"), (False, "fp32")])
def test_auto_is_what_the_device_has_units_for_and_all_else_is_itself(
    has_units: bool, auto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def supported(*, including_emulation: bool) -> bool:
        return has_units or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert resolve_precision("auto", GPU) == auto
    monkeypatch.setattr(precision_module.torch_private, "has_bf16_matmul", lambda: has_units)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **told: not has_units)
    assert resolve_precision("auto", CPU) == auto
    assert [resolve_precision(name, CPU) for name in ("fp16", "fp8", "bf16")] == ["fp16", "fp8", "bf16"]


@pytest.mark.parametrize(
    ("device", "precision", "mode", "dtype", "size"),
    [
        (CPU, "fp32", "native", torch.float32, 1024),
        (CPU, "bf16", "native", torch.bfloat16, 1024),
        (CPU, "bf16", "fp32", torch.float32, 1024),
        (GPU, "fp8", "native", torch.bfloat16, 8192),
    ],
)
def test_the_peak_is_that_of_the_fastest_product_in_the_dtype_that_multiplies(
    device: torch.device,
    precision: str,
    mode: str,
    dtype: torch.dtype,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = [
        0.05,
        0.02,
        0.04,
        0.03,
        0.06,
        0.01,
    ]  # of each product; the fourth passes 0.15 s with its pauses
    now, made, waited = [100.0], list[Any](), list[Any]()

    class Matrix:
        def to(self, kind: torch.dtype) -> Matrix:
            made.append(kind)
            return self

        def __matmul__(self, other: object) -> None:
            now[0] += seconds.pop(0)

    monkeypatch.setattr(precision_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(torch, "randn", lambda *shape, device: made.append((shape, device)) or Matrix())
    monkeypatch.setattr(precision_module, "matmul_mode_for", lambda of, kind: mode)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    assert measure_peak_flops(device, precision) == pytest.approx(2 * size**3 / 0.02)
    assert made == [((size, size), device), dtype] * 2
    assert len(seconds) == 1 and waited == ([device] * 5 if device is GPU else [])


def test_a_product_that_takes_longer_than_the_probe_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 9.0, 9.0, 11.0, 11.0])
    monkeypatch.setattr(precision_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(torch, "randn", lambda *shape, device: torch.ones(1, 1))
    assert measure_peak_flops(CPU, "fp32") == pytest.approx(2 * 1024**3 / 2.0)


@pytest.mark.parametrize("share", ["split", "whole", "partial", "echoed", "echo"])
def test_of_ranks_with_copies_one_counts_and_of_parts_each(share: str) -> None:
    def counts(*, tensor: int, replica: int) -> bool:
        weights: Any = object.__new__(MasterWeights)
        ranks = (0, 1)
        axes = {"tensor": Axis(index=tensor, ranks=ranks), "replica": Axis(index=replica, ranks=ranks)}
        weights._mesh = Mesh(device=CPU, **axes)
        return weights._counts(SimpleNamespace(share=share))

    of_all = {place: counts(tensor=place[0], replica=place[1]) for place in ((0, 0), (0, 1), (1, 0), (1, 1))}
    assert not of_all[0, 1] and not of_all[1, 1], "another replica counts them"
    assert (of_all[0, 0], of_all[1, 0]) == {
        "split": (True, True),
        "whole": (True, False),
        "partial": (True, False),
        "echoed": (True, True),
        "echo": (False, False),
    }[share]


@pytest.mark.parametrize(("overlap", "ahead"), [(True, 1), (True, 2), (True, 9), (True, 0), (False, 2)])
def test_a_blocks_weights_are_gathered_beside_the_blocks_before_or_after_it(
    overlap: bool, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(block_weights, "gather_around", lambda *told, **more: given.append((told, more)))
    axis = Noted([], "shard")
    mesh = Mesh(device=CPU, world=2, shard=axis, data=axis)
    model_of(mesh=mesh, parallel=ParallelSection(zero=3, overlap=overlap, prefetch_blocks=ahead))

    def buckets(groups: list[FlatGroup]) -> list[str]:
        return list(dict.fromkeys(group.layout.bucket for group in groups))

    names = [f"blocks.{number}" for number in range(4)]
    assert [buckets(groups) for (_, groups), _ in given] == [[name] for name in names]
    ahead = ahead if overlap else 0
    before = [names[max(0, number - ahead) : number][::-1] for number in range(4)]
    after = [names[number + 1 : number + 1 + ahead] for number in range(4)]
    assert [buckets(more["before"]) for _, more in given] == before
    assert [buckets(more["after"]) for _, more in given] == after
    assert [block.index for (block, _), _ in given] == [0, 1, 2, 3]


def test_no_block_is_gathered_across_one_that_another_rank_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(block_weights, "gather_around", lambda *told, **more: given.append(more))
    module: Any = nn.Module()
    module.blocks = nn.ModuleDict({str(index): nn.Identity() for index in (0, 1, 3, 4)})
    groups: Any = [
        SimpleNamespace(layout=SimpleNamespace(bucket=bucket))
        for bucket in ("", "blocks.0", "blocks.1", "blocks.3", "blocks.4")
    ]
    block_weights.gather_around_blocks(module, groups, ahead=3)
    _, zero, one, three, four = groups
    assert [more["after"] for more in given] == [[one], [], [four], []]
    assert [more["before"] for more in given] == [[], [zero], [], [three]]


def test_weights_that_are_rounded_by_block_are_not_rounded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(block_weights, "gather_around", lambda *told, **more: given.append(more))
    model_of(parallel=ParallelSection(working="by-block"), precision="bf16")
    assert given == [{"before": [], "after": []}] * 4
    given.clear()
    model_of()
    assert given == []


def test_gradients_are_examined_with_their_padding_and_by_who_counts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(precision_module, "examine", lambda *told, **more: given.append((told, more)))
    weights = model_of().weights
    monkeypatch.setattr(weights, "_counts", lambda group: group is weights.layouts[0])
    weights.examine(limit=1.5, unscale=4.0)
    (((counted,), more),) = given
    assert more == {"limit": 1.5, "unscale": 4.0, "total": weights._mesh.all_reduce}
    assert [one.counts for one in counted] == [True, *[False] * (len(counted) - 1)]
    assert [one.padding for one in counted] == [layout.padding for layout in weights.layouts]
    for one, gradient in zip(counted, weights.reduced_gradient, strict=True):
        assert one.gradient is gradient


def test_a_loss_scale_and_its_good_steps_are_saved_for_this_peer() -> None:
    scale = LossScale(CPU)
    entries = {entry.name: (entry.tensor, entry.scope) for entry in scale.state_entries()}
    assert entries == {
        "loss_scale.scale": (scale.scale, "peer"),
        "loss_scale.good_steps": (scale.good_steps, "peer"),
    }
    assert scale.state_values() == {}


def test_state_of_masters_and_gradients_is_named_and_shared_as_the_run_says() -> None:
    weights = model_of(replace(LLAMA, layers=1)).weights
    masters, gradients = list(weights.state_entries()), list(weights.gradient_entries())
    assert {entry.name.partition(".")[0] for entry in masters} == {"model"}
    assert [entry.name.partition(".")[2] for entry in masters] == [
        entry.name.partition(".")[2] for entry in gradients
    ]
    assert {entry.name.partition(".")[0] for entry in gradients} == {"gradient"}
    assert {entry.scope for entry in masters} == {"shared"}
    weights.scope = "peer"
    assert {entry.scope for entry in weights.state_entries()} == {"peer"}
    assert {entry.dtype for entry in (*masters, *gradients)} == {"float32"}
    for master, gradient in zip(masters, gradients, strict=True):
        assert tuple(master.box.shape) == tuple(master.tensor.shape) == tuple(gradient.tensor.shape)


@pytest.mark.parametrize(
    ("precision", "has_units", "dtype"),
    [
        ("bf16", True, torch.bfloat16),
        ("bf16", False, torch.float32),
        ("fp32", True, torch.float32),
    ],
)
def test_muon_multiplies_in_bf16_where_the_run_does_and_the_device_can(
    precision: str, has_units: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    matrices: list[Any] = []
    monkeypatch.setattr(optimizers_module, "multiplies_bf16", lambda device: has_units)
    monkeypatch.setattr(
        optimizers_module,
        "FlatMuon",
        lambda *told, **more: given.append(more) or matrices.extend(told[2]) or SimpleNamespace(),
    )
    optim = OptimSection(
        name="muon", learning_rate=0.1, muon_momentum=0.8, weight_decay=0.3, muon_iterations=4
    )
    weights = model_of(optim=optim).weights
    Optimizers(weights, optim, precision=precision)
    own = {name for name in weights.names if "blocks" in name and "norm" not in name}
    assert {place.name for place in matrices} == own, "of what is fused each by itself"
    assert given == [{"momentum": 0.8, "weight_decay": 0.3, "iterations": 4, "matmul_dtype": dtype}]


@pytest.mark.parametrize(
    ("held", "shape", "setting"),
    [(range(5), (2, 5), "parallel.zero = 0"), (range(10), (2, 4), "parallel.tensor = 1")],
)
def test_muon_refuses_parts_of_matrices_with_the_setting_that_made_them(
    held: range, shape: tuple[int, int], setting: str
) -> None:
    group: Any = SimpleNamespace(
        held=held, numel=10, logical=[SimpleNamespace(shape=shape, global_shape=(2, 5))]
    )
    with pytest.raises(TrainingFailed, match="Muon needs whole matrices") as refused:
        optimizers_module._refuse_parts(group)
    assert refused.value.remedy == f"Set {setting}, or optim.name = 'adamw'."


class Loudest(Axis):
    """An axis of two ranks, on the other of which something is larger by 1."""

    def all_reduce(self, tensor: torch.Tensor, *, maximum: bool = False) -> torch.Tensor:
        assert maximum
        return tensor.add_(1.0)


@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_inner_sizes_are_the_largest_on_all_axes(axis: str) -> None:
    mesh = Mesh(device=CPU)
    model = model_of(mesh=mesh)
    sizes = model.inner_sizes
    assert sizes is not None
    sizes._mesh = replace(mesh, **{axis: Loudest(ranks=(0, 1))})  # type: ignore[arg-type]
    sizes.begin(wanted=True)
    sizes._logits[1][2] = 5.0
    sizes._hidden[3].fill_(torch.nan)
    found = sizes.collect()
    assert found.shape == (3, 4)
    assert found[0].tolist() == [1.0, 6.0, 1.0, 1.0]
    assert found[1].tolist() == [1.0, 1.0, 1.0, torch.inf], "no rank's NaN is lost among other ranks' numbers"
    assert not any(own.any() for own in (*sizes._logits, *sizes._hidden)), "the next begin anew"


def test_heads_are_rescaled_by_the_largest_logit_of_all_replicas_of_the_data() -> None:
    optim = OptimSection(learning_rate=0.1, qk_clip=4.0)
    model = model_of(ModelSection(layers=1, hidden=16, heads=4, ffn=24), optim=optim)
    clip = model.query_key_clip
    assert clip is not None
    clip._mesh = replace(clip._mesh, data=Loudest(ranks=(0, 1)))
    for master in model.weights.master:
        master.fill_(1.0)
    clip._maxima[0].copy_(torch.tensor([2.0, 3.0, 7.0, torch.inf]))
    clip.apply(torch.tensor(False))
    held = {entry.name: entry.tensor for entry in model.weights.state_entries()}
    assert (held["model.blocks.0.attention.query.weight"] == 1.0).all() and not clip._maxima[0].any()
    clip._maxima[0].copy_(torch.tensor([2.0, 3.0, 7.0, torch.inf]))
    clip.apply(torch.tensor(True))
    for part in ("query", "key"):
        rows = held[f"model.blocks.0.attention.{part}.weight"].view(4, -1)
        assert rows[:, 0].tolist() == pytest.approx([1.0, 1.0, 0.5**0.5, 1.0])
    assert (held["model.blocks.0.attention.value.weight"] == 1.0).all()


def test_optimizers_hand_on_each_limit_and_take_the_facts_to_the_masters() -> None:
    optim = OptimSection(learning_rate=0.1, clip_method="z-score", skip_outliers=6.0)
    optimizers = Optimizers(model_of(optim=optim).weights, optim)
    facts = examine([CountedGradient(gradient=torch.ones(4))], limit=0.0, unscale=1.0)
    optimizers.limit(facts, unscale=1.0)
    histories = {entry.name: entry.tensor for entry in optimizers.state_entries() if "limit" in entry.name}
    assert histories and any(bool(tensor.any()) for tensor in histories.values())
    optimizers.load_state_values({})
    assert not any(bool(tensor.any()) for tensor in histories.values()), "a checkpoint without limits"
    given: list[Any] = []
    optimizers._limits = SimpleNamespace(limit=lambda *told, **more: given.append((told, more)))  # type: ignore[assignment]
    clamps = Clamps(z_score=2.5)
    optimizers.limit(facts, unscale=4.0, clamps=clamps)
    ((told, more),) = given
    assert told == (facts,) and (more["unscale"], more["clamps"]) == (4.0, clamps)
    asked: list[torch.device] = []
    elsewhere: Any = SimpleNamespace(to=lambda device: asked.append(device) or facts)
    optimizers.step(elsewhere, learning_rate=0.1)
    assert asked == [CPU]


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_are_added_up_again_after_those_that_were_dropped(fails: bool) -> None:
    weights = model_of(replace(LLAMA, layers=1)).weights
    parameter = next(iter(weights._group_of))
    with pytest.raises(InterruptedError) if fails else nullcontext(), weights.tapped(discards=True):
        if fails:
            raise InterruptedError
        parameter.grad = torch.ones_like(parameter)
        weights.accumulate_gradients([parameter])
    weights.begin_accumulation(backwards=1)
    parameter.grad = torch.full_like(parameter, 2.0)
    weights.accumulate_gradients([parameter])
    assert {float(gradient.amax()) for gradient in weights.gradient} == {0.0, 2.0}


def test_a_run_that_begins_has_no_good_steps_behind_it() -> None:
    scale = LossScale(CPU)
    scale.good_steps.fill_(LossScale.GROWTH_INTERVAL - 1)
    scale.reset()
    scale.update(torch.tensor(True))
    assert (float(scale.scale), float(scale.good_steps)) == (LossScale.FIRST, 1.0)


def test_a_block_of_which_nobody_holds_a_weight_has_a_size_of_zero() -> None:
    model = model_of(LLAMA)
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    weights = model.weights
    layers = 1 + max(int(name.split(".")[1]) for name in weights.names if name.startswith("blocks."))
    sizes = weights.root_mean_squares(layers + 1).tolist()
    assert all(size > 0.0 for size in sizes[:-1]) and sizes[-1] == 0.0


def test_the_size_of_a_blocks_weights_is_that_of_what_each_rank_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = model_of(LLAMA).weights
    for group, master in zip(weights.layouts, weights.master, strict=True):
        master.fill_(3.0 if group.rule == "matrix" else 100.0)
    monkeypatch.setattr(weights, "_counts", lambda group: group.rule == "matrix")
    assert weights.root_mean_squares(4).tolist() == pytest.approx([3.0] * 4)


@pytest.mark.parametrize(("overlap", "limit"), [(True, 1), (False, 0)])
def test_one_sum_of_sharded_gradients_runs_beside_the_backward_where_sums_overlap_it(
    overlap: bool, limit: int
) -> None:
    weights = model_of(parallel=ParallelSection(overlap=overlap)).weights
    assert len({id(group._in_flight) for group in weights._groups}) == 1, "of all groups together"
    assert weights._groups[0]._in_flight._limit == limit


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_gradients_that_were_spoilt_are_no_numbers_and_their_padding_stays_zero(offload: str) -> None:
    weights = model_of(replace(LLAMA, layers=1), parallel=ParallelSection(offload=offload)).weights
    for flat in (*weights.reduced_gradient, *weights.gradient):
        flat.zero_()
    weights.spoil_gradients()
    for group, *both in zip(weights.layouts, weights.reduced_gradient, weights.gradient, strict=True):
        for flat in both:
            assert int(torch.isnan(flat).sum()) == len(group.held) - group.padding
    facts = weights.examine(limit=0.0, unscale=1.0)
    assert not bool(facts.applies)


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_each_tensor_has_its_own_norm_and_factor_in_the_order_of_their_names(offload: str) -> None:
    weights = model_of(replace(LLAMA, layers=2), parallel=ParallelSection(offload=offload)).weights
    sizes = dict.fromkeys(weights.names, 0)
    held = {name: list[torch.Tensor]() for name in weights.names}
    for group, gradient in zip(weights.layouts, weights.gradient, strict=True):
        for place in group.held_logical():
            sizes[place.name] += place.numel
            held[place.name].append(gradient[place.start : place.start + place.numel])
    for number, parts in enumerate(held.values(), 1):
        for part in parts:
            part.fill_(float(number))
    norms = [number * size**0.5 for number, size in enumerate(sizes.values(), 1)]
    assert weights.norms_by_tensor().tolist() == pytest.approx(norms)
    weights.scale_gradients(torch.arange(float(len(held))))
    for number, parts in enumerate(held.values()):
        assert parts and all((part == number * (number + 1)).all() for part in parts)
