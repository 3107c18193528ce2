"""Fetches averages of rounds, so that a peer that missed some need not fetch the whole state again.

The average of a round is served under the digest of the state that it leads to, one file for each rank of a
peer (`average_file`). What was fetched is believed by nobody: the ranks compute the state that follows, and
compare its digest with the commit's.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from bloomery.errors import PeerError, free_bytes, storage_error
from bloomery.protocol.records import Commit
from bloomery.state_transfer.client import RUN_S, FetchedState
from bloomery.state_transfer.served_states import average_file
from bloomery.state_transfer.source import NotYetServed, PeerSource, ServedState, SourceFailed
from bloomery.transport.trust import Trust

STREAMS = 4
"""How many connections to one source fetch an average."""
PATIENCE_S = 30.0
"""So long a peer that should have an average may take to write it."""
_PIECE_BYTES = 4 << 20
_PAUSE_S = 0.2
_SHOWN = 32


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
        cancelled: Callable[[], bool],
    ) -> FetchedState:
        """Fetch the average of this commit's round, all of it from one peer, so that a wrong one has a name.

        Raises PeerError if no source has it, or none has written it after a while, and StorageError.

        sources: called again and again; each has the state of this commit, or has had it.
        ranks: how many ranks this peer has, and so do the others.
        cancelled: called often; the fetch is given up when it returns True.
        """
        place = self._directory / commit.digest[:_SHOWN]
        for path in self._directory.glob("*"):
            if path != place:
                shutil.rmtree(path, ignore_errors=True)
        until, reasons = time.monotonic() + self._patience_s, dict[str, str]()
        try:
            place.mkdir(parents=True, exist_ok=True)
            while time.monotonic() < until and not cancelled():
                is_to_come = False
                for origin in sources():
                    try:
                        size = self._fetch(origin, commit.digest, place, ranks)
                    except SourceFailed as failed:
                        reasons[origin.peer] = str(failed)
                        is_to_come = is_to_come or isinstance(failed, NotYetServed)
                        continue
                    return FetchedState(directory=place, leader=origin, bytes=size)
                if not is_to_come:
                    break
                time.sleep(_PAUSE_S)
        except SourceFailed:
            raise
        except OSError as error:
            raise storage_error(error, path=place, doing="Fetching the average of a round") from error
        refusals = "; ".join(f"{peer}: {why}" for peer, why in reasons.items())
        raise PeerError(
            f"nobody gives the average of round {commit.round}: {refusals or 'there is no source'}"
        )

    def _fetch(self, origin: PeerSource, digest: str, place: Path, ranks: int) -> int:
        """Fetch the files of all ranks from one peer; return their bytes. Raises SourceFailed and OSError."""
        fetched = 0
        with (
            closing(ServedState(origin, digest, self._trust)) as state,
            ThreadPoolExecutor(STREAMS) as streams,
        ):
            for rank in range(ranks):
                name = average_file(rank)
                size = state.size(name)
                if size > free_bytes(place):
                    raise SourceFailed(f"the average has {size:,} bytes, which are not free at {place}")
                with (place / name).open("wb") as file:
                    pieces = (_Piece(state, name, file.fileno(), begin, end) for begin, end in _pieces(size))
                    for _ in streams.map(_Piece.fetch, pieces):
                        pass
                fetched += size
        return fetched


class _Piece:
    def __init__(self, state: ServedState, name: str, file: int, begin: int, end: int) -> None:
        self._state, self._name, self._file = state, name, file
        self._begin, self._end = begin, end

    def fetch(self) -> None:
        """Fetch this piece and write it to its place in the file."""
        buffer = bytearray(self._end - self._begin)
        self._state.fetch_range(
            self._name, memoryview(buffer), begin=self._begin, until=time.monotonic() + RUN_S
        )
        os.pwrite(self._file, buffer, self._begin)


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, size, _PIECE_BYTES):
        yield begin, min(begin + _PIECE_BYTES, size)
