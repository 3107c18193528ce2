"""Saves beside the training: what they hold, and what becomes of them when something dies."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.checkpoint.small_run import Ranks, Run, save_and_sleep
from tests.forked import forked
from tests.machine import may_mount, mounted

from bloomery import errors
from bloomery.checkpoint.format.catalogue import verify
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.load.loader import load_checkpoint
from bloomery.checkpoint.save import background as background_module
from bloomery.checkpoint.save import direct as place_module
from bloomery.checkpoint.save import saver as saving_module
from bloomery.checkpoint.save.background import BackgroundSaver
from bloomery.checkpoint.save.staging import CopyPace
from bloomery.checkpoint.writer import shared_buffer as arena_module
from bloomery.config.checkpoint import CheckpointSection
from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave

BACKGROUND = CheckpointSection(keep_last=1000, background="on")
DEADLINE_S = 120.0


@contextmanager
def begun(rundir: RunDirectory, run: Run, section: CheckpointSection = BACKGROUND) -> Iterator[Store]:
    with Store(rundir, section) as store:
        store.restore(run.parts)
        yield store


def writer_of(store: Store) -> int:
    """The writer's process number, once there is one."""
    background = store._saver.background
    assert isinstance(background, BackgroundSaver)
    wait_for(lambda: background.writer_pid)
    pid = background.writer_pid
    assert pid is not None
    return pid


def wait_for(seen: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not seen():
        assert time.monotonic() < deadline, f"waited in vain for {seen}"
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def steps_of(store: Store) -> list[int]:
    return [found.step for found in store.checkpoints()]


def restored(rundir: RunDirectory) -> Run:
    run = Run()
    with Store(rundir, CheckpointSection(background="off")) as store:
        assert store.restore(run.parts) is not None
    return run


def test_what_is_written_after_settling_is_not_in_the_checkpoint(rundir: RunDirectory):
    run = Run()
    with begun(rundir, run) as store:
        for step in range(1, 6):
            run.fill(step)
            assert store.begin_save(RunStateToSave(run.parts, step=step, values={"train": {"at": step}}))
            store.wait_staged()
            run.fill(100 + step)
            assert store.wait_for_saves() == step
        saved = store.take_save_results()
    assert [one.step for one in saved] == [1, 2, 3, 4, 5]
    assert all(one.failure is None and one.bytes > 0 for one in saved)
    for found in store.checkpoints():
        assert verify(found.directory) == []
        again = Run()
        values = load_checkpoint(
            found.directory, [e for part in again.parts.values() for e in part.state_entries()]
        )
        again.moments.load_state_values(values["optim"])
        assert again.equals(Run().fill(found.step)) and values["train"] == {"at": found.step}


def test_the_data_files_are_byte_for_byte_those_of_a_save_at_once(rundir: RunDirectory, tmp_path: Path):
    other = RunDirectory(tmp_path / "other").create()
    for directory, section in ((rundir, BACKGROUND), (other, CheckpointSection(background="off"))):
        with begun(directory, Run(), section) as store:
            store.save(RunStateToSave(Run().fill(7).parts, step=7))
    names = sorted(path.name for path in rundir.checkpoints.glob("*/*.safetensors"))
    assert names
    for name in names:
        pair = [next(one.checkpoints.glob(f"*/{name}")).read_bytes() for one in (rundir, other)]
        assert pair[0] == pair[1]
    indices = [next(one.checkpoints.glob("*/index.json")).read_bytes() for one in (rundir, other)]
    assert indices[0] == indices[1]


def test_a_large_tensor_is_stored_in_boxes_of_rows_and_comes_back(rundir: RunDirectory, monkeypatch):
    monkeypatch.setattr(saving_module, "FILE_BYTES", 5000)
    run = Run().fill(3)
    with begun(rundir, Run()) as store:
        directory = store.save(RunStateToSave(run.parts, step=3))
    files = list(directory.glob("*.safetensors"))
    assert len(files) > 8 and max(path.stat().st_size for path in files) <= 5000 + 4096
    assert restored(rundir).equals(run)


def test_a_third_save_is_not_begun_while_two_are_on_their_way(rundir: RunDirectory):
    run = Run()
    with begun(rundir, run) as store:
        pid = writer_of(store)
        os.kill(pid, signal.SIGSTOP)
        try:
            begun_ones = []
            for step in (1, 2, 3):
                begun_ones.append(store.begin_save(RunStateToSave(run.fill(step).parts, step=step)))
                store.wait_staged()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert begun_ones == [True, True, False]
        assert store.wait_for_saves() == 2
        assert store.begin_save(RunStateToSave(run.fill(4).parts, step=4)) and store.wait_for_saves() == 4
        assert steps_of(store) == [1, 2, 4]
    assert restored(rundir).equals(Run().fill(4))


def test_a_writer_that_dies_over_a_save_is_replaced_and_the_save_is_made(rundir: RunDirectory):
    run = Run().fill(1)
    with begun(rundir, run) as store:
        pid = writer_of(store)
        os.kill(pid, signal.SIGSTOP)
        assert store.begin_save(RunStateToSave(run.parts, step=1))
        store.wait_staged()
        os.kill(pid, signal.SIGKILL)
        assert store.wait_for_saves() == 1
        assert writer_of(store) != pid
        assert [one.failure for one in store.take_save_results()] == [None]
    assert restored(rundir).equals(Run().fill(1))


def test_a_writer_that_died_between_saves_is_replaced(rundir: RunDirectory):
    run = Run().fill(1)
    with begun(rundir, run) as store:
        pid = writer_of(store)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(pid))
        store.save(RunStateToSave(run.parts, step=1))
        assert steps_of(store) == [1]


def test_a_writer_ends_when_its_trainer_is_killed(rundir: RunDirectory):
    context = forked()
    trainer = context.Process(target=save_and_sleep, args=(str(rundir.path),), daemon=True)
    trainer.start()
    told = rundir.path / "writer"
    try:
        wait_for(lambda: told.exists() and told.read_text())
        pid = int(told.read_text())
        assert is_alive(pid)
    finally:
        trainer.kill()
        trainer.join()
    wait_for(lambda: not is_alive(pid))
    assert restored(rundir).equals(Run().fill(1))


def test_a_store_that_closes_waits_for_its_saves_and_ends_its_writer(rundir: RunDirectory):
    run = Run().fill(1)
    with begun(rundir, run) as store:
        pid = writer_of(store)
        store.begin_save(RunStateToSave(run.parts, step=1))
    assert not is_alive(pid) and steps_of(store) == [1]


def test_a_save_without_room_is_refused_before_it_begins(rundir: RunDirectory, monkeypatch):
    run = Run()
    with begun(rundir, run) as store:
        store.save(RunStateToSave(run.fill(1).parts, step=1))
        monkeypatch.setattr(errors, "free_bytes", lambda path: 1000)
        with pytest.raises(StorageError, match=r"no space.*needed"):
            store.begin_save(RunStateToSave(run.fill(2).parts, step=2))
        assert [path.name for path in rundir.checkpoints.iterdir()] == ["step-000001.i001"]
        monkeypatch.undo()
        assert store.begin_save(RunStateToSave(run.fill(3).parts, step=3)) and store.wait_for_saves() == 3


@pytest.mark.needs(may_mount, rights="root, to mount a file system")
def test_a_disk_that_fills_up_under_the_writer_is_told_and_the_rest_stays_whole(tmp_path: Path, monkeypatch):
    with mounted(tmp_path / "small", "size=1500k") as small:
        rundir = RunDirectory(small / "run").create()
        run = Run()
        with begun(rundir, run) as store:
            pid = writer_of(store)
            monkeypatch.setattr(place_module, "MARGIN_BYTES", 0)
            os.kill(pid, signal.SIGSTOP)
            assert store.begin_save(RunStateToSave(run.fill(1).parts, step=1))
            store.wait_staged()
            filler = small / "filler"
            filler.write_bytes(bytes(errors.free_bytes(small)))
            os.kill(pid, signal.SIGCONT)
            assert store.wait_for_saves() == -1
            (failed,) = store.take_save_results()
            assert isinstance(failed.failure, StorageError) and "no space" in failed.failure.message
            assert list(rundir.checkpoints.iterdir()) == []
            filler.unlink()


def test_a_directory_that_vanishes_under_the_writer_is_told(rundir: RunDirectory):
    run = Run()
    with begun(rundir, run) as store:
        pid = writer_of(store)
        os.kill(pid, signal.SIGSTOP)
        store.begin_save(RunStateToSave(run.fill(1).parts, step=1))
        store.wait_staged()
        (partial,) = rundir.checkpoints.iterdir()
        partial.rmdir()
        os.kill(pid, signal.SIGCONT)
        assert store.wait_for_saves() == -1
        (failed,) = store.take_save_results()
        assert isinstance(failed.failure, StorageError) and str(partial) in failed.failure.message
        store.save(RunStateToSave(run.fill(2).parts, step=2))
        assert steps_of(store) == [2]


def test_without_the_memory_it_is_refused_where_it_was_asked_for_and_told_where_not(
    rundir: RunDirectory, monkeypatch, caplog
):
    monkeypatch.setattr(arena_module, "available_memory_bytes", lambda: 10_000)
    with pytest.raises(StorageError, match="memory") as refused, begun(rundir, Run()):
        pass
    assert "checkpoint.background=off" in refused.value.remedy
    monkeypatch.setattr(saving_module, "BACKGROUND_BYTES", 0)
    with begun(rundir, Run(), CheckpointSection(background="auto")) as store:
        assert store._saver.background is None and "waits for each save" in caplog.text
        assert store.begin_save(RunStateToSave(Run().fill(1).parts, step=1)) and steps_of(store) == [1]


def test_a_small_state_is_saved_at_once(rundir: RunDirectory):
    with begun(rundir, Run(), CheckpointSection()) as store:
        assert store._saver.background is None
        assert store.begin_save(RunStateToSave(Run().fill(1).parts, step=1))
        assert [(one.step, one.failure) for one in store.take_save_results()] == [(1, None)]


@pytest.mark.parametrize("background", ["on", "off"])
def test_replicas_are_written_once_and_shared_out_by_all_ranks(rundir: RunDirectory, background: str):
    world, ranks = 3, Ranks(3)
    section = CheckpointSection(background=background)

    def live(rank: int) -> bool:
        run = Run()
        with Store(rundir, section, rank=rank, world=world, gather=ranks.gather_of(rank)) as store:
            store.restore(run.parts)
            store.begin_save(RunStateToSave(run.fill(5).parts, step=5))
            store.wait_staged()
            assert store.wait_for_saves() == 5
            other = Run()
            assert store.restore(other.parts) is not None
            return other.equals(run)

    assert Ranks.run(world, live) == [True] * world
    (directory,) = rundir.checkpoints.iterdir()
    files = sorted(directory.glob("*.safetensors"))
    assert {path.name.partition("-")[2][:6] for path in files} == {"r00000", "r00001", "r00002"}
    assert sum(path.stat().st_size for path in files) < 1.5 * sum(
        tensor.numel() * tensor.element_size()
        for tensor in (*Run().weights.tensors.values(), Run().moments.flat)
    )
    assert sorted(path.suffix for path in directory.iterdir() if path not in files) == [".json", ".json"]


def test_a_rank_whose_disk_refuses_is_named_and_nothing_is_committed(rundir: RunDirectory):
    world, ranks = 2, Ranks(2)

    def live(rank: int) -> list[str | None]:
        run = Run()
        with Store(rundir, BACKGROUND, rank=rank, world=world, gather=ranks.gather_of(rank)) as store:
            store.restore(run.parts)
            pid = writer_of(store)
            if rank == 1:
                os.kill(pid, signal.SIGSTOP)
            store.begin_save(RunStateToSave(run.fill(1).parts, step=1))
            store.wait_staged()
            if rank == 1:
                partial = rundir.checkpoints / "step-000001.i001.partial"
                for name in ("model", "optim"):
                    (partial / f"{name}-r00001-of-00002-000.safetensors").touch()  # in the writer's way
                os.kill(pid, signal.SIGCONT)
            store.wait_for_saves()
            return [one.failure and one.failure.message for one in store.take_save_results()]

    (first,), (second,) = Ranks.run(world, live)
    assert "rank 1:" in first and "File exists" in first and "File exists" in second
    assert list(rundir.checkpoints.iterdir()) == []


def test_no_arena_or_descriptor_outlives_its_store(rundir: RunDirectory):
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    run = Run()
    with begun(rundir, run) as store:
        store.save(RunStateToSave(run.fill(1).parts, step=1))
    before = open_files()
    for step in (2, 3):
        with begun(rundir, run) as store:
            store.save(RunStateToSave(run.fill(step).parts, step=step))
    assert open_files() <= before


def test_tensors_of_all_shapes_and_strides_are_staged_as_they_are(rundir: RunDirectory):
    base = torch.randn(6, 8)
    odd = {"model.turned": base.t(), "model.cut": base[:, 2:5], "model.one": torch.tensor(3.0)}

    class Odd:
        def state_entries(self):
            return [whole(name, tensor) for name, tensor in odd.items()]

        def state_values(self):
            return {}

        def load_state_values(self, values):
            pass

    with Store(rundir, BACKGROUND) as store:
        store.restore({"model": Odd()})
        directory = store.save(RunStateToSave({"model": Odd()}, step=1))
    there = {name: torch.zeros(tensor.shape) for name, tensor in odd.items()}
    load_checkpoint(directory, [whole(name, tensor) for name, tensor in there.items()])
    assert all(torch.equal(there[name], tensor) for name, tensor in odd.items())


def test_a_copy_that_fails_is_told_and_the_next_save_is_made(rundir: RunDirectory, monkeypatch):
    def broken(*arguments: object, **more: object) -> None:
        raise RuntimeError("the device is gone")

    run = Run()
    with begun(rundir, run) as store:
        with monkeypatch.context() as patch:
            patch.setattr(background_module, "stage", broken)
            assert store.begin_save(RunStateToSave(run.fill(1).parts, step=1))
            store.wait_staged()
            assert store.wait_for_saves() == -1
            with pytest.raises(errors.CheckpointError, match="could not be copied"):
                store.save(RunStateToSave(run.fill(2).parts, step=2))
        failed, waited_for = store.take_save_results()
        assert failed.failure is not None and "could not be copied" in failed.failure.message
        assert (failed.step, waited_for.step) == (1, 2) and waited_for.failure is not None
        store.save(RunStateToSave(run.fill(3).parts, step=3))
        assert steps_of(store) == [3]


def test_a_paced_copy_pauses_only_when_it_is_early_and_never_when_somebody_waits():
    for throttled, hurried, window_s, waits in (
        (True, False, 1e6, True),
        (False, False, 1e6, False),
        (True, True, 1e6, False),
        (True, False, 0.0, False),
    ):
        pace = CopyPace(1000, window_s=window_s, throttled=throttled)
        copying = threading.Thread(target=pace.copied, args=(1,), daemon=True)  # 500 s early
        if hurried:
            pace.stop_pausing()
        copying.start()
        if waits:
            assert copying.is_alive()
            pace.stop_pausing()
        copying.join(DEADLINE_S)
        assert not copying.is_alive()
