"""What the parts of a parent share: who it is, and through what it speaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bloomery.elastic.control.etcd import Etcd
from bloomery.elastic.control.keys import Keys
from bloomery.elastic.control.settings import RoundSettings
from bloomery.elastic.links.station import Station
from bloomery.elastic.peer.handoff import Handoff
from bloomery.elastic.peer.local import LocalRanks
from bloomery.elastic.peer.timeouts import Timeouts
from bloomery.elastic.peer.writer import Writer
from bloomery.elastic.records import Commit
from bloomery.elastic.serving.origin import Origin


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """Who this peer is, and by what its rounds are judged. recipe: fingerprint of what peers share.

    overlaps: whether steps go on while a round is decided.
    """

    run: str
    peer: str
    incarnation: str
    recipe: str
    rounds: RoundSettings
    timeouts: Timeouts
    streams: int
    relays: bool = False
    overlaps: bool = False


class Events(Protocol):
    """Where what happens is written: a journal."""

    def write(self, event: str, *, round: int, **fields: object) -> None:
        """Append one event."""
        ...


class StateServer(Protocol):
    """Serves this peer's state to newcomers."""

    def offer(self, directory: Path, *, round: int, digest: str) -> Sequence[str]:
        """Serve this checkpoint from now on; its URLs."""
        ...


class Fetch(Protocol):
    """Fetches the state of a commit from peers that have it."""

    def __call__(
        self, commit: Commit, sources: Callable[[], Sequence[Origin]], *, cancelled: Callable[[], bool]
    ) -> Path:
        """A verified checkpoint. sources: who has it; they may change meanwhile. Raises PeerError."""
        ...


@dataclass(frozen=True, kw_only=True)
class Means:
    """Of one parent. poke: makes its loop look again, from any thread."""

    settings: PeerSettings
    etcd: Etcd
    keys: Keys
    station: Station
    handoff: Handoff
    local: LocalRanks
    writer: Writer
    events: Events
    poke: Callable[[], None]

    @property
    def me(self) -> str:
        """The name of this peer."""
        return self.settings.peer
