"""Builds snapshots of a run from its etcd keys; a key that cannot be decoded is reported once and left out.

Other machines wrote every key, so any of them may be wrong. A wrong key counts as absent, for peers that list
the run now and for peers that have followed it, and it ends no process.
A coordinator that knows less of the run than a member does has lost its data: `RunSnapshot.forgotten`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from bloomery.coordination import commits
from bloomery.coordination.etcd_watch import KeyValue, WatchEvent
from bloomery.coordination.offer_limits import OfferLimits
from bloomery.coordination.snapshot import ListedMember, ListedOffer, ListedShares, RunSnapshot
from bloomery.protocol.encoding import ProtocolError, decode, decode_epoch, decode_rates
from bloomery.protocol.keys import RECOVERY, Keys
from bloomery.protocol.records import (
    Commit,
    Done,
    Failed,
    Member,
    ProposedAttempt,
    Ready,
    RecoveryRecord,
)

log = logging.getLogger(__name__)

_NAMED_AT_MOST = 1_000
"""The most wrong keys that are named in the log, one line each."""


class SnapshotBuilder:
    """Collects the keys of a run with `take` and freezes them with `snapshot`. It is not thread-safe.

    Hundreds of members write thousands of keys a round, so a snapshot is made only when somebody asks for it.

    clock: the monotonic clock of the snapshots' times, seconds.
    remembered: what this peer knew of the run when it last took part; None: nothing.
    limits: what offers may claim; None: they are not judged.
    """

    def __init__(
        self,
        keys: Keys,
        *,
        clock: Callable[[], float],
        remembered: RecoveryRecord | None = None,
        limits: OfferLimits | None = None,
    ) -> None:
        self._keys, self._clock, self._limits, self._version = keys, clock, limits, 0
        self._highest = self._own_highest = remembered.epoch if remembered else 0
        self._last, self._is_stale, self._remembered = RunSnapshot(), False, remembered
        self._named, self._changed_s = set[str](), clock()
        self.begin(0)

    def begin(self, revision: int) -> None:
        """Forget everything but the highest epoch: the keys of a listing at `revision` follow."""
        if self._is_stale:
            self.snapshot()  # so that the newest commit is remembered
        self._revision, self._epoch, self._epoch_revision = revision, 0, 0
        self._is_listing, self._adopted, self._heard_s = True, 0, self._clock()
        self._members: dict[str, ListedMember] = {}
        self._commits: dict[int, Commit] = {}
        self._commit_revisions: dict[int, tuple[int, float]] = {}
        self._refused: dict[int, int] = {}
        self._standing: dict[int, ListedShares] = {}
        self._readies: dict[tuple[int, str], ListedOffer] = {}
        self._tried: dict[tuple[int, int], tuple[ProposedAttempt, float, int]] = {}
        self._dones: dict[tuple[int, int, str], Done] = {}
        self._failures: dict[tuple[int, int, str], tuple[Failed, float]] = {}
        self._recovery_records: dict[str, RecoveryRecord] = {}
        self._rates: dict[str, dict[str, float]] = {}
        self._revoked: set[str] = set()

    def heard(self, revision: int) -> None:
        """Note that the coordinator has answered, and that all changes up to this revision were taken."""
        self._revision = max(self._revision, revision)
        self._heard_s = self._clock()

    def take(self, change: WatchEvent) -> None:
        """Apply one change of a key. A key that cannot be decoded is logged and counts as absent."""
        kind, *names = self._keys.parts(change.key)
        takers: dict[str, Callable[[list[str], KeyValue | None], None]] = {
            "epoch": self._take_epoch,
            "adopted": self._take_adopted,
            "member": self._take_member,
            "commit": self._take_commit,
            "shares": self._take_shares,
            "ready": self._take_ready,
            "attempt": self._take_attempt,
            "done": self._take_done,
            "failed": self._take_failed,
            RECOVERY: self._take_recovery_record,
            "rates": self._take_rates,
            "revoked": self._take_revoked,
        }
        if kind not in takers:
            return
        try:
            takers[kind](names, change.item)
        except (ProtocolError, ValueError) as error:
            self._name(change.key, error)
            with suppress(ValueError):  # a key whose name is wrong was never known
                takers[kind](names, None)

    def _name(self, key: str, error: Exception) -> None:
        self._log_once(key, f"the key {key[:200]} is ignored: {error}")

    def _log_once(self, about: str, line: str) -> None:
        """Log that a key counts as absent: a peer that writes it often does not fill the log."""
        if about in self._named or len(self._named) >= _NAMED_AT_MOST:
            return
        self._named.add(about)
        log.error("%s", line)
        if len(self._named) == _NAMED_AT_MOST:
            log.error("%d keys were ignored; no more of them are logged", _NAMED_AT_MOST)

    @property
    def version(self) -> int:
        """The version of the snapshot that `snapshot` returns."""
        return self._version

    def note_change(self) -> None:
        """Give the next snapshot a version that is one later, because keys were taken."""
        self._version += 1
        self._changed_s = self._clock()
        self._own_highest = max(self._own_highest, self._epoch)
        self._highest = max(self._highest, self._epoch)
        if self._is_listing:
            self._is_listing = False
            self._check_newest_of_listing()
        self._is_stale = True

    def snapshot(self, *, changed: bool = False) -> RunSnapshot:
        """Return what is known as a frozen value. changed: whether to call `note_change` before."""
        if changed:
            self.note_change()
        if not self._is_stale:
            self._last = replace(self._last, revision=self._revision, heard_s=self._heard_s)
            return self._last
        self._last, self._is_stale = self._frozen(), False
        commit, shares = self._last.commit, self._last.shares
        if commit is not None and not self._last.forgotten:
            self._remembered = RecoveryRecord(epoch=self._epoch, commit=commit, shares=shares, held=None)
        return self._last

    def _frozen(self) -> RunSnapshot:
        """Return what is known now, without a new version."""
        under_way = (newest := max(self._commits, default=-1)) + 1
        # Others were proposed before the coordinator lost its data, or written before their epoch has begun.
        tried, tried_s, tried_revision = self._tried.get((under_way, self._epoch), (None, 0.0, 0))
        failures = self._failures_of(under_way)
        revision, committed_s = self._commit_revisions.get(newest, (0, 0.0))
        peers_ahead = self._peers_ahead(newest)
        is_older = self._epoch < max(self._own_highest, self._highest_claim())
        remembers_later = self._remembered is not None and self._remembered.round > newest
        forgotten = is_older or bool(peers_ahead) or remembers_later
        return RunSnapshot(
            version=self._version,
            revision=self._revision,
            epoch=self._epoch,
            members=dict(self._members),
            commits=dict(self._commits),
            commit_revision=revision,
            committed_s=committed_s,
            standing=self._standing.get(under_way),
            readies={peer: offer for (round, peer), offer in self._readies.items() if round == under_way},
            tried=tried,
            tried_s=tried_s,
            tried_revision=tried_revision,
            refused=self._refused.get(under_way, 0),
            dones={
                peer: done
                for (round, epoch, peer), done in self._dones.items()
                if round == under_way and epoch == self._epoch
            },
            failures=tuple(failure for failure, _ in failures),
            failed_s=max((seen_s for _, seen_s in failures), default=0.0),
            recovery_records=dict(self._recovery_records),
            rates=dict(self._rates),
            revoked=frozenset(self._revoked),
            changed_s=self._changed_s,
            heard_s=self._heard_s,
            highest=self._highest,
            own_highest=self._own_highest,
            forgotten=forgotten,
            peers_ahead=peers_ahead,
            remembered=self._remembered if forgotten else None,
            limits=self._limits,
        )

    def _failures_of(self, round: int) -> list[tuple[Failed, float]]:
        """Return the failures of a round that members of its attempts reported; others are ignored."""
        members = {place: tried.attempt.members for place, (tried, _, _) in self._tried.items()}
        return [
            failure
            for (at, epoch, peer), failure in self._failures.items()
            if at == round and peer in members.get((at, epoch), ())
        ]

    def _highest_claim(self) -> int:
        """Return the highest epoch of the members and recovery records that are there now.

        A claim goes with its peer, which may be of an earlier run with this name: else one such peer would
        stop the run for ever.
        """
        members = (listed.member.epoch for listed in self._members.values())
        records = (record.epoch for record in self._recovery_records.values())
        return max((*members, *records), default=0)

    def _peers_ahead(self, newest: int) -> tuple[str, ...]:
        """Return the members that hold or remember a later round than the newest commit's.

        A member writes that it holds a round only after it has read the round's commit here. So such a member
        proves that the coordinator lost the commit, and not that the commit is still to come.
        """
        begun = max(newest, 0)  # before round 0 is committed every member says that it holds round 0
        holding = {name for name, present in self._members.items() if present.member.round > begun}
        recording = {name for name, record in self._recovery_records.items() if record.round > newest}
        return tuple(sorted(holding | recording))

    def _take_epoch(self, names: list[str], item: KeyValue | None) -> None:
        commits.require_same(names, [])
        epoch = 0 if item is None else decode_epoch(item.value)
        if item is None or item.modified != self._adopted:
            commits.require_epoch(epoch, self._commits)
        if item is not None and epoch != self._epoch:
            self._epoch_revision = item.modified
        self._epoch = epoch

    def _take_adopted(self, names: list[str], item: KeyValue | None) -> None:
        commits.require_same(names, [])
        self._adopted = 0 if item is None else item.modified

    def _take_member(self, names: list[str], item: KeyValue | None) -> None:
        (peer,) = names
        if item is None:
            self._members.pop(peer, None)
            return
        member = decode(item.value, Member)
        commits.require_same(member.peer, peer)
        now, before = self._clock(), self._members.get(peer)
        lives_on = before is not None and before.life == item.created
        self._members[peer] = ListedMember(
            member=member,
            life=item.created,
            modified=item.modified,
            seen_s=before.seen_s if before is not None and lives_on else now,
            said_s=now,
        )
        self._highest = max(self._highest, member.epoch)

    def _take_commit(self, names: list[str], item: KeyValue | None) -> None:
        (round,) = map(self._keys.number, names)
        if item is None:
            self._refused.pop(round, None)
            if round < max(self._commits, default=-1):  # an old one that was pruned
                self._commits.pop(round, None)
                self._commit_revisions.pop(round, None)
            return
        if round in self._commits:
            if item.modified == self._commit_revisions[round][0]:
                return  # a watch that was begun anew tells it again
            self._name(item.key, ValueError("a commit was written a second time, and the first one stays"))
            return
        try:
            commit = decode(item.value, Commit)
            commits.require_same(commit.round, round)
            commits.require_room_at_ranks(commit)
        except (ProtocolError, ValueError) as error:
            self._refuse(round, item.modified, str(error))
            return
        is_trusted = self._is_listing or item.modified == self._adopted
        if not is_trusted and (why := commits.objection(commit, self._frozen())):
            self._refuse(round, item.modified, why)
            return
        self._refused.pop(round, None)
        self._commits[round] = commit
        self._commit_revisions[round] = (item.modified, self._clock())
        if not self._is_listing:
            self._standing.pop(round + 1, None)  # shares count that are written with the commit, or after it

    def _check_newest_of_listing(self) -> None:
        """Refuse the newest commit if other keys of the listing contradict it, and so on with the next."""
        while self._commits:
            newest = max(self._commits)
            revision, _ = self._commit_revisions[newest]
            if revision == self._adopted:
                return
            commit = self._commits.pop(newest)
            why = commits.objection_of_listing(commit, self._frozen())
            if not why:
                self._commits[newest] = commit
                return
            del self._commit_revisions[newest]
            self._refuse(newest, revision, why)

    def _refuse(self, round: int, revision: int, why: str) -> None:
        """Ignore this commit: every peer does so, and the peer that concludes the round writes over it."""
        self._refused[round] = revision
        line = f"the commit of round {round}, written at revision {revision}, is refused: {why}"
        self._log_once(f"commit of {round}", line)

    def _take_shares(self, names: list[str], item: KeyValue | None) -> None:
        """Take the shares of a round; those of the round under way stay, whatever is written over them."""
        (round,) = map(self._keys.number, names)
        is_under_way = round == max(self._commits, default=-2) + 1 and not self._is_listing
        before = self._standing.get(round) if is_under_way else None
        try:
            shares = None if item is None else commits.shares_of(item.value, round=round)
            if before and (shares is None or not commits.only_adds(shares, before.shares)):
                raise ValueError("it takes back leased samples")
        except (ProtocolError, ValueError) as error:
            if before is None:
                raise
            self._name(self._keys.shares(round), error)
            shares = before.shares
        self._standing.pop(round, None)
        if shares is not None:
            self._standing[round] = ListedShares(shares=shares, modified=item.modified if item else 0)

    def _take_ready(self, names: list[str], item: KeyValue | None) -> None:
        number, peer = names
        round = self._keys.number(number)
        if item is None:
            self._readies.pop((round, peer), None)
            return
        ready = decode(item.value, Ready)
        commits.require_same((ready.round, ready.peer), (round, peer))
        before = self._readies.get((round, peer))
        seen_s = before.seen_s if before is not None else self._clock()
        self._readies[round, peer] = ListedOffer(ready=ready, modified=item.modified, seen_s=seen_s)

    def _take_attempt(self, names: list[str], item: KeyValue | None) -> None:
        round, epoch = map(self._keys.number, names)
        place = round, epoch
        if item is None:
            self._tried.pop(place, None)
            return
        tried = decode(item.value, ProposedAttempt)
        attempt = tried.attempt
        commits.require_same((attempt.round, attempt.epoch), place)
        commits.require_room_at_ranks(attempt)
        sizes = {len(attempt.members), len(attempt.weights), len(tried.lives), len(tried.offers)}
        commits.require_same(len(sizes), 1)
        before = self._tried.get(place)
        # The first one that came with its epoch stays: members may be reducing it already.
        if before is not None and before[2] >= self._epoch_revision:
            self._name(item.key, ValueError("an attempt was written a second time"))
            return
        self._tried[place] = tried, self._clock(), item.modified

    def _take_done(self, names: list[str], item: KeyValue | None) -> None:
        place = self._report_place(names)
        if item is None:
            self._dones.pop(place, None)
            return
        done = decode(item.value, Done)
        commits.require_same((done.round, done.epoch, done.peer), place)
        self._dones[place] = done

    def _take_failed(self, names: list[str], item: KeyValue | None) -> None:
        place = self._report_place(names)
        if item is None:
            self._failures.pop(place, None)
            return
        failed = decode(item.value, Failed)
        commits.require_same((failed.round, failed.epoch, failed.peer), place)
        _, seen_s = self._failures.get(place, (failed, self._clock()))
        # A failure that is written again keeps its first time: peers wait for answers from that time on.
        self._failures[place] = failed, seen_s

    def _report_place(self, names: list[str]) -> tuple[int, int, str]:
        round, epoch, peer = names
        return self._keys.number(round), self._keys.number(epoch), peer

    def _take_recovery_record(self, names: list[str], item: KeyValue | None) -> None:
        (peer,) = names
        if item is None:
            self._recovery_records.pop(peer, None)
            return
        self._recovery_records[peer] = decode(item.value, RecoveryRecord)
        self._highest = max(self._highest, self._recovery_records[peer].epoch)

    def _take_revoked(self, names: list[str], item: KeyValue | None) -> None:
        (serial,) = names
        if item is not None:
            self._revoked.add(serial)

    def _take_rates(self, names: list[str], item: KeyValue | None) -> None:
        (peer,) = names
        if item is None:
            self._rates.pop(peer, None)
            return
        self._rates[peer] = decode_rates(item.value)
