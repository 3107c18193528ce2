"""Downloads the run's state as a checkpoint from several peers at once, each block verified by its hash.

Peers that hold one state have equal files of the weights and the outer momentum, and different files of
their inner optimizers. So one of them is the leader: its manifest and index list the blocks of the
checkpoint, and the other peers send the files that they hold identically. When the leader fails before its
own files have been fetched, another peer becomes the leader; the blocks of the common files are kept.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bloomery.checkpoint.format.coverage import check_coverage
from bloomery.checkpoint.format.manifest import (
    INDEX,
    MANIFEST,
    PARTIAL,
    read_index,
    read_manifest,
)
from bloomery.errors import BloomeryError, PeerError, free_bytes, storage_error
from bloomery.protocol.records import Commit
from bloomery.state_transfer.partial_checkpoint import BlockRun, FetchPlan, FetchSource, PartialCheckpoint
from bloomery.state_transfer.served_states import is_digest
from bloomery.state_transfer.source import (
    STALL_S,
    NotYetServed,
    PeerSource,
    ReceivedMetadata,
    ServedState,
    SourceFailed,
    SourceLost,
    few_of_each_peer,
)
from bloomery.transport.trust import Trust

log = logging.getLogger(__name__)

STREAMS = 2
"""The connections to each source."""
FAILURES = 3
"""The failures in a row after which a source is given up; the last one only if it answers wrongly."""
RUN_S = 120.0
"""The seconds within which one run of blocks must have been fetched."""
PROGRESS_S = 60.0
"""The seconds without a block from any source after which the whole fetch fails."""
LEADER_S = 20.0
"""The seconds without a block after which another source becomes the leader."""
INDEX_BYTES_S = 128 << 10
"""Another source becomes the leader if the index comes more slowly than so many bytes a second."""
MANIFEST_BYTES_AT_MOST = 64 << 20
INDEX_BYTES_AT_MOST = 1 << 30
NO_ROOM_S = 1.0
"""The seconds after which a source that serves as many as it can is asked again."""
_BACK_OFF_S = 0.2
_SHOWN = 32
"""The characters of a state's digest that name its directory."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class FetchedState:
    """A fetched checkpoint, which equals its leader's bit for bit.

    The loader must still verify that its content is the state of the digest.

    directory: where the checkpoint lies.
    leader: the source whose manifest and inner optimizer the checkpoint has.
    bytes: the size of the checkpoint.
    """

    directory: Path
    leader: PeerSource
    bytes: int


class StateFetcher:
    """Fetches states of commits into a directory, and deletes from it what belongs to other commits."""

    def __init__(self, directory: Path, trust: Trust, *, progress: Progress | None = None) -> None:
        self._directory, self._trust, self._progress = directory, trust, progress

    def __call__(
        self, commit: Commit, sources: Callable[[], Sequence[PeerSource]], *, cancelled: Callable[[], bool]
    ) -> FetchedState:
        """Fetch the commit's state as a whole checkpoint. Raises PeerError and StorageError.

        sources: returns the peers that serve the state; called throughout the fetch, since further peers may
            begin to serve it.
        cancelled: called often; the fetch is given up when it returns True.
        """
        for path in self._directory.glob("*"):
            if not path.name.startswith(commit.digest[:_SHOWN]):
                shutil.rmtree(path, ignore_errors=True)
        return fetch_state(
            sources,
            commit.digest,
            self._directory,
            self._trust,
            cancelled=cancelled,
            progress=self._progress,
        )


def fetch_state(
    origins: Callable[[], Sequence[PeerSource]],
    digest: str,
    directory: Path,
    trust: Trust,
    *,
    progress_s: float = PROGRESS_S,
    stall_s: float = STALL_S,
    leader_s: float = LEADER_S,
    streams: int = STREAMS,
    cancelled: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> FetchedState:
    """Fetch the state `digest` into a directory below `directory`; blocks of an earlier try are kept.

    origins: returns the sources that serve the state; called repeatedly, for sources may join later.
    progress_s: seconds without a block from any source after which the fetch fails.
    stall_s: seconds without a byte after which one source has failed.
    leader_s: seconds without a block after which another source becomes the leader.
    streams: connections to each source.
    cancelled: called often; the fetch is given up when it returns True.
    progress: called with the bytes fetched so far and the bytes of the checkpoint; None: none.
    Raises PeerError when no source is left or none has sent a block for `progress_s`, and StorageError.
    """
    if not is_digest(digest):
        raise PeerError(f"{digest!r} is no digest of a state", remedy="Is it of this version of bloomery?")
    place = directory / digest[:_SHOWN]
    fetch = _Fetch(origins, digest, place, trust, stall_s=stall_s, streams=streams)
    try:
        return fetch.run(progress_s=progress_s, leader_s=leader_s, cancelled=cancelled, progress=progress)
    except OSError as error:
        raise storage_error(error, path=place, doing="Fetching the run's state") from error
    finally:
        fetch.close()


class _Fetch:
    """The threads of one fetch and the state that they share.

    `news` guards `sources` and `why_out`, and is notified when they or the plan change. `why_out` has the
    reason for each source that was given up. `moved_s` is when the last block or a new plan came.
    """

    def __init__(
        self,
        origins: Callable[[], Sequence[PeerSource]],
        digest: str,
        place: Path,
        trust: Trust,
        *,
        stall_s: float,
        streams: int,
    ) -> None:
        self.ask, self.digest = origins, digest
        self.origins: list[PeerSource] = []
        self.place, self.trust = place, trust
        self.stall_s, self.streams = stall_s, streams
        self.news = threading.Condition()
        self.sources: list[FetchSource] = []
        self.why_out: dict[PeerSource, str] = {}
        self.plan: FetchPlan | None = None
        self.latest: PartialCheckpoint | None = None
        self.error: OSError | None = None
        self.moved_s, self.is_over = time.monotonic(), False
        self.leader_s: float = LEADER_S
        self.cancelled: Callable[[], bool] = bool

    def run(
        self,
        *,
        progress_s: float,
        leader_s: float,
        cancelled: Callable[[], bool],
        progress: Progress | None,
    ) -> FetchedState:
        self.leader_s, self.cancelled = leader_s, cancelled
        while True:
            for origin in few_of_each_peer((*self.origins, *self.ask()))[len(self.origins) :]:
                self.origins.append(origin)
                self._thread(self._read_description, origin)
            self._check(progress_s, cancelled)
            plan = self.plan
            if plan is None or self._is_stuck(plan):
                self._replan()
                continue
            if progress is not None:
                progress(plan.partial.bytes, plan.leader.manifest.bytes)
            if plan.partial.missing.is_over:
                final = self.place / plan.leader.state.name
                plan.partial.finish(final, index=plan.index, manifest=plan.leader.text)
                return FetchedState(
                    directory=final, leader=plan.leader.state.origin, bytes=plan.leader.manifest.bytes
                )
            plan.partial.missing.wait(0.2)
            if self._others(plan.leader) and time.monotonic() - self.moved_s > leader_s:
                self._drop(plan.leader, f"nothing came for {leader_s:.0f} s")

    def close(self) -> None:
        self.is_over = True
        if self.plan is not None:
            self.plan.partial.missing.wake()
            self.plan.partial.close()
        with self.news:
            self.news.notify_all()
        for source in self.sources:
            source.state.close()

    def _check(self, progress_s: float, cancelled: Callable[[], bool]) -> None:
        """Raise when the fetch cannot go on."""
        if self.error is not None:
            raise self.error
        reasons = "; ".join(f"{origin.peer}: {why}" for origin, why in self.why_out.items())
        if cancelled():
            raise PeerError("the fetching of the run's state was given up")
        if len(self.why_out) == len(self.origins):
            raise PeerError(
                f"nobody gives the state {self.digest[:12]}: {reasons or 'there is no source'}",
                remedy="What is here is kept: another try goes on from it.",
            )
        if time.monotonic() - self.moved_s > progress_s:
            waiting = [origin.peer for origin in self.origins if origin not in self.why_out]
            raise PeerError(
                f"no block of the state {self.digest[:12]} in {progress_s:.0f} s from {', '.join(waiting)}"
                + (f" ({reasons})" if reasons else ""),
                remedy="Are these peers reachable? What is here is kept: another try goes on from it.",
            )

    def _is_stuck(self, plan: FetchPlan) -> bool:
        """Return whether a missing file is held by no source that is left."""
        alive = [source for source in self.sources if not source.is_out]
        had = frozenset[str]().union(*(plan.files_of(source) for source in alive))
        return bool(plan.partial.missing.files() - had)

    def _others(self, source: FetchSource) -> list[FetchSource]:
        """Return the sources that are left beside this one."""
        return [other for other in self.sources if other is not source and not other.is_out]

    def _replan(self) -> None:
        """Make the first source that is left the leader."""
        if self.plan is not None:
            self.plan.partial.close()
            self.plan = None
        with self.news:
            leader = next((source for source in self.sources if not source.is_out), None)
            if leader is None:
                self.news.wait(0.1)
                return
        try:
            self.plan = self._planned(leader)
        except (BloomeryError, SourceFailed) as error:
            self._drop(leader, str(error).splitlines()[0])
            return
        with self.news:
            self.moved_s = time.monotonic()
            self.news.notify_all()

    def _planned(self, leader: FetchSource) -> FetchPlan:
        state, manifest = leader.state, leader.manifest
        until = time.monotonic() + self.leader_s + manifest.index_bytes / INDEX_BYTES_S
        text = state.content(
            INDEX,
            at_most=manifest.index_bytes,
            is_wanted=lambda: not self.cancelled() and (time.monotonic() < until or not self._others(leader)),
        )
        index = read_index(ReceivedMetadata(state.origin, state.name, {INDEX: text}), manifest)
        check_coverage(index.boxes)
        present_bytes = _bytes_of(partial := self.place.with_name(self.place.name + PARTIAL))
        if manifest.bytes - present_bytes > free_bytes(self.place):
            raise PeerError(f"its state takes {manifest.bytes:,} bytes, which are not free at {self.place}")
        before, self.latest = self.latest, None  # which is not known any more if this fails
        self.latest = PartialCheckpoint(partial, manifest, index, before=before)
        return FetchPlan(leader=leader, partial=self.latest, index=text)

    def _read_description(self, origin: PeerSource) -> None:
        """Read a source's name and manifest, and then start the threads that fetch from it."""
        try:
            state = ServedState(origin, self.digest, self.trust, stall_s=self.stall_s)
            text = self._manifest_at(state)
            manifest = read_manifest(ReceivedMetadata(origin, state.name, {MANIFEST: text}))
            if manifest.index_bytes > INDEX_BYTES_AT_MOST:
                raise SourceFailed(f"its index would have {manifest.index_bytes:,} bytes")
        except (BloomeryError, OSError) as error:
            self._out(origin, str(error).splitlines()[0])
            return
        source = FetchSource(state=state, manifest=manifest, text=text, records=frozenset(manifest.files))
        with self.news:
            self.sources.append(source)
            self.news.notify_all()
        for _ in range(self.streams):
            self._thread(self._stream, source)

    def _manifest_at(self, state: ServedState) -> bytes:
        """Return the manifest of a source once that has room for this peer. Raises SourceFailed."""
        while True:
            try:
                state.read_description()
                return state.content(MANIFEST, at_most=MANIFEST_BYTES_AT_MOST)
            except NotYetServed:
                if self.is_over:
                    raise
                time.sleep(NO_ROOM_S)

    def _stream(self, source: FetchSource) -> None:
        """Fetch blocks from this source until everything has been fetched or the source is given up."""
        buffer = bytearray()
        while not self.is_over and not source.is_out:
            plan = self.plan
            if plan is None:
                with self.news:
                    self.news.wait(0.2)
                continue
            files, own = plan.files_of(source), plan.files_only_of(source, self._others(source))
            run = plan.partial.missing.take(files, own, timeout_s=0.2)
            if run is None:
                continue
            if len(buffer) < run.end - run.begin:
                buffer = bytearray(run.end - run.begin)
            self._fetch_run(plan, source, run, memoryview(buffer)[: run.end - run.begin])

    def _fetch_run(self, plan: FetchPlan, source: FetchSource, run: BlockRun, view: memoryview) -> None:
        def is_wanted() -> bool:
            return not self.is_over and plan.partial.missing.is_missing(run)

        until = time.monotonic() + RUN_S
        try:
            if not source.state.fetch_range(
                run.file, view, begin=run.begin, until=until, is_wanted=is_wanted
            ):
                return  # another stream was faster
        except NotYetServed:
            plan.partial.missing.give_back(run)
            time.sleep(NO_ROOM_S)
            return
        except SourceFailed as error:
            plan.partial.missing.give_back(run)
            source.failures += 1
            is_needed = isinstance(error, SourceLost) and not self._others(source)
            if source.failures >= FAILURES and not is_needed:  # without another source, PROGRESS_S counts
                self._drop(source, str(error))
            else:
                time.sleep(_BACK_OFF_S)
            return
        if not plan.partial.is_right(run, view):
            plan.partial.missing.give_back(run)
            self._drop(source, f"its block at byte {run.begin:,} of {run.file} has another hash")
            return
        try:
            plan.partial.write(run, view)
        except OSError as error:
            self.error = error
            plan.partial.missing.give_back(run)
            return
        source.failures, self.moved_s = 0, time.monotonic()

    def _drop(self, source: FetchSource, why: str) -> None:
        source.is_out = True
        self._out(source.state.origin, why)

    def _out(self, origin: PeerSource, why: str) -> None:
        log.warning("%s gives no (more) of the state %s: %s", origin.peer, self.digest[:12], why)
        with self.news:
            self.why_out[origin] = why
            self.news.notify_all()
        if self.plan is not None:
            self.plan.partial.missing.wake()

    def _thread(self, function: Callable[..., None], argument: object) -> None:
        threading.Thread(target=function, args=(argument,), name="fetching", daemon=True).start()


def _bytes_of(directory: Path) -> int:
    if not directory.is_dir():
        return 0
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir() if path.is_file())
