"""Uploads a checkpoint to a remote store, and downloads one, file by file and verified.

An upload verifies each file by the store's checksum, or reads it back (`FileSender`); all ranks may send
files (`shared_upload`). The manifest is written last, once everything that it names is verified: before that
there is no checkpoint in the store. Verified files are recorded beside the run, so that an upload which was
killed goes on where it was. A download hashes each file while it arrives, and commits by a rename. An upload
may be of only some parts of the checkpoint: the same data files, with an index and a manifest of their own
(`subset`).
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from bloomery import durable
from bloomery.checkpoint.format.coverage import check_coverage
from bloomery.checkpoint.format.manifest import (
    INDEX,
    MANIFEST,
    PARTIAL,
    DamagedCheckpoint,
    FileRecord,
    Index,
    Manifest,
    index_bytes,
    manifest_text,
    read_index,
    read_manifest,
)
from bloomery.checkpoint.format.source import Source, source_of
from bloomery.checkpoint.format.state import Json
from bloomery.checkpoint.format.suspects import SUSPECT, mark_of
from bloomery.checkpoint.remote.shared_upload import (
    FileSender,
    UploadCoordinator,
    all_notes,
    forget_removed,
    note_begun,
    read_notes,
)
from bloomery.errors import CheckpointError, require_space, storage_error
from bloomery.objects import Objects, StoreUnreachable, storage_failure

SUBSET = "parts"
"""The key of a subset's `about` that lists the parts it holds."""


@dataclass(frozen=True, kw_only=True)
class CheckpointTexts:
    """The index and the manifest of a checkpoint, as bytes, and the records of its data files."""

    files: tuple[FileRecord, ...]
    index: bytes
    manifest: bytes


def subset(manifest: Manifest, index: Index, *, parts: Collection[str]) -> CheckpointTexts:
    """Return the texts of a checkpoint that holds only `parts`. Each file holds one part, so none changes.

    Raises CheckpointError where a file holds several parts, or the checkpoint holds none of `parts`.
    """
    boxes = tuple(box for box in index.boxes if box.name.partition(".")[0] in parts)
    names = {box.file for box in boxes}
    mixed = {box.file for box in index.boxes if box.file in names} & {
        box.file for box in index.boxes if box.name.partition(".")[0] not in parts
    }
    if not boxes or mixed:
        what = f"holds nothing of {', '.join(sorted(parts))}" if not boxes else f"mixes parts in {min(mixed)}"
        raise CheckpointError(
            f"step {manifest.step}'s checkpoint {what}", remedy="Copy it whole, or take another."
        )
    records = tuple(index.files[name] for name in sorted(names))
    text = index_bytes(boxes, records)
    about: dict[str, Json] = {**manifest.about, SUBSET: list[Json](sorted(parts))}
    smaller = replace(
        manifest,
        about=about,
        files=tuple(replace(record, blocks="") for record in records),
        index_bytes=len(text),
        index_xxh3_128=xxhash.xxh3_128_hexdigest(text),
    )
    return CheckpointTexts(files=records, index=text, manifest=manifest_text(smaller).encode())


Progress = Callable[[int, int], None]
"""progress(done, total): called with the bytes that are transferred so far, and all bytes."""


@dataclass(frozen=True, kw_only=True)
class UploadResult:
    """A verified upload. what: "all", or "model" for only the weights.

    bytes: of the checkpoint in the store. bytes_sent: what this upload sent; the rest was there already.
    """

    url: str
    what: str
    bytes: int
    bytes_sent: int


class UploadInterrupted(Exception):
    """The upload was asked to stop. What has been verified is recorded."""


def upload_checkpoint(
    directory: Path,
    remote: Objects,
    *,
    what: str = "all",
    notes: Path,
    progress: Progress | None = None,
    go_on: Callable[[], bool] = lambda: True,
    others: UploadCoordinator | None = None,
    workers: int = 1,
) -> UploadResult:
    """Upload a checkpoint to `checkpoints/NAME` of a remote store, and verify it there.

    what: "all", or "model" for only the weights; a whole checkpoint that is there stays whole.
    notes: a file that records which files have been verified.
    go_on: asked between files; UploadInterrupted is raised when it returns False.
    others: the ranks that send files too; None where this process sends all. workers: files sent at a time.
    Raises StorageError where the store fails, and CheckpointError where the local checkpoint is damaged.
    """
    manifest = read_manifest(directory)
    index = read_index(directory, manifest)
    texts = _as_it_is(directory, manifest, index)
    try:
        if what != "all" and _Upload(directory, remote, texts, notes).is_there:
            what = "all"
        if what != "all":
            texts = subset(manifest, index, parts={what})
        upload = _Upload(directory, remote, texts, notes)
        sent = upload.carry_out(progress or (lambda done, total: None), go_on, others, workers)
    except OSError as error:
        raise storage_failure(error, doing=f"The backup of {directory.name}") from error
    url = remote.place(upload.prefix.rstrip("/"))
    return UploadResult(url=url, what=what, bytes=upload.total, bytes_sent=sent)


def _as_it_is(directory: Path, manifest: Manifest, index: Index) -> CheckpointTexts:
    records = tuple(index.files[file.name] for file in manifest.files)
    index_bytes, manifest_bytes = (directory / INDEX).read_bytes(), (directory / MANIFEST).read_bytes()
    return CheckpointTexts(files=records, index=index_bytes, manifest=manifest_bytes)


class _Upload:
    """The upload of one checkpoint. prefix: of its keys in the store. total: its bytes."""

    def __init__(self, directory: Path, remote: Objects, texts: CheckpointTexts, notes: Path) -> None:
        self._sender = FileSender(directory, remote, notes=notes, noted=read_notes(notes, remote.url))
        self.prefix = self._sender.prefix
        self.total = sum(file.bytes for file in texts.files) + len(texts.index) + len(texts.manifest)
        self._directory, self._remote, self._texts, self._notes = directory, remote, texts, notes

    @property
    def is_there(self) -> bool:
        """Whether the store has this manifest, and so everything that it names."""
        return self._is_same(MANIFEST, self._texts.manifest)

    def carry_out(
        self, progress: Progress, go_on: Callable[[], bool], others: UploadCoordinator | None, workers: int
    ) -> int:
        """Upload what is missing or different in the store; return the bytes that this process sent."""
        if not self.is_there:
            self._remove_other_manifest()
        note_begun(self._notes, self._remote.url)
        if others is None or others.world == 1:
            sent = self._send(self._texts.files, progress, go_on, workers)
        else:
            sent = self._send_with(others, progress, go_on, workers)
        self._require_all()
        self._remote.remove_unfinished(self.prefix)
        mark = mark_of(source_of(self._directory))
        if mark is not None:  # before the manifest, so that nobody sees the checkpoint without its mark
            self._remote.put(self.prefix + SUSPECT, mark)
        for name, content in ((INDEX, self._texts.index), (MANIFEST, self._texts.manifest)):
            if not self._is_same(name, content):
                self._remote.put(self.prefix + name, content)
                sent += len(content)
                if not self._is_same(name, content):
                    raise OSError(5, f"{self._remote.place(self.prefix + name)} is not what was written")
        for notes in all_notes(self._notes):
            notes.unlink(missing_ok=True)
        progress(self.total, self.total)
        return sent

    def _send(
        self, files: Iterable[FileRecord], progress: Progress, go_on: Callable[[], bool], workers: int
    ) -> int:
        sent = done = 0

        def send(record: FileRecord) -> tuple[int, int]:
            if not go_on():
                raise UploadInterrupted(self._directory.name)
            return self._sender.send(record), record.bytes

        with ThreadPoolExecutor(workers) as pool:
            sending = [pool.submit(send, record) for record in files]
            try:
                for future in as_completed(sending):
                    sent, done = sent + future.result()[0], done + future.result()[1]
                    progress(done, self.total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return sent

    def _send_with(
        self, others: UploadCoordinator, progress: Progress, go_on: Callable[[], bool], workers: int
    ) -> int:
        """Send this rank's share, and what another rank does not send in time."""
        name, url, files = self._directory.name, self._remote.url, self._texts.files
        forget_removed(self._notes, url, files=files, sizes=self._sender.sizes())
        others.ask(name, url=url, files=files)
        try:
            sent = self._send(files[:: others.world], progress, go_on, workers)
            for record in others.unsent(name, url=url, files=files, go_on=go_on):
                sent += self._sender.send(record)
        finally:
            others.end()
        if not go_on():
            raise UploadInterrupted(self._directory.name)
        return sent

    def _require_all(self) -> None:
        """Raise OSError where the store lacks a file of the checkpoint, or has it in another size.

        It may have been removed there since it was noted as sent.
        """
        sizes = self._sender.sizes()
        for file in self._texts.files:
            if sizes.get(file.name) != file.bytes:
                raise OSError(
                    errno.EIO,
                    f"{self._remote.place(self.prefix + file.name)} was sent, and is not there in full now",
                )

    def _remove_other_manifest(self) -> None:
        """Remove another content's manifest first: half replaced, it must not count as a checkpoint."""
        if self._sender.stat(MANIFEST) is not None:
            self._remote.delete(self.prefix + MANIFEST)

    def _is_same(self, name: str, content: bytes) -> bool:
        stored = self._sender.stat(name)
        if stored is None or stored.bytes != len(content):
            return False
        return self._remote.digest(self.prefix + name) == xxhash.xxh3_128_hexdigest(content)


_WINDOW_BYTES = 16 << 20


def download_checkpoint(
    source: Source,
    directory: Path,
    *,
    before_commit: Callable[[], None] = lambda: None,
    progress: Progress | None = None,
) -> Path:
    """Download a checkpoint below `directory`; return its path. Complete files of an earlier try are kept.

    Of a checkpoint that is here already, only what is damaged is downloaded. One that is marked as suspect
    is marked here too.
    before_commit: called when everything is there and verified, just before the checkpoint becomes visible.
    Raises DamagedCheckpoint where the bytes are not those that were saved, StorageError, and CheckpointError
    where another checkpoint has its name here.
    """
    final = directory / source.name
    manifest = read_manifest(source)
    if (final / MANIFEST).exists():
        before_commit()
        if _is_whole(final, manifest):
            _mark_as(source, final)
            return final
        _take_whole_files(final, manifest)
    check_coverage(read_index(source, manifest).boxes)
    partial = final.with_name(final.name + PARTIAL)
    try:
        here = sum(_bytes_here(partial / file.name, file) for file in manifest.files)
        require_space(directory, doing="Copying a checkpoint", bytes_needed=manifest.bytes - here)
        durable.make_directory(directory)
        partial.mkdir(exist_ok=True)
        done = 0
        for record in manifest.files:
            if not _is_here(partial / record.name, record):
                _fetch(source, record, partial / record.name)
            done += record.bytes
            if progress is not None:
                progress(done, manifest.bytes)
        index = source.content(INDEX, at_most=manifest.index_bytes)
        if xxhash.xxh3_128_hexdigest(index) != manifest.index_xxh3_128:
            raise DamagedCheckpoint(f"{source.place(INDEX)} was written again while it was read")
        for name, content in ((INDEX, index), (MANIFEST, source.content(MANIFEST, at_most=256 << 20))):
            (partial / name).unlink(missing_ok=True)
            durable.write_new(partial / name, content)
        _mark_as(source, partial)
        durable.sync_directory(partial)
        before_commit()
        shutil.rmtree(final, ignore_errors=True)
        durable.replace(partial, final)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{error.strerror or error}") from error
    except StoreUnreachable as error:
        raise storage_failure(error, doing=f"Fetching {source.name}") from error
    except OSError as error:
        raise storage_error(error, path=final, doing="Copying a checkpoint") from error
    return final


def _is_whole(final: Path, manifest: Manifest) -> bool:
    """Say whether a checkpoint here is whole. Raises CheckpointError where it is another one."""
    try:
        if read_manifest(final) != manifest:
            raise CheckpointError(
                f"{final} is another checkpoint of this name, and stays as it is",
                remedy="Copy to another run directory; or move this one away first.",
            )
    except DamagedCheckpoint:
        return False
    index = FileRecord(name=INDEX, bytes=manifest.index_bytes, xxh3_128=manifest.index_xxh3_128, blocks="")
    return all(_is_here(final / record.name, record) for record in (index, *manifest.files))


def _take_whole_files(final: Path, manifest: Manifest) -> None:
    """Link the whole files of a damaged checkpoint to where a download looks for those of an earlier try."""
    partial = final.with_name(final.name + PARTIAL)
    with suppress(OSError):  # what cannot be linked is fetched
        partial.mkdir(exist_ok=True)
        for record in manifest.files:
            if not (partial / record.name).exists() and _is_here(final / record.name, record):
                (partial / record.name).hardlink_to(final / record.name)


def _mark_as(source: Source, directory: Path) -> None:
    try:
        mark = mark_of(source)
    except StoreUnreachable as error:
        raise storage_failure(error, doing=f"Fetching {source.name}") from error
    if mark is not None:
        durable.write_whole(directory / SUSPECT, mark)


def _bytes_here(path: Path, record: FileRecord) -> int:
    """Return what an earlier try left of a file: it is kept, or removed before the file is fetched anew."""
    return min(record.bytes, path.stat().st_size) if path.exists() else 0


def _is_here(path: Path, record: FileRecord) -> bool:
    hasher = xxhash.xxh3_128()
    try:
        if path.stat().st_size != record.bytes:
            return False
        with path.open("rb") as file:
            while data := file.read(_WINDOW_BYTES):
                hasher.update(data)
    except OSError:  # it is missing, or the disk has lost it
        return False
    return hasher.hexdigest() == record.xxh3_128


def _fetch(source: Source, record: FileRecord, path: Path) -> None:
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_WINDOW_BYTES, record.bytes)))
    path.unlink(missing_ok=True)
    with source.open(record.name) as opened, durable.open_new(path) as file:
        for begin in range(0, record.bytes, _WINDOW_BYTES):
            data = buffer[: min(_WINDOW_BYTES, record.bytes - begin)]
            if opened.read_into([data], begin=begin) < len(data):
                raise DamagedCheckpoint(f"{source.place(record.name)} ends too early")
            hasher.update(data)
            file.write(data)
        if hasher.hexdigest() != record.xxh3_128:
            raise DamagedCheckpoint(f"{source.place(record.name)} does not have the hash it was saved with")
