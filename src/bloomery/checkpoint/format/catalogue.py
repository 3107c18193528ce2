"""Lists the checkpoints of a run directory, verifies their bytes, and records their remote copies.

Checkpoints that a rewind left behind are listed apart: they are not part of the run any more. The verified
remote copies of a checkpoint are recorded in `backups/step-000123.i007.json`.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import xxhash

from bloomery import durable
from bloomery.checkpoint.format.data_file import shortened
from bloomery.checkpoint.format.manifest import (
    BLOCK_BYTES,
    DIGITS,
    INDEX,
    MANIFEST,
    FileRecord,
    Index,
    Manifest,
    now,
    parse_name,
    read_index,
    read_manifest,
)
from bloomery.checkpoint.format.source import Source, StoredCheckpoint, source_of
from bloomery.errors import CheckpointError, storage_error
from bloomery.events.incarnation import Base, read_incarnations, visible
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import StoreUnreachable, storage_failure

_WINDOW_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong in a checkpoint.

    offset: where in the file the damaged block begins, in bytes; None where it concerns the whole file.
    tensors: names of the tensors that the damaged block holds.
    """

    file: str
    offset: int | None
    text: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = "" if self.offset is None else f" at byte {self.offset:,}"
        holds = f" (it holds {shortened(self.tensors)})" if self.tensors else ""
        return f"{self.file}{place}: {self.text}{holds}"


def verify(
    where: Path | Source, *, contents: bool = True, progress: Callable[[int], None] | None = None
) -> list[Problem]:
    """Return everything that is wrong with a checkpoint; an empty list for an intact one.

    contents: whether to read and hash every file; otherwise the manifest is hashed and sizes are compared.
    progress: called with the number of bytes of each read.
    Raises StorageError where a remote checkpoint cannot be reached.
    """
    source = source_of(where)
    if isinstance(source, StoredCheckpoint):
        source = source.stored  # its manifest too is read from where the checkpoint is
    try:
        manifest = read_manifest(source)
    except CheckpointError as error:
        return [Problem(file=MANIFEST, offset=None, text=error.message)]
    problems = [problem for record in manifest.files for problem in _wrong_size(source, record)]
    if not contents:
        return problems + _wrong_index_size(source, manifest)
    unreadable = {problem.file for problem in problems}
    try:
        index = read_index(source, manifest)
    except CheckpointError as error:
        index = Index(boxes=(), files={})
        problems.append(Problem(file=INDEX, offset=None, text=error.message))
    for record in manifest.files:
        if record.name not in unreadable:
            problems += _wrong_contents(source, record, index, progress or (lambda count: None))
    return problems


def disk_bytes_per_tensor_byte(where: Path) -> float:
    """Return the checkpoint's bytes on disk, without headers, index and manifest, per byte of its tensors.

    1.0 means that the checkpoint holds its tensors and nothing else. Raises CheckpointError, OSError.
    """
    manifest = read_manifest(where)
    index = read_index(where, manifest)
    needed = sum(box.end - box.begin for box in index.boxes)
    headers = {name: record.bytes for name, record in index.files.items()}  # they end at the first tensor
    for box in index.boxes:
        headers[box.file] = min(headers[box.file], box.begin)
    taken = sum(path.stat().st_size for path in where.rglob("*") if path.is_file())
    texts = manifest.index_bytes + (where / MANIFEST).stat().st_size
    return max(0, taken - texts - sum(headers.values())) / max(1, needed)


def _wrong_size(source: Source, record: FileRecord) -> list[Problem]:
    try:
        size = source.size(record.name)
    except FileNotFoundError:
        return [Problem(file=record.name, offset=None, text="missing")]
    except OSError as error:
        return [_unreadable(record, error)]
    if size == record.bytes:
        return []
    problem = "truncated" if size < record.bytes else "too long"
    text = f"{problem}: {size:,} bytes, of {record.bytes:,} that were saved"
    return [Problem(file=record.name, offset=None, text=text)]


def _wrong_index_size(source: Source, manifest: Manifest) -> list[Problem]:
    return _wrong_size(source, FileRecord(name=INDEX, bytes=manifest.index_bytes, xxh3_128="", blocks=""))


def _wrong_contents(
    source: Source, record: FileRecord, index: Index, progress: Callable[[int], None]
) -> list[Problem]:
    """Hash one file as a whole, and block by block where the index is intact, to name the damaged blocks."""
    blocks = index.files[record.name].blocks if record.name in index.files else ""
    problems: list[Problem] = []
    damaged: list[int] = []
    whole = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_WINDOW_BYTES, record.bytes)))
    try:
        with source.open(record.name) as file:
            for start in range(0, record.bytes, _WINDOW_BYTES):
                data = buffer[: min(_WINDOW_BYTES, record.bytes - start)]
                count = file.read_into([data], begin=start)
                progress(count)
                whole.update(data)
                if start == 0:
                    problems += _wrong_header(record, bytes(data[:8]))
                for offset in range(0, len(data) if blocks else 0, BLOCK_BYTES):
                    number = (start + offset) // BLOCK_BYTES
                    expected = blocks[number * DIGITS : (number + 1) * DIGITS]
                    block = data[offset : offset + BLOCK_BYTES]
                    if count < offset + len(block) or xxhash.xxh3_64_hexdigest(block) != expected:
                        damaged.append(start + offset)
    except OSError as error:
        return [_unreadable(record, error)]
    problems += _damaged_blocks(record, damaged, index)
    if not problems and whole.hexdigest() != record.xxh3_128:
        problems.append(Problem(file=record.name, offset=None, text="damaged: it has another hash"))
    return problems


def _unreadable(record: FileRecord, error: OSError) -> Problem:
    """Return an error of reading as a problem of the file.

    Raises StorageError where the store is unreachable.
    Then nothing is known of the file, so it must not be called damaged.
    """
    if isinstance(error, StoreUnreachable):
        raise storage_failure(error, doing=f"Verifying {record.name}") from error
    return Problem(file=record.name, offset=None, text=f"cannot be read: {error.strerror or error}")


def _wrong_header(record: FileRecord, lead: bytes) -> list[Problem]:
    """Find a header length beyond the file's end: safetensors readers would allocate that much memory."""
    length = int.from_bytes(lead, "little")
    if len(lead) == 8 and 8 + length <= record.bytes:
        return []
    text = f"damaged: its header claims {length:,} bytes, the file has {record.bytes:,}"
    return [Problem(file=record.name, offset=0, text=text)]


def _damaged_blocks(record: FileRecord, starts: list[int], index: Index) -> list[Problem]:
    """Return a problem for each damaged block, with the tensors that it touches. Boxes do not overlap."""
    if not starts:
        return []
    boxes = [box for box in index.boxes if box.file == record.name]
    boxes.sort(key=lambda box: (box.begin, box.end))
    begins, ends = [box.begin for box in boxes], [box.end for box in boxes]
    problems = []
    for start in starts:
        touched = boxes[bisect_right(ends, start) : bisect_left(begins, start + BLOCK_BYTES)]
        names = tuple(box.name for box in touched)
        problems.append(
            Problem(file=record.name, offset=start, text="damaged: the block has another hash", tensors=names)
        )
    return problems


@dataclass(frozen=True, kw_only=True, order=True)
class CommittedCheckpoint:
    """A committed checkpoint. Ordered by step, then incarnation: the last is the newest."""

    step: int
    incarnation: int
    directory: Path

    @property
    def base(self) -> Base:
        """(step, incarnation): how incarnation records refer to the checkpoint."""
        return self.step, self.incarnation

    @property
    def name(self) -> str:
        """The name of its directory, as in `step-000123.i007`."""
        return self.directory.name


def with_its_run(checkpoint: Path) -> Path:
    """Return a checkpoint's path, whole where it does not name its run (`.`, or `step-…` from beside it)."""
    whole = checkpoint.resolve()
    is_named = RunDirectory(checkpoint.parent.parent).exists()
    return checkpoint if is_named or not RunDirectory(whole.parent.parent).exists() else whole


def checkpoints(rundir: RunDirectory) -> tuple[CommittedCheckpoint, ...]:
    """Return the committed checkpoints that are part of the run, oldest first. Nothing is verified."""
    committed = _committed(rundir)
    shown = visible((item.base for item in committed), read_incarnations(rundir))
    return tuple(item for item in committed if item.base in shown)


def samples_consumed(rundir: RunDirectory) -> int:
    """Return how many samples the run had used at its newest checkpoint that can be read; 0 without one."""
    for item in reversed(checkpoints(rundir)):
        try:
            consumed = read_manifest(item.directory).about.get("consumed_samples", 0)
        except CheckpointError:
            continue  # the start tells of a damaged one, or passes it over where it may
        return consumed if isinstance(consumed, int) else 0
    return 0


def listing_changed(rundir: RunDirectory) -> tuple[int, ...]:
    """Return a value that changes whenever `checkpoints` may return something else.

    It holds the modification times, in ns, of the directories that `checkpoints` lists.
    """
    return tuple(path.stat().st_mtime_ns for path in (rundir.checkpoints, rundir.incarnations))


def abandoned_checkpoints(rundir: RunDirectory) -> tuple[CommittedCheckpoint, ...]:
    """Return the committed checkpoints that a rewind left behind, oldest first.

    A later incarnation began from an earlier checkpoint, so these are not part of the run any more.
    """
    committed = _committed(rundir)
    shown = visible((item.base for item in committed), read_incarnations(rundir))
    return tuple(item for item in committed if item.base not in shown)


def newest_intact(checkpoints: Iterable[CommittedCheckpoint]) -> CommittedCheckpoint | None:
    """Return the newest intact checkpoint of those given; None where none is.

    Reads and hashes them, newest first, until one is intact.
    """
    return next((item for item in sorted(checkpoints, reverse=True) if not verify(item.directory)), None)


def refusal_of_damage(damage: CheckpointError, intact: str) -> CheckpointError:
    """Return the error for a damaged checkpoint. intact: the name of the newest intact one; '' for none."""
    if intact:
        remedy = (
            f"The newest intact one is {intact}: continue from it with --fallback. "
            "Look at the disk before you trust it again."
        )
    else:
        remedy = "No older checkpoint is intact: restore one from a backup, or start anew in another --run."
    return CheckpointError(damage.message, remedy=remedy)


def _committed(rundir: RunDirectory) -> list[CommittedCheckpoint]:
    committed = []
    for path in rundir.checkpoints.glob("step-*"):
        name = parse_name(path.name)
        if name is not None and (path / MANIFEST).is_file():
            committed.append(CommittedCheckpoint(step=name[0], incarnation=name[1], directory=path))
    return sorted(committed)


@dataclass(frozen=True, kw_only=True)
class RemoteCopy:
    """A remote copy of a checkpoint, which was read back and found equal.

    url: of the copy itself. what: "all", or "model" for only the weights. time: seconds since 1970.
    """

    url: str
    what: str
    bytes: int
    time: float


PLACES = ("", "second")
"""The places to which a recipe may back up; "" is the first. Each has records of its own."""


def remote_copies(rundir: RunDirectory) -> dict[str, tuple[RemoteCopy, ...]]:
    """Return the verified remote copies of each checkpoint that has any, by the checkpoint's name.

    Checkpoints that were removed here are among them, so this reads a record for each backup of the run.
    """
    return copies_of(rundir, {_name_of(path) for path in rundir.backups.glob("step-*.json")})


def copies_of(rundir: RunDirectory, names: Iterable[str]) -> dict[str, tuple[RemoteCopy, ...]]:
    """Return the verified remote copies of those of the named checkpoints that have any."""
    copies = {
        name: tuple(copy for place in PLACES for copy in _read(_record(rundir, name, place)))
        for name in sorted(names)
    }
    return {name: listed for name, listed in copies.items() if listed}


def has_copies(rundir: RunDirectory) -> bool:
    """Whether any checkpoint of the run has a verified remote copy."""
    names = map(_name_of, rundir.backups.glob("step-*.json"))
    return any(copies_of(rundir, [name]) for name in names)


def newest_copied(rundir: RunDirectory, url: str) -> str:
    """Return the name of the newest checkpoint of which a verified copy was recorded at the run's backup
    URL `url`; "" for none. Records are read from the newest on, until one is of that place.
    """
    names = {_name_of(path) for path in rundir.backups.glob("step-*.json")}
    for name in sorted(names, key=lambda name: parse_name(name) or (0, 0), reverse=True):
        if any(
            is_copied(listed, name=name, url=url, what="model")
            for listed in copies_of(rundir, [name]).values()
        ):
            return name
    return ""


def _name_of(record: Path) -> str:
    return ".".join(record.name.split(".")[:2])  # step-000123.i007.json, or step-000123.i007.second.json


def _record(rundir: RunDirectory, name: str, place: str) -> Path:
    return rundir.backups / (f"{name}.{place}.json" if place else f"{name}.json")


def is_copied(listed: Iterable[RemoteCopy], *, name: str, url: str, what: str) -> bool:
    """Say whether one of the copies is at the run's backup URL `url`, with all that `what` asks for."""
    place = f"{url.rstrip('/')}/checkpoints/{name}"
    return any(copy.url == place and copy.what in ("all", what) for copy in listed)


def record_copy(rundir: RunDirectory, name: str, *, url: str, what: str, bytes: int, place: str = "") -> None:
    """Record durably that a checkpoint was copied to `url` and verified there. Raises StorageError.

    place: one of PLACES. Each has records of its own, so that two threads never write one file.
    """
    path = _record(rundir, name, place)
    others = [copy for copy in _read(path) if copy.url != url]
    listed = [*others, RemoteCopy(url=url, what=what, bytes=bytes, time=now())]
    try:
        durable.write_whole(path, json.dumps({"copies": [asdict(copy) for copy in listed]}) + "\n")
    except OSError as error:
        raise storage_error(error, path=path, doing="Recording a backup") from error


def _read(path: Path) -> tuple[RemoteCopy, ...]:
    """Return the copies in a record; none for an unreadable record.

    The checkpoint is then uploaded again, which finds the files that are there already.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        listed = content.get("copies", [content])  # before 0.1 it was one copy
        return tuple(
            msgspec.convert({field: copy[field] for field in ("url", "what", "bytes", "time")}, RemoteCopy)
            for copy in listed
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()
