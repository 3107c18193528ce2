"""A rank goes on from a commit only if it is of the attempt and the state that this peer prepared."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from tests.diloco.memory_rings import connected
from tests.diloco.test_pseudo_gradient import OneTensor
from tests.protocol import example

from bloomery.agent.rank_server import close_all
from bloomery.config.elastic import ElasticSection
from bloomery.data.position import Position
from bloomery.diloco import all_reduce
from bloomery.diloco.agent_client import CommandInbox
from bloomery.diloco.all_reduce import Attempts, RingFailed, WireRing, WireRings
from bloomery.diloco.pseudo_gradient import PseudoGradient
from bloomery.protocol.rank_messages import HopConnections, Reduce
from bloomery.protocol.records import Commit


def gather(value: Any) -> list[Any]:
    return [value]


class Recording:
    """Stands for the agent: keeps the digest of an attempt."""

    def __init__(self) -> None:
        self.digest = ""

    def report_ring_done(self, *, epoch: int, digest: str) -> None:
        self.digest = digest

    def report_ring_failed(self, *, epoch: int, kind: str, culprit: str | None, why: str) -> None:
        self.failure = (epoch, kind, culprit, why)


def alone(agent: Recording, *, norm_limit: float | None) -> Attempts:
    """Attempts of a peer that is alone in epoch 7, in which its part of norm 8 is reduced."""
    vector = OneTensor(64)
    update = PseudoGradient(vector, ElasticSection(inner_steps=4))
    update.begin()
    vector.weights += torch.ones(64)
    update.offer(1)
    attempts = Attempts(
        update,
        agent=cast("Any", agent),
        rings=lambda reduce: pytest.fail("a peer that is alone has no ring"),
        gather=gather,
        inbox=CommandInbox(cast("Any", agent), gather),
        salt="s",
    )
    attempt = example.attempt(round=1, epoch=7, members=("a",), weights=(1.0,))
    reduce = Reduce(attempt=attempt, index=0, hops=(), stall_s=1.0, deadline_s=1.0, norm_limit=norm_limit)
    attempts.begin(reduce)
    return attempts


@pytest.fixture
def prepared() -> Iterable[tuple[Attempts, Commit]]:
    """Attempts of a peer that is alone in epoch 7, which is over, and the commit that follows from it."""
    agent = Recording()
    attempts = alone(agent, norm_limit=None)
    attempts.conclude()
    position = Position(consumed=4)
    commit = example.commit(
        round=1, epoch=7, members=("a",), digest=agent.digest, position=position, sources=("a",)
    )
    yield attempts, commit


def test_the_commit_of_what_was_prepared_fits_and_no_other(prepared: tuple[Attempts, Commit]) -> None:
    attempts, commit = prepared
    assert commit.digest and attempts.fits(commit)
    assert not attempts.fits(msgspec.structs.replace(commit, epoch=8))
    assert not attempts.fits(msgspec.structs.replace(commit, digest="f" * 32))
    attempts.drop()
    assert not attempts.fits(commit)


def test_an_average_that_is_larger_than_the_members_norms_allow_is_a_failure_of_the_attempt() -> None:
    for limit, fails in ((8.1, False), (7.9, True)):
        agent = Recording()
        attempts = alone(agent, norm_limit=limit)
        attempts.conclude()
        assert (agent.digest == "") is fails
    epoch, kind, culprit, why = agent.failure
    assert (epoch, kind, culprit) == (7, "norm", None)
    assert "the average's norm is 8, and what the members say of theirs allows 7.9" in why


def ring_of(members: str, index: int, hops: tuple[HopConnections, ...], **section: Any) -> WireRing:
    """The ring of one of these members, which have letters for names."""
    attempt = example.attempt(members=tuple(members), weights=(1.0,) * len(members))
    reduce = Reduce(attempt=attempt, index=index, hops=hops, stall_s=9.0, deadline_s=9.0, norm_limit=None)
    return WireRings(ElasticSection(inner_steps=4, **section))(reduce)


def test_the_end_of_a_ring_ends_the_connections_that_it_was_given() -> None:
    hops, others = connected(2)
    ring = ring_of("ab", 0, hops)

    ring.close()

    (other,) = others
    for descriptor in (*other.next_fds, *other.previous_fds):
        with socket.socket(fileno=descriptor) as end:
            end.setblocking(False)
            assert end.recv(1) == b""
    with pytest.raises(RingFailed, match="this ring is closed"):
        ring.all_reduce(torch.ones(64), weight=1.0, residual=None)


@pytest.mark.parametrize(("gone", "culprit"), [(0, "a"), (2, "c")])
def test_the_neighbour_whose_connection_ends_is_the_culprit(gone: int, culprit: str) -> None:
    hops = connected(3)
    facing = hops[0][0].next_fds if gone == 0 else hops[2][0].previous_fds
    ring = ring_of("abc", 1, hops[1])
    close_all(facing)

    with pytest.raises(RingFailed) as failed:
        ring.all_reduce(torch.ones(4096), weight=1.0, residual=None)

    assert (failed.value.kind, failed.value.culprit) == ("closed", culprit)
    ring.close()
    open_still = [fd for (hop,) in (hops[0], hops[2]) for fd in (*hop.next_fds, *hop.previous_fds)]
    close_all([fd for fd in open_still if fd not in facing])


@pytest.mark.parametrize(("limit_mbit_s", "bytes_s"), [(0.0, None), (8.0, 1e6)])
def test_a_recipe_limits_the_rate_of_a_hop_in_bits(limit_mbit_s: float, bytes_s: float | None) -> None:
    hops, (other,) = connected(2)
    ring = ring_of("ab", 0, hops, bandwidth_limit_mbit_s=limit_mbit_s)
    assert ring._rate_limit.limit_bytes_s == bytes_s
    ring.close()
    close_all((*other.next_fds, *other.previous_fds))


def test_all_pieces_of_a_part_share_one_deadline() -> None:
    hops, (other,) = connected(2)
    ring, given = ring_of("ab", 0, hops), list[float]()

    def call(values: Any, *, deadline_s: float, **more: Any) -> SimpleNamespace:
        given.append(deadline_s)
        time.sleep(0.02)
        return SimpleNamespace(limit_bytes_s=None)

    for _ in range(2):
        ring._exchange(cast("Any", call), np.zeros(4, np.float32))
    assert given[0] <= 9.0 and given[1] <= given[0] - 0.02
    ring.close()
    close_all((*other.next_fds, *other.previous_fds))


def test_other_members_may_be_late_by_three_times_what_this_one_took_for_a_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, given = SimpleNamespace(now=100.0), list[float]()
    monkeypatch.setattr(all_reduce, "time", SimpleNamespace(monotonic=lambda: clock.now))
    hops, (other,) = connected(2)
    ring = ring_of("ab", 0, hops)

    def call(values: Any, *, grace_s: float, **more: Any) -> SimpleNamespace:
        given.append(grace_s)
        clock.now += 50.0
        return SimpleNamespace(limit_bytes_s=None)

    for took_s in (2.0, 5.0):
        clock.now += took_s
        ring._exchange(cast("Any", call), np.zeros(4, np.float32))
    assert given == [6.0, 15.0]
    ring.close()
    close_all((*other.next_fds, *other.previous_fds))
