import errno
import json
import os
import queue
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.faults.commands import wait_for

from bloomery.errors import RunBusy, StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import (
    STALE_AFTER_S,
    _lives,
    host_name,
    lock_run,
    process_identity,
)


def held_by_a_child(rundir: RunDirectory) -> int:
    """Fork a process that holds the run until it is killed, and return its number once it does."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        lock_run(rundir)
        os.write(writer, b"x")
        signal.pause()
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def open_locks(rundir: RunDirectory) -> int:
    """How many files of this process are the lock of the run."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            count += path.readlink() == rundir.lock
    return count


def test_a_second_trainer_is_refused_while_the_first_lives_and_takes_over_when_it_is_dead(tmp_path: Path):
    rundir = RunDirectory(tmp_path / "run")
    pid = held_by_a_child(rundir)
    try:
        with pytest.raises(RunBusy) as refused:
            lock_run(rundir)
    finally:
        kill(pid)
    assert str(pid) in refused.value.message and os.uname().nodename in refused.value.message
    assert "control/stop" in refused.value.remedy
    with lock_run(rundir) as holder:
        assert holder.superseded is not None and holder.superseded["pid"] == pid


def test_a_run_is_free_after_its_holder_closed(tmp_path: Path):
    rundir = RunDirectory(tmp_path)
    with lock_run(rundir), pytest.raises(RunBusy):
        lock_run(rundir)
    with lock_run(rundir) as holder:
        assert holder.superseded is None


def test_a_forked_child_that_outlives_its_parent_does_not_hold_the_run(tmp_path: Path):
    rundir = RunDirectory(tmp_path)
    holder = lock_run(rundir)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b"x")
        signal.pause()
    assert os.read(reader, 1) == b"x"
    holder.close()
    try:
        lock_run(rundir).close()
    finally:
        kill(pid)


def test_a_holder_on_another_machine_lives_until_its_file_is_stale(tmp_path: Path):
    rundir = RunDirectory(tmp_path)
    rundir.holder.write_text(json.dumps({"host": "elsewhere", "pid": 1, "time": time.time(), "machine": "m"}))
    with pytest.raises(RunBusy, match="elsewhere") as refused:
        lock_run(rundir)
    assert "60 s" in refused.value.remedy
    past = time.time() - STALE_AFTER_S - 5
    os.utime(rundir.holder, (past, past))
    with lock_run(rundir) as holder:
        assert holder.superseded is not None and holder.superseded["host"] == "elsewhere"


def test_a_process_number_that_was_given_again_is_not_the_holder(tmp_path: Path):
    rundir = RunDirectory(tmp_path)
    with lock_run(rundir):
        record = json.loads(rundir.holder.read_text())
    rundir.holder.write_text(json.dumps({**record, "started": "1"}))
    lock_run(rundir).close()


def test_a_holder_that_was_taken_for_dead_is_told_and_leaves_its_successors_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A machine that was frozen goes on: it has lost the run, and must not free it for a third process."""
    monkeypatch.setattr("bloomery.events.run_lock._LOOK_S", 0.01)
    rundir = RunDirectory(tmp_path)
    told: queue.Queue[RunBusy] = queue.Queue()
    frozen = lock_run(rundir, on_lost=told.put)
    successor = {"host": "elsewhere", "pid": 1, "time": time.time(), "machine": "m"}
    draft = tmp_path / "draft"
    draft.write_text(json.dumps(successor))
    draft.replace(rundir.holder)
    assert "by process 1 on elsewhere" in told.get(timeout=60).message
    frozen.close()
    assert json.loads(rundir.holder.read_text()) == successor
    with pytest.raises(RunBusy, match="process 1 on elsewhere"):
        lock_run(rundir)


def test_where_files_cannot_be_locked_the_holder_file_alone_says_who_holds_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(file: int) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("bloomery.durable.try_lock", refuse)
    rundir = RunDirectory(tmp_path)
    with lock_run(rundir), pytest.raises(RunBusy, match=f"process {os.getpid()}"):
        lock_run(rundir)
    assert not rundir.holder.exists()
    lock_run(rundir).close()


def test_a_run_that_cannot_be_taken_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(file: int) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    rundir = RunDirectory(tmp_path)
    with lock_run(rundir):
        with pytest.raises(RunBusy):
            lock_run(rundir)
        assert open_locks(rundir) == 1
    assert open_locks(rundir) == 0
    monkeypatch.setattr("bloomery.durable.try_lock", refuse)
    with pytest.raises(StorageError, match=r"holder\.lock"):
        lock_run(rundir)
    assert open_locks(rundir) == 0


def test_a_holder_elsewhere_is_alive_until_the_minute_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rundir = RunDirectory(tmp_path)
    record = {"host": "elsewhere", "pid": 1, "time": 0.0, "machine": "m"}
    rundir.holder.write_text(json.dumps(record))
    now = time.time()
    monkeypatch.setattr("bloomery.events.run_lock.time.time", lambda: now + 7200)  # a clock that is wrong
    for age, lives in ((STALE_AFTER_S - 10.0, True), (STALE_AFTER_S + 1.0, False)):
        moment = now - age
        os.utime(rundir.holder, (moment, moment))
        assert _lives(record, rundir.holder, locked=False) is lives
    assert [path.name for path in tmp_path.iterdir()] == ["holder.json"], (
        "the look at the clock leaves nothing"
    )
    rundir.holder.unlink()
    assert not _lives(record, rundir.holder, locked=False), "it has ended since its file was read"


def test_a_living_holder_refreshes_its_file_so_that_no_other_machine_takes_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("bloomery.events.run_lock._LOOK_S", 0.01)
    monkeypatch.setattr("bloomery.events.run_lock._REFRESH_S", 0.0)
    rundir = RunDirectory(tmp_path)
    with lock_run(rundir):
        os.utime(rundir.holder, (1.0, 1.0))
        wait_for(lambda: rundir.holder.stat().st_mtime > 1.0)
    assert not rundir.holder.exists()


def test_a_process_of_this_machine_holds_a_run_while_it_runs_itself(monkeypatch: pytest.MonkeyPatch):
    machine, ticks = process_identity(os.getpid()).rsplit("/", 1)
    here = {"machine": machine, "pid": os.getpid(), "started": ticks}
    nowhere = Path("/nowhere/holder.json")  # the age of the file is no matter here

    def lives(record: dict[str, object], *, locked: bool) -> bool:
        return _lives(record, nowhere, locked=locked)

    assert lives(here, locked=False) and lives(here, locked=True)
    assert not lives({**here, "started": "1"}, locked=False)
    unknown = {**here, "started": ""}  # a system that does not tell: the lock decides
    assert not lives(unknown, locked=True)
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    assert not lives({**here, "pid": gone}, locked=False) and process_identity(gone) == ""
    assert process_identity(1) != process_identity(os.getpid())

    def anothers(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr("os.kill", anothers)
    assert lives({**here, "pid": gone}, locked=False), "of another user"


def test_who_restores_a_run_is_waited_for_and_who_trains_it_is_stopped(tmp_path: Path):
    rundir = RunDirectory(tmp_path)
    for doing, remedy in (("restored", "Wait until that one has ended"), ("trained", "Stop that one first")):
        with lock_run(rundir, doing=doing), pytest.raises(RunBusy) as busy:
            lock_run(rundir)
        assert f"is being {doing} by process {os.getpid()}" in busy.value.message
        assert busy.value.remedy.startswith(remedy) and "last sign of life" not in busy.value.remedy
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime())[:10]
    assert f"since {since}" in busy.value.message


def test_the_name_of_a_machine_is_the_launchers_or_the_systems(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BLOOMERY_HOST", "node-7")
    assert host_name() == "node-7"
    monkeypatch.setenv("BLOOMERY_HOST", "")
    assert host_name() == os.uname().nodename


def test_a_child_that_let_its_share_go_frees_nothing_of_its_parents(tmp_path: Path):
    rundir = RunDirectory(tmp_path)
    parent = lock_run(rundir)
    copy = os.dup(parent._lock.file)  # as the parent keeps it beside its child's
    record = rundir.holder.read_text()
    parent.let_go_in_child()
    parent.let_go_in_child()
    parent.close()
    assert rundir.holder.read_text() == record
    with pytest.raises(RunBusy):
        lock_run(rundir)
    os.close(copy)


def test_the_file_of_a_holder_is_removed_before_its_lock_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rundir, named = RunDirectory(tmp_path), list[bool]()
    holder = lock_run(rundir)
    close, file = os.close, holder._lock.file

    def closed(number: int) -> None:
        if number == file:
            named.append(rundir.holder.exists())
        close(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", closed)
        holder.close()
    assert named == [False], "who takes the run in between would lose its own file"
