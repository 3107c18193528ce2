import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.checkpoint.small_run import Ranks, Run

from bloomery.checkpoint.format.catalogue import abandoned_checkpoints, checkpoints, listing_changed
from bloomery.checkpoint.format.retention import last_single_pass
from bloomery.checkpoint.format.verified_reader import read_back
from bloomery.checkpoint.save import direct as place_module
from bloomery.checkpoint.writer.ranks import Ranks as StoreRanks
from bloomery.config.checkpoint import CheckpointSection
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.incarnation import read_incarnations
from bloomery.events.run_directory import RunDirectory
from bloomery.train import checkpoint_store as store_module
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import Restored, RunStateToSave

KEEP_ALL = CheckpointSection(keep_last=1000)


def begun(
    rundir: RunDirectory, run: Run, section: CheckpointSection = KEEP_ALL, **how
) -> tuple[Store, Restored | None]:
    store = Store(rundir, section)
    return store, store.restore(run.parts, **how)


def save_at(store: Store, run: Run, *steps: int, **more) -> None:
    for step in steps:
        store.save(RunStateToSave(run.fill(step).parts, step=step, **more))


def steps_of(store: Store) -> list[int]:
    return [found.step for found in store.checkpoints()]


def test_a_new_run_has_nothing_to_restore_and_is_incarnation_one(rundir: RunDirectory):
    store, restored = begun(rundir, Run())
    assert restored is None and store.incarnation == 1
    assert read_incarnations(rundir) == {1: None}
    assert store.newest() is None


def test_the_newest_comes_back_and_the_next_incarnation_names_it(rundir: RunDirectory):
    store, _ = begun(rundir, Run())
    save_at(store, Run(), 10, 20, values={"train": {"position": 7}}, about={"consumed_tokens": 3})
    run = Run()
    store, restored = begun(rundir, run)
    assert restored is not None and (restored.step, restored.incarnation) == (20, 1)
    assert restored.values["train"] == {"position": 7} and restored.about == {"consumed_tokens": 3}
    assert run.equals(Run().fill(20))
    assert read_incarnations(rundir) == {1: None, 2: (20, 1)}


def test_a_save_an_incarnation_and_a_removal_change_the_listing_and_a_look_does_not(rundir: RunDirectory):
    run = Run()
    store, _ = begun(rundir, run)
    seen = [listing_changed(rundir)]

    def changes(act: Callable[[], object]) -> bool:
        act()
        seen.append(listing_changed(rundir))
        return seen[-1] != seen[-2]

    assert changes(lambda: save_at(store, run, 10))
    assert not changes(lambda: steps_of(store))
    assert changes(lambda: store.restore(run.parts, reason="rewind", up_to_step=10))
    (checkpoint,) = store.checkpoints()
    assert changes(lambda: shutil.rmtree(checkpoint.directory))


def test_a_rewind_hides_what_lies_beyond_it(rundir: RunDirectory):
    run = Run()
    store, _ = begun(rundir, run)
    save_at(store, run, 10, 20, 30)
    restored = store.restore(run.parts, reason="rewind", up_to_step=25)
    assert restored is not None and restored.step == 20 and run.equals(Run().fill(20))
    assert steps_of(store) == [10, 20]
    assert [found.step for found in abandoned_checkpoints(rundir)] == [30]
    store.save(RunStateToSave(run.parts, step=20))  # at once, with the skip
    newest = store.newest()
    assert newest is not None and newest.base == (20, 2)


def test_a_state_that_came_from_elsewhere_is_not_saved_here_before_it_was_saved(
    rundir: RunDirectory, tmp_path: Path
):
    other = RunDirectory(tmp_path / "other").create()
    theirs, _ = begun(other, Run())
    save_at(theirs, Run(), 30)
    run = Run()
    store, _ = begun(rundir, run)
    save_at(store, run, 10)
    (checkpoint,) = theirs.checkpoints()
    adopted = store.adopt(run.parts, checkpoint.directory, reason="replaced", check=lambda: None)
    assert adopted.step == 30 and run.equals(Run().fill(30))
    assert store.wait_for_saves() == -1, "an end of the run here has to take a checkpoint"
    store.save(RunStateToSave(run.parts, step=30))
    assert store.wait_for_saves() == 30


def test_the_last_before_the_end_of_a_first_epoch_stays(rundir: RunDirectory):
    run = Run()
    store, _ = begun(rundir, run, CheckpointSection(keep_last=1, keep_tenths=False))
    cursors = (
        (10, 100, 250),
        (20, 200, 250),
        (30, 250, 400),
        (40, 399, 400),
        (50, 500, None),
        (60, 600, None),
    )
    for step, cursor, ahead in cursors:
        save_at(store, run, step, about={"cursor": cursor, "epoch_end_ahead": ahead})
    assert steps_of(store) == [20, 40, 60]


def test_the_last_checkpoint_of_a_single_pass_is_the_last_before_any_dataset_was_read_twice(
    rundir: RunDirectory,
) -> None:
    run = Run()
    store, _ = begun(rundir, run)
    assert last_single_pass(checkpoints(rundir)) is None
    save_at(store, run, 5, about={"cursor": 50})  # of a version that did not say where epochs end
    assert last_single_pass(checkpoints(rundir)) is None
    for step, cursor, end in ((10, 100, 250), (20, 250, 250), (30, 251, 250), (40, 400, 250)):
        save_at(store, run, step, about={"cursor": cursor, "first_epoch_end": end})
    last = last_single_pass(checkpoints(rundir))
    assert last is not None and last.step == 20
    save_at(store, run, 50, about={"cursor": 500, "first_epoch_end": None})  # a run without a second epoch
    last = last_single_pass(checkpoints(rundir))
    assert last is not None and last.step == 50


def test_a_rewind_before_the_first_checkpoint_starts_from_nothing(rundir: RunDirectory):
    run = Run()
    store, _ = begun(rundir, run)
    save_at(store, run, 10)
    assert store.restore(run.parts, up_to_step=9) is None
    assert steps_of(store) == []


def test_what_an_old_trainer_still_commits_is_not_seen(rundir: RunDirectory):
    old, _ = begun(rundir, Run())
    save_at(old, Run(), 10)
    new, _ = begun(rundir, Run())
    save_at(old, Run(), 40)
    save_at(new, Run(), 20)
    assert steps_of(new) == [10, 20]


def test_saving_the_same_step_again_writes_nothing(rundir: RunDirectory):
    store, _ = begun(rundir, Run())
    save_at(store, Run(), 10)
    (found,) = store.checkpoints()
    before = (found.directory / "manifest.json").stat().st_mtime_ns
    save_at(store, Run(), 10)
    assert (found.directory / "manifest.json").stat().st_mtime_ns == before


def test_a_save_drops_what_need_not_be_kept(rundir: RunDirectory):
    store, _ = begun(rundir, Run(), CheckpointSection(keep_last=2, keep_every_steps=40, keep_tenths=False))
    save_at(store, Run(), *range(10, 110, 10))
    assert steps_of(store) == [40, 80, 90, 100]
    assert len(list(rundir.checkpoints.iterdir())) == 4


def test_abandoned_checkpoints_go_once_the_run_has_passed_them(rundir: RunDirectory):
    run = Run()
    store, _ = begun(rundir, run)
    save_at(store, run, 10, 20, 30)
    store.restore(run.parts, up_to_step=10)
    save_at(store, run, 15)
    assert [found.step for found in abandoned_checkpoints(rundir)] == [20, 30]
    save_at(store, run, 35)
    assert abandoned_checkpoints(rundir) == ()
    assert steps_of(store) == [10, 15, 35]


def test_a_damaged_checkpoint_is_neither_counted_on_nor_the_reason_to_drop_an_intact_one(
    rundir: RunDirectory, monkeypatch
):
    section = CheckpointSection(keep_last=1, keep_tenths=False)
    store, _ = begun(rundir, Run(), section)
    save_at(store, Run(), 10)
    monkeypatch.setattr(store, "_prune", lambda length: None)
    save_at(store, Run(), 20)
    flip(next((rundir.checkpoints / "step-000020.i001").glob("model*")), 5000)
    store, _ = begun(rundir, Run(), section, fallback=True)
    assert steps_of(store) == [10]


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "manifest", "index"])
def test_a_damaged_newest_is_named_with_the_newest_intact_and_taken_back_to_only_when_asked(
    rundir: RunDirectory, damage: str
):
    store, _ = begun(rundir, Run())
    save_at(store, Run(), 10, 20, 30)
    for step in (20, 30):
        directory = rundir.checkpoints / f"step-0000{step}.i001"
        victim = next(directory.glob("model-*"))
        match damage:
            case "flipped":
                flip(victim, victim.stat().st_size - 20)
            case "truncated":
                victim.write_bytes(victim.read_bytes()[:-100])
            case "missing":
                victim.unlink()
            case "manifest" | "index":
                flip(directory / f"{damage}.json", 40)
    with pytest.raises(CheckpointError) as refused:
        begun(rundir, Run())
    assert "step-000030.i001" in refused.value.message
    assert "step-000010.i001" in refused.value.remedy and "--fallback" in refused.value.remedy
    assert read_incarnations(rundir) == {1: None}, "a refused start is no life"
    run = Run()
    store, restored = begun(rundir, run, fallback=True)
    assert restored is not None and restored.step == 10 and run.equals(Run().fill(10))
    assert steps_of(store) == [10]


def test_when_nothing_is_intact_that_is_said(rundir: RunDirectory):
    store, _ = begun(rundir, Run())
    save_at(store, Run(), 10)
    next((rundir.checkpoints / "step-000010.i001").glob("model-*")).unlink()
    for fallback in (False, True):
        with pytest.raises(CheckpointError, match="No older checkpoint is intact"):
            begun(rundir, Run(), fallback=fallback)


def test_a_checkpoint_of_another_model_is_not_passed_over(rundir: RunDirectory):
    store, _ = begun(rundir, Run())
    save_at(store, Run(), 10)
    with pytest.raises(CheckpointError, match=r"another model(?s:.*)the recipe of its run"):
        begun(rundir, Run(size=128), fallback=True)


def test_a_part_that_the_checkpoint_knows_nothing_of_is_refused(rundir: RunDirectory):
    run = Run()
    store, _ = begun(rundir, run)
    save_at(store, run, 10)

    class Newcomer:
        def state_entries(self):
            return ()

        def state_values(self):
            return {}

        def load_state_values(self, values):
            pass

    with pytest.raises(CheckpointError, match="nothing of 'outer'"):
        Store(rundir, KEEP_ALL).restore({**run.parts, "outer": Newcomer()})


def test_ranks_save_their_parts_and_restore_the_same_checkpoint(rundir: RunDirectory):
    ranks = Ranks(2)

    def live(rank: int) -> tuple[int, bool]:
        store = Store(rundir, KEEP_ALL, rank=rank, world=2, gather=ranks.gather_of(rank))
        run = Run()
        store.restore(run.parts)
        run.fill(10)
        mine = {"model": run.weights} if rank == 0 else {"optim": run.moments}
        store.save(RunStateToSave(mine, step=10, values={"optim": run.moments.state_values()}))
        other = Run()
        restored = store.restore(other.parts)
        assert restored is not None
        return store.incarnation, other.equals(run)

    assert Ranks.run(2, live) == [(2, True), (2, True)]
    names = sorted(path.name for path in (rundir.checkpoints / "step-000010.i001").glob("*.safetensors"))
    assert names == ["model-r00000-of-00002-000.safetensors", "optim-r00001-of-00002-000.safetensors"]


def test_what_fails_on_one_rank_is_raised_on_all_and_leaves_nothing(rundir: RunDirectory, monkeypatch):
    ranks = Ranks(2)

    def live(rank: int) -> None:
        store = Store(rundir, KEEP_ALL, rank=rank, world=2, gather=ranks.gather_of(rank))
        run = Run().fill(1)
        store.restore({})
        if rank == 1:
            monkeypatch.setattr(store._saver._place, "write", refuse)
        store.save(RunStateToSave({"model": run.weights} if rank == 0 else {}, step=1))

    def refuse(partial, entries, **ranks):
        raise StorageError("no space", remedy="free some")

    first, second = Ranks.run(2, live)
    assert isinstance(first, StorageError) and "rank 1: no space" in first.message
    assert isinstance(second, StorageError) and second.message == "no space"
    assert list(rundir.checkpoints.iterdir()) == []


class Meetings:
    """Counts how often each rank meets the others, and sets `often` when one has five times since `begin`."""

    def __init__(self, world: int) -> None:
        self._ranks, self._count, self._begun = Ranks(world), 0, threading.Event()
        self.often = threading.Event()

    def begin(self) -> None:
        self._begun.set()

    def gather_of(self, rank: int):
        def gather(value):
            if self._begun.is_set() and rank == 1:
                self._count += 1
                if self._count == 5:
                    self.often.set()
            return self._ranks.gather_of(rank)(value)

        return gather


def test_each_rank_reads_back_what_it_wrote_and_nothing_else_and_none_is_stuck_in_a_collective(
    rundir: RunDirectory, monkeypatch
):
    meetings, names = Meetings(2), list[str]()

    def slow(directory: Path, records) -> str:
        names.extend(record.name for record in records)
        if records[0].name.startswith("model-r00000"):
            meetings.begin()
            assert meetings.often.wait(120), "the others are stuck in one collective"
        return read_back(directory, records)

    def live(rank: int) -> None:
        store = Store(rundir, KEEP_ALL, rank=rank, world=2, gather=meetings.gather_of(rank))
        store.restore({})
        run = Run().fill(1)
        store.save(RunStateToSave({"model": run.weights} if rank == 0 else {"optim": run.moments}, step=1))

    monkeypatch.setattr(place_module, "read_back", slow)
    assert Ranks.run(2, live) == [None, None]
    saved = {path.name for path in (rundir.checkpoints / "step-000001.i001").glob("*.safetensors")}
    assert sorted(names) == sorted(saved), "every file is read back once, by whom it was written"


def test_only_the_first_rank_looks_for_an_intact_one_and_all_say_the_same(rundir: RunDirectory, monkeypatch):
    store, _ = begun(rundir, Run())
    save_at(store, Run(), 10, 20)
    next((rundir.checkpoints / "step-000020.i001").glob("model-*")).unlink()
    meetings, looked, look = Meetings(2), list[int](), store_module.newest_intact

    def slow(found):
        looked.append(1)
        meetings.begin()
        assert meetings.often.wait(120), "the others are stuck in one collective"
        return look(found)

    def live(rank: int) -> None:
        run = Run()
        Store(rundir, KEEP_ALL, rank=rank, world=2, gather=meetings.gather_of(rank)).restore(run.parts)

    monkeypatch.setattr(store_module, "newest_intact", slow)
    first, second = Ranks.run(2, live)
    for error in (first, second):
        assert isinstance(error, CheckpointError) and "step-000010.i001" in error.remedy, error
    assert looked == [1]


def test_a_rank_that_comes_to_no_end_is_named_to_all(monkeypatch):
    ranks, never = Ranks(2), threading.Event()

    def live(rank: int) -> None:
        mine = StoreRanks(rank=rank, world=2, gather=ranks.gather_of(rank))
        mine.poll_on_first(lambda: never.wait(600), deadline_s=0.0, doing="reading back step-000001.i001")

    try:
        ended = Ranks.run(2, live)
    finally:
        never.set()
    for error in ended:
        assert isinstance(error, StorageError), error
        assert "rank 0 has been busy with reading back step-000001.i001 for 0 s" in error.message


def test_a_link_in_the_place_of_a_leftover_or_a_checkpoint_is_removed_and_what_it_names_stays(
    rundir: RunDirectory, tmp_path: Path
):
    store, run = Store(rundir, CheckpointSection(keep_last=1, keep_tenths=False)), Run()
    store.restore(run.parts)
    store.save(RunStateToSave(run.fill(1).parts, step=1))
    moved = tmp_path / "another-disk"
    checkpoint = rundir.checkpoints / "step-000001.i001"
    checkpoint.rename(moved)
    checkpoint.symlink_to(moved)
    store.save(RunStateToSave(run.fill(2).parts, step=2))
    assert not checkpoint.is_symlink() and (moved / "manifest.json").is_file(), "pruned: the link alone"
    (rundir.checkpoints / "step-000003.i001.partial").symlink_to(moved)
    (rundir.checkpoints / "step-000004.i001.partial").symlink_to(tmp_path / "nowhere")
    (rundir.checkpoints / "step-000005.i001.partial").touch()
    again = Store(rundir, CheckpointSection())
    restored = again.restore(run.parts)
    assert restored is not None and restored.step == 2
    assert [path.name for path in rundir.checkpoints.iterdir()] == ["step-000002.i001"]
    assert (moved / "manifest.json").is_file()
