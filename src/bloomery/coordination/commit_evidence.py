"""Checks that a commit follows from what the members of the run wrote themselves.

Whichever peer is first concludes a round, so every member may write the key of a commit. No peer trusts a
commit for its own sake: each compares it with the attempt, with the members' offers, and with the state
digests that the members announced. All peers read these keys in the same order, so all refuse the same
commits, and then write another commit over a refused one.
"""

from __future__ import annotations

from collections.abc import Iterable

from bloomery.coordination.eligibility import changed_offers, spoilt
from bloomery.coordination.rewind_target import known_commits
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import Position
from bloomery.protocol.records import Commit, Ready


def objection(commit: Commit, before: RunSnapshot) -> str:
    """Return why a commit does not follow from the run as it was just before, or "" if it does follow."""
    if commit.round != before.round:
        return f"it is of round {commit.round}, and round {before.round} is under way"
    if commit.members:
        return _objection_to_average(commit, before)
    if commit.rewind_to is not None:
        return _objection_to_rewind(commit, before)
    if before.commits:
        return "it averages nothing and goes back nowhere"
    return "" if before.holders(commit.digest) else "nobody holds the state that it begins with"


def objection_of_listing(commit: Commit, listed: RunSnapshot) -> str:
    """Return what speaks against the newest commit of a listing, or "".

    A listing does not have all the keys that were there before the commit: the announcements of members that
    left went with their leases. So only the members that are still listed are checked.
    """
    tried = listed.tried
    if tried is None or tried.attempt.epoch != commit.epoch:
        return ""
    listed_members = [
        name
        for name, life in zip(tried.attempt.members, tried.lives, strict=True)
        if name in listed.members and listed.members[name].life == life
    ]
    return _not_announced(commit, listed, listed_members)


def position_after(before: Position, readies: Iterable[Ready]) -> Position:
    """Return the run's position once these offers are averaged.

    before: the position of the round under way, in which the samples that were leased out are holes.
    """
    offers = list(readies)
    position = before.after(piece for ready in offers for piece in ready.spent)
    for ready in offers:
        for piece in ready.skip:
            position = position.skipping(piece)
    return position


def is_minority(members: Iterable[str], snapshot: RunSnapshot, *, before: int | None = None) -> bool:
    """Whether these members are fewer than half of the peers that have a share and a usable offer.

    before: revision of an attempt, whose members cannot include later offers; None: count all offers.
    """
    shares = snapshot.shares.shares if snapshot.shares else {}
    readies = {
        name: offer.ready
        for name, offer in snapshot.readies.items()
        if name in shares and (before is None or offer.modified < before)
    }
    usable = set(readies) - set(spoilt(snapshot, readies))
    return 2 * len(usable & set(members)) < len(usable)


def _objection_to_average(commit: Commit, before: RunSnapshot) -> str:
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


def _objection_to_rewind(commit: Commit, before: RunSnapshot) -> str:
    commits = known_commits(before)
    origin = commits.get(commit.rewind_to) if commit.rewind_to is not None else None
    if origin is not None and origin.digest != commit.digest:
        return f"the state of round {commit.rewind_to} is another"
    if commit.digest not in {earlier.digest for earlier in commits.values()}:
        return "it goes back to a state that the run never committed"
    if commit.position.consumed > max(earlier.position.consumed for earlier in commits.values()):
        return "it goes back, and counts more samples than before"
    if commit.rung > max((offer.ready.rung for offer in before.readies.values()), default=0):
        return f"nobody asked for its rung {commit.rung}"
    return ""


def _not_announced(commit: Commit, before: RunSnapshot, members: Iterable[str]) -> str:
    for name in members:
        done = before.dones.get(name)
        if done is None or done.digest != commit.digest:
            return f"'{name}' has not announced the state {commit.digest[:12]!r}"
    return ""
