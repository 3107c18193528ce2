"""The head of a tied embedding: where it has a parameter of its own, and what becomes of its gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bloomery.config.model import ModelSection
from bloomery.model.decoder import build
from bloomery.parallel.axis import Axis
from bloomery.parallel.flat import TiedHead, tied_head_of
from bloomery.parallel.mesh import Mesh


def test_a_tied_head_shares_the_embeddings_memory_and_passes_its_gradient_on() -> None:
    embedding = SimpleNamespace(weight=nn.Parameter(torch.ones(3, 2)))
    decoder: Any = SimpleNamespace(embedding=embedding, tied_head=())
    taken: list[Any] = []

    class Owner:
        def accumulate(self, parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            taken.append((parameter, parameter.grad.tolist()))
            parameter.grad = None

    head = TiedHead(decoder, Owner().accumulate)
    head.set_working_dtype(torch.float32)
    assert decoder.tied_head == () and head.with_two_gradients == ()
    embedding.weight.data = torch.full((3, 2), 2.0, dtype=torch.bfloat16)
    head.set_working_dtype(torch.bfloat16)
    (parameter,) = decoder.tied_head
    assert parameter.data_ptr() == embedding.weight.data_ptr() and parameter is not embedding.weight
    assert head.with_two_gradients == (embedding.weight,)
    (parameter.float() * 3.0).sum().backward()
    assert taken == [(embedding.weight, [[3.0, 3.0]] * 3)] and parameter.grad is None


@pytest.mark.parametrize(
    ("tied", "stages", "has_own"), [(True, 1, True), (False, 1, False), (True, 2, False)]
)
def test_only_a_tied_head_beside_its_embedding_has_a_parameter_of_its_own(
    tied: bool, stages: int, has_own: bool
) -> None:
    section = ModelSection(layers=2, hidden=8, heads=2, ffn=8, tied=tied)
    mesh = Mesh(device=torch.device("cpu"), pipeline=Axis(ranks=tuple(range(stages))))
    decoder = build(section, vocabulary=11, sequence_length=4)
    found = tied_head_of(decoder, mesh, lambda parameter: None)
    assert isinstance(found, TiedHead) is has_own
    assert tied_head_of(nn.Linear(2, 2), mesh, lambda parameter: None) is None
