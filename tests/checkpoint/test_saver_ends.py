"""What saves beside the training leave when they fail, or when the run ends over them."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.checkpoint.small_run import Ranks, Run
from tests.checkpoint.test_background import BACKGROUND, DEADLINE_S, begun, is_alive, wait_for, writer_of
from tests.checkpoint.test_partner import LIMITS, TOKEN

from bloomery.checkpoint.format.commit import Part
from bloomery.checkpoint.save import background as background_module
from bloomery.checkpoint.save.background import BUFFERS, BackgroundSaver
from bloomery.checkpoint.save.verification import OwnFilesCheck
from bloomery.checkpoint.writer.client import WriterProcess
from bloomery.checkpoint.writer.memory_replica import (
    MemoryReplica,
    MemoryReplicas,
    label_of,
    read_replica,
    write_label,
)
from bloomery.checkpoint.writer.partner import ReplicaSettings
from bloomery.checkpoint.writer.shared_buffer import mapped_bytes
from bloomery.errors import StorageError
from bloomery.events.incarnation import identity
from bloomery.events.run_directory import RunDirectory
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def background_of(store: Store) -> BackgroundSaver:
    background = store._saver.background
    assert isinstance(background, BackgroundSaver) and background.unavailable_reason() is None
    return background


def test_a_saver_that_is_closed_while_it_still_takes_its_memory_gives_all_of_it_back(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(background_module, "WRITER_END_S", 0.0)
    started, go_on = threading.Event(), threading.Event()
    start = WriterProcess.start

    def slow(self: WriterProcess) -> None:
        start(self)
        started.set()
        assert go_on.wait(DEADLINE_S)

    monkeypatch.setattr(WriterProcess, "start", slow)
    before = open_files()
    saver = BackgroundSaver(
        bytes=4096, throttled=False, device=torch.device("cpu"), committed=lambda saving: None
    )
    assert started.wait(DEADLINE_S) and saver.writer_pid is not None
    saver.close()
    go_on.set()
    saver._creating.join(DEADLINE_S)
    assert not is_alive(saver.writer_pid) and open_files() <= before


def test_a_save_that_is_not_over_when_the_run_ends_is_not_committed_and_not_waited_for(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    """Copying would pause for hours, and the writer that is stopped goes on once somebody waits for it."""
    monkeypatch.setattr(background_module, "ABORT_S", 3600.0)
    monkeypatch.setattr(background_module, "WRITER_END_S", 60.0)
    with begun(rundir, Run()) as store:
        pid, background = writer_of(store), background_of(store)
        background._step_times_s.append(1e7)
        os.kill(pid, signal.SIGSTOP)
        assert store.begin_save(RunStateToSave(Run().fill(1).parts, step=1))
        (saving,) = store._saver._pending
        waits = saving.over.wait

        def wait(timeout: float | None = None) -> bool:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            return waits(timeout)

        monkeypatch.setattr(saving.over, "wait", wait)
        background.close()
        store._saver._background = None  # it is closed
        assert saving.over.is_set() and saving.failure is not None and not is_alive(pid)
    assert list(rundir.checkpoints.iterdir()) == []


@pytest.mark.parametrize("waits", [False, True])
def test_what_comes_late_for_a_save_that_failed_goes_at_the_next_and_nothing_of_it_is_read_back(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, waits: bool
):
    checked: list[str] = []
    monkeypatch.setattr(OwnFilesCheck, "run", lambda self, saving, **more: checked.append(saving.name))
    with begun(rundir, Run()) as store:
        pid = writer_of(store)
        os.kill(pid, signal.SIGSTOP)
        assert store.begin_save(RunStateToSave(Run().fill(1).parts, step=1))
        store.wait_staged()
        (partial,) = rundir.checkpoints.iterdir()
        partial.rmdir()
        os.kill(pid, signal.SIGCONT)
        (saving,) = store._saver._pending
        assert saving.over.wait(DEADLINE_S) and saving.failure is not None
        partial.mkdir()
        (partial / "model-r00001-of-00002-000.safetensors").write_text("another rank had it on its way")
        if waits:
            assert store.wait_for_saves() == -1 and not partial.exists()
        assert store.begin_save(RunStateToSave(Run().fill(2).parts, step=2))
        assert not partial.exists()
        store.wait_staged()
        assert store.wait_for_saves() == 2
        wait_for(lambda: checked)
    assert checked == ["step-000002.i001"]


def test_no_replica_is_believed_in_while_the_next_state_is_copied_over_it(
    rundir: RunDirectory, tmp_path: Path
):
    section = replace(BACKGROUND, partner_copies=True, memory_directory=str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()
    run = Run()
    with begun(rundir, run, section) as store:
        replicas = MemoryReplicas(tmp_path / "memory", rundir.path, identity(rundir))

        def kept() -> list[int]:
            return sorted(one.step for one in replicas.complete())

        for step in (1, 2):
            store.save(RunStateToSave(run.fill(step).parts, step=step))
        assert kept() == [1, 2]
        pid = writer_of(store)
        os.kill(pid, signal.SIGSTOP)
        assert store.begin_save(RunStateToSave(run.fill(3).parts, step=3))
        store.wait_staged()
        assert kept() == [2], "the older one is written over"
        os.kill(pid, signal.SIGCONT)
        assert store.wait_for_saves() == 3 and kept() == [2, 3]


def test_a_rank_with_a_small_part_waits_as_long_as_the_largest_part_may_take(rundir: RunDirectory):
    ranks = Ranks(2)

    def live(rank: int) -> tuple[int, int]:
        run = Run(size=1 << 16)
        with Store(rundir, BACKGROUND, rank=rank, world=2, gather=ranks.gather_of(rank)) as store:
            mine = {"model": run.weights} if rank else {"optim": run.moments}
            store.restore(mine)
            assert store.begin_save(RunStateToSave(mine, step=1))
            (saving,) = store._saver._pending
            store.wait_staged()
            assert store.wait_for_saves() == 1
            return saving.deadlines.part_bytes, saving.deadlines.largest_part_bytes

    (large, largest), (small, largest_too) = Ranks.run(2, live)
    assert small < large == largest == largest_too


@pytest.fixture
def settings(tmp_path: Path) -> ReplicaSettings:
    made = ReplicaSettings(
        root=tmp_path,
        run=tmp_path / "run",
        identity="it",
        rank=1,
        token=TOKEN,
        host="127.0.0.1",
        limits=LIMITS,
    )
    made.replicas.create()
    made.replicas.release()
    return made


def test_only_a_replica_that_fits_todays_memory_outlives_a_restart_and_the_oldest_is_written_over(
    settings: ReplicaSettings,
):
    """Of two buffers one has today's size, and one that of an earlier, smaller state."""
    size = 10_000
    for number, bytes in enumerate((4096, size)):
        settings.slot(number).write_bytes(b"x" * mapped_bytes(bytes))
        replica = MemoryReplica(
            path=settings.slot(number),
            step=8 - number,
            incarnation=1,
            rank=1,
            world=3,
            time=0.0,
            part=Part(files=(), boxes=()),
            offsets={},
            values={},
            about={},
        )
        write_label(replica)
    saver = BackgroundSaver(
        bytes=size,
        throttled=False,
        device=torch.device("cpu"),
        committed=lambda saving: None,
        memory=settings,
    )
    try:
        assert saver.unavailable_reason() is None
        labels = [read_replica(label_of(settings.slot(number))) for number in range(BUFFERS)]
        assert [label and label.step for label in labels] == [None, 7]
        assert settings.slot(1).read_bytes()[:size] == b"x" * size
        assert not any(settings.slot(0).read_bytes())
        assert saver._age(0) < saver._age(1)
    finally:
        saver.close()
    assert settings.slot(1).exists(), "a restart finds it"
    saver.remove_replicas()
    assert not settings.replicas.directory.exists()


def test_a_save_that_has_to_be_made_at_once_and_fails_leaves_nothing_to_the_next(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    with begun(rundir, Run()) as store:
        store.section = replace(BACKGROUND, keep_last=1, keep_tenths=False, keep_best=0)
        background = background_of(store)
        for step in (1, 2):
            store.save(RunStateToSave(Run().fill(step).parts, step=step))
            wait_for(lambda: background.check._outcomes)
        left = rundir.checkpoints / "step-000009.i001.partial"
        left.mkdir()  # of a save that failed, whose last rank wrote there until now
        store._saver._failed_partials.add(left)
        background.bytes = 1  # the state has grown beyond the memory that was taken

        def refused(*what: object, **how: object) -> Part:
            raise StorageError("no space", remedy="")

        monkeypatch.setattr(store._saver._place, "write", refused)
        with pytest.raises(StorageError, match="no space"):
            store.begin_save(RunStateToSave(Run().fill(3).parts, step=3))
        assert store._saver.background is None
        wait_for(lambda: [path.name for path in rundir.checkpoints.iterdir()] == ["step-000002.i001"])
