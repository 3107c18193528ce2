"""Predicts a round between peers: the bytes that each sends, its time, and its memory. Legend: n peers."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.elastic import SPARSE, ElasticSection
from bloomery.plan.codec_error import (
    CODEC_BYTES,
    average_error,
    codec_of_partial_sums,
    ring_bytes,
    sparse_bytes,
)
from bloomery.plan.hardware import SiteLink


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round between peers is predicted to take.

    inner_s: seconds of a peer's `inner_steps` together.
    payload_bytes: what a peer brings to the all_reduce, encoded. sent_bytes: what it sends for that.
    part_of_int8: that, as a share of what it would send with codec = "int8".
    codec: of complete sums. reduce_codec: of partial sums.
    quantisation_error: of the average, relative to it, if the peers' parts are equally large and independent.
    exchange_s: seconds of the all_reduce and of the outer step after it.
    utilisation: the share of the round that is spent in inner steps, 0 to 1, if nothing hides the exchange.
    host_bytes, host_peak_bytes: host memory of a peer for the outer optimizer, in all its ranks, between
        rounds and while one is made.
    copy_bytes: host memory that a peer needs besides for a newcomer: shared memory for a copy of the whole
        state, and its own weights, which are kept apart while the copy is made of the committed ones.
    """

    peers: int
    inner_steps: int
    inner_s: float
    payload_bytes: float
    sent_bytes: float
    part_of_int8: float
    codec: str
    reduce_codec: str
    quantisation_error: float
    exchange_s: float
    utilisation: float
    host_bytes: float
    host_peak_bytes: float
    copy_bytes: float


RING_PIECE = 1 << 27
"""Elements that a ring reduces at a time, as fp32."""


def outer_memory_bytes(elastic: ElasticSection, *, parameters: int) -> tuple[float, float]:
    """Return the host bytes of a peer's outer optimizer between rounds, and while a round is made.

    Base and momentum are fp32; the average is kept in the bytes of the codec, or as places and values. int4
    and sparse keep a residual and make the next one; overlapped steps need the pseudo-gradient. With averaged
    gradients nothing is kept.
    """
    kept_bytes = 0.0 if elastic.average == "gradients" else 8.0
    is_sparse = elastic.codec == SPARSE
    made = min(4.0, 8.0 * elastic.density * elastic.peers) if is_sparse else CODEC_BYTES[elastic.codec]
    if kept_bytes and elastic.codec in ("int4", SPARSE):
        kept_bytes, made = kept_bytes + 4.0, made + 4.0
    if kept_bytes and elastic.overlap_steps:
        made += 4.0
    return kept_bytes * parameters, (kept_bytes + made) * parameters + 4.0 * min(parameters, RING_PIECE)


def plan_round(
    elastic: ElasticSection, link: SiteLink, *, parameters: int, step_s: float, state_bytes: float
) -> Round:
    """Predict one round: a ring all_reduce of all parameters as the codec encodes them, and the outer step.

    Each peer sends 2(n − 1)/n of the encoded parameters, half of them as partial sums; with the sparse codec
    (n − 1) times, once for each other peer.

    state_bytes: of a checkpoint without the outer optimizer.
    """
    peers, is_sparse = elastic.peers, elastic.codec == SPARSE
    payload = parameters * (sparse_bytes(elastic.density) if is_sparse else CODEC_BYTES[elastic.codec])
    reduce_codec = elastic.codec if is_sparse else codec_of_partial_sums(elastic.codec, peers)
    sent = ring_bytes(parameters, elastic.codec, peers, density=elastic.density)
    speed = link.gbit_per_s * 1e9 / 8 * link.efficiency
    hops = (1 if is_sparse else 2) * (peers - 1)
    exchange = sent / speed + hops * link.latency_ms / 1000 + link.outer_step_s
    inner = elastic.inner_steps * step_s
    host_bytes, host_peak_bytes = outer_memory_bytes(elastic, parameters=parameters)
    weights_apart_bytes = 0.0 if elastic.average == "gradients" else 4.0 * parameters
    return Round(
        peers=peers,
        inner_steps=elastic.inner_steps,
        inner_s=inner,
        payload_bytes=payload,
        codec=elastic.codec,
        reduce_codec=reduce_codec,
        quantisation_error=average_error(elastic.codec, peers, reduce_codec=reduce_codec),
        sent_bytes=sent,
        part_of_int8=sent / (ring_bytes(parameters, "int8", peers, density=0.0) or 1.0),
        host_bytes=host_bytes,
        host_peak_bytes=host_peak_bytes,
        copy_bytes=state_bytes + host_bytes + weights_apart_bytes,
        exchange_s=exchange if peers > 1 else link.outer_step_s,
        utilisation=inner / (inner + (exchange if peers > 1 else link.outer_step_s)),
    )
