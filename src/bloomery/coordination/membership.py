"""Keeps a peer listed in the run under an etcd lease that a thread renews.

The keys on the lease vanish with the peer: at once when it leaves, and `lease_s` after the last renewal when
it dies. A peer that lost its lease but lives lists itself again and writes its keys again. To the others this
is another life, because the create_revision of its key differs.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median
from types import TracebackType

from bloomery.coordination.etcd import Condition, Etcd, LeaseGone, Put, TransactionResult
from bloomery.coordination.etcd_watch import KeyValue
from bloomery.errors import CoordinatorAway, CoordinatorError, reporting_errors
from bloomery.protocol.encoding import ProtocolError, decode, encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Member

log = logging.getLogger(__name__)

JOIN_S = 30.0
"""The least seconds that a peer waits to be listed."""
_LEAVE_S = 2.0
_LEASES = 6
_ROUND_TRIPS = 15
_REPORTS_AT_MOST = 128
_EVERY_ROUND = sys.maxsize
"""The round of keys that belong to none: no later one removes them."""


class Membership:
    """Keeps this peer's entry in the run's list of members by an etcd lease that a thread renews.

    As a context manager it withdraws the peer from the run at the end of the block.

    lease_s: how long the lease lasts without a renewal, in seconds, rounded up to whole ones.
    heartbeat_s: seconds between renewals.
    lost: called from the thread when the lease has ended, before the peer is listed again; None: not called.
    failed: called from the thread with the error that ended it, after which the lease runs out; None: the
        error is only logged.
    """

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        *,
        lease_s: float,
        heartbeat_s: float,
        lost: Callable[[], None] | None = None,
        failed: Callable[[CoordinatorError], None] | None = None,
    ) -> None:
        self._etcd, self._keys = etcd, keys
        self._ttl_s = max(1, math.ceil(lease_s))
        self._heartbeat_s = heartbeat_s
        self._lost, self._failed = lost, failed
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._lease = 0
        self._member: Member | None = None
        self._written: dict[
            str, tuple[int, str]
        ] = {}  # key → (round, value); written again after a lost lease
        self._reports: list[str] = []  # reports of attempts of the round, the oldest first
        self._on_lease: dict[str, int] = {}  # every key on the lease but the member's → round
        self._renewed_s = time.monotonic()
        self._round_trips_s: deque[float] = deque(maxlen=_ROUND_TRIPS)

    @property
    def round_trip_s(self) -> float:
        """The median seconds of the last renewals of the lease, each a round trip; 0.0 before the first."""
        return median(self._round_trips_s) if self._round_trips_s else 0.0

    @property
    def lease(self) -> int:
        """The id of the lease that this peer holds now; 0: it holds none."""
        return self._lease

    @property
    def silent_s(self) -> float:
        """Seconds since the coordinator last confirmed the lease."""
        return time.monotonic() - self._renewed_s

    def join(self, member: Member, *, deadline_s: float | None = None) -> None:
        """List this peer. Raises NameTaken if another process is listed under its name until the deadline.

        That process may be this peer's former life, which was killed: its entry stays until its lease ends,
        and a coordinator that is restarted prolongs the lease. So `join` waits for the lease to end.

        deadline_s: how long to wait, seconds; None: several leases, at least JOIN_S.
        """
        if deadline_s is None:
            deadline_s = max(JOIN_S, _LEASES * self._ttl_s)
        with self._lock:
            self._member = member
            self._ended.clear()
            self._list_again(deadline_s=deadline_s, wait_for_other=True)
            if self._thread is None or not self._thread.is_alive():
                keep = reporting_errors(self._keep, name="lease", on_error=self._failed or _already_logged)
                self._thread = threading.Thread(target=keep, name="lease", daemon=True)
                self._thread.start()

    def update(self, member: Member) -> None:
        """Write this peer's changed record; its life stays the same. Raises CoordinatorAway."""
        with self._lock:
            self._member = member
            # It is written even if unchanged: its revision shows that it is newer than the last commit.
            self._put(self._etcd.put, self._keys.member(member.peer), encode_text(member))

    def offer(self, key: str, value: str, *, round: int, is_report: bool = False) -> None:
        """Write a key on the lease, and again whenever the lease was lost. Raises CoordinatorAway.

        While this peer is not listed, the key waits for `join`.
        A key that has this value already is not written: attempts name an offer by its revision. In the same
        step the keys go that this peer wrote for rounds that are over; no other peer may delete them. Those
        of the previous round stay: a peer that lists the run checks that round's commit by them.

        round: the round to which the key belongs; keys of earlier rounds are not written again.
        is_report: whether it reports how an attempt went. Of a round in which attempts fail for days the last
            ones are kept: a transaction holds only so many keys, and who joins lists them all.
        """
        with self._lock:
            self._written = {name: entry for name, entry in self._written.items() if entry[0] >= round}
            self._written[key] = (round, value)
            old = [name for name, at in self._on_lease.items() if at < round - 1]
            if is_report:
                old += self._outdated_reports(key)
            self._put(partial(self._etcd.put_once, delete=old), key, value)
            self._on_lease = {name: at for name, at in self._on_lease.items() if name not in old}
            self._on_lease[key] = round

    def _outdated_reports(self, newest: str) -> list[str]:
        """Return the reports to delete: half of them, where there are too many, so that the number varies."""
        reports = [name for name in self._reports if name in self._written and name != newest] + [newest]
        half = _REPORTS_AT_MOST // 2 if len(reports) > _REPORTS_AT_MOST else 0
        outdated, self._reports = reports[:half], reports[half:]
        for name in outdated:
            del self._written[name]
        return [name for name in outdated if name in self._on_lease]

    def keep(self, key: str, value: str) -> None:
        """Write a key that lies on the lease in every round, whenever this peer is listed.

        Before `join` it waits, and is then written together with the peer's record. Raises CoordinatorAway.
        """
        with self._lock:
            self._written[key] = (_EVERY_ROUND, value)
            self._put(self._etcd.put_once, key, value)

    def withdraw(self) -> None:
        """Leave the list of members at once and stay away until `join`, as when the ranks are stuck."""
        self._stop_thread()
        with self._lock:
            self._written = {name: entry for name, entry in self._written.items() if entry[0] == _EVERY_ROUND}
            lease, self._lease, self._on_lease = self._lease, 0, {}
            self._member = None
            if not lease:
                return
            try:
                self._etcd.revoke(lease, deadline_s=_LEAVE_S)
            except CoordinatorError as error:
                log.warning("the lease is left to run out in %d s: %s", self._ttl_s, error.message)

    def leave(self) -> None:
        """Leave the run: the other peers see it at once."""
        self.withdraw()

    def __enter__(self) -> Membership:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _stop_thread(self) -> None:
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=self._ttl_s)

    def _put(self, put: Callable[..., object], key: str, value: str) -> None:
        if not self._lease:  # an earlier listing failed; to etcd, a key on lease 0 is one that stays for ever
            self._list_again(deadline_s=JOIN_S)  # this writes the key, too
            return
        try:
            put(key, value, lease=self._lease)
        except LeaseGone:
            self._list_again(deadline_s=JOIN_S)

    def _keep(self) -> None:
        """Renew the lease until `withdraw`. A coordinator that does not answer is no reason to end."""
        while not self._ended.wait(self._heartbeat_s):
            try:
                began_s, lease = time.monotonic(), self._lease
                if self._etcd.keep_alive(lease, deadline_s=max(1.0, self._heartbeat_s)):
                    self._renewed_s = time.monotonic()
                    self._round_trips_s.append(self._renewed_s - began_s)
                    continue
                with self._lock:
                    if not self._ended.is_set() and self._lease == lease:
                        self._list_again(deadline_s=max(1.0, self._heartbeat_s))
            except CoordinatorError as error:
                log.warning("the lease was not renewed for %.0f s: %s", self.silent_s, error.message)

    def _list_again(self, *, deadline_s: float, wait_for_other: bool = False) -> None:
        """Take a new lease and write this peer's keys on it.

        wait_for_other: wait until the deadline while another process is listed under this name.
        """
        member = self._member
        if member is None:
            return
        until = time.monotonic() + deadline_s
        if self._lease and self._lost is not None:
            self._lost()
        self._lease = 0
        # The wait for another process may be short; the coordinator gets JOIN_S to answer all the same.
        answer_s = max(deadline_s, JOIN_S) if wait_for_other else deadline_s
        lease = self._etcd.grant(self._ttl_s, deadline_s=answer_s)
        key, waits = self._keys.member(member.peer), False
        while not self._write_all(key, member, lease):
            other = self._etcd.get(key)
            if other is not None and _is_of_process(other, member.incarnation):
                self._etcd.revoke(other.lease)  # an earlier lease of this very process
            elif (other is not None and not wait_for_other) or self._is_too_late(until):
                self._etcd.revoke(lease)
                raise NameTaken(member.peer) if other is not None else _unlisted(member.peer)
            else:  # without another, the request was lost or its lease ended, or that one has just left
                if other is not None and not waits:
                    log.info("another process is listed as %r: waiting until its lease runs out", member.peer)
                    waits = True
                self._ended.wait(0.1)
                if not self._etcd.keep_alive(lease):
                    lease = self._etcd.grant(self._ttl_s)
        self._lease, self._renewed_s = lease, time.monotonic()
        self._on_lease = {name: round for name, (round, _) in self._written.items()}

    def _is_too_late(self, until: float) -> bool:
        return self._ended.is_set() or time.monotonic() > until

    def _write_all(self, key: str, member: Member, lease: int) -> bool:
        puts = [Put(key=key, value=encode_text(member), lease=lease)]
        puts += [Put(key=name, value=value, lease=lease) for name, (_, value) in self._written.items()]
        free = Condition(key=key, aspect="created", wanted=0)
        try:
            outcome = self._etcd.transact([free], puts)
        except LeaseGone:  # the coordinator took longer than the lease lasts: another one is taken
            return False
        if outcome is TransactionResult.UNKNOWN:
            stored = self._etcd.get(key)
            return stored is not None and stored.lease == lease
        return outcome is TransactionResult.DONE


def _is_of_process(stored: KeyValue, incarnation: str) -> bool:
    """Return whether this process wrote an entry. A former process may have written it in another version."""
    try:
        return decode(stored.value, Member).incarnation == incarnation
    except ProtocolError:
        return False


def _unlisted(peer: str) -> CoordinatorAway:
    return CoordinatorAway(f"the coordinator has not listed the peer {peer!r} yet, and lists no other as it")


def _already_logged(error: CoordinatorError) -> None:
    """Do nothing: `reported` has logged the error."""


class NameTaken(CoordinatorError):
    """Raised where another process is already a member of the run under this peer's name."""

    def __init__(self, peer: str) -> None:
        super().__init__(
            f"another process is listed as the peer {peer!r}",
            remedy="Give each peer a name of its own: elastic.peer, or BLOOMERY_PEER.",
        )
