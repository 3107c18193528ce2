"""Peers of one process that meet in memory: the decisions of parents and coordinator, without either.

Each peer is a thread with its own run directory; the average is plain arithmetic, or rings over socket pairs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec
from tests.diloco.memory_rings import DEADLINE_S, Table, TableRing, connected
from tests.protocol import example

from bloomery.config.elastic import ElasticSection
from bloomery.config.load import LoadedRecipe
from bloomery.coordination.eligibility import norm_limit
from bloomery.data.position import Position, Ranges, SampleShare, lease, merged, total, within
from bloomery.diloco.all_reduce import RingConnections, WireRings
from bloomery.events.run_directory import RunDirectory
from bloomery.plan.schedule import total_samples
from bloomery.protocol.rank_messages import (
    Abort,
    AgentMessage,
    CatchUp,
    Committed,
    CopyState,
    KeepAverage,
    Reduce,
    ReplaceState,
    StartRound,
    StopTraining,
)
from bloomery.protocol.records import Attempt, Commit, Ready, RoundShares
from bloomery.train.loop import train
from bloomery.train.peering import Peering
from bloomery.train.settings import StartOptions
from bloomery.train.state import TrainingOutcome


@dataclass(kw_only=True)
class Held:
    """What a peer says it holds."""

    digest: str
    directory: Path | None
    samples: int


@dataclass(kw_only=True)
class Meeting:
    """What all peers see. names: those that begin it together."""

    section: ElasticSection
    samples: int
    names: tuple[str, ...]
    lock: threading.RLock = field(default_factory=threading.RLock)
    parents: dict[str, MemoryParent] = field(default_factory=dict)
    known: dict[str, MemoryParent] = field(default_factory=dict)
    """Parents, and those of peers that left."""
    held: dict[str, Held] = field(default_factory=dict)
    ready: dict[str, Ready] = field(default_factory=dict)
    done: dict[str, str] = field(default_factory=dict)
    kept: dict[str, Ranges] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)
    shares: RoundShares | None = None
    attempt: Attempt | None = None
    epoch: int = 0
    spent: list[range] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)
    leases: dict[str, tuple[int, Ranges]] = field(default_factory=dict)
    """What those who left had; they get it again if they are back within the round."""
    left_out: dict[str, str] = field(default_factory=dict)
    deadline_s: float = DEADLINE_S
    wired: bool = False
    """Whether the average is made by native rings, with the recipe's codec."""
    awaited: dict[int, str] = field(default_factory=dict)
    """Peers, each one letter, without whom this round is not decided, so that none is late by chance."""
    before_go: Callable[[Meeting, str], None] = lambda meeting, name: None
    before_reduce: Callable[[Meeting, Attempt], None] = lambda meeting, attempt: None
    before_replace: Callable[[Path], Path] = lambda directory: directory
    """What a peer is given instead of another's checkpoint."""
    when_copied: Callable[[str, Path], None] = lambda digest, directory: None
    averages: Path | None = None
    """Where averages are kept for those who missed a round; None: they get a whole state."""
    disturb: Callable[[str, Attempt], bool] = lambda name, attempt: False
    """Whether this member's ring fails in this attempt."""

    def peer(self, name: str) -> MemoryParent:
        self.known[name] = self.parents[name] = MemoryParent(self, name)
        return self.parents[name]

    def gone(self, name: str) -> None:
        """A peer that left or died: everybody sees it."""
        with self.lock:
            was_member = self.shares is not None and name in self.shares.shares
            for known in (self.parents, self.held, self.ready):
                known.pop(name, None)
            if self.shares is not None and was_member:
                self.leases[name] = self.shares.round, self.shares.shares[name]
                left = {peer: share for peer, share in self.shares.shares.items() if peer != name}
                self.shares = msgspec.structs.replace(self.shares, shares=left)
            if self.attempt is not None and name in self.attempt.members:
                self.abort(f"{name} is gone")
            elif was_member:
                self.propose()

    def copied(self, name: str, digest: str, directory: Path | None) -> None:
        """A copy for those who wait for a state."""
        with self.lock:
            if directory is not None:
                self.when_copied(digest, directory)
            if name in self.held and self.held[name].digest == digest:
                self.held[name].directory = directory
            for peer in sorted(self.waiting):
                self.go(peer)

    def holds(self, name: str, digest: str, samples: int) -> None:
        with self.lock:
            self.held[name] = Held(digest=digest, directory=None, samples=samples)
            if not self.commits:
                if set(self.held) >= set(self.names):
                    first = self.held[min(self.held)]
                    self.commit(
                        example.commit(
                            round=0, epoch=0, members=(), digest=first.digest, position=Position(), sources=()
                        )
                    )
                    for peer in sorted(self.held):
                        self.go(peer)
                return
            self.go(name)
            for peer in sorted(self.waiting):
                self.go(peer)

    def go(self, name: str) -> None:
        """Send a peer into the round under way, or to somebody's state."""
        newest, held = self.commits[-1], self.held[name]
        if self.section.quorum:  # each missed round is made up for in turn
            rounds = {commit.digest: commit.round for commit in self.commits}
            newest = self.commits[min(rounds.get(held.digest, -1) + 1, len(self.commits) - 1)]
        self.waiting.discard(name)
        average = self.average_of(newest)
        behind = held.directory is None or self.section.quorum
        if held.digest != newest.digest and average is not None and behind:
            position = newest.position
            self.tell(
                name, CatchUp(round=newest.round, digest=newest.digest, position=position, file=average)
            )
            return
        if held.digest != newest.digest:
            sources = [h for h in self.held.values() if h.digest == newest.digest and h.directory is not None]
            if sources:
                directory = sources[0].directory
                self.tell(
                    name,
                    ReplaceState(
                        round=newest.round,
                        digest=newest.digest,
                        position=newest.position,
                        directory=self.before_replace(directory),
                        why="another state",
                    ),
                )
            else:
                self.waiting.add(name)
                for peer, other in self.held.items():
                    if other.digest == newest.digest:
                        self.tell(peer, CopyState(keep=(newest.digest,), makes=newest.digest))
            return
        if self.is_done(newest.position):
            return
        assert self.shares is not None
        if name not in self.shares.shares:
            round, samples = self.leases.pop(name, (0, ()))
            if round != self.shares.round:
                count = held.samples * self.section.leased_steps
                outstanding = [SampleShare(lease=self.shares.position.holes)]
                (share,), position = lease(self.shares.position, samples=[count], outstanding=outstanding)
                samples = share.lease or ()
                self.shares = msgspec.structs.replace(self.shares, position=position)
            shares = {**self.shares.shares, name: samples}
            self.shares = msgspec.structs.replace(self.shares, shares=shares, live=len(shares))
        self.before_go(self, name)
        self.tell(
            name,
            StartRound(
                round=self.shares.round,
                position=self.shares.position,
                live=self.shares.live,
                samples=self.shares.shares[name],
                number=0,
            ),
        )

    def average_of(self, commit: Commit) -> Path | None:
        """The average of a round that somebody missed, once one of those who were in it has written it."""
        path = self.averages / commit.digest if self.averages is not None else None
        if path is None or set(commit.members) >= set(self.parents) or not commit.members:
            return None
        until = time.monotonic() + DEADLINE_S
        while not path.exists():
            assert time.monotonic() < until, f"nobody keeps the average of round {commit.round}"
            time.sleep(0.01)
        return path

    def commit(self, commit: Commit) -> None:
        self.commits.append(commit)
        self.kept = {name: ready.kept for name, ready in self.ready.items()}
        self.ready, self.done, self.attempt = {}, {}, None
        if self.is_done(commit.position):
            return
        present = sorted(name for name in self.held if name in self.parents)
        kept = {name: self.kept.get(name, ()) for name in present if name in commit.members}
        counts = [
            self.held[name].samples * self.section.leased_steps - total(kept.get(name, ()))
            for name in present
        ]
        outstanding = [SampleShare(lease=pieces) for pieces in kept.values()]
        late = self.late(commit)
        outstanding += [SampleShare(lease=pieces) for pieces in late.values()]
        shares, position = lease(
            commit.position, samples=[*counts, *(0 for _ in late)], outstanding=outstanding
        )
        shares = shares[: len(present)]
        self.shares = RoundShares(
            round=commit.round + 1,
            position=position,
            shares={
                name: merged((*kept.get(name, ()), *(share.lease or ())))
                for name, share in zip(present, shares, strict=True)
            }
            | late,
            live=len(present) + len(late),
        )

    def late(self, commit: Commit) -> dict[str, Ranges]:
        """Shares of those who go on with their steps after an asynchronous round without them."""
        if not self.section.quorum or self.shares is None or not commit.members:
            return {}
        outside = set(self.shares.shares) & set(self.parents) - set(commit.members) - set(commit.left_out)
        return {name: within(self.shares.shares[name], commit.position.holes) for name in sorted(outside)}

    def is_done(self, position: Position) -> bool:
        return position.consumed >= self.samples

    def offer(self, name: str, ready: Ready) -> None:
        """Take a part of the round under way; one of a round that was decided meanwhile is of no use."""
        with self.lock:
            if self.shares is None or ready.round != self.shares.round:
                return
            self.ready[name] = ready
            if self.attempt is None:
                self.propose()

    def propose(self) -> None:
        """Begin an attempt when everybody who has a share is ready."""
        if self.shares is None or not self.shares.shares:
            return
        quorum = min(self.section.quorum or len(self.shares.shares), len(self.shares.shares))
        if len(set(self.ready) & set(self.shares.shares)) < quorum:
            return
        if not set(self.awaited.get(self.shares.round, "")) <= self.shares.shares.keys():
            return
        backs = [ready for ready in self.ready.values() if ready.rewind_to is not None]
        if backs:
            self.rewind(min(backs, key=lambda ready: ready.rewind_to or 0))
            return
        norms = [ready.norm for ready in self.ready.values() if ready.finite]
        for name, ready in self.ready.items():
            if not ready.finite:
                self.left_out[name] = "not finite"
            elif len(norms) >= 3 and ready.norm > self.section.outlier_factor * median(norms):
                self.left_out[name] = "an outlier"
        members = tuple(sorted(name for name in self.ready if name not in self.left_out))
        tokens = [self.ready[name].weight_tokens for name in members]
        self.epoch += 1
        self.attempt = example.attempt(
            round=self.shares.round,
            epoch=self.epoch,
            members=members,
            weights=tuple(count / sum(tokens) for count in tokens),
            left_out=dict(self.left_out),
        )
        self.before_reduce(self, self.attempt)
        self.done = {}
        table = self.table(self.attempt)
        hops = connected(len(members)) if self.wired else [()] * len(members)
        for index, name in enumerate(members):
            parent = self.parents[name]
            parent.tables[self.epoch] = table
            self.tell(
                name,
                Reduce(
                    attempt=self.attempt,
                    index=index,
                    hops=hops[index],
                    stall_s=60.0,
                    deadline_s=120.0,
                    norm_limit=norm_limit(self.attempt, self.ready),
                ),
            )

    def table(self, attempt: Attempt) -> Table:
        return Table(attempt, lambda name: self.disturb(name, attempt))

    def rewind(self, asking: Ready) -> None:
        assert asking.rewind_to is not None and self.shares is not None
        old = next(commit for commit in self.commits if commit.round == asking.rewind_to)
        position = old.position
        for skip in asking.skip:
            position = position.skipping(skip)
        self.decide(
            example.commit(
                round=self.shares.round,
                epoch=self.epoch,
                members=(),
                digest=old.digest,
                position=position,
                sources=(),
                rewind_to=asking.rewind_to,
                rung=asking.rung,
                why=asking.why,
            )
        )

    def reduced(self, name: str, epoch: int, digest: str) -> None:
        with self.lock:
            if self.attempt is None or epoch != self.attempt.epoch:
                return
            self.done[name] = digest
            if set(self.done) < set(self.attempt.members):
                return
            assert len(set(self.done.values())) == 1, self.done
            assert self.shares is not None
            readies = [self.ready[member] for member in self.attempt.members]
            spent = merged(piece for ready in readies for piece in ready.spent)
            self.spent += spent
            position = self.commits[-1].position
            given = merged(piece for piece in self.shares.position.holes)
            position = Position(consumed=position.consumed, skips=position.skips, holes=given).after(spent)
            for ready in readies:
                for skip in ready.skip:
                    position = position.skipping(skip)
            self.decide(
                example.commit(
                    round=self.attempt.round,
                    epoch=epoch,
                    members=self.attempt.members,
                    digest=digest,
                    position=position,
                    sources=self.attempt.members,
                    left_out=self.attempt.left_out,
                    save=any(ready.wants_save for ready in readies),
                )
            )

    def decide(self, commit: Commit) -> None:
        self.left_out = {}
        outside = {name for name in self.parents if commit.members and name not in commit.members}
        digests = {name: self.held[name].digest for name in outside if name in self.held}
        samples = {name: self.held.pop(name).samples for name in outside if name in self.held}
        self.commit(commit)
        for name in commit.members if outside and self.averages is not None else ():
            file = self.averages / commit.digest
            self.tell(name, KeepAverage(epoch=commit.epoch, digest=commit.digest, file=file))
        for name in sorted(self.parents):
            self.tell(name, Committed(commit=commit, included=name in commit.members))
        for name, count in samples.items():
            digest = digests[name] if self.section.quorum else ""
            self.held[name] = Held(digest=digest, directory=None, samples=count)
            self.waiting.add(name)

    def abort(self, why: str) -> None:
        """End the attempt and try again with those who are left."""
        assert self.attempt is not None
        epoch, members, self.attempt = self.attempt.epoch, self.attempt.members, None
        for name in members:
            if name in self.parents:
                self.tell(name, Abort(epoch=epoch, why=why))
        self.propose()

    def halt(self, why: str) -> None:
        for name in self.parents:
            self.tell(name, StopTraining(why=why, failed=False))

    def tell(self, name: str, told: AgentMessage) -> None:
        self.parents[name].say(told)


class MemoryParent:
    """Implements `AgentHandle` for one peer of one rank."""

    def __init__(self, meeting: Meeting, name: str) -> None:
        self.meeting, self.name = meeting, name
        self._rings = WireRings(meeting.section)
        self.tables: dict[int, Table] = {}
        self.phases: list[str] = []
        self.refusals: list[str] = []
        self.tells: list[tuple[int, Position | None, tuple[int, ...]]] = []
        self.spoils = False
        self._told: deque[AgentMessage] = deque()
        self._arrived = threading.Condition()

    def say(self, told: AgentMessage) -> None:
        with self._arrived:
            self._told.append(told)
            self._arrived.notify_all()

    def ring(self, reduce: Reduce) -> RingConnections:
        if self.meeting.wired:
            return self._rings(reduce)
        return TableRing(self.tables[reduce.attempt.epoch], reduce.index)

    def report_activity(self, phase: str, *, step: int) -> None:
        self.phases.append(phase)

    def report_state(
        self,
        *,
        round: int,
        digest: str,
        step: int,
        samples: int,
        position: Position | None,
        saves: Sequence[int],
    ) -> None:
        self.tells.append((round, position, tuple(saves)))
        self.meeting.holds(self.name, digest, samples)

    def report_copy(self, *, round: int, digest: str, directory: Path | None) -> None:
        self.meeting.copied(self.name, digest, directory)

    def report_data_identity(self, identity: Mapping[str, str]) -> None:
        self.identity = dict(identity)

    def refuse_state(self, why: str) -> None:
        self.refusals.append(why)

    def offer_part(self, ready: Ready, *, number: int) -> None:
        if self.spoils:
            self.spoils, ready = False, msgspec.structs.replace(ready, finite=False, norm=None)
        self.meeting.offer(self.name, ready)

    def report_ring_done(self, *, epoch: int, digest: str) -> None:
        self.meeting.reduced(self.name, epoch, digest)

    def report_ring_failed(self, *, epoch: int, kind: str, culprit: str | None, why: str) -> None:
        with self.meeting.lock:
            if self.meeting.attempt is not None and self.meeting.attempt.epoch == epoch:
                self.meeting.abort(why)

    def leave(self, why: str) -> None:
        self.meeting.gone(self.name)
        self.say(StopTraining(why=why, failed=False))

    def receive(self, timeout_s: float) -> AgentMessage | None:
        with self._arrived:
            self._arrived.wait_for(lambda: self._told, timeout_s)
            return self._told.popleft() if self._told else None

    def peek(self) -> Sequence[AgentMessage]:
        with self._arrived:
            return tuple(self._told)


def meeting_of(loaded: LoadedRecipe, names: Sequence[str]) -> Meeting:
    recipe = loaded.recipe
    samples = total_samples(recipe.train, sequence_length=recipe.data.sequence_length)
    return Meeting(section=recipe.elastic, samples=samples, names=tuple(names))


def train_peers(
    meeting: Meeting, starts: Mapping[str, tuple[LoadedRecipe, Path]]
) -> dict[str, TrainingOutcome]:
    """Train every peer in a thread of its own; what one raises is raised here."""
    threads = [Peer(meeting, name, *start) for name, start in starts.items()]
    for thread in threads:
        thread.start()
    return outcomes(meeting, threads)


def outcomes(meeting: Meeting, threads: Sequence[Peer]) -> dict[str, TrainingOutcome]:
    """How peers that were started ended."""
    for thread in threads:
        thread.join(meeting.deadline_s)
        if thread.is_alive():
            meeting.halt("the test is over")
            raise TimeoutError(f"{thread.name} does not end")
    return {thread.name: thread.result() for thread in threads}


class Peer(threading.Thread):
    """One peer: `train` with a parent in memory."""

    def __init__(self, meeting: Meeting, name: str, loaded: LoadedRecipe, path: Path) -> None:
        super().__init__(name=name, daemon=True)
        self.meeting, self.loaded, self.path = meeting, loaded, path
        self.outcome: TrainingOutcome | None = None
        self.failure: BaseException | None = None

    def run(self) -> None:
        parent = self.meeting.peer(self.name)
        peering = Peering(agent=parent, rings=parent.ring, name=self.name)
        try:
            options = StartOptions(say=lambda line: None, peering=peering)
            self.outcome = train(self.loaded, RunDirectory(self.path), options)
        except BaseException as failure:  # noqa: BLE001  — raised again in `result`
            self.failure = failure
            self.meeting.gone(self.name)

    def result(self) -> TrainingOutcome:
        if self.failure is not None:
            raise self.failure
        assert self.outcome is not None
        return self.outcome
