"""What happens between peers. Alone, nothing does; the shape is the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from bloomery.checkpoint.state import Json, StateEntry
from bloomery.data.share import EVERYTHING, Share
from bloomery.guard.verdict import Verdict

State = TypeVar("State")


class Outer(Protocol):
    """The outer optimizer as the loop sees it. Its methods are collective over the peer."""

    @property
    def share(self) -> Share:
        """Which part of the stream this peer may take."""
        ...

    def admit(self, state: State) -> State:
        """Let newcomers in, at a boundary between steps."""
        ...

    def average(self, state: State, verdict: Verdict) -> State:
        """Every H steps, and only what was judged: average with the other peers."""
        ...


class Alone:
    """One peer: it may take everything, waits for nobody and averages with nobody."""

    share: Share = EVERYTHING

    def admit(self, state: State) -> State:
        """Nobody comes."""
        return state

    def average(self, state: State, verdict: Verdict) -> State:
        """Nobody to average with."""
        return state

    def state_entries(self) -> Iterable[StateEntry]:
        """No outer momentum."""
        return ()

    def state_values(self) -> dict[str, Json]:
        """No rounds."""
        return {}

    def load_state_values(self, values: Mapping[str, Json]) -> None:
        """Nothing was stored."""
