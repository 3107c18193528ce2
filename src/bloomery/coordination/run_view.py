"""Keeps a snapshot of a run up to date by a watch on etcd, and wakes an agent's loop when it has changed.

A thread lists the run, then follows its changes. When the connection ends, it goes on from the revision that
it had reached, at another endpoint if there is one. Callers wait in `changed`, always with a deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

from bloomery.coordination.etcd import Etcd
from bloomery.coordination.etcd_watch import HistoryLost, KeyWatch, WatchBatch, WatchEvent
from bloomery.coordination.offer_limits import OfferLimits
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.coordination.snapshot_builder import SnapshotBuilder
from bloomery.coordination.transactions import COMMITS_AT_MOST
from bloomery.errors import CoordinatorAway, CoordinatorError, reporting_errors
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import RecoveryRecord

log = logging.getLogger(__name__)


IDLE_S = 5.0
"""The seconds of silence after which a watch is begun anew, which finds a coordinator that hangs."""
_PAUSE_S = 0.1
_LISTED = ("peers/", "attempt/", "shares/", "adopted", "revoked/")


class RunView:
    """A snapshot of a run that a thread keeps up to date. A context manager.

    clock: the monotonic clock of the snapshots' times, seconds.
    idle_s: the seconds of silence after which a watch is begun anew.
    pause_s: the wait before a watch that ended is begun anew, seconds.
    remembered: what this peer knew of the run when it last took part; None: nothing.
    limits: what offers may claim; None: they are not judged.
    """

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        *,
        clock: Callable[[], float] = time.monotonic,
        idle_s: float = IDLE_S,
        pause_s: float = _PAUSE_S,
        remembered: RecoveryRecord | None = None,
        limits: OfferLimits | None = None,
    ) -> None:
        self._etcd, self._keys, self._clock = etcd, keys, clock
        self._idle_s, self._pause_s = idle_s, pause_s
        self._assembly = SnapshotBuilder(keys, clock=clock, remembered=remembered, limits=limits)
        self._news = threading.Condition()
        self._error: CoordinatorError | None = None
        self._ended = threading.Event()
        self._watch: KeyWatch | None = None
        self._cluster = 0
        self._thread: threading.Thread | None = None

    def start(self, *, deadline_s: float = 30.0) -> RunSnapshot:
        """List the run, begin to follow it, and return the first snapshot. Raises CoordinatorAway."""
        after = self._list(deadline_s=deadline_s)
        follow = reporting_errors(lambda: self._follow(after), name="view", on_error=self._fail)
        self._thread = threading.Thread(target=follow, name="view", daemon=True)
        self._thread.start()
        return self.snapshot

    @property
    def snapshot(self) -> RunSnapshot:
        """The newest snapshot. Raises the error that ended the thread, such as a refusal by etcd."""
        if self._error is not None:
            raise self._error
        with self._news:
            return self._assembly.snapshot()

    def changed(self, since: int, *, timeout_s: float) -> RunSnapshot:
        """Wait until the run has changed, for `timeout_s` seconds at most, and return the newest snapshot.

        since: the version of the snapshot that the caller has.
        """
        self.wait(since, timeout_s=timeout_s)
        return self.snapshot

    def wait(self, since: int, *, timeout_s: float) -> int:
        """Wait as `changed` does, and return the version without making the snapshot."""
        with self._news:
            self._news.wait_for(
                lambda: self._assembly.version > since or self._error is not None or self._ended.is_set(),
                timeout=max(0.0, timeout_s),
            )
            if self._error is not None:
                raise self._error
            return self._assembly.version

    def wake(self) -> None:
        """Wake whoever waits in `changed`, as after something local has happened."""
        with self._news:
            self._publish()

    def close(self) -> None:
        """Stop following the run."""
        self._ended.set()
        watch = self._watch
        if watch is not None:
            watch.stop()
        with self._news:
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=self._idle_s + 10.0)

    def __enter__(self) -> RunView:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _list(self, *, deadline_s: float) -> int:
        """Read the whole run again as of one revision, and return that revision."""
        commits = self._etcd.list(self._keys.commits, newest=COMMITS_AT_MOST, deadline_s=deadline_s)
        revision, self._cluster = commits.revision, commits.cluster
        items = list(commits.items)
        for name in _LISTED:
            prefix = f"{self._keys.root}{name}"
            items += self._etcd.list(prefix, revision=revision, deadline_s=deadline_s).items
        items += self._etcd.list(self._keys.epoch, revision=revision, deadline_s=deadline_s).items
        with self._news:
            self._assembly.begin(revision)
            for item in items:
                self._assembly.take(WatchEvent(key=item.key, item=item))
            self._publish()
        return revision

    def _follow(self, after: int) -> None:
        while not self._ended.is_set():
            try:
                after = self._watch_once(after)
            except HistoryLost as lost:
                log.warning(
                    "the coordinator's history is no longer available (%s): reading the whole run again", lost
                )
                after = self._list_until_there(after)
            except CoordinatorAway as away:
                log.warning("the coordinator does not answer: %s", away.message)
                self._ended.wait(self._pause_s)

    def _watch_once(self, after: int) -> int:
        """Follow until the connection ends, and return the revision up to which everything is known."""
        self._watch = self._etcd.watch(
            self._keys.root,
            after=after,
            cluster=self._cluster,
            idle_s=self._idle_s,
            deadline_s=self._idle_s,
        )
        if self._ended.is_set():  # closed while the connection was made
            self._watch.stop()
        began_s = time.monotonic()
        for batch in self._watch.batches():
            after = self._take(batch, after)
        self._ended.wait(max(0.0, began_s + self._pause_s - time.monotonic()))
        return after

    def _take(self, batch: WatchBatch, after: int) -> int:
        with self._news:
            for change in batch.changes:
                self._assembly.take(change)
            self._assembly.heard(batch.revision)
            if batch.changes:
                self._publish()
        return max(after, batch.revision)

    def _list_until_there(self, after: int) -> int:
        while not self._ended.is_set():
            try:
                return self._list(deadline_s=self._idle_s)
            except CoordinatorAway as away:
                log.warning("the coordinator does not answer: %s", away.message)
                self._ended.wait(self._pause_s)
        return after

    def _publish(self) -> None:
        """Wake those who wait for a later snapshot. The caller holds the lock."""
        self._assembly.note_change()
        self._news.notify_all()

    def _fail(self, error: CoordinatorError) -> None:
        with self._news:
            self._error = error
            self._news.notify_all()


_PAUSES = 9.0
"""After each evaluation of a snapshot comes a pause of this multiple of the CPU time that it took.

Hundreds of members write thousands of keys a round, and an evaluation costs in proportion to the members. So
the evaluations of a round cost in proportion to the members too, and not to their square.
"""
_WAIT_S = 60.0


class SnapshotListener:
    """Waits for newer snapshots of a view on a thread, from `start` until `close`, and wakes the agent's
    loop.

    wake: called whenever there is a newer snapshot, at most as often as its evaluation's cost allows.
    failed: called with the error that ended the view.
    """

    def __init__(
        self, view: RunView, *, wake: Callable[[], None], failed: Callable[[CoordinatorError], None]
    ) -> None:
        self._view, self._wake, self._failed = view, wake, failed
        self._ended = threading.Event()
        self._look_s = 0.0

    def start(self, version: int) -> None:
        """Begin to follow the view. version: of the snapshot that was evaluated last."""
        bring = reporting_errors(lambda: self._bring(version), name="news", on_error=self._failed)
        threading.Thread(target=bring, name="news", daemon=True).start()

    def note_cost(self, seconds: float) -> None:
        """Note how much CPU time the last evaluation of a snapshot took."""
        self._look_s = seconds

    def close(self) -> None:
        """Follow the view no longer."""
        self._ended.set()

    def _bring(self, version: int) -> None:
        while not self._ended.is_set():
            newest = self._view.wait(version, timeout_s=_WAIT_S)
            if newest > version:
                version = newest
                self._wake()
                self._ended.wait(_PAUSES * self._look_s)
