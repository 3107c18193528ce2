"""Restores a run in a coordinator that lost its data, from what peers and their checkpoints know.

Peers that know of a later round or epoch than the coordinator wait, and write what they know as recovery
records. The operator decides to restore the run from these records (`bloomery coordinate --adopt`), because
only the operator can know that the old data will not come back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TypeVar

from bloomery.coordination.commits import EPOCHS_AT_MOST
from bloomery.coordination.etcd import Condition, Etcd, Put, TransactionResult, absent
from bloomery.coordination.etcd_watch import KeyValue
from bloomery.coordination.membership import Membership
from bloomery.errors import CoordinatorError
from bloomery.protocol.encoding import Message, ProtocolError, decode, decode_epoch, encode_text
from bloomery.protocol.keys import NUMBER_AT_MOST, RECOVERY, Keys
from bloomery.protocol.records import Commit, Member, RecoveryRecord, RoundShares

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Message)


@dataclass(frozen=True, kw_only=True)
class RestoredRun:
    """What `adopt` restored.

    epoch: the run's epoch now.
    round: the run's newest committed round now; -1 if no round was ever committed.
    peers_ahead: peers whose recovery records have the newest commit; none if the coordinator had it already.
    holders: peers that hold the state of the newest commit.
    """

    epoch: int
    round: int
    peers_ahead: tuple[str, ...]
    holders: tuple[str, ...]


def write_recovery_record(membership: Membership, keys: Keys, me: str, record: RecoveryRecord) -> None:
    """Write what this peer knows of a run to a coordinator that knows less. me: this peer's name."""
    membership.offer(keys.recovery_record(me), encode_text(record), round=max(record.round, 0))


def adopt(etcd: Etcd, keys: Keys) -> RestoredRun:
    """Let the run go on from the newest commit in the recovery records, above the highest epoch seen.

    Every commit in the records is restored, so that the run can go back if nobody holds the newest state.
    Raises CoordinatorError if no peer is listed, or if the run was changed meanwhile.
    """
    recovery_records = _records_of_peers(etcd, keys, RECOVERY, RecoveryRecord)
    members = _records_of_peers(etcd, keys, "member", Member)
    if not members and not recovery_records:
        raise CoordinatorError(
            f"no peer of the run {keys.run!r} is listed here, so no peer can report what it knows",
            remedy="Start the peers, or leave them running: they list themselves. Then try again.",
        )
    stored = etcd.get(keys.epoch)
    in_records = _commits_in(recovery_records)
    known = {*in_records, *(member.round for member in members.values())}
    in_etcd, unusable = _stored_commits(etcd, keys, known=known)
    newest = max((*in_etcd, *in_records), default=-1)
    _check_nobody_is_ahead(members, newest)
    claims = [("the coordinator", _stored_epoch(stored))]
    claims += [(name, member.epoch) for name, member in members.items()]
    claims += [(name, record.epoch) for name, record in recovery_records.items()]
    epoch = _epoch_above(claims, in_etcd or in_records)
    missing = {round: commit for round, commit in in_records.items() if round not in in_etcd}
    conditions = [
        Condition(key=keys.epoch, aspect="modified", wanted=stored.modified)
        if stored
        else absent(keys.epoch),
        *(_unchanged(keys.commit(round), unusable.get(round, 0)) for round in (newest + 1, *missing)),
    ]
    # Peers check a commit against what members wrote. They believe these without a check, because `adopted`
    # is written in the same transaction.
    operations = [Put(key=keys.adopted, value=str(epoch)), Put(key=keys.epoch, value=str(epoch))]
    operations += [
        Put(key=keys.commit(round), value=encode_text(commit)) for round, commit in missing.items()
    ]
    if newest in missing:
        shares = _shares(recovery_records, missing[newest])
        operations.append(Put(key=keys.shares(shares.round), value=encode_text(shares)))
    if etcd.transact(conditions, operations) is not TransactionResult.DONE:
        raise CoordinatorError(
            f"the run {keys.run!r} was changed by another process meanwhile",
            remedy="Look at it with --status, and run this command again.",
        )
    return RestoredRun(
        epoch=epoch,
        round=newest,
        peers_ahead=_peers_ahead(recovery_records, missing[newest]) if newest in missing else (),
        holders=_holders(members, in_records.get(newest) or in_etcd.get(newest)),
    )


def _epoch_above(claims: Iterable[tuple[str, int]], commits: Mapping[int, Commit]) -> int:
    """Return an epoch above all that were seen, by who says so.

    Claims to which no attempts can have led are left out: any peer may claim any number.
    """
    highest = 0
    for who, epoch in claims:
        if commits and epoch > commits[max(commits)].epoch + EPOCHS_AT_MOST // 2:
            log.warning("that %s names epoch %d is left out: no attempts can have led to it", who, epoch)
        else:
            highest = max(highest, epoch)
    if highest >= NUMBER_AT_MOST:
        raise CoordinatorError(
            f"there is no epoch above {highest}, which was claimed or written",
            remedy="Begin a new run, under another name, from an exported model.",
        )
    return highest + 1


def _stored_epoch(stored: KeyValue | None) -> int:
    """Return the epoch that the coordinator has; 0 for what is none, as any peer may have written it."""
    try:
        return 0 if stored is None else decode_epoch(stored.value)
    except ProtocolError as error:
        log.warning("the epoch in the coordinator is replaced: %s", error.message)
        return 0


def _stored_commits(etcd: Etcd, keys: Keys, *, known: Set[int]) -> tuple[dict[int, Commit], dict[int, int]]:
    """Return the commits that the coordinator has, by round, and the revisions of those that are none.

    Any peer may write such keys. A commit takes the place of one that is none. One of a round far beyond the
    others, of which no peer knows, is left out, as peers do.

    known: the rounds that peers report.
    """
    commits, unusable = dict[int, Commit](), dict[int, int]()
    for item in etcd.list(keys.commits).items:
        try:
            round = keys.number("/".join(keys.parts(item.key)[1:]))
            unusable[round] = item.modified
            commit = decode(item.value, Commit)
        except (ProtocolError, ValueError) as error:
            log.warning("the key %s is left out: %s", item.key[:200], error)
            continue
        if commit.round == round:
            commits[round] = commit
            del unusable[round]
    newest = max(commits, default=0)
    while len(commits) > 1 and newest not in known and newest - 1 not in {*commits, *known}:
        log.warning("the commit of round %d is left out: no peer knows of it", newest)
        del commits[newest]
        newest = max(commits)
    return commits, unusable


def _unchanged(key: str, revision: int) -> Condition:
    return Condition(key=key, aspect="modified", wanted=revision) if revision else absent(key)


def _records_of_peers(etcd: Etcd, keys: Keys, kind: str, record: type[R]) -> dict[str, R]:
    """Return the records of one kind, by peer; one that cannot be decoded is logged and left out."""
    records = {}
    for item in etcd.list(keys.peers).items:
        item_kind, *names = keys.parts(item.key)
        if item_kind == kind:
            try:
                records[names[-1]] = decode(item.value, record)
            except ProtocolError as error:
                log.warning("the record '%s' of '%s' is left out: %s", kind, names[-1], error.message)
    return records


def _commits_in(recovery_records: Mapping[str, RecoveryRecord]) -> dict[int, Commit]:
    """Return every commit in the records, by round.

    A commit that a peer read from the coordinator takes precedence over one that a peer holds the state of.
    """
    ordered = sorted(recovery_records.values(), key=_age, reverse=True)
    commits: dict[int, Commit] = {}
    for commit in [record.commit for record in ordered] + [record.held for record in ordered]:
        if commit is not None:
            commits.setdefault(commit.round, commit)
    return commits


def _check_nobody_is_ahead(members: Mapping[str, Member], newest: int) -> None:
    """Raise CoordinatorError if a member holds a later round than can be restored."""
    ahead = {name: member.round for name, member in sorted(members.items()) if member.round > max(newest, 0)}
    if ahead:
        name = max(ahead, key=lambda peer: ahead[peer])
        raise CoordinatorError(
            f"'{name}' holds round {ahead[name]}, and no peer has reported which samples were used by then",
            remedy="Ask again in some seconds. If that does not help, start a peer whose run directory has "
            "known.json: checkpoints that an earlier version made within a round do not have the samples.",
        )


def _shares(recovery_records: Mapping[str, RecoveryRecord], commit: Commit) -> RoundShares:
    """Return the shares that were leased after a commit, or empty ones if no record has them.

    Where they are empty, each peer takes a share anew.
    """
    reported = [
        record.shares
        for record in recovery_records.values()
        if record.shares is not None and record.commit is not None and _is_same(record.commit, commit)
    ]
    empty = RoundShares(round=commit.round + 1, position=commit.position, shares={}, live=0)
    return max(reported, key=lambda shares: len(shares.shares), default=empty)


def _peers_ahead(recovery_records: Mapping[str, RecoveryRecord], commit: Commit) -> tuple[str, ...]:
    """Return the peers whose records have this commit, sorted by name."""
    return tuple(
        name
        for name, record in sorted(recovery_records.items())
        if any(_is_same(reported, commit) for reported in record.commits)
    )


def _holders(members: Mapping[str, Member], commit: Commit | None) -> tuple[str, ...]:
    digest = commit.digest if commit else ""
    return tuple(name for name, member in sorted(members.items()) if member.digest == digest != "")


def _is_same(commit: Commit, other: Commit) -> bool:
    """Whether both are of one round and state. A commit made from a checkpoint lacks the other fields."""
    return (commit.round, commit.digest) == (other.round, other.digest)


def _age(record: RecoveryRecord) -> tuple[int, int]:
    return (record.round, record.epoch)
