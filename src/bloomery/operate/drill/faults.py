"""The faults that a drill injects into a supervised run, and what it needs for each of them."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.events.heartbeat import RankBeat
from bloomery.events.run_directory import RunDirectory

_SLOW_S, _SLOW_CYCLE_S, _SLOW_STOPPED = 6.0, 0.2, 0.75
_FULL_S = 6.0
_BALLOON = ".balloon-of-a-drill"


class DrillFault(StrEnum):
    """The kinds of faults."""

    KILL = "kill"
    CRASH = "crash"
    HANG = "hang"
    SLOW = "slow"
    LAUNCHER = "launcher"
    FLIP = "flip"
    DISK = "disk"
    SHM = "shm"

    @property
    def ends_attempt(self) -> bool:
        """Whether the ranks must be started again after it; a run lives through the others."""
        return self not in (DrillFault.SLOW, DrillFault.DISK)


EFFECTS: dict[DrillFault, str] = {
    DrillFault.KILL: "SIGKILL to a rank, as the kernel's OOM killer sends it",
    DrillFault.CRASH: "SIGSEGV to a rank, as of a fault in native code",
    DrillFault.HANG: "SIGSTOP to a rank: its process stands still",
    DrillFault.SLOW: f"a rank gets a quarter of its time for {_SLOW_S:.0f} s",
    DrillFault.LAUNCHER: "SIGKILL to the launcher, which is started again as a scheduler would",
    DrillFault.FLIP: "a bit of the newest checkpoint flips, then a rank is killed",
    DrillFault.DISK: f"the disk of the run is full for {_FULL_S:.0f} s (a tmpfs that the drill mounts; root)",
    DrillFault.SHM: "/dev/shm is full when a rank gets SIGBUS (a private one; root)",
}
"""What each kind does."""

ORDINARY = (DrillFault.KILL, DrillFault.CRASH, DrillFault.HANG, DrillFault.SLOW, DrillFault.LAUNCHER)
"""The kinds that a drill injects unless it is told others: they harm nothing on the disk."""


@dataclass(frozen=True, kw_only=True)
class DrillTarget:
    """What a fault strikes.

    beats: the newest heartbeat of each rank.
    launcher: the process number of the launcher.
    shm: the /dev/shm that the ranks see.
    """

    rundir: RunDirectory
    beats: Sequence[RankBeat]
    launcher: int
    shm: Path | None = None


def inject(fault: DrillFault, target: DrillTarget, rng: Random) -> Callable[[], None]:
    """Inject a fault, and return what takes back what it left behind. Raises OSError."""
    victim = rng.choice(target.beats)
    match fault:
        case DrillFault.KILL:
            os.kill(victim.pid, signal.SIGKILL)
        case DrillFault.CRASH:
            os.kill(victim.pid, signal.SIGSEGV)
        case DrillFault.HANG:
            os.kill(victim.pid, signal.SIGSTOP)
        case DrillFault.SLOW:
            threading.Thread(target=_slow_down, args=(victim.pid,), daemon=True).start()
        case DrillFault.LAUNCHER:
            os.kill(target.launcher, signal.SIGKILL)
        case DrillFault.FLIP:
            flip_newest(target.rundir, rng)
            os.kill(victim.pid, signal.SIGKILL)
        case DrillFault.DISK:
            return _fill(target.rundir.path, for_s=_FULL_S)
        case DrillFault.SHM:
            assert target.shm is not None, "the drill refuses this fault without a private /dev/shm"
            undo = _fill(target.shm, for_s=_FULL_S)
            os.kill(victim.pid, signal.SIGBUS)
            return undo
    return _nothing


def flip_newest(rundir: RunDirectory, rng: Random) -> Path | None:
    """Flip a bit of a tensor file of the newest checkpoint, and return its path; None where there is none."""
    newest = max(checkpoints(rundir), key=lambda checkpoint: checkpoint.step, default=None)
    if newest is None:
        return None
    directory = rundir.checkpoints / newest.name
    path = max(directory.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    place = rng.randrange(path.stat().st_size // 2, path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    return path


def _slow_down(pid: int) -> None:
    end = time.monotonic() + _SLOW_S
    with suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(_SLOW_CYCLE_S * _SLOW_STOPPED)
            os.kill(pid, signal.SIGCONT)
            time.sleep(_SLOW_CYCLE_S * (1 - _SLOW_STOPPED))


def _fill(directory: Path, *, for_s: float) -> Callable[[], None]:
    """Take all free space of a file system, and give it back after some seconds or when told."""
    balloon = directory / _BALLOON
    free = shutil.disk_usage(directory).free
    with balloon.open("wb") as file, suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, max(1, free))
    with balloon.open("ab", buffering=0) as rest, suppress(OSError):
        while rest.write(b"\0" * 4096):
            pass

    def undo() -> None:
        balloon.unlink(missing_ok=True)

    timer = threading.Timer(for_s, undo)
    timer.daemon = True
    timer.start()
    return undo


def _nothing() -> None:
    """Take nothing back."""
