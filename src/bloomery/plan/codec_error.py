"""Predicts what quantising costs the average of a round, and chooses the codec of its partial sums.

In a ring of n peers each value is quantised n times: n − 1 times as a growing partial sum, and once as the
complete sum, whose bytes are handed round. With equal, independent parts the variance of the k-th partial
sum is k/n of the sum's, so the relative error of the average is √(e² · (n − 1) / 2 + g²), where e and g are
the errors of one quantisation in the codec of the partial sums and of the complete one. It stays as it is
however many peers there are only while e²·n is small beside g².

The sparse codec has no partial sums: each peer's code goes round the ring whole. So what a peer sends grows
with the number of peers, whereas a ring that adds up sends each peer's values twice at most.
"""

from __future__ import annotations

import math

from bloomery.config.elastic import SPARSE

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
    """Return the relative error of the average of so many equal, independent parts.

    codec: of the complete sums; the setting elastic.codec.
    reduce_codec: of the partial sums; None: as `codec`.
    """
    if peers < 2 or codec == SPARSE:  # what the sparse codec does not send is not lost: later rounds have it
        return 0.0
    partial, complete = _ERROR_OF_ONE[reduce_codec or codec], _ERROR_OF_ONE[codec]
    return math.sqrt(partial**2 * (peers - 1) / 2 + complete**2)


def codec_of_partial_sums(codec: str, peers: int) -> str:
    """Return the codec in which the ring of so many peers sends partial sums: `codec` or a wider one.

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


def ring_bytes(values: int, codec: str, peers: int, *, density: float) -> float:
    """Return how many bytes each peer of a ring sends to average so many values, without scales.

    density: the setting elastic.density, for the sparse codec.
    """
    if codec == SPARSE:
        return values * sparse_bytes(density) * (peers - 1)
    both_ways = CODEC_BYTES[codec_of_partial_sums(codec, peers)] + CODEC_BYTES[codec]
    return values * both_ways * (peers - 1) / peers
