"""What the holder of a run writes of itself, when it refreshes that, and what who comes second is told."""

from __future__ import annotations

import errno
import json
import os
import queue
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bloomery import durable
from bloomery.errors import RunBusy, StorageError
from bloomery.events import heartbeat, run_lock
from bloomery.events.heartbeat import (
    Heartbeat,
    RankActivity,
    RankBeat,
    interval_of,
    process_age_s,
    read_heartbeat,
    write_unsynced,
)
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import LockHolder, lock_run, process_identity


def test_a_holder_writes_who_it_is_and_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock.time, "time", lambda: 1234.56789)
    run = RunDirectory(tmp_path / "deep" / "run")
    with lock_run(run, doing="restored"):
        record = json.loads(run.holder.read_text())
        assert run.lock.exists() and run.lock.stat().st_size == 0
    machine, started = process_identity(os.getpid()).rsplit("/", 1)
    assert record == {
        "host": os.uname().nodename, "pid": os.getpid(), "time": 1234.568, "machine": machine,
        "started": started, "doing": "restored",
    }  # fmt: skip
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert machine == f"{os.uname().nodename}/{boot}/{Path('/proc/self/ns/pid').readlink()}"
    assert started == Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]


def test_no_thread_of_a_holder_or_a_heartbeat_keeps_its_process_alive(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with lock_run(RunDirectory(tmp_path)), Heartbeat(tmp_path / "0-0", interval_s=3600.0).start():
        new = set(threading.enumerate()) - before
        assert {(thread.name, thread.daemon) for thread in new} == {("holder", True), ("heartbeat", True)}
    assert not any(thread.is_alive() for thread in new)


def test_a_holder_that_closed_may_close_again_and_frees_nobody_else(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    first = lock_run(run)
    first.close()
    with lock_run(run):
        first.close()
        with pytest.raises(RunBusy):
            lock_run(run)
        assert run.holder.exists()


@pytest.mark.parametrize(
    ("record", "message", "remedy"),
    [
        (
            {},
            "is being trained by process ? on ? since an unknown time",
            "Stop that one first (touch RUN/control/stop, or Ctrl-C there), or use another --run. If it is "
            "dead, its hold ends 60 s after its last sign of life.",
        ),
        (
            {"pid": 7, "host": "node9", "doing": "restored", "machine": "elsewhere"},
            "is being restored by process 7 on node9 since an unknown time",
            "Wait until that one has ended, or end it with Ctrl-C there. If it is dead, its hold ends 60 s "
            "after its last sign of life.",
        ),
    ],
)
def test_who_comes_second_is_told_what_is_known_of_the_first(
    record: dict[str, Any], message: str, remedy: str, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    run.holder.write_text(json.dumps(record) if record else "torn {")
    file = os.open(run.lock, os.O_RDWR | os.O_CREAT)
    assert durable.try_lock(file)
    with pytest.raises(RunBusy) as busy:
        lock_run(run)
    os.close(file)
    assert busy.value.message == f"{tmp_path} {message}"
    assert busy.value.remedy == remedy.replace("RUN", str(tmp_path))


def test_the_time_of_a_hold_is_told_to_the_second(tmp_path: Path) -> None:
    since = time.mktime((2026, 1, 31, 12, 5, 7, 0, 0, -1))
    busy = run_lock._busy(RunDirectory(tmp_path), {"pid": 1, "host": "a", "time": since})
    assert busy.message.endswith("by process 1 on a since 2026-01-31 12:05:07")


@pytest.mark.parametrize(
    "number", [errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL]
)
def test_a_file_system_without_locks_still_lets_a_run_be_taken(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("bloomery.durable.try_lock", refuse)
    lock_run(RunDirectory(tmp_path)).close()


def test_a_directory_that_cannot_be_made_is_told_as_the_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"Taking the run failed at .*file/run/holder\.lock"):
        lock_run(RunDirectory(tmp_path / "file" / "run"))


def test_where_a_system_does_not_tell_when_processes_began_the_lock_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_lock, "_started", lambda pid: "")
    record = {"machine": run_lock._machine(), "pid": os.getpid(), "started": ""}
    assert run_lock._lives(record, Path("/nowhere"), locked=False)
    assert not run_lock._lives(record, Path("/nowhere"), locked=True)
    assert process_identity(os.getpid()) == ""


class Clock:
    """Ends the waits of a holder's thread at once, each with what happens meanwhile."""

    def __init__(self, holder: LockHolder, waits: list[tuple[float, Any]]) -> None:
        self.now, self.asked, self._waits = 0.0, list[float](), iter(waits)
        holder._closed = self  # type: ignore[assignment]

    def wait(self, seconds: float) -> bool:
        self.asked.append(seconds)
        passed, meanwhile = next(self._waits, (None, None))
        if passed is None:
            return True
        self.now += passed
        if meanwhile is not None:
            meanwhile()
        return False

    def is_set(self) -> bool:
        return False


def test_a_holder_looks_every_two_seconds_and_refreshes_its_file_every_ten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    told: queue.Queue[RunBusy] = queue.Queue()
    refreshed: list[float] = []
    with lock_run(run) as holder:
        closed, holder._on_lost = holder._closed, told.put
        own = run.holder.read_text()
        gone = [(2.0, run.holder.unlink), (6.0, lambda: run.holder.write_text(own))]
        taken = (2.0, lambda: run.holder.write_text(json.dumps({"pid": 3, "host": "b"})))
        clock = Clock(holder, [(2.0, None)] * 12 + gone + [(2.0, None), taken, (99.0, None)])
        with monkeypatch.context() as patch:
            patch.setattr(run_lock.time, "monotonic", lambda: clock.now)
            patch.setattr(run_lock.os, "utime", lambda path: refreshed.append(clock.now))
            holder._refresh()
        holder._closed = closed
        run.holder.write_text(own)
    assert set(clock.asked) == {2.0} and refreshed == [10.0, 20.0, 32.0]
    assert told.get_nowait().message.startswith(f"{tmp_path} is being trained by process 3 on b")
    assert told.empty() and len(clock.asked) == 16, "it looks no more once the run is another's"


def test_a_look_that_the_disk_refuses_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, refreshed = RunDirectory(tmp_path), list[float]()
    with lock_run(run) as holder:
        closed = holder._closed
        clock = Clock(holder, [(11.0, None)] * 3)

        def utime(path: Path) -> None:
            refreshed.append(clock.now)
            if len(refreshed) == 1:
                raise OSError(errno.ESTALE, "gone")

        with monkeypatch.context() as patch:
            patch.setattr(run_lock.time, "monotonic", lambda: clock.now)
            patch.setattr(run_lock.os, "utime", utime)
            holder._refresh()
        holder._closed = closed
    assert refreshed == [11.0, 22.0, 33.0]


def test_a_heartbeat_holds_every_field_and_leaves_out_what_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(heartbeat.ATTEMPT, raising=False)
    now = [50.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(heartbeat.time, "time", lambda: 1000.0 + now[0])
    monkeypatch.setattr(heartbeat, "shared_memory_space", lambda: (5, 9))
    beat = Heartbeat(tmp_path / "0-0", rank=2, world=300, device="cpu", stacks=tmp_path / "s")
    assert beat.interval_s == 3.0 and Heartbeat(tmp_path / "x", interval_s=9.0).interval_s == 9.0
    beat.write()
    assert json.loads((tmp_path / "0-0").read_text()) == {
        "rank": 2, "world": 300, "step": 0, "since": 1050.0, "time": 1050.0, "moves": 0, "may_compile": True,
        "longest_s": {}, "first_s": {}, "gap_s": 0.0, "incarnation": 0, "host": os.uname().nodename,
        "device": "cpu", "pid": os.getpid(), "stacks": str(tmp_path / "s"), "memory_bytes": 0.0,
        "shm_free_bytes": 5, "shm_bytes": 9,
    }  # fmt: skip
    beat.enter(RankActivity.LOADING)
    now[0] += 2.34567
    beat.at(step=5, incarnation=3, memory_bytes=7.0)
    beat.tick()
    assert beat.record() == RankBeat(
        rank=2, world=300, step=5, activity="loading a checkpoint", since=1050.0, time=1052.346, moves=2,
        may_compile=True, gap_s=0.0, incarnation=3, host=os.uname().nodename, device="cpu", pid=os.getpid(),
        stacks=str(tmp_path / "s"), memory_bytes=7.0, shm_free_bytes=5, shm_bytes=9,
    )  # fmt: skip
    assert [interval_of(world) for world in (1, 100, 101, 1000)] == [1.0, 1.0, 1.01, 10.0]


def test_the_words_of_activities_are_those_that_watchers_show() -> None:
    assert [str(activity) for activity in RankActivity] == [
        "preparing the data", "building the model", "loading a checkpoint", "waiting for samples",
        "forward and backward", "reducing gradients", "updating the weights", "reducing the report",
        "evaluating", "between steps", "waiting for peers", "saving a checkpoint", "ending", "ended",
    ]  # fmt: skip


def test_small_files_that_cannot_be_written_or_read_are_told_or_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Writing failed at"):
        write_unsynced(tmp_path / "file" / "x", "text")
    (tmp_path / "list").write_text("[1]")
    assert read_heartbeat(tmp_path / "list") is None and read_heartbeat(tmp_path / "none") is None
    assert 0.0 < process_age_s() < time.clock_gettime(time.CLOCK_BOOTTIME)
    assert process_age_s(2**22 + 1) == 0.0
    assert process_age_s(1) > process_age_s(), "of the first process of all"


def test_on_a_full_disk_what_makes_room_runs_under_the_lock_alone_and_training_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDirectory(tmp_path / "run").create()

    def full(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def lockless(rundir: RunDirectory) -> object:
        return replace(locked(rundir), held=False)

    locked = run_lock._locked
    monkeypatch.setattr(durable, "write_whole_unsynced", full)
    with pytest.raises(StorageError, match="No space left on device"):
        lock_run(rundir)
    with lock_run(rundir, doing="pruned"):
        assert not rundir.holder.exists()
        with pytest.raises(RunBusy):
            lock_run(rundir, doing="pruned")
    with monkeypatch.context() as patch:
        patch.setattr(run_lock, "_locked", lockless)
        with pytest.raises(StorageError, match="No space left on device"):
            lock_run(rundir, doing="pruned")
    monkeypatch.setattr(durable, "write_whole_unsynced", lambda path, content: path.write_text(content))
    lock_run(rundir).close()


def test_an_end_on_a_disk_that_has_become_read_only_frees_the_run_and_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    rundir = RunDirectory(tmp_path / "run").create()
    told = pytest.raises(StorageError, match="saving")
    with monkeypatch.context() as patch, told, lock_run(rundir) as holder:
        patch.setattr(Path, "unlink", refuse)
        raise StorageError("saving failed")
    assert rundir.holder.exists() and "cannot be removed: Read-only file system" in caplog.text
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(holder._lock.file)


def test_where_the_age_of_another_machines_hold_cannot_be_learned_the_disks_error_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *given: object, **more: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))

    rundir = RunDirectory(tmp_path / "run").create()
    rundir.holder.write_text(json.dumps({"host": "elsewhere", "machine": "another", "pid": 3}))
    monkeypatch.setattr(Path, "touch", full)
    with pytest.raises(StorageError, match=r"Taking the run failed at .*holder\.json: Disk quota exceeded"):
        lock_run(rundir, doing="pruned")
