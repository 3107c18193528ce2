"""The transactions of a round. Each succeeds for one proposer, and only while what it was decided on is so.

`Outcome.REFUSED` is no error: somebody was quicker, or somebody left; the snapshot will say which.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from bloomery.data.ranges import Ranges
from bloomery.elastic.control.allotment import with_newcomer
from bloomery.elastic.control.codec import COMMIT, SHARES, TRIED
from bloomery.elastic.control.decision import Conclude, Propose
from bloomery.elastic.control.etcd import Condition, Delete, Etcd, Outcome, Put, absent
from bloomery.elastic.control.keys import Keys
from bloomery.elastic.control.settings import RoundSettings
from bloomery.elastic.control.snapshot import Snapshot
from bloomery.elastic.records import Commit
from bloomery.errors import CoordinatorError

COMMITS_KEPT = 1_000
_TRIES = 100


def propose(etcd: Etcd, keys: Keys, snapshot: Snapshot, proposal: Propose) -> Outcome:
    """Begin an attempt: the epoch grows by one, if nobody has begun another, committed, come or gone."""
    attempt = proposal.tried.attempt
    return etcd.transact(
        [
            _epoch_is(keys, snapshot.epoch),
            absent(keys.commit(attempt.round)),
            *_offers_are(keys, attempt.round, proposal.offers),
        ],
        [
            Put(key=keys.epoch, value=str(attempt.epoch)),
            Put(key=keys.attempt(attempt.round, attempt.epoch), value=TRIED.text(proposal.tried)),
        ],
    )


def conclude(etcd: Etcd, keys: Keys, snapshot: Snapshot, decided: Conclude) -> Outcome:
    """Commit a round and give out the next, for everybody at once; what only the round before needed goes.

    After Outcome.UNKNOWN `committed` says whether it is there.
    """
    commit = decided.commit
    standing = snapshot.standing
    conditions = [
        _epoch_is(keys, snapshot.epoch),
        absent(keys.commit(commit.round)),
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
        Put(key=keys.commit(commit.round), value=COMMIT.text(commit)),
        Put(key=keys.shares(commit.round + 1), value=SHARES.text(decided.shares)),
    ]
    if commit.round > 0:
        earlier = commit.round - 1
        operations += [Delete(key=prefix, prefix=True) for prefix in keys.of_round(earlier)]
        operations.append(Delete(key=keys.shares(earlier)))
    if commit.round >= COMMITS_KEPT:
        operations.append(Delete(key=keys.commit(commit.round - COMMITS_KEPT)))
    return etcd.transact(conditions, operations)


def committed(etcd: Etcd, keys: Keys, round: int) -> Commit | None:
    """Read a round's commit: None as long as there is none."""
    found = etcd.get(keys.commit(round))
    return None if found is None else COMMIT.record(found.value)


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
        shares = SHARES.record(found.value)
        if peer in shares.shares:
            return shares.shares[peer]
        more = with_newcomer(shares, peer, samples=samples, settings=settings)
        outcome = etcd.transact(
            [
                Condition(key=keys.shares(round), aspect="modified", wanted=found.modified),
                absent(keys.commit(round)),
                Condition(key=keys.member(peer), aspect="created", wanted=life),
            ],
            [Put(key=keys.shares(round), value=SHARES.text(more))],
        )
        if outcome is Outcome.DONE:
            return more.shares[peer]
        if outcome is Outcome.REFUSED and _is_over(etcd, keys, round, peer, life):
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


def _epoch_is(keys: Keys, epoch: int) -> Condition:
    return Condition(key=keys.epoch, aspect="value", wanted=str(epoch)) if epoch else absent(keys.epoch)


def _offers_are(keys: Keys, round: int, offers: Mapping[str, int]) -> list[Condition]:
    """What is averaged is unchanged, and who brings it is still there: it lies on the peer's lease."""
    return [
        Condition(key=keys.ready(round, peer), aspect="modified", wanted=modified)
        for peer, modified in offers.items()
    ]


def _is_over(etcd: Etcd, keys: Keys, round: int, peer: str, life: int) -> bool:
    present = etcd.get(keys.member(peer))
    return etcd.get(keys.commit(round)) is not None or present is None or present.created != life
