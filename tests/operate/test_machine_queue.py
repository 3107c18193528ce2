"""The queue of one machine: real processes, one after another, with limits, ends and a killed queue."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from tests.faults.commands import bloomery, wait_for
from tests.machine import may_mount, mounted

from bloomery import durable
from bloomery.config.submit import SubmitSection
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.schedulers import machine_queue
from bloomery.operate.schedulers.interface import JobRequest, JobState, QueuedJob
from bloomery.operate.schedulers.machine import OneMachine
from bloomery.operate.schedulers.machine_queue import MachineJob, has_runner, queue_of


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def submit(rundir: RunDirectory, shell: str, *, tasks: int = 1, **section) -> list[str]:
    request = JobRequest(
        name="x",
        run=rundir.path,
        directory=rundir.path,
        command=("bash", "-c", shell),
        nodes=1,
        section=SubmitSection(**section),
        tasks=tasks,
    )
    return OneMachine(rundir.path).submit(request)


def jobs(rundir: RunDirectory) -> list[QueuedJob]:
    return OneMachine(rundir.path).jobs(name="x", run=rundir.path)


def test_jobs_run_one_after_another_and_end_with_their_own_status(rundir: RunDirectory) -> None:
    alone = (
        "mkdir alone || exit 9; echo $BLOOMERY_JOB >> order; sleep 0.1; rmdir alone; [ $BLOOMERY_JOB != 2 ]"
    )
    assert submit(rundir, alone, tasks=3) == ["1", "2", "3"]
    wait_for(lambda: all(job.state.is_over for job in jobs(rundir)))
    assert (rundir.path / "order").read_text().split() == ["1", "2", "3"]
    assert [job.state for job in jobs(rundir)] == [JobState.ENDED, JobState.FAILED, JobState.ENDED]
    assert jobs(rundir)[1].reason == "exit status 1"
    wait_for(lambda: not has_runner(rundir.path))


def test_a_job_is_signalled_before_its_limit_and_ended_at_it(rundir: RunDirectory) -> None:
    heard = "lambda n, _: (open('heard', 'a').write(f'{n} '), n == 15 and os._exit(5))"
    program = f"import os, signal; [signal.signal(n, {heard}) for n in (10, 15)]\nwhile True: signal.pause()"
    submit(rundir, shlex.join(["exec", sys.executable, "-c", program]), minutes=2 / 60, signal_before_s=1)
    wait_for(lambda: jobs(rundir)[0].state == JobState.FAILED)
    assert (rundir.path / "heard").read_text() == "10 15 "
    assert jobs(rundir)[0].reason == "exit status 5"


def test_waiting_jobs_say_when_they_start_at_the_latest_and_are_cancelled(rundir: RunDirectory) -> None:
    submit(rundir, "touch here; sleep 60", tasks=3, minutes=10.0)
    wait_for((rundir.path / "here").exists)
    first, second, third = jobs(rundir)
    assert first.state == JobState.RUNNING and second.expected_start == first.ends
    assert third.expected_start == pytest.approx(second.expected_start + 600.0)
    OneMachine(rundir.path).cancel(["2", "3", "1"])
    wait_for(lambda: [job.state for job in jobs(rundir)] == [JobState.ENDED] * 3)
    assert first.started is not None and jobs(rundir)[1].started is None


def kill_queue(rundir: RunDirectory) -> None:
    """Kill the queue's process once it has recorded its first job's."""
    wait_for(lambda: machine_queue.read_jobs(rundir.path)[0].pid)
    os.kill(int((queue_of(rundir.path) / "runner.lock").read_text()), signal.SIGKILL)
    wait_for(lambda: not has_runner(rundir.path))


def states(rundir: RunDirectory) -> list[JobState]:
    return [job.state for job in jobs(rundir)]


def test_a_job_that_outlives_its_killed_queue_runs_on_and_the_next_queue_waits_for_it(
    rundir: RunDirectory,
) -> None:
    submit(rundir, "echo $BLOOMERY_JOB >> order; while [ ! -e go ]; do sleep 0.05; done", tasks=2)
    wait_for((rundir.path / "order").exists)
    kill_queue(rundir)
    assert states(rundir) == [JobState.RUNNING, JobState.HELD], "it trains, whoever started it"
    submit(rundir, "true")
    wait_for(lambda: has_runner(rundir.path))
    assert states(rundir) == [JobState.RUNNING, JobState.PENDING, JobState.PENDING]
    with Journal(rundir.journal()) as journal:
        journal.write("start", incarnation=1, step=0, reason="start", ranks=1)
        journal.write("end", incarnation=1, step=3, reason="the samples are done", finished=True)
    (rundir.path / "go").touch()
    wait_for(lambda: all(job.state.is_over for job in jobs(rundir)))
    assert states(rundir) == [JobState.ENDED] * 3 and "journal says" in jobs(rundir)[0].reason
    assert (rundir.path / "order").read_text().split() == ["1", "2"]


def test_a_job_that_ended_without_its_queue_has_failed_unless_the_journal_says_otherwise(
    rundir: RunDirectory,
) -> None:
    submit(rundir, "touch here; sleep 60")
    wait_for((rundir.path / "here").exists)
    kill_queue(rundir)
    (record,) = machine_queue.read_jobs(rundir.path)
    os.killpg(record.pid, signal.SIGKILL)
    wait_for(lambda: states(rundir) == [JobState.FAILED])
    assert "no good end" in jobs(rundir)[0].reason


def test_only_an_end_without_a_failure_since_the_job_began_says_that_it_ended_well(
    rundir: RunDirectory,
) -> None:
    def outcome(*events: tuple[str, float, bool]) -> JobState:
        lines = [json.dumps({"event": name, "time": at, "failed": bad}) for name, at, bad in events]
        rundir.journal().write_text("".join(f"{line}\n" for line in lines))
        return machine_queue.outcome_without_status(rundir.path, started=100.0)[0]

    assert outcome(("end", 99.0, False)) == JobState.FAILED, "that was another job"
    assert outcome(("end", 99.0, False), ("start", 101.0, False)) == JobState.FAILED
    assert outcome(("start", 101.0, False), ("end", 102.0, False), ("note", 103.0, False)) == JobState.ENDED
    assert outcome(("start", 101.0, False), ("end", 102.0, True)) == JobState.FAILED
    assert outcome(("end", 102.0, False), ("start", 103.0, False)) == JobState.FAILED
    rundir.journal().unlink()
    assert machine_queue.outcome_without_status(rundir.path, started=0.0)[0] == JobState.FAILED


@pytest.mark.parametrize("by_s", [-7200.0, 7200.0])
def test_a_clock_that_is_set_neither_loses_a_job_nor_moves_its_limit(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    """The job's queue was killed, and the next one, in this process, waits for it after the clock was set."""
    submit(rundir, "touch here; exec sleep 60", minutes=2.5 / 60, signal_before_s=0)
    wait_for((rundir.path / "here").exists)
    kill_queue(rundir)
    began = time.monotonic()
    clock, boot_time = time.time, psutil._pslinux.boot_time
    monkeypatch.setattr(time, "time", lambda: clock() + by_s)
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_time() + by_s)  # it follows the clock
    (record,) = machine_queue.read_jobs(rundir.path)
    assert record.is_orphan, "it runs"
    machine_queue.run_queue(rundir.path)
    assert 0.5 < time.monotonic() - began < 10.0, "it was ended at its limit"
    assert states(rundir) == [JobState.FAILED]


def test_the_queue_of_an_earlier_version_knows_its_job_by_when_it_began() -> None:
    began = machine_queue.began_at(os.getpid())
    for shifted_s, is_same in ((0.0, True), (5.0, False)):
        assert machine_queue.is_running(os.getpid(), began=began + shifted_s, life="") == is_same
    assert not machine_queue.is_running(os.getpid(), began=began, life="another")


@pytest.mark.needs(may_mount, rights="root, to mount a file system")
def test_a_full_disk_ends_no_queue_and_loses_no_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_queue, "_DISK_S", 0.05)
    with mounted(tmp_path / "disk", "size=200k") as disk:
        run = RunDirectory(disk / "run").create()
        shell = f"cat /dev/zero > {disk}/filler; touch {tmp_path}/full; exit 3"
        job = MachineJob(
            number=0, command=("sh", "-c", shell), directory="/", minutes=9.0, signal_before_s=60
        )
        machine_queue.add(run.path, job)
        queue = threading.Thread(target=machine_queue.run_queue, args=(run.path,), daemon=True)
        queue.start()
        wait_for((tmp_path / "full").exists)
        time.sleep(0.5)  # it meets the full disk when the job ends
        assert queue.is_alive()
        (disk / "filler").unlink()
        wait_for(lambda: not queue.is_alive())
        assert states(run) == [JobState.FAILED] and jobs(run)[0].reason == "exit status 3"


def test_a_job_that_outlives_its_queue_can_be_cancelled(rundir: RunDirectory) -> None:
    submit(rundir, "touch here; sleep 60")
    wait_for((rundir.path / "here").exists)
    kill_queue(rundir)
    OneMachine(rundir.path).cancel(["1"])
    wait_for(lambda: states(rundir) == [JobState.ENDED])
    assert jobs(rundir)[0].reason == "cancelled"


def test_the_commands_queue_show_and_cancel(tmp_path: Path) -> None:
    run = tmp_path / "run"
    machine = ("submit.scheduler=machine", "submit.tasks=2", "submit.setup=['exit 7']")
    said = bloomery("submit", "demo", *machine, "--run", run)
    assert said.status == 0 and "submitted 1, 2 to machine" in said.out, said
    wait_for(lambda: all(job.state.is_over for job in jobs(RunDirectory(run))))
    shown = bloomery("status", run)
    assert shown.status == 1 and "demo: failed" in shown.out, shown
    table = bloomery("status", "--under", tmp_path)
    assert table.status == 1 and "demo" in table.out and max(map(len, table.out.splitlines())) <= 100
    assert "no job of" in bloomery("cancel", run).out


def test_a_look_at_the_lock_keeps_no_job_from_its_start(rundir: RunDirectory) -> None:
    queue_of(rundir.path).mkdir()
    job = MachineJob(number=0, command=("true",), directory=str(rundir.path), minutes=9.0, signal_before_s=60)
    machine_queue.add(rundir.path, job)
    looks = os.open(queue_of(rundir.path) / "runner.lock", os.O_RDWR | os.O_CREAT)
    assert durable.try_lock(looks)
    threading.Timer(0.1, os.close, (looks,)).start()
    machine_queue.run_queue(rundir.path)
    assert jobs(rundir)[0].state == JobState.ENDED


def test_a_job_that_ignores_the_end_of_its_time_is_killed_with_all_that_it_started(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_queue, "KILL_WAIT_S", 0.1)
    queue_of(rundir.path).mkdir()
    shell = "trap '' TERM USR1; sleep 120 & echo $! > child; mv child here; wait"
    leader = subprocess.Popen(["bash", "-c", shell], cwd=rundir.path, process_group=0)
    wait_for((rundir.path / "here").exists)
    child = psutil.Process(int((rundir.path / "here").read_text()))
    job = MachineJob(
        number=1,
        command=(),
        directory="",
        minutes=0.005,
        signal_before_s=0.0,
        started=time.time(),
        pid=leader.pid,
    )
    machine_queue._wait(rundir.path, job, is_over=lambda: leader.poll() is not None)
    try:
        child.wait(30.0)
    except psutil.TimeoutExpired:
        child.kill()
        raise
    assert leader.returncode == -signal.SIGKILL
