"""The backup of a run: a thread that copies each committed checkpoint elsewhere while training goes on."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

from bloomery.checkpoint.catalogue import Found, checkpoints
from bloomery.checkpoint.remote import Remote, RemoteCheckpoint, remote_checkpoints, remote_failure
from bloomery.checkpoint.upload import Interrupted, upload_checkpoint, write_record
from bloomery.config.backup import BackupSection
from bloomery.errors import BloomeryError, CheckpointError
from bloomery.events.incarnation import read_incarnations
from bloomery.events.rundir import RunDir

log = logging.getLogger(__name__)

_SHORTEST_WAIT_S, _LONGEST_WAIT_S, _TICK_S = 5.0, 600.0, 0.2
_KEPT_BESIDE = ("recipe.toml", "sources.toml", "data/tokenizer.json", "data/prepared.json")


class Backup:
    """Copies the checkpoints of one run to `URL/NAME`. For the rank that holds the run; `close` ends it.

    What fails is told once, tried again (sooner after a new checkpoint), and keeps the local copies: `due`
    names the checkpoints whose only copy is here. url: where they go.
    """

    def __init__(self, rundir: RunDir, section: BackupSection, *, run_name: str) -> None:
        self._rundir, self._section = rundir, section
        self.url = f"{section.url.rstrip('/')}/{run_name}"
        self._wake, self._stop = threading.Event(), threading.Event()
        self._told = ""
        self._thread = threading.Thread(target=self._run, name="checkpoint-backup", daemon=True)
        self._started = False

    def committed(self) -> None:
        """Look for what is to be copied, soon. Returns at once."""
        if not self._started:
            self._started = True
            self._thread.start()
        self._wake.set()

    def due(self) -> list[Found]:
        """Return the checkpoints that are to be copied and are not yet, oldest first."""
        return due(self._rundir, self._section)

    def restorable(self) -> list[RemoteCheckpoint]:
        """Return what a run that lost everything can go on from, newest first, and fetch its incarnations.

        Only for a run directory without incarnations. Raises StorageError.
        """
        try:
            remote = Remote(self.url)
            found = remote_checkpoints(remote)
            if found:
                fetch_incarnations(remote, self._rundir)
        except OSError as error:
            raise remote_failure(error, doing="Looking for a backup of the run") from error
        return found[::-1]

    def close(self, *, wait_s: float | None = None) -> None:
        """Wait until all is copied, at most `wait_s` (by default as the recipe says), then stop.

        What is not copied then is copied by the next start, or by `bloomery ckpt copy`.
        """
        if self._started:
            deadline = time.monotonic() + (60 * self._section.finish_minutes if wait_s is None else wait_s)
            while self._thread.is_alive() and time.monotonic() < deadline and not self._told and self.due():
                self._wake.set()
                time.sleep(_TICK_S)
            self._stop.set()
            self._wake.set()
            self._thread.join(timeout=1.0)
        left = len(self.due())
        if left:
            log.warning("%d checkpoint(s) are not backed up: the next start goes on with it", left)

    def _run(self) -> None:
        wait_s = _SHORTEST_WAIT_S
        while not self._stop.is_set():
            self._wake.clear()
            try:
                self._copy_all()
                wait_s, self._told = _LONGEST_WAIT_S, ""
            except Interrupted:
                return
            except BloomeryError as error:
                self._tell(str(error))
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            except Exception:  # the edge of a thread
                log.exception("the backup of %s failed", self._rundir.path)
                wait_s = _LONGEST_WAIT_S
            self._wake.wait(wait_s)

    def _copy_all(self) -> None:
        left = self.due()
        if not left:
            return
        remote = Remote(self.url)
        try:
            copy_beside(self._rundir, remote)
        except OSError as error:
            raise remote_failure(error, doing="The backup") from error
        for found in left:
            if not self._stop.is_set():
                back_up(self._rundir, found, remote, self._section, stopped=self._stop)

    def _tell(self, text: str) -> None:
        if text != self._told:
            log.warning("%s\n  Training goes on; the local copies are kept until it works.", text)
        self._told = text


def due(rundir: RunDir, section: BackupSection) -> list[Found]:
    """Return the checkpoints of a run that are to be backed up and are not yet, oldest first."""
    if not section.url:
        return []
    done = backed_up(rundir)
    return [
        found
        for found in checkpoints(rundir)
        if found.name not in done and (not section.every_steps or found.step % section.every_steps == 0)
    ]


def backed_up(rundir: RunDir) -> dict[str, str]:
    """Return the URL of each checkpoint that was copied and verified, by name."""
    done = {}
    for path in rundir.backups.glob("step-*.json"):
        try:
            done[path.name.removesuffix(".json")] = str(json.loads(path.read_text(encoding="utf-8"))["url"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it is copied again, which finds it there
    return done


def back_up(
    rundir: RunDir,
    found: Found,
    remote: Remote,
    section: BackupSection,
    *,
    stopped: threading.Event | None = None,
) -> None:
    """Copy one checkpoint and note that it is there. Raises StorageError, CheckpointError, Interrupted."""
    begun = time.monotonic()
    uploaded = upload_checkpoint(
        found.directory,
        remote,
        what=section.what,
        notes=rundir.backups / f"{found.name}.notes",
        go_on=lambda: stopped is None or not stopped.is_set(),
    )
    write_record(rundir.backups / f"{found.name}.json", uploaded, what=section.what)
    seconds = time.monotonic() - begun
    log.info("backed up %s to %s: %.2f GB in %.0f s", found.name, uploaded.url, uploaded.bytes / 1e9, seconds)


def copy_beside(rundir: RunDir, remote: Remote) -> None:
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


def fetch_incarnations(remote: Remote, rundir: RunDir) -> None:
    """Write the incarnations of a backed-up run into a run directory that has none. Raises OSError."""
    if read_incarnations(rundir):
        return
    rundir.incarnations.mkdir(parents=True, exist_ok=True)
    for key in remote.keys("incarnations/"):
        name = key.rsplit("/", 1)[-1]
        if Path(name).stem.isdigit() and name.endswith(".json"):
            (rundir.incarnations / name).write_bytes(remote.content(key))


def fetch_beside(remote: Remote, rundir: RunDir) -> None:
    """Write what `copy_beside` copied into a run directory, where it has none of it. Raises OSError."""
    fetch_incarnations(remote, rundir)
    for name in _KEPT_BESIDE:
        path = rundir.path / name
        content = None if path.exists() else _content(remote, name)
        if content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _content(remote: Remote, key: str) -> bytes | None:
    try:
        return bytes(remote.content(key))
    except FileNotFoundError:
        return None
