"""Tables, records and words that supervisors, launchers and commands show or hand on, as whole values."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery import durable
from bloomery.errors import RankLost, StorageError, TrainingFailed
from bloomery.events.heartbeat import RankActivity, RankBeat
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate import exclusions as exclusions_module
from bloomery.operate import launcher
from bloomery.operate.decision import Decision, ShareResult, evidence_of
from bloomery.operate.diagnosis import (
    EXIT_STATUSES,
    NODE_IS_BAD,
    REMEDIES,
    REPEATING,
    REPEATING_STATUSES,
    Cause,
    Culprit,
    Diagnosis,
)
from bloomery.operate.exclusions import Exclusions, QuarantinedNode, exclude_in_queue
from bloomery.operate.failure_evidence import FailureEvidence, RankEnd
from bloomery.operate.flight_recorder import FlightFinding, find_absent, flight_variables
from bloomery.operate.hang import HangFinding, find_hang
from bloomery.operate.launcher import address_of_node, node_group, node_name, port_for_ranks, rank_variables
from bloomery.operate.newest_checkpoint import NewestCheckpoint
from bloomery.operate.schedulers.interface import JobState
from bloomery.operate.stacks import Frame, RankStack
from bloomery.operate.standstill import StandstillLimits
from bloomery.operate.timeouts import run_timeouts
from bloomery.operate.wrong_bits import MachineFault, blamed_machine, machine_faults

SAVING, LOADING = RankActivity.SAVING, RankActivity.LOADING


def test_the_time_outs_of_a_run_that_has_measured_everything_are_these() -> None:
    longest = {RankActivity.COMPUTING: 20.0, RankActivity.REDUCING: 30.0, SAVING: 50.0, LOADING: 40.0,
               RankActivity.EVALUATING: 7.0}  # fmt: skip
    beats = {
        0: RankBeat(world=500, gap_s=9.0, longest_s=longest, first_s={RankActivity.UPDATING: 70.0}),
        1: RankBeat(world=500, gap_s=12.0, longest_s={SAVING: 60.0}),
        2: RankBeat(world=500, gap_s=1.0),
    }
    told = [(row.name, row.seconds, row.derived, row.then) for row in run_timeouts(beats)]
    stacks, kills, fixed = "stacks taken, then ended", "the launcher kills them", "fixed"
    of_runs = [row for row in told if row[2] != fixed]
    assert of_runs == [
        ("silence of a process", 18.0, "6 s, 3 × interval 5 s, 2 × gap 9 s", "ended, if no rank moves"),
        ("hang in evaluating", 21.0, "3 × longest, or 10 × step, 60 s", stacks),
        ("hang in a step", 90.0, "3 × longest 30 s, at least 10 s", stacks),
        ("hang in loading", 120.0, "3 × longest 40 s, at least 10 s", stacks),
        ("hang in a save", 180.0, "3 × longest 60 s, at least 10 s", stacks),
        ("hang in first eager turns", 210.0, "3 × longest 70 s, at least 60 s", stacks),
        ("hang in a compiling step", 480.0, "3 × longest 70 s, at least 480 s", stacks),
        ("hang at the end", 480.0, "300 s + 3 × save 60 s", stacks),
    ]
    assert {(name, seconds, then) for name, seconds, derived, then in told if derived == fixed} == {
        ("ranks after a killed one", 3.0, kills), ("ranks after a failed one", 20.0, kills),
        ("ranks after one that ended", 60.0, kills), ("a key of the rendezvous", 60.0, "the start fails"),
        ("all ranks join", 300.0, "the start fails, with names"),
        ("a collective", 600.0, "torch ends who waits"),
        ("rank 0's task is silent", 600.0, "the others give up"),
        ("rank 0's task hangs", 3600.0, "the others give up"),
    }  # fmt: skip
    before = {row.name: row.seconds for row in run_timeouts({}, limits=StandstillLimits(unmeasured_s=77.0))}
    assert {name: seconds for name, seconds in before.items() if name.startswith("hang in")} == {
        "hang in a step": 77.0, "hang in a save": 77.0, "hang in loading": 77.0,
        "hang in a compiling step": 77.0, "hang in first eager turns": 77.0, "hang in evaluating": 77.0,
    }  # fmt: skip


def diagnosis(**fields: Any) -> Diagnosis:
    told = {"cause": Cause.BAD_GPU, "culprit": Culprit(host="n1", rank=0, gpu="3"), "summary": "it fell off",
            "evidence": ("a", "b"), "sure": True}  # fmt: skip
    return Diagnosis(**{**told, **fields})


def test_a_diagnosis_is_told_in_a_sentence_and_as_fields() -> None:
    found = diagnosis()
    assert str(found) == "n1, GPU 3, rank 0: it fell off, sure"
    assert str(diagnosis(culprit=Culprit(), sure=False)) == "it fell off, likely"
    assert [str(Culprit(host="n1")), str(Culprit(rank=0)), str(Culprit(gpu="0"))] == [
        "n1",
        "rank 0",
        "GPU 0",
    ]
    assert json.loads(json.dumps(found.to_json())) == {
        "cause": "bad GPU", "culprit": {"host": "n1", "rank": 0, "gpu": "3"}, "summary": "it fell off",
        "evidence": ["a", "b"], "sure": True, "retries": True, "remedy": REMEDIES[Cause.BAD_GPU],
    }  # fmt: skip


def test_what_follows_each_cause() -> None:
    assert {cause for cause in Cause if not diagnosis(cause=cause).retries} == {
        Cause.BAD_RECIPE, Cause.BUS_ERROR, Cause.EXCEPTION, Cause.GPU_MEMORY, Cause.NO_SPACE, Cause.QUOTA,
        Cause.RUN_BUSY,
    } == REPEATING  # fmt: skip
    assert {
        Cause.BAD_GPU, Cause.GPU_MEMORY_AT_START, Cause.NODE_LOST, Cause.SILENT_CORRUPTION, Cause.UNFIT_NODE
    } == NODE_IS_BAD  # fmt: skip
    statuses = {cause: diagnosis(cause=cause).exit_status for cause in Cause}
    assert {cause for cause, status in statuses.items() if status == 68} == set(Cause) - set(EXIT_STATUSES)
    assert REPEATING_STATUSES == (2, 65, 66) and {statuses[cause] for cause in NODE_IS_BAD} == {67}
    assert statuses[Cause.PREEMPTED] == 75 and set(REMEDIES) == set(Cause)
    assert {cause: statuses[cause] for cause in REPEATING} == {
        Cause.BAD_RECIPE: 2, Cause.EXCEPTION: 65, Cause.GPU_MEMORY: 65, Cause.BUS_ERROR: 66,
        Cause.NO_SPACE: 66, Cause.QUOTA: 66, Cause.RUN_BUSY: 68,
    }  # fmt: skip


def test_a_decision_and_a_result_come_back_from_json_as_they_were() -> None:
    decision = Decision(
        number=3, hosts=("n2", "n1"), ranks=4, meeting="a:1", status=7, why="w", in_a_row=2, in_all=5,
        newest=NewestCheckpoint(incarnation=2, step=9), bad=("n9",), measured_s={"x": 1.5},
    )  # fmt: skip
    assert Decision.from_json(json.loads(json.dumps(decision.to_json()))) == decision
    assert (decision.world, list(decision.share("n1")), list(decision.share("n3"))) == (8, [4, 5, 6, 7], [])
    end = RankEnd(rank=1, host="n1", device="cuda:3", flight={"0": [7, "x"]}, children=[5])
    result = ShareResult(host="n1", status=1, ends=(end,), kernel=("k",), shm_free=0.5, shm_free_gib=2.0)
    assert ShareResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    assert end.culprit == Culprit(host="n1", rank=1, gpu="3") and replace(end, device="cpu").gpu == ""


def test_the_evidence_of_an_attempt_has_the_least_room_of_all_hosts() -> None:
    ends = [RankEnd(rank=rank, host=f"n{rank // 2}", status=1) for rank in range(4)]
    results = {
        "n1": ShareResult(host="n1", status=1, ends=(ends[3], ends[2]), shm_free=0.25, shm_free_gib=9.0),
        "n0": ShareResult(host="n0", status=1, ends=(ends[0], ends[1]), kernel=("k",), shm_free=0.5,
                          shm_free_gib=3.0),
    }  # fmt: skip
    finding = HangFinding(culprits=(1,), hosts=("n0",), summary="s", evidence=("e",), sure=True)
    ending = {"kind": "hang", "why": "w", "finding": json.loads(json.dumps(finding.__dict__))}
    decision = Decision(number=1, hosts=("n0", "n1"), ranks=2)
    assert evidence_of(decision, results, ending=ending) == FailureEvidence(
        ranks=ends, kernel={"n1": (), "n0": ("k",)}, hang=finding, silent_hosts=[], shm_free=0.25,
        shm_free_gib=3.0, first_step=0,
    )  # fmt: skip
    unknown = {host: replace(result, shm_free=None, shm_free_gib=None) for host, result in results.items()}
    found = evidence_of(replace(decision, newest=NewestCheckpoint(step=8)), unknown, ending=None)
    assert (found.shm_free, found.shm_free_gib, found.hang, found.first_step) == (None, None, None, 8)


def test_a_node_in_quarantine_is_told_since_when_and_why(tmp_path: Path) -> None:
    since = time.mktime((2031, 5, 6, 7, 8, 9, 0, 0, -1))
    node = QuarantinedNode(host="n1", cause="bad GPU", since=since, run="/r", evidence="Xid 79")
    assert str(node) == "n1 since 2031-05-06 07:08: bad GPU (Xid 79)"
    assert str(replace(node, evidence="")) == "n1 since 2031-05-06 07:08: bad GPU"
    own = Exclusions(tmp_path / "list.json")
    own.add(replace(node, host="n2"))
    own.add(node)
    fields = {"cause": "bad GPU", "since": since, "run": "/r", "evidence": "Xid 79"}
    assert json.loads(own.path.read_text()) == {host: {"host": host, **fields} for host in ("n1", "n2")}
    assert own.path.read_text().index('"n1"') < own.path.read_text().index('"n2"')


def test_what_another_run_excludes_while_the_lock_is_waited_for_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = (Exclusions(tmp_path / "list.json") for _ in range(2))
    really_locked = durable.locked

    def locked(path: Path, **how: Any) -> Any:
        monkeypatch.undo()
        other.add(QuarantinedNode(host="n2", cause="x", since=1.0))
        return really_locked(path, **how)

    monkeypatch.setattr(exclusions_module.durable, "locked", locked)
    own.add(QuarantinedNode(host="n1", cause="x", since=1.0))
    assert set(own.nodes()) == {"n1", "n2"}


def test_a_list_of_nodes_that_is_locked_or_refused_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Exclusions(tmp_path / "list.json")
    node = QuarantinedNode(host="n1", cause="x", since=1.0)
    asked: list[float] = []

    def locked(path: Path, *, owner: str, timeout_s: float) -> Any:
        asked.append(timeout_s)
        assert (path, owner) == (tmp_path / "list.json.lock", "bloomery")
        raise durable.LockHeld(path, "process 5 on n7")

    monkeypatch.setattr(exclusions_module.durable, "locked", locked)
    with pytest.raises(TrainingFailed, match=r"has been locked by .*process 5 on n7 for 20 s") as refused:
        own.add(node)
    monkeypatch.undo()
    assert refused.value.remedy == "Try again."
    assert asked == [20.0]
    own.path.mkdir()
    with pytest.raises(StorageError, match="Reading the nodes in quarantine"):
        own.nodes()
    elsewhere = Exclusions(tmp_path / "other.json")

    def refuse(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exclusions_module.durable, "write_whole", refuse)
    with pytest.raises(StorageError, match="Writing the nodes in quarantine"):
        elsewhere.add(node)


def test_only_jobs_that_wait_are_told_of_all_excluded_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {"1": JobState.PENDING, "2": JobState.RUNNING, "3": JobState.HELD, "4": JobState.ENDED}
    told: list[Any] = []
    waiting = dict(states)
    queue: Any = SimpleNamespace(
        jobs=lambda *, name, run: (
            told.append((name, run))
            or [SimpleNamespace(job=job, state=state) for job, state in waiting.items()]
        ),
        exclude=lambda jobs, nodes: told.append((jobs, nodes)),
    )
    section: Any = SimpleNamespace(exclude=("n9", "n1"))
    run = RunDirectory(tmp_path / "run")
    assert exclude_in_queue(queue, run, name="x", section=section, nodes=["n5", "n1"]) == ["1", "3"]
    assert told == [("x", run.path), (["1", "3"], ["n1", "n5", "n9"])]
    del waiting["1"], waiting["3"]
    assert exclude_in_queue(queue, run, name="x", section=section, nodes=["n5"]) == [] and len(told) == 3
    monkeypatch.chdir(tmp_path)
    exclude_in_queue(queue, RunDirectory(Path("run")), name="x", section=section, nodes=[])
    assert told[-1] == ("x", run.path), "a scheduler knows nothing of this directory"


def test_a_node_that_the_system_does_not_know_is_asked_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    said = ["NodeName=n1 NodeAddr=10.0.0.7 NodeHostName=n1"]

    def unknown(name: str, port: None) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    def run(command: Any, **options: Any) -> Any:
        calls.append((command, options))
        if not said[0]:
            raise FileNotFoundError
        return SimpleNamespace(stdout=said[0])

    monkeypatch.setattr(launcher.subprocess, "run", run)
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port: [name])
    assert address_of_node("n1") == "n1" and calls == []
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert address_of_node("n1") == "10.0.0.7"
    options = {"capture_output": True, "text": True, "timeout": 20.0, "check": False}
    assert calls == [(["scontrol", "show", "node", "n1"], options)]
    for said[0] in ("nothing of it", ""):
        with pytest.raises(TrainingFailed, match="The node n1 has no address here") as refused:
            address_of_node("n1")
        assert "Set MASTER_ADDR" in refused.value.remedy and "on all ranks" in refused.value.remedy
        with pytest.raises(TrainingFailed) as refused:
            address_of_node("n1", remedy="Give it one.")
        assert refused.value.remedy == "Give it one."
    monkeypatch.setattr(
        launcher.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(subprocess.TimeoutExpired("x", 20))
    )
    with pytest.raises(TrainingFailed, match="has no address here"):
        address_of_node("n1")


def test_the_variables_of_a_rank_of_mpirun_are_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    given = {
        "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "OMPI_MCA_ess_base_jobid": "17001",
        "SLURM_JOB_NODELIST": "iam[07-08]",
    }  # fmt: skip
    assert rank_variables(given, address_of=lambda name: f"{name}.x") == {
        "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "OMP_NUM_THREADS": "2",
        "MASTER_ADDR": "iam07.x", "MASTER_PORT": "15001",
    }  # fmt: skip
    del given["OMPI_MCA_ess_base_jobid"]
    one = given | {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"}
    assert rank_variables(one) == {
        "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "OMP_NUM_THREADS": "2",
        "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_PORT": "15000",
    }  # fmt: skip


def test_a_task_of_srun_has_the_place_that_srun_gave_it() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "a,b"}
    assert rank_variables(step, address_of=lambda name: name) == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "15000"
    }  # fmt: skip
    with pytest.raises(TrainingFailed, match="SLURM_PROCID is not set") as refused:
        rank_variables({"SLURM_STEP_NUM_TASKS": "4"})
    assert "Start with srun" in refused.value.remedy
    with pytest.raises(TrainingFailed, match="SLURM_PROCID='-1' in the environment is not a whole number"):
        rank_variables(step | {"SLURM_PROCID": "-1"})
    nested = step | {"RANK": "0", "WORLD_SIZE": "2"}
    for launched in ("TORCHELASTIC_RUN_ID", "BLOOMERY_LAUNCHER"):
        assert rank_variables(nested | {launched: "x"}) == {}
    assert node_name({"SLURMD_NODENAME": "iam07"}) == "iam07" and node_name({}) == ""
    assert node_group({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}) is None, "who waits for its nodes"


def test_where_no_port_is_free_sixty_four_have_been_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    class Taken(socket.socket):
        def bind(self, address: Any) -> None:
            tried.append(address[1])
            raise OSError(98, "Address already in use")

    monkeypatch.setattr(launcher.socket, "socket", Taken)
    with pytest.raises(RankLost, match=r"No port from 15,000 to 31,999 is free here") as refused:
        port_for_ranks(is_here=True)
    assert refused.value.remedy == "End what uses them."
    assert len(tried) == 64 and all(15_000 <= port < 32_000 for port in tried)


def test_the_faults_of_a_machine_are_those_of_its_peers_journal(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    machines = [{"rank": rank, "host": f"n{rank}", "device": f"cuda:{rank}"} for rank in (1, 2)]
    with Journal(run.journal(peer="7")) as journal:
        journal.write("step", incarnation=1, step=4)
        fields = {"what": "gradients", "is_certain": False, "reason": "they differ"}
        journal.write("corruption", incarnation=2, step=5, machines=machines, **fields)
    found = machine_faults(run, peer="7")
    assert [replace(fault, time=0.0) for fault in found] == [
        MachineFault(time=0.0, step=5, incarnation=2, rank=rank, host=f"n{rank}", device=f"cuda:{rank}",
                     what="gradients", is_certain=False, reason="they differ")
        for rank in (1, 2)
    ]  # fmt: skip
    assert all(fault.time > 1e9 for fault in found) and machine_faults(run) == []


def test_the_newest_machine_of_a_rank_is_blamed_with_its_last_five_faults() -> None:
    usual = MachineFault(time=1.0, step=0, incarnation=1, rank=3, host="n2", device="cuda:5", what="weights",
                         is_certain=True, reason="r")  # fmt: skip
    faults = [replace(usual, step=step, reason=f"r{step}") for step in range(1, 8)]
    faults.insert(0, replace(usual, host="n1", step=99))
    faults += [replace(usual, rank=4, step=50), replace(usual, is_certain=False, step=60)]
    assert blamed_machine(faults, rank=3) == Diagnosis(
        cause=Cause.SILENT_CORRUPTION,
        culprit=Culprit(host="n2", rank=3, gpu="5"),
        summary="wrong weights at 7 checks, the last at step 7",
        evidence=tuple(f"journal: step {step}: r{step}" for step in (7, 6, 5, 4, 3)),
        sure=True,
    )
    assert blamed_machine(faults, rank=5) is None
    for device in ("cpu", "xpu:3"):
        on_another = blamed_machine([replace(usual, device=device)], rank=3)
        assert on_another is not None and on_another.culprit.gpu == ""


def test_who_differs_in_a_flight_is_told_with_the_group() -> None:
    assert find_absent({0: {"1": [5, "x"], "0": [7, "a"]}, 2: {"0": [5, "b"]}, 1: {"0": [4, "c"]}}) == (
        FlightFinding(culprits=(1, 2), words="ranks 1, 2 did not come to a 7 of group 0, and began 4 last")
    )
    calls = {
        0: {"0": [7, "a"]},
        1: {"0": [7, "b"]},
        2: {"0": [7, "a"]},
        3: {"0": [7, "b"]},
        4: {"0": [7, "a"]},
    }
    assert find_absent(calls) == FlightFinding(
        culprits=(1, 3), words="ranks 1, 3 called b where others called a, as 7 of 0"
    )
    three = {rank: {"0": [7, name]} for rank, name in enumerate("abac")}
    assert find_absent(three) == FlightFinding(
        culprits=(1,), words="rank 1 called b where others called a, as 7 of 0"
    )
    groups = {0: {"1": [5, "x"], "0": [7, "a"]}, 1: {"1": [4, "x"], "0": [6, "a"]}}
    of_two = find_absent(groups)
    assert of_two is not None and "a 7 of group 0" in of_two.words, "the first group tells it"
    assert (
        flight_variables({"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": ""}, Path("/s")) == {}
    )
    both = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/s/flight-", "TORCH_FR_DUMP_TEMP_FILE": "/s/flight-"}
    assert flight_variables({"TORCH_FR_BUFFER_SIZE": "1"}, Path("/s")) == both


def test_a_hang_is_told_in_a_sentence_with_its_groups() -> None:
    wait = Frame(function="all_reduce", file="/x/torch/distributed/c10d.py", line=9)
    disk = Frame(function="write", file="/y/bloomery/durable.py", line=3)
    beats = {
        rank: RankBeat(rank=rank, step=7, host=f"n{rank // 3}", activity=RankActivity.REDUCING)
        for rank in range(7)
    }
    stacks = {
        rank: RankStack(rank=rank, frames=(disk if rank in (2, 6) else wait,), state="S") for rank in beats
    }
    assert find_hang(beats, stacks) == HangFinding(
        culprits=(2, 6),
        hosts=("n0", "n2"),
        summary="ranks 0–1, 3–5 wait in the gradient all-reduce for ranks 2, 6 on n0, n2, which stand in a "
        "write to the disk: write (durable.py:3)",
        evidence=(
            "ranks 0–1, 3–5 in the gradient all-reduce",
            "ranks 2, 6 in a write to the disk: write (durable.py:3)",
        ),
        sure=True,
    )
