"""Records of the ranks that one launcher started: processes, exit statuses, and what they printed."""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bloomery.events.run_directory import RunDirectory
from bloomery.operate.failure_evidence import RankEnd
from bloomery.operate.flight_recorder import read_flight
from bloomery.operate.process_tree import descendants, sees_kernel_pids
from bloomery.operate.standstill import read_beats

_TAIL_BYTES = 1 << 15
_DMESG_S = 5.0
_CHILDREN_AT_MOST = 1000
_UNLOGGED_AT_MOST = 200
"""The last lines of a rank that are kept where its log takes none."""


class ShareLog:
    """Records how the ranks of one launcher ran in one attempt; begins where their logs end now.

    ranks: the ranks that the launcher starts.
    statuses: the exit status of each rank that has ended.
    """

    def __init__(self, rundir: RunDirectory, *, ranks: range, host: str) -> None:
        self._rundir, self._ranks, self._host = rundir, ranks, host
        self.statuses: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._children: dict[int, dict[int, None]] = {}
        self._killed: frozenset[int] = frozenset()
        self._kernel_before = frozenset(kernel_lines())
        self._began = time.time()
        self._log_sizes = {rank: _size(self._log(rank)) for rank in ranks}
        self._unlogged: dict[int, deque[str]] = {rank: deque(maxlen=_UNLOGGED_AT_MOST) for rank in ranks}

    def started(self, pids: Mapping[int, int]) -> None:
        """Record the process id of each rank."""
        self._pids = dict(pids)

    def unlogged(self, rank: int, line: str) -> None:
        """Record a line of a rank that its log did not take. It may be the one that names the full disk."""
        self._unlogged[rank].append(line)

    def note_children(self) -> None:
        """Record which processes the ranks have started; called about once a second.

        A process that lives between two calls is missed; one that the kernel kills for its memory had to
        take that first.
        """
        for rank, pid in self._pids.items():
            known = self._children.setdefault(rank, {})
            known.update(dict.fromkeys(descendants(pid)))
            for oldest in list(known)[:-_CHILDREN_AT_MOST]:
                del known[oldest]

    def ended(self, statuses: Mapping[int, int], *, killed: Collection[int]) -> None:
        """Record the exit status of each rank, and which ranks their launcher killed."""
        self.statuses, self._killed = dict(statuses), frozenset(killed)

    def ends(self, *, attempt: str) -> list[RankEnd]:
        """Return how each rank ended. attempt: the name that is in the heartbeats of these ranks."""
        beats = read_beats(self._rundir, ranks=self._ranks, attempt=attempt)
        is_comparable = sees_kernel_pids()
        ends = []
        for rank, status in sorted(self.statuses.items()):
            end = RankEnd(
                rank=rank,
                host=self._host,
                pid=self._pids.get(rank, 0),
                status=status,
                is_killed_here=rank in self._killed,
                log=self._log_tail(rank),
                flight=read_flight(self._rundir.stacks().parent, rank, since=self._began),
                children=tuple(self._children.get(rank, ())) if is_comparable else None,
            )
            beat = beats.get(rank)
            if beat is not None:
                end = replace(end, device=beat.device, bus=beat.bus, error=beat.error, step=beat.step)
            ends.append(end)
        return ends

    def kernel(self) -> list[str]:
        """Return the lines that this machine's kernel log has gained since the attempt began."""
        return [line for line in kernel_lines() if line not in self._kernel_before]

    def _log(self, rank: int) -> Path:
        return self._rundir.log(host=self._host, rank=rank)

    def _log_tail(self, rank: int) -> str:
        """Return what the rank printed in this attempt, at most the last _TAIL_BYTES."""
        path, tail = self._log(rank), ""
        size = _size(path)
        begin = max(self._log_sizes[rank], size - _TAIL_BYTES)
        if size > begin:
            with suppress(OSError), path.open("rb") as file:  # what else is known says how the rank ended
                file.seek(begin)
                tail = file.read().decode(errors="replace")
        return tail + "".join(self._unlogged[rank])


def kernel_lines() -> list[str]:
    """Return the lines of this machine's kernel log; [] where this user may not read it."""
    try:
        done = subprocess.run(
            ["dmesg"], capture_output=True, text=True, errors="replace", timeout=_DMESG_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def free_share(path: Path) -> float | None:
    """Return the fraction of a file system that is free to this user, 0 to 1; None where it is unknown."""
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_bavail / facts.f_blocks if facts.f_blocks else None


def free_gib(path: Path) -> float | None:
    """Return the free space of a file system in GiB; None where it is unknown."""
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize / 2**30


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
