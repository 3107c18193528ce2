"""Updated weights are gathered in the order of a forward, which waits for each part when it comes to it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.parallel.test_building import model_of
from tests.parallel.test_flat_parts import Noted
from torch import nn

from bloomery.config.parallel import ParallelSection
from bloomery.model.fp8_scaling import Scaling
from bloomery.model.layers import Linear
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.updated_weights import UpdatedWeights

CPU = torch.device("cpu")
TOKENS = torch.arange(8)[None]


def sharded(
    calls: list[Any],
    *,
    zero: int = 1,
    fp8_scaling: Scaling = "tensor",
    compiled: bool = False,
    **parallel: Any,
) -> TrainingModel:
    axis = Noted(calls, "shard")
    mesh = Mesh(device=CPU, world=2, shard=axis, data=axis)
    section = ParallelSection(zero=zero, **parallel)
    model = model_of(mesh=mesh, parallel=section, fp8_scaling=fp8_scaling)
    model.weights.updated.finish()
    calls.clear()
    return model


def test_ranges_are_begun_in_the_order_of_a_forward_and_waited_for_block_by_block() -> None:
    calls: list[Any] = []
    model = sharded(calls, bucket_mb=0.0005)
    weights = model.weights
    weights.copy_masters_to_working()
    ranges = weights.updated._ranges
    assert [call[0] for call in calls] == ["shard.begin_all_gather"] * len(ranges)
    assert weights.updated.under_way == len(ranges) > 8
    positions = [part.position for part in ranges]
    assert positions == sorted(positions)
    names = [name for name, _ in model.decoder.named_parameters()]
    left: list[tuple[str, int]] = []

    def note(name: str) -> Any:
        return lambda *_: left.append((name, weights.updated.under_way))

    for name, part in model.decoder.named_modules():
        if name in ("embedding", "final_norm") or (name.startswith("blocks.") and name.count(".") == 1):
            part.register_forward_pre_hook(note(name))
    with torch.no_grad():
        model.decoder(TOKENS)

    def needs(name: str) -> int:
        last = max(number for number, parameter in enumerate(names) if parameter.startswith(f"{name}."))
        return sum(position > last for position in positions)

    blocks = [f"blocks.{number}" for number in range(4)]
    assert left == [
        ("embedding", needs("embedding")),
        *((name, needs(name)) for name in blocks),
        ("final_norm", 0),
    ]
    counts = [count for _, count in left]
    assert counts == sorted(set(counts), reverse=True), "each part of the forward waits for something"


def test_all_elements_of_all_groups_are_in_one_range_each() -> None:
    for zero, bucket_mb in ((1, 0.0005), (1, 0.0), (2, 0.0005), (3, 0.0005)):
        model = sharded([], zero=zero, bucket_mb=bucket_mb)
        groups = model.weights._groups
        for group in groups:
            own = sorted(
                (part.elements for part in model.weights.updated._ranges if part.group is group),
                key=lambda elements: elements.start,
            )
            if group.shards_weights:
                assert own == [], "its weights are gathered when they are needed"
                continue
            assert (own[0].start, own[-1].stop) == (0, group.layout.numel)
            assert [elements.stop for elements in own[:-1]] == [elements.start for elements in own[1:]]
            assert len(own) == 1 or (zero, bucket_mb) != (1, 0.0)


def test_who_reads_working_weights_waits_for_all_and_so_does_the_next_update() -> None:
    calls: list[Any] = []
    weights = sharded(calls, bucket_mb=0.0005).weights
    count = len(weights.updated._ranges)
    for read in (lambda: weights.working, lambda: weights.set_working_dtype(torch.bfloat16)):
        weights.copy_masters_to_working()
        calls.clear()
        read()
        assert calls[:count] == [("shard.waited",)] * count
    weights.updated.finish()
    weights.copy_masters_to_working()
    calls.clear()
    weights.copy_masters_to_working()
    assert [call[0] for call in calls] == ["shard.waited"] * count + ["shard.begin_all_gather"] * count


def test_without_overlap_each_range_is_waited_for_before_the_next() -> None:
    calls: list[Any] = []
    weights = sharded(calls, bucket_mb=0.0005, overlap=False).weights
    weights.copy_masters_to_working()
    count = len(weights.updated._ranges)
    assert [call[0] for call in calls] == ["shard.begin_all_gather", "shard.waited"] * count
    assert weights.updated.under_way == 0


def test_a_module_that_is_no_decoder_waits_before_its_forward() -> None:
    calls: list[Any] = []
    groups = sharded(calls).weights._groups
    module = nn.Linear(2, 2)
    module.forward = lambda x: calls.append("forward") or x  # type: ignore[method-assign, func-returns-value]
    positions = {parameter: 0 for group in groups for parameter in group.parameters}
    module.parameters = lambda recurse=True: iter(positions)  # type: ignore[method-assign]
    updated = UpdatedWeights(groups, module, bucket_bytes=0, overlaps=True)
    updated.begin()
    assert updated.under_way == len(groups)
    module(torch.ones(1, 2))
    assert calls[-2:] == [("shard.waited",), "forward"] and updated.under_way == 0


@pytest.mark.parametrize("zero", [0, 3])
def test_what_is_not_gathered_after_an_update_is_rounded_or_freed(zero: int) -> None:
    calls: list[Any] = []
    axis = Noted(calls, "data")
    shard = Noted(calls, "shard", degree=2 if zero else 1)
    mesh = Mesh(device=CPU, world=2, data=axis, shard=shard)
    model = model_of(mesh=mesh, parallel=ParallelSection(zero=zero), precision="bf16")
    for master in model.weights.master:
        master.fill_(3.0)
    model.weights.copy_masters_to_working()
    for group in model.weights._groups:
        if group.shards_weights:
            assert group.working.untyped_storage().size() == 0
        else:
            assert (mesh.shard.local_shard(group.working) == 3.0).all()


def in_8_bits(calls: list[Any], scaling: Scaling, **parallel: Any) -> TrainingModel:
    """A model with random weights, also those of the rank that is not there."""
    model = sharded(calls, fp8_scaling=scaling, **parallel)
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    model.set_phase(precision="fp8", recompute="none")
    for working in model.weights.working:
        working.normal_()
    model.weights.copy_masters_to_working()
    model.weights.updated.finish()
    return model


def rounded_blocks(model: TrainingModel) -> list[int]:
    """The blocks all of whose matrices have codes in 8 bits that are not cleared."""
    rounded = []
    for number, block in enumerate(model.decoder.blocks):
        copies = [codes_of(part) for part in block.modules() if isinstance(part, Linear)]
        if all(codes.view(torch.uint8).any() for codes in copies):
            rounded.append(number)
    return rounded


def codes_of(layer: Linear) -> torch.Tensor:
    codes = layer.scaled_weight.rows.codes if layer.scaled_weight else layer.fp8_weight.codes  # type: ignore[union-attr]
    assert codes is not None
    return codes


def clear_codes(model: TrainingModel) -> None:
    for part in model.decoder.blocks.modules():
        if isinstance(part, Linear):
            codes_of(part).view(torch.uint8).zero_()


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_a_block_has_its_weights_rounded_to_8_bits_when_they_have_arrived(scaling: Scaling) -> None:
    calls: list[Any] = []
    model = in_8_bits(calls, scaling, bucket_mb=0.0005)
    assert rounded_blocks(model) == [0, 1, 2, 3]
    calls.clear()
    model.weights.copy_masters_to_working()
    clear_codes(model)
    first = [name for name, *_ in calls].index("shard.begin_all_gather")
    assert first == (scaling == "tensor"), "scales do not wait for what is gathered"
    seen = list[list[int]]()
    for block in model.decoder.blocks:
        block.register_forward_pre_hook(lambda *_: seen.append(rounded_blocks(model)))
    with torch.no_grad():
        model.decoder(TOKENS)
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    for _ in range(2):  # an update whose weights no forward used is rounded before the next
        clear_codes(model)
        model.weights.copy_masters_to_working()
    assert model.weights.updated.under_way and rounded_blocks(model) == [0, 1, 2, 3]


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_without_overlap_weights_are_rounded_to_8_bits_before_the_next_forward(scaling: Scaling) -> None:
    model = in_8_bits([], scaling, overlap=False)
    clear_codes(model)
    model.weights.copy_masters_to_working()
    assert rounded_blocks(model) == [0, 1, 2, 3]


def test_an_evaluation_of_a_compiled_model_comes_after_what_compiled_code_makes_of_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seen = replace(sharded([], bucket_mb=0.0005), compiled=True), list[int]()
    monkeypatch.setattr(torch.compiler, "set_stance", lambda _stance: nullcontext())  # would load a compiler
    monkeypatch.setattr(TrainingModel, "_entropy", lambda own, *_: seen.append(own.weights.updated.under_way))
    model.weights.copy_masters_to_working()
    model.entropy([])
    assert seen == [0]
