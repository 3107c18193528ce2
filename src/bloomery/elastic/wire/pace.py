"""How fast to send to one neighbour: learnt, round by round, from what the way there lost."""

from __future__ import annotations

from dataclasses import dataclass

_LOSSY = 0.005
"""The share of what arrived, sent again, above which a round was too fast."""
_BEGIN, _LOWER, _SLOWER = 1.1, 0.94, 0.8
"""A first limit, of the best rate of its round; a lower one, of the one before; and where a lossy round's
best rate is below this share of its limit, the link has become slower, and it begins anew."""
_HIGHER, _DOUBLES, _NEAR = 0.03, 4, 0.8
"""How much a limit grows after a round without loss, twice as much after so many of them; and how near to it
that round must have come."""
_BRIEF_S = 0.5
"""A round as short as this shows no rate."""


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """What the kernel saw of one all-reduce on its way to the next member; all 0 where it saw nothing.

    delivered_bytes: that arrived, by the mean size of a segment. lost_bytes: sent again. best_bytes_s: in the
    best quarter of a second.
    """

    seconds: float
    delivered_bytes: int
    lost_bytes: int
    best_bytes_s: float


class Pace:
    """A limit for the rate of one hop, which lasts longer than a ring.

    Several streams that look for the rate of a link push in far more than it takes and lose it together, and
    what was lost comes a round trip later; a limit near to what the link carries is faster (for figures see
    docs/notes/ring.md). It stays near by small steps: down after a loss, up after none. A link that loses
    nothing never gets one, and none goes below the mean rate that was reached with it or without it.
    """

    def __init__(self, most_bytes_s: float | None = None) -> None:
        """most_bytes_s: what its owner allows at most."""
        self._most = most_bytes_s
        self._learnt: float | None = None
        self._reached, self._clean = 0.0, 0

    @property
    def limit_bytes_s(self) -> float | None:
        """For the next all-reduce; None: as fast as it goes."""
        limits = [limit for limit in (self._most, self._learnt) if limit is not None]
        return min(limits, default=None)

    def learn(self, seen: Delivered) -> None:
        """After each all-reduce that succeeded."""
        if seen.seconds < _BRIEF_S or seen.best_bytes_s <= 0:
            return
        mean_bytes_s = seen.delivered_bytes / seen.seconds
        self._reached = max(self._reached, mean_bytes_s)
        is_lossy = seen.lost_bytes > _LOSSY * seen.delivered_bytes
        if is_lossy and (self._learnt is None or seen.best_bytes_s < _SLOWER * self._learnt):
            self._learnt, self._reached, self._clean = _BEGIN * seen.best_bytes_s, mean_bytes_s, 0
        elif is_lossy:
            assert self._learnt is not None
            self._learnt, self._clean = max(_LOWER * self._learnt, self._reached), 0
        elif self._learnt is not None and seen.best_bytes_s > _NEAR * self._learnt:
            self._learnt *= 1 + _HIGHER * 2 ** (self._clean // _DOUBLES)
            self._clean += 1
