"""Defines `Outer`, by which the training loop uses the other peers; a run of one peer uses `SinglePeer`.

`TrainerHooks` is the other direction: what the outer loop of a run between peers calls in the training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

from bloomery.checkpoint.format.state import Json, StateEntry
from bloomery.data.position import EVERYTHING, Position, SampleShare
from bloomery.events.heartbeat import RankActivity
from bloomery.guard.verdict import CarryOn, Rewind, Stop, Verdict

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """The round that a state is in.

    committed: how many samples the run had used when the round began.
    live: how many peers have samples in it.
    """

    committed: int
    live: int


class RunState(Protocol):
    """Those fields of the training's state that the outer loop reads and replaces.

    The state is a frozen dataclass, `train.state.TrainState`.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def step(self) -> int:
        """How many steps this peer has made."""
        ...

    @property
    def position(self) -> Position:
        """The run's position in the stream. Within a round, samples that are shared out are its holes."""
        ...

    @property
    def under_way(self) -> UnderWay | None:
        """The round that the state is in; None for a committed state, and in a run of one peer."""
        ...

    @property
    def done(self) -> bool:
        """Whether nothing is left to train, or the training was told to stop."""
        ...

    def halting(self, reason: str, *, failed: bool) -> Self:
        """Return the state of a run that ends here. failed: whether an error is the cause."""
        ...


State = TypeVar("State", bound=RunState)


class Outer(Protocol):
    """The other peers, for the training loop. Its state is part of checkpoints. Collective over the peer."""

    @property
    def share(self) -> SampleShare:
        """Which part of the stream this peer may train on now."""
        ...

    def admit(self, state: State) -> State:
        """Wait until this peer has samples or the run ends. Called before each step."""
        ...

    def average_gradients(self, state: State) -> None:
        """Average gradients over the peers, if a round does that. Called between backward and update."""
        ...

    def average(self, state: State, verdict: Verdict) -> tuple[State, Verdict]:
        """Average with the other peers if a round is over. Called after each step that guards have judged.

        Returns the state to continue with, and the verdict to carry out on it now. Between peers a
        save waits for the end of the round, and all peers decide on a rewind together.
        """
        ...

    def skipping(self, state: State, samples: range) -> State:
        """Return a state in which these samples are never used; between peers, from the next round on."""
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


class SinglePeer:
    """The Outer of a run of one peer, which may train on all samples, does not wait and averages nothing."""

    share: SampleShare = EVERYTHING

    def admit(self, state: State) -> State:
        """Return the state as it is."""
        return state

    def average_gradients(self, state: State) -> None:
        """Do nothing, because there are no other gradients."""

    def average(self, state: State, verdict: Verdict) -> tuple[State, Verdict]:
        """Return both as they are."""
        return state, verdict

    def skipping(self, state: State, samples: range) -> State:
        """Return a state whose position passes over these samples."""
        return replace(state, position=state.position.skipping(samples))

    def state_entries(self) -> Iterable[StateEntry]:
        """Return nothing, because there is no outer momentum."""
        return ()

    def state_values(self) -> dict[str, Json]:
        """Return nothing, because there are no rounds."""
        return {}

    def load_state_values(self, values: Mapping[str, Json]) -> None:
        """Do nothing, because nothing was stored."""


@dataclass(frozen=True, kw_only=True)
class TrainerHooks:
    """What the outer loop calls in the training. All but the last three are collective over the peer.

    Attributes (`Any` is the training's state):
        batch: returns how many samples the next step from a state uses.
        load: fills every part from a checkpoint's directory (the reason is for the log), then calls the
            check, which raises CheckpointError if the training must not continue from it, then begins a new
            incarnation; returns the state.
        reload: goes back to the newest checkpoint of this run directory, or the beginning; returns the state.
        copy: copies a state into memory as a checkpoint for other peers to fetch; returns its directory,
            None if there is no room.
        remove_copy: removes such a checkpoint.
        wait_staged: waits until no save reads the weights, so that they may be written.
        follow: makes the optimizer's update with the gradients of other peers; returns the state after it.
        round_before: returns the newest committed round at or before a step of which this run directory has a
            checkpoint; None if there is none.
        step_of: returns the step of the newest checkpoint of a round in this run directory; None without one.
        saves: returns the rounds whose states its checkpoints contain, on the first rank; () on others.
        asked_to_stop: returns why a signal or a control file asks this rank to stop; "" while none does.
        enter: records in the heartbeat the activity that this rank begins.
    """

    batch: Callable[[Any], int]
    load: Callable[[Path, str, Callable[[], None]], Any]
    reload: Callable[[str], Any]
    copy: Callable[[Any], Path | None]
    remove_copy: Callable[[Path], None]
    wait_staged: Callable[[], None]
    follow: Callable[[Any], Any]
    round_before: Callable[[int], int | None]
    step_of: Callable[[int], int | None]
    saves: Callable[[], Sequence[int]]
    asked_to_stop: Callable[[], str]
    enter: Callable[[RankActivity], None]

    def round_for(self, wanted: Rewind) -> int | None:
        """Return the round to go back to for a rewind; None if no checkpoint is early enough. Collective.

        It is round 0, the initial values, for a rewind without a checkpoint that may start anew.
        """
        round = self.round_before(wanted.to_step)
        if round is None and wanted.latest_step is not None:
            round = self.round_before(wanted.latest_step)
        return 0 if round is None and wanted.may_start_anew else round

    def possible(self, verdict: Verdict) -> Verdict:
        """Return the verdict; for a rewind without an early enough checkpoint a stop, or to carry on where it
        says so. Collective.
        """
        if not isinstance(verdict, Rewind) or self.round_for(verdict) is not None:
            return verdict
        reason = f"{verdict.reason}; no checkpoint of a round is early enough to go back to"
        if verdict.may_go_on:
            log.warning("%s: the run goes on", reason)
            return CarryOn(judged_step=verdict.judged_step)
        return Stop(judged_step=verdict.judged_step, reason=reason, failed=True)
