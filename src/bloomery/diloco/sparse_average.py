"""Averages parts of which each peer sends its largest values alone (`transport.sparse_codec`).

Sparse parts do not fit a ring that adds up: sums of them have other places. So each member's code goes round
the ring as it is, and every member adds up all codes, in the order of the members. All do the same fp32
arithmetic on the same bytes, so all get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bloomery.transport.gradient_codec import Float32, largest_magnitude
from bloomery.transport.ring_all_reduce import LARGEST_OWN
from bloomery.transport.sparse_codec import Words, add_sparse, encode_sparse


class NotSendable(ValueError):
    """A member's own values cannot be encoded, and nothing was sent."""


class WrongCode(ValueError):
    """A member sent what is no code. index: of the member."""

    def __init__(self, why: str, *, index: int) -> None:
        super().__init__(why)
        self.index = index


def average_sparse(
    values: Float32,
    *,
    gather: Callable[[Words], object],
    weights: Sequence[float],
    index: int,
    density: float,
    residual: Float32 | None,
) -> None:
    """Replace `values` by the sum of weight × what each member sent of its values.

    gather: fills an array [members, words] with the rows of the other members; this one's is in its place.
    weights, index: the weights of all members, and which of them this one is.
    residual: what was not sent of weight × values is added to it; None: that is lost. With weight 0 nothing
        counts as sent, so it stays as it is.
    Raises NotSendable, WrongCode, or what `gather` raises; `values` and `residual` are then undefined.
    """
    weight = np.float32(weights[index])
    if not largest_magnitude(values) * max(1.0, float(weight)) <= LARGEST_OWN:
        raise NotSendable("own values are not finite, or beyond 2^100; nothing was sent")
    code = encode_sparse(values, density)
    if residual is not None and weight:
        unsent = values.copy()
        add_sparse(code, density, unsent, weight=-1.0)
        residual += unsent * weight
    codes = np.zeros((len(weights), code.size), np.uint32)
    codes[index] = code
    gather(codes)
    values.fill(0.0)
    for member, row in enumerate(codes):
        try:
            add_sparse(row, density, values, weight=weights[member])
        except ValueError as error:
            raise WrongCode(str(error), index=member) from error
