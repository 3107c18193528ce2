"""What an agent's parts share: settings, connections, and a thread that writes to the coordinator.

The agent's loop never waits for the coordinator. Each write to it is a job of `CoordinatorWriter`, which runs
the jobs one after the other on a thread of its own. While the coordinator cannot be reached the jobs wait.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bloomery.agent.rank_server import RankServer
from bloomery.agent.rank_state import LocalRanks
from bloomery.agent.timeouts import Timeouts
from bloomery.coordination.eligibility import RoundSettings
from bloomery.coordination.etcd import Etcd
from bloomery.errors import CoordinatorAway, CoordinatorError, reporting_errors
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Commit
from bloomery.state_transfer.averages import FetchedAverage
from bloomery.state_transfer.client import FetchedState
from bloomery.state_transfer.source import PeerSource
from bloomery.transport.connection_manager import ConnectionManager

log = logging.getLogger(__name__)

_PAUSE_S = 0.2


@dataclass(frozen=True, kw_only=True)
class _Job:
    name: str
    run: Callable[[], None]
    repeats: bool


class CoordinatorWriter:
    """Runs jobs that talk to the coordinator, one after the other, on a thread of its own.

    Args:
        wake: called after each job.
        failed: called with the error when trying again cannot help.
    """

    def __init__(self, *, wake: Callable[[], None], failed: Callable[[CoordinatorError], None]) -> None:
        self._wake, self._failed = wake, failed
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._running: str | None = None
        self._closing = False
        work = reporting_errors(self._work, name="writer", on_error=failed)
        self._thread = threading.Thread(target=work, name="writer", daemon=True)
        self._thread.start()

    def write(self, name: str, run: Callable[[], None], *, repeats: bool = True, first: bool = False) -> None:
        """Queue a job; one of the same name that still waits is dropped.

        name: what the job writes, for messages and for `is_at` and `forget`.
        run: the job; called on the writer's thread.
        repeats: whether the job is tried until the coordinator can be reached; False: it is tried once.
        first: whether it runs before all jobs that wait; False: after them.
        """
        with self._changed:
            self._jobs = deque(job for job in self._jobs if job.name != name)
            job = _Job(name=name, run=run, repeats=repeats)
            if first:
                self._jobs.appendleft(job)
            else:
                self._jobs.append(job)
            self._changed.notify_all()

    def is_at(self, name: str) -> bool:
        """Return whether a job of this name waits or is running."""
        with self._changed:
            return self._running == name or any(job.name == name for job in self._jobs)

    def forget(self, name: str) -> None:
        """Drop the job of this name if it has not begun."""
        with self._changed:
            self._jobs = deque(job for job in self._jobs if job.name != name)

    def close(self, *, within_s: float) -> None:
        """Run the jobs that wait, then end the thread; return after `within_s` seconds at the latest."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(within_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._running = None
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._running = job.name
            is_away = self._do(job)
            self._wake()
            if is_away:
                self._changed_pause()

    def _do(self, job: _Job) -> bool:
        """Run the job; return True if the coordinator could not be reached."""
        try:
            job.run()
        except CoordinatorAway as away:
            log.warning(
                "%s cannot be written to the coordinator yet, and is tried again: %s", job.name, away.message
            )
            with self._changed:
                if (
                    job.repeats
                    and not self._closing
                    and not any(other.name == job.name for other in self._jobs)
                ):
                    self._jobs.appendleft(job)
            return True
        except CoordinatorError as error:
            self._failed(error)
        return False

    def _changed_pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, timeout=_PAUSE_S)


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """Who a peer is, and by which settings its rounds are decided.

    run: the name of the run.
    peer: the name of this peer.
    incarnation: a random name of this process; a restarted peer has another one.
    settings: the settings that must be equal on all peers, by key.
    rounds: the settings by which decisions about rounds are made.
    timeouts: all time-outs of this peer, in seconds.
    streams: the number of TCP connections that each rank has to each neighbour.
    relays: whether this peer forwards connections for peers that cannot be dialled.
    overlaps: whether the ranks continue with steps while a round is decided.
    token: the secret that peers without certificates show one another; "" with certificates.
    """

    run: str
    peer: str
    incarnation: str
    settings: Mapping[str, str]
    rounds: RoundSettings
    timeouts: Timeouts
    streams: int
    relays: bool = False
    overlaps: bool = False
    token: str = ""


class EventSink(Protocol):
    """The journal to which the agent appends events."""

    def write(self, event: str, *, round: int, **fields: object) -> None:
        """Append one event. fields: its further fields, by name."""
        ...


class ServesState(Protocol):
    """Serves copies of this peer's states to joining peers, and averages of rounds."""

    @property
    def urls(self) -> Sequence[str]:
        """Where it serves."""
        ...

    def offer(self, directory: Path, *, round: int, digest: str) -> object:
        """Serve this checkpoint from now on. Raises CheckpointError and PeerError."""
        ...

    def keep(self, digests: Collection[str]) -> None:
        """Serve no other states than these any more."""
        ...

    @property
    def is_serving(self) -> bool:
        """Whether there is a state or an average to be served."""
        ...

    def serve(self, connection: socket.socket, address: str) -> None:
        """Serve a connection, which it owns, of this address. Raises OSError or RuntimeError without room."""
        ...


class FetchState(Protocol):
    """Fetches the state of a commit from peers that have it."""

    def __call__(
        self, commit: Commit, sources: Callable[[], Sequence[PeerSource]], *, cancelled: Callable[[], bool]
    ) -> FetchedState:
        """Fetch a whole checkpoint. Raises PeerError if it cannot be had.

        commit: the commit whose state is fetched.
        sources: returns the peers that serve this state now; called again as they change.
        cancelled: returns True when the state is no longer wanted; the fetch then ends with an error.
        """
        ...


class FetchAverage(Protocol):
    """Fetches the average of a round from peers that were in it."""

    def __call__(
        self,
        commit: Commit,
        sources: Callable[[], Sequence[PeerSource]],
        *,
        ranks: int,
        at_once: int,
        cancelled: Callable[[], bool],
    ) -> FetchedAverage:
        """Fetch one file for each rank of this peer. Raises PeerError; see `FetchState`.

        at_once: the number of peers that are fetched from; with 1 all of it comes from one peer.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AgentContext:
    """What all parts of one agent share.

    rank_server: the socket to this peer's ranks.
    local: what those ranks have reported.
    wake: makes the agent's loop read the snapshot again; any thread may call it.
    """

    settings: PeerSettings
    etcd: Etcd
    keys: Keys
    connection_manager: ConnectionManager
    rank_server: RankServer
    local: LocalRanks
    writer: CoordinatorWriter
    events: EventSink
    wake: Callable[[], None]

    @property
    def me(self) -> str:
        """The name of this peer."""
        return self.settings.peer
