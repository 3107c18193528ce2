"""Interleaves the datasets of a mixture so that each is always within one sample of its share.

The stream is cut into blocks. The samples that each dataset gave before a block are computed for any block,
and the samples of a block are laid out from the counts at its two ends, so nothing of the stream need be
stored.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bloomery.data import native_kernels

Counts = npt.NDArray[np.int64]
_SNAPSHOT_EVERY = 1024


class FairQuotas:
    """Samples of each dataset in the first b blocks, and the samples of a block, for any b.

    A dataset with share w is due w·t samples after t samples of the stream, and has then given ⌊w·t⌋ or
    ⌈w·t⌉. So its sample j lies in the slots ⌊j/w⌋ … ⌈(j+1)/w⌉ - 1: the earliest deadline first finds such a
    schedule wherever one exists (Tijdeman 1980). What follows shows that blocks can be laid out one by one,
    from counts at their ends alone.

    At time t let f be the fraction of a sample that a dataset is due beyond ⌊w·t⌋; a dataset is early if it
    has given ⌈w·t⌉ while f > 0. By Hall's theorem a block has a schedule if no count falls in it and

    1. at its begin, the k datasets with the earliest deadlines hold at least ⌊sum of their f⌋ early ones;
    2. at its end, so do the k datasets that were released first, where these include all that were released
       before the block.

    Such early ones exist at every end. Both rules say that the last datasets, by deadline or by release,
    hold at most ⌈sum of their f⌉: independent sets of two laminar matroids. For a set of either chain
    these limits, with one for each dataset outside of both, come to the sum of all f or more, so a common
    base exists (Edmonds 1970). One exists also with those that were early before the block and are not
    due yet, since they kept to rule 1 at its begin and their f has grown. Of all bases that keep to rule
    2, the one that is taken by deadline has the most early ones among the first k, for each k, and so
    keeps to rule 1 too.
    """

    def __init__(self, shares: Sequence[int], *, block: int, length: int = 0) -> None:
        """shares: integers of at least 0 whose sum stands for the whole, below 2**61.

        length: the samples after which the stream ends; 0: never. block: samples of each block but the last.
        """
        self._shares = np.array(shares, dtype=np.int64)
        self._share_sum = sum(shares)
        self._block, self._length = block, length
        # A dataset that gives a sample in each block is nowhere early across a whole one: no history matters.
        least = min(share for share in shares if share)
        self._is_free_of_history = least * block >= self._share_sum
        self._snapshots = {0: np.zeros_like(self._shares)}
        self._latest = (0, self._snapshots[0])

    def before(self, block: int) -> Counts:
        """Samples of each dataset in all blocks before this one.

        With a dataset that gives less than one sample a block, it costs some µs a block not yet walked.
        """
        known, counts = self._latest  # read once: another thread may move it
        whole = block
        if self._length:
            block = min(block, -(-self._length // self._block))
            whole = min(block, self._length // self._block)
        if known == block:
            return counts
        if self._is_free_of_history and whole:
            known = whole - 1
            due = [share * known * self._block // self._share_sum for share in self._shares.tolist()]
            counts = np.array(due, dtype=np.int64)
        elif known > block:
            known = max(stored for stored in list(self._snapshots) if stored <= block)
            counts = self._snapshots[known]
        while known < whole:
            goal = min(whole, (known // _SNAPSHOT_EVERY + 1) * _SNAPSHOT_EVERY)
            counts = self._moved(counts, begin=known * self._block, size=self._block, blocks=goal - known)
            known = goal
            if known % _SNAPSHOT_EVERY == 0 and not self._is_free_of_history:
                self._snapshots[known] = counts
        if block > whole:
            begin = whole * self._block
            if self._length > begin:
                counts = self._moved(counts, begin=begin, size=self._length - begin, blocks=1)
        self._latest = (block, counts)
        return counts

    def block_of(self, dataset: int, turn: int, *, below: int) -> int | None:
        """The block, if it is below `below`, in which a dataset gives its sample `turn` (from 0)."""
        share = int(self._shares[dataset]) * self._block
        if not share:
            return None
        low = max(0, (turn - 1) * self._share_sum // share - 1)
        high = min(below, -(-(turn + 2) * self._share_sum // share))
        if low >= below or int(self.before(high)[dataset]) <= turn:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if int(self.before(middle)[dataset]) > turn else (middle, high)
        return low

    def samples_of(self, block: int) -> tuple[npt.NDArray[np.int32], Counts]:
        """The dataset of each sample of a block, and which of that dataset's samples it is."""
        counts, after = self.before(block), self.before(block + 1)
        begin = block * self._block
        size = int(after.sum()) - begin
        datasets, turns = np.empty(size, dtype=np.int32), np.empty(size, dtype=np.int64)
        if native_kernels.fair_block(
            self._shares,
            self._share_sum,
            begin=begin,
            counts=counts,
            counts_after=after,
            datasets=datasets,
            turns=turns,
        ):
            return datasets, turns
        return _fair_block(
            self._shares.tolist(), self._share_sum, begin=begin, counts=counts.tolist(), after=after.tolist()
        )

    def _moved(self, counts: Counts, *, begin: int, size: int, blocks: int) -> Counts:
        """The counts `blocks` blocks of `size` samples after stream index `begin`, where they are
        `counts`.
        """
        moved = counts.copy()
        if native_kernels.fair_counts(
            self._shares, self._share_sum, begin=begin, size=size, blocks=blocks, counts=moved
        ):
            return moved
        given = counts.tolist()
        for _ in range(blocks):
            given = _fair_counts(self._shares.tolist(), self._share_sum, given, begin=begin, end=begin + size)
            begin += size
        return np.array(given, dtype=np.int64)


def _fair_counts(
    shares: Sequence[int], share_sum: int, given: Sequence[int], *, begin: int, end: int
) -> list[int]:
    """The counts at stream index `end` of a block that begins with the counts `given`: fair.cpp has the
    same.
    """
    floors = [share * end // share_sum for share in shares]
    residues = [share * end % share_sum for share in shares]
    releases = [
        end + -residue // share if residue else 0 for share, residue in zip(shares, residues, strict=True)
    ]
    kept: list[tuple[bool, int, int]] = []  # a heap, the latest deadline first
    due = 0
    for i in sorted((i for i in range(len(shares)) if residues[i]), key=lambda i: (-releases[i], i)):
        is_early = given[i] > floors[i]
        deadline = -((residues[i] - share_sum) // shares[i])
        heapq.heappush(kept, (is_early, -deadline, -i))
        due += residues[i]
        if releases[i] > begin and len(kept) > -(-due // share_sum):
            heapq.heappop(kept)
    while len(kept) > end - sum(floors):
        heapq.heappop(kept)
    for _, _, negative in kept:
        floors[-negative] += 1
    assert sum(floors) == end, "a fair schedule exists"
    return floors


def _fair_block(
    shares: Sequence[int], share_sum: int, *, begin: int, counts: Sequence[int], after: Sequence[int]
) -> tuple[npt.NDArray[np.int32], Counts]:
    """The samples of a block between two counts, the earliest deadline first: fair.cpp has the same."""
    size = sum(after) - begin
    jobs = []
    for i, share in enumerate(shares):
        for turn in range(counts[i], after[i]):
            release = max(0, turn * share_sum // share - begin)
            deadline = min(size, -(-(turn + 1) * share_sum // share) - begin)
            jobs.append((deadline, i, release))
    jobs.sort()
    next_free = list(range(size + 1))
    datasets, turns = np.empty(size, dtype=np.int32), np.empty(size, dtype=np.int64)
    for deadline, i, release in jobs:
        slot = release
        while next_free[slot] != slot:
            next_free[slot] = slot = next_free[next_free[slot]]
        assert slot < deadline, "a fair schedule exists between these counts"
        next_free[slot] = slot + 1
        datasets[slot] = i
    for i, count in enumerate(counts):
        turns[datasets == i] = np.arange(count, after[i])
    return datasets, turns
