"""What each fault of a drill does to which process, here and on another node."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.errors import TrainingFailed
from bloomery.events.heartbeat import RankBeat
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.drill import faults
from bloomery.operate.drill.allocation import DrillNodes, drill_nodes
from bloomery.operate.drill.faults import (
    EFFECTS,
    ORDINARY,
    DrillFault,
    DrillTarget,
    inject,
    strike,
    strike_on,
)

BEATS = [RankBeat(rank=rank, host=f"n{rank}", pid=100 + rank) for rank in range(4)]
ACROSS = DrillNodes(count=2, here="n0", is_allocation=True)


def test_the_ordinary_faults_leave_the_disk_alone_and_most_faults_end_the_attempt() -> None:
    assert set(DrillFault) - set(ORDINARY) == {DrillFault.FLIP, DrillFault.DISK, DrillFault.SHM}
    lived_through = {fault for fault in DrillFault if not fault.ends_attempt}
    assert lived_through == {DrillFault.SLOW, DrillFault.STORE, DrillFault.DISK}
    assert "for 6 s" in EFFECTS[DrillFault.SLOW] and "for 6 s" in EFFECTS[DrillFault.DISK]


@pytest.mark.parametrize(
    ("fault", "number"),
    [
        (DrillFault.KILL, signal.SIGKILL),
        (DrillFault.CRASH, signal.SIGSEGV),
        (DrillFault.HANG, signal.SIGSTOP),
        (DrillFault.FLIP, signal.SIGKILL),
        (DrillFault.SHM, signal.SIGBUS),
        (DrillFault.LAUNCHER, signal.SIGKILL),
    ],
)
def test_a_fault_is_a_signal(monkeypatch: pytest.MonkeyPatch, fault: DrillFault, number: int) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(faults.os, "kill", lambda *words: sent.append(words))
    strike(fault, 77)
    assert sent == [(77, number)]


def test_a_cut_is_of_all_connections_and_the_store_of_those_to_its_port(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cut: list[tuple[int, int]] = []
    monkeypatch.setattr(faults, "cut_connections", lambda pid, port=0: cut.append((pid, port)))
    read = Path.read_bytes
    shown = {"/proc/77/environ": b"A=b\0MASTER_PORT=2950\0NOTE=\xff=x\0"}
    monkeypatch.setattr(Path, "read_bytes", lambda path: shown.get(str(path)) or read(path))
    strike(DrillFault.CUT, 77)
    strike(DrillFault.STORE, 77)
    assert cut == [(77, 0), (77, 2950)]
    meeting = tmp_path / "a=b"
    meeting.touch()
    shown["/proc/77/environ"] += f"BLOOMERY_RENDEZVOUS_FILE={meeting}\0".encode()
    strike(DrillFault.STORE, 77)
    assert not meeting.exists()
    strike(DrillFault.STORE, 77)
    assert len(cut) == 2, "a file that is gone already is no failure, and no connection is cut"


def test_a_slow_rank_stands_still_for_three_quarters_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, done = [50.0], list[Any]()

    def sleep(seconds: float) -> None:
        now[0] += seconds
        done.append(round(seconds, 3))

    def run(target: Callable[..., None], args: tuple[int]) -> Any:
        return SimpleNamespace(start=lambda: target(*args))

    monkeypatch.setattr(faults, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(faults, "threading", SimpleNamespace(Thread=run))
    monkeypatch.setattr(faults.os, "kill", lambda *words: done.append(words))
    strike(DrillFault.SLOW, 77)
    assert done[:4] == [(77, signal.SIGSTOP), 0.15, (77, signal.SIGCONT), 0.05]
    assert done == done[:4] * (len(done) // 4) and now[0] == pytest.approx(56.0, abs=0.21)

    def gone(*words: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(faults.os, "kill", gone)
    strike(DrillFault.SLOW, 77)


def test_a_fault_on_another_node_is_a_step_of_the_job_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[list[str], dict[str, Any]]] = []
    status = [0]

    def run(command: list[str], **options: Any) -> Any:
        ran.append((command, options))
        return SimpleNamespace(returncode=status[0], stderr="x" * 300 + "E: no step" + "y" * 290 + "\n")

    monkeypatch.setattr(faults.subprocess, "run", run)
    strike_on("n3", DrillFault.KILL, 77, nodes=ACROSS)
    reach = ["srun", "--overlap", "--quiet", "--nodes=1", "--ntasks=1", "--nodelist=n3"]
    command = [*reach, sys.executable, "-m", "bloomery", "drill", "--strike", "kill", "77"]
    assert ran == [(command, {"capture_output": True, "text": True, "timeout": 120.0, "check": False})]
    status[0] = 1
    words = "The fault kill could not be injected on n3: E: no stepy{290}\n"
    with pytest.raises(TrainingFailed, match=words):
        strike_on("n3", DrillFault.KILL, 77, nodes=ACROSS)
    struck: list[Any] = []
    monkeypatch.setattr(faults, "strike", lambda fault, pid: struck.append((fault, pid)))
    strike_on("n0", DrillFault.KILL, 78, nodes=ACROSS)
    assert struck == [(DrillFault.KILL, 78)] and len(ran) == 2, "this node needs no step"


@pytest.mark.parametrize("nodes", [DrillNodes(), ACROSS])
def test_a_fault_strikes_one_rank_and_the_launcher_fault_the_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: DrillNodes
) -> None:
    rundir = RunDirectory(tmp_path).create()
    struck: list[tuple[Any, ...]] = []
    monkeypatch.setattr(faults, "strike", lambda fault, pid: struck.append(("launcher", fault, pid)))
    monkeypatch.setattr(
        faults, "strike_on", lambda host, fault, pid, *, nodes: struck.append((host, fault, pid, nodes))
    )
    flipped: list[RunDirectory] = []
    monkeypatch.setattr(faults, "flip_checkpoint_bit", lambda rundir, rng: flipped.append(rundir))
    filled: list[tuple[Path, float]] = []

    def fill(directory: Path, *, for_s: float) -> Callable[[], None]:
        filled.append((directory, for_s))
        return lambda: filled.append((directory, 0.0))

    monkeypatch.setattr(faults, "_fill", fill)
    for job, pid in (("old", 5), ("new", 6)):
        for host in ("n0", "n1", "n2", "n3"):
            card = rundir.path / "launchers" / job / f"{host}.json"
            card.parent.mkdir(parents=True, exist_ok=True)
            card.write_text(json.dumps({"pid": pid}))
            os.utime(card, (1000.0 + pid, 1000.0 + pid))
    target = DrillTarget(rundir=rundir, beats=BEATS, launcher=55, shm=tmp_path / "shm", nodes=nodes)
    victim = Random(3).choice(BEATS)
    for fault in DrillFault:
        inject(fault, target, Random(3))()
    launcher = (
        (victim.host, DrillFault.LAUNCHER, 6, nodes)
        if nodes.is_allocation
        else ("launcher", DrillFault.LAUNCHER, 55)
    )
    assert struck == [
        launcher if fault is DrillFault.LAUNCHER else (victim.host, fault, victim.pid, nodes)
        for fault in DrillFault
        if fault is not DrillFault.DISK
    ]
    assert filled == [(rundir.path, 6.0), (rundir.path, 0.0), (target.shm, 6.0), (target.shm, 0.0)]
    assert flipped == [rundir]


@pytest.mark.parametrize("is_taken_meanwhile", [False, True])
def test_a_full_disk_is_full_to_its_last_byte_until_it_is_given_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_taken_meanwhile: bool
) -> None:
    timers: list[tuple[float, Any]] = []

    class Timer(SimpleNamespace):
        def __init__(self, seconds: float, function: Callable[[], None]) -> None:
            timers.append((seconds, self))
            super().__init__(function=function, daemon=False, started=False)

        def start(self) -> None:
            assert self.daemon
            self.started = True

    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(faults.threading, "Timer", Timer)
    monkeypatch.setattr(faults.shutil, "disk_usage", lambda path: SimpleNamespace(free=8192, total=2**30))
    take = os.posix_fallocate

    def allocate(file: int, begin: int, size: int) -> None:
        asked.append((begin, size))
        if is_taken_meanwhile:
            raise OSError(28, "No space left on device")
        take(file, begin, size)

    monkeypatch.setattr(faults.os, "posix_fallocate", allocate)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # stands for the end of the disk
    try:
        undo = faults._fill(tmp_path, for_s=2.5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (balloon,) = tmp_path.iterdir()
    assert balloon.name.startswith(".") and balloon.stat().st_size == 20_000 and asked == [(0, 8192)]
    ((seconds, timer),) = timers
    assert (seconds, timer.started) == (2.5, True)
    undo()
    assert not list(tmp_path.iterdir())
    timer.function()  # it comes later than whoever gave the space back before


def test_a_node_of_a_job_is_told_from_a_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n0"}
    assert drill_nodes(job) == ACROSS and drill_nodes({}) == DrillNodes()
    assert drill_nodes(job | {"SLURM_STEP_NUM_TASKS": "1"}) == ACROSS
    for alone in ({"SLURM_JOB_NUM_NODES": "2"}, job | {"SLURM_JOB_NUM_NODES": ""}, {"SLURM_JOB_ID": "7"}):
        assert drill_nodes(alone) == DrillNodes()
    words = [sys.executable, "-m", "bloomery", "launch"]
    assert DrillNodes().launch() == words
    assert ACROSS.launch() == ["srun", "--ntasks-per-node=1", "--no-kill", *words]
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert drill_nodes() == ACROSS and drill_nodes({}) == DrillNodes()


def test_another_processs_descriptor_that_may_not_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        monkeypatch.setattr(faults, "_sockets", lambda pid: [0])
        libc = SimpleNamespace(syscall=lambda *words: -1)
        monkeypatch.setattr(faults.ctypes, "CDLL", lambda name, use_errno: libc)
        monkeypatch.setattr(faults.ctypes, "get_errno", lambda: 1)
        opened = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(PermissionError, match="descriptor 0 of another process: Operation not permitted"):
            faults.cut_connections(process.pid)
        assert len(list(Path("/proc/self/fd").iterdir())) == opened
        process.kill()
