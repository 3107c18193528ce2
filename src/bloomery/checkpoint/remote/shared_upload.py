"""Splits the upload of a checkpoint among the ranks: each sends, verifies and notes its share of the files.

The first rank writes a request into the run directory: which checkpoint goes where, and its files. A thread
of each other rank takes every n-th file, sends it, verifies it and notes that. The first rank sends its own
share, waits for the others' notes, and sends itself what a rank has not sent in time. Two ranks that send
the same file do no harm: an object becomes visible when it is whole, and both wrote the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery import durable
from bloomery.checkpoint.format.deadlines import StallWatch
from bloomery.checkpoint.format.manifest import DamagedCheckpoint, FileRecord
from bloomery.checkpoint.format.source import CHECKPOINTS
from bloomery.checkpoint.remote.mounts import require_mounted
from bloomery.checkpoint.remote.remote_run import place_at
from bloomery.errors import BloomeryError
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects, ObjectStat, storage_failure

log = logging.getLogger(__name__)


class FileSender:
    """Sends files of one checkpoint to `checkpoints/NAME` of a store. Several threads may use one.

    A file counts as verified where the store's own checksum of it is that of the bytes that were hashed while
    they were sent; where the store gives no such checksum, the object is read back.

    notes: the file in which this sender records what is verified. noted: the mark of each file that was
    verified before, by name.
    """

    def __init__(self, directory: Path, remote: Objects, *, notes: Path, noted: Mapping[str, str]) -> None:
        self.prefix = f"{CHECKPOINTS}/{directory.name}/"
        self._directory, self._remote, self._notes, self._noted = directory, remote, notes, noted
        self._writing = threading.Lock()

    def send(self, record: FileRecord) -> int:
        """Upload and verify one data file unless it is there already; return the bytes that were sent.

        Raises OSError, and DamagedCheckpoint where the file here is not what was saved.
        """
        key = self.prefix + record.name
        stored = self.stat(record.name)
        if stored is not None and stored.bytes == record.bytes:
            if self._noted.get(record.name) == stored.mark:
                return 0
            if self._remote.digest(key) == record.xxh3_128:
                self._note(record, stored)
                return 0
        sent = self._remote.send(key, self._directory / record.name)
        if sent.xxh3_128 != record.xxh3_128:
            with contextlib.suppress(OSError):  # nobody may take what was sent for the file
                self._remote.delete(key)
            raise DamagedCheckpoint(f"{self._directory / record.name} is not what was saved, and is not sent")
        if not sent.is_proven and self._remote.digest(key) != record.xxh3_128:
            raise OSError(5, f"{self._remote.place(key)} is not what was sent: it was changed on its way")
        self._note(record, self._remote.stat(key))
        return record.bytes

    def stat(self, name: str) -> ObjectStat | None:
        """Return what the store has under a name; None for nothing. Raises OSError."""
        try:
            return self._remote.stat(self.prefix + name)
        except FileNotFoundError:
            return None

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file of this checkpoint in the store, by one list. Raises OSError."""
        listed = self._remote.entries(self.prefix)
        return {entry.key.removeprefix(self.prefix): entry.stat.bytes for entry in listed}

    def _note(self, record: FileRecord, stored: ObjectStat) -> None:
        line = json.dumps({"url": self._remote.url, "file": record.name, "mark": stored.mark})
        with self._writing:
            self._notes.parent.mkdir(parents=True, exist_ok=True)
            with self._notes.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def read_notes(notes: Path, url: str) -> dict[str, str]:
    """Return the mark (ETag) of each file that was verified at `url`, by name, as all ranks noted it.

    notes: the first rank's file; those of other ranks have names that begin with its name. Truncated and
    damaged lines are skipped.
    """
    noted: dict[str, str] = {}
    for path in all_notes(notes):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                note: Any = json.loads(line)  # Any: JSON
                if note["url"] == url:
                    noted[note["file"]] = note["mark"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
    return noted


def note_begun(notes: Path, url: str) -> None:
    """Note durably that an upload to `url` has begun, before anything is sent. Raises OSError."""
    if url not in urls_of(notes):
        durable.make_directory(notes.parent)
        durable.append(notes, json.dumps({"url": url}) + "\n")


def urls_of(notes: Path) -> set[str]:
    """Return where the upload was sent that all ranks noted: see `read_notes`."""
    urls = set[str]()
    for path in all_notes(notes):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                urls.add(str(json.loads(line)["url"]))
    return urls


def forget_removed(notes: Path, url: str, *, files: Sequence[FileRecord], sizes: Mapping[str, int]) -> None:
    """Drop the notes of files that the store no longer has in full: the ranks then send these again.

    Whoever tidies a bucket may remove an upload that was cut short; the next start would take its files as
    sent. sizes: see `FileSender.sizes`.
    """
    removed = {file.name for file in files if sizes.get(file.name) != file.bytes}
    if removed.isdisjoint(read_notes(notes, url)):
        return
    for path in all_notes(notes):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [f"{line}\n" for line in lines if not _tells_of(line, removed)]
        durable.write_whole_unsynced(path, "".join(kept))


def _tells_of(line: str, names: Collection[str]) -> bool:
    try:
        return json.loads(line)["file"] in names
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def all_notes(notes: Path) -> list[Path]:
    """Return the notes of all ranks about one checkpoint."""
    return sorted(notes.parent.glob(f"{notes.name}*"))


STALL_S = 600.0
"""The seconds without a finished file after which the first rank sends a rank's files itself."""
POLL_S = 2.0
"""The seconds between two polls of the request, and of the notes of the other ranks."""
_LONGEST_PAUSE_S = 60.0
"""The most seconds before a rank tries again to send a share that it could not send."""


@dataclass(frozen=True, kw_only=True)
class SendRequest:
    """What the first rank asks of the others. token: differs for each request. url: of the run's backups."""

    token: str
    checkpoint: str
    url: str
    files: tuple[FileRecord, ...]


def notes_of(rundir: RunDirectory, checkpoint: str, *, rank: int = 0, place: str = "") -> Path:
    """Return the file in which a rank notes what of a checkpoint it has sent and verified.

    place: see `Backup`.
    """
    of_rank = f"-r{rank:05d}" if rank else ""
    return rundir.backups / f"{checkpoint}{place and '.'}{place}.notes{of_rank}"


def _request_of(rundir: RunDirectory, place: str) -> Path:
    return rundir.backups / f"sending{place and '.'}{place}.json"


class UploadCoordinator:
    """The first rank's side of a shared upload: asks the other ranks for their shares, and waits for them.

    world: the number of ranks, this one included. stall_s: see STALL_S. place: see `Backup`.
    """

    def __init__(
        self,
        rundir: RunDirectory,
        *,
        world: int,
        stall_s: float = STALL_S,
        poll_s: float = POLL_S,
        place: str = "",
    ) -> None:
        self._place = place
        self._rundir, self.world, self._stall_s, self._poll_s = rundir, world, stall_s, poll_s

    def ask(self, checkpoint: str, *, url: str, files: Sequence[FileRecord]) -> None:
        """Ask the other ranks for their shares of `files`: rank r sends files[r::world]. Raises OSError."""
        request = {
            "token": secrets.token_hex(8),
            "checkpoint": checkpoint,
            "url": url,
            "files": [[file.name, file.bytes, file.xxh3_128] for file in files],
        }
        durable.write_whole_unsynced(_request_of(self._rundir, self._place), json.dumps(request))

    def unsent(
        self, checkpoint: str, *, url: str, files: Sequence[FileRecord], go_on: Callable[[], bool]
    ) -> Iterator[FileRecord]:
        """Wait until the other ranks have noted their files; yield those that a rank does not send in time.

        Ends early when `go_on` says no.
        """
        notes = notes_of(self._rundir, checkpoint, place=self._place)
        shares = {rank: list(files[rank :: self.world]) for rank in range(1, self.world)}
        watches = {rank: StallWatch(self._stall_s) for rank in shares}
        while shares and go_on():
            noted = read_notes(notes, url)
            for rank, share in tuple(shares.items()):
                left = [file for file in share if file.name not in noted]
                if not left:
                    del shares[rank]
                elif watches[rank].is_stalled(len(share) - len(left)):
                    log.warning(
                        "rank %d has sent no file of the backup of %s for %.0f s: rank 0 sends the %d left",
                        rank,
                        checkpoint,
                        self._stall_s,
                        len(left),
                    )
                    del shares[rank]
                    yield from left
            if shares:
                time.sleep(self._poll_s)

    def end(self) -> None:
        """Withdraw the request."""
        _request_of(self._rundir, self._place).unlink(missing_ok=True)


class BackupHelper:
    """The other ranks' side of a shared upload: a thread that sends its share when the first rank asks.

    close: ends it; a file that is being sent is left unsent. place: see `Backup`.
    """

    def __init__(
        self, rundir: RunDirectory, *, rank: int, world: int, poll_s: float = POLL_S, place: str = ""
    ) -> None:
        self._place = place
        self._rundir, self._rank, self._world, self._poll_s = rundir, rank, world, poll_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="backup-helper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop taking requests. Does not wait for a file that is on its way."""
        self._stop.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        served, logged_error, pause_s, failures = "", "", self._poll_s, 0
        while not self._stop.wait(pause_s):
            pause_s = self._poll_s
            request = read_request(self._rundir, self._place)
            if request is None or request.token == served:
                failures = 0
                continue
            try:
                self._serve(request)
                served, logged_error, failures = request.token, "", 0
            except BloomeryError as error:
                if logged_error != str(error):
                    logged_error = str(error)
                    log.warning("rank %d could not send its share of a backup: %s", self._rank, error)
                if isinstance(error, DamagedCheckpoint):  # the first rank meets it too, and passes over it
                    served = request.token
                failures += 1
                pause_s = min(self._poll_s * 2**failures, _LONGEST_PAUSE_S)
            except Exception:  # the thread's edge; the first rank sends what is left
                log.exception("rank %d could not send its share of a backup", self._rank)
                served = request.token

    def _serve(self, request: SendRequest) -> None:
        directory = self._rundir.checkpoints / request.checkpoint
        require_mounted(self._rundir, request.url, place=self._place, records=False)
        sender = FileSender(
            directory,
            # The first rank has made the directory: where it is not there, this node lacks the disk.
            place_at(request.url, create=False),
            notes=notes_of(self._rundir, request.checkpoint, rank=self._rank, place=self._place),
            noted=read_notes(notes_of(self._rundir, request.checkpoint, place=self._place), request.url),
        )
        for file in request.files[self._rank :: self._world]:
            current = read_request(self._rundir, self._place)
            if self._stop.is_set() or current is None or current.token != request.token:
                return
            try:
                sender.send(file)
            except OSError as error:
                raise storage_failure(error, doing=f"The backup of {request.checkpoint}") from error


def read_request(rundir: RunDirectory, place: str = "") -> SendRequest | None:
    """Return what the first rank asks for at present; None where it asks for nothing."""
    try:
        content: Any = json.loads(_request_of(rundir, place).read_bytes())  # Any: JSON
        files = tuple(
            FileRecord(name=name, bytes=size, xxh3_128=digest, blocks="")
            for name, size, digest in content["files"]
        )
        return SendRequest(
            token=content["token"], checkpoint=content["checkpoint"], url=content["url"], files=files
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
