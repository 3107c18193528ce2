"""Keeps a peer listed in the run under an etcd lease that a thread renews.

Whatever lies on the lease vanishes with the peer: at once when it leaves, `lease_s` after its last sign when
it does not. A peer that lost its lease and lives lists itself again, with what it had written: another
life to the others, who compare the key's create_revision.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from types import TracebackType

from bloomery.coordination.etcd import Condition, Etcd, LeaseGone, Put, TransactionResult
from bloomery.coordination.thread_errors import reported
from bloomery.errors import CoordinatorError
from bloomery.protocol.encoding import decode, encode_text
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Member

log = logging.getLogger(__name__)

JOIN_S = 30.0
_LEAVE_S = 2.0
_LEASES = 6


class Membership:
    """The place of this peer among the members. A context manager: leaving it leaves the run.

    lost: called from the thread when the lease was found gone, before the peer is listed again.
    failed: called from it with what ended it; the lease runs out then.
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
        self._written: dict[str, tuple[int, str]] = {}  # key → (round, value)
        self._lying: dict[str, int] = {}  # every key on the lease but the member's → round
        self._renewed_s = time.monotonic()

    @property
    def lease(self) -> int:
        """The lease that it holds now; 0 for none."""
        return self._lease

    @property
    def silent_s(self) -> float:
        """Seconds since the coordinator last confirmed the lease."""
        return time.monotonic() - self._renewed_s

    def join(self, member: Member, *, deadline_s: float | None = None) -> None:
        """List this peer. Raises NameTaken where another process has this peer's name.

        It may be this peer's former life, killed with its machine, until its lease runs out; a coordinator
        that is started again grants it anew. So that is waited for, by default for several leases.
        """
        if deadline_s is None:
            deadline_s = max(JOIN_S, _LEASES * self._ttl_s)
        with self._lock:
            self._member = member
            self._ended.clear()
            self._list_again(deadline_s=deadline_s, wait_for_the_other=True)
            if self._thread is None or not self._thread.is_alive():
                keep = reported(self._keep, name="lease", failed=self._failed or _told_already)
                self._thread = threading.Thread(target=keep, name="lease", daemon=True)
                self._thread.start()

    def update(self, member: Member) -> None:
        """Say what has changed of this peer; its life goes on. Raises CoordinatorAway."""
        with self._lock:
            self._member = member
            # Written though it says nothing new: its revision tells that it was said after the last commit.
            self._put(self._etcd.put, self._keys.member(member.peer), encode_text(member))

    def offer(self, key: str, value: str, *, round: int) -> None:
        """Write a key on the lease; it is written again should the lease be lost. Raises CoordinatorAway.

        A value that is there already is left as it is: attempts name what they were decided on by its
        revision. round: to which the key belongs; keys of earlier rounds are not written again.
        """
        with self._lock:
            self._written = {name: one for name, one in self._written.items() if one[0] >= round}
            self._written[key] = (round, value)
            self._put(self._etcd.put_once, key, value)
            self._clear(key, round)

    def _clear(self, key: str, round: int) -> None:
        """Remove what this peer wrote for rounds that everybody has left, as nobody else may.

        What it wrote for the round before stays: whoever lists the run checks that round's commit by it.
        """
        self._lying[key] = round
        for old in [name for name, at in self._lying.items() if at < round - 1]:
            self._etcd.delete(old)
            del self._lying[old]

    def withdraw(self) -> None:
        """Vanish from the members at once, and do not come back by itself: this peer's ranks do not move."""
        self._stop_thread()
        with self._lock:
            lease, self._lease, self._written, self._lying = self._lease, 0, {}, {}
            self._member = None
            if not lease:
                return
            try:
                self._etcd.revoke(lease, deadline_s=_LEAVE_S)
            except CoordinatorError as error:
                log.warning("the lease is left to run out in %d s: %s", self._ttl_s, error.message)

    def leave(self) -> None:
        """Go: the others see it at once."""
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
        try:
            put(key, value, lease=self._lease)
        except LeaseGone:
            self._list_again(deadline_s=JOIN_S)  # writes this too

    def _keep(self) -> None:
        """Renew the lease until told to end. Being away from the coordinator is no reason to end."""
        while not self._ended.wait(self._heartbeat_s):
            try:
                if self._etcd.keep_alive(self._lease, deadline_s=max(1.0, self._heartbeat_s)):
                    self._renewed_s = time.monotonic()
                    continue
                with self._lock:
                    if not self._ended.is_set():
                        self._list_again(deadline_s=max(1.0, self._heartbeat_s))
            except CoordinatorError as error:
                log.warning("the lease was not renewed for %.0f s: %s", self.silent_s, error.message)

    def _list_again(self, *, deadline_s: float, wait_for_the_other: bool = False) -> None:
        """Take a lease and write on it what this peer has to say."""
        member = self._member
        if member is None:
            return
        until = time.monotonic() + deadline_s
        if self._lease and self._lost is not None:
            self._lost()
        self._lease = 0
        # How long the other is waited for says nothing of how long the coordinator may take.
        answer_s = max(deadline_s, JOIN_S) if wait_for_the_other else deadline_s
        lease = self._etcd.grant(self._ttl_s, deadline_s=answer_s)
        key, waits = self._keys.member(member.peer), False
        while not self._write_all(key, member, lease):
            other = self._etcd.get(key)
            if other is not None and decode(other.value, Member).incarnation == member.incarnation:
                self._etcd.revoke(other.lease)  # this very peer's, of before
            elif not wait_for_the_other or self._ended.is_set() or time.monotonic() > until:
                self._etcd.revoke(lease)
                raise NameTaken(member.peer)
            else:
                if not waits:
                    log.info("another process is listed as %r: waiting until its lease runs out", member.peer)
                waits = True
                self._ended.wait(0.1)
                if not self._etcd.keep_alive(lease):
                    lease = self._etcd.grant(self._ttl_s)
        self._lease, self._renewed_s = lease, time.monotonic()
        self._lying = {name: round for name, (round, _) in self._written.items()}

    def _write_all(self, key: str, member: Member, lease: int) -> bool:
        puts = [Put(key=key, value=encode_text(member), lease=lease)]
        puts += [Put(key=name, value=value, lease=lease) for name, (_, value) in self._written.items()]
        free = Condition(key=key, aspect="created", wanted=0)
        outcome = self._etcd.transact([free], puts)
        if outcome is TransactionResult.UNKNOWN:
            found = self._etcd.get(key)
            return found is not None and found.lease == lease
        return outcome is TransactionResult.DONE


def _told_already(error: CoordinatorError) -> None:
    """`reported` has logged it."""


class NameTaken(CoordinatorError):
    """Another process is listed under this peer's name."""

    def __init__(self, peer: str) -> None:
        super().__init__(
            f"another process is listed as the peer {peer!r}",
            remedy="Give each peer a name of its own: elastic.peer, or BLOOMERY_PEER.",
        )
