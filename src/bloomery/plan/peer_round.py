"""Predicts the bytes, time, memory and error of a peer round, and picks the codec of its partial sums.

In a ring of n peers each value is quantised n times: n − 1 times as a growing partial sum, and once as the
complete sum, whose bytes are handed round. With equal, independent parts the variance of the k-th partial
sum is k/n of the sum's, so the relative error of the average is √(e² · (n − 1) / 2 + g²), where e and g are
the errors of one quantisation in the codec of the partial sums and of the complete one. It is
independent of the number of peers only while e²·n is small beside g².

The sparse codec has no partial sums: each peer's code goes round the ring whole. So what a peer sends grows
with the number of peers, whereas a ring that adds up sends each peer's values twice at most.
"""

from __future__ import annotations

import math

from bloomery.config.elastic import SPARSE, ElasticSection
from bloomery.frozen import dataclass
from bloomery.plan.hardware import SiteLink

CODEC_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a value, without the scales of its block."""

SPARSE_CHUNK = 4096
"""Values of which the sparse codec sends the largest."""

_ERROR_OF_ONE = {"fp32": 0.0, "bf16": 0.0017, "int8": 0.0075, "int4": 0.117}
"""The relative error of one quantisation of Gaussian values; the tests of the codecs measure it."""
_WIDER = {"int4": "int8", "int8": "bf16", "bf16": "fp32"}
_ERROR_AT_MOST = {"int4": 0.2, "int8": 0.05, "bf16": 0.05, "fp32": 0.0}
"""The relative error of the average above which partial sums are sent in the next wider codec."""


def average_error(codec: str, peers: int, *, reduce_codec: str | None = None) -> float:
    """Return the relative error of the average of the contributions of `peers` peers, equal and independent.

    codec: of the complete sums; the setting elastic.codec.
    reduce_codec: of the partial sums; None: as `codec`.
    """
    if peers < 2 or codec == SPARSE:  # what the sparse codec does not send is not lost: later rounds have it
        return 0.0
    partial, complete = _ERROR_OF_ONE[reduce_codec or codec], _ERROR_OF_ONE[codec]
    return math.sqrt(partial**2 * (peers - 1) / 2 + complete**2)


def codec_of_partial_sums(codec: str, peers: int) -> str:
    """Return the codec in which a ring of `peers` peers sends partial sums: `codec` or a wider one.

    It is the narrowest with which the average's error stays within the bound of `codec`. All members of an
    attempt compute it from the number of members, and so choose the same.
    """
    chosen = codec
    while average_error(codec, peers, reduce_codec=chosen) > _ERROR_AT_MOST[codec] and chosen in _WIDER:
        chosen = _WIDER[chosen]
    return chosen


def sparse_bytes(density: float) -> float:
    """Return the bytes of a value in the sparse codec (`transport.sparse_codec` describes the code)."""
    kept = max(1, round(density * SPARSE_CHUNK))
    low_bits = (SPARSE_CHUNK // kept).bit_length() - 1
    bitmap = kept + (SPARSE_CHUNK - 1 >> low_bits)
    return (4 + (kept * (low_bits + 2) + bitmap + 7) // 8) / SPARSE_CHUNK


def peer_ring_bytes(values: int, codec: str, peers: int, *, density: float) -> float:
    """Return the bytes that each peer of a ring sends to average `values` values, without scales.

    density: the setting elastic.density, for the sparse codec.
    """
    if codec == SPARSE:
        return values * sparse_bytes(density) * (peers - 1)
    both_ways = CODEC_BYTES[codec_of_partial_sums(codec, peers)] + CODEC_BYTES[codec]
    return values * both_ways * (peers - 1) / peers


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round between peers is predicted to take.

    inner_s: seconds of a peer's `inner_steps` together.
    payload_bytes: what a peer brings to the all_reduce, encoded. sent_bytes: what it sends for that.
    part_of_int8: `sent_bytes` as a share of what would be sent with codec = "int8".
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
    and sparse keep a residual and make the next one. Overlapped steps need two copies of a fragment: its
    weights that are offered, and its next base; fragments count as equal, although those with the embedding
    or the head are longer. With averaged gradients nothing is kept.
    """
    kept_bytes = 0.0 if elastic.average == "gradients" else 8.0
    is_sparse = elastic.codec == SPARSE
    made = min(4.0, 8.0 * elastic.density * elastic.peers) if is_sparse else CODEC_BYTES[elastic.codec]
    if kept_bytes and elastic.codec in ("int4", SPARSE):
        kept_bytes, made = kept_bytes + 4.0, made + 4.0
    if kept_bytes and elastic.overlap_steps:
        kept_bytes += 8.0 / elastic.fragments
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
    sent = peer_ring_bytes(parameters, elastic.codec, peers, density=elastic.density)
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
        part_of_int8=sent / (peer_ring_bytes(parameters, "int8", peers, density=0.0) or 1.0),
        host_bytes=host_bytes,
        host_peak_bytes=host_peak_bytes,
        copy_bytes=state_bytes + host_bytes + weights_apart_bytes,
        exchange_s=exchange if peers > 1 else link.outer_step_s,
        utilisation=inner / (inner + (exchange if peers > 1 else link.outer_step_s)),
    )
