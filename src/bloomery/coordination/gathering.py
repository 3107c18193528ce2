"""Decides how long a round waits for parts before an attempt is proposed.

In synchronous rounds all who have a share are waited for, up to grace_s after the first offer. Asynchronous
rounds (Decoupled DiLoCo, arXiv 2604.21428) begin once a quorum has offered, and wait for the others only
while that costs the quorum nothing: those who have offered go on with overlapped steps, so the window is a
part of the time that these steps take. Whoever is late goes on, and offers its steps in a later round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bloomery.coordination.eligibility import RoundSettings, overtaken_newcomers
from bloomery.coordination.snapshot import ListedOffer, RunSnapshot
from bloomery.data.position import Ranges, merged, within
from bloomery.protocol.records import Attempt

_WINDOW = 0.5
"""The share of the overlapped steps for which a quorum waits; the exchange has the other half."""


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """Whether parts are waited for.

    why: the reason for waiting, for logs; "": an attempt is proposed now.
    whom: the peers that are waited for.
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
    if missing and not with_tokens_s:  # only newcomers without a share have offered: the others have time
        return Gathering(why="nobody who has a share is ready", whom=missing)
    first_s = min(with_tokens_s or (offer.seen_s for offer in offers.values()))
    patience_s, grace_s = settings.patience_s, settings.grace_s
    quorum = min(settings.quorum, len(with_tokens_s) + len(missing))
    if 0 < quorum <= len(with_tokens_s):
        first_s, patience_s, grace_s = with_tokens_s[quorum - 1], 0.0, window_s(offers, settings)
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


def window_s(offers: Mapping[str, ListedOffer], settings: RoundSettings) -> float:
    """Return how long a quorum waits for the others, seconds: less than its fastest peer's overlap lasts."""
    steps_s = [offer.ready.step_s for offer in offers.values() if offer.ready.tokens]
    return min(settings.grace_s, _WINDOW * settings.overlap_steps * min(steps_s, default=0.0))


def unfinished(
    snapshot: RunSnapshot, attempt: Attempt, holes: Ranges, settings: RoundSettings
) -> dict[str, Ranges]:
    """Return the shares of the peers that go on with their steps after an asynchronous round without them.

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
