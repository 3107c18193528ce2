"""Downloads the average of a missed round from other peers into files; the ranks then apply and verify it.

The average of a round is served under the digest of the state that it leads to, one file for each rank of a
peer (`average_file`). A fetched average is not trusted: the ranks apply it, and accept the state only if its
digest equals the commit's.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from bloomery.checkpoint.format.manifest import BLOCK_BYTES
from bloomery.errors import PeerError, free_bytes, storage_error
from bloomery.protocol.records import Commit
from bloomery.state_transfer.client import FAILURES, RUN_S
from bloomery.state_transfer.partial_checkpoint import BlockRun, MissingBlocks, runs_of, write_at
from bloomery.state_transfer.served_states import average_file, is_digest
from bloomery.state_transfer.source import (
    CONNECT_S,
    NotYetServed,
    PeerSource,
    ServedState,
    SourceFailed,
    SourceLost,
    few_of_each_peer,
)
from bloomery.transport.trust import Trust

SOURCES = 4
"""The number of peers from which an average is fetched at once."""
STREAMS = 2
"""The connections to each of them that fetch it."""
PATIENCE_S = 30.0
"""The seconds that a peer which should have an average may take to write it."""
ALONE_S = 0.1
"""The seconds for which one peer is asked alone; then the others are asked too, if it has not sent all."""
SMALL_BYTES = 4 << 20
"""An average of at most so many bytes is fetched over one connection: to make more takes longer."""
_SMALLEST_BYTES = 256 << 10
_PAUSE_S = 0.2
_SHOWN = 32


@dataclass(frozen=True, kw_only=True)
class FetchedAverage:
    """An average as it was received; nothing verified its content yet.

    directory: where its files are.
    peers: those that sent parts of it or its size. Which peer sent wrong bytes is known only if there is one.
    bytes: the size of the files.
    """

    directory: Path
    peers: tuple[str, ...]
    bytes: int


class AverageFetcher:
    """Fetches the average of a round into a directory, and removes those of other rounds from it."""

    def __init__(self, directory: Path, trust: Trust, *, patience_s: float = PATIENCE_S) -> None:
        self._directory, self._trust, self._patience_s = directory, trust, patience_s

    def __call__(
        self,
        commit: Commit,
        sources: Callable[[], Sequence[PeerSource]],
        *,
        ranks: int,
        at_once: int = SOURCES,
        cancelled: Callable[[], bool],
    ) -> FetchedAverage:
        """Fetch the average of this commit's round, from several peers at once.

        Raises PeerError if no source has it, or none has written it after a while, and StorageError.

        sources: called again and again; each has the state of this commit, or has had it.
        ranks: how many ranks this peer has, and so do the others.
        at_once: the number of peers that are fetched from; with 1 all of it comes from one peer.
        cancelled: called often; the fetch is given up when it returns True.
        """
        if not is_digest(commit.digest):  # another peer wrote it, and it is to be the name of a directory
            raise PeerError(
                f"{commit.digest!r} is no digest of a state", remedy="Is it of this version of bloomery?"
            )
        place = self._directory / commit.digest[:_SHOWN]
        for path in self._directory.glob("*"):
            if path != place:
                shutil.rmtree(path, ignore_errors=True)
        until = time.monotonic() + self._patience_s
        failed: dict[PeerSource, SourceFailed] = {}
        begun: _Download | None = None
        try:
            place.mkdir(parents=True, exist_ok=True)
            while time.monotonic() < until and not cancelled():
                left = few_of_each_peer(sources())
                left = [source for source in left if not _has_failed(failed.get(source))]
                if not left:
                    break
                for begin in range(0, len(left), at_once):
                    chosen = left[begin : begin + at_once]
                    files = [average_file(rank) for rank in range(ranks)]
                    download = _Download(place, files, failed, before=begun)
                    if download.fetch(chosen, commit.digest, self._trust, until=until, cancelled=cancelled):
                        return FetchedAverage(
                            directory=place, peers=tuple(sorted(download.peers)), bytes=download.bytes
                        )
                    if download.bytes and at_once > 1:  # parts of several peers may be mixed
                        begun = download
                time.sleep(_PAUSE_S)
        except OSError as error:
            raise storage_error(error, path=place, doing="Fetching the average of a round") from error
        reasons = "; ".join(sorted(f"{source.peer}: {why}" for source, why in failed.items()))
        raise PeerError(
            f"nobody gives the average of round {commit.round}: {reasons or 'there is no source'}"
        )


class _OfAnotherSize(SourceFailed):
    """A source reports another size than the first source did, and either may be wrong."""


def _has_failed(why: SourceFailed | None) -> bool:
    return why is not None and not isinstance(why, NotYetServed | _OfAnotherSize)


class _Download:
    """One try to fetch the files of an average from some peers, as fast as those that answer send them.

    peers: those that have sent parts, and the one that reported the sizes.
    bytes: the size of all files.

    Args:
        place: where the files are written.
        names: the files.
        failed: gets the failure of each source that fails.
        before: a try that is over, whose parts are kept if a source reports the same sizes; None: none.
    """

    # `_active` threads fetch, of which `_waiting` pause before they ask again a peer that has no average yet.

    def __init__(
        self,
        place: Path,
        names: Sequence[str],
        failed: dict[PeerSource, SourceFailed],
        *,
        before: _Download | None = None,
    ) -> None:
        self._place, self._names, self._failed, self._before = place, names, failed, before
        self._changed = threading.Condition()
        self._sizes: dict[str, int] = {}
        self._missing: MissingBlocks | None = None
        self._streams = STREAMS
        self._files: dict[str, BinaryIO] = {}
        self._active, self._waiting, self._is_closed = 0, 0, False
        self._error: OSError | None = None
        self.peers: set[str] = set()

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values())

    def fetch(
        self,
        sources: Sequence[PeerSource],
        digest: str,
        trust: Trust,
        *,
        until: float,
        cancelled: Callable[[], bool],
    ) -> bool:
        """Fetch all files. Raises OSError if one is not written.

        The first source is asked alone for ALONE_S, and the others at once if the average is large.
        Returns False if they have not all come, or if no peer has begun to send them after CONNECT_S or at
        `until`. A peer that has not written its average yet is asked again while another may still answer.
        """
        states = [state for source in sources for state in self._states_at(source, digest, trust)]
        self._streams = STREAMS * len(states)
        others = states[1:]
        try:
            for state in states[:1]:
                self._start(self._begin, state)
            began_s = time.monotonic()
            until = min(until, began_s + CONNECT_S)
            with self._changed:
                while (self._is_any_at_work or others) and not (self._is_over or self._error or cancelled()):
                    now = time.monotonic()
                    if self._missing is None and now > until:
                        break
                    if others and (self._is_large or not self._is_any_at_work or now >= began_s + ALONE_S):
                        for state in others:
                            self._start(self._begin, state)
                        others = []
                    self._changed.wait(_PAUSE_S if not others else began_s + ALONE_S - now)
            if self._error is not None:
                raise self._error
            return self._is_over
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
                for file in self._files.values():
                    file.close()
            for state in states:
                state.close()

    def _states_at(self, source: PeerSource, digest: str, trust: Trust) -> list[ServedState]:
        """Return the state at a peer; none, and note the failure, where its address is none."""
        try:
            return [ServedState(source, digest, trust)]
        except PeerError as error:
            self._failed[source] = SourceFailed(error.message)
            return []

    @property
    def _is_over(self) -> bool:
        return self._missing is not None and self._missing.is_over

    @property
    def _is_any_at_work(self) -> bool:
        return self._active > self._waiting

    @property
    def _is_large(self) -> bool:
        """Whether the average is known to be worth more than one connection."""
        return self.bytes > SMALL_BYTES

    def _start(self, target: Callable[[ServedState], None], state: ServedState) -> None:
        def run() -> None:
            try:
                target(state)
            except SourceFailed as why:
                if not self._is_closed:
                    self._failed[state.origin] = why
            except OSError as error:
                self._error = error
            finally:
                with self._changed:
                    self._active -= 1
                    self._changed.notify_all()

        with self._changed:
            self._active += 1
        threading.Thread(target=run, name="fetching", daemon=True).start()

    def _begin(self, state: ServedState) -> None:
        """Ask one peer for the files' sizes in bytes, then fetch pieces from it until all have come.

        The first peer that answers sets the sizes of this try. Raises SourceFailed, also for a peer that
        reports other sizes, from which nothing is fetched, and OSError.
        """
        sizes = self._sizes_at(state)
        self._failed.pop(state.origin, None)
        with self._changed:
            if self._missing is None and not self._is_closed:
                runs, is_begun = self._left(sizes)
                if sum(run.end - run.begin for run in runs) > free_bytes(self._place):
                    raise SourceFailed(
                        f"the average has {sum(sizes.values()):,} bytes, which are not free at {self._place}"
                    )
                paths = {name: self._place / name for name in self._names}
                self._files = {
                    name: path.open("r+b") if is_begun else path.open("wb") for name, path in paths.items()
                }
                self._sizes = sizes
                self._missing = MissingBlocks(runs, unit=_SMALLEST_BYTES, streams=self._streams)
                self.peers.add(state.origin.peer)
                self._changed.notify_all()
            if sizes != self._sizes:
                raise _OfAnotherSize("its average has another size than that of others")
        for _ in range(STREAMS - 1 if self._is_large else 0):
            self._start(self._stream, state)
        self._stream(state)

    def _left(self, sizes: Mapping[str, int]) -> tuple[list[BlockRun], bool]:
        """Return what is to be fetched, and whether the files hold the rest from the try before."""
        before = self._before
        if before is None or before._missing is None or before._sizes != sizes:
            return _runs(sizes), False
        self.peers |= before.peers
        return [run for name in self._names for run in before._missing.runs_of(name)], True

    def _sizes_at(self, state: ServedState) -> dict[str, int]:
        """Ask a peer for the sizes until it has written its average. Raises SourceFailed."""
        while True:
            try:
                return {name: state.size(name) for name in self._names}
            except NotYetServed as why:
                self._failed[state.origin] = why
                with self._changed:
                    self._waiting += 1
                    self._changed.notify_all()
                    is_over = self._changed.wait_for(lambda: self._is_closed, _PAUSE_S)
                    self._waiting -= 1
                if is_over:
                    raise

    def _stream(self, state: ServedState) -> None:
        """Fetch pieces of the averages from one peer, until these have come whole, from it and from others.

        Raises SourceFailed and OSError.
        """
        assert self._missing is not None, "streams start once the sizes are known"
        missing, failures = self._missing, 0
        while not (missing.is_over or self._is_closed or state.origin in self._failed):
            run = missing.take(self._sizes, timeout_s=_PAUSE_S)
            if run is None:
                continue
            buffer = memoryview(bytearray(run.end - run.begin))
            is_wanted = partial(self._is_wanted, missing, run)
            until = time.monotonic() + RUN_S
            try:
                is_whole = state.fetch_range(
                    run.file, buffer, begin=run.begin, until=until, is_wanted=is_wanted
                )
            except SourceFailed as error:
                missing.give_back(run)
                failures += 1
                if failures == FAILURES or not isinstance(error, SourceLost):
                    raise
                time.sleep(_PAUSE_S)
                continue
            failures = 0
            if is_whole:
                self._write(state, missing, run, buffer)

    def _is_wanted(self, missing: MissingBlocks, run: BlockRun) -> bool:
        return not self._is_closed and missing.is_missing(run)

    def _write(self, state: ServedState, missing: MissingBlocks, run: BlockRun, data: memoryview) -> None:
        with self._changed:
            if not self._is_closed:
                write_at(self._files[run.file].fileno(), data, run.begin)
                self.peers.add(state.origin.peer)
                missing.done(run)
                self._changed.notify_all()


def _runs(sizes: Mapping[str, int]) -> list[BlockRun]:
    return [
        run for name, size in sizes.items() for run in runs_of(name, range(-(-size // BLOCK_BYTES)), size)
    ]
