"""Builds snapshots of a run from its etcd keys; a key that cannot be decoded is reported once and left out.

Everything here was written by other machines. A key that makes no sense counts as absent, for whoever lists
the run now and for whoever has followed it; it is named once, and ends nothing.
A coordinator that knows less of the run than a member does has lost its data; snapshots say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from bloomery.coordination.commit_evidence import objection, objection_of_listing
from bloomery.coordination.etcd import Item, WatchEvent
from bloomery.coordination.snapshot import Offered, Present, RunSnapshot, Standing
from bloomery.data.position import merged, total, without
from bloomery.protocol.encoding import ProtocolError, decode, decode_epoch, decode_rates
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import (
    Commit,
    Done,
    Failed,
    Member,
    ProposedAttempt,
    Ready,
    RecoveryRecord,
    RoundShares,
)

log = logging.getLogger(__name__)

_NAMED_AT_MOST = 1_000
"""Keys without sense that are named in the log, one line each."""


class Assembly:
    """What is known of a run. `take` changes, `snapshot` freezes. Not thread-safe.

    remembered: what this peer knew of the run when it was last there.
    """

    def __init__(
        self, keys: Keys, *, clock: Callable[[], float], remembered: RecoveryRecord | None = None
    ) -> None:
        self._keys, self._clock = keys, clock
        self._version, self._highest = 0, remembered.epoch if remembered else 0
        self._last = RunSnapshot()
        self._remembered = remembered
        self._named: set[str] = set()
        self._changed_s = clock()
        self.begin(0)

    def begin(self, revision: int) -> None:
        """Forget everything but how high the epoch was: a listing follows."""
        self._revision, self._epoch = revision, 0
        self._is_listing, self._adopted = True, 0
        self._heard_s = self._clock()
        self._members: dict[str, Present] = {}
        self._commits: dict[int, Commit] = {}
        self._commit_revisions: dict[int, tuple[int, float]] = {}
        self._refused: dict[int, int] = {}
        self._standing: dict[int, Standing] = {}
        self._readies: dict[tuple[int, str], Offered] = {}
        self._tried: dict[tuple[int, int], tuple[ProposedAttempt, float, int]] = {}
        self._dones: dict[tuple[int, int, str], Done] = {}
        self._failures: dict[tuple[int, int, str], tuple[Failed, float]] = {}
        self._testimonies: dict[str, RecoveryRecord] = {}
        self._rates: dict[str, dict[str, float]] = {}

    def heard(self, revision: int) -> None:
        """The coordinator has spoken, and everything up to this revision is here."""
        self._revision = max(self._revision, revision)
        self._heard_s = self._clock()

    def take(self, change: WatchEvent) -> None:
        """Take one change in."""
        kind, *names = self._keys.parts(change.key)
        takers: dict[str, Callable[[list[str], Item | None], None]] = {
            "epoch": self._take_epoch,
            "adopted": self._take_adopted,
            "member": self._take_member,
            "commit": self._take_commit,
            "shares": self._take_shares,
            "ready": self._take_ready,
            "attempt": self._take_attempt,
            "done": self._take_done,
            "failed": self._take_failed,
            "testimony": self._take_testimony,
            "rates": self._take_rates,
        }
        if kind not in takers:
            return
        try:
            takers[kind](names, change.item)
        except (ProtocolError, ValueError) as error:
            self._name(change.key, error)
            with suppress(ValueError):  # a key that is spelled wrong was never known
                takers[kind](names, None)

    def _name(self, key: str, error: Exception) -> None:
        """Say once that a key counts as absent: whoever writes it again and again does not fill the log."""
        if key in self._named or len(self._named) >= _NAMED_AT_MOST:
            return
        self._named.add(key)
        log.error("%s is passed over: %s", key[:200], error)
        if len(self._named) == _NAMED_AT_MOST:
            log.error("%d keys were passed over: no more are named", _NAMED_AT_MOST)

    def snapshot(self, *, changed: bool = False) -> RunSnapshot:
        """Freeze what is known. changed: it is another version than the last."""
        if not changed:
            self._last = replace(self._last, revision=self._revision, heard_s=self._heard_s)
            return self._last
        self._version += 1
        self._changed_s = self._clock()
        self._highest = max(self._highest, self._epoch)
        if self._is_listing:
            self._is_listing = False
            self._doubt_newest()
        self._last = self._frozen()
        commit, shares = self._last.commit, self._last.shares
        if commit is not None and not self._last.forgotten:
            self._remembered = RecoveryRecord(epoch=self._epoch, commit=commit, shares=shares, held=None)
        return self._last

    def _frozen(self) -> RunSnapshot:
        """What is known now."""
        newest = max(self._commits, default=-1)
        under_way = newest + 1
        epochs = [epoch for round, epoch in self._tried if round == under_way]
        tried, tried_s, tried_revision = self._tried[under_way, max(epochs)] if epochs else (None, 0.0, 0)
        if tried is not None and tried.attempt.epoch != self._epoch:
            tried = None  # of before the coordinator's data was lost
        failures = self._failures_of(under_way)
        revision, committed_s = self._commit_revisions.get(newest, (0, 0.0))
        witnesses = self._witnesses(newest)
        forgotten = self._epoch < self._highest or bool(witnesses) or self._remembers_later_than(newest)
        return RunSnapshot(
            version=self._version,
            revision=self._revision,
            epoch=self._epoch,
            members=dict(self._members),
            commits=dict(self._commits),
            commit_revision=revision,
            committed_s=committed_s,
            standing=self._standing.get(under_way),
            readies={peer: one for (round, peer), one in self._readies.items() if round == under_way},
            tried=tried,
            tried_s=tried_s,
            tried_revision=tried_revision,
            refused=self._refused.get(under_way, 0),
            dones={
                peer: one
                for (round, epoch, peer), one in self._dones.items()
                if round == under_way and epoch == self._epoch
            },
            failures=tuple(one for one, _ in failures),
            failed_s=max((seen_s for _, seen_s in failures), default=0.0),
            testimonies=dict(self._testimonies),
            rates=dict(self._rates),
            changed_s=self._changed_s,
            heard_s=self._heard_s,
            highest=self._highest,
            forgotten=forgotten,
            witnesses=witnesses,
            remembered=self._remembered if forgotten else None,
        )

    def _failures_of(self, round: int) -> list[tuple[Failed, float]]:
        """Of members in attempts that there were: a failure of anything else is nobody's business."""
        tried = {place: one.attempt.members for place, (one, _, _) in self._tried.items()}
        return [
            one
            for (at, epoch, peer), one in self._failures.items()
            if at == round and peer in tried.get((at, epoch), ())
        ]

    def _witnesses(self, newest: int) -> tuple[str, ...]:
        """Members that hold or remember a later round than the newest commit's.

        A member says that it holds a round after it has read its commit, so this is never a matter of time.
        """
        begun = max(newest, 0)  # before round 0 is committed everybody holds "round 0": what it begins with
        holding = {name for name, one in self._members.items() if one.member.round > begun}
        return tuple(
            sorted(holding | {name for name, one in self._testimonies.items() if one.round > newest})
        )

    def _remembers_later_than(self, newest: int) -> bool:
        return self._remembered is not None and self._remembered.round > newest

    def _take_epoch(self, names: list[str], item: Item | None) -> None:
        _same(names, [])
        self._epoch = 0 if item is None else decode_epoch(item.value)

    def _take_adopted(self, names: list[str], item: Item | None) -> None:
        _same(names, [])
        self._adopted = 0 if item is None else item.modified

    def _take_member(self, names: list[str], item: Item | None) -> None:
        (peer,) = names
        if item is None:
            self._members.pop(peer, None)
            return
        member = decode(item.value, Member)
        _same(member.peer, peer)
        now, before = self._clock(), self._members.get(peer)
        lives_on = before is not None and before.life == item.created
        self._members[peer] = Present(
            member=member,
            life=item.created,
            modified=item.modified,
            seen_s=before.seen_s if before is not None and lives_on else now,
            said_s=now,
        )
        self._highest = max(self._highest, member.epoch)

    def _take_commit(self, names: list[str], item: Item | None) -> None:
        (round,) = map(self._keys.number, names)
        if item is None:
            self._refused.pop(round, None)
            if round < max(self._commits, default=-1):  # an old one, which nobody needs any more
                self._commits.pop(round, None)
                self._commit_revisions.pop(round, None)
            return
        if round in self._commits:
            self._name(item.key, ValueError("what was committed stays, and it was written a second time"))
            return
        try:
            commit = decode(item.value, Commit)
            _same(commit.round, round)
        except (ProtocolError, ValueError) as error:
            self._refuse(round, item.modified, str(error))
            return
        is_trusted = self._is_listing or item.modified == self._adopted
        why = "" if is_trusted else objection(commit, self._frozen())
        if why:
            self._refuse(round, item.modified, why)
            return
        self._refused.pop(round, None)
        self._commits[round] = commit
        self._commit_revisions[round] = (item.modified, self._clock())

    def _doubt_newest(self) -> None:
        """Look whether what was listed speaks against the newest commit that was listed with it."""
        newest = max(self._commits, default=-1)
        revision, _ = self._commit_revisions.get(newest, (0, 0.0))
        if newest < 0 or revision == self._adopted:
            return
        commit = self._commits.pop(newest)
        why = objection_of_listing(commit, self._frozen())
        if why:
            del self._commit_revisions[newest]
            self._refuse(newest, revision, why)
        else:
            self._commits[newest] = commit

    def _refuse(self, round: int, revision: int, why: str) -> None:
        """Nobody goes on from this commit; whoever concludes the round writes over it."""
        self._refused[round] = revision
        log.error("the commit of round %d, written at revision %d, is refused: %s", round, revision, why)

    def _take_shares(self, names: list[str], item: Item | None) -> None:
        (round,) = map(self._keys.number, names)
        if item is None:
            self._standing.pop(round, None)
            return
        shares = decode(item.value, RoundShares)
        _same(shares.round, round)
        given = [piece for part in shares.shares.values() for piece in part]
        if total(given) != total(merged(given)) or without(merged(given), shares.position.holes):
            raise ValueError("it gives a sample to two peers, or one that it does not count as given out")
        before = self._standing.get(round)
        is_under_way = round - 1 in self._commits and not self._is_listing
        if before is not None and is_under_way and not _is_more(shares, before.shares):
            self._name(item.key, ValueError("it takes back what was given out"))
            shares = before.shares
        self._standing[round] = Standing(shares=shares, modified=item.modified)

    def _take_ready(self, names: list[str], item: Item | None) -> None:
        number, peer = names
        round = self._keys.number(number)
        if item is None:
            self._readies.pop((round, peer), None)
            return
        ready = decode(item.value, Ready)
        _same((ready.round, ready.peer), (round, peer))
        before = self._readies.get((round, peer))
        seen_s = before.seen_s if before is not None else self._clock()
        self._readies[round, peer] = Offered(ready=ready, modified=item.modified, seen_s=seen_s)

    def _take_attempt(self, names: list[str], item: Item | None) -> None:
        round, epoch = map(self._keys.number, names)
        place = round, epoch
        if item is None:
            self._tried.pop(place, None)
            return
        tried = decode(item.value, ProposedAttempt)
        _same((tried.attempt.round, tried.attempt.epoch), place)
        attempt = tried.attempt
        sizes = {len(attempt.members), len(attempt.weights), len(tried.lives), len(tried.offers)}
        _same(len(sizes), 1)
        if place in self._tried:  # it is written once: members reduce what was proposed first
            self._name(item.key, ValueError("an attempt was written a second time"))
            return
        self._tried[place] = tried, self._clock(), item.modified

    def _take_done(self, names: list[str], item: Item | None) -> None:
        number, attempt, peer = names
        place = self._keys.number(number), self._keys.number(attempt), peer
        if item is None:
            self._dones.pop(place, None)
            return
        done = decode(item.value, Done)
        _same((done.round, done.epoch, done.peer), place)
        self._dones[place] = done

    def _take_failed(self, names: list[str], item: Item | None) -> None:
        number, attempt, peer = names
        place = self._keys.number(number), self._keys.number(attempt), peer
        if item is None:
            self._failures.pop(place, None)
            return
        failed = decode(item.value, Failed)
        _same((failed.round, failed.epoch, failed.peer), place)
        _, seen_s = self._failures.get(place, (failed, self._clock()))
        self._failures[place] = (
            failed,
            seen_s,
        )  # written again it is no later: others wait for an answer to it

    def _take_testimony(self, names: list[str], item: Item | None) -> None:
        (peer,) = names
        if item is None:
            self._testimonies.pop(peer, None)
            return
        self._testimonies[peer] = decode(item.value, RecoveryRecord)
        self._highest = max(self._highest, self._testimonies[peer].epoch)

    def _take_rates(self, names: list[str], item: Item | None) -> None:
        (peer,) = names
        if item is None:
            self._rates.pop(peer, None)
            return
        self._rates[peer] = decode_rates(item.value)


def _is_more(shares: RoundShares, before: RoundShares) -> bool:
    """Whether shares are what they were, and perhaps those of newcomers."""
    return (shares.position.consumed, shares.position.skips) == (
        before.position.consumed,
        before.position.skips,
    ) and all(shares.shares.get(name) == part for name, part in before.shares.items())


def _same(said: object, wanted: object) -> None:
    """A record must say of itself what its key says."""
    if said != wanted:
        raise ValueError(f"it says {said!r} of itself")
