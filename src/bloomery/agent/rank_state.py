"""The state of a peer's ranks as their messages tell it, and whether each rank makes progress.

`LocalRanks` puts the messages together: what the peer as a whole holds, offers and has reduced.
`RankProgress` has a deadline for each phase, by this machine's monotonic clock. The lease shows that the
agent lives; these deadlines show that its ranks do what they say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import msgspec

from bloomery.agent.rank_server import Gone, Heard
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
    StateHeld,
    StateRefused,
)
from bloomery.protocol.records import Ready

_REMEMBERED = 32
_WORKING = ("start", "compile", "step", "evaluate", "offer", "save")
"""Phases with a deadline; in all others a rank waits for others, who have their own."""


@dataclass
class _Pace:
    """What one rank does.

    phase, step: as it said last.
    since: when it last sent anything new.
    begun: when its phase began.
    asked: since when it has something to do though its phase is one of waiting; None while it has nothing to
        do.
    copies: seconds of its last copies of the state for newcomers.
    seconds: of its last steps.
    """

    phase: str
    step: int
    since: float
    begun: float
    asked: float | None = None
    copies: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class RankProgress:
    """Tells which of a peer's ranks make no progress. All moments are of the monotonic clock, in seconds."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._paces: dict[int, _Pace] = {}

    def note(self, rank: int, phase: str, *, step: int, now: float) -> None:
        """A rank said what it does."""
        pace = self._paces.get(rank)
        if pace is None:
            self._paces[rank] = _Pace(phase, step, now, now)
            return
        if phase == pace.phase == "step" and step == pace.step + 1:
            pace.seconds.append(now - pace.since)
        if pace.phase == "offer" != phase:
            pace.copies.append(now - pace.begun)
        if phase != pace.phase:
            pace.begun = now
        pace.phase, pace.step, pace.since = phase, step, now
        if pace.asked is not None:  # what it was told lies behind what it does before that
            pace.asked = now if phase in ("offer", "save", "wait") else None

    def touch(self, rank: int, *, now: float, answers: bool) -> None:
        """A rank said anything else: it moves. answers: what it was told to do is done."""
        pace = self._paces.get(rank)
        if pace is not None:
            pace.since = now
            pace.asked = None if answers or pace.asked is None else now

    def expect(self, *, now: float) -> None:
        """Whoever waits has something to do now: said once, and again it changes nothing."""
        for pace in self._paces.values():
            if pace.asked is None:
                pace.asked = now

    def satisfied(self) -> None:
        """What all were expected to do is done; they wait for others again."""
        for pace in self._paces.values():
            pace.asked = None

    def usual_step_s(self) -> float:
        """The slowest rank's median step; 0 while none is known."""
        return max((median(pace.seconds) for pace in self._paces.values() if pace.seconds), default=0.0)

    def forget(self, rank: int) -> None:
        """A rank is gone."""
        self._paces.pop(rank, None)

    def stuck(self, now: float) -> dict[int, str]:
        """Ranks past their deadline, and what they were doing."""
        return {
            rank: f"{pace.phase} {pace.step} for {now - pace.since:.0f} s"
            for rank, pace in sorted(self._paces.items())
            if now > self._due(pace)
        }

    def next_deadline(self) -> float | None:
        """When somebody would be stuck; None while all wait for others."""
        moments = [self._due(pace) for pace in self._paces.values()]
        return min((moment for moment in moments if moment != float("inf")), default=None)

    def _due(self, pace: _Pace) -> float:
        """When it will have been still for too long."""
        if pace.phase not in _WORKING:
            return float("inf") if pace.asked is None else pace.asked + self._timeouts.step_s
        return pace.since + self._allowed_s(pace)

    def _allowed_s(self, pace: _Pace) -> float:
        limits = self._timeouts
        match pace.phase:
            case "start":
                return limits.start_s
            case "compile":
                return limits.compile_s
            case "offer" if pace.copies:
                return step_deadline_s(limits, median(pace.copies))
            case "offer" | "save" | "evaluate":
                return limits.save_s
            case "step":
                # The first step of a run, and of a phase, may compile.
                usual = median(pace.seconds) if pace.seconds else 0.0
                return step_deadline_s(limits, usual) if usual else limits.compile_s
        raise AssertionError(f"{pace.phase} is no phase of work")


T = TypeVar("T")


@dataclass
class _Rank:
    holding: StateHeld | None = None
    refused: str | None = None
    ready: Ready | None = None
    done: RankRingDone | None = None
    failed: RankRingFailed | None = None
    heeded: int = 0
    leaves: str | None = None


@dataclass
class LocalRanks:
    """The messages of one peer's ranks, put together.

    world: how many ranks there are; None before the first Hello.
    gone: ranks whose connection is closed, each with the reason.
    reading: what the stream of samples is made of; empty before the first rank said it.
    """

    progress: RankProgress
    world: int | None = None
    gone: dict[int, str] = field(default_factory=dict)
    reading: dict[str, str] = field(default_factory=dict)
    """What the stream of samples is made of."""
    _ranks: dict[int, _Rank] = field(default_factory=dict)

    def take(self, event: Heard | Gone, *, now: float) -> None:
        """Take in what a rank said, or that it is gone."""
        if isinstance(event, Gone):
            self.gone[event.rank] = event.why
            self.progress.forget(event.rank)
            return
        rank = self._ranks.setdefault(event.rank, _Rank())
        if not isinstance(event.message, Moving):
            self.progress.touch(event.rank, now=now, answers=not isinstance(event.message, StateHeld))
        match event.message:
            case Hello(world=world):
                self.world = world
                self.progress.note(event.rank, "start", step=0, now=now)
            case Moving(phase=phase, step=step):
                self.progress.note(event.rank, phase, step=step, now=now)
            case StateHeld() | StateRefused() as word:
                _take_state(rank, word)
            case DataIdentity(identity=identity):
                self.reading = dict(identity)
            case RankReady(ready=ready):
                rank.ready = ready
            case RankRingDone() as done:
                rank.done = done
            case RankRingFailed() as failed:
                rank.failed = failed
            case AbortAck(epoch=epoch):
                rank.heeded = max(rank.heeded, epoch)
            case RankLeaves(why=why):
                rank.leaves = why

    @property
    def are_here(self) -> bool:
        """Whether every rank has said hello and lives."""
        return self.world is not None and len(self._ranks) == self.world and not self.gone

    @property
    def are_gone(self) -> bool:
        """Whether every rank that came has gone."""
        return bool(self._ranks) and set(self.gone) >= set(self._ranks)

    @property
    def leaves(self) -> str | None:
        """Why this peer leaves, once one of its ranks says so."""
        return next((one.leaves for one in self._ranks.values() if one.leaves is not None), None)

    @property
    def holding(self) -> StateHeld | None:
        """What every rank holds; None while they do not say the same."""
        found = self._all(lambda one: one.holding)
        if found is None or len({(one.round, one.digest) for one in found}) != 1:
            return None
        return msgspec.structs.replace(
            found[0], directory=next((one.directory for one in found if one.directory), None)
        )

    def take_refusal(self) -> str | None:
        """Why the ranks refused the state that they were told to load; once all did, and once."""
        found = self._all(lambda one: one.refused)
        if found is None:
            return None
        for rank in self._ranks.values():
            rank.refused = None
        return found[0]

    @property
    def ready(self) -> Ready | None:
        """The peer's part, once every rank has offered its own; a rank that is not finite spoils it."""
        found = self._all(lambda one: one.ready)
        if found is None or len({one.round for one in found}) != 1:
            return None
        return msgspec.structs.replace(found[0], finite=all(one.finite for one in found))

    def forget_states(self) -> None:
        """Let the peer hold no state until every rank has said again which one it holds."""
        for rank in self._ranks.values():
            rank.holding = None

    def forget_offers(self) -> None:
        """Let the peer be ready only once every rank has offered again."""
        for rank in self._ranks.values():
            rank.ready = None

    def digest_of(self, epoch: int) -> str | None:
        """The digest that all ranks had after a ring; "" where they differ; None while one is at it."""
        found = self._all(lambda one: one.done if one.done and one.done.epoch == epoch else None)
        if found is None:
            return None
        digests = {one.digest for one in found}
        return digests.pop() if len(digests) == 1 else ""

    def failure_of(self, epoch: int) -> RankRingFailed | None:
        """What the first rank to fail said; who names a culprit is heard before who does not."""
        found = [one.failed for one in self._ranks.values() if one.failed and one.failed.epoch == epoch]
        return min(found, key=lambda one: one.culprit is None, default=None)

    def have_let_go(self, epoch: int) -> bool:
        """Whether no rank uses the connections of a ring any more: it failed, ended, or was called off."""
        return self.are_here and all(
            one.heeded >= epoch
            or (one.failed is not None and one.failed.epoch >= epoch)
            or (one.done is not None and one.done.epoch >= epoch)
            for one in self._ranks.values()
        )

    def _all(self, what: Callable[[_Rank], T | None]) -> list[T] | None:
        if not self.are_here:
            return None
        found = [what(self._ranks[rank]) for rank in sorted(self._ranks)]
        return [one for one in found if one is not None] if None not in found else None


def _take_state(rank: _Rank, word: StateHeld | StateRefused) -> None:
    if isinstance(word, StateRefused):
        rank.refused = word.why
        return
    rank.holding = word
    rank.ready = None if rank.ready and rank.ready.round <= word.round else rank.ready
