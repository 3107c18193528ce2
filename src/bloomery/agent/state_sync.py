"""Brings a peer that is behind to the run's state: fetches missed rounds' averages, or a whole checkpoint.

A round's average is of 4 bytes a parameter (of the fragment), and a state of about 20. So who missed a few
rounds fetches their averages, and computes the states that follow (`diloco/kept_states.py`).
"""

from __future__ import annotations

import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bloomery.agent.agent_context import FetchAverage, FetchState
from bloomery.agent.rank_server import RankServer
from bloomery.agent.state_serving import following
from bloomery.coordination.snapshot import ListedMember, RunSnapshot
from bloomery.errors import BloomeryError, reporting_errors
from bloomery.protocol.rank_messages import CatchUp, ReplaceState
from bloomery.protocol.records import Commit
from bloomery.state_transfer.averages import SOURCES
from bloomery.state_transfer.served_states import ServedStates, average_file
from bloomery.state_transfer.source import THROUGH_RELAY, PeerSource

log = logging.getLogger(__name__)


def missed_rounds(
    snapshot: RunSnapshot, *, me: str, round: int, digest: str, overtaken: int, at_most: int
) -> tuple[Commit, ...]:
    """Return the commits after a round up to the newest, whose averages lead from its state to the run's.

    () if that is not possible, or if there is none. The members of a round keep its average for a peer that
    was listed then and was not in it, so only rounds that were committed since this peer came count.

    me: the name of this peer.
    round, digest: the state that it holds, or is fetching.
    overtaken: how many rounds were committed without this peer since it came, or was last in one.
    at_most: how many averages a peer keeps.
    """
    base = snapshot.commits.get(round)
    count = snapshot.round - 1 - round
    if base is None or base.digest != digest or not 0 < count <= min(overtaken, at_most):
        return ()
    commits = [snapshot.commits.get(round + number) for number in range(1, count + 1)]
    missed = [commit for commit in commits if commit is not None and _has_average(commit, me)]
    return tuple(missed) if len(missed) == count else ()


def _has_average(commit: Commit, me: str) -> bool:
    return commit.rewind_to is None and bool(commit.members) and me not in commit.members


class KeptAverages:
    """The averages of the newest rounds that a listed peer was not in, in a directory of this peer's run.

    directory: where the ranks write them; what an earlier process left there is removed.
    states: serves them.
    fetch: fetches those of rounds that this peer was not in.
    at_most: of how many rounds they are kept; 0 keeps none, and this peer fetches none.
    """

    def __init__(self, directory: Path, states: ServedStates, fetch: FetchAverage, *, at_most: int) -> None:
        self._directory, self._states, self._at_most = directory, states, at_most
        self.fetch = fetch
        self._kept: list[str] = []
        shutil.rmtree(directory, ignore_errors=True)

    @property
    def at_most(self) -> int:
        """Of how many rounds averages are kept, here as on other peers."""
        return self._at_most

    def places(self, commit: Commit, snapshot: RunSnapshot, *, ranks: int) -> list[Path]:
        """Return where each rank writes the average of this round; [] if no listed peer has missed it.

        Call it once for each commit that includes this peer's part. Averages that nobody needs are removed.
        A disk that refuses costs those peers the average, and not this peer its part in the run.
        """
        try:
            return self._places(commit, snapshot, ranks)
        except OSError as error:
            log.warning(
                "the average of round %d is not kept for those who missed it: %s", commit.round, error
            )
            return []

    def _places(self, commit: Commit, snapshot: RunSnapshot, ranks: int) -> list[Path]:
        missed_by = set(snapshot.members) - set(commit.members)
        places: list[Path] = []
        if not missed_by or not self._at_most:
            self._kept = []
        else:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._kept = [*self._kept, commit.digest][-self._at_most :]
            places = [self._directory / f"{commit.digest}.{rank}" for rank in range(ranks)]
        self._states.serve_averages({digest: self._directory for digest in self._kept})
        for path in self._directory.glob("*"):
            if path.name.partition(".")[0] not in self._kept:
                path.unlink(missing_ok=True)
        return places


_PAUSE_S = 0.5

Reach = Callable[[str], socket.socket]
"""Makes a connection to the peer of this name through a relay. Raises PeerRefused or OSError."""


@dataclass(frozen=True, kw_only=True)
class SyncedState:
    """What was fetched: a state, or the average that leads to one.

    commit: the commit whose state it is.
    directory: the checkpoint, or where the average is.
    sources: the names of the peers that may be to blame if it is not what it should be: the one whose
        checkpoint it is, or those that sent parts of an average.
    seconds: how long the fetch took.
    is_average: whether it is the average of the commit's round.
    """

    commit: Commit
    directory: Path
    sources: tuple[str, ...]
    seconds: float
    is_average: bool = False

    def hand_over(self, ranks: RankServer, *, count: int, why: str) -> None:
        """Tell the ranks to hold this state. count: how many there are. why: for their log."""
        commit = self.commit
        if not self.is_average:
            ranks.send(
                ReplaceState(
                    round=commit.round,
                    digest=commit.digest,
                    position=commit.position,
                    directory=self.directory,
                    why=why,
                )
            )
            return
        for rank in range(count):
            file = self.directory / average_file(rank)
            ranks.send(
                CatchUp(round=commit.round, digest=commit.digest, position=commit.position, file=file),
                rank=rank,
            )


@dataclass(frozen=True, kw_only=True)
class Behind:
    """How far this peer is behind the run.

    round, digest: the state that its ranks hold.
    overtaken: how many rounds were committed without it since it came, or was last in one.
    ranks: how many ranks it has.
    """

    round: int
    digest: str
    overtaken: int
    ranks: int


class StateSync:
    """Fetches in the background what the ranks miss.

    That is a whole state, or the average of one round. A state whose fetch has begun is fetched to its end as
    long as averages lead on from it, however many rounds are committed meanwhile.

    wants: the digest of the state that is fetched, or will be once somebody has a copy of it; "": none. This
        peer is listed with it, so that others make a copy.
    is_failing: whether the ranks refused what was fetched, or the fetch for one commit failed twice,
        and no fetch has succeeded since. Such a peer does not catch up by waiting longer.

    Args:
        fetch: fetches the state of a commit.
        me: the name of this peer.
        wake: called on any thread when a fetch has succeeded or failed.
        averages: fetches the averages of rounds; None: this peer always fetches whole states.
        reach: makes a connection to a source that cannot be dialled (`ConnectionManager.reach`).
    """

    def __init__(
        self,
        fetch: FetchState,
        *,
        me: str,
        wake: Callable[[], None],
        averages: KeptAverages | None = None,
        reach: Reach | None = None,
    ) -> None:
        self._reach = reach
        self._fetch, self._me, self._wake = fetch, me, wake
        self._averages = averages
        self._sought: _Sought | None = None
        self._sources: Sequence[PeerSource] = ()
        self._fetched: SyncedState | None = None
        self._given: SyncedState | None = None
        """The whole state that the ranks were given, until they hold the run's state."""
        self._again_s = 0.0
        self.wants = ""
        self.is_failing = False
        self._failed: _Sought | None = None
        self._refused: set[tuple[str, str]] = set()
        self._mixed: set[str] = set()

    @property
    def is_fetching(self) -> bool:
        """Whether a state or an average is being fetched, or will be once somebody has a copy of it."""
        return self._sought is not None or bool(self.wants)

    @property
    def needs_no_waiting(self) -> bool:
        """Whether no round need wait for this peer: it is failing, or fetches a state of an earlier round.

        Such a fetch goes on in any case, and the peer makes up afterwards for the rounds since.
        """
        return self.is_failing or (self._sought is not None and self._sought.is_earlier)

    def fetch(self, snapshot: RunSnapshot, *, now: float, behind: Behind | None = None) -> SyncedState | None:
        """Return what was fetched for the ranks to hold next; None until then.

        The first call for a commit starts a fetch; later calls update the peers from which it may come.

        behind: the state that the ranks hold; None: a whole state is fetched in any case.
        """
        assert snapshot.commit is not None, "nothing to be fetched before the first commit"
        if self._refused or self._mixed:
            committed_digests = {kept.digest for kept in snapshot.commits.values()}
            self._refused = {refused for refused in self._refused if refused[0] in committed_digests}
            self._mixed &= committed_digests
        sought = self._next(snapshot, behind)
        others = {name: listed for name, listed in sorted(snapshot.members.items()) if name != self._me}
        self._sources = self._sources_of(sought, others)
        self.wants = "" if sought.is_average else sought.commit.digest
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            self._sought = None
            if (fetched.commit, fetched.is_average) == (sought.commit, sought.is_average):
                self._given = self._given if fetched.is_average else fetched
                return fetched
        if self._sought is not None and self._sought.is_like(sought):
            self._sought.is_earlier = sought.is_earlier
        elif self._sources and now >= self._again_s:
            self._sought = sought
            ranks = behind.ranks if behind is not None else 1
            fetching = reporting_errors(
                lambda: self._run(sought, ranks),
                name="fetch",
                on_error=lambda error: self._give_up(sought, error),
            )
            try:
                threading.Thread(target=fetching, name="fetch", daemon=True).start()
            except RuntimeError as error:  # no thread is left
                self._give_up(sought, error)
        return None

    def refuse(self, synced: SyncedState) -> None:
        """Do not fetch this state from that peer again, because what it served was not this state.

        If parts came from several peers, it is fetched once more, from one at a time.
        """
        self.is_failing = True
        if len(synced.sources) > 1:
            self._mixed.add(synced.commit.digest)
        else:
            self._refused |= {(synced.commit.digest, source) for source in synced.sources}

    def next_moment(self) -> float | None:
        """Return when a fetch that failed is tried again, by the monotonic clock; None if none waits."""
        return self._again_s if self._again_s > time.monotonic() else None

    def stop(self) -> None:
        """Stop fetching, because the ranks hold the right state. What they have loaded is removed."""
        self._sought, self._fetched, self.wants = None, None, ""
        given, self._given = self._given, None
        if given is not None:  # on a thread, because it is as large as a checkpoint
            remove = partial(shutil.rmtree, given.directory, ignore_errors=True)
            try:
                threading.Thread(target=remove, name="remove fetched", daemon=True).start()
            except RuntimeError as error:  # no thread is left
                log.warning("%s is not removed: %s", given.directory, error)

    def _next(self, snapshot: RunSnapshot, behind: Behind | None) -> _Sought:
        """Return what is to be fetched now: what has begun, the average of the next round, or a state."""
        commit, begun = snapshot.commit, self._sought
        assert commit is not None
        whole = _Sought(commit=commit)
        if behind is None or self._averages is None:
            return whole
        at_most, overtaken = self._averages.at_most, behind.overtaken
        follow = partial(missed_rounds, snapshot, me=self._me, overtaken=overtaken, at_most=at_most)
        if begun is not None and not begun.is_average:
            is_followed = bool(follow(round=begun.commit.round, digest=begun.commit.digest))
            return _Sought(commit=begun.commit, is_earlier=True) if is_followed else whole
        missed = follow(round=behind.round, digest=behind.digest)
        if not missed:
            copied = {digest for other in snapshot.members.values() for digest in other.member.copies}
            earlier = [kept for kept in snapshot.commits.values() if kept.digest in copied]
            usable = [kept for kept in earlier if follow(round=kept.round, digest=kept.digest)]
            if commit.digest in copied or not usable:
                return whole
            return _Sought(commit=max(usable, key=lambda kept: kept.round), is_earlier=True)
        average, givers = _Sought(commit=missed[0], is_average=True), set(missed[0].members)
        givers -= {peer for digest, peer in self._refused if digest == missed[0].digest}
        has_failed = self._failed is not None and self._failed.is_like(average)
        return whole if has_failed or not givers & set(snapshot.members) else average

    def _sources_of(self, sought: _Sought, others: Mapping[str, ListedMember]) -> list[PeerSource]:
        """Return who may have it: those that say they have a copy, or that were in the average's round.

        Those that can be dialled come first, to spare the peers that relay, and then those that follow this
        peer by name, so that not all joining peers begin with the same peer.
        """
        digest = sought.commit.digest
        names: Iterable[str] = [name for name in others if digest in others[name].member.copies]
        if sought.is_average:
            names = [name for name in others if name in sought.commit.members]
        found = [
            PeerSource(peer=name, url=url, reach=partial(self._reach, name) if self._reach else None)
            for name in following(self._me, sorted(names))
            if (digest, name) not in self._refused
            for url in others[name].member.serves
        ]
        return sorted(found, key=lambda source: source.url == THROUGH_RELAY)

    def _run(self, sought: _Sought, ranks: int) -> None:
        began_s, commit = time.monotonic(), sought.commit

        def is_cancelled() -> bool:
            return self._sought is not sought

        try:
            if sought.is_average:
                assert self._averages is not None, "averages are sought only with it"
                at_once = 1 if commit.digest in self._mixed else SOURCES
                average = self._averages.fetch(
                    commit, lambda: self._sources, ranks=ranks, at_once=at_once, cancelled=is_cancelled
                )
                directory, sources = average.directory, average.peers
            else:
                state = self._fetch(commit, lambda: self._sources, cancelled=is_cancelled)
                directory, sources = state.directory, (state.leader.peer,)
        except (BloomeryError, OSError) as error:
            self._give_up(sought, error)
            return
        if self._sought is sought:
            self._fetched = SyncedState(
                commit=commit,
                directory=directory,
                sources=sources,
                seconds=time.monotonic() - began_s,
                is_average=sought.is_average,
            )
            self.is_failing = False
        self._wake()

    def _give_up(self, sought: _Sought, error: Exception) -> None:
        """Let `fetch` start again after a pause, if this is still what is to be fetched."""
        if self._sought is sought:
            log.warning("%s was not fetched: %s", sought, error)
            is_repeated = self._failed is not None and self._failed.is_like(sought)
            self.is_failing = self.is_failing or is_repeated
            self._failed = sought
            self._sought, self._again_s = None, time.monotonic() + _PAUSE_S
        self._wake()


@dataclass(kw_only=True)
class _Sought:
    """What is to be fetched. is_earlier: whether the run has gone on since the fetch of this state began."""

    commit: Commit
    is_average: bool = False
    is_earlier: bool = False

    def is_like(self, other: _Sought) -> bool:
        return (self.commit, self.is_average) == (other.commit, other.is_average)

    def __str__(self) -> str:
        return f"the {'average' if self.is_average else 'state'} of round {self.commit.round}"
