"""Downloads the files of one share with several threads, verified and resumable, and records what it fetched.

`fetched.json` in the directory says which share of how many it holds. The number of shares is fixed for a
run, so another number is refused unless everything is fetched anew.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bloomery import durable
from bloomery.data.remote_files import FetchRequest, FileSource, RemoteFile, Shard
from bloomery.data.storage import as_storage_error, locked_directory, write_whole
from bloomery.errors import DataError
from bloomery.events.records import ProgressCallback, ignore_progress

RECORD, FILES = "fetched.json", "fetched-files.jsonl"
_LEVELS = 8  # levels of directories above a file in which its record is looked for


def refuse_incomplete(paths: Iterable[Path]) -> None:
    """Raise DataError if files lie in a directory whose fetch is incomplete or which has lost files.

    A directory that was not fetched passes, and so does one whose record is of a version without sizes.
    """
    lowest = {path.absolute().parent for path in paths}  # of a million files there are few
    # A `..` is no directory above: no fetch into the directory that it leaves concerns the file.
    lowest = {directory.resolve() if ".." in directory.parts else directory for directory in lowest}
    above = {parent for directory in lowest for parent in directory.parents[: _LEVELS - 1]}
    for directory in sorted(lowest | above):
        if (directory / RECORD).is_file():
            _refuse(directory)


def recorded(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the last record of each complete file by name; a torn or damaged line is left out."""
    files = {}
    try:
        lines = (directory / FILES).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    for line in lines:
        try:
            entry = json.loads(line)
            files[str(entry["name"])] = {"version": "", "sha256": "", **entry, "bytes": int(entry["bytes"])}
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    return files


def _refuse(directory: Path) -> None:
    try:
        record = json.loads((directory / RECORD).read_bytes())
        wanted, wanted_bytes = record.get("files_wanted"), record.get("bytes_wanted", 0)
    except (OSError, ValueError, AttributeError) as damaged:
        raise DataError(
            f"{directory / RECORD} cannot be read ({damaged}), so whether all files are here is not known.",
            remedy="Run the same `bloomery data fetch` again with --anew.",
        ) from damaged
    if wanted is None:
        return
    files = recorded(directory)
    present = {
        name: entry["bytes"] for name, entry in files.items() if _size(directory / name) == entry["bytes"]
    }
    if len(present) < wanted:
        lost = sorted(set(files) - set(present))
        first = f"; {lost[0]} is gone or has another size" if lost else ""
        raise DataError(
            f"{directory} holds {len(present):,} of the {wanted:,} files of share {record.get('share')} of "
            f"{record.get('shares')}, {sum(present.values()) / 1e6:,.1f} of {wanted_bytes / 1e6:,.1f} MB: "
            f"its fetch did not end{first}.",
            remedy="Run the same `bloomery data fetch` again: it goes on where it was.",
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return -1


_CHUNK_BYTES = 8 << 20
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class FetchSummary:
    """What a fetch did: the files and bytes that it downloaded, and those that were there before."""

    files: int
    size_bytes: int
    kept_files: int
    kept_bytes: int
    removed_files: int


def fetch(
    shards: Sequence[Shard],
    remotes: Mapping[str, FileSource],
    directory: Path,
    wanted: FetchRequest,
    *,
    threads: int,
    anew: bool,
    progress: ProgressCallback = ignore_progress,
) -> FetchSummary:
    """Download the shards' files to `directory/DATASET/PATH`, and record which share they are.

    Files that are present and recorded stay.
    anew: another share may replace the one that is there, whose other files are then removed.
    Raises DataError for files that cannot be read or do not match; files that are complete by then are kept.
    """
    with locked_directory(directory, name="fetched.lock"):
        record = _Record(directory, _identity(remotes, wanted), anew=anew)
        files = [
            (f"{shard.dataset}/{file.path}", shard.dataset, file) for shard in shards for file in shard.files
        ]
        removed = record.begin({name: file.size_bytes for name, _, file in files})
        missing = [entry for entry in files if not record.has(entry[0], entry[2])]
        counter = _ByteCounter(progress, total=sum(file.size_bytes for *_, file in files))
        kept_bytes = counter.total - sum(file.size_bytes for *_, file in missing)
        counter.add(kept_bytes)
        with ThreadPoolExecutor(threads, thread_name_prefix="fetch") as pool:
            pending = [
                pool.submit(_bring_one, remotes[dataset], file, name, record=record, counter=counter)
                for name, dataset, file in missing
            ]
            try:
                for done in as_completed(pending):
                    done.result()
            except BaseException:
                counter.stop.set()
                pool.shutdown(cancel_futures=True)
                raise
    return FetchSummary(
        files=len(missing),
        size_bytes=counter.total - kept_bytes,
        kept_files=len(files) - len(missing),
        kept_bytes=kept_bytes,
        removed_files=removed,
    )


def refuse_other_share(directory: Path, remotes: Mapping[str, FileSource], wanted: FetchRequest) -> None:
    """Raise DataError if the directory holds another share than the wanted one."""
    _Record(directory, _identity(remotes, wanted), anew=False)


def _identity(remotes: Mapping[str, FileSource], wanted: FetchRequest) -> dict[str, Any]:
    sources = {name: remote.url for name, remote in sorted(remotes.items())}
    return {"sources": sources, **json.loads(json.dumps(asdict(wanted)))}


class _Record:
    """The records of a directory: `fetched.json` names the share, `fetched-files.jsonl` has a line for each
    complete file.
    """

    def __init__(self, directory: Path, identity: dict[str, Any], *, anew: bool) -> None:
        self.directory = directory
        self._path, self._list = directory / RECORD, directory / FILES
        self._identity, self._lock = identity, threading.Lock()
        held = self._read()
        if held is not None and not anew:
            _refuse_other(self._path, held, identity)
        self._files = {} if held is None else recorded(directory)

    def has(self, name: str, file: RemoteFile) -> bool:
        """Whether a file is present with the size, version and checksum of the remote one."""
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
        """Record that a file is complete. Any thread may call this."""
        entry = {"name": name, "bytes": file.size_bytes, "version": file.version, "sha256": sha256}
        with self._lock, as_storage_error(self._list):
            durable.append(self._list, json.dumps(entry) + "\n")

    def begin(self, names: Mapping[str, int]) -> int:
        """Record that the directory holds these files, remove other recorded files, and return how many were
        removed.

        names: size of each file in bytes, by name.
        """
        others = sorted(set(self._files) - set(names))
        for name in others:
            with as_storage_error(self.directory / name):
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
        differences = "; ".join(
            f"{name}: {held.get(name)!r} there, {wanted[name]!r} asked" for name in differing
        )
        raise DataError(
            f"{path.parent} holds another share or selection ({differences}).",
            remedy="It is fixed for a run. Fetch into another directory, or replace it with --anew.",
        )


class _ByteCounter:
    """Adds up the bytes that all threads have fetched.

    stop: set when the threads shall end.
    """

    def __init__(self, progress: ProgressCallback, *, total: int) -> None:
        self._progress, self.total, self._done = progress, total, 0
        self._lock = threading.Lock()
        self.stop = threading.Event()

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._progress("fetching", self._done, self.total, "bytes")


def _bring_one(
    remote: FileSource, file: RemoteFile, name: str, *, record: _Record, counter: _ByteCounter
) -> None:
    digest = _bring(remote, file, record.directory / name, counter)
    if digest is not None:
        record.add(name, file, sha256=digest)


def _bring(remote: FileSource, file: RemoteFile, target: Path, counter: _ByteCounter) -> str | None:
    """Fetch one file, from where an earlier try ended, and return its SHA-256; None if told to stop."""
    address = hashlib.sha256(
        f"{remote.url} {file.version} {file.size_bytes} {file.sha256}".encode()
    ).hexdigest()
    partial = target.with_name(f"{target.name}.{address[:12]}.partial")
    digest = hashlib.sha256()
    with as_storage_error(partial):
        durable.make_directory(target.parent)
        with partial.open("ab+") as stream:
            place = min(stream.tell(), file.size_bytes)
            stream.truncate(place)
            _digest(stream, digest)
            counter.add(place)
            while place < file.size_bytes:
                if counter.stop.is_set():
                    return None
                chunk = remote.read(file.path, start=place, length=min(_CHUNK_BYTES, file.size_bytes - place))
                if not chunk:
                    raise _other_size(remote, file, place)
                stream.write(chunk)
                digest.update(chunk)
                place += len(chunk)
                counter.add(len(chunk))
    if file.sha256 and digest.hexdigest() != file.sha256:
        partial.unlink()
        raise DataError(
            f"{remote.url}/{file.path} came with the checksum {digest.hexdigest()}, and its list says "
            f"{file.sha256}.",
            remedy="The same command fetches it again. If that ends so too, the file or the list is wrong.",
        )
    with as_storage_error(target):  # the file is durable before the record says that it is complete
        durable.publish(partial, target)
    return digest.hexdigest()


def _digest(
    stream: Any, digest: Any
) -> None:  # Any: a binary file, a hashlib object; neither has a type to name
    stream.seek(0)
    while piece := stream.read(_CHUNK_BYTES):
        digest.update(piece)


def _other_size(remote: FileSource, file: RemoteFile, place: int) -> DataError:
    return DataError(
        f"{remote.url}/{file.path} ended at byte {place:,} of {file.size_bytes:,}.",
        remedy="It changed while it was fetched: start again.",
    )
