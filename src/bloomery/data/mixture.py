"""The mixture of datasets in a sample stream: sizes and shares, and each dataset's exact quota in each block.

A checkpoint stores a mixture in a few bytes. Quotas are computed in integers.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bloomery.data import native_kernels
from bloomery.data.dataset_shares import Demand
from bloomery.errors import DataError

BLOCK = 1 << 16
"""Samples of one block: the quota holds for each block, the shuffle is inside it."""

RULE = 2
"""How quotas are rounded today. Rule 1, which the first checkpoints were made with, rounds the running totals
alone, so that a block may be two samples off its share; they go on with it."""

_SHARE_BITS = 46  # share · BLOCK fits an int64; rounding a share moves no dataset by a sample before 2**45
_ONE = 1 << _SHARE_BITS
_SNAPSHOT_EVERY = 1024

Counts = npt.NDArray[np.int64]
Weight = float | Fraction


@dataclass(frozen=True, kw_only=True)
class _Tally:
    """After some blocks: a dataset is due block · floor + whole + residue / _ONE, and has given … + ahead."""

    block: int
    whole: Counts
    residue: Counts
    ahead: Counts


class Quotas:
    """Samples of each dataset in the first b blocks, for any b.

    Each block (of `block` samples) holds each dataset's exact share of it, rounded up or down, and so do the
    first b blocks together, however small the share is. What is left after rounding down is a fair schedule
    of unit tasks: a dataset takes none or one of a block's spare places, and never falls behind or runs ahead
    by a whole one (Baruah et al. 1996). Earliest deadline first with two rules for ties, PD², finds it
    wherever one exists (Anderson & Srinivasan 2001), and one always does.
    """

    def __init__(self, weights: Sequence[Weight], *, rule: int = RULE, block: int = BLOCK) -> None:
        shares = np.array(whole_shares(weights), dtype=np.int64) * block
        self._shares = shares
        self._floors = shares >> _SHARE_BITS if rule > 1 else np.zeros_like(shares)
        self._steps = shares - (self._floors << _SHARE_BITS)
        self._chairs = block - int(self._floors.sum())
        self._rule, self._block = rule, block
        zero = np.zeros_like(shares)
        start = _Tally(block=0, whole=zero, residue=zero, ahead=zero)
        self._snapshots = {0: start}
        self._latest = start

    def before(self, block: int) -> Counts:
        """Samples of each dataset in all blocks before this one. Costs some 1 µs a block not yet walked."""
        tally = self._latest  # read once: another thread may move it
        if tally.block > block:
            tally = self._snapshots[max(known for known in list(self._snapshots) if known <= block)]
        while tally.block < block:
            goal = min(block, (tally.block // _SNAPSHOT_EVERY + 1) * _SNAPSHOT_EVERY)
            tally = self._walked(tally, goal)
            if tally.block % _SNAPSHOT_EVERY == 0:
                self._snapshots[tally.block] = tally
        self._latest = tally
        return block * self._floors + tally.whole + tally.ahead

    def block_of(self, dataset: int, turn: int, *, below: int) -> int | None:
        """The block, if it is below `below`, in which a dataset gives its sample `turn` (from 0)."""
        share = int(self._shares[dataset])
        if not share:
            return None
        # Totals are within one sample of the share, so before(low) <= turn < before(high).
        low = max(0, turn * _ONE // share - 1)
        high = min(below, -(-(turn + 2) * _ONE // share))
        if low >= below or int(self.before(high)[dataset]) <= turn:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if int(self.before(middle)[dataset]) > turn else (middle, high)
        return low

    def _walked(self, tally: _Tally, goal: int) -> _Tally:
        """The tally at block `goal`, which lies ahead."""
        if self._rule > 1:
            whole, residue, ahead = tally.whole.copy(), tally.residue.copy(), tally.ahead.copy()
            blocks = goal - tally.block
            if native_kernels.walk_quotas(self._steps, self._chairs, blocks, whole, residue, ahead):
                return _Tally(block=goal, whole=whole, residue=residue, ahead=ahead)
        while tally.block < goal:
            tally = self._following(tally) if self._rule > 1 else self._following_rule_1(tally)
        return tally

    def _following(self, tally: _Tally) -> _Tally:
        """The tally one block later, by PD²: native/src/order.cpp has the same."""
        due = tally.residue + self._steps
        able = np.flatnonzero((self._steps > 0) & (due > tally.ahead * _ONE))
        steps, residue = self._steps[able], tally.residue[able]
        wanted = (tally.ahead[able] + 1) * _ONE - residue
        deadlines = -(-wanted // steps)
        overlaps = deadlines * steps > wanted  # the next one's time begins before this one's is over
        begun = -residue % _ONE
        pauses = -(-(begun + np.minimum(deadlines, 4) * (_ONE - steps)) // _ONE)  # a heavy one's are soon
        group_deadlines = np.where(2 * steps >= _ONE, -(-(pauses * _ONE - begun) // (_ONE - steps)), 0)
        assert able.size >= self._chairs, "a fair schedule exists"
        by_urgency = np.lexsort((-group_deadlines, ~overlaps, deadlines))
        ahead = tally.ahead.copy()
        ahead[able[by_urgency[: self._chairs]]] += 1
        gained = due >> _SHARE_BITS
        return _Tally(
            block=tally.block + 1,
            whole=tally.whole + gained,
            residue=due & (_ONE - 1),
            ahead=ahead - gained,
        )

    def _following_rule_1(self, tally: _Tally) -> _Tally:
        """The tally one block later, by the deadlines of the running totals alone (Tijdeman 1980)."""
        due = tally.residue + self._steps
        whole, residue = tally.whole + (due >> _SHARE_BITS), due & (_ONE - 1)
        ahead = np.where(whole == tally.whole, tally.ahead, 0)
        missing = (tally.block + 1) * self._block - int(whole.sum()) - int(ahead.sum())
        candidates = np.flatnonzero((residue > 0) & (ahead == 0))
        assert 0 <= missing <= candidates.size, "earliest deadline first finds a rounding whenever one exists"
        deadlines = -((residue[candidates] - _ONE) // self._steps[candidates])
        ahead[candidates[np.argsort(deadlines, kind="stable")[:missing]]] = 1
        return _Tally(block=tally.block + 1, whole=whole, residue=residue, ahead=ahead)


def whole_shares(weights: Sequence[Weight]) -> list[int]:
    """The weights as integers that sum to 2**46 (largest remainders); a positive weight keeps at least 1.

    Shares that are such integers already stay what they are.
    """
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


def counts_to_end(shares: Sequence[int], given: Sequence[int], *, samples: int) -> list[int]:
    """What each dataset is yet to give of `samples` in all, of which `given` are: exact shares, rounded.

    A share that comes to a whole number of samples gives exactly these. shares: in 2**-46 of the whole.
    """
    blur = Fraction(2 * samples, _ONE)  # what rounding the shares may have moved
    dues = [Fraction(share * samples, _ONE) for share in shares]
    least = [max(0, math.floor(due + blur) - had) for due, had in zip(dues, given, strict=True)]
    most = [max(low, math.ceil(due - blur) - had) for due, low, had in zip(dues, least, given, strict=True)]
    left = samples - sum(given)
    by_need = sorted(range(len(dues)), key=lambda i: dues[i] - given[i] - least[i], reverse=True)
    for i in by_need:
        if sum(least) < left and least[i] < most[i]:
            least[i] += 1
    by_size = sorted(range(len(dues)), key=lambda i: (most[i] > least[i], least[i]), reverse=True)
    turn = 0
    while sum(least) != left:  # datasets of less than one sample took theirs early, or blur ate one
        i = by_size[turn % len(by_size)]
        step = 1 if sum(least) < left else -1
        least[i] += step if least[i] + step >= 0 and shares[i] else 0
        turn += 1
    return least


_SHARE_BYTES = 6


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """From stream index `at` on: how many windows each dataset has, and its share in 2**-46 of the whole.

    `rule`: how quotas are rounded, see `quotas.RULE`. Of a mixture with budgets also: `length`, the samples
    from `at` to the run's end, in which they are spent; `budgeted`, the datasets that have one; `demand`, a
    digest of what is asked of all. Without budgets these are empty.
    """

    at: int
    windows: tuple[int, ...]
    shares: tuple[int, ...]
    rule: int = RULE
    length: int = 0
    budgeted: tuple[int, ...] = ()
    demand: str = ""

    @classmethod
    def of(
        cls,
        windows: Sequence[int],
        weights: Sequence[Weight],
        *,
        at: int = 0,
        demand: Demand | None = None,
        length: int = 0,
    ) -> Mixture:
        """The mixture of weights that need not sum to one; DataError where they sum to nothing.

        demand: what they came from; with budgets, `length` is what they were shared out over.
        """
        mixture = cls(at=at, windows=tuple(windows), shares=tuple(whole_shares(weights)))
        if demand is None or not demand.budgeted:
            return mixture
        return replace(mixture, length=length, budgeted=demand.budgeted, demand=demand.digest)

    @property
    def shares_after(self) -> tuple[int, ...]:
        """The shares beyond `length`: without those whose budgets are spent, where others are left."""
        spent = set(self.budgeted)
        others = tuple(0 if number in spent else share for number, share in enumerate(self.shares))
        return tuple(whole_shares(others)) if any(others) else self.shares

    def is_like(self, other: Mixture) -> bool:
        """Whether both mix the same; rule and beginning do not count."""
        return (self.windows, self.shares) == (other.windows, other.shares)

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it: of the windows a digest, of the shares 6 bytes each."""
        packed = b"".join(share.to_bytes(_SHARE_BYTES, "little") for share in self.shares)
        return {
            "at": self.at,
            "rule": self.rule,
            "datasets": len(self.windows),
            "windows": _digest(self.windows),
            "shares": base64.b85encode(packed).decode(),
            **({"budgets": [self.length, self.demand, *self.budgeted]} if self.length else {}),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any], *, windows: Sequence[int]) -> Mixture:
        """What `to_json` described, or its first version did; `windows` are today's, of these datasets first.

        Raises DataError where the datasets have other sizes than they had.
        """
        if "rule" not in values:
            mixture = cls(
                at=int(values["at"]),
                windows=tuple(values["windows"]),
                shares=tuple(whole_shares(values["weights"])),
                rule=1,
            )
        else:
            packed = base64.b85decode(values["shares"])
            length, demand, *budgeted = values.get("budgets", (0, ""))
            cuts = range(0, len(packed), _SHARE_BYTES)
            mixture = cls(
                at=int(values["at"]),
                windows=tuple(windows[: values["datasets"]]),
                shares=tuple(int.from_bytes(packed[cut : cut + _SHARE_BYTES], "little") for cut in cuts),
                rule=int(values["rule"]),
                length=int(length),
                budgeted=tuple(budgeted),
                demand=str(demand),
            )
        if _digest(mixture.windows) != values.get("windows") and list(mixture.windows) != values.get(
            "windows"
        ):
            _refuse(len(mixture.shares), windows)
        if tuple(windows[: len(mixture.windows)]) != mixture.windows:
            _refuse(len(mixture.shares), windows)
        return mixture


def _digest(windows: Sequence[int]) -> str:
    return xxhash.xxh3_64_hexdigest(struct.pack(f"<{len(windows)}q", *windows))


def _refuse(count: int, windows: Sequence[int]) -> None:
    raise DataError(
        f"The checkpoint's mixture is of {count} datasets with other numbers of samples, or in another "
        f"order, than today's {len(windows)}.",
        remedy="Keep the datasets and their order; retire one with weight 0; add new ones last.",
    )
