"""State between peers: this peer's own is served, and the run's is fetched where this peer has another."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bloomery.elastic.control.snapshot import Snapshot
from bloomery.elastic.peer.means import Fetch, StateServer
from bloomery.elastic.peer.messages import Holding
from bloomery.elastic.records import Commit
from bloomery.elastic.serving.origin import Origin
from bloomery.errors import BloomeryError

log = logging.getLogger(__name__)

_PAUSE_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """The state of a commit is here."""

    commit: Commit
    directory: Path
    seconds: float


class Supply:
    """poke: called when something was fetched, or has failed.

    is_failing: whether a state failed twice though it was still the run's, and none has come since: that is
    not for want of time.
    """

    def __init__(self, server: StateServer, fetch: Fetch, *, me: str, poke: Callable[[], None]) -> None:
        self._server, self._fetch, self._me, self._poke = server, fetch, me, poke
        self._served: tuple[Path, int, str] | None = None
        self._commit: Commit | None = None
        self._sources: Sequence[Origin] = ()
        self._fetched: Fetched | None = None
        self._again_s = 0.0
        self.urls: tuple[str, ...] = ()
        self.is_failing = False
        self._failed: Commit | None = None

    def serve(self, holding: Holding) -> None:
        """Serve what the ranks hold, where they made a checkpoint of it; else nothing."""
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

    def fetch(self, snapshot: Snapshot, *, now: float) -> Fetched | None:
        """The newest commit's state, once it is here; each call goes on with fetching it."""
        commit = snapshot.commit
        assert commit is not None, "nothing to be fetched before the first commit"
        listed = [one.member for name, one in sorted(snapshot.members.items()) if name != self._me]
        others = [member for member in listed if member.digest == commit.digest]
        self._sources = [Origin(peer=member.peer, url=url) for member in others for url in member.serves]
        if self._fetched is not None and self._fetched.commit == commit:
            fetched, self._fetched = self._fetched, None
            self._commit = None
            return fetched
        if self._commit != commit and self._sources and now >= self._again_s:
            self._commit = commit
            threading.Thread(target=self._run, args=(commit,), name="fetch", daemon=True).start()
        return None

    def next_moment(self) -> float | None:
        """When a fetch that failed is tried again."""
        return self._again_s if self._again_s > time.monotonic() else None

    def stop(self) -> None:
        """The state at hand is the right one."""
        self._commit, self._fetched = None, None

    def _run(self, commit: Commit) -> None:
        began_s = time.monotonic()
        try:
            directory = self._fetch(
                commit, lambda: self._sources, cancelled=lambda: self._commit is not commit
            )
        except (BloomeryError, OSError) as error:
            if self._commit is commit:
                log.warning("the state of round %d was not fetched: %s", commit.round, error)
                self.is_failing = self.is_failing or self._failed == commit
                self._failed = commit
                self._commit, self._again_s = None, time.monotonic() + _PAUSE_S
        else:
            if self._commit is commit:
                seconds = time.monotonic() - began_s
                self._fetched = Fetched(commit=commit, directory=directory, seconds=seconds)
                self.is_failing = False
        self._poke()
