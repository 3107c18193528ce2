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
"""Number of samples in one block. Each block holds the exact quotas, and the shuffle stays inside a block."""

RULE = 3
"""How quotas are rounded today: at every sample (`FairQuotas`). A checkpoint names its rule, and its run
keeps it. Rule 2 rounds at the ends of blocks and shuffles each block. Rule 1 rounds only the running totals,
so a block may be two samples off its share.
"""

# share · BLOCK fits into an int64; rounding shares shifts no dataset by a sample before 2**45
_SHARE_BITS = 46
_ONE = 1 << _SHARE_BITS
_FINE_SHARE_BITS = 60  # for shares in multiples of one sample of a run
_SNAPSHOT_EVERY = 1024

Counts = npt.NDArray[np.int64]
Weight = float | Fraction


@dataclass(frozen=True, kw_only=True)
class _Tally:
    """The state of all quotas after some blocks.

    A dataset is due `block · floor + whole + residue / _ONE` samples, and has given `block · floor + ahead`.
    """

    block: int
    whole: Counts
    residue: Counts
    ahead: Counts


class Quotas:
    """Computes how many samples of each dataset the first b blocks hold by rule 1 or 2, for any b.

    Each block (of `block` samples) holds each dataset's exact share of it, rounded up or down; so do the
    first b blocks together, however small the share is. The places that are left after rounding down are a
    fair schedule of unit tasks: a dataset takes none or one of a block's spare places, and never falls behind
    or runs ahead by a whole one (Baruah et al. 1996). PD², which is earliest deadline first with two rules
    for ties, finds such a schedule if there is one (Anderson & Srinivasan 2001), and there always is.
    """

    def __init__(self, weights: Sequence[Weight], *, rule: int = 2, block: int = BLOCK) -> None:
        """weights: they need not sum to one. rule: 1 or 2, see `RULE`. block: samples of one."""
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
        """Return the number of samples of each dataset in all blocks before this one.

        It costs about 1 µs for each block that was not computed before.
        """
        tally = self._latest  # read once, since another thread may replace it
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
        """Return the block, if it is below `below`, in which a dataset gives its sample `turn` (from 0)."""
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
        """Return the tally at block `goal`, which lies ahead of `tally`."""
        if self._rule > 1:
            whole, residue, ahead = tally.whole.copy(), tally.residue.copy(), tally.ahead.copy()
            blocks = goal - tally.block
            if native_kernels.walk_quotas(self._steps, self._chairs, blocks, whole, residue, ahead):
                return _Tally(block=goal, whole=whole, residue=residue, ahead=ahead)
        while tally.block < goal:
            tally = self._following(tally) if self._rule > 1 else self._following_rule_1(tally)
        return tally

    def _following(self, tally: _Tally) -> _Tally:
        """Return the tally one block later, by PD². native/src/order.cpp computes the same."""
        due = tally.residue + self._steps
        able = np.flatnonzero((self._steps > 0) & (due > tally.ahead * _ONE))
        steps, residue = self._steps[able], tally.residue[able]
        wanted = (tally.ahead[able] + 1) * _ONE - residue
        deadlines = -(-wanted // steps)
        overlaps = deadlines * steps > wanted  # the next task's window begins before this task's window ends
        begun = -residue % _ONE
        # the pauses of a dataset with a large share are short
        pauses = -(-(begun + np.minimum(deadlines, 4) * (_ONE - steps)) // _ONE)
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
        """Return the tally one block later, by the deadlines of the running totals alone (Tijdeman 1980)."""
        due = tally.residue + self._steps
        whole, residue = tally.whole + (due >> _SHARE_BITS), due & (_ONE - 1)
        ahead = np.where(whole == tally.whole, tally.ahead, 0)
        missing = (tally.block + 1) * self._block - int(whole.sum()) - int(ahead.sum())
        candidates = np.flatnonzero((residue > 0) & (ahead == 0))
        assert 0 <= missing <= candidates.size, "earliest deadline first finds a rounding whenever one exists"
        deadlines = -((residue[candidates] - _ONE) // self._steps[candidates])
        ahead[candidates[np.argsort(deadlines, kind="stable")[:missing]]] = 1
        return _Tally(block=tally.block + 1, whole=whole, residue=residue, ahead=ahead)


def whole_shares(weights: Sequence[Weight], *, share_sum: int = _ONE) -> list[int]:
    """Return the weights as integers that sum to `share_sum`, by the method of largest remainders.

    A positive weight gets at least 1. Shares that are such integers already are returned unchanged.
    """
    exact = [Fraction(weight) for weight in weights]
    if not exact or min(exact) < 0 or sum(exact) <= 0:
        raise DataError(
            f"The weights of the datasets, {list(weights)}, give no mixture.",
            remedy="Give each dataset a weight of 0 or more, and at least one of them more than 0.",
        )
    total = sum(exact)
    scaled = [weight * share_sum / total for weight in exact]
    shares = [int(share) or int(share > 0) for share in scaled]
    by_remainder = sorted(range(len(shares)), key=lambda i: scaled[i] - shares[i], reverse=True)
    for turn in range(share_sum - sum(shares)):
        shares[by_remainder[turn % len(shares)]] += 1
    shares[int(np.argmax(shares))] -= max(0, sum(shares) - share_sum)
    return shares


def shares_to_end(shares: Sequence[int], *, samples: int) -> list[int]:
    """The shares of a stream of `samples`, as integers by which each budget ends at its last sample exactly.

    shares: in 2**-46 of the whole. One that comes to a whole number of samples, but for their rounding, is a
    budget; the others keep their proportions in what budgets leave.
    """
    blur = Fraction(2 * samples, _ONE)  # what rounding the shares may have moved
    dues = [Fraction(share * samples, _ONE) for share in shares]
    budgets = [round(due) if abs(round(due) - due) <= blur else None for due in dues]
    others = sum(share for share, budget in zip(shares, budgets, strict=True) if budget is None)
    rest = samples - sum(budget or 0 for budget in budgets)
    if (rest > 0) != (others > 0) or rest < 0:  # the shares are not those of budgets
        return list(shares)
    weights = [
        Fraction(rest * share, others) if budget is None else Fraction(budget)
        for share, budget in zip(shares, budgets, strict=True)
    ]
    return whole_shares(weights, share_sum=max(1, (1 << _FINE_SHARE_BITS) // samples) * samples)


def counts_to_end(shares: Sequence[int], given_before: Sequence[int], *, samples: int) -> list[int]:
    """Return how many samples each dataset still gives, as exact shares of the whole run, rounded.

    shares: share of each dataset in the whole run, in units of 2**-46.
    given_before: number of samples that each dataset gave before.
    samples: number of samples of the whole run, including those given before.

    A share that comes to a whole number of samples gives exactly that number.
    """
    blur = Fraction(2 * samples, _ONE)  # what rounding the shares may have moved
    dues = [Fraction(share * samples, _ONE) for share in shares]
    least = [max(0, math.floor(due + blur) - had) for due, had in zip(dues, given_before, strict=True)]
    most = [
        max(low, math.ceil(due - blur) - had) for due, low, had in zip(dues, least, given_before, strict=True)
    ]
    left = samples - sum(given_before)
    by_need = sorted(range(len(dues)), key=lambda i: dues[i] - given_before[i] - least[i], reverse=True)
    for i in by_need:
        if sum(least) < left and least[i] < most[i]:
            least[i] += 1
    by_size = sorted(range(len(dues)), key=lambda i: (most[i] > least[i], least[i]), reverse=True)
    turn = 0
    while sum(least) != left:  # a dataset of less than one sample gave it early, or `blur` took one away
        i = by_size[turn % len(by_size)]
        step = 1 if sum(least) < left else -1
        least[i] += step if least[i] + step >= 0 and shares[i] else 0
        turn += 1
    return least


_SHARE_BYTES = 6


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A mixture that is in force from stream index `at` on.

    windows: number of windows in each dataset.
    shares: share of each dataset, in units of 2**-46.
    rule: how quotas are rounded, see `RULE`.
    length: with budgets, the number of samples from `at` to the run's end, in which the budgets are spent;
    else 0.
    budgeted: the indices of the datasets that have a budget.
    demand: with budgets, a digest of what the recipe asks of all datasets; else ''.
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
        """Return the mixture for weights that need not sum to one. Raises DataError if they sum to zero.

        demand: what the weights were computed from; None for plain weights.
        length: with budgets, the number of samples over which they are spread.
        """
        mixture = cls(at=at, windows=tuple(windows), shares=tuple(whole_shares(weights)))
        if demand is None or not demand.budgeted:
            return mixture
        return replace(mixture, length=length, budgeted=demand.budgeted, demand=demand.digest)

    @property
    def shares_after(self) -> tuple[int, ...]:
        """The shares beyond `length`: datasets whose budgets are spent have none, if other datasets are
        left.
        """
        spent = set(self.budgeted)
        others = tuple(0 if number in spent else share for number, share in enumerate(self.shares))
        return tuple(whole_shares(others)) if any(others) else self.shares

    def is_like(self, other: Mixture) -> bool:
        """Whether both mix the same datasets alike; rule and beginning are not compared."""
        return (self.windows, self.shares) == (other.windows, other.shares)

    def to_json(self) -> dict[str, Any]:
        """Return the mixture as a checkpoint stores it: a digest of the windows, and 6 bytes for each
        share.
        """
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
        """Return the mixture that `to_json` wrote today or in its first version.

        windows: today's number of windows, with the datasets of the checkpoint first.
        Raises DataError if the sizes of the datasets have changed.
        """
        if "rule" not in values:
            mixture = cls(
                at=int(values["at"]),
                windows=tuple(values["windows"]),
                shares=tuple(whole_shares(values["weights"])),
                rule=1,
            )
        else:
            if int(values["rule"]) > RULE:
                raise DataError(
                    f"The checkpoint's mixture follows rule {values['rule']}, and this version knows rules "
                    f"up to {RULE}.",
                    remedy="Go on with the version of bloomery that wrote the checkpoint, or a later one.",
                )
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
