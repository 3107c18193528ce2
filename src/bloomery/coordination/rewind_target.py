"""Chooses the earlier state to which a run goes back: pure functions of a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from bloomery.coordination.snapshot import Offered, RunSnapshot
from bloomery.data.position import Ranges
from bloomery.protocol.records import Commit, Ready


def newest_held(snapshot: RunSnapshot) -> Commit | None:
    """The newest commit whose state somebody who is listed holds; None where there is none.

    Of a state whose commit the coordinator does not know any more, its holder's testimony tells the position.
    """
    held = {one.member.digest for one in snapshot.members.values()}
    known = known_commits(snapshot).values()
    return max((one for one in known if one.digest in held), key=lambda one: one.round, default=None)


def known_commits(snapshot: RunSnapshot) -> dict[int, Commit]:
    """By round: those that the coordinator has and, where it has none, those that members hold."""
    known = dict(snapshot.commits)
    for name, testimony in sorted(snapshot.testimonies.items()):
        if testimony.held is not None and name in snapshot.members:
            known.setdefault(testimony.held.round, testimony.held)
    return known


def asked_back(snapshot: RunSnapshot, asked: Iterable[Ready]) -> tuple[Commit, str]:
    """The commit to which guards want the run to go back, and why."""
    asking = [one for one in asked if one.rewind_to is not None]
    wanted = min(one.rewind_to for one in asking if one.rewind_to is not None)
    target = max((number for number in snapshot.commits if number <= wanted), default=min(snapshot.commits))
    reason = "; ".join(sorted({f"{one.peer}: {one.why}" for one in asking}))
    return snapshot.commits[target], reason


def going_back(snapshot: RunSnapshot, target: Commit, *, skips: Ranges, why: str, rung: int = 0) -> Commit:
    """The commit of the round under way that makes an earlier one's state the run's again.

    rung: the highest that guards asked for; 0 where none did.
    """
    position = target.position
    for piece in skips:
        position = position.skipping(piece)
    origin = target
    while origin.rewind_to is not None and origin.rewind_to in snapshot.commits:
        origin = snapshot.commits[origin.rewind_to]
    return Commit(
        round=snapshot.round,
        epoch=snapshot.epoch,
        members=(),
        digest=target.digest,
        position=position,
        sources=tuple(snapshot.holders(target.digest)),
        left_out={},
        rewind_to=origin.round,
        save=False,
        why=why,
        rung=rung,
    )


def asking_to_go_back(
    snapshot: RunSnapshot, offers: Mapping[str, Offered], fit: Mapping[str, Ready], bad: Mapping[str, str]
) -> list[Ready]:
    """Those whose guards want the run to go back, of the fit; of all where nobody is.

    Where nobody is fit and nobody asks, the round is begun anew without the samples that spoilt it.
    """
    asked = [one for one in fit.values() if one.rewind_to is not None]
    if fit or len(bad) < len(offers):
        return asked
    readies = [one.ready for one in offers.values()]
    return [one for one in readies if one.rewind_to is not None] or [
        msgspec.structs.replace(one, rewind_to=snapshot.round - 1, skip=one.spent, why=bad[one.peer])
        for one in readies
    ]


def is_lost(snapshot: RunSnapshot, newest: Commit) -> bool:
    """Whether no member holds the state of the newest commit, and nobody has offered a part of the round."""
    return not snapshot.readies and not snapshot.holders(newest.digest) and bool(snapshot.members)
