"""Launchers that believe to be on machines of their own, for supervision over several nodes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from tests.faults.commands import _environment, wait_for

from bloomery.events.heartbeat import RankBeat, read_beat
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory

Train = Callable[..., list[str]]
QUICK = ("optim.name=adamw", "evaluate.every_steps=0", "evaluate.at_end=false", "checkpoint.keep_last=9")


class EmulatedNode:
    """A launcher that believes to be on a machine of its own, and everything it starts."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self.log = name, log
        words = [sys.executable, "-m", "bloomery", *command]
        with log.open("wb") as said:
            self.process = subprocess.Popen(
                words,
                stdout=said,
                stderr=said,
                env=_environment() | {"BLOOMERY_HOST": name, "OMP_NUM_THREADS": "1"},
            )

    def signal(self, number: int) -> None:
        """Send a signal to the launcher and all its descendants, as a node does that is lost or frozen."""
        root = psutil.Process(self.process.pid)
        for process in [root, *root.children(recursive=True)]:
            process.send_signal(number)


@contextmanager
def nodes(names: str, command: list[str], *, spares: int, place: Path) -> Iterator[dict[str, EmulatedNode]]:
    count = len(names.split())
    command = ["launch", *command[1:], "--nproc", "1", "--supervise", "--nnodes", str(count)]
    command += ["--spares", str(spares), "--job", "test", "--rdzv", "127.0.0.1:1"]
    with ExitStack() as stack:
        started = {}
        for name in names.split():
            node = started[name] = EmulatedNode(name, command, place / f"{name}.log")
            stack.callback(node.process.wait)
            stack.callback(node.process.kill)
        yield started


def told(run: RunDirectory, event: str) -> list[dict]:
    return [record for record in read_journal(run.operations) if record["event"] == event]


def beat_of(run: RunDirectory, *, attempt: int, from_step: int, rank: int = 1) -> RankBeat:
    """Wait until a rank of an attempt has made so many steps, and return its heartbeat."""

    def has_come() -> bool:
        beat = read_beat(run.heartbeat(rank=rank))
        return beat is not None and beat.attempt == f"test-{attempt}" and beat.step >= from_step

    wait_for(has_come)
    beat = read_beat(run.heartbeat(rank=rank))
    assert beat is not None
    return beat
