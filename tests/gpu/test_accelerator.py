"""What a run does on an accelerator, against the CPU: skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.gpu.small_run import train_small
from tests.kernels import accumulate_cases, fp8_cases, loss_cases, split_loss_cases
from tests.kernels.attention_cases import LARGE, Case, differences
from tests.parallel.small import LENGTH, MODELS, SAMPLES, build, micro_batches

import bloomery
from bloomery.model.fp8 import FP8_BACKWARD, FP8_FORWARD
from bloomery.model.fp8_scaling import FINE_SCALINGS, FineScaling, scaled_linear
from bloomery.model.fp8_units import lacking_units
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.mesh import Mesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no accelerator"),
]


def accumulated(style: str, device: str, *, precision: str = "fp32") -> tuple[float, list[torch.Tensor]]:
    """The loss of some samples and its gradients, in fp64 on the CPU."""
    mesh = Mesh(device=torch.device(device))
    model: TrainingModel = build(style, mesh)
    model.set_phase(precision=precision, recompute="none")
    batches = [batch.to(mesh.device) for batch in micro_batches(0, index=0, degree=1)]
    entropy, _ = model.accumulate(batches, 0, weight=1 / (SAMPLES * LENGTH))
    model.weights.reduce()
    return float(entropy), [gradient.double().cpu() for gradient in model.weights.gradient]


@pytest.mark.parametrize("style", MODELS)
def test_losses_and_gradients_are_those_of_the_cpu(style: str) -> None:
    loss, gradients = accumulated(style, "cpu")
    there_loss, there = accumulated(style, "cuda")
    assert there_loss == pytest.approx(loss, rel=1e-5)
    for own, other in zip(gradients, there, strict=True):
        assert (own - other).norm() <= 1e-4 * own.norm()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_narrow_precision_stays_near_fp32(precision: str) -> None:
    loss, _ = accumulated("llama", "cuda")
    narrow, gradients = accumulated("llama", "cuda", precision=precision)
    assert narrow == pytest.approx(loss, rel=0.05)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("sizes", [(512, 1024, 768), (200, 260, 130)], ids=str)
@pytest.mark.parametrize("scaling", FINE_SCALINGS)
def test_products_of_scaled_factors_are_those_of_the_cpu(
    scaling: FineScaling, sizes: tuple[int, int, int]
) -> None:
    lacking = lacking_units(scaling, torch.device("cuda"))
    if lacking:
        pytest.skip(lacking)
    n, i, o = sizes
    generator = torch.Generator().manual_seed(1)
    x, weight, slope = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((n, i), (o, i), (n, o))
    )

    def computed(device: str) -> list[torch.Tensor]:
        own_x, own_weight = (tensor.clone().to(device).requires_grad_() for tensor in (x, weight))
        y = scaled_linear(own_x, own_weight, scaling=scaling)
        y.backward(slope.to(device))
        assert own_x.grad is not None and own_weight.grad is not None
        return [tensor.detach().cpu().double() for tensor in (y, own_x.grad, own_weight.grad)]

    for found, expected in zip(computed("cuda"), computed("cpu"), strict=True):
        assert (found - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_attention_by_tiles_is_attention_up_to_the_roundings_of_bf16(case: Case) -> None:
    assert max(differences(case, device="cuda", dtype=torch.bfloat16, tiles=None)) < 0.02


@pytest.mark.parametrize("vocabulary", [1000, 50_257, 131_072])
def test_the_loss_in_bf16_is_that_of_fp64_up_to_roundings(vocabulary: int) -> None:
    found = loss_cases.differences(tokens=256, vocabulary=vocabulary, device="cuda", dtype=torch.bfloat16)
    assert max(found) < 0.02


def test_the_loss_of_split_logits_in_bf16_is_that_of_fp64_up_to_roundings() -> None:
    cases = split_loss_cases.all_cases("cuda", torch.bfloat16, (1000, 50_257, 131_072))
    for *found, by_padding, _ in cases:
        assert max(found) < 0.02 and by_padding == 0.0


@pytest.mark.parametrize("dtype", [FP8_FORWARD, FP8_BACKWARD], ids=str)
def test_codes_of_8_bits_and_their_transpose_are_torchs(dtype: torch.dtype) -> None:
    matrices = fp8_cases.matrices(torch.Generator().manual_seed(1))
    matrices["large"] = torch.randn(3000, 5008).bfloat16()
    unequal = {name: fp8_cases.unequal_codes(x.cuda(), dtype) for name, x in matrices.items()}
    assert unequal == dict.fromkeys(matrices, 0)


def test_sums_of_gradients_have_the_bits_of_torchs() -> None:
    assert all(accumulate_cases.all_cases("cuda", (*accumulate_cases.SIZES, 2**24 + 9)))


def test_a_resumed_run_ends_with_the_bits_of_an_unbroken_one(tmp_path: Path) -> None:
    def trained(name: str, *, steps: int) -> Path:
        return train_small(tmp_path / name, {"train.steps": steps, "train.deterministic": True})

    unbroken = trained("unbroken", steps=12)
    trained("resumed", steps=6)
    resumed = trained("resumed", steps=12)
    one, other = (bloomery.load(run, device="cpu").decoder.state_dict() for run in (unbroken, resumed))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
