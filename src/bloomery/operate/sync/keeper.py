"""Runs `bloomery sync` beside a supervised run, in a process of its own, as `[sync]` of its recipe says."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

from bloomery.config.sync import SyncSection
from bloomery.events.run_directory import RunDirectory

_LAST_LOOK_S = 120.0


class SyncKeeper:
    """A sync that lives as long as the block does; it sends what is new once more at its end.

    A launcher that is killed cannot end it: it sees for itself that its parent is gone (`--beside`).
    """

    def __init__(self, rundir: RunDirectory, section: SyncSection) -> None:
        self._command = [sys.executable, "-m", "bloomery", "sync", str(rundir.path), section.place]
        self._command += ["--every", str(section.every_minutes), "--beside"]
        self._command += ["--checkpoints"] if section.checkpoints else []

    def __enter__(self) -> SyncKeeper:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, process_group=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(_LAST_LOOK_S)
        except subprocess.TimeoutExpired:  # what is missing is sent by the next start
            self._process.kill()
            self._process.wait()
