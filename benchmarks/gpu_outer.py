"""What an outer step between peers takes of the training: where the training waits for it, and beside steps.

The network is left out: a peer's part comes back as the int8 codec rounds it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from peers_throughput import OwnTraining, Step, seconds_of, synchronise, timed
from torch import Tensor

from bloomery.config.elastic import ElasticSection
from bloomery.diloco.agent_client import CommandInbox
from bloomery.diloco.all_reduce import Attempts
from bloomery.diloco.background import BackgroundCall
from bloomery.diloco.peer_vector import PeerVector
from bloomery.diloco.pseudo_gradient import PseudoGradient
from bloomery.protocol.rank_messages import Reduce
from bloomery.protocol.records import Attempt
from bloomery.transport.gradient_codec import decode, encode

ROUNDS = 2
"""The first has pages to touch, so the last counts."""
ALONE = 5
"""Steps without an outer step, to which those beside one are compared."""


def outer_figures(own: OwnTraining, step: Step) -> Iterator[dict[str, Any]]:
    """Yield the seconds that an outer step adds to the steps of a round, in both modes.

    outer_waits: by call, where the training waits for each: what it adds is their sum.
    outer_beside: `added`, what some steps take more with an outer step beside them than alone; `steps`, how
        many those were; `alone`, the median seconds of one step.
    """
    yield {"outer_waits": _waited_for(own, step), "outer_numel": sum(map(len, own.model.weights.master))}
    gc.collect()
    yield {"outer_beside": _beside(own, step)}


def _waited_for(own: OwnTraining, step: Step) -> dict[str, float]:
    peer = _Peer(own, ElasticSection(inner_steps=100))
    spent: dict[str, float] = {}
    for round in range(1, ROUNDS + 1):
        step()
        spent = {"offer": seconds_of(lambda round=round: peer.update.offer(round)())}
        spent["average and prepare"] = seconds_of(lambda round=round: peer.averaged(round))
        spent["adopt"] = seconds_of(peer.update.adopt)
    return spent


def _beside(own: OwnTraining, step: Step) -> dict[str, float]:
    peer = _Peer(own, ElasticSection(inner_steps=100, overlap_steps=20, mixing=0.5))
    own.before_update.append(peer.update.keep_offer)
    alone = median(timed(step)[0] for _ in range(ALONE))
    found: dict[str, float] = {}
    for round in range(1, ROUNDS + 1):
        synchronise()
        started, steps = time.perf_counter(), 1
        measuring = BackgroundCall(peer.update.offer(round), name="part")
        while not measuring.is_over():
            timed(step)
            steps += 1
        measuring.result()
        peer.begin(round)
        while peer.attempts.is_under_way:
            timed(step)
            steps += 1
            peer.attempts.conclude_if_over()
        peer.update.adopt()
        timed(step)  # while base and momentum make their step
        added = time.perf_counter() - started - steps * alone
        found = {"added": added, "steps": steps, "alone": alone}
    own.before_update.clear()
    return found


class _Peer:
    """A peer of one rank, whose rounds have another member that brings nothing.

    update: of its outer step. attempts: as the outer loop runs them.
    """

    def __init__(self, own: OwnTraining, section: ElasticSection) -> None:
        self.update = PseudoGradient(PeerVector(own.model.weights, own.mesh), section)
        self.update.begin()
        agent: Any = _Agent()
        self.attempts = Attempts(
            self.update,
            agent=agent,
            rings=lambda reduce: _Codec(),
            gather=_gathered,
            inbox=CommandInbox(agent, _gathered),
            salt="",
        )

    def begin(self, round: int) -> None:
        attempt = Attempt(round=round, epoch=round, members=("a", "b"), weights=(1.0, 0.0), left_out={})
        self.attempts.begin(
            Reduce(attempt=attempt, index=0, hops=(), stall_s=60.0, deadline_s=600.0, norm_limit=None)
        )

    def averaged(self, round: int) -> None:
        self.begin(round)
        self.attempts.conclude()


class _Agent:
    """Stands for a peer's agent, which says nothing while the benchmark runs."""

    def peek(self) -> tuple[()]:
        return ()

    def report_ring_done(self, *, epoch: int, digest: str) -> None: ...


class _Codec:
    """Stands for a ring: it makes of values what the int8 codec makes of them."""

    codec = "int8"

    def all_reduce(self, values: Tensor, *, weight: float, residual: Tensor | None) -> None:
        array = values.numpy()
        decode(encode(array, self.codec), self.codec, array)

    def cancel(self) -> None: ...

    def close(self) -> None: ...


def _gathered(value: Any) -> list[Any]:  # Any: whatever is gathered
    return [value]
