"""A start says what a GPU lacks for the scales that a recipe asks for, before anything is built."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bloomery.config.load import LoadedRecipe, load_recipe
from bloomery.errors import ConfigError
from bloomery.parallel.mesh import Mesh
from bloomery.train import assemble

FP8 = "train.precision=fp8"


def start(*settings: str, device: str = "cuda") -> None:
    """Do what a start does before it builds the model."""
    loaded: LoadedRecipe = load_recipe("demo", ("optim.name=adamw", *settings))
    mesh = replace(Mesh(device=torch.device("cpu")), device=torch.device(device))
    assemble._refuse_unsupported_scaling(loaded, mesh)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.mark.parametrize("when", [FP8, "train.precision_changes=[[64, 'fp8']]"])
def test_a_phase_that_a_gpu_cannot_multiply_is_refused_at_the_start(when: str) -> None:
    with pytest.raises(ConfigError) as refused:
        start("train.fp8_scaling=mx", when)
    (mistake,) = refused.value.mistakes
    assert (mistake.key, mistake.value, mistake.source) == ("train.fp8_scaling", "mx", "command line")
    assert "10.0 or higher (Blackwell), and NVIDIA H200 has 9.0" in mistake.problem
    assert "'tensor'" in mistake.remedy


def test_what_a_device_has_or_emulates_and_what_no_phase_uses_is_accepted() -> None:
    for settings in (("train.fp8_scaling=row", FP8), ("train.fp8_scaling=block", FP8), (FP8,)):
        start(*settings)
    start("train.fp8_scaling=mx", "train.precision=bf16")
    start("train.fp8_scaling=mx", FP8, device="cpu")
