"""What the parts of an agent share: settings, connections, and the writer to the coordinator.

The agent's loop never waits for the coordinator. What it writes there are jobs of `Writer`, which does one
after the other on a thread of its own; while the coordinator is away the jobs wait.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bloomery.agent.rank_server import RankServer
from bloomery.agent.rank_state import LocalRanks
from bloomery.agent.timeouts import Timeouts
from bloomery.coordination.eligibility import RoundSettings
from bloomery.coordination.etcd import Etcd
from bloomery.coordination.thread_errors import reported
from bloomery.errors import CoordinatorAway, CoordinatorError
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Commit
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


class Writer:
    """Does jobs that talk to the coordinator, one after the other, on a thread of its own.

    Args:
        wake: called after each job.
        failed: called with an error that trying again does not mend.
    """

    def __init__(self, *, wake: Callable[[], None], failed: Callable[[CoordinatorError], None]) -> None:
        self._wake, self._failed = wake, failed
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._running: str | None = None
        self._closing = False
        work = reported(self._work, name="writer", failed=failed)
        self._thread = threading.Thread(target=work, name="writer", daemon=True)
        self._thread.start()

    def write(self, name: str, run: Callable[[], None], *, repeats: bool = True, first: bool = False) -> None:
        """Do this after what waits already, or before. One of equal name that waits is forgotten.

        repeats: again and again while the coordinator is away; else once.
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
        """Whether a job of this name waits or is being done."""
        with self._changed:
            return self._running == name or any(job.name == name for job in self._jobs)

    def forget(self, name: str) -> None:
        """Do not do it any more, if it has not begun."""
        with self._changed:
            self._jobs = deque(job for job in self._jobs if job.name != name)

    def close(self, *, within_s: float) -> None:
        """Finish what waits, as far as that is possible in time."""
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
        """Run it; True where the coordinator was away."""
        try:
            job.run()
        except CoordinatorAway as away:
            log.warning("%s waits for the coordinator: %s", job.name, away.message)
            with self._changed:
                if job.repeats and not self._closing and not any(one.name == job.name for one in self._jobs):
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

    incarnation: a random name of this process; a restarted peer has another one.
    settings: those that must be equal on all peers.
    streams: TCP connections of each lane to each neighbour.
    relays: whether it forwards connections for peers that cannot be dialled.
    overlaps: whether steps go on while a round is decided.
    token: what peers without certificates show one another; "" with certificates.
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


class Events(Protocol):
    """Where what happens is written: a journal."""

    def write(self, event: str, *, round: int, **fields: object) -> None:
        """Append one event."""
        ...


class ServesState(Protocol):
    """Serves this peer's state to newcomers."""

    def offer(self, directory: Path, *, round: int, digest: str) -> Sequence[str]:
        """Serve this checkpoint from now on; its URLs."""
        ...


class Fetch(Protocol):
    """Fetches the state of a commit from peers that have it."""

    def __call__(
        self, commit: Commit, sources: Callable[[], Sequence[PeerSource]], *, cancelled: Callable[[], bool]
    ) -> FetchedState:
        """A whole checkpoint. sources: who has it; they may change meanwhile. Raises PeerError."""
        ...


@dataclass(frozen=True, kw_only=True)
class AgentContext:
    """What every part of one agent uses. poke: makes the agent's loop look again; any thread may call it."""

    settings: PeerSettings
    etcd: Etcd
    keys: Keys
    station: ConnectionManager
    handoff: RankServer
    local: LocalRanks
    writer: Writer
    events: Events
    poke: Callable[[], None]

    @property
    def me(self) -> str:
        """The name of this peer."""
        return self.settings.peer
