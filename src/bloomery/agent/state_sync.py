"""Serves this peer's state to others, and fetches the run's state where this peer holds another one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bloomery.agent.agent_context import Fetch, ServesState
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.errors import BloomeryError, reporting_errors
from bloomery.protocol.rank_messages import StateHeld
from bloomery.protocol.records import Commit
from bloomery.state_transfer.source import PeerSource

log = logging.getLogger(__name__)

_PAUSE_S = 0.5


@dataclass(frozen=True, kw_only=True)
class SyncedState:
    """A state that was fetched.

    commit: the commit whose state it is.
    directory: the checkpoint that holds it.
    source: the name of the peer from which it came.
    seconds: how long the fetch took.
    """

    commit: Commit
    directory: Path
    source: str
    seconds: float


class StateSync:
    """Serves the state that the ranks hold, and fetches the newest commit's in the background.

    urls: where this peer's state is served now; () while it is not served.
    is_failing: whether the ranks refused a fetched state, or the fetch of one commit's state failed twice,
        and no fetch has succeeded since. Such a peer does not catch up by waiting longer.

    Args:
        server: serves this peer's state.
        fetch: fetches the state of a commit.
        me: the name of this peer.
        wake: called on any thread when a fetch has succeeded or failed.
    """

    def __init__(self, server: ServesState, fetch: Fetch, *, me: str, wake: Callable[[], None]) -> None:
        self._server, self._fetch, self._me, self._wake = server, fetch, me, wake
        self._served: tuple[Path, int, str] | None = None
        self._commit: Commit | None = None
        self._sources: Sequence[PeerSource] = ()
        self._fetched: SyncedState | None = None
        self._again_s = 0.0
        self.urls: tuple[str, ...] = ()
        self.is_failing = False
        self._failed: Commit | None = None
        self._refused: set[tuple[str, str]] = set()

    def serve(self, holding: StateHeld) -> None:
        """Serve the state that the ranks hold, if they have made a checkpoint of it; else serve nothing."""
        if holding.directory is None:
            self._served, self.urls = None, ()
            return
        place = (holding.directory, holding.round, holding.digest)
        if place == self._served:
            return
        self._served = place
        try:
            urls = self._server.offer(holding.directory, round=holding.round, digest=holding.digest)
        except (BloomeryError, OSError) as error:
            log.warning("round %d is not served: %s", holding.round, error)
            urls = ()
        self.urls = tuple(urls)

    def fetch(self, snapshot: RunSnapshot, *, now: float) -> SyncedState | None:
        """Return the newest commit's state once it has been fetched; None until then.

        The first call for a commit starts the fetch; later calls update the peers from which it may come.
        """
        commit = snapshot.commit
        assert commit is not None, "nothing to be fetched before the first commit"
        members = [listed.member for name, listed in sorted(snapshot.members.items()) if name != self._me]
        self._refused = {refused for refused in self._refused if refused[0] == commit.digest}
        others = [
            member
            for member in members
            if member.digest == commit.digest and (commit.digest, member.peer) not in self._refused
        ]
        self._sources = [PeerSource(peer=member.peer, url=url) for member in others for url in member.serves]
        if self._fetched is not None and self._fetched.commit == commit:
            fetched, self._fetched = self._fetched, None
            self._commit = None
            return fetched
        if self._commit != commit and self._sources and now >= self._again_s:
            self._commit = commit
            fetching = reporting_errors(
                lambda: self._run(commit), name="fetch", on_error=lambda error: self._give_up(commit, error)
            )
            threading.Thread(target=fetching, name="fetch", daemon=True).start()
        return None

    def refuse(self, synced: SyncedState) -> None:
        """Do not fetch this state from that peer again, because what it served was not this state."""
        self.is_failing = True
        self._refused.add((synced.commit.digest, synced.source))

    def next_moment(self) -> float | None:
        """Return when a fetch that failed is tried again, by the monotonic clock; None if none waits."""
        return self._again_s if self._again_s > time.monotonic() else None

    def stop(self) -> None:
        """Stop fetching, because the ranks hold the right state."""
        self._commit, self._fetched = None, None

    def _run(self, commit: Commit) -> None:
        began_s = time.monotonic()
        try:
            fetched = self._fetch(commit, lambda: self._sources, cancelled=lambda: self._commit is not commit)
        except (BloomeryError, OSError) as error:
            self._give_up(commit, error)
            return
        if self._commit is commit:
            seconds = time.monotonic() - began_s
            self._fetched = SyncedState(
                commit=commit, directory=fetched.directory, source=fetched.leader.peer, seconds=seconds
            )
            self.is_failing = False
        self._wake()

    def _give_up(self, commit: Commit, error: Exception) -> None:
        """Let `fetch` start again after a pause, if this commit is still the one to fetch."""
        if self._commit is commit:
            log.warning("the state of round %d was not fetched: %s", commit.round, error)
            self.is_failing = self.is_failing or self._failed == commit
            self._failed = commit
            self._commit, self._again_s = None, time.monotonic() + _PAUSE_S
        self._wake()
