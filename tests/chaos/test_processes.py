"""Families of processes: found, hurt, and never left behind."""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bloomery.chaos.processes import ManagedProcess, marked

PARENT = """
import os, subprocess, sys, time
ranks = [
    subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env=os.environ | {"RANK": str(rank)}, process_group=0,
    )
    for rank in range(2)
]
print("started", flush=True)
time.sleep(600)
"""


def _until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _actor(tmp_path: Path, program: str = PARENT) -> ManagedProcess:
    return ManagedProcess(
        name="a",
        command=[sys.executable, "-c", program],
        environment={"REHEARSAL_TEST": str(tmp_path)},
        log=tmp_path / "logs" / "a.log",
    )


def test_killing_an_actor_leaves_none_of_its_family(tmp_path: Path) -> None:
    with _actor(tmp_path) as actor:
        actor.start()
        _until(lambda: len(actor.ranks()) == 2)
        assert len(marked("REHEARSAL_TEST", str(tmp_path))) == 3
        actor.kill()
        assert not actor.alive
        assert marked("REHEARSAL_TEST", str(tmp_path)) == []


def test_ranks_that_outlive_their_parent_are_found_and_ended_at_the_next_start(tmp_path: Path) -> None:
    with _actor(tmp_path) as actor:
        actor.start()
        _until(lambda: len(actor.ranks()) == 2)
        actor.signal(signal.SIGKILL, whom=actor.family()[:1])
        _until(lambda: not actor.alive)
        assert len(marked("REHEARSAL_TEST", str(tmp_path))) == 2
        actor.start()
        _until(lambda: len(actor.ranks()) == 2)
        assert len(marked("REHEARSAL_TEST", str(tmp_path))) == 3
        assert actor.starts == 2
    assert marked("REHEARSAL_TEST", str(tmp_path)) == []


def test_a_goodbye_is_a_signal_that_the_process_may_answer(tmp_path: Path) -> None:
    program = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    program += "print('ready', flush=True)\ntime.sleep(600)"
    with _actor(tmp_path, program) as actor:
        actor.start()
        _until(lambda: actor.log.read_text() == "ready\n")
        actor.leave()
        assert actor.wait(60.0) == 7
        assert actor.status == 7
