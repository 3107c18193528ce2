"""Injects the faults of a drill into a supervised run: kills, hangs, cut connections, a full disk."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.errors import TrainingFailed
from bloomery.events.heartbeat import RankBeat
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.drill.allocation import DrillNodes

_SLOW_S, _SLOW_CYCLE_S, _SLOW_STOPPED = 6.0, 0.2, 0.75
_FULL_S = 6.0
_BALLOON = ".balloon-of-a-drill"


class DrillFault(StrEnum):
    """The kinds of faults."""

    KILL = "kill"
    CRASH = "crash"
    HANG = "hang"
    SLOW = "slow"
    CUT = "cut"
    STORE = "store"
    LAUNCHER = "launcher"
    FLIP = "flip"
    DISK = "disk"
    SHM = "shm"

    @property
    def ends_attempt(self) -> bool:
        """Whether the ranks must be started again after it; a run lives through the others."""
        return self not in (DrillFault.SLOW, DrillFault.STORE, DrillFault.DISK)


EFFECTS: dict[DrillFault, str] = {
    DrillFault.KILL: "SIGKILL to a rank, as the kernel's OOM killer sends it",
    DrillFault.CRASH: "SIGSEGV to a rank, as of a fault in native code",
    DrillFault.HANG: "SIGSTOP to a rank: its process stands still",
    DrillFault.SLOW: f"a rank gets a quarter of its time for {_SLOW_S:.0f} s",
    DrillFault.CUT: "all network connections of a rank are cut",
    DrillFault.STORE: "the store where ranks met is lost: its connections are cut, or its file is removed",
    DrillFault.LAUNCHER: "SIGKILL to the launcher, which is started again as a scheduler would",
    DrillFault.FLIP: "a bit of the newest checkpoint flips, then a rank is killed",
    DrillFault.DISK: f"the disk of the run is full for {_FULL_S:.0f} s (a tmpfs that the drill mounts; root)",
    DrillFault.SHM: "/dev/shm is full when a rank gets SIGBUS (a private one; root)",
}
"""What each kind does."""

ORDINARY = (
    DrillFault.KILL,
    DrillFault.CRASH,
    DrillFault.HANG,
    DrillFault.SLOW,
    DrillFault.CUT,
    DrillFault.STORE,
    DrillFault.LAUNCHER,
)
"""The kinds that a drill injects by default: they harm nothing on the disk."""
_SIGNALS = {
    DrillFault.KILL: signal.SIGKILL,
    DrillFault.CRASH: signal.SIGSEGV,
    DrillFault.HANG: signal.SIGSTOP,
    DrillFault.FLIP: signal.SIGKILL,
    DrillFault.SHM: signal.SIGBUS,
    DrillFault.LAUNCHER: signal.SIGKILL,
}
_REACHED_S = 120.0


@dataclass(frozen=True, kw_only=True)
class DrillTarget:
    """What a fault strikes.

    beats: the newest heartbeat of each rank.
    launcher: the process number of the launcher.
    shm: the /dev/shm that the ranks see.
    nodes: where the ranks are.
    """

    rundir: RunDirectory
    beats: Sequence[RankBeat]
    launcher: int
    shm: Path | None = None
    nodes: DrillNodes = field(default_factory=DrillNodes)


def inject(fault: DrillFault, target: DrillTarget, rng: Random) -> Callable[[], None]:
    """Inject a fault, and return a function that removes what it left behind. Raises OSError."""
    victim, undo = rng.choice(target.beats), _nothing
    if fault == DrillFault.DISK:
        return _fill(target.rundir.path, for_s=_FULL_S)
    if fault == DrillFault.FLIP:
        flip_checkpoint_bit(target.rundir, rng)
    if fault == DrillFault.SHM:
        assert target.shm is not None, "the drill refuses this fault without a private /dev/shm"
        undo = _fill(target.shm, for_s=_FULL_S)
    if fault != DrillFault.LAUNCHER:
        strike_on(victim.host, fault, victim.pid, nodes=target.nodes)
    elif target.nodes.is_allocation:
        strike_on(victim.host, fault, _launcher_on(victim.host, target.rundir), nodes=target.nodes)
    else:
        strike(fault, target.launcher)
    return undo


def strike_on(host: str, fault: DrillFault, pid: int, *, nodes: DrillNodes) -> None:
    """Let a fault strike a process on a node. Raises ProcessLookupError where it has ended, and OSError."""
    reach = nodes.reach(host)
    if not reach:
        strike(fault, pid)
        return
    command = [*reach, sys.executable, "-m", "bloomery", "drill", "--strike", str(fault), str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_REACHED_S, check=False)
    if done.returncode:
        raise TrainingFailed(
            f"The fault {fault} could not be injected on {host}: {done.stderr.strip()[-300:]}",
            remedy="Can `srun --overlap` start a step beside the training in this job?",
        )


def strike(fault: DrillFault, pid: int) -> None:
    """Let a fault strike a process of this machine. Raises ProcessLookupError and other OSErrors."""
    match fault:
        case DrillFault.SLOW:
            threading.Thread(target=_slow_down, args=(pid,)).start()
        case DrillFault.CUT:
            cut_connections(pid)
        case DrillFault.STORE:
            _lose_store(pid)
        case _:
            os.kill(pid, _SIGNALS[fault])


def _lose_store(pid: int) -> None:
    """Take the store away in which the ranks of a process have met: a file, or a server of rank 0."""
    words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    environment = dict(word.partition("=")[::2] for word in words)
    meeting = environment.get("BLOOMERY_RENDEZVOUS_FILE")
    if meeting:
        Path(meeting).unlink(missing_ok=True)
    else:
        cut_connections(pid, port=int(environment["MASTER_PORT"]))


def _launcher_on(host: str, rundir: RunDirectory) -> int:
    """Return the process of the launcher on a node, in the newest job of the run."""
    cards = sorted(rundir.path.glob(f"launchers/*/{host}.json"), key=lambda path: path.stat().st_mtime)
    return int(json.loads(cards[-1].read_text())["pid"])


def flip_checkpoint_bit(rundir: RunDirectory, rng: Random) -> Path | None:
    """Flip a bit in the newest checkpoint's largest tensor file; return its path, None if there is none."""
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


_PIDFD_GETFD = 438
"""The number of the system call, the same on all of Linux's architectures since 5.6."""


def cut_connections(pid: int, *, port: int = 0) -> int:
    """Shut down the TCP connections of a process in both directions, and return how many there were.

    The process and its peers see connections that end; sockets that listen go on listening.
    Raises OSError: PermissionError where this process may not trace that one.

    port: cut only connections from or to this port; 0: all.
    """
    process = os.pidfd_open(pid)
    try:
        return sum(_cut(process, number, port) for number in _sockets(pid))
    finally:
        os.close(process)


def _sockets(pid: int) -> list[int]:
    """Return the numbers of the descriptors of a process that are sockets."""
    numbers = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if str(link.readlink()).startswith("socket:"):
                numbers.append(int(link.name))
    return numbers


def _cut(process: int, number: int, port: int) -> bool:
    """Shut down one socket of a process if it is a TCP connection; returns whether it was."""
    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(_PIDFD_GETFD, process, number, 0)
    if copy < 0:
        failure = ctypes.get_errno()
        if failure == 9:  # EBADF: closed meanwhile
            return False
        raise OSError(failure, f"descriptor {number} of another process: {os.strerror(failure)}")
    with socket.socket(fileno=copy) as connection:
        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
        if not is_tcp or connection.type != socket.SOCK_STREAM:
            return False
        try:
            ends = (connection.getsockname()[1], connection.getpeername()[1])
        except OSError:  # it listens, or is not connected yet
            return False
        if port and port not in ends:
            return False
        with suppress(OSError):  # its peer was quicker
            connection.shutdown(socket.SHUT_RDWR)
        return True
