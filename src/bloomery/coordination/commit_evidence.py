"""Checks that a commit follows from what the members of the run wrote themselves.

Whoever is first concludes a round, so every member may write the key of a commit. Nobody goes on from one on
its word alone: the attempt, what its members brought, and the state that each announced are there to compare.
Everybody reads these in the same order, so all refuse the same commits, and conclude the round over them.
"""

from __future__ import annotations

from collections.abc import Iterable

from bloomery.coordination.eligibility import changed_offers, spoilt
from bloomery.coordination.rewind_target import known_commits
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import Position
from bloomery.protocol.records import Commit, Ready


def objection(commit: Commit, before: RunSnapshot) -> str:
    """Say why a commit does not follow from the run as it was just before; "" where it does."""
    if commit.round != before.round:
        return f"it is of round {commit.round}, and round {before.round} is under way"
    if commit.members:
        return _of_average(commit, before)
    if commit.rewind_to is not None:
        return _of_going_back(commit, before)
    if before.commits:
        return "it averages nothing and goes back nowhere"
    return "" if before.holders(commit.digest) else "nobody holds the state that it begins with"


def objection_of_listing(commit: Commit, listed: RunSnapshot) -> str:
    """Say what speaks against the newest commit of a listing, which has not all that was there before it.

    Members that are gone have taken with them what they announced. Those that are there have not.
    """
    tried = listed.tried
    if tried is None or tried.attempt.epoch != commit.epoch:
        return ""
    there = [
        name
        for name, life in zip(tried.attempt.members, tried.lives, strict=True)
        if name in listed.members and listed.members[name].life == life
    ]
    return _not_announced(commit, listed, there)


def position_after(before: Position, readies: Iterable[Ready]) -> Position:
    """Where the run stands once these parts are averaged. before: with what was given out as holes."""
    brought = list(readies)
    position = before.after(piece for one in brought for piece in one.spent)
    for one in brought:
        for piece in one.skip:
            position = position.skipping(piece)
    return position


def is_minority(members: Iterable[str], snapshot: RunSnapshot, *, before: int | None = None) -> bool:
    """Whether these are fewer than half of those that have a share, and brought what can be averaged.

    before: revision of an attempt; what was brought later could not be in it.
    """
    given = snapshot.shares.shares if snapshot.shares else {}
    brought = {
        name: one.ready
        for name, one in snapshot.readies.items()
        if name in given and (before is None or one.modified < before)
    }
    could = set(brought) - set(spoilt(snapshot, brought))
    return 2 * len(could & set(members)) < len(could)


def _of_average(commit: Commit, before: RunSnapshot) -> str:
    tried, standing = before.tried, before.standing
    if tried is None or tried.attempt.epoch != commit.epoch:
        return f"no attempt of epoch {commit.epoch} is under way"
    members = tried.attempt.members
    if set(commit.members) != set(members):
        return "its members are not those of the attempt"
    missing = _not_announced(commit, before, members)
    if missing:
        return missing
    if standing is None or any(name not in before.readies for name in members):
        return "it names members that brought nothing"
    readies = {name: before.readies[name].ready for name in members}
    for name, why in {**changed_offers(before, tried), **spoilt(before, readies)}.items():
        return f"'{name}': {why}"
    if is_minority(members, before, before=before.tried_revision):
        return "its members are fewer than half of those that could take part"
    if commit.position != position_after(standing.shares.position, readies.values()):
        return "its position does not follow from what its members spent"
    return ""


def _of_going_back(commit: Commit, before: RunSnapshot) -> str:
    known = known_commits(before)
    origin = known.get(commit.rewind_to) if commit.rewind_to is not None else None
    if origin is not None and origin.digest != commit.digest:
        return f"the state of round {commit.rewind_to} is another"
    if commit.digest not in {one.digest for one in known.values()}:
        return "it goes back to a state that the run never committed"
    if commit.position.consumed > max(one.position.consumed for one in known.values()):
        return "it goes back, and counts more samples than before"
    if commit.rung > max((one.ready.rung for one in before.readies.values()), default=0):
        return f"nobody asked for its rung {commit.rung}"
    return ""


def _not_announced(commit: Commit, before: RunSnapshot, members: Iterable[str]) -> str:
    for name in members:
        done = before.dones.get(name)
        if done is None or done.digest != commit.digest:
            return f"'{name}' has not announced the state {commit.digest[:12]!r}"
    return ""
