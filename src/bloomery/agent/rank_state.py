"""Combines what the ranks of a peer have reported to its agent, and finds ranks that make no progress.

`LocalRanks` combines the messages of all ranks: what the peer as a whole holds, offers and has reduced.
`RankProgress` has a deadline for each activity, by this machine's monotonic clock. The lease shows only that
the agent lives; these deadlines show that its ranks make progress too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import msgspec

from bloomery.agent.rank_server import RankGone, RankSent
from bloomery.agent.timeouts import Timeouts, step_deadline_s
from bloomery.protocol.rank_messages import (
    AbortAck,
    DataIdentity,
    Hello,
    Moving,
    RankLeaves,
    RankReady,
    RankRingDone,
    RankRingFailed,
    StateCopied,
    StateHeld,
    StateRefused,
)
from bloomery.protocol.records import Ready

_REMEMBERED = 32
_NO_ANSWERS = (StateHeld, StateCopied)
"""Messages after which a rank has not yet carried out its agent's command."""
_WORKING = ("start", "compile", "step", "evaluate", "offer", "save")
"""Activities with a deadline. In the others a rank waits for ranks that have deadlines of their own."""


@dataclass
class _Pace:
    """What one rank does, and how fast. All moments are of the monotonic clock, in seconds.

    activity: the activity that the rank last reported.
    step: the step that the rank last reported.
    since: when the rank last sent a message.
    begun: when its activity began.
    asked: since when something is expected of it, which gives a waiting rank a deadline; None while
        nothing is.
    copies: how long its last copies of the state for joining peers took, seconds.
    seconds: how long its last steps took, seconds.
    """

    activity: str
    step: int
    since: float
    begun: float
    asked: float | None = None
    copies: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class RankProgress:
    """Finds the ranks of a peer that make no progress. All moments are of the monotonic clock, in seconds."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._paces: dict[int, _Pace] = {}

    def note(self, rank: int, activity: str, *, step: int, now: float) -> None:
        """Note that a rank reported its activity and its step."""
        pace = self._paces.get(rank)
        if pace is None:
            self._paces[rank] = _Pace(activity, step, now, now)
            return
        if activity == pace.activity == "step" and step == pace.step + 1:
            pace.seconds.append(now - pace.since)
        if pace.activity == "offer" != activity:
            pace.copies.append(now - pace.begun)
        if activity != pace.activity:
            pace.begun = now
        pace.activity, pace.step, pace.since = activity, step, now
        if (
            pace.asked is not None
        ):  # these activities come before the work that it was told to do, so it has not begun that
            pace.asked = now if activity in ("offer", "save", "wait") else None

    def touch(self, rank: int, *, now: float, answers: bool) -> None:
        """Note that a rank sent another message. answers: whether it has now done what it was told to do."""
        pace = self._paces.get(rank)
        if pace is not None:
            pace.since = now
            pace.asked = None if answers or pace.asked is None else now

    def expect(self, *, now: float) -> None:
        """Note that every rank has something to do now, so that a waiting rank has a deadline too.

        A second call does not extend the deadline.
        """
        for pace in self._paces.values():
            if pace.asked is None:
                pace.asked = now

    def satisfied(self) -> None:
        """Note that all ranks have done what was expected of them, so that they may wait for others again."""
        for pace in self._paces.values():
            pace.asked = None

    def usual_step_s(self) -> float:
        """Return the slowest rank's median step, in seconds; 0.0 while no step is known."""
        return max((median(pace.seconds) for pace in self._paces.values() if pace.seconds), default=0.0)

    def forget(self, rank: int) -> None:
        """Drop a rank that is gone."""
        self._paces.pop(rank, None)

    def stuck(self, now: float) -> dict[int, str]:
        """Return the ranks that are past their deadline, each with what it was doing and for how long."""
        return {
            rank: f"{pace.activity} {pace.step} for {now - pace.since:.0f} s"
            for rank, pace in sorted(self._paces.items())
            if now > self._due(pace)
        }

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of a rank; None while all ranks wait for others."""
        moments = [self._due(pace) for pace in self._paces.values()]
        return min((moment for moment in moments if moment != float("inf")), default=None)

    def _due(self, pace: _Pace) -> float:
        """Return the deadline of a rank; infinity while it waits for others."""
        if pace.activity not in _WORKING:
            return float("inf") if pace.asked is None else pace.asked + self._timeouts.step_s
        return pace.since + self._allowed_s(pace)

    def _allowed_s(self, pace: _Pace) -> float:
        limits = self._timeouts
        match pace.activity:
            case "start":
                return limits.start_s
            case "compile":
                return limits.compile_s
            case "offer" if pace.copies:
                return step_deadline_s(limits, median(pace.copies))
            case "offer" | "save" | "evaluate":
                return limits.save_s
            case "step":
                # Without a median this may be the first step, which may compile the model.
                usual = median(pace.seconds) if pace.seconds else 0.0
                return step_deadline_s(limits, usual) if usual else limits.compile_s
        raise AssertionError(f"{pace.activity} is no activity with a deadline")


T = TypeVar("T")


@dataclass
class _Rank:
    holding: StateHeld | None = None
    refused: str | None = None
    copied: list[StateCopied] = field(default_factory=list)
    ready: Ready | None = None
    done: RankRingDone | None = None
    failed: RankRingFailed | None = None
    acknowledged_epoch: int = 0
    leaves: str | None = None


@dataclass
class LocalRanks:
    """What the ranks of one peer have reported, combined.

    progress: the deadlines of these ranks.
    world: how many ranks there are; None before the first Hello.
    gone: the ranks whose connection is closed, each with the reason.
    reading: what identifies the stream of samples; empty until a rank has reported it.
    """

    progress: RankProgress
    world: int | None = None
    gone: dict[int, str] = field(default_factory=dict)
    reading: dict[str, str] = field(default_factory=dict)
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _newest_start: int = 0

    def take(self, event: RankSent | RankGone, *, now: float) -> None:
        """Note a message of a rank, or that the rank is gone."""
        if isinstance(event, RankGone):
            self.gone[event.rank] = event.why
            self.progress.forget(event.rank)
            return
        rank = self._ranks.setdefault(event.rank, _Rank())
        if not isinstance(event.message, Moving):
            self.progress.touch(event.rank, now=now, answers=not isinstance(event.message, _NO_ANSWERS))
        match event.message:
            case Hello(world=world):
                self.world = world
                self.progress.note(event.rank, "start", step=0, now=now)
            case Moving(activity=activity, step=step):
                self.progress.note(event.rank, activity, step=step, now=now)
            case StateHeld() | StateRefused() | StateCopied() as report:
                _take_state(rank, report)
            case DataIdentity(identity=identity):
                self.reading = dict(identity)
            case RankReady(ready=ready, number=number) if number == self._newest_start:
                rank.ready = ready  # with an earlier number it was offered before the round began again
            case RankRingDone() as done:
                rank.done = done
            case RankRingFailed() as failed:
                rank.failed = failed
            case AbortAck(epoch=epoch):
                rank.acknowledged_epoch = max(rank.acknowledged_epoch, epoch)
            case RankLeaves(why=why):
                rank.leaves = why

    @property
    def are_here(self) -> bool:
        """Return whether all ranks have sent their Hello and none is gone."""
        return self.world is not None and len(self._ranks) == self.world and not self.gone

    @property
    def are_gone(self) -> bool:
        """Return whether at least one rank has connected, and all that did are gone."""
        return bool(self._ranks) and set(self.gone) >= set(self._ranks)

    @property
    def leaves(self) -> str | None:
        """Return why this peer leaves, if one of its ranks said so; else None."""
        return next((rank.leaves for rank in self._ranks.values() if rank.leaves is not None), None)

    @property
    def holding(self) -> StateHeld | None:
        """Return the state that all ranks hold; None unless all have reported the same."""
        states = self._all(lambda rank: rank.holding)
        if states is None or len({(state.round, state.digest) for state in states}) != 1:
            return None
        return states[0]

    def take_copies(self) -> list[StateCopied]:
        """Return the copies of states that the ranks have reported since the last call."""
        copies = [copy for rank in self._ranks.values() for copy in rank.copied]
        for rank in self._ranks.values():
            rank.copied.clear()
        return copies

    def take_refusal(self) -> str | None:
        """Return why the ranks refused the state that they were to load, once all have; then forget it."""
        reasons = self._all(lambda rank: rank.refused)
        if reasons is None:
            return None
        for rank in self._ranks.values():
            rank.refused = None
        return reasons[0]

    @property
    def ready(self) -> Ready | None:
        """Return the peer's part of a round once all ranks have offered theirs; finite if all of them are."""
        offers = self._all(lambda rank: rank.ready)
        if offers is None or len({offer.round for offer in offers}) != 1:
            return None
        return msgspec.structs.replace(offers[0], finite=all(offer.finite for offer in offers))

    def forget_states(self) -> None:
        """Forget what the ranks hold: `holding` is None until all ranks have reported it again."""
        for rank in self._ranks.values():
            rank.holding = None

    def next_start(self) -> int:
        """Return the number of the next StartRound: `ready` is None until all ranks have answered that."""
        self._newest_start += 1
        for rank in self._ranks.values():
            rank.ready = None
        return self._newest_start

    def digest_of(self, epoch: int) -> str | None:
        """Return the digest of all ranks after a ring; "" if theirs differ; None until all are done."""
        results = self._all(lambda rank: rank.done if rank.done and rank.done.epoch == epoch else None)
        if results is None:
            return None
        digests = {result.digest for result in results}
        return digests.pop() if len(digests) == 1 else ""

    def failure_of(self, epoch: int) -> RankRingFailed | None:
        """Return a rank's failure in a ring, if possible one that names a culprit; None if none failed."""
        failures = [
            rank.failed for rank in self._ranks.values() if rank.failed and rank.failed.epoch == epoch
        ]
        return min(failures, key=lambda failure: failure.culprit is None, default=None)

    def have_stopped_reducing(self, epoch: int) -> bool:
        """Return whether no rank uses a ring's connections any more: it ended, failed or was aborted."""
        return self.are_here and all(
            rank.acknowledged_epoch >= epoch
            or (rank.failed is not None and rank.failed.epoch >= epoch)
            or (rank.done is not None and rank.done.epoch >= epoch)
            for rank in self._ranks.values()
        )

    def _all(self, what: Callable[[_Rank], T | None]) -> list[T] | None:
        if not self.are_here:
            return None
        reports = [what(self._ranks[rank]) for rank in sorted(self._ranks)]
        return [report for report in reports if report is not None] if None not in reports else None


def _take_state(rank: _Rank, word: StateHeld | StateRefused | StateCopied) -> None:
    if isinstance(word, StateCopied):
        rank.copied.append(word)
        return
    if isinstance(word, StateRefused):
        rank.refused = word.why
        return
    rank.holding = word
    rank.ready = None if rank.ready and rank.ready.round <= word.round else rank.ready
