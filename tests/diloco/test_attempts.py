"""An attempt at a ring: what is told of its end, on one rank among several, and what the ring is asked."""

from __future__ import annotations

import logging
import math
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.diloco.memory_rings import connected
from tests.diloco.recorder import Recorder
from tests.protocol import example
from torch import Tensor

from bloomery.agent.rank_server import close_all
from bloomery.config.elastic import ElasticSection
from bloomery.diloco import all_reduce
from bloomery.diloco.all_reduce import Attempts, RingFailed, WireRing
from bloomery.diloco.outer_update import peer_digest
from bloomery.protocol.rank_messages import HopConnections, KeepAverage, Reduce
from bloomery.transport.connection import DeliveryStatistics, HopRateLimit
from bloomery.transport.ring_all_reduce import ReduceResult, RingError

ATTEMPT = example.attempt(round=3, epoch=7, members=("a", "b", "c"), weights=(0.5, 0.25, 0.25))
REDUCE = Reduce(attempt=ATTEMPT, index=1, hops=(), stall_s=4.0, deadline_s=90.0, norm_limit=None)


class Ring:
    """A ring that doubles values, or fails."""

    codec = "fp32"

    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure, self.calls = failure, list[Any]()

    def all_reduce(self, values: Tensor, *, weight: float, residual: Tensor | None) -> None:
        self.calls.append((values.tolist(), weight))
        if self.failure is not None:
            raise self.failure
        values.mul_(2.0)

    def cancel(self) -> None:
        self.calls.append("cancel")

    def close(self) -> None:
        self.calls.append("close")


class Rank:
    """Attempts of one rank; `others` are what other ranks bring to each gathering."""

    def __init__(self, ring: Ring, *others: list[Any]) -> None:
        self.ring, self.others, self.gathered = ring, list(others), list[Any]()
        self.calls: list[Any] = []
        self.prepared: list[Any] = []
        self.preparing, self.prepares_long = threading.Event(), False

        def values(weight: float, piece: range) -> tuple[Tensor, Tensor]:
            return torch.full((len(piece),), float(1 + piece.start)), torch.full((len(piece),), 0.5)

        update = SimpleNamespace(pieces=lambda: [range(2), range(2, 3)], values=values, prepare=self.prepare)
        self.is_aborted = False
        inbox = SimpleNamespace(while_reducing=self.while_reducing)
        self.attempts = Attempts(
            update,  # type: ignore[arg-type]
            agent=Recorder("agent", self.calls),  # type: ignore[arg-type]
            rings=lambda reduce: ring,
            gather=self.gather,
            inbox=inbox,  # type: ignore[arg-type]
            salt="s",
        )

    def gather(self, value: Any) -> list[Any]:
        self.gathered.append(value)
        return [value, *(self.others.pop(0) if self.others else [])]

    def prepare(self, reduced: Any, *, check: Any) -> str:
        self.preparing.set()
        while self.prepares_long:
            check()
        self.prepared.append((reduced.average.whole().tolist(), reduced.residual.tolist()))
        return "of this rank"

    def while_reducing(self, epoch: int, is_over: Any) -> bool:
        assert epoch == 7
        while not self.is_aborted and not is_over(60.0):
            pass
        return not self.is_aborted


def ring_failed(kind: str, culprit: str | None, why: str) -> tuple[Any, ...]:
    return ("agent", "report_ring_failed", dict(epoch=7, kind=kind, culprit=culprit, why=why))


def test_a_ring_that_is_over_leads_to_the_state_of_all_ranks_which_is_told() -> None:
    rank = Rank(Ring(), ["of another"])
    assert not rank.attempts.is_under_way
    rank.attempts.begin(REDUCE)
    assert rank.attempts.is_under_way
    rank.attempts.conclude()
    assert not rank.attempts.is_under_way
    assert rank.ring.calls == [([1.0, 1.0], 0.25), ([3.0], 0.25), "close"]
    assert rank.prepared == [([2.0, 2.0, 6.0], [0.5, 0.5, 0.5])]
    digest = peer_digest(["of this rank", "of another"], salt="s")
    assert rank.calls == [("agent", "report_ring_done", {"epoch": 7, "digest": digest})]
    kept = KeepAverage(epoch=7, digest=digest, file="x")  # type: ignore[arg-type]
    assert rank.attempts.fits(kept)
    rank.attempts.begin(REDUCE)
    assert not rank.attempts.fits(kept), "another attempt has begun"
    rank.attempts.conclude()


def test_where_the_ring_of_another_rank_failed_nothing_is_prepared_and_nothing_told() -> None:
    rank = Rank(Ring(), [None])
    rank.attempts.begin(REDUCE)
    rank.attempts.conclude()
    assert rank.calls == [] and not rank.attempts.is_under_way and rank.attempts._prepared is None


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (RingFailed("no byte", kind="stalled", culprit="c"), [ring_failed("stalled", "c", "no byte")]),
        (RingFailed("it was cancelled", kind="cancelled"), []),
    ],
)
def test_why_a_ring_failed_is_told_unless_it_was_cancelled(failure: RingFailed, told: list[Any]) -> None:
    rank = Rank(Ring(failure))
    rank.attempts.begin(REDUCE)
    rank.attempts.conclude()
    assert (rank.calls, rank.gathered, rank.prepared) == (told, [None], [])
    assert rank.ring.calls[-1] == "close" and not rank.attempts.is_under_way


def test_an_error_that_is_no_failure_of_a_ring_is_raised_and_the_connections_are_closed() -> None:
    rank = Rank(Ring(ZeroDivisionError("a mistake")))
    rank.attempts.begin(REDUCE)
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        rank.attempts.conclude()
    assert rank.ring.calls[-1] == "close"


def test_a_ring_that_the_agent_aborts_is_cancelled() -> None:
    rank = Rank(Ring())
    rank.is_aborted = True
    rank.attempts.begin(REDUCE)
    rank.attempts.conclude()
    assert "cancel" in rank.ring.calls


def test_a_ring_is_cancelled_by_its_own_epoch_and_when_its_state_is_replaced() -> None:
    rank = Rank(Ring())
    rank.attempts.begin(REDUCE)
    rank.attempts.cancel(6)
    assert "cancel" not in rank.ring.calls
    rank.attempts.cancel(7)
    assert rank.ring.calls.count("cancel") == 1 and rank.attempts.is_under_way
    rank.attempts.drop()
    assert rank.ring.calls.count("cancel") == 2 and not rank.attempts.is_under_way
    rank.attempts.cancel(7)
    rank.attempts.drop()
    assert rank.ring.calls.count("cancel") == 2


def test_a_preparation_ends_soon_after_its_attempt_is_cancelled() -> None:
    rank = Rank(Ring())
    rank.prepares_long = True
    rank.attempts.begin(REDUCE)
    assert rank.preparing.wait(60.0)
    rank.is_aborted = True
    rank.attempts.conclude()
    assert rank.prepared == [] and rank.calls == [] and not rank.attempts.is_under_way


def test_a_ring_that_cancelling_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(Ring())
    rank.attempts.begin(REDUCE)
    ring = rank.attempts._running
    waited = list[float]()
    monkeypatch.setattr(ring, "is_over", lambda timeout_s: bool(waited.append(timeout_s)))
    with pytest.raises(RingFailed, match="has not ended") as stuck:
        rank.attempts.cancel(7)
    assert stuck.value.kind == "stuck" and waited == [60.0]


def test_a_ring_beside_steps_is_concluded_when_it_is_over_on_every_rank() -> None:
    rank = Rank(Ring(), [False], [True])
    rank.attempts.begin(REDUCE)
    assert rank.attempts._running is not None and rank.attempts._running.is_over(60.0)
    rank.attempts.conclude_if_over()
    assert rank.attempts.is_under_way and rank.calls == []
    rank.attempts.conclude_if_over()
    assert not rank.attempts.is_under_way and len(rank.calls) == 1
    assert rank.gathered[:2] == [True, True]


@pytest.mark.parametrize(
    ("other", "limit", "fails"),
    [
        ("100.0", 12.0, False),  # 44 + 100 are the square of 12
        ("100.0", 11.99, True),
        ("inf", 1e30, True),
        ("nan", 1e30, True),
        (None, 1.0, False),
    ],
)
def test_the_norm_of_an_average_is_that_of_all_ranks_and_one_without_has_told_already(
    other: str | None, limit: float, fails: bool
) -> None:
    rank = Rank(Ring(), [other], ["of another"])
    reduce = Reduce(attempt=ATTEMPT, index=1, hops=(), stall_s=4.0, deadline_s=90.0, norm_limit=limit)
    rank.attempts.begin(reduce)
    rank.attempts.conclude()
    assert rank.gathered[0] == "44.0"
    assert [call[1] for call in rank.calls] == (["report_ring_failed"] if fails else ["report_ring_done"])
    assert (rank.attempts._prepared is None) is fails


def test_a_rank_whose_ring_failed_takes_part_in_what_the_ranks_gather_of_the_norm() -> None:
    rank = Rank(Ring(RingFailed("it was cancelled", kind="cancelled")), ["44.0"], ["of another"])
    rank.attempts.begin(msgspec.structs.replace(REDUCE, norm_limit=1.0))
    rank.attempts.conclude()
    assert rank.gathered == [None, None], "of the norm, then of the digest"
    assert rank.calls == [] and rank.attempts._prepared is None


def wire_ring(index: int, calls: list[Any], result: Any, **section: Any) -> tuple[WireRing, HopRateLimit]:
    """The ring of this member, whose native part is a recorder."""
    hops = connected(3)
    limit = HopRateLimit(1e6)
    reduce = Reduce(
        attempt=ATTEMPT, index=index, hops=hops[index], stall_s=4.0, deadline_s=90.0, norm_limit=None
    )
    ring = WireRing(reduce, ElasticSection(inner_steps=4, **section), rate_limit=limit)
    ring.close()
    close_all(
        fd
        for number in {0, 1, 2} - {index}
        for fd in (*hops[number][0].next_fds, *hops[number][0].previous_fds)
    )
    ring._ring = Recorder("ring", calls, all_reduce=result)  # type: ignore[assignment]
    return ring, limit


def reduced_with(*, before: float | None, lost: int = 3) -> ReduceResult:
    delivered = DeliveryStatistics(seconds=1.0, delivered_bytes=200, lost_bytes=lost, best_bytes_s=1.0)
    return ReduceResult(
        seconds=1.0, limit_bytes_s=before, sent_bytes=0, received_bytes=0, blocked_s=0.0, delivered=delivered
    )


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_the_ring_is_asked_for_the_attempt_and_its_error_is_kept_in_the_unit_of_the_average(
    weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    now = iter([100.0, 110.0, 130.0, 140.0, 999.0, 999.0])  # before and after each call
    ring, _ = wire_ring(1, calls, reduced_with(before=1e6), codec="int4")
    monkeypatch.setattr(all_reduce, "time", SimpleNamespace(monotonic=lambda: next(now)))
    values, residual, ring._since_s = torch.ones(4), torch.full((4,), 8.0), 98.0
    for _ in range(3):  # pieces
        ring.all_reduce(values, weight=weight, residual=residual)
    asked = [call[-1] for call in calls]
    assert [each.pop("deadline_s") for each in asked] == [90.0, 60.0, 0.001]
    assert [each.pop("grace_s") for each in asked] == [6.0, 60.0, 3 * 859.0]
    for each in asked:
        assert np.shares_memory(each.pop("residual"), residual.numpy())
        assert each == {"round": 3, "epoch": 7, "stall_s": 4.0, "weight": weight}
    assert residual.tolist() == [8.0 * (weight**3 if weight else 1.0)] * 4


@pytest.mark.parametrize(
    ("index", "at", "culprit"),
    [(1, "previous", "a"), (1, "next", "c"), (0, "previous", "c"), (2, "next", "a"), (1, None, None)],
)
def test_the_neighbour_that_a_failure_names_is_told_by_its_name(
    index: int, at: Any, culprit: str | None
) -> None:
    def fail(*given: Any, **more: Any) -> None:
        raise RingError("no byte", kind="stalled", culprit=at)

    ring, _ = wire_ring(index, [], fail)
    with pytest.raises(RingFailed) as failed:
        ring.all_reduce(torch.ones(4), weight=1.0, residual=None)
    assert (failed.value.message, failed.value.kind, failed.value.culprit) == ("no byte", "stalled", culprit)


@pytest.mark.parametrize(("before", "is_told"), [(None, True), (2e6, True), (1e6, False), (5e5, False)])
def test_a_limit_that_a_ring_has_lowered_is_told_with_what_was_lost_and_to_whom(
    before: float | None, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ring, limit = wire_ring(1, [], reduced_with(before=before))
    assert limit.limit_bytes_s == 1e6
    with caplog.at_level(logging.INFO):
        ring.all_reduce(torch.ones(4), weight=1.0, residual=None)
    line = "epoch 7: 1.5% of what went to c was lost; the next ring sends at most 8.0 Mbit/s"
    assert caplog.messages == [line] * is_told


def test_a_sparse_code_that_cannot_be_sent_is_a_failure_of_this_member() -> None:
    ring, _ = wire_ring(1, [], None, codec="sparse", density=0.05)
    with pytest.raises(RingFailed, match="nothing was sent") as failed:
        ring.all_reduce(torch.full((64,), math.nan), weight=1.0, residual=None)
    assert (failed.value.kind, failed.value.culprit) == ("not finite", None)


def test_the_average_of_a_ring_is_kept_in_its_codec_for_as_many_members_as_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, make = list[tuple[str, int]](), all_reduce.StoredAverage
    monkeypatch.setattr(
        all_reduce,
        "StoredAverage",
        lambda codec, *, members: kept.append((codec, members)) or make("fp32", members=1),
    )
    rank = Rank(Ring())
    rank.ring.codec = "int8"
    rank.attempts.begin(REDUCE)
    rank.attempts.conclude()
    alone = msgspec.structs.replace(ATTEMPT, members=("a",), weights=(0.5,))
    rank.attempts.begin(msgspec.structs.replace(REDUCE, attempt=alone, index=0))
    rank.attempts.conclude()
    assert kept == [("int8", 3), ("fp32", 1)]


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4", "sparse"])
def test_a_ring_is_made_of_the_connections_of_this_rank_and_the_codecs_of_the_attempt(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[dict[str, Any]]()
    monkeypatch.setattr(all_reduce, "Ring", lambda **given: made.append(given))
    monkeypatch.setattr(all_reduce, "codec_of_partial_sums", lambda codec, members: f"{codec} of {members}")
    hop = HopConnections(
        rank=2, next_fds=(11,), previous_fds=(12,), send_keys=(bytes(32),), receive_keys=(bytes([1]) * 32,)
    )
    limit = HopRateLimit(1e6)
    section = ElasticSection(inner_steps=4, codec=codec)
    ring = WireRing(msgspec.structs.replace(REDUCE, hops=(hop,)), section, rate_limit=limit)
    assert ring.codec == codec
    assert made == [
        {
            "index": 1,
            "size": 3,
            "next_fds": (11,),
            "previous_fds": (12,),
            "send_keys": (bytes(32),),
            "receive_keys": (bytes([1]) * 32,),
            "codec": all_reduce.WORDS if codec == "sparse" else codec,
            "reduce_codec": None if codec == "sparse" else f"{codec} of 3",
            "pace": limit,
            "rank": 2,
        }
    ]
