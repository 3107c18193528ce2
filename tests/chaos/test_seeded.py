"""The very faults that a seed gives, and what a scenario's processes are started with."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.chaos.test_injections import Stage
from tests.protocol import example

from bloomery.chaos import audit, processes, scenario
from bloomery.chaos.faults import Fault, parse_rate, parse_seconds, parse_share, schedule
from bloomery.chaos.processes import ManagedProcess
from bloomery.chaos.scenario import ScenarioSettings, run_scenario
from bloomery.chaos.shaped_network import Shape
from bloomery.data.position import Position
from bloomery.errors import PeerError
from bloomery.protocol.encoding import encode_text
from bloomery.protocol.keys import Keys


def test_a_schedule_of_a_seed_is_the_same_on_any_machine_and_in_any_version() -> None:
    """Who reports a failure with a seed counts on that."""
    drawn = schedule(seed=7, peers=("a", "b", "c"), faults=5, mean_gap_s=10.0, longest_s=4.0)
    told = [(fault.kind, fault.peer, round(fault.after_s, 3), round(fault.seconds, 3)) for fault in drawn]
    assert told == [
        ("cut", "a", 5.022, 0.955),
        ("corrupt", "a", 4.552, 0.0),
        ("kill-rank", "c", 2.417, 0.0),
        ("kill-peer", "b", 5.416, 0.0),
        ("stop-peer", "a", 8.008, 0.989),
    ]


def test_all_faults_are_undone_in_the_order_in_which_they_would_have_been() -> None:
    stage = Stage()
    stage.strikes("stop-peer", seconds=9.0)
    stage.strikes("kill-coordinator", seconds=2.0, peer="")
    stage.strikes("stop-rank", seconds=5.0)
    stage.notes.clear()
    stage.hand.revert_all()
    assert [note if isinstance(note, str) else note[0] for note in stage.notes] == [
        "started",
        "SIGCONT",
        "SIGCONT",
    ]
    assert stage.notes[2] == ("SIGCONT", ["parent", "rank0", "rank1"])
    assert stage.hand.next_s == float("inf")


def test_a_fault_is_undone_at_its_time_and_the_next_one_is_known() -> None:
    stage = Stage()
    stage.strikes("stop-rank", seconds=5.0)
    stage.strikes("kill-coordinator", seconds=2.0, peer="")
    assert stage.hand.next_s == 2.0
    assert stage.after(2.0)[-1] == "started"
    assert stage.hand.next_s == 3.0


@pytest.mark.parametrize(
    ("text", "read", "value"),
    [
        (" 1.5 MBIT ", parse_rate, 187_500.0),
        ("0kbit", parse_rate, 0.0),
        ("0", parse_seconds, 0.0),
        (" 5% ", parse_share, 0.05),
        ("0", parse_share, 0.0),
        ("99.9%", parse_share, 0.999),
    ],
)
def test_quantities_may_be_written_with_spaces_and_in_capitals(text: str, read: Any, value: float) -> None:
    assert read(text) == pytest.approx(value)


def test_the_processes_of_a_scenario_know_where_they_listen_and_by_what_they_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []
    shown = ["BLOOMERY_SCENARIO", "BLOOMERY_PEER", "BLOOMERY_COORDINATOR", "OMP_NUM_THREADS", "KEPT"]
    shell = "; ".join(f"echo ${name}" for name in shown)

    def stand_in(word: str, *words: str) -> list[str]:
        commands.append((word, *words))
        return ["sh", "-c", shell] if word == "peer" else ["sleep", "60"]

    asked: list[Any] = []
    waited: list[Any] = []
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    monkeypatch.setattr(scenario, "_bloomery", stand_in)
    monkeypatch.setattr(scenario.secrets, "token_hex", lambda count: f"mark{count}")
    monkeypatch.setattr(scenario, "_wait_for_port", lambda port, process: waited.append((port, process.name)))
    monkeypatch.setattr(scenario, "read_commits", lambda *what: asked.append(what) or ("commit",))
    settings = ScenarioSettings(
        recipe="mine",
        overrides=(),
        run="the run",
        peers=2,
        shape=Shape(),
        directory=tmp_path,
        deadline_s=30.0,
    )
    told: list[tuple[float, int]] = []
    outcome = run_scenario(settings, watch=lambda at_s, injected: told.append((at_s, len(injected))))
    assert all(0.0 <= at_s <= outcome.seconds < 3600.0 and count == 0 for at_s, count in told)
    ((port, name),) = waited
    assert (name, commands[0]) == (
        "coordinator",
        ("coordinate", "--data", str(tmp_path / "coordinator"), "--listen", f"127.0.0.1:{port}"),
    )
    endpoint = f"http://127.0.0.1:{port}"
    assert asked == [(endpoint, "the run")] and list(outcome.commits) == ["commit"]
    for peer in ("peer0", "peer1"):
        said = (tmp_path / "logs" / f"{peer}.log").read_text().splitlines()
        assert said == ["mark8", peer, endpoint, "9", "yes"]
    assert outcome.bytes_between == {"peer0": (0, 0), "peer1": (0, 0)} and outcome.leftover == []
    assert (tmp_path / "logs" / "coordinator.log").exists() and not outcome.failed


def test_a_coordinator_that_does_not_listen_in_time_is_told_with_its_output(
    tmp_path: Path, monkeypatch
) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 20.0

    monkeypatch.setattr(scenario, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    process: Any = SimpleNamespace(alive=True, log=tmp_path / "its.log")
    with pytest.raises(PeerError, match="did not come up") as told:
        scenario._wait_for_port(port, process)
    assert now[0] == 60.0 and told.value.remedy == f"Its output is in {tmp_path / 'its.log'}."


def test_ports_beside_each_other_are_free_and_taken_once(monkeypatch) -> None:
    run: Any = SimpleNamespace(_ports={20})
    drawn = iter([19, 20, 30, 40])
    monkeypatch.setattr(scenario, "free_ports", lambda count: [next(drawn)])
    monkeypatch.setattr(scenario, "_is_free", lambda port: port != 31)
    assert scenario._ScenarioRun._free_ports(run, 2) == [40, 41] and run._ports == {20, 40, 41}
    monkeypatch.setattr(scenario, "free_ports", lambda count: [20])
    with pytest.raises(PeerError, match="No 2 free ports beside each other"):
        scenario._ScenarioRun._free_ports(run, 2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.undo()
        assert not scenario._is_free(server.getsockname()[1]) and not scenario._is_free(65_536)


def test_a_process_is_started_once_apart_from_this_one_and_its_output_is_kept(
    tmp_path: Path, monkeypatch
) -> None:
    started: list[Any] = []

    class Popen:
        pid = os.getpid()

        def __init__(self, command: Any, **how: Any) -> None:
            how.pop("stdout").write(b"said\n")
            started.append((command, how))
            self.status: int | None = None

        def poll(self) -> int | None:
            return self.status

        def wait(self, seconds: float) -> int:
            raise subprocess.TimeoutExpired("a", seconds)

    monkeypatch.setattr(processes.subprocess, "Popen", Popen)
    log = tmp_path / "logs" / "a.log"
    process = ManagedProcess(name="a", command=["x"], environment={"A": "1"}, log=log)
    assert process.status is None and not process.alive
    process.start()
    process.start()
    how = dict(env={"A": "1"}, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True)
    assert started == [(["x"], how)] and process.starts == 1 and log.read_text() == "said\n"
    with pytest.raises(PeerError, match=r"a did not end within 3 s\.") as told:
        process.wait(3.0)
    assert told.value.remedy == f"Its output is in {log}."


def test_only_processes_with_a_rank_are_ranks_and_the_peer_itself_is_none(monkeypatch) -> None:
    environments = {"parent": {"RANK": "0"}, "helper": {}, "rank": {"RANK": "1"}}
    monkeypatch.setattr(processes, "_environment", lambda process: environments[process])
    process = ManagedProcess(name="a", command=[], environment={}, log=Path("log"))
    monkeypatch.setattr(ManagedProcess, "family", lambda self: list(environments))
    assert process.ranks() == ["rank"]


def test_a_signal_goes_to_all_of_a_family_though_one_is_gone(monkeypatch) -> None:
    sent: list[Any] = []

    class Process:
        def __init__(self, name: str) -> None:
            self.name = name

        def send_signal(self, number: int) -> None:
            if self.name == "gone":
                raise processes.psutil.NoSuchProcess(1)
            sent.append((self.name, number))

    family = [Process(name) for name in ("parent", "gone", "rank")]
    monkeypatch.setattr(ManagedProcess, "family", lambda self: family)
    ManagedProcess(name="a", command=[], environment={}, log=Path("log")).signal(signal.SIGSTOP)
    assert sent == [("parent", signal.SIGSTOP), ("rank", signal.SIGSTOP)]


def test_the_commits_of_a_run_are_read_by_round(monkeypatch) -> None:
    commits = [example.commit(round=round) for round in (3, 1, 2)]
    asked: list[Any] = []

    class Etcd:
        def __init__(self, endpoints: list[str]) -> None:
            asked.append(endpoints)

        def list(self, prefix: str) -> Any:
            asked.append(prefix)
            return SimpleNamespace(items=[SimpleNamespace(value=encode_text(one)) for one in commits])

        def __enter__(self) -> Etcd:
            return self

        def __exit__(self, *error: object) -> None:
            asked.append("closed")

    monkeypatch.setattr(audit, "Etcd", Etcd)
    assert [commit.round for commit in audit.read_commits("http://a:1", "r")] == [1, 2, 3]
    assert asked == [["http://a:1"], Keys("r").commits, "closed"]


def test_a_peer_that_ends_very_slowly_is_looked_at_again_and_again() -> None:
    stage = Stage()
    assert stage.hand.inject(Fault(after_s=0.0, kind="leave", peer="a"))
    for _ in range(3):
        assert stage.after(5.0)[-1:] in ([], ["asked to leave"]) and stage.hand.next_s == 5.0
    stage.peer.alive = False
    assert stage.after(5.0) == ["started"] and stage.hand.next_s == float("inf")


def test_rounds_that_consume_nothing_or_have_no_members_are_no_mistakes() -> None:
    commits = [
        example.commit(round=0, epoch=0, members=(), position=Position()),
        example.commit(round=1, epoch=1, members=("a",), position=Position(consumed=8)),
        example.commit(round=2, epoch=1, members=(), position=Position(consumed=8)),
    ]
    found = audit.audit(commits, {}, samples=8)
    assert found.mistakes == () and (found.attempts, found.rounds) == (1, 1)
    assert audit.audit([], {}, samples=0).attempts == 0
