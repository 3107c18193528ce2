"""What the runner of one machine's queue does with its jobs, and how their ends are known."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.operate.test_machine_records import queued

from bloomery.events.run_directory import RunDirectory
from bloomery.operate.schedulers import machine_queue
from bloomery.operate.schedulers.interface import JobState
from bloomery.operate.schedulers.machine import OneMachine
from bloomery.operate.schedulers.machine_queue import MachineJob, _write, queue_of, read_jobs


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


@pytest.mark.parametrize("ran_s", [0.0, 25.0])
def test_a_job_is_warned_asked_to_end_and_killed_by_the_time_that_it_ran(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, ran_s: float
) -> None:
    """Its limit is a minute; it ran for a while before this runner came to it."""
    clock, sent = [1000.0], list[tuple[float, str]]()
    step = SimpleNamespace(
        monotonic=lambda: clock[0], time=time.time, sleep=lambda s: clock.append(clock.pop() + 1.0)
    )
    monkeypatch.setattr(machine_queue, "time", step)
    monkeypatch.setattr(machine_queue, "process_age_s", lambda pid: ran_s)

    def noting(to_whom: str) -> Callable[[int, int], None]:
        return lambda pid, number: sent.append(
            (clock[0] - 1000.0 + ran_s, f"{signal.Signals(number).name}{to_whom}")
        )

    monkeypatch.setattr(os, "kill", noting(""))
    monkeypatch.setattr(os, "killpg", noting(" to all"))
    queue_of(run.path).mkdir()
    job = MachineJob(
        number=1, command=("x",), directory="/", minutes=1.0, signal_before_s=20, pid=7, started=time.time()
    )
    machine_queue._wait(run.path, job, is_over=lambda: clock[0] > 1200.0)
    assert sent == [(40.0, "SIGUSR1"), (60.0, "SIGTERM"), (90.0, "SIGKILL to all")]
    assert [kept.pid for kept in read_jobs(run.path)] == [7], "its record says which process it is"
    sent.clear()
    clock[0] = 1000.0
    (queue_of(run.path) / "000001.cancel").touch()
    machine_queue._wait(run.path, job, is_over=lambda: clock[0] > 1030.0)
    assert [name for _, name in sent if name != "SIGUSR1"] == ["SIGTERM", "SIGKILL to all"]
    assert sent[0][0] == ran_s


@pytest.mark.parametrize(
    ("command", "is_cancelled", "state", "status"),
    [
        (("true",), False, JobState.ENDED, 0),
        (("false",), False, JobState.FAILED, 1),
        (("false",), True, JobState.ENDED, 1),
        (("/no/such/command",), False, JobState.FAILED, 127),
    ],
)
def test_a_job_ends_as_its_command_did_unless_it_was_cancelled(
    run: RunDirectory, command: tuple[str, ...], is_cancelled: bool, state: JobState, status: int
) -> None:
    job = MachineJob(number=1, command=command, directory="/", minutes=1.0, signal_before_s=20)
    queue_of(run.path).mkdir()
    if is_cancelled:
        (queue_of(run.path) / "000001.cancel").touch()
    machine_queue._run(run.path, job)
    (kept,) = read_jobs(run.path)
    assert (kept.state, kept.status) == (state, status) and kept.ended >= kept.started > 0.0


def test_a_job_knows_its_number_and_its_end_and_writes_into_its_own_log(run: RunDirectory) -> None:
    command = ("sh", "-c", "echo $A $BLOOMERY_JOB $BLOOMERY_JOB_END; pwd")
    given = {"command": command, "directory": "/", "environment": {"A": "b"}}
    queue_of(run.path).mkdir()
    machine_queue._run(run.path, MachineJob(number=5, minutes=2.0, signal_before_s=20, **given))  # type: ignore[arg-type]
    (kept,) = read_jobs(run.path)
    log = (run.path / "logs" / "job-5.log").read_text()
    assert log == f"b 5 {kept.started + 120.0:.3f}\n/\n"


def test_a_cancelled_job_that_outlived_its_queue_has_a_runner_to_end_it_and_others_have_none(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, started = queued(run, monkeypatch), list[Path]()
    monkeypatch.setattr(machine_queue, "start_runner", started.append)
    orphan = {"pid": os.getpid(), "pid_life": machine_queue.process_identity(os.getpid())}
    _write(run.path, replace(jobs[0], state=JobState.RUNNING, started=1.0, **orphan))
    shown = OneMachine(run.path).jobs(name="x", run=run.path)[0]
    assert (shown.state, shown.reason) == ("running", "the process of the queue is gone, and the job runs on")
    machine_queue.ask_to_cancel(run.path, 3)
    assert started == [] and [job.state for job in read_jobs(run.path)] == ["running", "pending", "ended"]
    machine_queue.ask_to_cancel(run.path, 1)
    assert started == [run.path]


def test_a_job_has_a_process_group_of_its_own(run: RunDirectory) -> None:
    job = MachineJob(
        number=1,
        command=("cut", "-d", " ", "-f5", "/proc/self/stat"),
        directory="/",
        minutes=1.0,
        signal_before_s=20,
    )
    queue_of(run.path).mkdir()
    machine_queue._run(run.path, job)
    assert int((run.path / "logs" / "job-1.log").read_text()) != os.getpgrp()


def test_a_process_that_has_ended_does_not_run_though_nobody_waited_for_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        life, began = machine_queue.process_identity(process.pid), machine_queue.began_at(process.pid)
        assert machine_queue.is_running(process.pid, began=began, life=life)
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is left as it ended
        assert not machine_queue.is_running(process.pid, began=began, life=life)


def test_a_job_reads_nothing_and_writes_both_streams_into_its_log(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[tuple[str, ...], dict]] = []

    def refuse(command: tuple[str, ...], **options: object) -> None:
        assert options["stdout"] is options["stderr"]
        assert [kept.state for kept in read_jobs(run.path)] == ["running"], "no other runner starts it too"
        calls.append((command, options))
        raise FileNotFoundError("no such command")

    queue_of(run.path).mkdir()
    monkeypatch.setattr(machine_queue.subprocess, "Popen", refuse)
    job = MachineJob(number=1, command=("x",), directory="/home", minutes=1.0, signal_before_s=20)
    machine_queue._run(run.path, job)
    ((command, options),) = calls
    assert (command, options["cwd"], options["stdin"], options["process_group"]) == (
        ("x",),
        "/home",
        subprocess.DEVNULL,
        0,
    )
    assert options["stdout"].name == str(run.path / "logs" / "job-1.log")
    (kept,) = read_jobs(run.path)
    assert (kept.state, kept.status, kept.reason) == (JobState.FAILED, 127, "no such command")


def test_a_disk_that_is_full_for_a_while_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine_queue, "time", SimpleNamespace(sleep=lambda seconds: None))
    refusals = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE]

    def refused() -> str:
        if refusals:
            raise OSError(refusals.pop(0), "no")
        return "done"

    assert machine_queue._at_last(refused) == "done"
    assert caplog.text.count("the queue waits for the disk") == 1


def test_a_disk_without_room_for_a_cancelled_jobs_record_leaves_the_others_their_runner(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals, write = [errno.ENOSPC, errno.ENOSPC], machine_queue._write

    def refused(path: Path, job: MachineJob) -> None:
        if job.reason == "cancelled" and refusals:
            raise OSError(refusals.pop(), "full")
        write(path, job)

    monkeypatch.setattr(machine_queue, "_write", refused)
    monkeypatch.setattr(machine_queue, "_DISK_S", 0.001)
    for _ in range(2):
        job = MachineJob(number=0, command=("true",), directory="/", minutes=1.0, signal_before_s=20)
        machine_queue.add(run.path, job)
    (queue_of(run.path) / "000001.cancel").touch()
    machine_queue.run_queue(run.path)
    assert [(kept.state, kept.reason) for kept in read_jobs(run.path)] == [
        ("ended", "cancelled"),
        ("ended", ""),
    ]


def test_a_job_whose_end_nobody_saw_ends_at_its_limit_for_those_who_look(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, *_ = queued(run, monkeypatch)
    _write(run.path, replace(job, state=JobState.RUNNING, started=1000.0))
    first, *_ = OneMachine(run.path).jobs(name="x", run=run.path)
    assert (first.state, first.ends) == (JobState.FAILED, 1420.0)


@pytest.mark.parametrize(
    ("event", "after_s", "state"),
    [
        ({"event": "end"}, 0.0, JobState.ENDED),
        ({"event": "end"}, -0.5, JobState.FAILED),
        ({"event": "end", "failed": True}, 1.0, JobState.FAILED),
        ({"event": "start"}, 1.0, JobState.FAILED),
    ],
    ids=["ended at once", "ended before", "failed", "only began"],
)
def test_how_a_job_ended_that_nobody_saw_is_said_by_what_its_run_wrote_since_its_start(
    run: RunDirectory, event: dict[str, object], after_s: float, state: JobState
) -> None:
    record = {**event, "time": 1000.0 + after_s, "incarnation": 1, "step": 3}
    run.journal().parent.mkdir(exist_ok=True)
    run.journal().write_text(json.dumps(record) + "\n")
    assert machine_queue.outcome_without_status(run.path, started=1000.0)[0] == state


@pytest.mark.parametrize(("moved_s", "is_same"), [(0.0, True), (0.9, True), (1.1, False), (-1.1, False)])
def test_a_process_is_known_by_when_it_began_where_no_more_is_on_record(
    moved_s: float, is_same: bool
) -> None:
    began = machine_queue.began_at(os.getpid())
    assert machine_queue.is_running(os.getpid(), began=began + moved_s, life="") is is_same


def test_the_lock_of_a_queue_is_for_all_of_the_group(run: RunDirectory) -> None:
    queue_of(run.path).mkdir(exist_ok=True)
    before = os.umask(0o002)
    try:
        with machine_queue._hold(run.path) as is_ours:
            assert is_ours
    finally:
        os.umask(before)
    assert stat.S_IMODE((queue_of(run.path) / "runner.lock").stat().st_mode) == 0o664


def test_the_first_job_that_waits_may_start_at_once_where_none_runs(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued(run, monkeypatch)
    monkeypatch.setattr(machine_queue, "has_runner", lambda run: True)
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    shown = OneMachine(run.path).jobs(name="x", run=run.path)
    assert [job.expected_start for job in shown] == [5000.0, 5420.0, 5840.0]
    told = [(job.job, job.user, job.state_text, job.submitted) for job in shown]
    kept = [(str(job.number), job.user, "pending", job.submitted) for job in read_jobs(run.path)]
    assert told == kept and all(job.user and job.submitted for job in shown)


def test_a_job_has_the_variables_of_its_submission_and_its_own_number_and_end(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be submitted from within another job, and run by a runner that began elsewhere."""
    given: list[dict[str, str]] = []

    def refuse(command: tuple[str, ...], *, env: dict[str, str], **more: object) -> None:
        given.append(env)
        raise OSError("no such command")

    monkeypatch.setattr(machine_queue, "subprocess", SimpleNamespace(Popen=refuse, DEVNULL=-3))
    for name in ("OF_BOTH", "OF_THE_RUNNER", "BLOOMERY_JOB"):
        monkeypatch.setenv(name, "runner")
    queue_of(run.path).mkdir()
    environment = {"OF_BOTH": "job", "BLOOMERY_JOB": "4", "BLOOMERY_JOB_END": "7.000"}
    job = MachineJob(
        number=5, command=("x",), directory="/", minutes=2.0, signal_before_s=20, environment=environment
    )
    machine_queue._run(run.path, job)
    ((kept,), (env,)) = read_jobs(run.path), given
    assert (env["OF_BOTH"], env["OF_THE_RUNNER"], env["BLOOMERY_JOB"]) == ("job", "runner", "5")
    assert env["BLOOMERY_JOB_END"] == f"{kept.started + 120.0:.3f}"


def test_the_lock_of_a_queue_names_its_runner_alone_and_nobody_once_it_is_free(run: RunDirectory) -> None:
    lock = queue_of(run.path) / "runner.lock"
    lock.parent.mkdir()
    lock.write_text("9" * 20)
    with machine_queue._hold(run.path) as is_ours:
        assert is_ours and lock.read_text() == str(os.getpid())
    assert lock.read_text() == ""


def test_a_job_that_is_cancelled_while_another_runs_is_never_started(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, ran = queued(run, monkeypatch), list[int]()

    def cancel(number: int) -> None:
        (queue_of(run.path) / f"{number:06d}.cancel").touch()

    def ended(path: Path, job: MachineJob) -> None:
        ran.append(job.number)
        _write(path, replace(job, state=JobState.ENDED, started=1.0))
        cancel(3)

    monkeypatch.setattr(machine_queue, "_wait_for_orphans", lambda path: cancel(1))
    monkeypatch.setattr(machine_queue, "_run", ended)
    machine_queue.run_queue(run.path)
    assert ran == [2] and len(jobs) == 3
    assert [(job.state, job.reason) for job in read_jobs(run.path)] == [
        ("ended", "cancelled"),
        ("ended", ""),
        ("ended", "cancelled"),
    ]


def test_a_job_that_was_cancelled_and_outlived_its_runner_ended_as_it_was_asked_to(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = queued(run, monkeypatch)
    for job in (first, second):
        _write(run.path, replace(job, state=JobState.RUNNING, started=1.0, pid_life="gone"))
    (queue_of(run.path) / "000001.cancel").touch()
    machine_queue._wait_for_orphans(run.path)
    assert [job.state for job in read_jobs(run.path)] == ["ended", "failed", "pending"]
    assert read_jobs(run.path)[0].reason == "cancelled"


def test_each_of_several_jobs_is_cancelled(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    queued(run, monkeypatch)
    OneMachine(run.path).cancel(["1", "3"])
    assert [job.state for job in read_jobs(run.path)] == ["ended", "pending", "ended"]
