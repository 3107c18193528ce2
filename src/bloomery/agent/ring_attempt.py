"""One attempt of a round's all_reduce: gathers connections, gives them to the ranks, takes them back."""

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
    """How far an attempt is."""

    CONNECTING = "connecting"
    REDUCING = "reducing"
    OVER = "over"


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Deadlines of one attempt: for all connections, for a connection without a byte, for the whole
    all_reduce.
    """

    connect_s: float
    stall_s: float
    ring_s: float


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Why an attempt does not go on. culprit: the peer at the other end; None where none is known."""

    kind: str
    culprit: str | None
    why: str


class RingAttempt:
    """One attempt of this peer. A thread gathers the connections; the ranks reduce over them.

    Args:
        tell: sends a Reduce to a rank.
        wake: called when something has changed.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        me: str,
        members: Mapping[str, Member],
        lanes: int,
        streams: int,
        links: ConnectionPool,
        waits: Waits,
        tell: Callable[[int, Reduce], None],
        wake: Callable[[], None],
    ) -> None:
        self.attempt, self.stage = attempt, AttemptStage.CONNECTING
        self.trouble: Trouble | None = None
        self.began_s = self.reducing_s = time.monotonic()
        self._index = attempt.members.index(me)
        self._lanes, self._streams = lanes, streams
        self._links, self._waits, self._tell, self._wake = links, waits, tell, wake
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        neighbours = [members[name] for name in self._neighbours()]
        self._relays = any(one.relays for one in members.values())
        threading.Thread(target=self._connect, args=(neighbours,), name="connect", daemon=True).start()

    def end(self, *, went_well: bool) -> None:
        """It is over: connections of a good ring are kept, those of any other closed."""
        with self._lock:
            if self.stage is AttemptStage.OVER:
                return
            self.stage = AttemptStage.OVER
        self._cancelled.set()
        self._links.nudge()
        if went_well:
            self._links.release(self.attempt.epoch)
        else:
            self._links.discard(self.attempt.epoch)

    def _neighbours(self) -> tuple[str, ...]:
        """(next, previous); nobody in a ring of one."""
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
            self._fail(Trouble(kind="unreachable", culprit=error.peer, why=str(error)))
            return
        except (PeerError, OSError, RuntimeError) as error:  # also: no descriptor or thread is left
            self._fail(Trouble(kind="unreachable", culprit=None, why=str(error)))
            return
        with self._lock:
            if self.stage is not AttemptStage.CONNECTING:
                return
            self.stage, self.reducing_s = AttemptStage.REDUCING, time.monotonic()
            try:
                self._hand_over(hops)
            except PeerError as error:
                self._fail(Trouble(kind="unreachable", culprit=None, why=str(error)))
        self._wake()

    def _hand_over(self, hops: Sequence[HopConnections]) -> None:
        """Tell every rank to begin. PeerError: one could not be told; those that were are called off."""
        for lane in range(self._lanes):
            own = tuple(hop for hop in hops if hop.lane == lane)
            self._tell(
                lane,
                Reduce(
                    attempt=self.attempt,
                    index=self._index,
                    hops=own,
                    stall_s=self._waits.stall_s,
                    deadline_s=self._waits.ring_s,
                ),
            )

    def _gathered(self, neighbours: Sequence[Member]) -> list[HopConnections]:
        if not neighbours:
            return []
        following, preceding = neighbours
        wanted = [self._wanted(following, sends=True), self._wanted(preceding, sends=False)]
        links = self._links.gather(
            wanted,
            epoch=self.attempt.epoch,
            deadline_s=self._waits.connect_s,
            cancelled=self._cancelled,
            relays=self._relays,
        )
        half = len(links) // 2
        return [self._hop(lane, links[:half], links[half:]) for lane in range(self._lanes)]

    def _wanted(self, member: Member, *, sends: bool) -> connection_pool.Neighbour:
        return connection_pool.Neighbour(
            peer=member.peer,
            incarnation=member.incarnation,
            addresses=member.addresses,
            sends=sends,
            lanes=tuple(range(self._lanes)),
            streams=self._streams,
        )

    def _hop(
        self, lane: int, following: Sequence[Connection], preceding: Sequence[Connection]
    ) -> HopConnections:
        sending = [link for link in following if link.place.lane == lane]
        receiving = [link for link in preceding if link.place.lane == lane]
        return HopConnections(
            lane=lane,
            next_fds=tuple(link.connection.fileno() for link in sending),
            previous_fds=tuple(link.connection.fileno() for link in receiving),
            send_keys=tuple(link.key for link in sending),
            receive_keys=tuple(link.key for link in receiving),
        )

    def _fail(self, trouble: Trouble) -> None:
        log.warning("epoch %d: %s", self.attempt.epoch, trouble.why)
        self.trouble = trouble
        self._wake()
