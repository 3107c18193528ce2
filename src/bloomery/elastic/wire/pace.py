"""How fast to send to one neighbour: learnt, round by round, from what the way there lost."""

from __future__ import annotations

from dataclasses import dataclass

_LOSSY = 0.005
"""The share of what arrived, sent again, above which a round was too fast."""
_BELOW, _LEAST = 0.92, 0.75
"""A new limit, of the best rate of its round; and the lowest, of the best rate of late."""
_REACHED = 0.95
"""The share of a limit from which on a round was held back by it."""
_ROUNDS = 8
"""After so many rounds with a limit, one without shows whether the link has changed."""
_BRIEF_S = 0.5
"""A round as short as this shows no rate."""


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """What the kernel saw of one all-reduce on its way to the next member; all 0 where it saw nothing.

    delivered_bytes: acknowledged. lost_bytes: sent again. best_bytes_s: acknowledged in the best quarter of
    a second.
    """

    seconds: float
    delivered_bytes: int
    lost_bytes: int
    best_bytes_s: float


class Pace:
    """A limit for the rate of one hop, which lasts longer than a ring.

    Several streams that look for the rate of a link push in more than it takes and lose it together, and
    what was lost comes a round trip later; a limit slightly below what the link carries is faster
    (docs/notes/ring.md has the figures). A link that loses nothing never gets one; one that becomes slower is
    followed at once, one that becomes faster is noticed within nine rounds.
    """

    def __init__(self, most_bytes_s: float | None = None) -> None:
        """most_bytes_s: what its owner allows at most."""
        self._most = most_bytes_s
        self._learnt: float | None = None
        self._best, self._rounds = 0.0, 0

    @property
    def limit_bytes_s(self) -> float | None:
        """For the next all-reduce; None: as fast as it goes."""
        limits = [limit for limit in (self._most, self._learnt) if limit is not None]
        return min(limits, default=None)

    def learn(self, seen: Delivered) -> None:
        """After each all-reduce that succeeded."""
        if seen.seconds < _BRIEF_S or seen.best_bytes_s <= 0:
            return
        if self._learnt is None:
            self._best = 0.0
        self._best = max(self._best, seen.best_bytes_s)
        self._rounds += 1
        lost = seen.lost_bytes / seen.delivered_bytes
        # Losses at the limit's own pace are not cured by a lower one: others share the way, or it is bad.
        was_held = self._learnt is not None and seen.best_bytes_s >= _REACHED * self._learnt
        if lost > _LOSSY and not was_held:
            self._learnt, self._rounds = max(_BELOW * seen.best_bytes_s, _LEAST * self._best), 0
        elif self._rounds >= _ROUNDS:
            self._learnt = None
