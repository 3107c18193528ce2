"""Plans an all_reduce attempt: how long it waits for offers, and the order of its members in the ring.

In synchronous rounds all who have a share are waited for, up to grace_s after the first offer. Asynchronous
rounds (Decoupled DiLoCo, arXiv 2604.21428) begin once a quorum has offered, and wait for the others only
while that costs the quorum nothing: those who have offered go on with overlapped steps, so the window is a
part of the time that these steps take. Whoever is late goes on, and offers its steps in a later round.

The order makes the slowest link as fast as possible, and avoids links that failed.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bloomery.coordination.eligibility import RoundSettings, overtaken_newcomers
from bloomery.coordination.snapshot import Link, ListedOffer, RunSnapshot
from bloomery.data.position import Ranges, merged, within
from bloomery.protocol.records import Attempt

_EXHAUSTIVE = 7
"""Members up to which every order is tried: 720 then."""
_SMALL = 64
"""Members up to which the search is thorough: with 64 it takes some 30 ms, with 500 under a second."""
_TINY, _DRAWN = 32, 10
"""Up to _TINY members the search also begins from _DRAWN random orders."""
_EXCHANGES = 25_000_000
"""The most exchanges of two pieces that one search tries."""
_IN_VAIN, _IN_VAIN_IF_SMALL = 8, 24
"""The slow hops that a search tries in vain before it ends; the second is for small rings."""
_UNMEASURED, _BROKEN = 0.0, -1.0

_Rates = npt.NDArray[np.float32]
_Order = npt.NDArray[np.intp]


def ring_order(
    members: Sequence[str],
    *,
    rates: Mapping[str, Mapping[str, float]] | None = None,
    broken: Collection[Link] = (),
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (order, dropped): a ring without a broken link, and the members that it could not hold.

    members: names, at least one. rates[a][b]: the rate that a measured from itself to b, megabits a second.
    broken: pairs of members between which data does not pass. While no order without a broken link is found,
    the member with most broken links is dropped, the last by name of several. With neither rates nor broken
    links the order is that of names.
    """
    names = sorted(members)
    if not broken and not any((rates or {}).get(name) for name in names):
        return tuple(names), ()
    table = _table(names, rates or {}, broken)
    left = np.arange(len(names))
    dropped: list[str] = []
    while True:
        order = np.array(_remembered_order(len(left), table[np.ix_(left, left)].tobytes()))
        if len(left) < 2 or _speeds(table, left[order]).min() > _BROKEN:
            return tuple(names[place] for place in left[order]), tuple(dropped)
        links = Counter(peer for link in broken for peer in link if link <= {names[place] for place in left})
        worst = max(left, key=lambda place: (links[names[place]], names[place]))
        left = left[left != worst]
        dropped.append(names[worst])


def hops(order: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs (sender, receiver) of a ring."""
    return [(peer, order[(place + 1) % len(order)]) for place, peer in enumerate(order)] if order[1:] else []


def _table(
    names: Sequence[str], rates: Mapping[str, Mapping[str, float]], broken: Collection[Link]
) -> _Rates:
    """Return the rates [sender, receiver]; a broken link is slower than one that nobody measured."""
    place = {name: number for number, name in enumerate(names)}
    table = np.full((len(names), len(names)), _UNMEASURED, np.float32)
    for sender, row in rates.items():
        for receiver, rate in row.items():
            if sender in place and receiver in place:
                table[place[sender], place[receiver]] = rate
    for link in broken:
        if link <= place.keys() and len(link) == 2:
            first, second = (place[name] for name in link)
            table[first, second] = table[second, first] = _BROKEN
    return table


@functools.lru_cache(maxsize=8)
def _remembered_order(size: int, rates: bytes) -> tuple[int, ...]:
    """Return `_best_order`; the same order is asked for at every decision about the round under way."""
    return tuple(_best_order(np.frombuffer(rates, np.float32).reshape(size, size)).tolist())


def _best_order(table: _Rates) -> _Order:
    """Return the order whose sorted speeds are greatest, the slowest compared first."""
    size = len(table)
    if size <= _EXHAUSTIVE:
        orders: Iterable[_Order] = (np.array((0, *rest)) for rest in itertools.permutations(range(1, size)))
    else:
        orders = (_improved(table, start) for start in _starts(table))
    return max(orders, key=lambda order: sorted(_speeds(table, order).tolist()))


def _starts(table: _Rates) -> Iterable[_Order]:
    """Yield orders to improve: one made of the fastest links, and others where that costs little."""
    size = len(table)
    yield _greedy(table)
    if size <= _SMALL:
        yield np.arange(size)
        yield np.arange(size)[::-1]
    if size <= _TINY:
        chance = np.random.default_rng(size)  # every peer draws the same
        yield from (chance.permutation(size) for _ in range(_DRAWN))


def _speeds(table: _Rates, order: _Order) -> _Rates:
    speeds: _Rates = table[order, np.roll(order, -1)]
    return speeds


def _greedy(table: _Rates) -> _Order:
    """Join members to chains by the fastest links that are left, as Kruskal's algorithm does for trees."""
    size = len(table)
    following = [-1] * size
    has_previous = [False] * size
    first_of = list(range(size))  # of the chain that ends with this member
    last_of = list(range(size))  # of the chain that begins with this member
    joined = 0
    for link in np.argsort(-table, axis=None, kind="stable").tolist():
        sender, receiver = divmod(link, size)
        if following[sender] >= 0 or has_previous[receiver] or first_of[sender] == receiver:
            continue
        following[sender], has_previous[receiver] = receiver, True
        first, last = first_of[sender], last_of[receiver]
        first_of[last], last_of[first] = first, last
        joined += 1
        if joined == size - 1:
            break
    place = has_previous.index(False)
    order = [place]
    while following[place] >= 0:
        place = following[place]
        order.append(place)
    return np.array(order)


def _improved(table: _Rates, order: _Order) -> _Order:
    """Exchange or reverse pieces of a ring, at its slow hops first, until nothing helps."""
    size = len(order)
    left = _EXCHANGES // size**2
    in_vain = min(size, _IN_VAIN_IF_SMALL if size <= _SMALL else _IN_VAIN)
    tried = 0
    while tried < in_vain and left > 0:
        slow = int(np.argsort(_speeds(table, order), kind="stable")[tried])
        path = np.roll(order, -slow - 1)  # the slow hop leads from its end to its beginning
        better = _with_exchange(table, path)
        if better is None:
            better = _with_reversal(table, path)
        left -= 1
        if better is None:
            tried += 1
        else:
            order, tried = better, 0
    return order


def _with_exchange(table: _Rates, path: _Order) -> _Order | None:
    """Return the ring A C B for the path A B C, cut where its slowest new hop is fastest.

    None if that hop is no faster than the slowest of the three that it replaces.
    """
    between = table[np.ix_(path, path)]  # [sender, receiver], by places of the path
    hop = np.diagonal(between, 1)
    new = np.minimum(between[:-1, 1:], between[-1, 1:, None])  # [j, k]: A ends at place j, C begins at k + 1
    np.minimum(new, between[:-1, 0], out=new)
    old = np.minimum(np.minimum(hop[:, None], hop), between[-1, 0])
    gain = np.triu(new - old, 1)
    if gain.max() <= 0.0:
        return None
    end_of_a, end_of_b = divmod(int(np.where(gain > 0.0, new, -np.inf).argmax()), len(path) - 1)
    return np.concatenate((path[: end_of_a + 1], path[end_of_b + 1 :], path[end_of_a + 1 : end_of_b + 1]))


def _with_reversal(table: _Rates, path: _Order) -> _Order | None:
    """Return the path with its beginning reversed, where the slowest changed hop gets faster; else None."""
    ahead = np.minimum.accumulate(table[path[:-1], path[1:]])  # [j]: slowest hop up to place j + 1
    back = np.minimum.accumulate(np.concatenate(([np.inf], table[path[1:-1], path[:-2]])))
    new = np.minimum(np.minimum(table[path[-1], path[:-1]], table[path[0], path[1:]]), back)
    old = np.minimum(ahead, table[path[-1], path[0]])
    place = int(np.argmax(np.where(new > old, new, -np.inf)))
    if not new[place] > old[place]:
        return None
    return np.concatenate((path[: place + 1][::-1], path[place + 1 :]))


_WINDOW = 0.5
"""The share of the overlapped steps for which a quorum waits; the all_reduce has the other half."""


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """Whether the round waits for more offers.

    why: the reason for waiting, for logs; "": an attempt is proposed now.
    whom: the peers whose offers are waited for.
    until_s: by the local monotonic clock, seconds; None: until something changes.
    hurries: whether this peer is waited for, and must offer the steps that it has made.
    """

    why: str = ""
    whom: tuple[str, ...] = ()
    until_s: float | None = None
    hurries: bool = False


def gather_offers(
    snapshot: RunSnapshot,
    offers: Mapping[str, ListedOffer],
    *,
    me: str,
    settings: RoundSettings,
    now: float,
) -> Gathering:
    """Return whether this round waits for more than these offers. me: the name of this peer."""
    missing = tuple(sorted(snapshot.working - set(offers)))
    if not offers:
        return Gathering(why="nobody is ready", whom=missing)
    with_tokens_s = sorted(offer.seen_s for offer in offers.values() if offer.ready.tokens)
    if missing and not with_tokens_s:  # only joining peers without a share have offered: the others have time
        return Gathering(why="nobody who has a share is ready", whom=missing)
    first_s = min(with_tokens_s or (offer.seen_s for offer in offers.values()))
    patience_s, grace_s = settings.patience_s, settings.grace_s
    quorum = min(settings.quorum, len(with_tokens_s) + len(missing))
    if 0 < quorum <= len(with_tokens_s):
        first_s, patience_s, grace_s = with_tokens_s[quorum - 1], 0.0, quorum_window_s(offers, settings)
    elif quorum:
        return Gathering(why=f"{len(with_tokens_s)} of a quorum of {quorum} are ready", whom=missing)
    if missing or len(offers) < settings.minimum_peers:
        if me in missing and now >= first_s + patience_s:
            return Gathering(hurries=True, why="the others wait for this peer")
        if len(offers) < settings.minimum_peers:
            why = f"{len(offers)} of at least {settings.minimum_peers} peers are ready"
            return Gathering(why=why, whom=missing, until_s=_next(now, first_s + patience_s))
        if now < first_s + grace_s:
            marks = (first_s + patience_s, first_s + grace_s)
            why = "slow peers have not offered yet"
            return Gathering(why=why, whom=missing, until_s=_next(now, *marks))
    overtaken = tuple(name for name in overtaken_newcomers(snapshot) if name not in offers)
    if overtaken and not quorum and now < first_s + grace_s:
        why = "rounds were quicker than the fetching of their state"
        return Gathering(why=why, whom=overtaken, until_s=first_s + grace_s)
    return Gathering()


def quorum_window_s(offers: Mapping[str, ListedOffer], settings: RoundSettings) -> float:
    """Return the seconds that a quorum waits for the others: less than its fastest peer's overlap lasts."""
    steps_s = [offer.ready.step_s for offer in offers.values() if offer.ready.tokens]
    return min(settings.grace_s, _WINDOW * settings.overlap_steps * min(steps_s, default=0.0))


def carried_shares(
    snapshot: RunSnapshot, attempt: Attempt, holes: Ranges, settings: RoundSettings
) -> dict[str, Ranges]:
    """Return the shares that peers keep which were not in an asynchronous round and go on with their steps.

    These shares stay theirs, with the samples that they have used: they bring them in a later round. A peer
    that offered what cannot be averaged drops its steps, so its samples are shared out anew.

    holes: the samples that are given out, after the round.
    """
    if not settings.quorum or snapshot.shares is None:
        return {}
    names = snapshot.working - set(attempt.members) - set(attempt.left_out)
    return {name: within(merged(snapshot.shares.shares[name]), holes) for name in sorted(names)}


def _next(now: float, *moments: float) -> float | None:
    return min((moment for moment in moments if moment > now), default=None)
