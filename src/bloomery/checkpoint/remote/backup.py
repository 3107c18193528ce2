"""Backs a run up: a thread uploads each committed checkpoint to a remote store while training goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from bloomery.checkpoint.format.catalogue import (
    CommittedCheckpoint,
    checkpoints,
    has_copies,
    listing_changed,
    record_copy,
)
from bloomery.checkpoint.format.manifest import DamagedCheckpoint, parse_name, read_manifest
from bloomery.checkpoint.format.source import RemoteCheckpoint
from bloomery.checkpoint.format.suspects import marks_to_send, refuse_if_only_suspects, send_marks
from bloomery.checkpoint.remote.backup_duty import backup_url, due, note_round, read_duty, uncopied
from bloomery.checkpoint.remote.mounts import is_unmade, require_kept, require_mounted
from bloomery.checkpoint.remote.partial_uploads import left_in_part, remove_left_in_part
from bloomery.checkpoint.remote.remote_run import (
    log_backup_used,
    place_at,
    remote_checkpoints,
    remote_incarnations,
    unmarked_copies,
    upload_logs_and_data,
    upload_run_files,
)
from bloomery.checkpoint.remote.shared_upload import UploadCoordinator, notes_of
from bloomery.checkpoint.remote.transfer import SUBSET, UploadInterrupted, upload_checkpoint
from bloomery.config.checkpoint import BackupSection
from bloomery.config.environment import OfflineRefused
from bloomery.errors import BloomeryError, CheckpointError, StorageError
from bloomery.events.incarnation import (
    Base,
    current,
    is_same_run,
    merge_records,
    read_incarnations,
    visibility,
)
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import PATIENCE_S, Objects, storage_failure

log = logging.getLogger(__name__)

_COMPARE_TIMEOUT_S = 30.0
"""For reaching the backup at a start that has local checkpoints."""
_SHORTEST_WAIT_S, _LONGEST_WAIT_S, _TICK_S = 5.0, 600.0, 0.2


class Backup:
    """Uploads the checkpoints of one run to `URL/NAME`. Used only by rank 0; `close` ends it.

    The newest goes first. Where saves come faster than uploads, those between two uploads are passed over:
    they are uploaded later if they are still here, but nothing waits for them.

    In a run of several peers, a peer uploads to `URL/NAME/PEER`, and only while it is the peer that makes the
    run's backups. An upload that fails is logged once and tried again, sooner after a new checkpoint. Local
    checkpoints that are `due` are not pruned meanwhile.

    url: where the run's checkpoints go. on_all_copied: called by `close` once nothing is due any more.
    world: the number of ranks that send files; each but the first has a `BackupHelper`.
    place: a name for the files in RUN/backups, so that the backups to several places keep apart; "" for the
        first place.
    """

    def __init__(
        self,
        rundir: RunDirectory,
        section: BackupSection,
        *,
        run_name: str,
        world: int = 1,
        place: str = "",
    ) -> None:
        self._others, self._place = UploadCoordinator(rundir, world=world, place=place), place
        self._has_files_left = self._sends_files = False
        self._rundir, self._section, self._run_name = rundir, section, run_name
        self.url = backup_url(section, run_name, read_duty(rundir))
        self._wake, self._stop = threading.Event(), threading.Event()
        self.on_all_copied: Callable[[], None] = lambda: None
        self.marked: Collection[str] = ()
        """The names of the backups that are marked as suspect, as of when the place was last listed."""
        self._told = self._sending = ""
        self._damaged: dict[str, DamagedCheckpoint] = {}
        """Checkpoints whose files here are not what was saved, which only the next start tries again."""
        self._tries = self._failed_try = self._incarnation_copied = 0
        self._thread = threading.Thread(target=self._run, name="checkpoint-backup", daemon=True)
        self._started = False

    def wake(self) -> None:
        """Wake the thread to look for checkpoints to upload, after each save and rewind. Does not wait."""
        if not self._started:
            self._started = True
            with suppress(OSError):  # what a process that was killed asked for, perhaps at another URL
                self._others.end()
            self._thread.start()
        self._has_files_left = True
        self._wake.set()

    def due(self) -> list[CommittedCheckpoint]:
        """Return the checkpoints that are to be uploaded and are not yet, oldest first: see `due`."""
        return due(self._rundir, self._section, run_name=self._run_name, place=self._place)

    def in_use(self) -> list[CommittedCheckpoint]:
        """Return the checkpoints that must stay here for now: those that are due, and the one being sent.

        None are due to a place for which pruning does not wait.
        """
        sending = [item for item in self._uncopied() if item.name == self._sending]
        return [*(self.due() if self._section.prune_waits else ()), *sending]

    def restorable(
        self, *, instead_of: Collection[str] = (), up_to_step: int | None = None, warns: bool = True
    ) -> list[RemoteCheckpoint]:
        """Return the backups from which a run can go on that has no checkpoint to go on from, newest first.

        Also downloads the incarnation records of the backed-up run.
        instead_of: the names of the run's checkpoints here, which are suspect, or too new for a rewind.
        up_to_step: None at a start; it is refused where all backups are suspect, so that no run begins anew.
        warns: whether to log from which one the run goes on.
        Raises StorageError, and CheckpointError where the backups are another run's, or of only the weights.
        """
        try:
            remote = self._to_read()
            copies = [] if remote is None else remote_checkpoints(remote, abandoned=True)
            self.marked = {copy.name for copy in copies if copy.is_marked}
            if remote is not None and copies:
                merge_records(self._rundir, remote_incarnations(remote))
        except OSError as error:
            raise storage_failure(error, doing="Looking for a backup of the run") from error
        sources = self.part_of_run(reversed(copies))
        whole = [source for source in sources if not _is_in_part(source)]
        if sources and not whole:
            raise CheckpointError(
                f"the backups at {self.url} hold the weights alone: a run cannot go on from them",
                remedy="To start anew, choose another run.name or backup.url (see also backup.what).",
            )
        last = float("inf") if up_to_step is None else up_to_step
        early = [source for source in whole if _base_of(source)[0] <= last]
        # What is suspect here is suspect there too, even before its backup is marked.
        unmarked = unmarked_copies(source for source in early if source.name not in instead_of)
        if up_to_step is None and not unmarked:
            refuse_if_only_suspects(sorted({*instead_of, *(source.name for source in whole)}))
        if warns:
            log_backup_used(unmarked, instead_of=instead_of)
        return unmarked

    def part_of_run(self, copies: Iterable[RemoteCheckpoint]) -> list[RemoteCheckpoint]:
        """Return those backups that no incarnation known by now has left behind, in their order."""
        is_part = visibility(read_incarnations(self._rundir))
        return [copy for copy in copies if is_part(_base_of(copy))]

    def newer(self) -> list[RemoteCheckpoint]:
        """Return the backups that are newer than the newest local checkpoint, newest first.

        So a machine that comes back, after others went on with the run, goes on from where they are. Also
        downloads the incarnation records. Logs a warning and returns nothing where the backup cannot be
        reached. Raises CheckpointError where this directory and the backup both went on independently.
        """
        try:
            remote = self._to_read(patience_s=_COMPARE_TIMEOUT_S)
            copies = [] if remote is None else remote_checkpoints(remote, abandoned=True)
            self.marked = {copy.name for copy in copies if copy.is_marked}
            records = remote_incarnations(remote) if remote is not None and copies else {}
        except (OSError, StorageError, OfflineRefused) as error:
            log.warning(
                "it could not be checked whether %s has a newer checkpoint than this directory: %s",
                self.url,
                error,
            )
            return []
        before = checkpoints(self._rundir)
        if not copies or not before or not is_same_run(self._rundir, records):
            return []  # uploading reports it where the backup is another run's
        merge_records(self._rundir, records)
        local = checkpoints(self._rundir)
        beyond = [copy for copy in copies if not local or _base_of(copy) > local[-1].base]
        return unmarked_copies(copy for copy in self.part_of_run(reversed(beyond)) if not _is_in_part(copy))

    def _to_read(self, *, patience_s: float = PATIENCE_S) -> Objects | None:
        """Return the place of the backups; None for a directory that no backup has made yet.

        Raises StorageError where backups were made there and their disk is not mounted.
        """
        require_mounted(self._rundir, self.url, place=self._place, records=False)
        require_kept(self._rundir, self.url)
        if is_unmade(self.url):
            return None
        return place_at(self.url, patience_s=patience_s, create=False)

    def close(self, *, wait_s: float | None = None) -> None:
        """Wait until everything is uploaded, then stop the thread.

        What failed before is tried once more. What is left is uploaded by the next start, or by
        `bloomery ckpt copy`. wait_s: the longest wait, in seconds; None for backup.finish_minutes.
        """
        if self._started and not self._writes():
            self._stop.set()
            self._wake.set()
            self._thread.join(timeout=1.0)
            if not self.due():
                self.on_all_copied()
            return
        if self._started:
            deadline = time.monotonic() + (60 * self._section.finish_minutes if wait_s is None else wait_s)
            last_try = self._tries + 1
            while (
                self._thread.is_alive()
                and time.monotonic() < deadline
                and self._failed_try < last_try
                and (self.due() or self._has_files_left or self._sends_files or self._marks_to_send())
            ):
                self._wake.set()
                time.sleep(_TICK_S)
            self._stop.set()
            self._wake.set()
            self._thread.join(timeout=1.0)
        left = len(self.due())
        if left:
            log.warning("%d checkpoint(s) are not backed up: the next start goes on with it", left)
        elif self._started and wait_s is None:
            self.on_all_copied()

    def _run(self) -> None:
        wait_s = _SHORTEST_WAIT_S
        while not self._stop.is_set():
            self._wake.clear()
            self._tries += 1
            try:
                self._copy_all()
                wait_s, self._told = _LONGEST_WAIT_S, ""
            except UploadInterrupted:
                return
            except BloomeryError as error:
                self._tell(str(error))
                wait_s, self._failed_try = min(2 * wait_s, _LONGEST_WAIT_S), self._tries
            except Exception:  # the thread's edge
                log.exception("the backup of %s failed", self._rundir.path)
                wait_s, self._failed_try = _LONGEST_WAIT_S, self._tries
            # A peer that makes no backups checks often whether it is to take over, which a file says.
            self._wake.wait(wait_s if self._writes() else _SHORTEST_WAIT_S)

    def _writes(self) -> bool:
        """Whether this peer makes the run's backups."""
        duty = read_duty(self._rundir)
        return duty is None or duty.writes

    def _copy_all(self) -> None:
        if not self._writes():
            return
        left, incarnation = self._intact_uncopied(), current(self._rundir)
        # A rewind hides checkpoints, so a new incarnation is uploaded even where no checkpoint is due.
        has_new_incarnation = incarnation != self._incarnation_copied and has_copies(self._rundir)
        has_files_left = self._has_files_left and has_copies(self._rundir)
        in_part = left_in_part(self._rundir, self.url, place=self._place)
        has_more = has_new_incarnation or has_files_left or self._marks_to_send()
        if not left and not has_more and not in_part:
            self._has_files_left = False
            self._raise_damage()
            return
        require_mounted(self._rundir, self.url, place=self._place)
        require_kept(self._rundir, self.url)
        remote = place_at(self.url)
        try:
            upload_run_files(self._rundir, remote)
        except OSError as error:
            raise storage_failure(error, doing="The backup") from error
        self._incarnation_copied = incarnation
        while left and not self._stop.is_set():
            newest = left[-1]
            self._sending = newest.name
            try:
                _back_up(
                    self._rundir,
                    newest,
                    remote,
                    self._section,
                    stopped=self._stop,
                    others=self._others,
                    place=self._place,
                )
            except BloomeryError as error:
                if newest.directory.exists():
                    if not isinstance(error, DamagedCheckpoint):
                        raise
                    self._damaged[newest.name] = error
                else:
                    log.info("%s was removed before it was backed up: a newer one is", newest.name)
            self._sending = ""
            left = self._intact_uncopied()
        try:
            send_marks(self._rundir, remote, place=self._place)
        except OSError as error:
            raise storage_failure(error, doing="Marking backups as suspect") from error
        try:
            remove_left_in_part(
                self._rundir, remote, place=self._place, go_on=lambda: not self._stop.is_set()
            )
        except OSError as error:
            raise storage_failure(error, doing="Removing what was sent in part") from error
        self._send_more(remote)
        self._raise_damage()

    def _marks_to_send(self) -> bool:
        return bool(marks_to_send(self._rundir, self.url, place=self._place))

    def _send_more(self, remote: Objects) -> None:
        """Send logs and data, until a checkpoint is due: that goes first."""
        # In this order, so that `close` finds one of the two set until everything is sent.
        self._sends_files, self._has_files_left = True, False

        seen: tuple[int, ...] | None = None

        def go_on() -> bool:
            # Asked for each of hundreds of files: what is due is found anew where checkpoints have changed.
            nonlocal seen
            before, seen = seen, listing_changed(self._rundir)
            is_due = seen != before and any(item.name not in self._damaged for item in self.due())
            self._has_files_left = self._stop.is_set() or is_due
            return not self._has_files_left

        try:
            upload_logs_and_data(self._rundir, remote, self._section, place=self._place, go_on=go_on)
        except OSError as error:
            self._has_files_left = True
            raise storage_failure(error, doing="The backup of logs and data") from error
        finally:
            self._sends_files = False

    def _uncopied(self) -> list[CommittedCheckpoint]:
        return uncopied(self._rundir, self._section, run_name=self._run_name, place=self._place)

    def _intact_uncopied(self) -> list[CommittedCheckpoint]:
        """Return those that are to be sent: one that is damaged here keeps no other from being sent."""
        left = self._uncopied()
        here = {item.name for item in left}
        self._damaged = {name: damage for name, damage in self._damaged.items() if name in here}
        return [item for item in left if item.name not in self._damaged]

    def _raise_damage(self) -> None:
        for damage in self._damaged.values():
            raise damage

    def _tell(self, text: str) -> None:
        if text != self._told:
            log.warning("%s\n  Training goes on; the local copies are kept until it works.", text)
        self._told = text


def _base_of(copy: RemoteCheckpoint) -> Base:
    return parse_name(copy.name) or (0, 0)


def _is_in_part(source: RemoteCheckpoint) -> bool:
    try:
        return SUBSET in read_manifest(source).about
    except DamagedCheckpoint:
        return False  # loading it reports the damage


def _back_up(
    rundir: RunDirectory,
    checkpoint: CommittedCheckpoint,
    remote: Objects,
    section: BackupSection,
    *,
    stopped: threading.Event,
    others: UploadCoordinator,
    place: str,
) -> None:
    begun = time.monotonic()
    uploaded = upload_checkpoint(
        checkpoint.directory,
        remote,
        what=section.what,
        notes=notes_of(rundir, checkpoint.name, place=place),
        go_on=lambda: not stopped.is_set(),
        others=others,
    )
    record_copy(
        rundir, checkpoint.name, url=uploaded.url, what=uploaded.what, bytes=uploaded.bytes, place=place
    )
    if not place and read_duty(rundir) is not None:
        note_round(rundir, checkpoint.directory)
    seconds = time.monotonic() - begun
    log.info(
        "backed up %s to %s: %.2f GB in %.0f s", checkpoint.name, uploaded.url, uploaded.bytes / 1e9, seconds
    )
