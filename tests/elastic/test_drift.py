"""The outer step against torch's own, fragments as a partition, and what a failed try leaves."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from bloomery.checkpoint.state import Scope, StateEntry, whole
from bloomery.config.elastic import ElasticSection
from bloomery.data.ranges import Ranges, merged
from bloomery.elastic.drift import Drift
from bloomery.elastic.exchange import Reduced
from bloomery.elastic.fragments import fragments_of


class OneTensor:
    """A peer of one rank whose model is a vector: two blocks, an embedding and a head."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.weights = torch.randn(numel, generator=torch.Generator().manual_seed(3))

    def zeros(self) -> Tensor:
        return torch.zeros(self.numel)

    def read_masters(self, into: Tensor) -> None:
        into.copy_(self.weights)

    def read_gradients(self, into: Tensor) -> None:
        raise AssertionError("weights are averaged")

    def write_masters(self, values: Tensor, within: Ranges | None = None) -> None:
        for span in within or (range(self.numel),):
            self.weights[span.start : span.stop] = values[span.start : span.stop]

    def write_gradients(self, values: Tensor) -> None:
        raise AssertionError("weights are averaged")

    def entries(self, flat: Tensor, *, prefix: str, scope: Scope) -> Iterable[StateEntry]:
        yield whole(f"{prefix}.all", flat, scope=scope)

    def places(self) -> list[tuple[str, range]]:
        names = ("embedding.weight", "blocks.0.mlp.gate.weight", "blocks.1.norm.weight", "head.weight")
        size = self.numel // len(names)
        return [(name, range(i * size, (i + 1) * size)) for i, name in enumerate(names)]


def test_the_outer_step_is_torchs_nesterov_on_pseudo_gradients() -> None:
    vector = OneTensor(64)
    drift = Drift(vector, ElasticSection(inner_steps=5))
    drift.begin()
    reference = vector.weights.clone().requires_grad_()
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for round in range(1, 5):
        moved = 0.01 * torch.randn(64, generator=torch.Generator().manual_seed(round))
        vector.weights += moved
        drift.offer(round)
        values, residual = drift.values()
        drift.prepare(Reduced(values=values, residual=residual))
        drift.adopt()
        reference.grad = -moved
        optimizer.step()
        torch.testing.assert_close(vector.weights, reference.detach(), rtol=0, atol=1e-6)
        assert torch.equal(vector.weights, drift.base)


def test_nothing_changes_before_a_round_is_committed() -> None:
    vector = OneTensor(64)
    drift = Drift(vector, ElasticSection(inner_steps=5, codec="int4"))
    drift.begin()
    vector.weights += 1
    drift.offer(1)
    before, digest = vector.weights.clone(), drift.digest()
    for _ in range(2):  # two tries of the ring, of which the first spoils what it was given
        values, residual = drift.values()
        assert residual is not None
        values.fill_(torch.nan)
        residual.fill_(torch.nan)
        values, residual = drift.values()
        prepared = drift.prepare(Reduced(values=values, residual=residual))
        assert torch.equal(vector.weights, before) and drift.digest() == digest
    drift.adopt()
    assert drift.digest() == prepared != digest


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_fragments_divide_the_model(count: int) -> None:
    places = [
        ("embedding.weight", range(0, 10)),
        ("norm.weight", range(90, 95)),
        ("head.weight", range(95, 99)),
    ]
    places += [(f"blocks.{b}.mlp.gate.weight", range(10 + 10 * b, 20 + 10 * b)) for b in range(8)]
    fragments = fragments_of(places, numel=99, count=count)
    assert len(fragments) == count
    assert sum(len(span) for spans in fragments for span in spans) == 99
    assert merged(span for spans in fragments for span in spans) == (range(99),)


def test_a_round_of_streaming_moves_its_fragment_alone() -> None:
    vector = OneTensor(64)
    drift = Drift(vector, ElasticSection(inner_steps=4, fragments=2))
    drift.begin()
    base = drift.base.clone()
    vector.weights += 1
    drift.offer(1)
    values, residual = drift.values()
    assert torch.allclose(values, torch.full((32,), -1.0))
    prepared = drift.prepare(Reduced(values=values, residual=residual))
    drift.adopt()
    assert drift.digest() == prepared
    assert torch.equal(drift.base[32:48], base[32:48]) and torch.allclose(
        vector.weights[32:48], base[32:48] + 1
    )
    assert torch.equal(vector.weights[:32], drift.base[:32])
