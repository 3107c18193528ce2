"""The run lock, with which one process at a time writes a run directory; and this machine's name."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bloomery import durable
from bloomery.errors import RunBusy, StorageError, is_full, storage_error
from bloomery.events.heartbeat import read_heartbeat, write_unsynced
from bloomery.events.run_directory import RunDirectory

log = logging.getLogger(__name__)

STALE_AFTER_S = 60.0  # without a refresh, after which another machine may take the lock
TRAINING = "trained"
_REFRESH_S = 10.0
_LOOK_S = 2.0
NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
"""The errors of a file system that has no locks."""


def lock_run(
    rundir: RunDirectory, *, doing: str = TRAINING, on_lost: Callable[[RunBusy], None] | None = None
) -> LockHolder:
    """Lock the run for this process until the holder is closed or the process ends, however it ends.

    doing: what this process does to the run, a participle, as in "RUN is being trained by process 12".
    on_lost: called from a thread, with an error that names the new holder, once another process has taken
        the run, because this one was frozen or cut off for so long that it counted as dead. None: nothing.

    Raises RunBusy, which names the holder, while another holder is alive. A holder on this machine is alive
    while its process runs. A holder on another machine, whose lock may not be visible here, is alive while
    its holder file was refreshed within STALE_AFTER_S. The record of a dead holder is kept in `superseded`.
    """
    try:
        rundir.path.mkdir(parents=True, exist_ok=True)
        lock = _locked(rundir)
    except OSError as error:
        raise storage_error(error, path=rundir.lock, doing="Taking the run") from error
    try:
        previous = read_heartbeat(rundir.holder)
        if previous is not None and _lives(previous, rundir.holder, locked=lock.held):
            raise _busy(rundir, previous)
        return LockHolder(rundir, lock=lock, superseded=previous, doing=doing, on_lost=on_lost)
    except BaseException as error:
        os.close(lock.file)
        if isinstance(error, OSError):  # of the holder's file, or of the probe beside it on a full disk
            raise storage_error(error, path=rundir.holder, doing="Taking the run") from error
        raise


class LockHolder:
    """A process's hold of a run: a lock, and a file that names the process, which a thread refreshes.

    superseded: the record of a dead holder before this one; None where there was none.
    """

    def __init__(
        self,
        rundir: RunDirectory,
        *,
        lock: _Lock,
        superseded: dict[str, Any] | None,
        doing: str,
        on_lost: Callable[[RunBusy], None] | None = None,
    ) -> None:
        self.superseded = superseded
        self._rundir, self._path, self._on_lost = rundir, rundir.holder, on_lost
        self._lock = lock
        self._closed = threading.Event()
        _close_in_forked_children(self)
        self._record = {**_myself(), "doing": doing}
        try:
            write_unsynced(self._path, json.dumps(self._record) + "\n")
        except StorageError as refused:
            # What makes room on a full disk needs no file there: the lock itself keeps others away.
            if doing == TRAINING or not lock.held or not is_full(refused.__cause__):
                raise
        self._thread = threading.Thread(target=self._refresh, name="holder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Release the run. Calling it again does nothing.

        A holder that was frozen for so long that another machine took the run leaves that one's file alone.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        try:
            if self._is_named():
                self._path.unlink(missing_ok=True)
        except OSError as refused:  # the disk has become read-only: what ended the run is the error to tell
            log.warning("%s cannot be removed: %s", self._path, refused.strerror or refused)
        finally:
            os.close(self._lock.file)

    def __enter__(self) -> LockHolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def let_go_in_child(self) -> None:
        """Give up a forked child's share of the lock, which it would keep when its parent is killed."""
        if not self._closed.is_set():
            self._closed.set()
            os.close(self._lock.file)

    def _refresh(self) -> None:
        refreshed = time.monotonic()
        while not self._closed.wait(_LOOK_S):
            try:
                named = read_heartbeat(self._path)
                if named is not None and named != self._record:
                    if self._on_lost is not None and not self._closed.is_set():
                        self._on_lost(_busy(self._rundir, named))
                    return
                if time.monotonic() - refreshed >= _REFRESH_S:
                    os.utime(self._path)
                    refreshed = time.monotonic()
            except OSError:  # the directory is gone: the next save reports that with a better message
                continue

    def _is_named(self) -> bool:
        """Return whether the holder file names this process still; False where it cannot be read."""
        try:
            return read_heartbeat(self._path) == self._record
        except OSError:
            return False


def _close_in_forked_children(holder: LockHolder) -> None:
    reference = weakref.ref(holder)  # hooks cannot be removed: this one must not keep the holder alive

    def let_go() -> None:
        living = reference()
        if living is not None:
            living.let_go_in_child()

    os.register_at_fork(after_in_child=let_go)


@dataclass(frozen=True, kw_only=True)
class _Lock:
    file: int
    held: bool
    """Whether the lock is taken; False where the file system has no locks."""


def _locked(rundir: RunDirectory) -> _Lock:
    file = os.open(rundir.lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        is_free = durable.try_lock(file)
    except OSError as error:
        if error.errno in NO_LOCKS_HERE:
            return _Lock(file=file, held=False)
        os.close(file)
        raise
    if not is_free:
        os.close(file)
        raise _busy(rundir, read_heartbeat(rundir.holder) or {})
    return _Lock(file=file, held=True)


def _lives(record: dict[str, Any], path: Path, *, locked: bool) -> bool:
    """Return whether the process that wrote the holder file is alive, as far as this machine can know.

    locked: whether this process has taken the lock, which a living holder would have.
    """
    if _is_here(record):
        if locked and not record.get("started"):
            return False  # its process number may belong to another process by now: trust the lock
        return _runs(record)
    try:
        return _age_s(path) < STALE_AFTER_S
    except FileNotFoundError:  # it has ended in this moment
        return False


def _age_s(path: Path) -> float:
    """Return a file's age by the file system's own clock, for the clocks of the machines may differ."""
    probe = path.with_name(f".clock-{os.uname().nodename}-{os.getpid()}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _busy(rundir: RunDirectory, record: dict[str, Any]) -> RunBusy:
    since = record.get("time")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since)) if since else "an unknown time"
    who = f"process {record.get('pid', '?')} on {record.get('host', '?')}"
    wait = (
        ""
        if record and _is_here(record)
        else f" If it is dead, its hold ends {STALE_AFTER_S:.0f} s after its last sign of life."
    )
    doing = record.get("doing", TRAINING)
    stop = f"Stop that one first (touch {rundir.control('stop')}, or Ctrl-C there), or use another --run."
    if doing != TRAINING:
        stop = "Wait until that one has ended, or end it with Ctrl-C there."
    return RunBusy(f"{rundir.path} is being {doing} by {who} since {when}", remedy=stop + wait)


def _started(pid: int) -> str:
    """Return when a process started, in ticks since the kernel's boot, which no change of the clock moves.

    Returns "" where there is no such process, or the system does not tell.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def process_identity(pid: int) -> str:
    """Return a text that no other process on any machine ever has; "" where there is no such process."""
    ticks = _started(pid)
    return f"{_machine()}/{ticks}" if ticks else ""


def _myself() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": os.uname().nodename,
        "pid": pid,
        "time": round(time.time(), 3),
        "machine": _machine(),
        "started": _started(pid),
    }


def _is_here(record: dict[str, Any]) -> bool:
    return record.get("machine") == _machine()


def _runs(record: dict[str, Any]) -> bool:
    """Return whether the recorded process itself, and no later one with its number, runs on this machine."""
    pid = int(record.get("pid", 0))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return record.get("started") == _started(pid)


def _machine() -> str:
    """Return a text that two processes share if and only if they see each other's process numbers."""
    boot, space = "", ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # this is not Linux: only the host's name is known
        pass
    return f"{os.uname().nodename}/{boot}/{space}"


def host_name() -> str:
    """Return the name that the launcher gave this node (BLOOMERY_HOST), or else the system's name."""
    return os.environ.get("BLOOMERY_HOST", "") or os.uname().nodename
