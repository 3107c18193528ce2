"""Keys of a run put together into snapshots. A key that makes no sense is told once and left out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from bloomery.elastic.control import codec
from bloomery.elastic.control.codec import GarbledRecord, Testimony, Tried
from bloomery.elastic.control.etcd import Change, Item
from bloomery.elastic.control.keys import Keys
from bloomery.elastic.control.snapshot import Offered, Present, Snapshot, Standing
from bloomery.elastic.records import Commit, Done, Failed

log = logging.getLogger(__name__)


class Assembly:
    """What is known of a run. `take` changes, `snapshot` freezes. Not thread-safe."""

    def __init__(self, keys: Keys, *, clock: Callable[[], float]) -> None:
        self._keys, self._clock = keys, clock
        self._version, self._highest = 0, 0
        self._last = Snapshot()
        self._remembered: Testimony | None = None
        self._changed_s = clock()
        self.begin(0)

    def begin(self, revision: int) -> None:
        """Forget everything but how high the epoch was: a listing follows."""
        self._revision, self._epoch = revision, 0
        self._heard_s = self._clock()
        self._members: dict[str, Present] = {}
        self._commits: dict[int, Commit] = {}
        self._commit_revisions: dict[int, tuple[int, float]] = {}
        self._standing: dict[int, Standing] = {}
        self._readies: dict[tuple[int, str], Offered] = {}
        self._tried: dict[tuple[int, int], tuple[Tried, float]] = {}
        self._dones: dict[tuple[int, int, str], Done] = {}
        self._failures: dict[tuple[int, int, str], tuple[Failed, float]] = {}
        self._testimonies: dict[str, Testimony] = {}
        self._rates: dict[str, dict[str, float]] = {}

    def heard(self, revision: int) -> None:
        """The coordinator has spoken, and everything up to this revision is here."""
        self._revision = max(self._revision, revision)
        self._heard_s = self._clock()

    def take(self, change: Change) -> None:
        """Take one change in."""
        kind, *names = self._keys.parts(change.key)
        takers: dict[str, Callable[[list[str], Item | None], None]] = {
            "epoch": self._take_epoch,
            "members": self._take_member,
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
        except (GarbledRecord, ValueError, IndexError) as error:
            log.error("%s is passed over: %s", change.key[:200], error)

    def snapshot(self, *, changed: bool = False) -> Snapshot:
        """Freeze what is known. changed: it is another version than the last."""
        if not changed:
            self._last = replace(self._last, revision=self._revision, heard_s=self._heard_s)
            return self._last
        self._version += 1
        self._changed_s = self._clock()
        self._highest = max(self._highest, self._epoch)
        newest = max(self._commits, default=-1)
        under_way = newest + 1
        epochs = [epoch for round, epoch in self._tried if round == under_way]
        tried, tried_s = self._tried[under_way, max(epochs)] if epochs else (None, 0.0)
        if tried is not None and tried.attempt.epoch != self._epoch:
            tried = None  # of before the coordinator's data was lost
        failures = [one for (round, _, _), one in self._failures.items() if round == under_way]
        revision, committed_s = self._commit_revisions.get(newest, (0, 0.0))
        self._last = Snapshot(
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
            forgotten=self._epoch < self._highest,
            remembered=self._remembered if self._epoch < self._highest else None,
        )
        commit, shares = self._last.commit, self._last.shares
        if commit is not None and not self._last.forgotten:
            self._remembered = Testimony(epoch=self._epoch, commit=commit, shares=shares)
        return self._last

    def _take_epoch(self, names: list[str], item: Item | None) -> None:
        self._epoch = 0 if item is None else codec.epoch_of(item.value)

    def _take_member(self, names: list[str], item: Item | None) -> None:
        (peer,) = names
        if item is None:
            self._members.pop(peer, None)
            return
        member = codec.MEMBER.record(item.value)
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
        round = int(names[0])
        if item is None:
            self._commits.pop(round, None)
            self._commit_revisions.pop(round, None)
            return
        commit = codec.COMMIT.record(item.value)
        _same(commit.round, round)
        self._commits[round] = commit
        self._commit_revisions[round] = (item.modified, self._clock())

    def _take_shares(self, names: list[str], item: Item | None) -> None:
        round = int(names[0])
        if item is None:
            self._standing.pop(round, None)
            return
        shares = codec.SHARES.record(item.value)
        _same(shares.round, round)
        self._standing[round] = Standing(shares=shares, modified=item.modified)

    def _take_ready(self, names: list[str], item: Item | None) -> None:
        round, peer = int(names[0]), names[1]
        if item is None:
            self._readies.pop((round, peer), None)
            return
        ready = codec.READY.record(item.value)
        _same((ready.round, ready.peer), (round, peer))
        before = self._readies.get((round, peer))
        seen_s = before.seen_s if before is not None else self._clock()
        self._readies[round, peer] = Offered(ready=ready, modified=item.modified, seen_s=seen_s)

    def _take_attempt(self, names: list[str], item: Item | None) -> None:
        place = int(names[0]), int(names[1])
        if item is None:
            self._tried.pop(place, None)
            return
        tried = codec.TRIED.record(item.value)
        _same((tried.attempt.round, tried.attempt.epoch), place)
        sizes = {len(tried.attempt.members), len(tried.attempt.weights), len(tried.lives)}
        _same(len(sizes), 1)
        self._tried[place] = tried, self._clock()

    def _take_done(self, names: list[str], item: Item | None) -> None:
        place = int(names[0]), int(names[1]), names[2]
        if item is None:
            self._dones.pop(place, None)
            return
        done = codec.DONE.record(item.value)
        _same((done.round, done.epoch, done.peer), place)
        self._dones[place] = done

    def _take_failed(self, names: list[str], item: Item | None) -> None:
        place = int(names[0]), int(names[1]), names[2]
        if item is None:
            self._failures.pop(place, None)
            return
        failed = codec.FAILED.record(item.value)
        _same((failed.round, failed.epoch, failed.peer), place)
        self._failures[place] = failed, self._clock()

    def _take_testimony(self, names: list[str], item: Item | None) -> None:
        (peer,) = names
        if item is None:
            self._testimonies.pop(peer, None)
            return
        self._testimonies[peer] = codec.TESTIMONY.record(item.value)
        self._highest = max(self._highest, self._testimonies[peer].epoch)

    def _take_rates(self, names: list[str], item: Item | None) -> None:
        (peer,) = names
        self._rates[peer] = {} if item is None else codec.rates_of(item.value)


def _same(said: object, wanted: object) -> None:
    """A record must say of itself what its key says."""
    if said != wanted:
        raise ValueError(f"it says {said!r} of itself")
