"""Restores a run in a coordinator that lost its data, from what peers and their checkpoints know.

Peers that know of a later round or epoch than the coordinator wait, and write down what they know. Whoever
runs the coordinator decides that this is to be believed: nobody else can know that the old data will not come
back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from bloomery.coordination.etcd import Condition, Etcd, Item, Put, TransactionResult, absent
from bloomery.coordination.membership import Membership
from bloomery.errors import CoordinatorError
from bloomery.protocol.encoding import Message, ProtocolError, decode, decode_epoch, encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Commit, Member, RecoveryRecord, RoundShares

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Message)


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """What was restored. round: the run's newest now; -1 where none was ever committed.

    witnesses: peers that told of it; none where the coordinator knew it. holders: peers that hold its state.
    """

    epoch: int
    round: int
    witnesses: tuple[str, ...]
    holders: tuple[str, ...]


def write_recovery_record(membership: Membership, keys: Keys, me: str, testimony: RecoveryRecord) -> None:
    """Write down what this peer knows of a run of which the coordinator knows less."""
    membership.offer(keys.testimony(me), encode_text(testimony), round=max(testimony.round, 0))


def adopt(etcd: Etcd, keys: Keys) -> Adopted:
    """Let the run go on from the newest that peers tell of, above the highest epoch that any has seen.

    Every commit that they tell of is restored, so that the run can go back where nobody holds the newest
    state. Raises CoordinatorError where no peer is listed, or another has changed something meanwhile.
    """
    testimonies = _said_by_peers(etcd, keys, "testimony", RecoveryRecord)
    members = _said_by_peers(etcd, keys, "member", Member)
    epochs = [one.epoch for one in members.values()] + [one.epoch for one in testimonies.values()]
    if not epochs:
        raise CoordinatorError(
            f"no peer of the run {keys.run!r} is listed here, so nobody remembers anything",
            remedy="Leave the peers running, or start them; they list themselves. Then ask again.",
        )
    found = etcd.get(keys.epoch)
    known = {keys.number(keys.parts(item.key)[1]): item for item in etcd.list(keys.commits).items}
    told = _told(testimonies)
    newest = max((*known, *told), default=-1)
    _check_told(members, newest)
    epoch = max(0 if found is None else decode_epoch(found.value), *epochs) + 1
    missing = {round: commit for round, commit in told.items() if round not in known}
    conditions = [
        Condition(key=keys.epoch, aspect="modified", wanted=found.modified) if found else absent(keys.epoch),
        absent(keys.commit(newest + 1)),
        *(absent(keys.commit(round)) for round in missing),
    ]
    # Peers check a commit against what members wrote, but for what `adopted` is written together with.
    operations = [Put(key=keys.adopted, value=str(epoch)), Put(key=keys.epoch, value=str(epoch))]
    operations += [Put(key=keys.commit(round), value=encode_text(one)) for round, one in missing.items()]
    if newest in missing:
        shares = _shares(testimonies, missing[newest])
        operations.append(Put(key=keys.shares(shares.round), value=encode_text(shares)))
    if etcd.transact(conditions, operations) is not TransactionResult.DONE:
        raise CoordinatorError(
            f"the run {keys.run!r} has changed meanwhile", remedy="Look at it with --status, and ask again."
        )
    return Adopted(
        epoch=epoch,
        round=newest,
        witnesses=_who_told(testimonies, missing[newest]) if newest in missing else (),
        holders=_holders(members, told.get(newest) or _commit(known.get(newest))),
    )


def _said_by_peers(etcd: Etcd, keys: Keys, kind: str, record: type[R]) -> dict[str, R]:
    """Records of a kind, by peer. One that makes no sense is passed over: the others are restored from."""
    said = {}
    for item in etcd.list(keys.peers).items:
        what, *rest = keys.parts(item.key)
        if what == kind:
            try:
                said[rest[-1]] = decode(item.value, record)
            except ProtocolError as error:
                log.warning("what '%s' says is passed over: %s", rest[-1], error.message)
    return said


def _told(testimonies: Mapping[str, RecoveryRecord]) -> dict[int, Commit]:
    """Every commit that somebody tells of, by round: what was read of the coordinator before what is held."""
    ordered = sorted(testimonies.values(), key=_age, reverse=True)
    told: dict[int, Commit] = {}
    for commit in [one.commit for one in ordered] + [one.held for one in ordered]:
        if commit is not None:
            told.setdefault(commit.round, commit)
    return told


def _check_told(members: Mapping[str, Member], newest: int) -> None:
    """Raise CoordinatorError where somebody holds a later round than can be restored."""
    ahead = {name: one.round for name, one in sorted(members.items()) if one.round > max(newest, 0)}
    if ahead:
        name, round = max(ahead.items(), key=lambda one: one[1])
        raise CoordinatorError(
            f"'{name}' holds round {round}, and nobody has told how far the data was used by then",
            remedy="Ask again in some seconds. If that does not help, start a peer whose run directory has "
            "known.json: checkpoints that an earlier version made within a round do not tell it.",
        )


def _shares(testimonies: Mapping[str, RecoveryRecord], commit: Commit) -> RoundShares:
    """What was given out after a commit, as somebody knows it; else nothing was: each peer takes a share."""
    found = [
        one.shares
        for one in testimonies.values()
        if one.shares is not None and one.commit is not None and _is_of(one.commit, commit)
    ]
    nothing = RoundShares(round=commit.round + 1, position=commit.position, shares={}, live=0)
    return max(found, key=lambda one: len(one.shares), default=nothing)


def _who_told(testimonies: Mapping[str, RecoveryRecord], commit: Commit) -> tuple[str, ...]:
    told = {name for name, one in testimonies.items() if any(_is_of(known, commit) for known in one.commits)}
    return tuple(sorted(told))


def _holders(members: Mapping[str, Member], commit: Commit | None) -> tuple[str, ...]:
    digest = commit.digest if commit else ""
    return tuple(name for name, one in sorted(members.items()) if one.digest == digest != "")


def _commit(item: Item | None) -> Commit | None:
    return None if item is None else decode(item.value, Commit)


def _is_of(one: Commit, other: Commit) -> bool:
    """Whether both are of one round and state: what is told of a checkpoint has not all of the record."""
    return (one.round, one.digest) == (other.round, other.digest)


def _age(testimony: RecoveryRecord) -> tuple[int, int]:
    return (testimony.round, testimony.epoch)
