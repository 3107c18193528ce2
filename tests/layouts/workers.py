"""Persistent ranks: processes forked from one that has torch loaded, who train job after job.

Each job makes a process group of its own over a file; no ports. A rank that fails, or that does not answer in
time, is told with its traceback or the stacks of its threads, and all ranks are replaced.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
from tests.forked import forked

JOB_DEADLINE_S = 400
"""Beyond what thousands of small collectives take where many others compute, too."""
COLLECTIVE_DEADLINE_S = 100
STACKS_S = 2.0
READY = "ready"


class RankFailed(AssertionError):
    """A rank raised or was silent; its traceback, or the stacks of its threads, is the message."""


class Ranks:
    """Up to eight worker processes, started as they are needed. Close it."""

    def __init__(self) -> None:
        self._context = forked()
        self._workers: list[tuple[Any, Connection]] = []
        self._directory = tempfile.TemporaryDirectory(prefix="layouts-")
        self._jobs = 0

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
        """`function(*arguments, rank)` on `ranks` ranks of one process group; what each returned."""
        self._jobs += 1
        meeting = Path(self._directory.name) / f"job-{self._jobs}"
        while len(self._workers) < ranks:
            self._workers.append(self._start())
        try:
            for rank, (_, connection) in enumerate(self._workers[:ranks]):
                connection.send((function, arguments, rank, ranks, str(meeting)))
            return self._answers(ranks)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers; the next job starts others."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()

    def _start(self) -> tuple[Any, Connection]:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._directory.name), daemon=True)
        process.start()
        theirs.close()
        # Before the job: what it loads is no part of the job's time, nor of that for meeting the others.
        if not mine.poll(JOB_DEADLINE_S) or mine.recv() != READY:
            raise RankFailed(f"a rank did not begin within {JOB_DEADLINE_S} s")
        return process, mine

    def _answers(self, ranks: int) -> list[Any]:
        answers: dict[int, Any] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers[:ranks])}
        deadline = time.monotonic() + JOB_DEADLINE_S
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = sorted(waiting.values())
                stacks = "\n".join(self._stacks(rank) for rank in silent)
                raise RankFailed(f"ranks {silent} did not answer within {JOB_DEADLINE_S} s\n{stacks}")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    failure, answer = connection.recv()
                except EOFError:
                    raise RankFailed(f"rank {rank} died: {self._death(rank)}") from None
                if failure:
                    raise RankFailed(f"rank {rank}:\n{failure}")
                answers[rank] = answer
        return [answers[rank] for rank in range(ranks)]

    def _death(self, rank: int) -> str:
        """How a rank ended, and the stacks of its threads where a signal of its own ended it."""
        process = self._workers[rank][0]
        process.join(timeout=10.0)
        crash = _stacks_of(self._directory.name, process.pid)
        told = crash.read_text() if crash.exists() else ""
        return f"exit code {process.exitcode}\n{told or 'it left no stacks'}"

    def _stacks(self, rank: int) -> str:
        """Where a rank's threads are, and whether it computes: one that hangs does not."""
        pid = self._workers[rank][0].pid
        os.kill(pid, signal.SIGUSR1)
        before_s = _computed_s(pid)
        time.sleep(STACKS_S)
        stacks = _stacks_of(self._directory.name, pid)
        told = stacks.read_text() if stacks.exists() else "it has only just begun"
        return f"rank {rank}, computing {_computed_s(pid) - before_s:.1f} of {STACKS_S} s:\n{told}"


def _computed_s(pid: int) -> float:
    try:
        used = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(used.user + used.system)


def _stacks_of(directory: str, pid: int) -> Path:
    return Path(directory) / f"stacks-{pid}"


def _serve(connection: Connection, directory: str) -> None:
    stacks = _stacks_of(directory, os.getpid()).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks, all_threads=True)
    import torch

    from bloomery.parallel import mesh

    # A collective that hangs is to say where, before the job's own deadline.
    mesh.TIMEOUT = datetime.timedelta(seconds=COLLECTIVE_DEADLINE_S)
    torch.set_num_threads(1)
    connection.send(READY)
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            function, arguments, rank, ranks, meeting = connection.recv()
            try:
                answer = ("", _in_group(function, arguments, rank, ranks, meeting))
            except Exception:  # noqa: BLE001  — a process's edge: the traceback goes to who asked
                answer = (traceback.format_exc(), None)
            connection.send(answer)


def _in_group(
    function: Callable[..., Any], arguments: tuple[Any, ...], rank: int, ranks: int, meeting: str
) -> Any:
    import torch.distributed as dist

    if ranks == 1:
        return function(*arguments, rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=COLLECTIVE_DEADLINE_S),
    )
    try:
        return function(*arguments, rank)
    finally:
        dist.destroy_process_group()
