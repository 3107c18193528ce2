"""What the training loop sees of the other peers: `Outer`. A run of one peer has `Alone`, which does nothing.

`TrainerHooks` is the other direction: what the outer loop of a run between peers asks of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

from bloomery.checkpoint.format.state import Json, StateEntry
from bloomery.data.position import EVERYTHING, Position, SampleShare
from bloomery.guard.verdict import Rewind, Stop, Verdict


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """The round that a state is in.

    committed: samples that the run had used when the round began.
    live: how many peers take samples in it.
    """

    committed: int
    live: int


class RunState(Protocol):
    """What the outer loop reads and replaces of the state that the training loop passes on.

    It is a frozen dataclass: `train.state.TrainState`.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def step(self) -> int:
        """Steps that this peer made."""
        ...

    @property
    def position(self) -> Position:
        """Where the run stands in the stream; within a round, what was given out is holes."""
        ...

    @property
    def under_way(self) -> UnderWay | None:
        """The round that it is in; None at a committed state, and in a run of one peer."""
        ...

    @property
    def done(self) -> bool:
        """Whether nothing is left to train, or the training was told to stop."""
        ...

    def halting(self, reason: str, *, failed: bool) -> Self:
        """The state of a run that ends here. failed: nobody asked for it."""
        ...


State = TypeVar("State", bound=RunState)


class Outer(Protocol):
    """The other peers as the training loop sees them; a part with a state. Collective over the peer."""

    @property
    def share(self) -> SampleShare:
        """Which part of the stream this peer may train on now."""
        ...

    def admit(self, state: State) -> State:
        """Wait for samples where this peer has none and the run goes on. Called before each step."""
        ...

    def average_gradients(self, state: State) -> None:
        """Average gradients over the peers, if a round does that. Called between backward and update."""
        ...

    def average(self, state: State, verdict: Verdict) -> tuple[State, Verdict]:
        """Average with the other peers where a round is over. Called after each step, once it is judged.

        Returns the state to go on with, and what of the verdict is to be carried out on it now: between peers
        a save waits for the end of the round, and a rewind is decided by all.
        """
        ...

    def skipping(self, state: State, samples: range) -> State:
        """Never use these samples: from now on, or between peers from the next round on."""
        ...

    def state_entries(self) -> Iterable[StateEntry]:
        """See `Stateful`."""
        ...

    def state_values(self) -> Mapping[str, Json]:
        """See `Stateful`."""
        ...

    def load_state_values(self, values: Mapping[str, Json]) -> None:
        """See `Stateful`."""
        ...


class Alone:
    """The Outer of a run of one peer: it may train on everything, waits for nobody and averages nothing."""

    share: SampleShare = EVERYTHING

    def admit(self, state: State) -> State:
        """Return the state as it is."""
        return state

    def average_gradients(self, state: State) -> None:
        """Do nothing: this peer's gradients are all there are."""

    def average(self, state: State, verdict: Verdict) -> tuple[State, Verdict]:
        """Return both as they are."""
        return state, verdict

    def skipping(self, state: State, samples: range) -> State:
        """Return a state whose position passes over these samples."""
        return replace(state, position=state.position.skipping(samples))

    def state_entries(self) -> Iterable[StateEntry]:
        """Return nothing: there is no outer momentum."""
        return ()

    def state_values(self) -> dict[str, Json]:
        """Return nothing: there are no rounds."""
        return {}

    def load_state_values(self, values: Mapping[str, Json]) -> None:
        """Do nothing: nothing was stored."""


@dataclass(frozen=True, kw_only=True)
class TrainerHooks:
    """What the outer loop asks of the training. All but the last two are collective over the peer.

    Attributes (`Any` is the training's state):
        batch: the samples of the next step from a state.
        load: fill every part from a checkpoint's directory (the reason is for people), then call the check,
            which raises CheckpointError where the training must not go on from it, then begin a new
            incarnation; returns the state.
        reload: go back to the newest checkpoint of this run directory, or the beginning; returns the state.
        offer: copy a state into memory as a checkpoint for other peers to fetch; None where there is no room.
        wait_staged: return when no save reads the weights any more, which are about to be written.
        follow: make the optimizer's update with gradients that others brought; returns the state after it.
        round_before: the newest committed round at or before a step of which this run directory has a
            checkpoint; None where it has none.
        step_of: the step of its newest checkpoint of a round; None where it has none.
        saves: the rounds on whose state its checkpoints rest, on the first rank; () on others.
        asked_to_stop: why this rank is asked to stop, by a signal or a control file; "" while it is not.
    """

    batch: Callable[[Any], int]
    load: Callable[[Path, str, Callable[[], None]], Any]
    reload: Callable[[str], Any]
    offer: Callable[[Any], Path | None]
    wait_staged: Callable[[], None]
    follow: Callable[[Any], Any]
    round_before: Callable[[int], int | None]
    step_of: Callable[[int], int | None]
    saves: Callable[[], Sequence[int]]
    asked_to_stop: Callable[[], str]

    def round_for(self, wanted: Rewind) -> int | None:
        """The round to go back to for a rewind; None where no checkpoint is early enough. Collective."""
        round = self.round_before(wanted.to_step)
        if round is None and wanted.latest_step is not None:
            round = self.round_before(wanted.latest_step)
        return round

    def possible(self, verdict: Verdict) -> Verdict:
        """The verdict; a stop in place of a rewind for which no checkpoint is early enough. Collective."""
        if not isinstance(verdict, Rewind) or self.round_for(verdict) is not None:
            return verdict
        reason = f"{verdict.reason}; no checkpoint of a round is early enough to go back to"
        return Stop(judged_step=verdict.judged_step, reason=reason, failed=True)
