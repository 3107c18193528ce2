"""What happens between peers. Alone, nothing does; the shape is the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

from bloomery.checkpoint.state import Json, StateEntry
from bloomery.data.position import Position
from bloomery.data.share import EVERYTHING, Share
from bloomery.guard.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """The round that a state is in: the samples committed when it began, and how many peers take samples."""

    committed: int
    live: int


class RunState(Protocol):
    """What the outer reads and replaces of the state that the loop passes on: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def step(self) -> int:
        """Steps that this peer made."""
        ...

    @property
    def position(self) -> Position:
        """Where it stands. Within a round: the round's, with what is given out as holes."""
        ...

    @property
    def under_way(self) -> UnderWay | None:
        """The round it is in; None at a committed state, and alone."""
        ...

    @property
    def done(self) -> bool:
        """Nothing left to train, or told to stop."""
        ...

    def halting(self, reason: str, *, failed: bool) -> Self:
        """The state of a run that ends here. failed: nobody asked for it."""
        ...


State = TypeVar("State", bound=RunState)


class Outer(Protocol):
    """The outer optimizer as the loop sees it, and a part with a state. Collective over the peer."""

    @property
    def share(self) -> Share:
        """Which part of the stream this peer may take."""
        ...

    def admit(self, state: State) -> State:
        """Before the first step and after each: where this peer has no share and goes on, wait for one."""
        ...

    def average_gradients(self, state: State) -> None:
        """Between backward and update: make gradients those of all peers, where that is what is averaged."""
        ...

    def average(self, state: State, verdict: Verdict) -> tuple[State, Verdict]:
        """After each step, and only what was judged: average with the other peers where a round is over.

        Returns the state to go on with, and what of the verdict is to be carried out on it, now: between
        peers a save waits for the end of the round, and a rewind is decided by all.
        """
        ...

    def skipping(self, state: State, samples: range) -> State:
        """Leave samples out from now on, or from the next round on."""
        ...

    def state_entries(self) -> Iterable[StateEntry]:
        """As `Stateful`."""
        ...

    def state_values(self) -> Mapping[str, Json]:
        """As `Stateful`."""
        ...

    def load_state_values(self, values: Mapping[str, Json]) -> None:
        """As `Stateful`."""
        ...


class Alone:
    """One peer: it may take everything, waits for nobody and averages with nobody."""

    share: Share = EVERYTHING

    def admit(self, state: State) -> State:
        """Nobody comes."""
        return state

    def average_gradients(self, state: State) -> None:
        """They are all there are."""

    def average(self, state: State, verdict: Verdict) -> tuple[State, Verdict]:
        """Nobody to average with, and nobody to ask."""
        return state, verdict

    def skipping(self, state: State, samples: range) -> State:
        """From now on."""
        return replace(state, position=state.position.skipping(samples))

    def state_entries(self) -> Iterable[StateEntry]:
        """No outer momentum."""
        return ()

    def state_values(self) -> dict[str, Json]:
        """No rounds."""
        return {}

    def load_state_values(self, values: Mapping[str, Json]) -> None:
        """Nothing was stored."""
