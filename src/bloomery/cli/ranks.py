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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from bloomery.cli.rank_output import RankOutput
from bloomery.errors import RankLost
from bloomery.events.host import host_name

GRACE_S = 60.0
"""How long the others may take to end (and to save) once one rank ended, before they are killed."""

GRACE_AFTER_FAILURE_S = 20.0
"""The same once a rank failed: the others can no longer save together."""

LAUNCHER = "BLOOMERY_LAUNCHER"
"""Tells a rank the number of the process that started it."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
NO_FAILURE = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM, RankLost.exit_status)
"""What a rank ends with when all of them agreed to, or when another is to blame."""

Ranks = list[subprocess.Popen[bytes]]


@dataclass(frozen=True, kw_only=True)
class Share:
    """The ranks that this machine starts: `count` of `world`, from `first` on."""

    count: int
    world: int
    first: int = 0


class OtherNodes(Protocol):
    """Launchers of the same run on other machines."""

    def lost(self) -> str:
        """Why the run cannot go on, as another launcher said; empty while it can."""
        ...

    def tell(self, failure: str) -> None:
        """Say to the others that a rank of this machine failed."""
        ...


def run_ranks(
    command: Sequence[str],
    share: Share,
    *,
    environment: Mapping[str, str],
    output: RankOutput | None = None,
    others: OtherNodes | None = None,
) -> int:
    """Run `command` as the ranks of `share`; returns the first failure's status, or 0.

    Ranks of one machine meet over a file, so no port can be in use; several machines' over the store that
    `environment` names. When one fails, the others are ended. Signals that ask for something are passed on,
    wherever they come from: the ranks are in groups of their own, where a terminal's Ctrl-C does not reach
    them a second time. output: takes what ranks print; without it they print themselves.
    """
    ranks: Ranks = []
    with tempfile.TemporaryDirectory(prefix="bloomery-ranks-") as directory, _signals_passed_on(ranks):
        shared = dict(environment) | {
            "WORLD_SIZE": str(share.world),
            "LOCAL_WORLD_SIZE": str(share.count),
            LAUNCHER: str(os.getpid()),
            "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(max(1, _cores() // share.count))),
        }
        if share.count == share.world:
            shared["BLOOMERY_MEETING_FILE"] = str(Path(directory) / "meeting")
            shared["GLOO_SOCKET_IFNAME"] = environment.get("GLOO_SOCKET_IFNAME", "lo")
        for local in range(share.count):
            own = shared | {"RANK": str(share.first + local), "LOCAL_RANK": str(local)}
            pipe = subprocess.PIPE if output else None
            rank = subprocess.Popen(
                command, env=own, process_group=0, stdout=pipe, stderr=subprocess.STDOUT if output else None
            )
            ranks.append(rank)
            if output:
                output.follow(share.first + local, rank)
        status = _wait(ranks, share, others)
        if output:
            output.finish()
        return status


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


def _wait(ranks: Ranks, share: Share, others: OtherNodes | None) -> int:
    failure, elsewhere = 0, ""
    deadline = float("inf")
    while True:
        living = [number for number, rank in enumerate(ranks) if rank.poll() is None]
        ended = {number: rank.returncode for number, rank in enumerate(ranks) if number not in living}
        blamed = _to_blame(ended)
        if blamed is not None and not failure:
            failure, deadline = ended[blamed], time.monotonic() + GRACE_AFTER_FAILURE_S
            _blame(ranks, share, blamed, living=len(living), others=others, told=elsewhere)
        if others is not None and not failure and not elsewhere:
            elsewhere = others.lost()
            if elsewhere:
                _say(elsewhere)
                _signal_all(ranks, signal.SIGTERM)
                deadline = time.monotonic() + GRACE_AFTER_FAILURE_S
        if not living:
            break
        if ended and deadline == float("inf"):
            deadline = time.monotonic() + GRACE_S
        if time.monotonic() > deadline:
            _say(f"ranks {[share.first + number for number in living]} did not end in time: killed")
            _signal_all(ranks, signal.SIGKILL)
            failure, deadline = failure or 1, float("inf")
        time.sleep(0.05)
    if failure < 0:
        _say("the same command goes on from the newest checkpoint")
        return 128 - failure
    if not failure and not elsewhere and RankLost.exit_status in ended.values():
        _say("the ranks here lost another; the same command goes on from the newest checkpoint")
    return failure or (RankLost.exit_status if elsewhere else max(ended.values()))


def _blame(
    ranks: Ranks, share: Share, blamed: int, *, living: int, others: OtherNodes | None, told: str
) -> None:
    """Say which rank failed, here and to the other nodes, and end those that live."""
    status = ranks[blamed].returncode
    who = f"rank {share.first + blamed} (process {ranks[blamed].pid})"
    if not told:
        more = "; ending the other ranks" if living or others is not None else ""
        _say(f"{who} on {host_name()} {_how(status)}{more}")
    if others is not None:
        others.tell(f"{who} on {host_name()} {_how(status)}; ending the ranks here")
    _signal_all(ranks, signal.SIGTERM)


def _to_blame(statuses: Mapping[int, int]) -> int | None:
    """Return the first rank that failed by itself, one that a signal ended before others."""
    failed = [number for number, status in statuses.items() if status not in NO_FAILURE]
    return min(failed, key=lambda number: (statuses[number] > 0, number), default=None)


def _how(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed with status {status}"


def _say(line: str) -> None:
    print(f"bloomery: {line}", file=sys.stderr, flush=True)


def _signal_all(ranks: Ranks, number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
