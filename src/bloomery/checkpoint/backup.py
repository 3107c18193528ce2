"""The backup of a run: a thread that copies each committed checkpoint elsewhere while training goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from bloomery.checkpoint.catalogue import Found, checkpoints
from bloomery.checkpoint.copies import copies, is_copied, note_copy
from bloomery.checkpoint.manifest import DamagedCheckpoint, parse_name, read_manifest
from bloomery.checkpoint.remote import (
    RemoteCheckpoint,
    place_at,
    remote_checkpoints,
    remote_incarnations,
)
from bloomery.checkpoint.subset import SUBSET
from bloomery.checkpoint.upload import Interrupted, upload_checkpoint
from bloomery.config.backup import BackupSection
from bloomery.errors import BloomeryError, CheckpointError
from bloomery.events.incarnation import adopt, current, read_incarnations, visible
from bloomery.events.rundir import RunDir
from bloomery.objects import Objects, storage_failure

log = logging.getLogger(__name__)

_SHORTEST_WAIT_S, _LONGEST_WAIT_S, _TICK_S = 5.0, 600.0, 0.2
_KEPT_BESIDE = ("recipe.toml", "sources.toml", "data/tokenizer.json", "data/prepared.json")


class Backup:
    """Copies the checkpoints of one run to `URL/NAME`. For the rank that holds the run; `close` ends it.

    What fails is told once, tried again (sooner after a new checkpoint), and keeps the local copies: `due`
    names the checkpoints whose only copy is here. url: where they go. when_copied: called at a good end, once
    nothing is due any more.
    """

    def __init__(self, rundir: RunDir, section: BackupSection, *, run_name: str) -> None:
        self._rundir, self._section, self._run_name = rundir, section, run_name
        self.url = backup_url(section, run_name)
        self._wake, self._stop = threading.Event(), threading.Event()
        self.when_copied: Callable[[], None] = lambda: None
        self._told = ""
        self._tries = self._failed_try = self._incarnation_copied = 0
        self._thread = threading.Thread(target=self._run, name="checkpoint-backup", daemon=True)
        self._started = False

    def look(self) -> None:
        """Look for what is to be copied, soon: after each save and each rewind. Returns at once."""
        if not self._started:
            self._started = True
            self._thread.start()
        self._wake.set()

    def due(self) -> list[Found]:
        """Return the checkpoints that are to be copied and are not yet, oldest first."""
        return due(self._rundir, self._section, run_name=self._run_name)

    def restorable(self) -> list[RemoteCheckpoint]:
        """Return what a run without a checkpoint here can go on from, newest first; fetch its incarnations.

        Raises StorageError, and CheckpointError where the backups are another run's, or of the weights alone.
        """
        try:
            remote = place_at(self.url)
            found = {parse_name(one.name): one for one in remote_checkpoints(remote, abandoned=True)}
            if found:
                adopt(self._rundir, remote_incarnations(remote))
        except OSError as error:
            raise storage_failure(error, doing="Looking for a backup of the run") from error
        shown = visible((base for base in found if base is not None), read_incarnations(self._rundir))
        sources = [found[base] for base in sorted(shown, reverse=True)]
        whole = [source for source in sources if not _is_in_part(source)]
        if sources and not whole:
            raise CheckpointError(
                f"the backups at {self.url} hold the weights alone: a run cannot go on from them",
                remedy="To start anew, choose another run.name or backup.url (see also backup.what).",
            )
        return whole

    def close(self, *, wait_s: float | None = None) -> None:
        """Wait until all is copied, at most `wait_s` (by default as the recipe says), then stop.

        What failed before is tried once more. What is not copied then is copied by the next start, or by
        `bloomery ckpt copy`.
        """
        if self._started:
            deadline = time.monotonic() + (60 * self._section.finish_minutes if wait_s is None else wait_s)
            last_try = self._tries + 1
            while (
                self._thread.is_alive()
                and time.monotonic() < deadline
                and self._failed_try < last_try
                and self.due()
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
            self.when_copied()

    def _run(self) -> None:
        wait_s = _SHORTEST_WAIT_S
        while not self._stop.is_set():
            self._wake.clear()
            self._tries += 1
            try:
                self._copy_all()
                wait_s, self._told = _LONGEST_WAIT_S, ""
            except Interrupted:
                return
            except BloomeryError as error:
                self._tell(str(error))
                wait_s, self._failed_try = min(2 * wait_s, _LONGEST_WAIT_S), self._tries
            except Exception:  # the edge of a thread
                log.exception("the backup of %s failed", self._rundir.path)
                wait_s, self._failed_try = _LONGEST_WAIT_S, self._tries
            self._wake.wait(wait_s)

    def _copy_all(self) -> None:
        left, incarnation = self.due(), current(self._rundir)
        # A rewind hides checkpoints: who restores from the backup must know of it.
        news = incarnation != self._incarnation_copied and copies(self._rundir)
        if not left and not news:
            return
        remote = place_at(self.url)
        try:
            copy_beside(self._rundir, remote)
        except OSError as error:
            raise storage_failure(error, doing="The backup") from error
        self._incarnation_copied = incarnation
        for found in left:
            if not self._stop.is_set():
                _back_up(self._rundir, found, remote, self._section, stopped=self._stop)

    def _tell(self, text: str) -> None:
        if text != self._told:
            log.warning("%s\n  Training goes on; the local copies are kept until it works.", text)
        self._told = text


def _is_in_part(source: RemoteCheckpoint) -> bool:
    try:
        return SUBSET in read_manifest(source).about
    except DamagedCheckpoint:
        return False  # whoever loads it says what is damaged


def backup_url(section: BackupSection, run_name: str) -> str:
    """Return the place of one run's backups; empty where there are none."""
    return f"{section.url.rstrip('/')}/{run_name}" if section.url else ""


def due(rundir: RunDir, section: BackupSection, *, run_name: str) -> list[Found]:
    """Return the checkpoints of a run that are to be backed up and are not yet, oldest first.

    Only a verified copy at the place that the section names counts, and only one of all that it asks for.
    """
    url = backup_url(section, run_name)
    if not url:
        return []
    done = copies(rundir)
    return [
        found
        for found in checkpoints(rundir)
        if not is_copied(done.get(found.name, ()), name=found.name, url=url, what=section.what)
        and (not section.every_steps or found.step % section.every_steps == 0)
    ]


def _back_up(
    rundir: RunDir, found: Found, remote: Objects, section: BackupSection, *, stopped: threading.Event
) -> None:
    begun = time.monotonic()
    uploaded = upload_checkpoint(
        found.directory,
        remote,
        what=section.what,
        notes=rundir.backups / f"{found.name}.notes",
        go_on=lambda: not stopped.is_set(),
    )
    note_copy(rundir, found.name, url=uploaded.url, what=uploaded.what, bytes=uploaded.bytes)
    seconds = time.monotonic() - begun
    log.info("backed up %s to %s: %.2f GB in %.0f s", found.name, uploaded.url, uploaded.bytes / 1e9, seconds)


def copy_beside(rundir: RunDir, remote: Objects) -> None:
    """Copy what a checkpoint needs to become a run again: recipe, tokenizer, incarnations. Raises OSError.

    Raises CheckpointError where another run has its backups: an incarnation there is not the one here.
    """
    for path in sorted(rundir.incarnations.glob("*.json")):
        key, content = f"incarnations/{path.name}", path.read_bytes()
        there = _content(remote, key)
        if there is not None and there != content:
            raise CheckpointError(
                f"{remote.url} holds the backups of another run: its {key} is not this run's",
                remedy="Choose another run.name or backup.url.",
            )
        if there is None:
            remote.put(key, content)
    for name in _KEPT_BESIDE:
        path = rundir.path / name
        if path.is_file() and _content(remote, name) != path.read_bytes():
            remote.put(name, path.read_bytes())


def fetch_beside(remote: Objects, rundir: RunDir) -> None:
    """Write what `copy_beside` copied into a run directory, where it has none of it.

    Raises OSError, and CheckpointError where the directory is another run's.
    """
    adopt(rundir, remote_incarnations(remote))
    for name in _KEPT_BESIDE:
        path = rundir.path / name
        content = None if path.exists() else _content(remote, name)
        if content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".partial")
            partial.write_bytes(content)
            partial.rename(path)


def _content(remote: Objects, key: str) -> bytes | None:
    try:
        return remote.content(key)
    except FileNotFoundError:
        return None
