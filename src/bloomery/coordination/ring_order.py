"""Orders the members of the ring so that its slowest link is as fast as possible, without failed links."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

_EXHAUSTIVE = 7
"""Members up to which every order is tried: 360 then."""
_UNMEASURED = 0.0

Link = frozenset[str]


def ring(
    members: Sequence[str],
    *,
    rates: Mapping[str, Mapping[str, float]] | None = None,
    broken: Collection[Link] = (),
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (order, dropped): a ring without a broken link, and who had to go so that there is one.

    rates[a][b]: what a measured from itself to b. Who goes is the one with most broken links, the last by
    name of several. With neither rates nor broken links the order is that of names.
    """
    left = sorted(members)
    dropped: list[str] = []
    while True:
        order = _order(left, rates or {}, broken)
        if order is not None:
            return order, tuple(dropped)
        counted = Counter(peer for link in broken for peer in link if link <= set(left))
        worst = max(left, key=lambda peer: (counted[peer], peer))
        left.remove(worst)
        dropped.append(worst)


def hops(order: Sequence[str]) -> list[tuple[str, str]]:
    """Who sends to whom."""
    return [(one, order[(place + 1) % len(order)]) for place, one in enumerate(order)] if order[1:] else []


def _order(
    members: Sequence[str], rates: Mapping[str, Mapping[str, float]], broken: Collection[Link]
) -> tuple[str, ...] | None:
    plain = tuple(members)
    if len(members) < 2 or (not broken and not any(rates.get(one) for one in members)):
        return plain
    candidates = _all_orders(plain) if len(members) <= _EXHAUSTIVE else _found_orders(plain, rates, broken)
    best = max(candidates, key=lambda order: _worth(order, rates, broken))
    return None if _cut(best, broken) else best


def _worth(
    order: Sequence[str], rates: Mapping[str, Mapping[str, float]], broken: Collection[Link]
) -> tuple[float, ...]:
    speeds = sorted(rates.get(one, {}).get(two, _UNMEASURED) for one, two in hops(order))
    return (-_cut(order, broken), *speeds)


def _cut(order: Sequence[str], broken: Collection[Link]) -> int:
    return sum(frozenset(hop) in broken for hop in hops(order))


def _all_orders(members: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    return ((members[0], *rest) for rest in itertools.permutations(members[1:]))


def _found_orders(
    members: tuple[str, ...], rates: Mapping[str, Mapping[str, float]], broken: Collection[Link]
) -> Iterable[tuple[str, ...]]:
    """Improve the order of names by turning pieces of it round or moving one member, until nothing helps."""
    best, worth = members, _worth(members, rates, broken)
    improved = True
    while improved:
        improved = False
        for other in (*_turned(best), *_moved(best)):
            found = _worth(other, rates, broken)
            if found > worth:
                best, worth, improved = other, found, True
                break
    return (best,)


def _turned(order: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    for start, stop in itertools.combinations(range(1, len(order) + 1), 2):
        yield (*order[:start], *reversed(order[start:stop]), *order[stop:])


def _moved(order: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    for place in range(1, len(order)):
        rest = (*order[:place], *order[place + 1 :])
        for target in range(1, len(rest) + 1):
            yield (*rest[:target], order[place], *rest[target:])
