"""The states that are served: checkpoint directories whose files are held open, so they stay readable.

A state is known by its digest. The newest two are kept: while others still fetch the one, the next is there.
What is on the shelf may be renamed or removed on the disk: whoever reads it goes on reading the same bytes.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bloomery.checkpoint.manifest import INDEX, MANIFEST, read_manifest
from bloomery.errors import CheckpointError, PeerError

KEPT = 2
_DIGEST = re.compile(r"[A-Za-z0-9]{1,128}")


@dataclass(frozen=True, kw_only=True)
class OpenFile:
    """A file that can be read at any place by any thread."""

    descriptor: int
    bytes: int


@dataclass(kw_only=True)
class _State:
    name: str
    round: int
    files: Mapping[str, OpenFile]
    readers: int = 0
    is_retired: bool = False


class Shelf:
    """States by digest. Thread-safe."""

    def __init__(self, *, kept: int = KEPT) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._states: dict[str, _State] = {}

    def put(self, digest: str, directory: Path, *, round: int) -> None:
        """Serve this checkpoint as the state `digest`, unless that is served already.

        Raises CheckpointError for one that is not whole, and PeerError.
        """
        if not is_digest(digest):
            raise PeerError(f"{digest!r} is no digest of a state", remedy="This is a mistake in bloomery.")
        with self._lock:
            if digest in self._states:
                self._states[digest] = self._states.pop(digest)  # the newest again
                return
        state = _State(name=directory.name, round=round, files=_opened(directory))
        with self._lock:
            retired = [self._states.pop(digest)] if digest in self._states else []  # put meanwhile
            self._states[digest] = state
            while len(self._states) > self._kept:
                retired.append(self._states.pop(next(iter(self._states))))
            for one in retired:
                one.is_retired = True
                if not one.readers:
                    _close(one)

    @contextmanager
    def reading(self, digest: str, file: str) -> Iterator[OpenFile | None]:
        """A file of a state, open as long as this lasts; None where there is no such state or file."""
        with self._lock:
            state = self._states.get(digest)
            found = state.files.get(file) if state else None
            if state and found:
                state.readers += 1
        try:
            yield found
        finally:
            if state and found:
                with self._lock:
                    state.readers -= 1
                    if state.is_retired and not state.readers:
                        _close(state)

    def about(self, digest: str) -> dict[str, object] | None:
        """Name and round of a state; None where it is not here."""
        with self._lock:
            state = self._states.get(digest)
            return None if state is None else {"name": state.name, "round": state.round}

    def clear(self) -> None:
        """Serve nothing any more."""
        with self._lock:
            for state in self._states.values():
                state.is_retired = True
                if not state.readers:
                    _close(state)
            self._states.clear()


def is_digest(text: str) -> bool:
    """Whether this may stand for a state, in a URL too."""
    return _DIGEST.fullmatch(text) is not None


def _opened(directory: Path) -> dict[str, OpenFile]:
    """Open what the manifest names, and nothing else that may lie there."""
    manifest = read_manifest(directory)
    wanted = {record.name: record.bytes for record in manifest.files}
    wanted |= {INDEX: manifest.index_bytes, MANIFEST: (directory / MANIFEST).stat().st_size}
    files: dict[str, OpenFile] = {}
    try:
        for name, size in wanted.items():
            descriptor = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            files[name] = OpenFile(descriptor=descriptor, bytes=size)
            if os.fstat(descriptor).st_size != size:
                raise CheckpointError(f"{directory / name} has not the {size:,} bytes of its manifest")
    except OSError as error:
        _close_all(files)
        raise CheckpointError(f"{directory} cannot be served: {error}") from error
    except CheckpointError:
        _close_all(files)
        raise
    return files


def _close(state: _State) -> None:
    _close_all(state.files)


def _close_all(files: Mapping[str, OpenFile]) -> None:
    for file in files.values():
        os.close(file.descriptor)
