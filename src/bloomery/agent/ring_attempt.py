"""Runs one attempt of a round's all_reduce: connects to both neighbours, and passes sockets to the ranks."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bloomery.errors import PeerError
from bloomery.protocol.rank_messages import HopConnections, Reduce
from bloomery.protocol.records import Attempt, Member
from bloomery.transport import connection_pool
from bloomery.transport.connection import Connection
from bloomery.transport.connection_pool import Cancelled, ConnectionPool, LinkError

log = logging.getLogger(__name__)


class AttemptStage(enum.Enum):
    """How far an attempt has come: collecting connections, reducing over them, or over."""

    CONNECTING = "connecting"
    REDUCING = "reducing"
    OVER = "over"


@dataclass(frozen=True, kw_only=True)
class AttemptTimeouts:
    """Deadlines of one attempt, in seconds.

    connect_s: until all connections are ready.
    stall_s: until a connection that moves no byte counts as failed.
    ring_s: until the whole all_reduce is done.
    """

    connect_s: float
    stall_s: float
    ring_s: float


@dataclass(frozen=True, kw_only=True)
class AttemptFailure:
    """Why an attempt cannot finish.

    kind: the kind of failure, as `Failed` reports it to the coordinator.
    culprit: the peer at the other end of the failed connection; None if that is not known.
    why: the reason in words, for logs.
    """

    kind: str
    culprit: str | None
    why: str


class RingAttempt:
    """One peer's part in an attempt. A thread collects the connections; the ranks reduce over them.

    attempt: the attempt, with its members in the order of the ring.
    stage: how far this peer has come.
    failure: why the attempt cannot finish; None while that is not known.
    began_s, reducing_s: when it began, and when the ranks got the connections, by the monotonic clock.

    Args:
        me: the name of this peer.
        members: the entries of the attempt's members, by name.
        ranks: how many ranks a peer has; each reduces over connections of its own.
        streams: the number of connections that each rank has to each neighbour.
        links: the pool from which connections are taken.
        timeouts: the deadlines.
        norm_limit: the largest norm of an honest average, for the ranks; None if it is not known.
        send: sends a Reduce to a rank.
        wake: called on any thread when `stage` or `failure` has changed.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        me: str,
        members: Mapping[str, Member],
        ranks: int,
        streams: int,
        links: ConnectionPool,
        timeouts: AttemptTimeouts,
        norm_limit: float | None,
        send: Callable[[int, Reduce], None],
        wake: Callable[[], None],
    ) -> None:
        self.attempt, self.stage = attempt, AttemptStage.CONNECTING
        self.failure: AttemptFailure | None = None
        self.began_s = self.reducing_s = time.monotonic()
        self._index = attempt.members.index(me)
        self._ranks, self._streams = ranks, streams
        self._links, self._timeouts, self._send, self._wake = links, timeouts, send, wake
        self._norm_limit = norm_limit
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        neighbours = [members[name] for name in self._neighbours()]
        self._relays = any(member.relays for member in members.values())
        connecting = threading.Thread(target=self._connect, args=(neighbours,), name="connect", daemon=True)
        try:
            connecting.start()
        except RuntimeError as error:  # no thread is left: the attempt fails, and the next one may not
            self._fail(AttemptFailure(kind="unreachable", culprit=None, why=str(error)))

    def end(self, *, went_well: bool) -> None:
        """End the attempt. Connections are kept for the next ring if `went_well`, and closed if not."""
        with self._lock:
            if self.stage is AttemptStage.OVER:
                return
            self.stage = AttemptStage.OVER
        self._cancelled.set()
        self._links.check_cancelled()
        if went_well:
            self._links.release(self.attempt.epoch)
        else:
            self._links.discard(self.attempt.epoch)

    def _neighbours(self) -> tuple[str, ...]:
        """Return the names of the next and the previous peer in the ring; () in a ring of one."""
        members = self.attempt.members
        if len(members) < 2:
            return ()
        return members[(self._index + 1) % len(members)], members[self._index - 1]

    def _connect(self, neighbours: Sequence[Member]) -> None:
        try:
            hops = self._gathered(neighbours)
        except Cancelled:
            return
        except LinkError as error:
            self._fail(AttemptFailure(kind="unreachable", culprit=error.peer, why=str(error)))
            return
        except (
            PeerError,
            OSError,
            RuntimeError,
        ) as error:  # OSError, RuntimeError: no descriptor or no thread is left
            self._fail(AttemptFailure(kind="unreachable", culprit=None, why=str(error)))
            return
        with self._lock:
            if self.stage is not AttemptStage.CONNECTING:
                return
            self.stage, self.reducing_s = AttemptStage.REDUCING, time.monotonic()
            try:
                self._hand_over(hops)
            except PeerError as error:
                self._fail(AttemptFailure(kind="unreachable", culprit=None, why=str(error)))
        self._wake()

    def _hand_over(self, hops: Sequence[HopConnections]) -> None:
        """Tell every rank to reduce over its connections.

        Raises PeerError if one of them cannot be told. Those that were told before stop when the attempt is
        called off.
        """
        for rank in range(self._ranks):
            own = tuple(hop for hop in hops if hop.rank == rank)
            self._send(
                rank,
                Reduce(
                    attempt=self.attempt,
                    index=self._index,
                    hops=own,
                    stall_s=self._timeouts.stall_s,
                    deadline_s=self._timeouts.ring_s,
                    norm_limit=self._norm_limit,
                ),
            )

    def _gathered(self, neighbours: Sequence[Member]) -> list[HopConnections]:
        if not neighbours:
            return []
        following, preceding = neighbours
        requests = [self._wanted(following, sends=True), self._wanted(preceding, sends=False)]
        links = self._links.gather(
            requests,
            epoch=self.attempt.epoch,
            deadline_s=self._timeouts.connect_s,
            cancelled=self._cancelled,
            relays=self._relays,
        )
        half = len(links) // 2
        return [self._hop(rank, links[:half], links[half:]) for rank in range(self._ranks)]

    def _wanted(self, member: Member, *, sends: bool) -> connection_pool.Neighbour:
        return connection_pool.Neighbour(
            peer=member.peer,
            incarnation=member.incarnation,
            addresses=member.addresses,
            sends=sends,
            ranks=tuple(range(self._ranks)),
            streams=self._streams,
        )

    def _hop(
        self, rank: int, following: Sequence[Connection], preceding: Sequence[Connection]
    ) -> HopConnections:
        sending = [link for link in following if link.place.rank == rank]
        receiving = [link for link in preceding if link.place.rank == rank]
        return HopConnections(
            rank=rank,
            next_fds=tuple(link.connection.fileno() for link in sending),
            previous_fds=tuple(link.connection.fileno() for link in receiving),
            send_keys=tuple(link.key for link in sending),
            receive_keys=tuple(link.key for link in receiving),
        )

    def _fail(self, failure: AttemptFailure) -> None:
        log.warning("epoch %d: %s", self.attempt.epoch, failure.why)
        self.failure = failure
        self._wake()
