"""What the records of one machine's queue say, and what a run directory is shared with, without a process."""

from __future__ import annotations

import errno
import grp
import os
import stat
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bloomery.config.submit import SubmitSection
from bloomery.errors import BloomeryError
from bloomery.events.run_directory import RunDirectory
from bloomery.operate import group_access
from bloomery.operate.group_access import share_with_group
from bloomery.operate.schedulers import machine, machine_queue
from bloomery.operate.schedulers.interface import JobRequest, JobState, SchedulerError
from bloomery.operate.schedulers.machine import OneMachine
from bloomery.operate.schedulers.machine_queue import MachineJob, _write, add, queue_of, read_jobs


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def queued(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> list[MachineJob]:
    """Return three jobs that were submitted, of which none has started."""
    monkeypatch.setattr(machine_queue, "start_runner", lambda run: None)
    section = SubmitSection(minutes=7.0, signal_before_s=44)
    request = JobRequest(
        name="x",
        run=run.path,
        directory=Path("/home/ann"),
        command=("true",),
        nodes=1,
        section=section,
        tasks=3,
    )
    assert OneMachine(run.path).submit(request) == ["1", "2", "3"]
    return read_jobs(run.path)


def test_jobs_are_kept_with_the_limits_of_their_recipe(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = queued(run, monkeypatch)
    assert [(job.number, job.minutes, job.signal_before_s, job.directory, job.state) for job in jobs] == [
        (number, 7.0, 44, "/home/ann", "pending") for number in (1, 2, 3)
    ]
    assert replace(jobs[0], started=1000.0).ends == 1420.0
    assert all(abs(job.submitted - time.time()) < 60.0 for job in jobs)


def test_a_file_system_without_locks_keeps_no_queue_and_says_so(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued(run, monkeypatch)
    number = errno.ENOSYS

    def refuse(file: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(SchedulerError, match="has no locks, so no queue can be kept there"):
        queued(run, monkeypatch)
    assert len(read_jobs(run.path)) == 3
    assert [job.state for job in OneMachine(run.path).jobs(name="x", run=run.path)] == [JobState.HELD] * 3
    number = errno.EIO
    with pytest.raises(BloomeryError, match="Queueing a job failed"):
        queued(run, monkeypatch)
    with pytest.raises(OSError, match="Input/output error"):
        machine_queue.has_runner(run.path)


def test_a_number_that_is_taken_meanwhile_is_left_to_who_took_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = queued(run, monkeypatch)
    monkeypatch.setattr(machine_queue, "read_jobs", lambda run: [first])
    assert add(run.path, replace(first, user="ben")) == 4
    assert [job.user for job in read_jobs(run.path)].count("ben") == 1


def test_a_job_starts_at_the_latest_when_those_before_it_end(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = queued(run, monkeypatch)
    monkeypatch.setattr(machine_queue, "has_runner", lambda run: True)
    monkeypatch.setattr(machine, "host_name", lambda: "n1")
    began = time.time() - 60.0
    _write(run.path, replace(jobs[0], state=JobState.RUNNING, started=began))
    shown = OneMachine(run.path).jobs(name="x", run=run.path)
    assert [job.state for job in shown] == [JobState.RUNNING, JobState.PENDING, JobState.PENDING]
    assert [job.expected_start for job in shown] == [None, began + 420.0, began + 840.0]
    assert (shown[0].ends, shown[0].started, shown[1].ends) == (began + 420.0, began, None)
    assert (shown[0].nodes, shown[1].nodes) == (("n1",), ())


@pytest.mark.parametrize(
    ("state", "status", "reason", "shown"),
    [
        (JobState.FAILED, 5, "", "exit status 5"),
        (JobState.FAILED, 127, "no such file", "no such file"),
        (JobState.ENDED, 0, "", ""),
    ],
)
def test_a_job_that_is_over_says_how_and_when(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, state: JobState, status: int, reason: str, shown: str
) -> None:
    job, *_ = queued(run, monkeypatch)
    _write(run.path, replace(job, state=state, status=status, reason=reason, started=100.0, ended=130.0))
    first, second, _ = OneMachine(run.path).jobs(name="x", run=run.path)
    assert (first.state, first.reason, first.ends, first.started) == (state, shown, 130.0, 100.0)
    assert second.state == JobState.HELD and "any `bloomery submit`" in second.reason, "nobody runs the queue"


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_record_that_cannot_be_read_hides_no_other(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    queued(run, monkeypatch)
    (queue_of(run.path) / "000002.json").write_text(content)
    assert [job.number for job in read_jobs(run.path)] == [1, 3]


def test_a_disk_that_may_have_room_later_is_waited_for_and_another_error_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(machine_queue, "time", SimpleNamespace(sleep=waits.append))
    refusals = [errno.ENOSPC, errno.EIO, errno.EACCES]

    def refused() -> str:
        if refusals:
            raise OSError(refusals.pop(0), "no")
        return "done"

    with pytest.raises(PermissionError):
        machine_queue._at_last(refused)
    assert waits == [1.0, 1.0] and machine_queue._at_last(refused) == "done"


def test_who_may_only_read_the_queue_of_another_user_sees_that_it_has_a_runner(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lock = os.open, queue_of(run.path) / "runner.lock"

    def of_another(path: Path, flags: int, *more: int) -> int:
        if path == lock and flags & os.O_ACCMODE != os.O_RDONLY:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *more)

    queue_of(run.path).mkdir()
    with machine_queue._hold(run.path):
        monkeypatch.setattr(os, "access", lambda path, how: False)
        monkeypatch.setattr(os, "open", of_another)
        assert machine_queue.has_runner(run.path)
    assert not machine_queue.has_runner(run.path)


@pytest.mark.needs(lambda: os.geteuid() == 0, rights="root, to give files to a group")
def test_a_run_is_given_to_the_group_and_what_leads_out_of_it_is_not(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grp, "getgrnam", lambda name: SimpleNamespace(gr_gid={"llm": 61_234}[name]))
    outside = tmp_path / "outside"
    outside.write_text("x")
    (run.path / "link").symlink_to(outside)
    (run.control_dir / "deep").mkdir()
    (run.control_dir / "deep" / "file").touch(mode=0o600)
    os.chown(run.control_dir / "deep" / "file", 61_235, -1)
    assert share_with_group(run.path, group="llm").repaired >= 3
    for path, mode in (
        (run.path, 0o2070),
        (run.control_dir / "deep", 0o2070),
        (run.control_dir / "deep/file", 0o060),
    ):
        facts = path.stat()
        assert (facts.st_gid, stat.S_IMODE(facts.st_mode) & mode) == (61_234, mode)
    assert (run.control_dir / "deep" / "file").stat().st_uid == 61_235, "it is its owner's as before"
    assert outside.stat().st_gid != 61_234 and not outside.stat().st_mode & stat.S_IWGRP
    assert share_with_group(run.path, group="llm").repaired == 0
    os.chown(run.control_dir / "deep" / "file", -1, 61_235)  # its mode stays as it was made
    assert share_with_group(run.path, group="llm").repaired == 1
    assert (run.control_dir / "deep" / "file").stat().st_gid == 61_234
    with pytest.raises(BloomeryError, match="no group") as refused:
        share_with_group(run.path, group="none")
    assert "`id -Gn` in submit.group" in refused.value.remedy


def test_a_run_that_is_named_by_a_link_is_shared_with_its_own_directory(run: RunDirectory) -> None:
    run.path.chmod(0o700)
    link = run.path.with_name("link")
    link.symlink_to(run.path)
    share_with_group(link)
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o2770


def test_a_file_that_goes_away_meanwhile_is_passed_over(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repair(path: Path, group: int) -> bool:
        if path == run.control_dir:
            raise FileNotFoundError
        return path == run.checkpoints

    monkeypatch.setattr(group_access, "_repair", repair)
    found = share_with_group(run.path)
    assert (found.repaired, found.refused) == (1, {})


def test_what_belongs_to_others_is_told_by_its_owner_whose_name_may_be_unknown(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = run.path / "gone"
    mine, theirs = run.path / "mine", run.path / "theirs"
    for path in (mine, theirs):
        path.touch()

    def name_of(number: int) -> SimpleNamespace:
        return SimpleNamespace(pw_name="ann")

    def unknown(number: int) -> SimpleNamespace:
        raise KeyError(number)

    def repair(path: Path, group: int) -> bool:
        monkeypatch.setattr(group_access.pwd, "getpwuid", unknown if path == theirs else name_of)
        raise PermissionError

    monkeypatch.setattr(group_access, "_everything", lambda path: iter([mine, gone, theirs, mine]))
    monkeypatch.setattr(group_access, "_repair", repair)
    refused = share_with_group(run.path).refused
    assert refused == {"ann": (mine, mine), "nobody": (gone,), str(theirs.stat().st_uid): (theirs,)}


def test_a_run_that_is_shared_keeps_the_group_of_its_directory_where_none_is_named(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[Path, int]] = []
    monkeypatch.setattr(group_access, "_repair", lambda path, group: given.append((path, group)) or False)
    assert share_with_group(run.path).repaired == 0
    assert {group for _, group in given} == {run.path.stat().st_gid} and given[0][0] == run.path
    assert len(given) == 1 + len(list(run.path.rglob("*")))
