"""How a scenario begins and ends: its seeds and threads, what its peers leave behind, and when it is over."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bloomery.chaos import processes, scenario
from bloomery.chaos.faults import Fault, FaultInjector
from bloomery.chaos.processes import ManagedProcess
from bloomery.chaos.scenario import ScenarioSettings, run_scenario
from bloomery.chaos.shaped_network import Shape, ShapedNetwork
from bloomery.errors import PeerError

DEADLINE_S = 60.0


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ScenarioSettings]:
    """Returns the settings of a scenario of three peers that run a line of shell each; $0 is their memory."""
    monkeypatch.setattr(scenario, "_wait_for_port", lambda port, process: None)
    monkeypatch.setattr(scenario, "read_commits", lambda endpoint, run: ())

    def settings(shell: str) -> ScenarioSettings:
        def stand_in(word: str, *words: str) -> list[str]:
            memory = [one.partition("=")[2] for one in words if one.startswith("checkpoint.memory")]
            return ["sh", "-c", shell, *memory] if word == "peer" else ["sleep", "60"]

        monkeypatch.setattr(scenario, "_bloomery", stand_in)
        return ScenarioSettings(
            recipe="r", overrides=(), run="r", peers=3, shape=Shape(), directory=tmp_path, ranks=2, seed=77
        )

    return settings


def test_what_peers_leave_in_memory_is_told_and_removed(played: Callable[[str], ScenarioSettings]) -> None:
    outcome = run_scenario(played('mkdir -p "$0" && touch "$0/part"'), watch=lambda *_: None)
    assert [Path(path).parts[-2:] for path in outcome.leftover] == [(f"peer{n}", "part") for n in range(3)]
    assert outcome.failed and set(outcome.statuses.values()) == {0}
    assert not any(Path(path).parent.exists() for path in outcome.leftover)


def test_a_process_that_peers_leave_is_told_and_ended(played: Callable[[str], ScenarioSettings]) -> None:
    long = "x" * 100
    outcome = run_scenario(played(f"setsid tail -f /dev/null {long} & exit 0"), watch=lambda *_: None)
    told = [re.fullmatch(r"process (\d+) \((.*)\)", line) for line in outcome.leftover]
    assert len(told) == 3 and outcome.failed
    for one in told:
        command = f"tail -f /dev/null {long}"
        assert one is not None and one[2] in (command[:80], f"setsid {command}"[:80]), (
            "which becomes the other"
        )
        assert not psutil.pid_exists(int(one[1])) or psutil.Process(int(one[1])).status() == "zombie"


@pytest.mark.parametrize("ending", [psutil.NoSuchProcess(7), psutil.ZombieProcess(7)])
def test_a_process_that_ends_while_it_is_looked_at_is_not_left_behind(
    played: Callable[[str], ScenarioSettings], monkeypatch: pytest.MonkeyPatch, ending: psutil.Error
) -> None:
    def cmdline() -> list[str]:
        raise ending

    monkeypatch.setattr(scenario, "marked", lambda mark, value: [SimpleNamespace(pid=7, cmdline=cmdline)])
    outcome = run_scenario(played("exit 0"), watch=lambda *_: None)
    assert outcome.leftover == [] and not outcome.failed


@pytest.mark.parametrize("back_s", [0.0, 600.0])
def test_a_peer_that_is_away_when_the_others_end_comes_back_and_sees_the_end(
    played: Callable[[str], ScenarioSettings], tmp_path: Path, back_s: float
) -> None:
    killed = Fault(after_s=0.0, kind="kill-peer", peer="peer0")
    settings = replace(played("sleep 0.2; echo done"), faults=(killed,), back_s=back_s)
    outcome = run_scenario(settings, watch=lambda *_: None)
    assert outcome.statuses == dict.fromkeys(("peer0", "peer1", "peer2"), 0)
    assert (tmp_path / "logs" / "peer0.log").read_text() == "done\n"


def test_a_peer_that_stands_still_goes_on_at_its_time(played: Callable[[str], ScenarioSettings]) -> None:
    stopped = Fault(after_s=0.0, kind="stop-peer", peer="peer0", seconds=0.05)
    settings = replace(played("sleep 0.2"), faults=(stopped,), deadline_s=8.0)
    outcome = run_scenario(settings, watch=lambda *_: None)
    assert set(outcome.statuses.values()) == {0} and [one.done for one in outcome.injected] == [True]


def test_a_fault_whose_target_does_not_run_is_told_as_such(
    played: Callable[[str], ScenarioSettings], caplog: pytest.LogCaptureFixture
) -> None:
    faults = tuple(Fault(after_s=0.0, kind=kind, peer="peer0") for kind in ("kill-rank", "sever"))
    with caplog.at_level(logging.INFO):
        outcome = run_scenario(replace(played("sleep 0.4"), faults=faults), watch=lambda *_: None)
    assert [one.done for one in outcome.injected] == [False, True]
    assert [record.getMessage() for record in caplog.records if record.name == scenario.__name__] == [
        f"{faults[0]} (its target did not run)",
        str(faults[1]),
    ]


def test_all_peers_are_asked_to_leave_before_one_of_them_is_waited_for(
    played: Callable[[str], ScenarioSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "EXIT_S", 5.0)
    place = tmp_path / "asked"
    place.mkdir()
    answer = f"touch {place}/$$; while [ $(ls {place} | wc -l) -lt 3 ]; do sleep 0.01; done; echo all; exit 0"
    logs = [tmp_path / "logs" / f"peer{index}.log" for index in range(3)]

    def watch(at_s: float, injected: object) -> None:
        if all(log.read_text() == "ready\n" for log in logs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_scenario(played(f"trap '{answer}' TERM; echo ready; while :; do sleep 0.02; done"), watch=watch)
    assert [log.read_text() for log in logs] == ["ready\nall\n"] * 3


def test_a_scenario_that_takes_too_long_is_ended(
    played: Callable[[str], ScenarioSettings], tmp_path: Path
) -> None:
    with pytest.raises(PeerError, match="did not end within 0 s") as told:
        run_scenario(replace(played("exec sleep 60"), deadline_s=0.1), watch=lambda *_: None)
    assert told.value.remedy == f"The output of all processes is in {tmp_path / 'logs'}."


def test_the_seed_is_that_of_the_links_and_of_the_faults_and_the_cores_are_shared(
    played: Callable[[str], ScenarioSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[float] = []

    class Links(ShapedNetwork):
        def __init__(self, *, seed: int = 0) -> None:
            seeds.append(seed)
            super().__init__(seed=seed)

    class Faults(FaultInjector):
        def __init__(self, *, seed: int = 0, back_s: float = 0.0, **more: Any) -> None:
            seeds.extend((seed, back_s))
            super().__init__(seed=seed, back_s=back_s, **more)

    monkeypatch.setattr(scenario, "ShapedNetwork", Links)
    monkeypatch.setattr(scenario, "FaultInjector", Faults)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(13)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run_scenario(replace(played("echo $OMP_NUM_THREADS"), back_s=4.5), watch=lambda *_: None)
    assert seeds == [77, 77, 4.5]
    assert (tmp_path / "logs" / "peer2.log").read_text() == "2\n", "of thirteen cores for six ranks"


@pytest.mark.parametrize(
    ("alive", "status", "away", "next_s", "is_over"),
    [
        (True, None, set(), float("inf"), False),
        (False, 0, set(), 9.0, True),
        (False, 0, {"a"}, 9.0, False),
        (False, 3, set(), 9.0, False),
        (False, 3, set(), float("inf"), True),
    ],
)
def test_a_scenario_is_over_once_a_peer_has_seen_the_end_or_nothing_comes_back(
    alive: bool, status: int | None, away: set[str], next_s: float, is_over: bool
) -> None:
    run: Any = SimpleNamespace(peers={"a": SimpleNamespace(alive=alive, status=status)})
    injector: Any = SimpleNamespace(away=away, next_s=next_s)
    assert scenario._ScenarioRun._is_over(run, injector) == is_over


def test_a_peer_that_was_stopped_goes_on_before_it_is_asked_to_leave() -> None:
    notes: list[Any] = []
    peer = SimpleNamespace(signal=notes.append, leave=lambda: notes.append("leave"))
    run: Any = SimpleNamespace(peers={"a": peer})
    scenario._ScenarioRun._ask_to_leave(run)
    assert notes == [signal.SIGCONT, "leave"]


def test_a_coordinator_that_has_ended_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        alive: Any = SimpleNamespace(alive=True, log=tmp_path / "log")
        scenario._wait_for_port(port, alive)
    monkeypatch.setattr(scenario.time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(PeerError, match="did not come up"):
        scenario._wait_for_port(port, SimpleNamespace(alive=False, log=tmp_path / "log"))  # type: ignore[arg-type]


def test_a_stopped_process_ends_by_itself_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "EXIT_S", 5.0)
    answers = ["sh", "-c", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done"]
    environment = {"PATH": os.environ["PATH"]}
    with ManagedProcess(name="a", command=answers, environment=environment, log=tmp_path / "log") as process:
        process.start()
        until = time.monotonic() + DEADLINE_S
        while process.log.read_text() != "ready\n":
            assert time.monotonic() < until, "it did not come up"
            time.sleep(0.01)
        process.signal(signal.SIGSTOP)
    assert process.status == 7, "it was asked, and not killed"
    with pytest.raises(PeerError, match="never started"):
        ManagedProcess(name="b", command=["true"], environment={}, log=tmp_path / "log").wait(1.0)
