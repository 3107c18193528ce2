"""Runs `bloomery sync` beside a supervised run, in a process of its own, as `[sync]` of its recipe says."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from bloomery import durable
from bloomery.config.submit import SyncSection
from bloomery.events.run_directory import RunDirectory

log = logging.getLogger(__name__)

_TICK_S = 0.2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 600.0
_DOUBLINGS = 6
"""After so many restarts in a row the pause before the next is the longest one."""


def restart_pause_s(in_a_row: int) -> float:
    """Return the seconds before a sync that died is started again: 10 s, then twice as many, at most 600 s.

    in_a_row: the restarts before this one, since a sync last lived for longer than the longest pause.
    """
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(in_a_row, _DOUBLINGS))


class SyncKeeper:
    """A sync that lives as long as the block does; it sends what is new once more at its end.

    One that dies before is started again, after a pause that grows while each dies soon. A launcher that is
    killed cannot end it: it sees for itself that its parent is gone (`--beside`).

    wait_s: returns how long the end waits for the last upload, asked then.
    say: prints a message for the user.
    """

    def __init__(
        self,
        rundir: RunDirectory,
        section: SyncSection,
        *,
        wait_s: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._wait_s, self._say = wait_s, say
        self._command = [sys.executable, "-m", "bloomery", "sync", str(rundir.path), section.place]
        self._command += ["--every", str(section.every_minutes), "--beside"]
        self._command += ["--checkpoints"] if section.checkpoints else []
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="sync keeper", daemon=True)

    def __enter__(self) -> SyncKeeper:
        self._process = self._started()
        self._thread.start()
        return self

    def _started(self) -> subprocess.Popen[bytes]:
        # Without a handler SIGTERM would end it without a last upload: `bloomery sync` lets it through later.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return subprocess.Popen(self._command, stdout=subprocess.DEVNULL, process_group=0)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _keep(self) -> None:
        """Start the sync again whenever it ends before the block does; say so once for deaths in a row."""
        in_a_row, began = 0, time.monotonic()
        while True:
            status = self._process.wait()
            if self._closing.is_set():
                return
            if time.monotonic() - began > _LONGEST_PAUSE_S:
                in_a_row = 0
            if in_a_row == 0:
                self._say(
                    f"the sync of logs ended {_how(status)}: it is started again, after a pause of at most "
                    f"{_LONGEST_PAUSE_S / 60:.0f} minutes each time that it ends"
                )
            if self._closing.wait(restart_pause_s(in_a_row)):
                return
            in_a_row, began = in_a_row + 1, time.monotonic()
            with self._lock:
                if self._closing.is_set():
                    return
                try:
                    self._process = self._started()
                except OSError as refused:  # no memory or process is left: the next try comes after a pause
                    log.warning("the sync cannot be started: %s", refused)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ask the sync process to end, and wait for its last upload; SIGINT or SIGTERM ends the wait.

        One that is dead is started once more for it. What was not uploaded is uploaded by the next start.
        """
        self._closing.set()
        with self._lock, suppress(OSError):
            if self._process.poll() is not None:
                self._process = self._started()
        self._process.terminate()
        wait_s, asked = self._wait_s(), list[int]()
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in numbers}
        end, told = time.monotonic() + wait_s, time.monotonic() + 5.0
        while self._process.poll() is None and time.monotonic() < end and not asked:
            if time.monotonic() > told:
                self._say(
                    f"waiting for the last sync, {wait_s / 60:.0f} minutes at most; Ctrl-C ends the wait"
                )
                told = end
            time.sleep(_TICK_S)
        for number, handler in before.items():
            signal.signal(number, handler)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # also the export of a checkpoint that it has begun
        self._process.wait()
        self._thread.join()


def _how(status: int) -> str:
    return f"by signal {-status}" if status < 0 else f"with status {status}"


class SyncTurn:
    """Decides which of the syncs beside the launchers of several machines sends the logs of a run.

    The one that locks RUN/sync.lock first has the turn until it ends. Where there are no locks all have it.
    """

    def __init__(self, rundir: RunDirectory) -> None:
        self._path, self._file, self._is_ours = rundir.path / "sync.lock", -1, False

    def is_ours(self) -> bool:
        """Return whether this process has the turn; the run directory must be there."""
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            self._is_ours = self._is_ours or durable.try_lock(self._file)
        except OSError:
            return True
        return self._is_ours
