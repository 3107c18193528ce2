"""How many samples each dataset of a mixture gives to each block of the stream: exact, in integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from bloomery.errors import DataError

BLOCK = 1 << 16
"""Samples of one block: the quota holds for each block, the shuffle is inside it."""

_SHARE_BITS = 46  # share · BLOCK fits an int64; rounding a share moves no dataset by a sample before 2**45
_ONE = 1 << _SHARE_BITS
_SNAPSHOT_EVERY = 1024

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _Tally:
    """After some blocks: samples due to each dataset = whole + residue / _ONE; given = whole + ahead."""

    block: int
    whole: Counts
    residue: Counts
    ahead: Counts


class Quotas:
    """Samples of each dataset in the first b blocks, for any b.

    After every block each dataset has had its exact share of the stream, rounded up or down, however small
    the share is. That such roundings exist is Tijdeman's theorem (1980); giving the sample that is ahead of
    its share to the dataset that needs it soonest (earliest deadline first) finds them.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = np.array(_whole_shares(weights), dtype=np.int64)
        zero = np.zeros_like(self._shares)
        start = _Tally(block=0, whole=zero, residue=zero, ahead=zero)
        self._snapshots = {0: start}
        self._latest = start

    def before(self, block: int) -> Counts:
        """Samples of each dataset in all blocks before this one. Costs some 20 µs a block not yet walked."""
        tally = self._latest  # read once: another thread may move it
        if tally.block > block:
            tally = self._snapshots[max(known for known in list(self._snapshots) if known <= block)]
        while tally.block < block:
            tally = self._following(tally)
            if tally.block % _SNAPSHOT_EVERY == 0:
                self._snapshots[tally.block] = tally
        self._latest = tally
        return tally.whole + tally.ahead

    def _following(self, tally: _Tally) -> _Tally:
        """The tally one block later."""
        step = self._shares * BLOCK
        due = tally.residue + step
        whole, residue = tally.whole + (due >> _SHARE_BITS), due & (_ONE - 1)
        ahead = np.where(whole == tally.whole, tally.ahead, 0)
        missing = (tally.block + 1) * BLOCK - int(whole.sum()) - int(ahead.sum())
        candidates = np.flatnonzero((residue > 0) & (ahead == 0))
        assert 0 <= missing <= candidates.size, "earliest deadline first finds a rounding whenever one exists"
        deadlines = -((residue[candidates] - _ONE) // step[candidates])
        ahead[candidates[np.argsort(deadlines, kind="stable")[:missing]]] = 1
        return _Tally(block=tally.block + 1, whole=whole, residue=residue, ahead=ahead)


def _whole_shares(weights: Sequence[float]) -> list[int]:
    """The weights as integers that sum to _ONE (largest remainders); a positive weight keeps at least 1."""
    exact = [Fraction(weight) for weight in weights]
    if not exact or min(exact) < 0 or sum(exact) <= 0:
        raise DataError(
            f"The weights of the datasets, {list(weights)}, give no mixture.",
            remedy="Give each dataset a weight of 0 or more, and at least one of them more than 0.",
        )
    scaled = [weight * _ONE / sum(exact) for weight in exact]
    shares = [int(share) or int(share > 0) for share in scaled]
    by_remainder = sorted(range(len(shares)), key=lambda i: scaled[i] - shares[i], reverse=True)
    for turn in range(_ONE - sum(shares)):
        shares[by_remainder[turn % len(shares)]] += 1
    shares[int(np.argmax(shares))] -= max(0, sum(shares) - _ONE)
    return shares
