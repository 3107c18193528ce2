"""Packs pieces of documents into samples without cutting them: best fit, the longest first.

Pieces of one length can be exchanged, so what is packed is how many there are of each length. The packing is
a table of some thousand groups of samples that are filled alike; which pieces a sample holds is computed from
it. Its size depends on the length of a sample, and not on the number of documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The pieces of some samples, those of a sample in their order.

    row: which of the samples that were asked for a piece is in. column: its first place there.
    length: its places. rank: its number among all pieces of its length.
    """

    row: Indices
    column: Indices
    length: Indices
    rank: Indices


class Packing:
    """What `best_fit` returns.

    sample_count: number of samples. capacity: places of a sample.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, int, int, int]],
        fills: Sequence[tuple[int, int, int, int]],
        *,
        capacity: int,
    ) -> None:
        """groups: (first sample, end, last of its fills, places left), in the order of samples.

        fills: (the fill before it or −1, length, times, base): sample s holds the pieces base + s · times and
        the `times` − 1 after it of this length.
        """
        columns = np.array(groups, dtype=np.int64).reshape(-1, 4)
        self._begins, self._last, self._free = columns[:, 0], columns[:, 2], columns[:, 3]
        self._fills = np.array(fills, dtype=np.int64).reshape(-1, 4)
        self.capacity = capacity
        self.sample_count = int(columns[-1, 1]) if len(columns) else 0

    def filled(self, samples: Indices) -> Indices:
        """Return how many places of each sample are filled."""
        return self.capacity - self._free[self._group_of(samples)]

    @property
    def empty_places(self) -> int:
        """Places that are empty, in all samples together."""
        sizes = np.diff(self._begins, append=self.sample_count)
        return int((sizes * self._free).sum())

    def pieces(self, samples: Indices) -> Pieces:
        """Return the pieces of some samples."""
        fill = self._last[self._group_of(samples)]
        rows, columns, lengths, ranks = [], [], [], []
        row, at = np.arange(samples.size), np.zeros(samples.size, dtype=np.int64)
        while row.size:  # once for each piece of the sample that has most kinds of them
            before, length, times, base = self._fills[fill].T
            inner = np.arange(int(times.sum())) - np.repeat(np.cumsum(times) - times, times)
            rows.append(np.repeat(row, times))
            columns.append(np.repeat(at, times) + inner * np.repeat(length, times))
            lengths.append(np.repeat(length, times))
            ranks.append(np.repeat(base + samples[row] * times, times) + inner)
            more = before >= 0
            row, at, fill = row[more], (at + length * times)[more], before[more]
        if not rows:
            none = np.empty(0, dtype=np.int64)
            return Pieces(row=none, column=none, length=none, rank=none)
        joined = [np.concatenate(column) for column in (rows, columns, lengths, ranks)]
        order = np.argsort(joined[0], kind="stable")
        row, column, length, rank = (values[order] for values in joined)
        return Pieces(row=row, column=column, length=length, rank=rank)

    def _group_of(self, samples: Indices) -> Indices:
        return np.searchsorted(self._begins, samples, side="right") - 1


def best_fit(counts: Sequence[int] | Indices, *, capacity: int) -> Packing:
    """Pack pieces into samples of `capacity` places: each, from the longest to the shortest, where it leaves
    the least, and in a new sample where it fits nowhere.

    counts: number of pieces of each length, from 0 to `capacity`; [capacity + 1].

    A sample that just took a piece leaves less than any other that can take one more of the same length, so
    it is filled on: samples of equal room are filled together. A group is met at most log2(capacity) times,
    since each filling takes more than half of its room; so the work is at most capacity · log2(capacity)
    steps, whatever the number of pieces.
    """
    fills: list[tuple[int, int, int, int]] = []
    full: list[tuple[int, int, int, int]] = []
    room: dict[int, list[tuple[int, int, int]]] = {}  # by places left: (first sample, end, last fill)
    rooms: list[int] = []  # its keys, sorted
    total = 0

    def put(free: int, begin: int, end: int, fill: int) -> None:
        if not free:
            full.append((begin, end, fill, 0))
        elif free in room:
            room[free].append((begin, end, fill))
        else:
            room[free] = [(begin, end, fill)]
            insort(rooms, free)

    for length in range(capacity, 0, -1):
        left, rank = int(counts[length]), 0
        while left:
            at = bisect_left(rooms, length)
            if at == len(rooms):
                free, before, begin = capacity, -1, total
                most = -(-left // (capacity // length))
                end = total = total + most
            else:
                free = rooms[at]
                begin, end, before = room[free].pop()
                if not room[free]:
                    del room[free], rooms[at]
            times = free // length
            taken = min(end - begin, left // times)
            if not taken:  # fewer pieces than one sample takes
                taken, times = 1, left
            if begin + taken < end:
                put(free, begin + taken, end, before)
            fills.append((before, length, times, rank - begin * times))
            put(free - length * times, begin, begin + taken, len(fills) - 1)
            rank, left = rank + taken * times, left - taken * times
    groups = [(*group, free) for free, held in room.items() for group in held]
    return Packing(sorted([*full, *groups]), fills, capacity=capacity)
