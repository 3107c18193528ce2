"""Reads a run in object storage: lists and opens its checkpoints, and copies its other files there or back.

The other files are the recipe, incarnations, data, journals and logs.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from bloomery import durable
from bloomery.checkpoint.format.manifest import MANIFEST, parse_name
from bloomery.checkpoint.format.source import CHECKPOINTS, RemoteCheckpoint, Source
from bloomery.checkpoint.format.suspects import SUSPECT, refuse_if_only_suspects, why_suspect
from bloomery.checkpoint.remote.segments import (
    SegmentsLost,
    drop_segments,
    fetch_segments,
    is_segmented,
    segmented_files,
    send_segments,
)
from bloomery.config.checkpoint import SCHEMES, BackupSection
from bloomery.errors import CheckpointError
from bloomery.events.incarnation import Base, bases_of, merge_records, visible
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import PATIENCE_S, Objects, storage_failure, without_secrets

log = logging.getLogger(__name__)

_REQUESTS_AT_ONCE = 16


def is_remote(text: str) -> bool:
    """Say whether a command's argument is a URL of objects rather than a path."""
    scheme, found, _ = text.partition("://")
    return bool(found) and scheme.isalnum()


def place_at(url: str, *, patience_s: float = PATIENCE_S, create: bool = True) -> Objects:
    """Return the objects at the URL of a run's backup. Raises CheckpointError, StorageError.

    create: make the directory of a file:// URL; who only reads makes none.
    """
    if url.partition("://")[0] not in SCHEMES:
        raise CheckpointError(
            f"{without_secrets(url)} is not the URL of a store",
            remedy=f"One of {', '.join(SCHEMES)}://…",
        )
    return Objects(url, patience_s=patience_s, create=create)


def remote_checkpoints(remote: Objects, *, abandoned: bool = False) -> list[RemoteCheckpoint]:
    """Return the committed checkpoints of a backed-up run, oldest first. Raises OSError, CheckpointError.

    abandoned: whether to include those that a rewind left behind, by the incarnation records in the store.
    """
    names = {parse_name(name): name for name in remote.directories(f"{CHECKPOINTS}/")}
    bases = [base for base in names if base is not None]
    if bases and not abandoned:
        bases = list(visible(bases, bases_of(remote_incarnations(remote))))

    def look(base: Base) -> RemoteCheckpoint | None:
        prefix = f"{CHECKPOINTS}/{names[base]}"
        if not remote.exists(f"{prefix}/{MANIFEST}"):
            return None
        return RemoteCheckpoint(remote, prefix, is_marked=remote.exists(f"{prefix}/{SUSPECT}"))

    # A list of all files would be a million keys where a large run was backed up for months.
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        return [checkpoint for checkpoint in pool.map(look, sorted(bases)) if checkpoint is not None]


def unmarked_copies(copies: Iterable[RemoteCheckpoint]) -> list[RemoteCheckpoint]:
    """Return the backups that are not marked as suspect, in their order; log a warning for each other."""
    kept = []
    for checkpoint in copies:
        if checkpoint.is_marked:
            log.warning(
                "the backup %s is passed over as suspect: %s", checkpoint.place(), why_suspect(checkpoint)
            )
        else:
            kept.append(checkpoint)
    return kept


def log_backup_used(copies: Sequence[RemoteCheckpoint], *, instead_of: Collection[str]) -> None:
    """Log that a run goes on from a backup, where there is one. instead_of: see `Backup.restorable`."""
    if copies:
        here = "no checkpoint here can be gone on from" if instead_of else "nothing is here"
        log.warning("%s: going on from the backup %s", here, copies[0].place())


def tell_of_newer(newer: Sequence[RemoteCheckpoint], *, here: str) -> None:
    """Log that a start takes a newer backup, where there is one. here: the newest local checkpoint."""
    if newer:
        log.warning(
            "the newest checkpoint here is %s, and another machine went on with this run: "
            "going on from its backup %s",
            here,
            newer[0].place(),
        )


def remote_incarnations(remote: Objects) -> dict[str, bytes]:
    """Return the incarnation records of a backed-up run, by their URLs. Raises OSError."""
    listed = {entry.key: entry.key.rpartition("/")[2] for entry in remote.entries("incarnations/")}
    keys = [
        key
        for key, name in listed.items()
        if name.endswith(".json") and name.removesuffix(".json").isdecimal()
    ]
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:  # a long run has hundreds, and each start reads them
        return dict(zip(map(remote.place, keys), pool.map(remote.content, keys), strict=True))


def remote_source(url: str) -> Source:
    """Return the checkpoint at a URL, or the run's newest there that is not marked as suspect.

    Raises CheckpointError, StorageError.
    """
    remote = place_at(url, create=False)
    try:
        if parse_name(url.rstrip("/").rsplit("/", 1)[-1]) is not None:
            return RemoteCheckpoint(remote, "")
        copies = remote_checkpoints(remote)
    except OSError as error:
        raise storage_failure(error, doing="Looking for checkpoints") from error
    if not copies:
        raise CheckpointError(
            f"{url} holds no finished checkpoint", remedy="Give the URL of a run's backup, or of one of it."
        )
    unmarked = unmarked_copies(copies)
    if not unmarked:
        refuse_if_only_suspects(checkpoint.name for checkpoint in copies)
    return unmarked[-1]


_SMALL_FILES = (
    "recipe.toml",
    "sources.toml",
    "data/tokenizer.json",
    "data/tokenizer.model",
    "data/prepared.json",
)
_DATA = "data"
_LOGS = (
    *("journal", "logs", "tensorboard", "stacks"),
    *("operations.jsonl", "evaluations.jsonl", "rounds.jsonl", "chronicle.md"),
)


def upload_run_files(rundir: RunDirectory, remote: Objects) -> None:
    """Upload what a run needs besides its checkpoints: recipe, tokenizer and incarnation records.

    Raises OSError, and CheckpointError where the place holds another run's backups.
    """
    there = {entry.key for entry in remote.entries("incarnations/")}
    records = {f"incarnations/{path.name}": path for path in sorted(rundir.incarnations.glob("*.json"))}
    common = [key for key in records if key in there]
    # Another run's records differ from the first on, and from where two machines went on with one run: the
    # newest one tells both. A long run has hundreds, and this is called after each save.
    for key in common[-1:]:
        if _content(remote, key) not in (None, records[key].read_bytes()):
            raise CheckpointError(
                f"{remote.url} holds the backups of another run: its {key} is not this run's",
                remedy="Choose another run.name or backup.url.",
            )
    for key, path in records.items():
        if key not in there:
            remote.put(key, path.read_bytes())
    for name in _SMALL_FILES:
        path = rundir.path / name
        if path.is_file() and _content(remote, name) != path.read_bytes():
            remote.put(name, path.read_bytes())


def upload_logs_and_data(
    rundir: RunDirectory,
    remote: Objects,
    section: BackupSection,
    *,
    place: str = "",
    go_on: Callable[[], bool] = lambda: True,
) -> int:
    """Upload the logs and the data of a run that a section asks for; return the bytes that were sent.

    Logs are sent as they are now: journals, logs, stacks, TensorBoard's files, the chronicle. A file that has
    not changed since it was sent is not sent again, and of a long log only what is new: see `send_segments`.
    place: see `Backup`. go_on: asked between files, and between the segments of one.
    Raises OSError; for a file that cannot be read only once the others are sent.
    """
    record = rundir.backups / (f"run-files.{place}.json" if place else "run-files.json")
    sent_before = _read(record).get(remote.url, {})
    sent, count = dict(sent_before), 0
    unreadable: OSError | None = None
    try:
        for path in _files(rundir, [*(_LOGS if section.logs else ()), *([_DATA] if section.data else [])]):
            try:
                name, status = path.relative_to(rundir.path).as_posix(), path.stat()
            except FileNotFoundError:  # whoever rotates logs has removed it
                continue
            state = [status.st_size, status.st_mtime_ns, status.st_ino]
            if sent.get(name, [])[:2] == state[:2] or name in _SMALL_FILES:
                continue
            if not go_on():
                break
            try:
                more, is_whole = _send_file(
                    remote, name, path, state=state, before=sent.get(name, []), go_on=go_on
                )
            except OSError as error:
                if not isinstance(error.filename, str):
                    raise
                if error.errno != errno.ENOENT:  # of a file here: it keeps no other from being sent
                    unreadable = unreadable or error
                continue
            count += more
            if not is_whole:
                break
            sent[name] = state
    finally:
        if sent != sent_before:
            durable.write_whole_unsynced(record, json.dumps({remote.url: sent}))
    if unreadable is not None:
        raise unreadable
    return count


def _send_file(
    remote: Objects,
    name: str,
    path: Path,
    *,
    state: list[int],
    before: list[int],
    go_on: Callable[[], bool],
) -> tuple[int, bool]:
    """Send a file; return the bytes that were sent, and whether the store now has all of it.

    state: the size, time and inode of the file. before: those of when it was sent last, [] if never; an
        earlier version recorded no inode.
    """
    is_log = name.split("/")[0] in _LOGS
    if is_log and is_segmented(state[0]):
        has_only_grown = before[2:] == state[2:] and before[0] <= state[0]
        return send_segments(remote, name, path, has_only_grown=has_only_grown, go_on=go_on)
    done = remote.send(name, path)
    if not done.is_proven and remote.digest(name) != done.xxh3_128:
        raise OSError(5, f"{remote.place(name)} is not what was sent: it was changed on its way")
    if is_log and before and is_segmented(before[0]):
        drop_segments(remote, name)
    return state[0], True


def download_run_files(remote: Objects, rundir: RunDirectory) -> None:
    """Download what `upload_run_files` and `upload_logs_and_data` sent; files here that are not empty stay.

    A log that the store no longer has as it was sent is left out, with a warning.

    Raises OSError, and CheckpointError where the directory is another run's.
    """
    merge_records(rundir, remote_incarnations(remote))
    for name in _SMALL_FILES:
        content = None if _is_here(rundir.path / name) else _content(remote, name)
        if content is not None:
            durable.write_whole(rundir.path / name, content)
    for name in (entry for directory in (_DATA, *_LOGS) for entry in _entries(remote, directory)):
        _download(rundir.path, name, partial(_copy, remote, name))
    for name in segmented_files(remote):
        if name.split("/")[0] not in _LOGS:
            continue
        try:  # after the others: what is an object of its own is newer
            _download(rundir.path, name, partial(fetch_segments, remote, name))
        except SegmentsLost as lost:  # a run can go on without a log
            log.warning("%s is not restored: %s", name, lost)


def _download(directory: Path, name: str, fetch: Callable[[BinaryIO], bool]) -> None:
    """Write a file where there is none, or an empty one. fetch: returns False where the store has none."""
    path = directory / name
    if _is_here(path) or {"", ".", ".."} & set(name.split("/")):
        return
    durable.make_directory(path.parent)
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    with durable.open_new(draft) as file:
        is_there = fetch(file)
    if is_there:
        durable.replace(draft, path)
    else:
        draft.unlink()


def _copy(remote: Objects, name: str, file: BinaryIO) -> bool:
    for piece in remote.pieces(name):
        file.write(piece)
    return True


def _files(rundir: RunDirectory, wanted: list[str]) -> Iterator[Path]:
    """Yield the regular files; what has a name with a leading dot is being written."""
    for name in wanted:
        place = rundir.path / name
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file() and not path.is_symlink() and not path.name.startswith("."):
                yield path


def _entries(remote: Objects, name: str) -> list[str]:
    if "." not in name:
        return [entry.key for entry in remote.entries(f"{name}/") if entry.key not in _SMALL_FILES]
    try:
        remote.stat(name)
    except FileNotFoundError:
        return []
    return [name]


def _is_here(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0  # a power cut may have left it empty


def _read(record: Path) -> dict[str, dict[str, list[int]]]:
    """Return what was sent to each URL; nothing for a record that cannot be read: then all is sent again."""
    try:
        return msgspec.json.decode(record.read_bytes(), type=dict[str, dict[str, list[int]]])
    except (OSError, ValueError):
        return {}


def _content(remote: Objects, key: str) -> bytes | None:
    try:
        return remote.content(key)
    except FileNotFoundError:
        return None
