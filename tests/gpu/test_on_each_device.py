"""What a step is made of: one body for each device, the CPU in the suite and a GPU with `-m gpu`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.gpu.small_run import train_small
from tests.layouts.layouts import BLOOM, GPT, LLAMA
from tests.layouts.styles import recipe_of
from tests.layouts.training import build
from torch.profiler import ProfilerActivity, profile

import bloomery
from bloomery.config.elastic import ElasticSection
from bloomery.data_loader.batches import MicroBatch
from bloomery.diloco.outer_update import Reduced
from bloomery.diloco.peer_vector import PeerVector
from bloomery.diloco.pseudo_gradient import PseudoGradient
from bloomery.diloco.stored_average import StoredAverage
from bloomery.model.fp8 import fp8_linear
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.optimizers import Optimizers
from bloomery.train.step import deterministic_kernels
from bloomery.train.time_by_part import IDLE, UPDATE, time_by_part

LENGTH, SAMPLES = 32, 4
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no accelerator"),
    ],
)
on_each_device = pytest.mark.parametrize("device", ["cpu", GPU])
on_a_gpu = pytest.mark.parametrize("device", [GPU])


def model_on(
    device: str, *settings: str, style: str = LLAMA, precision: str = "bf16", recompute: str = "none"
) -> TrainingModel:
    recipe = recipe_of(style, (f"train.precision={precision}", *settings))
    model = build(recipe, Mesh(device=torch.device(device)))
    model.initialise(seed=1, bigrams=lambda: torch.zeros(1, 1))
    model.set_phase(precision=precision, recompute=recompute)
    return model


def batches(device: str, *, documents: bool = False, samples: int = SAMPLES) -> list[MicroBatch]:
    """Random text, two samples at a time; with documents, each sample is of two."""
    text = torch.randint(0, 90, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    borders = torch.tensor([[11], [20], [7], [31]])[:samples]
    numbers = (torch.arange(LENGTH)[None] >= borders).int()
    return [
        MicroBatch(
            tokens=text[at : at + 2, :-1],
            targets=text[at : at + 2, 1:],
            documents=numbers[at : at + 2] if documents else None,
            samples=torch.arange(at, at + 2),
        ).to(torch.device(device))
        for at in range(0, samples, 2)
    ]


def accumulated(model: TrainingModel, given: list[MicroBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    """The summed loss and the gradients by logical name, on the CPU in fp64."""
    entropy, _ = model.accumulate(given, 0, weight=1 / (SAMPLES * LENGTH))
    model.weights.reduce()
    gradients = {one.name: one.tensor.double().cpu().clone() for one in model.weights.gradient_entries()}
    return float(entropy), gradients


def farthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """How far all gradients together are from others, as a share of these."""
    assert found.keys() == expected.keys()
    squares = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return (squares / sum(float(one.square().sum()) for one in expected.values())) ** 0.5


def updated(model: TrainingModel, device: str, *, steps: int = 3) -> list[torch.Tensor]:
    """The masters after some steps, on the CPU."""
    optimizers = Optimizers(model.weights, recipe_of(LLAMA, ()).optim)
    for step in range(steps):
        model.accumulate(batches(device), step, weight=1 / (SAMPLES * LENGTH))
        model.weights.reduce()
        facts = model.weights.examine(limit=1.0, unscale=1.0)
        optimizers.step(facts, learning_rate=1e-3)
        model.weights.copy_masters_to_working()
    return [master.cpu().clone() for master in model.weights.master]


@on_each_device
@pytest.mark.parametrize("style", [LLAMA, BLOOM, GPT])
@pytest.mark.parametrize("documents", [False, True])
def test_bf16_is_fp32_of_the_cpu_up_to_roundings(device: str, style: str, *, documents: bool) -> None:
    """On a GPU, ALiBi, documents and dropout take the kernels by tiles, and the loss takes its own."""
    loss, expected = accumulated(
        model_on("cpu", style=style, precision="fp32"), batches("cpu", documents=documents)
    )
    narrow, found = accumulated(model_on(device, style=style), batches(device, documents=documents))
    assert narrow == pytest.approx(loss, rel=5e-3)
    assert farthest(found, expected) < 0.05


@on_each_device
def test_documents_change_the_loss(device: str) -> None:
    masked, _ = accumulated(model_on(device), batches(device, documents=True))
    whole, _ = accumulated(model_on(device), batches(device))
    assert masked != pytest.approx(whole, rel=1e-4)


@on_each_device
@pytest.mark.parametrize("recompute", ["none", "elementwise", "full"])
def test_working_weights_by_block_and_recomputation_change_no_bit(device: str, recompute: str) -> None:
    with deterministic_kernels(wanted=True):
        _, kept = accumulated(model_on(device), batches(device))
        by_block = model_on(device, "parallel.working=by-block", recompute=recompute)
        _, found = accumulated(by_block, batches(device))
    assert all(torch.equal(kept[name], found[name]) for name in kept)


@on_each_device
def test_offloaded_masters_train_what_those_on_the_device_train(device: str) -> None:
    expected = updated(model_on(device), device)
    found = updated(model_on(device, "parallel.offload=cpu"), device)
    for own, other in zip(found, expected, strict=True):
        # Roundings of one step move the gradients of the next. Without an update it would be a tenth.
        assert (own - other).norm() <= 5e-3 * other.norm()


@on_each_device
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(128, 96, 64), (50, 72, 88)])
def test_a_product_in_fp8_is_that_of_its_rounded_factors(
    device: str, rows: int, outputs: int, inputs: int
) -> None:
    random = torch.Generator().manual_seed(rows)
    x, weight, slope = (
        torch.randn(size, generator=random) for size in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    results = []
    for place, dtype in (("cpu", torch.float32), (device, torch.bfloat16)):
        factors = [one.bfloat16().to(place, dtype).requires_grad_() for one in (x, weight)]
        product = fp8_linear(*factors)
        product.backward(slope.bfloat16().to(place, dtype))
        results.append([one.detach().float().cpu() for one in (product, factors[0].grad, factors[1].grad)])
    for own, other in zip(results[1], results[0], strict=True):
        assert (own - other).norm() < 0.01 * other.norm()


@on_a_gpu
@pytest.mark.parametrize(("style", "precision"), [(LLAMA, "bf16"), (BLOOM, "bf16"), (LLAMA, "fp8")])
def test_compiled_blocks_have_the_gradients_of_eager_ones(device: str, style: str, precision: str) -> None:
    loss, expected = accumulated(model_on(device, style=style, precision=precision), batches(device))
    compiled = model_on(device, "train.compile=on", style=style, precision=precision)
    assert compiled.compiles_blocks
    found_loss, found = accumulated(compiled, batches(device))
    assert found_loss == pytest.approx(loss, rel=5e-3)
    # Where fused roundings move a number across a border of 8 bits, it moves by up to an eighth.
    assert farthest(found, expected) < {"bf16": 0.05, "fp8": 0.2}[precision]


@on_a_gpu
def test_compiled_blocks_by_block_compute_again_what_they_had(device: str) -> None:
    _, expected = accumulated(model_on(device, "train.compile=on"), batches(device))
    model = model_on(device, "train.compile=on", "parallel.working=by-block", recompute="elementwise")
    for _ in range(2):  # the second time blocks get their weights again
        _, found = accumulated(model, batches(device))
    assert farthest(found, expected) < 0.01


@on_each_device
def test_the_deterministic_switch_gives_the_same_bits_each_time(device: str) -> None:
    with deterministic_kernels(wanted=True):
        once, again = (updated(model_on(device, style=BLOOM), device) for _ in range(2))
    assert all(torch.equal(own, other) for own, other in zip(once, again, strict=True))


@on_each_device
def test_a_profile_divides_a_step_among_its_parts(device: str, tmp_path: Path) -> None:
    model, given = model_on(device), batches(device)
    optimizers = Optimizers(model.weights, recipe_of(LLAMA, ()).optim)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    accumulated(model, given)
    with profile(activities=activities) as recording:
        model.accumulate(given, 0, weight=1 / (SAMPLES * LENGTH))
        model.weights.reduce()
        with torch.profiler.record_function(UPDATE):
            optimizers.step(model.weights.examine(limit=1.0, unscale=1.0), learning_rate=1e-3)
    recording.export_chrome_trace(str(tmp_path / "trace.json"))
    parts = {one.part: one for one in time_by_part(json.loads((tmp_path / "trace.json").read_text()))}
    wanted = {"products", "attention", "loss and head", "sums of gradients", "optimizer", IDLE}
    assert parts.keys() >= wanted
    assert all(parts[part].calls > 0 and parts[part].seconds > 0 for part in wanted - {IDLE})
    assert all(0 <= one.share < 1 for one in parts.values())


@on_each_device
def test_an_outer_step_of_one_peer_leaves_the_weights_that_it_computed(device: str) -> None:
    model = model_on(device, precision="fp32")
    update = PseudoGradient(PeerVector(model.weights, Mesh(device=torch.device(device))), ElasticSection())
    update.begin()
    before = update.base.clone()
    updated(model, device)
    update.offer(1)
    average = StoredAverage("fp32", members=1)
    for piece in update.pieces():
        average.append(update.values(1.0, piece)[0].numpy())
    drift = torch.from_numpy(average.whole())
    prepared = update.prepare(Reduced(average=average, residual=None))
    update.adopt()
    assert update.digest() == prepared and drift.abs().max() > 0
    section = ElasticSection()
    expected = before - section.outer_learning_rate * (1 + section.outer_momentum) * drift
    assert torch.allclose(update.base, expected, atol=1e-6)
    held = torch.cat([master.cpu() for master in model.weights.master])
    assert torch.equal(held, update.base)


@on_each_device
def test_a_save_beside_the_training_holds_the_state_of_its_step(tmp_path: Path, device: str) -> None:
    """`bloomery.fit` takes the GPU where there is one."""
    settings = {
        "train.deterministic": True,
        "checkpoint.every_steps": 2,
        "checkpoint.keep_last": 3,
        "checkpoint.background": "on",
        "evaluate.at_end": False,
        "log.tensorboard": False,
    }
    beside, stopped = (
        train_small(tmp_path / name, {**settings, "train.steps": steps})
        for name, steps in (("beside", 6), ("stopped", 4))
    )
    newest = max((stopped / "checkpoints").iterdir())
    same_step = next(
        path for path in (beside / "checkpoints").iterdir() if path.name[:11] == newest.name[:11]
    )
    one, other = (bloomery.load(path).decoder.state_dict() for path in (same_step, newest))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
