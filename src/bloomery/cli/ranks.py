"""Starting the ranks of one machine, and ending them together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

GRACE_S = 60.0
"""How long the others may take to end (and to save) once one rank ended, before they are killed."""


def run_ranks(command: Sequence[str], *, count: int, environment: Mapping[str, str]) -> int:
    """Run `command` as ranks 0 … count−1 of one peer; returns the first failure's status, or 0.

    Ranks meet over a file, so no port can be in use. When one fails, the others are ended.
    """
    with tempfile.TemporaryDirectory(prefix="bloomery-ranks-") as directory:
        shared = dict(environment) | {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "BLOOMERY_MEETING_FILE": str(Path(directory) / "meeting"),
            "GLOO_SOCKET_IFNAME": environment.get("GLOO_SOCKET_IFNAME", "lo"),
            "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(max(1, _cores() // count))),
        }
        ranks = [
            subprocess.Popen(command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(count)
        ]
        # A terminal's Ctrl-C reaches the ranks too; this process only waits for them to save.
        previous = {
            signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: _signal_all(ranks, number)),
        }
        try:
            return _wait(ranks)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    failure = 0
    deadline = float("inf")
    while any(rank.poll() is None for rank in ranks):
        ended = [
            (number, rank.returncode) for number, rank in enumerate(ranks) if rank.returncode is not None
        ]
        failed = [(number, status) for number, status in ended if status]
        if failed and not failure:
            number, failure = failed[0]
            if failure < 0:
                print(
                    f"bloomery train: rank {number} (process {ranks[number].pid}) was ended by "
                    f"{signal.Signals(-failure).name}; ending the other ranks",
                    file=sys.stderr,
                )
            _signal_all(ranks, signal.SIGTERM)
        if ended and deadline == float("inf"):
            deadline = time.monotonic() + GRACE_S
        if time.monotonic() > deadline:
            stuck = [number for number, rank in enumerate(ranks) if rank.poll() is None]
            print(
                f"bloomery train: ranks {stuck} did not end within {GRACE_S:.0f} s: killed", file=sys.stderr
            )
            _signal_all(ranks, signal.SIGKILL)
            failure = failure or 1
        time.sleep(0.05)
    failure = failure or next((rank.returncode for rank in ranks if rank.returncode), 0)
    return 128 - failure if failure < 0 else failure


def _signal_all(ranks: list[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
