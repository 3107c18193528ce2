"""Families of processes: found, hurt, and never left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from bloomery.chaos import processes, scenario
from bloomery.chaos.processes import ManagedProcess, interrupted_once, marked
from bloomery.chaos.scenario import ScenarioSettings, run_scenario
from bloomery.chaos.shaped_network import Shape
from bloomery.errors import PeerError

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


def test_a_process_that_has_the_number_of_one_that_ended_is_none_of_its_family(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        ended = ManagedProcess(name="peer", command=["true"], environment={}, log=tmp_path / "log")
        ended.start()
        assert ended.wait(60.0) == 0 and ended._process is not None
        ended._process.pid = stranger.pid
        assert ended.family() == []
        ended.kill()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


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
        assert marked("REHEARSAL_TEST", "another scenario") == []
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


def test_a_process_has_the_environment_that_it_was_given_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_WHOEVER_STARTS_IT", "1")
    log = tmp_path / "not" / "there" / "a.log"
    with ManagedProcess(name="a", command=["/usr/bin/env"], environment={"ITS": "own"}, log=log) as actor:
        actor.start()
        assert actor.wait(60.0) == 0
    assert log.read_text() == "ITS=own\n"


def test_what_the_children_of_a_process_start_is_of_its_family(tmp_path: Path) -> None:
    child = "sleep 600 & wait"
    command = ["/bin/sh", "-c", f"/bin/sh -c '{child}' & wait"]
    with ManagedProcess(name="a", command=command, environment={}, log=tmp_path / "a.log") as actor:
        actor.start()
        _until(lambda: "sleep" in [process.name() for process in actor.family()])
        assert len(actor.family()) == 3


def test_a_process_that_has_ended_keeps_no_signal_from_the_others(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as ended, subprocess.Popen(["sleep", "600"]) as lives:
        family = [psutil.Process(ended.pid), psutil.Process(lives.pid)]
        ended.kill()
        ended.wait()
        _actor(tmp_path).signal(signal.SIGTERM, whom=family)
        until = time.monotonic() + 5.0
        while lives.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        lives.kill()
        assert lives.wait() == -signal.SIGTERM


def test_a_process_that_was_never_started_is_neither_waited_for_nor_asked_to_end(tmp_path: Path) -> None:
    with _actor(tmp_path) as actor:
        actor.leave()
        with pytest.raises(PeerError, match="a was never started"):
            actor.wait(1.0)
        assert (actor.alive, actor.status, actor.family(), actor.starts) == (False, None, [], 0)


def test_a_process_that_takes_too_long_is_told_with_where_its_output_is(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with ManagedProcess(name="a", command=["sleep", "600"], environment={}, log=log) as actor:
        actor.start()
        assert actor.status is None
        with pytest.raises(PeerError, match=r"^a did not end within 0 s\.") as told:
            actor.wait(0.0)
        assert told.value.remedy == f"Its output is in {log}."


def test_a_process_has_a_session_of_its_own_and_its_family_ends_with_it(tmp_path: Path) -> None:
    """So a Ctrl-C in the terminal is for the scenario alone, which then ends its processes."""
    log = tmp_path / "a.log"
    with ManagedProcess(name="a", command=["sleep", "600"], environment={}, log=log) as actor:
        actor.start()
        (process,) = actor.family()
        assert os.getsid(process.pid) == process.pid
        process.kill()
        process.wait(60.0)
        assert actor.family() == []


def test_a_process_that_does_not_answer_is_killed_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = count(0.0, processes.EXIT_S / 3)
    clock = SimpleNamespace(monotonic=lambda: next(moments), sleep=lambda seconds: None)
    monkeypatch.setattr(processes, "time", clock)
    command = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.01; done"]
    environment = {"PATH": os.environ["PATH"]}
    with ManagedProcess(
        name="a", command=command, environment=environment, log=tmp_path / "a.log"
    ) as process:
        process.start()
        _until(lambda: process.log.read_text() == "ready\n")
    assert process.status == -signal.SIGKILL


def test_a_second_signal_does_not_interrupt_what_the_first_one_began() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with interrupted_once():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_the_output_of_a_later_start_follows_that_of_the_first(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo begun; echo failed >&2"]
    with ManagedProcess(name="a", command=command, environment={}, log=tmp_path / "a.log") as process:
        for _ in range(2):
            process.start()
            assert process.wait(60.0) == 0
    assert process.log.read_text() == "begun\nfailed\n" * 2 and process.starts == 2


def test_who_ends_what_is_marked_is_not_marked_itself() -> None:
    me = psutil.Process()
    name, value = next(iter(me.environ().items()))
    assert me not in marked(name, value)


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), psutil.NoSuchProcess(1), PermissionError()])
def test_a_process_whose_environment_cannot_be_read_has_no_mark(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> dict[str, str]:
        raise error

    monkeypatch.setattr(processes.psutil, "process_iter", lambda: [SimpleNamespace(pid=1, environ=refuse)])
    assert marked("REHEARSAL_TEST", "a") == []


def test_what_marked_processes_start_while_they_are_killed_is_killed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[str] = []

    def gone() -> None:
        raise psutil.NoSuchProcess(1)

    first = [SimpleNamespace(kill=gone), SimpleNamespace(kill=lambda: killed.append("first"))]
    rounds = iter([first, [SimpleNamespace(kill=lambda: killed.append("its child"))], []])
    monkeypatch.setattr(processes, "marked", lambda mark, value: next(rounds))
    monkeypatch.setattr(processes.psutil, "wait_procs", lambda left, timeout: None)
    processes.kill_marked("REHEARSAL_TEST", "a")
    assert killed == ["first", "its child"]


COORDINATOR = """
import socket, sys, time
host, port = sys.argv[1].split(":")
server = socket.create_server((host, int(port)))
time.sleep(600)
"""


def test_a_scenario_that_is_interrupted_while_it_starts_a_peer_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stand_in(what: str, *words: str) -> list[str]:
        program = COORDINATOR if what == "coordinate" else "import time; time.sleep(600)"
        return [sys.executable, "-c", program, words[-1]]

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            if "BLOOMERY_PEER" in options["env"]:
                started.append(self.pid)
                raise KeyboardInterrupt

    started: list[int] = []
    monkeypatch.setattr(scenario, "_bloomery", stand_in)
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    settings = ScenarioSettings(
        recipe="", overrides=(), run="r", peers=2, shape=Shape(rate=0, delay=0, loss=0), directory=tmp_path
    )
    with pytest.raises(KeyboardInterrupt):
        run_scenario(settings, watch=lambda at_s, injected: None)
    (first,) = started
    assert not psutil.pid_exists(first) or psutil.Process(first).status() == psutil.STATUS_ZOMBIE
