"""The etcd transactions of a round: propose an attempt, conclude it, share samples, commit.

`Outcome.REFUSED` is no error: somebody was quicker, or somebody left; the snapshot will say which.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from bloomery.coordination.decide import Conclude, Propose
from bloomery.coordination.eligibility import RoundSettings
from bloomery.coordination.etcd import Condition, Delete, Etcd, Put, TransactionResult, absent
from bloomery.coordination.leases import with_newcomer
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import Ranges
from bloomery.errors import CoordinatorError
from bloomery.protocol.encoding import decode, encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Commit, RoundShares

COMMITS_KEPT = 1_000
"""The newest commits; older ones are kept where a save rests on them."""
SAVED_COMMITS_KEPT = 1_000
COMMITS_AT_MOST = COMMITS_KEPT + SAVED_COMMITS_KEPT + 1
_PRUNED_AT_ONCE = 16
"""Commits that one transaction removes: usually one is due."""
_TRIES = 100


def propose(etcd: Etcd, keys: Keys, snapshot: RunSnapshot, proposal: Propose) -> TransactionResult:
    """Begin an attempt: the epoch grows by one, if nobody has begun another, committed, come or gone."""
    attempt = proposal.tried.attempt
    return etcd.transact(
        [
            _epoch_is(keys, snapshot.epoch),
            _not_committed(keys, snapshot),
            *_offers_are(keys, attempt.round, proposal.offers),
            *(absent(keys.ready(attempt.round, peer)) for peer in proposal.unseen),
        ],
        [
            Put(key=keys.epoch, value=str(attempt.epoch)),
            Put(key=keys.attempt(attempt.round, attempt.epoch), value=encode_text(proposal.tried)),
        ],
    )


def conclude(etcd: Etcd, keys: Keys, snapshot: RunSnapshot, decided: Conclude) -> TransactionResult:
    """Commit a round and give out the next, for everybody at once; what only the round before needed goes.

    After Outcome.UNKNOWN `committed` says whether it is there.
    """
    commit = decided.commit
    standing = snapshot.standing
    conditions = [
        _epoch_is(keys, snapshot.epoch),
        _not_committed(keys, snapshot),
        *(
            Condition(key=keys.member(peer), aspect="created", wanted=life)
            for peer, life in decided.lives.items()
        ),
        *_offers_are(keys, commit.round, decided.offers),
    ]
    if commit.round > 0:
        modified = standing.modified if standing else 0
        conditions.append(Condition(key=keys.shares(commit.round), aspect="modified", wanted=modified))
    operations: list[Put | Delete] = [
        Put(key=keys.commit(commit.round), value=encode_text(commit)),
        Put(key=keys.shares(commit.round + 1), value=encode_text(decided.shares)),
    ]
    if commit.round > 0:
        earlier = commit.round - 1
        operations.append(Delete(key=keys.attempts(earlier), prefix=True))
        operations.append(Delete(key=keys.shares(earlier)))
    operations += [Delete(key=keys.commit(old)) for old in outdated(snapshot, commit.round)]
    return etcd.transact(conditions, operations)


def outdated(snapshot: RunSnapshot, round: int) -> list[int]:
    """Rounds whose commits go when `round` is committed: old ones to which no member could go back.

    What a save rests on is kept however many rounds ago it was, for the newest state that anybody has on disk
    may be that old. The last of the old commits that asked for a save is kept too: it may not be told of yet.
    """
    old = sorted(number for number in snapshot.commits if number <= round - COMMITS_KEPT)
    saved = {save for one in snapshot.members.values() for save in one.member.saves}
    saved |= set([number for number in old if snapshot.commits[number].save][-1:])
    kept = set([number for number in old if number in saved][-SAVED_COMMITS_KEPT:])
    return [number for number in old if number not in kept][:_PRUNED_AT_ONCE]


def committed(etcd: Etcd, keys: Keys, round: int) -> Commit | None:
    """Read a round's commit: None as long as there is none."""
    found = etcd.get(keys.commit(round))
    return None if found is None else decode(found.value, Commit)


def join_shares(
    etcd: Etcd, keys: Keys, *, round: int, peer: str, life: int, samples: int, settings: RoundSettings
) -> Ranges | None:
    """Take a share of a round under way: the share; None where the round is decided or the peer not listed.

    life: create_revision of the peer's key. Others may be doing the same: it is tried until it is in or out.
    """
    for _ in range(_TRIES):
        found = etcd.get(keys.shares(round))
        if found is None:
            return None
        shares = decode(found.value, RoundShares)
        if peer in shares.shares:
            return shares.shares[peer]
        more = with_newcomer(shares, peer, samples=samples, settings=settings)
        outcome = etcd.transact(
            [
                Condition(key=keys.shares(round), aspect="modified", wanted=found.modified),
                absent(keys.commit(round)),
                Condition(key=keys.member(peer), aspect="created", wanted=life),
            ],
            [Put(key=keys.shares(round), value=encode_text(more))],
        )
        if outcome is TransactionResult.DONE:
            return more.shares[peer]
        if outcome is TransactionResult.REFUSED and _is_over(etcd, keys, round, peer, life):
            return None
    raise CoordinatorError(f"no share of round {round} could be taken: others are always quicker")


def run_token(etcd: Etcd, keys: Keys) -> str:
    """Return the secret of a run without certificates: who comes first makes it.

    It keeps peers of different runs apart; it is no secret from whoever can reach the coordinator.
    """
    for _ in range(_TRIES):
        found = etcd.get(keys.token)
        if found is not None:
            return found.value
        etcd.transact([absent(keys.token)], [Put(key=keys.token, value=secrets.token_hex(32))])
    raise CoordinatorError("the run's token could not be made")


def restore_token(etcd: Etcd, keys: Keys, token: str) -> bool:
    """Bring the token of a run back to a coordinator that has lost it. False: somebody has made another."""
    etcd.transact([absent(keys.token)], [Put(key=keys.token, value=token)])
    found = etcd.get(keys.token)
    return found is not None and found.value == token


def _epoch_is(keys: Keys, epoch: int) -> Condition:
    return Condition(key=keys.epoch, aspect="value", wanted=str(epoch)) if epoch else absent(keys.epoch)


def _not_committed(keys: Keys, snapshot: RunSnapshot) -> Condition:
    """The round under way has no commit, or still the one that is refused."""
    return Condition(key=keys.commit(snapshot.round), aspect="modified", wanted=snapshot.refused)


def _offers_are(keys: Keys, round: int, offers: Mapping[str, int]) -> list[Condition]:
    """What is averaged is unchanged, and who brings it is still there: it lies on the peer's lease."""
    return [
        Condition(key=keys.ready(round, peer), aspect="modified", wanted=modified)
        for peer, modified in offers.items()
    ]


def _is_over(etcd: Etcd, keys: Keys, round: int, peer: str, life: int) -> bool:
    present = etcd.get(keys.member(peer))
    return etcd.get(keys.commit(round)) is not None or present is None or present.created != life
