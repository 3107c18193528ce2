"""Who may take part in an attempt, and which links its ring must avoid."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median

from bloomery.data.ranges import merged, total, without
from bloomery.elastic.control.ringorder import Link
from bloomery.elastic.control.settings import RoundSettings
from bloomery.elastic.control.snapshot import Snapshot
from bloomery.elastic.records import Ready

LINK_FAILURES = 2
"""Attempts of a round that must fail between two members before their link counts as broken."""
_MEDIAN_OF = 3
_AT_ONCE, _REST_S, _REST_S_AT_MOST = 3, 0.1, 10.0


def unfit(snapshot: Snapshot, readies: Mapping[str, Ready], settings: RoundSettings) -> dict[str, str]:
    """Who may not be averaged, and why."""
    unfit = {name: "its part is not finite" for name, one in readies.items() if not one.finite}
    given = snapshot.shares.shares if snapshot.shares else {}
    for name, one in readies.items():
        taken = (*one.spent, *one.kept)
        if total(taken) != total(merged(taken)) or without(merged(taken), merged(given.get(name, ()))):
            unfit[name] = "it spent samples that it was not given"
    norms = [one.norm for name, one in readies.items() if name not in unfit and one.tokens]
    if len(norms) >= _MEDIAN_OF:
        limit = settings.outlier_factor * median(norms)
        for name, one in readies.items():
            if name not in unfit and one.norm > limit:
                unfit[name] = f"its part's norm is {one.norm:.3g}, the median {median(norms):.3g}"
    return unfit


def left_out_before(snapshot: Snapshot, offers: Collection[str]) -> dict[str, str]:
    """Whose result differed, or who was silent, in an attempt of this round and this life: it stays out."""
    if snapshot.tried is None:
        return {}
    return {name: why for name, why in snapshot.tried.attempt.left_out.items() if name in offers}


def broken_links(snapshot: Snapshot) -> set[Link]:
    """Pairs of members between which several attempts of this round failed. Once may be a lost connection."""
    epochs: dict[Link, set[int]] = {}
    for one in snapshot.failures:
        if one.culprit is not None and one.culprit != one.peer:
            epochs.setdefault(frozenset((one.peer, one.culprit)), set()).add(one.epoch)
    return {link for link, when in epochs.items() if len(when) >= LINK_FAILURES}


def rest_s(snapshot: Snapshot) -> float:
    """Seconds between attempts of a round, of which many failed: the first are made again at once."""
    failed = len({one.epoch for one in snapshot.failures})
    return min(_REST_S_AT_MOST, _REST_S * 2.0 ** (failed - _AT_ONCE)) if failed > _AT_ONCE else 0.0
