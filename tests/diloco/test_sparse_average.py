"""The average of sparse parts: bits, what is kept for later, and whom a wrong code is blamed on."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.diloco.memory_rings import connected
from tests.diloco.test_pseudo_gradient import OneTensor
from tests.protocol import example

from bloomery.config.elastic import ElasticSection
from bloomery.diloco.all_reduce import RingFailed, WireRing
from bloomery.diloco.outer_update import Reduced
from bloomery.diloco.pseudo_gradient import PseudoGradient
from bloomery.diloco.stored_average import StoredAverage
from bloomery.plan.peer_round import peer_ring_bytes
from bloomery.protocol.rank_messages import Reduce
from bloomery.transport import sparse_codec
from bloomery.transport.connection import HopRateLimit
from bloomery.transport.ring_all_reduce import Ring
from bloomery.transport.sparse_codec import add_sparse, average_sparse, encode_sparse

SIZE, DENSITY = 40_000, 1 / 64


class Member:
    """One member of a ring of native rings over socket pairs."""

    def __init__(self, index: int, weights: tuple[float, ...], hops, codec: str) -> None:
        attempt = example.attempt(members=tuple("abcd"[: len(weights)]), weights=weights)
        reduce = Reduce(attempt=attempt, index=index, hops=hops, stall_s=60, deadline_s=60, norm_limit=None)
        section = ElasticSection(inner_steps=4, codec=codec, density=DENSITY, outer_momentum=0.0)
        self.weight, self.sent_bytes = weights[index], 0
        self.values = torch.from_numpy(np.random.default_rng(index).standard_normal(SIZE).astype(np.float32))
        self.residual = torch.zeros(SIZE)
        self.failure: RingFailed | None = None
        self.ring = WireRing(reduce, section, rate_limit=HopRateLimit())

    def run(self) -> None:
        try:
            self.ring.all_reduce(self.values, weight=self.weight, residual=self.residual)
        except RingFailed as failure:
            self.failure = failure
        finally:
            self.ring.close()


def averaged(weights: tuple[float, ...], codec: str = "sparse", change=lambda member: None) -> list[Member]:
    hops = connected(len(weights))
    members = [Member(index, weights, hop, codec) for index, hop in enumerate(hops)]
    for member in members:
        change(member)
    threads = [threading.Thread(target=member.run) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return members


def sent_of(index: int) -> np.ndarray:
    values = np.random.default_rng(index).standard_normal(SIZE).astype(np.float32)
    sent = np.zeros(SIZE, np.float32)
    add_sparse(encode_sparse(values, DENSITY), DENSITY, sent, weight=1.0)
    return sent


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.25, 0.5, 0.25), (0.1, 0.2, 0.3, 0.4)])
def test_every_member_gets_the_same_bits_which_are_the_sum_in_the_members_order(weights) -> None:
    expected = np.zeros(SIZE, np.float32)
    for index, weight in enumerate(weights):
        expected = expected + np.float32(weight) * sent_of(index)
    for member in averaged(weights):
        assert np.array_equal(member.values.numpy(), expected)


def test_what_is_sent_and_what_is_kept_for_later_are_the_part() -> None:
    for index, member in enumerate(averaged((0.25, 0.75))):
        values = np.random.default_rng(index).standard_normal(SIZE).astype(np.float32)
        kept = member.residual.numpy() / np.float32(member.weight)
        assert kept + sent_of(index) == pytest.approx(values, abs=1e-6)


def test_a_member_of_weight_nothing_keeps_all_of_its_error() -> None:
    nothing = averaged((1.0, 0.0))[1]
    assert not nothing.residual.any()
    assert np.array_equal(nothing.values.numpy(), sent_of(0))


def test_four_peers_send_at_most_a_twentieth_of_the_bytes_of_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, list[int]] = {"sparse": [], "int8": []}
    all_reduce = Ring.all_reduce
    for codec, counts in sent.items():

        def counted(self, *args, counts=counts, **more):
            result = all_reduce(self, *args, **more)
            counts.append(result.sent_bytes)
            return result

        monkeypatch.setattr(Ring, "all_reduce", counted)
        averaged((0.25, 0.25, 0.25, 0.25), codec)
    assert len(sent["sparse"]) == len(sent["int8"]) == 4
    assert 20 * max(sent["sparse"]) <= min(sent["int8"])
    planned = peer_ring_bytes(SIZE, "sparse", 4, density=DENSITY)
    assert max(sent["sparse"]) == pytest.approx(planned, rel=0.15)  # frames' headers


def test_values_of_ones_own_that_are_not_finite_are_a_failure_and_nothing_is_sent() -> None:
    values = np.full(10, np.nan, np.float32)
    with pytest.raises(ValueError, match="nothing was sent"):
        average_sparse(
            values, gather=lambda codes: pytest.fail("sent"), weights=(0.5, 0.5), index=0,
            density=DENSITY, residual=None,
        )  # fmt: skip


def test_a_member_that_sends_what_is_no_code_is_named_by_every_other_one(monkeypatch) -> None:
    def hostile(values, density):
        code = encode_sparse(values, density)
        if threading.current_thread().name == "hostile":
            code[1] ^= np.uint32(0xFFFFFFFF)
            code[5:] = 0xFFFFFFFF
        return code

    monkeypatch.setattr("bloomery.transport.sparse_codec.encode_sparse", hostile)

    def change(member: Member) -> None:
        if member.weight == 0.3:
            run = member.run
            member.run = lambda: (setattr(threading.current_thread(), "name", "hostile"), run())
            member.residual = None

    members = averaged((0.3, 0.3001, 0.3999), change=change)
    for member in members[1:]:
        assert member.failure is not None
        assert (member.failure.kind, member.failure.culprit) == ("garbage", "a")


SECTION = ElasticSection(
    inner_steps=4, codec="sparse", density=0.05, outer_momentum=0.0, outer_learning_rate=1.0
)
WEIGHTS = (0.25, 0.75)


def begun() -> list[PseudoGradient]:
    updates = [PseudoGradient(OneTensor(6_000), SECTION) for _ in WEIGHTS]
    for update in updates:
        update.begin()
    return updates


def make_round(updates: list[PseudoGradient], round: int) -> list[torch.Tensor]:
    """A round of two peers in arithmetic; returns the pseudo-gradient of each."""
    parts, codes, drifts = [], [], []
    for index, update in enumerate(updates):
        moved = torch.randn(6_000, generator=torch.Generator().manual_seed(10 * round + index))
        update._vector.weights += moved  # type: ignore[attr-defined]  — OneTensor's
        drifts.append(update.base - update._vector.weights)  # type: ignore[attr-defined]  — likewise
        update.offer(round)
        (piece,) = update.pieces()
        parts.append(update.values(WEIGHTS[index], piece))
        codes.append(encode_sparse(parts[-1][0].numpy(), SECTION.density))
    for index, (update, (values, residual)) in enumerate(zip(updates, parts, strict=True)):

        def gather(gathered: np.ndarray) -> None:
            gathered[:] = codes

        average_sparse(
            values.numpy(), gather=gather, weights=WEIGHTS, index=index,
            density=SECTION.density, residual=residual.numpy(),
        )  # fmt: skip
        update.prepare(Reduced(average=StoredAverage.of(values.numpy()), residual=residual))
        update.adopt()
    return drifts


def test_rounds_are_sparselocos_error_feedback_in_place_of_momentum() -> None:
    """Against the formula of the paper, for each peer by itself: e ← βe + Δ; sent = Q(e); e ← e − sent."""
    updates = begun()
    errors, base = [torch.zeros(6_000) for _ in WEIGHTS], updates[0].base.clone()
    for round in range(1, 5):
        for index, drift in enumerate(make_round(updates, round)):
            errors[index] = SECTION.feedback_decay * errors[index] + drift
            sent = np.zeros(6_000, np.float32)
            add_sparse(encode_sparse(errors[index].numpy(), 0.05), 0.05, sent, weight=1.0)
            errors[index] -= torch.from_numpy(sent)
            base -= WEIGHTS[index] * torch.from_numpy(sent)
        for index, update in enumerate(updates):
            torch.testing.assert_close(update.base, base, rtol=0, atol=1e-5)
            assert update.residual is not None
            torch.testing.assert_close(update.residual / WEIGHTS[index], errors[index], rtol=0, atol=1e-5)


def test_peers_that_go_on_from_what_a_checkpoint_keeps_are_the_unbroken_ones_bit_for_bit() -> None:
    unbroken, resumed = begun(), begun()
    for round in (1, 2):
        make_round(unbroken, round)
    for before, after in zip(unbroken, resumed, strict=True):
        kept = {entry.name: entry.tensor.clone() for entry in before.state_entries()}
        for entry in after.state_entries():
            entry.tensor.copy_(kept.pop(entry.name))
        assert not kept
        after.reset()
    for round in (3, 4):
        make_round(unbroken, round)
        make_round(resumed, round)
    for one, other in zip(unbroken, resumed, strict=True):
        assert torch.equal(one.base, other.base) and torch.equal(one.base, unbroken[0].base)
        assert one.residual is not None and other.residual is not None
        assert torch.equal(one.residual, other.residual) and one.residual.any()


def test_the_norm_that_a_peer_says_bounds_the_average_with_its_feedback() -> None:
    updates = begun()
    for round in range(1, 6):
        limit = 0.0
        for update in updates:
            told = update.residual
            assert told is not None
            limit += SECTION.feedback_decay * float(told.norm())
        drifts = make_round(updates, round)
        limit += sum(weight * float(drift.norm()) for weight, drift in zip(WEIGHTS, drifts, strict=True))
        average = updates[0].momentum  # with a decay of 0, the average of the last round
        assert float(average.norm()) <= limit


def test_an_offer_tells_the_error_of_earlier_rounds_as_it_is_sent() -> None:
    updates = begun()
    make_round(updates, 1)
    residual = updates[0].residual
    assert residual is not None and 0.0 < SECTION.feedback_decay < 1.0
    _, squares = updates[0].offer(2)()
    assert squares > 0.0
    assert squares == pytest.approx(float((SECTION.feedback_decay * residual).double().square().sum()))


def test_a_ring_that_is_cancelled_adds_no_more_codes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hundreds of members that takes minutes, and who cancels waits for the end of it."""
    member = Member(0, (0.25, 0.25, 0.25, 0.25), connected(4)[0], "sparse")
    added = list[float]()
    monkeypatch.setattr(
        member.ring._ring, "all_gather", lambda codes, **call: SimpleNamespace(limit_bytes_s=None)
    )

    def add(code: object, density: float, out: object, *, weight: float) -> None:
        added.append(weight)
        if len(added) == 2:
            member.ring.cancel()

    monkeypatch.setattr(sparse_codec, "add_sparse", add)
    with pytest.raises(RingFailed) as failed:
        member.ring.all_reduce(member.values, weight=0.25, residual=None)
    assert failed.value.kind == "cancelled" and added == [0.25, 0.25]
    member.ring.close()
