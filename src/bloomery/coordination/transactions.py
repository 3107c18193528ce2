"""The etcd transactions of a round: propose an attempt, commit the round, and lease samples to peers.

`TransactionResult.REFUSED` is no error: another peer was quicker, or a peer left. The next snapshot shows it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping

from bloomery.coordination.decide import CommitRound, Propose
from bloomery.coordination.eligibility import RoundSettings, with_newcomer
from bloomery.coordination.etcd import Condition, Delete, Etcd, Put, TransactionResult, absent
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import Ranges
from bloomery.errors import CoordinatorError
from bloomery.protocol.encoding import ProtocolError, decode, encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Commit, RoundShares

log = logging.getLogger(__name__)

COMMITS_KEPT = 1_000
"""The newest commits that are kept. An older one is kept only if a saved checkpoint is of its state."""
SAVED_COMMITS_KEPT = 1_000
COMMITS_AT_MOST = COMMITS_KEPT + SAVED_COMMITS_KEPT + 1
_PRUNED_AT_ONCE = 16
"""The most commits that one transaction removes; usually one is due."""
_TRIES = 100
ATTEMPTS_KEPT = 128
"""The newest attempts of a round that are kept: while a link fails for days there are thousands."""


def propose(etcd: Etcd, keys: Keys, snapshot: RunSnapshot, proposal: Propose) -> TransactionResult:
    """Begin an attempt: the epoch grows by one.

    It is refused if another attempt was begun, the round was committed, or an offer was changed or came.
    """
    attempt = proposal.tried.attempt
    outdated = range(max(0, attempt.epoch - ATTEMPTS_KEPT), attempt.epoch - ATTEMPTS_KEPT + 1)
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
            *(Delete(key=keys.attempt(attempt.round, epoch)) for epoch in outdated),
        ],
    )


def commit_round(etcd: Etcd, keys: Keys, snapshot: RunSnapshot, decided: CommitRound) -> TransactionResult:
    """Commit a round and lease the samples of the next one, in one transaction.

    The same transaction deletes the attempts and shares of the previous round, and outdated commits. After
    `TransactionResult.UNKNOWN` the caller reads with `read_commit` whether it was carried out.
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
    operations += [Delete(key=keys.commit(old)) for old in outdated_rounds(snapshot, commit.round)]
    return etcd.transact(conditions, operations)


def outdated_rounds(snapshot: RunSnapshot, round: int) -> list[int]:
    """Return the rounds whose commits are deleted when `round` is committed: no member can rewind to them.

    A commit whose state a member saved is kept at any age, for it may be the newest state on any disk. The
    last old commit that asked for a save is kept too, because members may not have reported that save yet.
    """
    old = sorted(number for number in snapshot.commits if number <= round - COMMITS_KEPT)
    saved = {save for present in snapshot.members.values() for save in present.member.saves}
    saved |= set([number for number in old if snapshot.commits[number].save][-1:])
    kept_rounds = set([number for number in old if number in saved][-SAVED_COMMITS_KEPT:])
    return [number for number in old if number not in kept_rounds][:_PRUNED_AT_ONCE]


def read_commit(etcd: Etcd, keys: Keys, round: int) -> Commit | None:
    """Read the commit of a round; None as long as there is none."""
    stored = etcd.get(keys.commit(round))
    return None if stored is None else decode(stored.value, Commit)


def join_shares(
    etcd: Etcd,
    keys: Keys,
    *,
    round: int,
    peer: str,
    life: int,
    samples: int,
    settings: RoundSettings,
    away: Collection[str] = (),
) -> Ranges | None:
    """Take a share of the round under way and return it.

    None if the round is over, the peer is not listed, what lies under the key is no record of shares, the run
    needs no more samples than are leased, or others were quicker too often: hundreds of peers may join at the
    same time. The caller asks again later.

    peer, life: this peer's name, and the create_revision of its key.
    samples: how many samples the peer uses in one inner step.
    away: the peers whose shares are not going to be used.
    """
    for _ in range(_TRIES):
        stored = etcd.get(keys.shares(round))
        if stored is None:
            return None
        try:
            shares = decode(stored.value, RoundShares)
        except ProtocolError as error:  # any member may write this key: the next commit writes it anew
            log.warning("no share of round %d is taken: %s", round, error.message)
            return None
        if peer in shares.shares:
            return shares.shares[peer]
        extended = with_newcomer(shares, peer, samples=samples, away=away, settings=settings)
        if extended is None:
            return None
        outcome = etcd.transact(
            [
                Condition(key=keys.shares(round), aspect="modified", wanted=stored.modified),
                absent(keys.commit(round)),
                Condition(key=keys.member(peer), aspect="created", wanted=life),
            ],
            [Put(key=keys.shares(round), value=encode_text(extended))],
        )
        if outcome is TransactionResult.DONE:
            return extended.shares[peer]
        if outcome is TransactionResult.REFUSED and _is_over(etcd, keys, round, peer, life):
            return None
    log.info("no share of round %d was taken yet: in %d tries another peer was quicker", round, _TRIES)
    return None


def run_token(etcd: Etcd, keys: Keys) -> str:
    """Return the token of a run without certificates; the first peer that asks makes it.

    The token keeps peers of different runs apart. It is no secret from anybody who can reach the coordinator.
    """
    for _ in range(_TRIES):
        stored = etcd.get(keys.token)
        if stored is not None:
            return stored.value
        etcd.transact([absent(keys.token)], [Put(key=keys.token, value=secrets.token_hex(32))])
    raise CoordinatorError("the run's token could not be made")


def restore_token(etcd: Etcd, keys: Keys, token: str) -> bool:
    """Write a run's token to a coordinator that has lost it. Returns False if it has another token now."""
    etcd.transact([absent(keys.token)], [Put(key=keys.token, value=token)])
    stored = etcd.get(keys.token)
    return stored is not None and stored.value == token


def _epoch_is(keys: Keys, epoch: int) -> Condition:
    return Condition(key=keys.epoch, aspect="value", wanted=str(epoch)) if epoch else absent(keys.epoch)


def _not_committed(keys: Keys, snapshot: RunSnapshot) -> Condition:
    """Return the condition that the round under way has no commit, or still the one that was refused."""
    return Condition(key=keys.commit(snapshot.round), aspect="modified", wanted=snapshot.refused)


def _offers_are(keys: Keys, round: int, offers: Mapping[str, int]) -> list[Condition]:
    """Return the conditions that the offers are unchanged, and so their peers, on whose leases they lie."""
    return [
        Condition(key=keys.ready(round, peer), aspect="modified", wanted=modified)
        for peer, modified in offers.items()
    ]


def _is_over(etcd: Etcd, keys: Keys, round: int, peer: str, life: int) -> bool:
    present = etcd.get(keys.member(peer))
    return etcd.get(keys.commit(round)) is not None or present is None or present.created != life
