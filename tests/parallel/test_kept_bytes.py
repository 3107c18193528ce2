"""What a block keeps for its backward with each recomputation, counted, is what the planner says."""

from __future__ import annotations

import pytest
import torch
from tests.layouts.counted_memory import counted_memory
from tests.layouts.layouts import BLOOM, LLAMA
from tests.layouts.styles import recipe_of
from tests.layouts.training import build
from tests.machine import has_python_headers
from tests.parallel.small import CPU
from torch import Tensor

from bloomery import torch_private
from bloomery.config.recipe import Recipe
from bloomery.model.attention import AttentionContext
from bloomery.model.dropout import DropoutAddress, dropout_address
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.mesh import Mesh
from bloomery.plan.block_cost import Workload
from bloomery.plan.hardware import Accelerator, Hardware, Node
from bloomery.plan.layout import Layout
from bloomery.plan.memory import block_activation_bytes, eager_activation_bytes

SIZES = ("model.layers=2", "model.hidden=128", "data.sequence_length=256", "parallel.working=by-block")
MODES = ("none", "elementwise", "mlp", "full")
SAMPLES = 2


def planned(recipe: Recipe, mode: str, *, compiled: bool) -> float:
    machine = Hardware(
        name="a machine",
        accelerator=Accelerator(kind="cpu", memory_gib=1.0, memory_gb_per_s=1.0, fp32_teraflops=1.0),
        node=Node(accelerators=1),
    )
    work = Workload(
        model=recipe.model,
        vocabulary=96,
        sequence_length=256,
        micro_batch=SAMPLES,
        precision=recipe.train.precision,
        layout=Layout(),
        hardware=machine,
    )
    beside = 0.0 if compiled else eager_activation_bytes(work, mode)
    return block_activation_bytes(work, mode) + beside


def second_block(model: TrainingModel, recipe: Recipe) -> tuple[Tensor, AttentionContext, None]:
    """The arguments of the second block in a forward."""
    taken: list[tuple[Tensor, AttentionContext, None]] = []
    tokens = torch.arange(SAMPLES * 256).reshape(SAMPLES, 256) % 90
    address: DropoutAddress | None = None
    if recipe.model.hidden_dropout:
        address = dropout_address(seed=1, step=0, samples=torch.arange(SAMPLES), positions=range(256))
    hook = model.decoder.blocks[1].register_forward_pre_hook(lambda _, told: taken.append(told))
    with torch.no_grad():
        model.decoder(tokens, address=address)
    hook.remove()
    x, context, cache = taken[0]
    return x.clone().requires_grad_(), context, cache


@pytest.fixture(autouse=True)
def units_for_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without them keeps copies in fp32 for its products, which no plan of a GPU counts."""
    monkeypatch.setattr(torch_private, "has_bf16_matmul", lambda: True)


def kept(style: str, mode: str, precision: str, *, compiled: bool) -> float:
    """What a block keeps, relative to what is planned."""
    settings = (*SIZES, f"train.precision={precision}", f"train.compile={'on' if compiled else 'off'}")
    recipe = recipe_of(style, settings)
    model = build(recipe, Mesh(device=CPU))
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    model.set_phase(precision=precision, recompute=mode)
    arguments = second_block(model, recipe)
    block = model.decoder.blocks[1]
    for group in model.weights._groups:
        group.all_gather_weights()
    block.forward(*arguments)  # compiles
    with counted_memory() as counted:
        output = block.forward(*arguments)
    nbytes = counted.held - output.untyped_storage().nbytes() + arguments[0].untyped_storage().nbytes()
    return planned(recipe, mode, compiled=compiled) / nbytes


@pytest.mark.parametrize("style", [LLAMA, BLOOM])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_an_eager_block_keeps_what_is_planned(style: str, precision: str, mode: str) -> None:
    assert kept(style, mode, precision, compiled=False) == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
@pytest.mark.needs("g++", package="g++")
@pytest.mark.needs(has_python_headers, package="python3-dev")
@pytest.mark.parametrize("style", [LLAMA, BLOOM])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_block_keeps_what_is_planned(style: str, precision: str, mode: str) -> None:
    assert kept(style, mode, precision, compiled=True) == pytest.approx(1.0, abs=0.1)
