"""Starting the ranks of one machine, and ending them together."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from bloomery.errors import RankLost

GRACE_S = 60.0
"""How long the others may take to end (and to save) once one rank ended, before they are killed."""

LAUNCHER = "BLOOMERY_LAUNCHER"
"""Tells a rank the number of the process that started it."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
NO_FAILURE = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM, RankLost.exit_status)
"""What a rank ends with when all of them agreed to, or when another is to blame."""

Ranks = list[subprocess.Popen[bytes]]


def run_ranks(command: Sequence[str], *, count: int, environment: Mapping[str, str]) -> int:
    """Run `command` as ranks 0 … count−1 of one peer; returns the first failure's status, or 0.

    Ranks meet over a file, so no port can be in use. When one fails, the others are ended. Signals that ask
    for something are passed on, wherever they come from: the ranks are in groups of their own, where a
    terminal's Ctrl-C does not reach them a second time.
    """
    ranks: Ranks = []
    with tempfile.TemporaryDirectory(prefix="bloomery-ranks-") as directory, _signals_passed_on(ranks):
        shared = dict(environment) | {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            LAUNCHER: str(os.getpid()),
            "BLOOMERY_MEETING_FILE": str(Path(directory) / "meeting"),
            "GLOO_SOCKET_IFNAME": environment.get("GLOO_SOCKET_IFNAME", "lo"),
            "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(max(1, _cores() // count))),
        }
        for rank in range(count):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=own, process_group=0))
        return _wait(ranks)


def end_with_launcher() -> None:
    """Let the system kill this rank when its launcher is killed, so that the same command can start anew.

    Does nothing in a process that no launcher started, and where the system cannot do it.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(launcher):  # it was killed before we asked
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _signals_passed_on(ranks: Ranks) -> Iterator[None]:
    def pass_on(number: int, frame: FrameType | None) -> None:
        _signal_all(ranks, number)

    previous = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(ranks: Ranks) -> int:
    failure = 0
    deadline = float("inf")
    while True:
        living = [number for number, rank in enumerate(ranks) if rank.poll() is None]
        ended = {number: rank.returncode for number, rank in enumerate(ranks) if number not in living}
        blamed = _to_blame(ended)
        if blamed is not None and not failure:
            failure = ended[blamed]
            others = "; ending the other ranks" if living else ""
            _say(f"rank {blamed} (process {ranks[blamed].pid}) {_how(failure)}{others}")
            _signal_all(ranks, signal.SIGTERM)
        if not living:
            break
        if ended and deadline == float("inf"):
            deadline = time.monotonic() + GRACE_S
        if time.monotonic() > deadline:
            _say(f"ranks {living} did not end within {GRACE_S:.0f} s: killed")
            _signal_all(ranks, signal.SIGKILL)
            failure = failure or 1
        time.sleep(0.05)
    if failure < 0:
        _say("the same command goes on from the newest checkpoint")
        return 128 - failure
    return failure or max(ended.values())


def _to_blame(statuses: Mapping[int, int]) -> int | None:
    """Return the first rank that failed by itself, one that a signal ended before others."""
    failed = [number for number, status in statuses.items() if status not in NO_FAILURE]
    return min(failed, key=lambda number: (statuses[number] > 0, number), default=None)


def _how(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed with status {status}"


def _say(line: str) -> None:
    print(f"bloomery train: {line}", file=sys.stderr, flush=True)


def _signal_all(ranks: Ranks, number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
