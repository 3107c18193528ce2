"""The files of one share brought here: resumable, checked, by several threads, and remembered.

`fetched.json` says which share of how many this directory holds. How many there are is fixed for a run, so
another number is refused until everything is fetched anew.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bloomery.data.fetched import FILES, RECORD, recorded
from bloomery.data.fetchplan import Shard, Wanted
from bloomery.data.remote import Remote, RemoteFile
from bloomery.data.storage import alone_in, refusals_named, write_whole
from bloomery.data.tokenize import Progress, silent
from bloomery.errors import DataError

_CHUNK_BYTES = 8 << 20
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """What fetching came to, in files and bytes: brought now, and there before."""

    files: int
    size_bytes: int
    kept_files: int
    kept_bytes: int
    removed_files: int


def fetch(
    shards: Sequence[Shard],
    remotes: Mapping[str, Remote],
    directory: Path,
    wanted: Wanted,
    *,
    threads: int,
    anew: bool = False,
    progress: Progress = silent,
) -> Fetched:
    """Bring the shards' files to `directory/DATASET/PATH`, and write down which share they are.

    Files that are there and recorded stay. anew: another share may take the place of the one that is there,
    whose other files are then removed. Raises DataError for what cannot be read or is not what it should be;
    what is whole by then is kept.
    """
    with alone_in(directory, name="fetched.lock"):
        record = _Record(directory, _identity(remotes, wanted), anew=anew)
        files = [
            (f"{shard.dataset}/{file.path}", shard.dataset, file) for shard in shards for file in shard.files
        ]
        removed = record.begin({name: file.size_bytes for name, _, file in files})
        missing = [entry for entry in files if not record.has(entry[0], entry[2])]
        told = _Told(progress, total=sum(file.size_bytes for *_, file in files))
        kept_bytes = told.total - sum(file.size_bytes for *_, file in missing)
        told.add(kept_bytes)
        with ThreadPoolExecutor(threads, thread_name_prefix="fetch") as pool:
            pending = [
                pool.submit(_bring_one, remotes[dataset], file, name, record=record, told=told)
                for name, dataset, file in missing
            ]
            try:
                for done in as_completed(pending):
                    done.result()
            except BaseException:
                told.stop.set()
                pool.shutdown(cancel_futures=True)
                raise
    return Fetched(
        files=len(missing),
        size_bytes=told.total - kept_bytes,
        kept_files=len(files) - len(missing),
        kept_bytes=kept_bytes,
        removed_files=removed,
    )


def refuse_other_share(directory: Path, remotes: Mapping[str, Remote], wanted: Wanted) -> None:
    """Raise DataError where the directory holds another share than is wanted."""
    _Record(directory, _identity(remotes, wanted), anew=False)


def _identity(remotes: Mapping[str, Remote], wanted: Wanted) -> dict[str, Any]:
    sources = {name: remote.url for name, remote in sorted(remotes.items())}
    return {"sources": sources, **json.loads(json.dumps(asdict(wanted)))}


class _Record:
    """`fetched.json`, which share this is, and `fetched-files.jsonl`, a line for each file that is whole."""

    def __init__(self, directory: Path, identity: dict[str, Any], *, anew: bool) -> None:
        self.directory = directory
        self._path, self._list = directory / RECORD, directory / FILES
        self._identity, self._lock = identity, threading.Lock()
        held = self._read()
        if held is not None and not anew:
            _refuse_other(self._path, held, identity)
        self._files = {} if held is None else recorded(directory)

    def has(self, name: str, file: RemoteFile) -> bool:
        """Whether a file is here, as it is there."""
        entry = self._files.get(name)
        path = self.directory / name
        return (
            entry is not None
            and (entry["bytes"], entry["version"]) == (file.size_bytes, file.version)
            and file.sha256 in ("", entry["sha256"])
            and path.is_file()
            and path.stat().st_size == file.size_bytes
        )

    def add(self, name: str, file: RemoteFile, *, sha256: str) -> None:
        """Write down that a file is here and whole. Any thread may call."""
        entry = {"name": name, "bytes": file.size_bytes, "version": file.version, "sha256": sha256}
        with self._lock, refusals_named(self._list), self._list.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(entry) + "\n")

    def begin(self, names: Mapping[str, int]) -> int:
        """Make the directory hold these files, of these sizes: others that are recorded go; how many."""
        others = sorted(set(self._files) - set(names))
        for name in others:
            with refusals_named(self.directory / name):
                (self.directory / name).unlink(missing_ok=True)
            del self._files[name]
        lines = "".join(json.dumps(entry) + "\n" for entry in self._files.values())
        write_whole(self._list, lines.encode())
        extent = {"files_wanted": len(names), "bytes_wanted": sum(names.values())}
        content = {"format": _FORMAT, **self._identity, **extent}
        write_whole(self._path, json.dumps(content, indent=1).encode())
        return len(others)

    def _read(self) -> dict[str, Any] | None:
        try:
            content: dict[str, Any] = json.loads(self._path.read_bytes())
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as wrong:
            raise DataError(
                f"{self._path} cannot be read ({wrong}), so which share lies here is not known.",
                remedy="Remove it to fetch everything again, or choose another directory.",
            ) from wrong
        return content


def _refuse_other(path: Path, held: dict[str, Any], wanted: dict[str, Any]) -> None:
    differing = [name for name in wanted if held.get(name) != wanted[name]]
    if differing:
        said = "; ".join(f"{name}: {held.get(name)!r} there, {wanted[name]!r} asked" for name in differing)
        raise DataError(
            f"{path.parent} holds another share or selection ({said}).",
            remedy="It is fixed for a run. Fetch into another directory, or replace it with --anew.",
        )


class _Told:
    """Adds up what all threads have brought."""

    def __init__(self, progress: Progress, *, total: int) -> None:
        self._progress, self.total, self._done = progress, total, 0
        self._lock = threading.Lock()
        self.stop = threading.Event()

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._progress("fetching", self._done, self.total, "bytes")


def _bring_one(remote: Remote, file: RemoteFile, name: str, *, record: _Record, told: _Told) -> None:
    digest = _bring(remote, file, record.directory / name, told)
    if digest is not None:
        record.add(name, file, sha256=digest)


def _bring(remote: Remote, file: RemoteFile, target: Path, told: _Told) -> str | None:
    """Fetch one file, going on where an earlier try ended; its SHA-256, or None when told to stop."""
    address = hashlib.sha256(
        f"{remote.url} {file.version} {file.size_bytes} {file.sha256}".encode()
    ).hexdigest()
    partial = target.with_name(f"{target.name}.{address[:12]}.partial")
    digest = hashlib.sha256()
    with refusals_named(partial):
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("ab+") as stream:
            place = min(stream.tell(), file.size_bytes)
            stream.truncate(place)
            _digest(stream, digest)
            told.add(place)
            while place < file.size_bytes:
                if told.stop.is_set():
                    return None
                chunk = remote.read(file.path, start=place, length=min(_CHUNK_BYTES, file.size_bytes - place))
                if not chunk:
                    raise _other_size(remote, file, place)
                stream.write(chunk)
                digest.update(chunk)
                place += len(chunk)
                told.add(len(chunk))
    if file.sha256 and digest.hexdigest() != file.sha256:
        partial.unlink()
        raise DataError(
            f"{remote.url}/{file.path} came with the checksum {digest.hexdigest()}, and its list says "
            f"{file.sha256}.",
            remedy="The same command fetches it again. If that ends so too, the file or the list is wrong.",
        )
    with refusals_named(target):
        partial.replace(target)
    return digest.hexdigest()


def _digest(
    stream: Any, digest: Any
) -> None:  # Any: a binary file, a hashlib object; neither has a type to name
    stream.seek(0)
    while piece := stream.read(_CHUNK_BYTES):
        digest.update(piece)


def _other_size(remote: Remote, file: RemoteFile, place: int) -> DataError:
    return DataError(
        f"{remote.url}/{file.path} ended at byte {place:,} of {file.size_bytes:,}.",
        remedy="It changed while it was fetched: start again.",
    )
