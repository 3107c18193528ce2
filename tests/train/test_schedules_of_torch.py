"""A start says where torch cannot split a backward as the pipeline schedule wants it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bloomery import torch_private
from bloomery.config.load import load_recipe
from bloomery.errors import ConfigError
from bloomery.train import assemble

PIPELINE = ("parallel.pipeline=2", "train.micro_batch=1", "train.compile=off")


def start(*settings: str) -> None:
    """Do what a start does before it builds the model."""
    assemble._refuse_unsupported_schedule(load_recipe("demo", (*PIPELINE, *settings)))


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv"])
def test_a_schedule_that_torch_cannot_follow_is_refused_at_the_start(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (f"parallel.schedule={schedule}", "parallel.chunks=2")
    monkeypatch.setattr(assemble, "can_split_backward", lambda: True)
    start(*settings)
    monkeypatch.setattr(assemble, "can_split_backward", lambda: False)
    start("parallel.schedule=1f1b")
    with pytest.raises(ConfigError) as refused:
        start(*settings)
    (mistake,) = refused.value.mistakes
    assert (mistake.key, mistake.value) == ("parallel.schedule", schedule)
    assert f"torch {torch.__version__} cannot" in mistake.problem and "1f1b" in mistake.remedy


def test_a_backward_is_split_where_a_function_of_pythons_tells_what_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In torch 2.11 its node raises instead."""

    class Silent:
        @property
        def _input_metadata(self) -> None:
            raise RuntimeError("is invalid for this instance of _C._FunctionBase")

    if torch.__version__ >= "2.13":
        with torch.no_grad():
            assert torch_private.can_split_backward()
    silent = SimpleNamespace(grad_fn=Silent())
    monkeypatch.setattr(torch_private._Unchanged, "apply", lambda _x: silent)
    assert not torch_private.can_split_backward()
