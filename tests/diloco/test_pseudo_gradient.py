"""The outer step against torch's own, fragments as a partition, and what a failed try leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bloomery.checkpoint.format.state import Scope, StateEntry, whole
from bloomery.config.elastic import ElasticSection
from bloomery.data.position import Ranges, merged
from bloomery.diloco.outer_update import Reduced
from bloomery.diloco.peer_vector import fragments_of, put, take
from bloomery.diloco.pseudo_gradient import PseudoGradient
from bloomery.diloco.stored_average import StoredAverage


class OneTensor:
    """A peer of one rank whose model is a vector: two blocks, an embedding and a head."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.weights = torch.randn(numel, generator=torch.Generator().manual_seed(3))

    def zeros(self) -> Tensor:
        return torch.zeros(self.numel)

    def pinned_zeros(self, numel: int | None = None) -> Tensor:
        return torch.zeros(self.numel if numel is None else numel)

    def each_master(self, strips: Sequence[range]) -> Iterator[Tensor]:
        blocks = torch.empty(2, max(map(len, strips), default=0))
        for number, strip in enumerate(strips):
            yield blocks[number % 2, : len(strip)].copy_(self.weights[strip.start : strip.stop])

    def copy_masters(self, into: Tensor, spans: Ranges) -> Any:
        into[: sum(map(len, spans))] = take(self.weights, spans)
        return SimpleNamespace(synchronize=lambda: None)

    def keep_masters_until_copied(self) -> None: ...

    def wait_for_device(self) -> None: ...

    def put_masters(self, values: Tensor, within: Ranges | None = None) -> None:
        self.write_masters(values, within)

    def share_masters(self) -> None: ...

    def mix_masters(self, values: Tensor, spans: Ranges, *, share: float) -> None:
        mixed = torch.lerp(take(self.weights, spans), values[: sum(map(len, spans))], share)
        put(self.weights, spans, mixed)

    def read_masters(self, into: Tensor, start: int = 0) -> None:
        into.copy_(self.weights[start : start + into.numel()])

    def read_gradients(self, into: Tensor, start: int = 0) -> None:
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


def reduced(values: Tensor, residual: Tensor | None) -> Reduced:
    return Reduced(average=StoredAverage.of(values.numpy()), residual=residual)


def part_of(update: PseudoGradient, weight: float) -> tuple[Tensor, Tensor | None]:
    (piece,) = update.pieces()
    return update.values(weight, piece)


def test_the_outer_step_is_torchs_nesterov_on_pseudo_gradients() -> None:
    vector = OneTensor(64)
    update = PseudoGradient(vector, ElasticSection(inner_steps=5))
    update.begin()
    reference = vector.weights.clone().requires_grad_()
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for round in range(1, 5):
        moved = 0.01 * torch.randn(64, generator=torch.Generator().manual_seed(round))
        vector.weights += moved
        update.offer(round)
        values, residual = part_of(update, 1.0)
        update.prepare(reduced(values, residual))
        update.adopt()
        reference.grad = -moved
        optimizer.step()
        torch.testing.assert_close(vector.weights, reference.detach(), rtol=0, atol=1e-6)
        assert torch.equal(vector.weights, update.base)


def test_a_run_that_begins_again_has_the_present_weights_no_momentum_and_no_error_left() -> None:
    vector = OneTensor(64)
    update = PseudoGradient(vector, ElasticSection(inner_steps=5, codec="int4"))
    update.begin()
    fresh = update.digest()
    update.momentum.fill_(2.0)
    assert update.residual is not None
    update.residual.fill_(3.0)
    vector.weights += 1
    assert update.digest() != fresh
    update.offer(1)
    update.prepare(reduced(*part_of(update, 1.0)))
    assert update.average() is not None
    update.begin()
    assert update.average() is None, "it was that of a round before"
    assert torch.equal(update.base, vector.weights)
    assert not update.momentum.any() and not update.residual.any()


def test_nothing_changes_before_a_round_is_committed() -> None:
    vector = OneTensor(64)
    update = PseudoGradient(vector, ElasticSection(inner_steps=5, codec="int4"))
    update.begin()
    vector.weights += 1
    update.offer(1)
    before, digest = vector.weights.clone(), update.digest()
    for _ in range(2):  # two tries of the ring, of which the first spoils what it was given
        values, residual = part_of(update, 1.0)
        assert residual is not None
        values.fill_(torch.nan)
        residual.fill_(torch.nan)
        values, residual = part_of(update, 1.0)
        prepared = update.prepare(reduced(values, residual))
        assert torch.equal(vector.weights, before) and update.digest() == digest
    update.adopt()
    assert update.digest() == prepared != digest


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
    update = PseudoGradient(vector, ElasticSection(inner_steps=4, fragments=2))
    update.begin()
    base = update.base.clone()
    vector.weights += 1
    update.offer(1)
    values, residual = part_of(update, 1.0)
    assert torch.allclose(values, torch.full((32,), -1.0))
    prepared = update.prepare(reduced(values, residual))
    update.adopt()
    assert update.digest() == prepared
    assert torch.equal(update.base[32:48], base[32:48]) and torch.allclose(
        vector.weights[32:48], base[32:48] + 1
    )
    assert torch.equal(vector.weights[:32], update.base[:32])


class ManyBlocks(OneTensor):
    """Of two fragments each has blocks that lie apart."""

    def places(self) -> list[tuple[str, range]]:
        names = ("embedding.weight", *(f"blocks.{block}.norm.weight" for block in range(4)), "head.weight")
        size = self.numel // len(names)
        return [(name, range(i * size, (i + 1) * size)) for i, name in enumerate(names)]


def test_fragments_of_blocks_that_lie_apart_make_the_step_of_the_whole_vector() -> None:
    peers = []
    for fragments in (1, 2):
        vector = ManyBlocks(60)
        update = PseudoGradient(vector, ElasticSection(inner_steps=4, fragments=fragments), piece=17)
        update.begin()
        vector.weights += 0.01 * torch.randn(60, generator=torch.Generator().manual_seed(5))
        squares = 0.0
        for round in range(fragments):
            squares += update.offer(round)()[0]
            values = torch.cat([update.values(1.0, piece)[0].clone() for piece in update.pieces()])
            update.prepare(reduced(values, None))
            update.adopt()
        peers.append((vector.weights, update.base, update.momentum, squares))
    (whole_weights, *whole_state, expected), (weights, *state, squares) = peers
    assert torch.equal(weights, whole_weights) and squares == pytest.approx(expected)
    assert all(map(torch.equal, state, whole_state))


def test_the_error_of_a_fragment_alone_is_sent_told_and_replaced_in_its_round() -> None:
    vector = ManyBlocks(60)
    update = PseudoGradient(vector, ElasticSection(inner_steps=4, fragments=2, codec="int4"), piece=17)
    update.begin()
    assert update.residual is not None
    update.residual += torch.arange(60.0)
    own = torch.tensor([place for span in update._fragments[1] for place in span])
    assert 0 < len(own) < 60
    _, feedback = update.offer(2)()
    assert feedback == float(own.double().square().sum())
    parts = [[one.clone() for one in update.values(0.5, piece)] for piece in update.pieces()]
    assert torch.cat([values for values, _ in parts]).tolist() == (own / 0.5).tolist()
    kept = [update.values(0.0, piece)[1] for piece in update.pieces()]
    assert [value for part in kept if part is not None for value in part.tolist()] == own.tolist()
    update.prepare(reduced(torch.zeros(len(own)), -own.float()))
    update.adopt()
    expected = torch.arange(60.0)
    expected[own] *= -1
    assert torch.equal(update.residual, expected)


@pytest.mark.parametrize("fragments", [1, 2])
def test_the_digest_covers_the_momentum_before_a_round_and_in_what_would_follow(fragments: int) -> None:
    digests = []
    for element in (None, 1, 63):  # 63 is of the second fragment, which round 1 does not touch
        vector = OneTensor(64)
        update = PseudoGradient(vector, ElasticSection(inner_steps=4, fragments=fragments))
        update.begin()
        if element is not None:
            update.momentum[element] += 0.5
        vector.weights += 1
        update.offer(1)
        values, residual = part_of(update, 1.0)
        prepared = update.prepare(reduced(values, residual))
        digests.append((update.digest(), prepared))
    assert len({before for before, _ in digests}) == len({after for _, after in digests}) == 3


def test_a_prepared_digest_covers_the_momentum_where_the_base_comes_out_the_same() -> None:
    """With an outer rate of zero the momentum is all that a round changes."""
    digests = []
    for moved in (1.0, 2.0):
        vector = OneTensor(64)
        update = PseudoGradient(vector, ElasticSection(inner_steps=4, outer_learning_rate=0.0))
        update.begin()
        vector.weights += moved
        update.offer(1)
        values, residual = part_of(update, 1.0)
        digests.append(update.prepare(reduced(values, residual)))
    assert digests[0] != digests[1]


def test_the_next_offer_holds_what_quantising_left_out_of_the_last() -> None:
    vector = OneTensor(64)
    update = PseudoGradient(vector, ElasticSection(inner_steps=5, codec="int4"))
    update.begin()
    left_out = torch.linspace(-0.5, 0.5, 64)
    _round_of(update, 1, left_out=left_out)
    moved = 0.25 * torch.ones(64)
    vector.weights += moved
    update.offer(2)
    values, residual = part_of(update, 1.0)
    assert residual is not None and not residual.any()
    torch.testing.assert_close(values, left_out - moved, rtol=0, atol=1e-6)


def test_nothing_that_was_left_out_is_offered_by_a_peer_that_took_over_anothers_state() -> None:
    vector = OneTensor(64)
    update = PseudoGradient(vector, ElasticSection(inner_steps=5, codec="int4"))
    update.begin()
    _round_of(update, 1, left_out=torch.ones(64))
    assert update.residual is not None and update.residual.any()
    update.follow_loaded()
    assert not update.residual.any()
    update.offer(2)
    values, _ = part_of(update, 1.0)
    assert torch.equal(values, torch.zeros(64))


def _round_of(update: PseudoGradient, number: int, *, left_out: Tensor) -> None:
    """A round in which nobody moved, and quantising left this out."""
    update.offer(number)
    values, residual = part_of(update, 1.0)
    assert residual is not None
    residual.copy_(left_out)
    update.prepare(reduced(torch.zeros_like(values), residual))
    update.adopt()


def test_what_quantising_lost_is_sent_whole_whatever_the_peers_weight_is_then() -> None:
    vector = OneTensor(64)
    update = PseudoGradient(vector, ElasticSection(inner_steps=5, codec="int4"))
    update.begin()
    lost = torch.linspace(-0.5, 0.5, 64)
    _round_of(update, 1, left_out=lost)
    _, feedback = update.offer(2)()
    assert feedback == pytest.approx(float(lost.square().sum()))
    for weight in (1 / 16, 1 / 2):
        values, residual = part_of(update, weight)
        torch.testing.assert_close(weight * values, lost)
        assert residual is not None and not residual.any()
    values, residual = part_of(update, 0.0)  # nothing is sent, so nothing is forgotten
    assert torch.equal(values, torch.zeros(64)) and residual is not None and torch.equal(residual, lost)


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_round_that_was_missed_is_made_up_for_by_its_average_to_the_bit(fragments: int) -> None:
    section = ElasticSection(inner_steps=4, fragments=fragments, codec="int4")
    within, behind = (PseudoGradient(OneTensor(64), section) for _ in range(2))
    for update in (within, behind):
        update.begin()
        update._vector.weights += 1.0  # type: ignore[attr-defined]  — OneTensor's
    averages = []
    for round in (1, 2):
        within.offer(round)
        values, residual = part_of(within, 1.0)
        within.prepare(reduced(values * round, residual))
        average = within.average()
        assert average is not None
        averages.append(average)
        within.adopt()
    assert within.average() is None and behind.residual is not None
    behind.residual += 0.5
    behind.offer(1)  # its own part was left out
    behind.drop_offer()
    for round, average in enumerate(averages, 1):
        before, wrong = behind.digest(), behind.prepare_missed(round, StoredAverage.of(average.whole() + 1.0))
        behind.drop_offer()
        assert behind.digest() == before != wrong
        prepared = behind.prepare_missed(round, average)
        behind.adopt()
        assert behind.digest() == prepared != wrong
    assert behind.digest() == within.digest()
    assert torch.equal(behind._vector.weights, behind.base)  # type: ignore[attr-defined]  — OneTensor's
    assert torch.equal(behind.residual, torch.full((64,), 0.5))  # what it still has to send
    with pytest.raises(ValueError, match="7 elements"):
        behind.prepare_missed(1, StoredAverage.of(np.zeros(7, np.float32)))


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_late_peer_follows_a_missed_round_and_keeps_its_own_steps(fragments: int) -> None:
    section = ElasticSection(inner_steps=4, fragments=fragments, quorum=1, overlap_steps=1)
    within, late = (PseudoGradient(OneTensor(64), section) for _ in range(2))
    for update in (within, late):
        update.begin()
    own = torch.linspace(-1.0, 1.0, 64)
    late._vector.weights += own  # type: ignore[attr-defined]  — OneTensor's
    for round in (1, 2):
        within._vector.weights += 0.5 * round  # type: ignore[attr-defined]  — likewise
        within.offer(round)
        values, residual = part_of(within, 1.0)
        digest = within.prepare(reduced(values, residual))
        average = within.average()
        assert average is not None
        within.adopt()
        assert late.prepare_missed(round, average) == digest
        late.rebase()
        assert late.average() is None
        assert late.digest() == within.digest() and torch.equal(late.base, within.base)
        moved = late._vector.weights - late.base  # type: ignore[attr-defined]  — likewise
        torch.testing.assert_close(moved, own, rtol=0, atol=1e-5)
    squares, _ = late.offer(1)()
    elements = 64 // fragments
    assert squares == pytest.approx(float(own[:elements].square().sum() if fragments == 1 else squares))


def test_the_committed_weights_are_put_in_place_and_the_present_ones_come_back_to_the_bit() -> None:
    vector = OneTensor(64)
    update = PseudoGradient(vector, ElasticSection(inner_steps=5, codec="int4"))
    update.begin()
    committed = vector.weights.clone()
    vector.weights *= 1.5
    present = vector.weights.clone()
    update.swap_in_committed()
    assert torch.equal(vector.weights, committed)
    update.swap_back()
    assert torch.equal(vector.weights, present) and torch.equal(update.base, committed)
    with pytest.raises(AssertionError, match="nothing was swapped"):
        update.swap_back()
    assert [(entry.name, entry.scope) for entry in update.state_entries()] == [
        ("outer.base.all", "shared"),
        ("outer.momentum.all", "shared"),
        ("outer.residual.all", "peer"),
    ]


@pytest.mark.parametrize("ends", ["begin", "reset", "follow_loaded", "drop_offer", "adopt"])
def test_the_average_of_a_round_that_is_over_is_kept_for_nobody(ends: str) -> None:
    update = PseudoGradient(OneTensor(64), ElasticSection(inner_steps=5))
    update.begin()
    update.offer(1)
    update.prepare(reduced(*part_of(update, 1.0)))
    assert update.average() is not None
    getattr(update, ends)()
    assert update.average() is None


def test_a_missed_round_drops_the_steps_of_a_part_that_was_offered() -> None:
    vector = OneTensor(64)
    update = PseudoGradient(vector, ElasticSection(inner_steps=4, fragments=2))
    update.begin()
    vector.weights += 1
    update.offer(1)
    (piece,) = update.pieces()
    update.prepare_missed(1, StoredAverage.of(np.zeros(len(piece), np.float32)))
    update.adopt()
    assert torch.equal(vector.weights, update.base)


def test_a_late_peers_other_fragments_keep_their_weights_to_the_bit() -> None:
    vector = OneTensor(64)
    update = PseudoGradient(vector, ElasticSection(inner_steps=4, fragments=2))
    update.begin()
    vector.weights *= 0.001
    before = vector.weights.clone()
    update.offer(1)
    (piece,) = update.pieces()
    update.drop_offer()
    update.prepare_missed(1, StoredAverage.of(np.ones(len(piece), np.float32)))
    update.rebase()
    assert int((vector.weights == before).sum()) == 64 - len(piece)
