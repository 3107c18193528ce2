"""What the ranks of this peer said, put together: what the peer as a whole holds, offers and has reduced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from bloomery.elastic.peer.handoff import Gone, Heard
from bloomery.elastic.peer.messages import Heeded, Hello, Holding, Leave, Moving, RingDone, RingFailed
from bloomery.elastic.peer.progress import Progress
from bloomery.elastic.records import Ready

T = TypeVar("T")


@dataclass
class _Rank:
    holding: Holding | None = None
    ready: Ready | None = None
    done: RingDone | None = None
    failed: RingFailed | None = None
    heeded: int = 0
    leaves: str | None = None


@dataclass
class LocalRanks:
    """The ranks of one peer. world: how many there are; None before the first said hello."""

    progress: Progress
    world: int | None = None
    gone: dict[int, str] = field(default_factory=dict)
    _ranks: dict[int, _Rank] = field(default_factory=dict)

    def take(self, event: Heard | Gone, *, now: float) -> None:
        """Take in what a rank said, or that it is gone."""
        if isinstance(event, Gone):
            self.gone[event.rank] = event.why
            self.progress.forget(event.rank)
            return
        rank = self._ranks.setdefault(event.rank, _Rank())
        if not isinstance(event.message, Moving):
            self.progress.touch(event.rank, now=now, answers=not isinstance(event.message, Holding))
        match event.message:
            case Hello(world=world):
                self.world = world
                self.progress.note(event.rank, "start", step=0, now=now)
            case Moving(phase=phase, step=step):
                self.progress.note(event.rank, phase, step=step, now=now)
            case Holding() as holding:
                rank.holding = holding
                rank.ready = None if rank.ready and rank.ready.round <= holding.round else rank.ready
            case Ready() as ready:
                rank.ready = ready
            case RingDone() as done:
                rank.done = done
            case RingFailed() as failed:
                rank.failed = failed
            case Heeded(epoch=epoch):
                rank.heeded = max(rank.heeded, epoch)
            case Leave(why=why):
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
    def holding(self) -> Holding | None:
        """What every rank holds; None while they do not say the same."""
        found = self._all(lambda one: one.holding)
        if found is None or len({(one.round, one.digest) for one in found}) != 1:
            return None
        return replace(found[0], directory=next((one.directory for one in found if one.directory), None))

    @property
    def ready(self) -> Ready | None:
        """The peer's part, once every rank has offered its own; a rank that is not finite spoils it."""
        found = self._all(lambda one: one.ready)
        if found is None or len({one.round for one in found}) != 1:
            return None
        return replace(found[0], finite=all(one.finite for one in found))

    def digest_of(self, epoch: int) -> str | None:
        """The digest that all ranks had after a ring; "" where they differ; None while one is at it."""
        found = self._all(lambda one: one.done if one.done and one.done.epoch == epoch else None)
        if found is None:
            return None
        digests = {one.digest for one in found}
        return digests.pop() if len(digests) == 1 else ""

    def failure_of(self, epoch: int) -> RingFailed | None:
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
