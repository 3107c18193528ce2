"""Ranks that save together: what one of them lacks is known to all, and none waits for what will not come."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.small_run import Ranks, Run

from bloomery.checkpoint.format.catalogue import verify
from bloomery.checkpoint.format.data_file import HashingWriter
from bloomery.checkpoint.format.deadlines import (
    ABORT_S,
    BACKUP_AFTER_ERROR_S,
    BUFFERS_S,
    LOST_RANK_S,
    POLL_S,
    WRITER_END_S,
    Deadlines,
    send_replica_s,
)
from bloomery.checkpoint.save import background as background_module
from bloomery.checkpoint.save import saver as saving_module
from bloomery.checkpoint.save.background import BackgroundSaver
from bloomery.checkpoint.save.direct import DirectoryBackend
from bloomery.checkpoint.save.staging import PendingSave
from bloomery.checkpoint.save.verification import OwnFilesCheck, VerificationResults
from bloomery.checkpoint.writer import client as writerprocess_module
from bloomery.checkpoint.writer import shared_buffer as arena_module
from bloomery.checkpoint.writer.client import WriterProcess
from bloomery.checkpoint.writer.ranks import Ranks as StoreRanks
from bloomery.config.checkpoint import CheckpointSection
from bloomery.errors import CheckpointError, RankLost, ReportedElsewhere, StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.events.timeouts import COLLECTIVE_TIMEOUT_S, GRACE_AFTER_FAILURE_S, GRACE_AFTER_SIGNAL_S
from bloomery.operate.standstill import StandstillLimits
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave

WORLD = 2
ON, AUTO = CheckpointSection(background="on"), CheckpointSection(background="auto")


def together(
    rundir: RunDirectory, section: CheckpointSection, act: Callable[[Store, Run], object]
) -> list[object]:
    """What each of two ranks returns, or raises, from `act` with its store and its state."""
    ranks = Ranks(WORLD)

    def live(rank: int) -> object:
        run = Run()
        with Store(rundir, section, rank=rank, world=WORLD, gather=ranks.gather_of(rank)) as store:
            store.restore(run.parts)
            return act(store, run)

    return Ranks.run(WORLD, live)


def save_once(store: Store, run: Run) -> tuple[bool, int, list[str]]:
    begun = store.begin_save(RunStateToSave(run.fill(1).parts, step=1))
    store.wait_staged()
    return begun, store.wait_for_saves(), store.take_background_failures()


def is_whole(rundir: RunDirectory) -> bool:
    (directory,) = rundir.checkpoints.iterdir()
    return verify(directory) == [] and len(list(directory.glob("*r0000*.safetensors"))) >= WORLD


def test_of_a_save_at_once_only_the_first_rank_reads_what_all_others_wrote(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = list[int](), saving_module.part_or_failure

    def counted(content: str, *, rank: int, place: str) -> object:
        reads.append(rank)
        return read(content, rank=rank, place=place)

    monkeypatch.setattr(saving_module, "part_or_failure", counted)
    together(rundir, CheckpointSection(background="off"), save_once)
    assert is_whole(rundir) and sorted(reads) == sorted([*range(WORLD), *range(WORLD)])


def test_memory_that_only_one_rank_gets_is_told_to_all_and_all_save_without_it(
    rundir: RunDirectory, monkeypatch
):
    create, taken = arena_module.SharedBuffer.create, itertools.count(1)

    def refused(*arguments: object, **more: object) -> object:
        if next(taken) == 3:  # of four: one rank has both, another one
            raise StorageError("no memory is left", remedy="Buy some.")
        return create(*arguments, **more)

    monkeypatch.setattr(background_module.SharedBuffer, "create", refused)
    told = together(rundir, ON, save_once)
    assert [one[:2] for one in told] == [(True, 1)] * WORLD
    (why,) = told[0][2]
    assert "no memory is left" in why and why.startswith("rank ") and told[1][2] == [why]
    assert is_whole(rundir)


def test_the_memory_that_all_ranks_of_a_machine_want_is_added_up(rundir: RunDirectory, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(saving_module, "BACKGROUND_BYTES", 0)
    available = arena_module.available_memory_bytes
    refuse = arena_module.refuse_without_memory

    def watched(bytes: int) -> None:
        asked.append(bytes)
        refuse(bytes)

    monkeypatch.setattr("bloomery.checkpoint.writer.partner.refuse_without_memory", watched)
    together(rundir, AUTO, save_once)
    both = asked[0]
    assert both == asked[1] and available() is not None
    enough_for_one = arena_module._SPARE_BYTES + both * 3 // 4
    monkeypatch.setattr(arena_module, "available_memory_bytes", lambda: enough_for_one)
    told = together(rundir, AUTO, lambda store, run: (store._saver.background, *save_once(store, run)[2]))
    assert [one[0] for one in told] == [None] * WORLD and "memory" in told[0][1] and told[0] == told[1]
    refused = together(rundir, ON, save_once)
    assert all(isinstance(one, StorageError) and "off" in one.remedy for one in refused)


def test_a_writer_that_cannot_be_started_is_told_and_the_ranks_save_without_one(
    rundir: RunDirectory, monkeypatch
):
    monkeypatch.setattr(writerprocess_module.sys, "executable", "/nowhere/python")
    told = together(rundir, ON, save_once)
    assert [one[:2] for one in told] == [(True, 1)] * WORLD and "could not be started" in told[0][2][0]
    assert is_whole(rundir)


def test_a_state_that_outgrows_its_memory_is_saved_without_it_and_nothing_on_its_way_is_lost(
    rundir: RunDirectory,
):
    def act(store: Store, run: Run) -> tuple[list[int], list[str]]:
        assert store.begin_save(RunStateToSave(run.fill(1).parts, step=1))
        store.wait_staged()
        larger = Run(size=1 << 20)
        assert store.begin_save(RunStateToSave(larger.fill(2).parts, step=2))
        return [found.step for found in store.checkpoints()], store.take_background_failures()

    for steps, why in together(rundir, ON, act):
        assert steps == [1, 2] and "has grown" in why[0]


def test_the_end_of_saves_includes_their_pruning(rundir: RunDirectory, monkeypatch):
    order: list[str] = []
    run = Run().fill(1)
    with Store(rundir, ON) as store:
        store.restore(run.parts)
        store.save(RunStateToSave(run.parts, step=1))
        prune, begun, go_on = store._prune, threading.Event(), threading.Event()

        def slowly(length: int | None) -> None:
            begun.set()
            assert go_on.wait(120)
            prune(length)
            order.append("pruned")

        monkeypatch.setattr(store, "_prune", slowly)
        assert store.begin_save(RunStateToSave(run.fill(2).parts, step=2))
        store.wait_staged()
        waiting = threading.Thread(target=lambda: order.append(f"finished {store.wait_for_saves()}"))
        waiting.start()
        assert begun.wait(120)
        waiting.join(0.1)
        go_on.set()
        waiting.join(120)
    assert order == ["pruned", "finished 2"]


def test_the_end_waits_for_the_commit_and_not_until_all_is_read_back(rundir: RunDirectory, monkeypatch):
    begun, go_on, run_check = threading.Event(), threading.Event(), OwnFilesCheck.run

    def slowly(check: OwnFilesCheck, saving: PendingSave, **more: Any) -> None:
        begun.set()
        assert go_on.wait(120)
        run_check(check, saving, **more)

    monkeypatch.setattr(OwnFilesCheck, "run", slowly)
    run = Run().fill(1)
    with Store(rundir, ON) as store:
        store.restore(run.parts)
        assert store.begin_save(RunStateToSave(run.parts, step=1))
        store.wait_staged()
        assert begun.wait(120)
        assert store.wait_for_saves() == 1 and not go_on.is_set()
        go_on.set()
    assert is_whole(rundir)


def test_who_waits_for_saves_that_are_over_does_not_end_the_reading_back_of_the_last(
    rundir: RunDirectory, monkeypatch
):
    """Else a checkpoint whose save ends before anybody waits for it would not count as intact."""
    begun, go_on, write = threading.Event(), threading.Event(), WriterProcess.write

    def slowly(writer: WriterProcess, order: dict[str, Any], **more: Any) -> object:
        if "verify" in order:
            begun.set()
            assert go_on.wait(120)
        return write(writer, order, **more)

    monkeypatch.setattr(WriterProcess, "write", slowly)
    run = Run().fill(1)
    with Store(rundir, ON) as store:
        store.restore(run.parts)
        background = store._saver.background
        assert isinstance(background, BackgroundSaver)
        assert store.begin_save(RunStateToSave(run.parts, step=1))
        store.wait_staged()
        assert begun.wait(120)
        assert store.wait_for_saves() == 1
        go_on.set()
        with background._reading_back:
            assert list(background.check.take().values()) == [""]


def test_older_checkpoints_go_once_all_ranks_have_read_back_a_newer_one(rundir: RunDirectory):
    """keep_last = 1: the last is committed, but only the one before is known to be intact. So two stay."""

    def act(store: Store, run: Run) -> object:
        left = []
        for step in (1, 2, 3, 4):
            background = store._saver.background
            assert isinstance(background, BackgroundSaver)
            while step > 1 and not background.check._outcomes:
                time.sleep(0.005)  # until this rank has read back its files of the last save
            store._ranks.gather(None)
            assert store.begin_save(RunStateToSave(run.fill(step).parts, step=step))
            store.wait_staged()
            store.wait_for_saves()
            left.append([found.step for found in store.checkpoints()])
        return left

    section = CheckpointSection(background="on", keep_last=1, keep_tenths=False)
    for left in together(rundir, section, act):
        assert left == [[1], [1, 2], [2, 3], [3, 4]]


def test_a_checkpoint_counts_as_intact_once_every_rank_says_so_and_never_where_one_found_damage(caplog):
    intact: list[str] = []
    verdicts = VerificationResults(world=3, intact=intact.append)
    assert verdicts.add(0, {"a": "", "b": ""}) == verdicts.add(1, {"a": "", "b": "x is not what"}) == []
    assert verdicts.add(2, {"b": ""}) == [] and intact == []
    assert verdicts.add(2, {"a": ""}) == ["a"] == intact
    assert "b is damaged: rank 1: x is not what" in caplog.text


def test_a_writer_that_says_nothing_is_given_up_and_its_save_leaves_no_trace(
    rundir: RunDirectory, monkeypatch
):
    usual, waits_s = Deadlines.answer_s.fget, [0.5]
    monkeypatch.setattr(Deadlines, "answer_s", property(lambda self: (waits_s or [usual(self)])[0]))

    def act(store: Store, run: Run) -> object:
        background = store._saver.background
        assert isinstance(background, BackgroundSaver) and background.unavailable_reason() is None
        assert background.writer_pid is not None
        os.kill(background.writer_pid, signal.SIGSTOP)
        assert store.begin_save(RunStateToSave(run.fill(1).parts, step=1))
        store.wait_staged()
        finished = store.wait_for_saves()
        failures = [one.failure and one.failure.message for one in store.take_save_results()]
        left = list(rundir.checkpoints.iterdir())
        waits_s.clear()
        store._ranks.gather(None)
        return (
            finished,
            failures,
            left,
            store.begin_save(RunStateToSave(run.parts, step=1)),
            store.wait_for_saves(),
        )

    for finished, (failure,), left, *again in together(rundir, ON, act):
        assert finished == -1 and "in time" in failure and left == [] and again == [True, 1]
    assert is_whole(rundir)


def test_a_rank_whose_save_fails_lets_the_others_know_at_once(rundir: RunDirectory, monkeypatch):
    def act(store: Store, run: Run) -> object:
        background = store._saver.background
        assert isinstance(background, BackgroundSaver)
        assert background.unavailable_reason() is None and background._writer is not None
        if store._ranks.rank == 1:

            def lost(*arguments: object, **more: object) -> None:
                raise CheckpointError("the writer died, and died again")

            background._writer.write = lost  # type: ignore[method-assign]
        store.begin_save(RunStateToSave(run.fill(1).parts, step=1))
        store.wait_staged()
        return store.wait_for_saves(), [
            one.failure and one.failure.message for one in store.take_save_results()
        ]

    first, second = together(rundir, ON, act)
    assert first[0] == second[0] == -1
    assert "rank 1: the writer died" in first[1][0] and "died again" in second[1][0]
    assert list(rundir.checkpoints.iterdir()) == []


def test_a_rank_whose_disk_hangs_while_all_wait_for_the_save_ends_it_for_all(
    rundir: RunDirectory, monkeypatch
):
    monkeypatch.setattr(DirectoryBackend, "stall_s", 0.5)
    write, answers = HashingWriter.write, threading.Event()

    def hung(writer: HashingWriter, data: memoryview) -> None:
        assert "-r00001-" not in writer._name or answers.wait(60.0)
        write(writer, data)

    monkeypatch.setattr(HashingWriter, "write", hung)

    def act(store: Store, run: Run) -> int:
        with pytest.raises(StorageError, match=r"part of step-000001.i001 without a new byte for \S+ s"):
            store.save(RunStateToSave(run.fill(1).parts, step=1))
        answers.set()
        return store.wait_for_saves()

    assert together(rundir, CheckpointSection(background="off"), act) == [-1, -1]
    assert [path for path in rundir.checkpoints.iterdir() if path.suffix != ".partial"] == []


def test_what_one_rank_does_for_long_is_waited_for_and_what_it_raises_is_raised_by_all():
    ranks = Ranks(3)
    go_on = threading.Event()

    def live(rank: int) -> object:
        gathered: list[int] = []

        def gather(value: object) -> list[object]:
            gathered.append(1)
            if len(gathered) == 5:
                go_on.set()  # by now the others have asked several times
            return ranks.gather_of(rank)(value)

        def act() -> int:
            if rank == 1:
                assert go_on.wait(120)
            return rank

        def fail() -> None:
            if rank == 2:
                raise StorageError("full")

        mine = StoreRanks(rank=rank, world=3, gather=gather)
        found = mine.poll_on_all(act)
        with pytest.raises(StorageError, match="full"):
            mine.poll_on_all(fail)
        return found

    assert Ranks.run(3, live) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("size", [0, 1 << 30, 3 << 40])
def test_an_inner_wait_is_over_before_the_one_around_it(size: int):
    waits = Deadlines(part_bytes=size // 4, largest_part_bytes=size)
    own_part_s = waits.parts_s
    assert waits.stall_s < waits.silence_s < waits.answer_s
    assert own_part_s + waits.parts_s + send_replica_s(waits.part_bytes) < waits.answer_s
    assert 2 * waits.answer_s < waits.finish_s and waits.staging_s < waits.finish_s
    assert max(BUFFERS_S, 10 * POLL_S) < COLLECTIVE_TIMEOUT_S
    assert ABORT_S + 3 * WRITER_END_S + BACKUP_AFTER_ERROR_S < GRACE_AFTER_FAILURE_S
    assert LOST_RANK_S < GRACE_AFTER_SIGNAL_S < StandstillLimits().silence_s


def test_the_deadlines_of_a_save_do_not_grow_with_the_number_of_ranks():
    """A checkpoint of 2.1 TB on 384 ranks: 5.5 GB each. A hang is noticed by progress, long before."""
    waits = Deadlines(part_bytes=5_500_000_000, largest_part_bytes=5_500_000_000)
    assert waits.stall_s < 6 * 60 and waits.parts_s < 3600 and waits.answer_s < 2 * 3600


@pytest.mark.parametrize(
    ("error", "wait_s"),
    [(RankLost("gone"), LOST_RANK_S), (ReportedElsewhere(), ABORT_S), (StorageError("full"), ABORT_S)],
)
def test_saves_that_wait_for_a_lost_rank_are_given_up_at_once(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, error: Exception, wait_s: float
):
    waited: list[float | None] = []
    wait = BackgroundSaver.wait

    def watched(background: BackgroundSaver, *, deadline_s: float) -> list[str]:
        waited.append(deadline_s)
        return wait(background, deadline_s=deadline_s)

    run = Run()
    with pytest.raises(type(error)), Store(rundir, ON) as store:
        store.restore(run.parts)
        monkeypatch.setattr(BackgroundSaver, "wait", watched)
        raise error
    assert waited == [wait_s]


def test_a_partial_directory_that_is_being_written_is_never_removed(rundir: RunDirectory, tmp_path: Path):
    run = Run()
    with Store(rundir, ON) as store:
        store.restore(run.parts)
        saver, live = store._saver, rundir.checkpoints / "step-000007.i001.partial"
        live.mkdir(parents=True)
        saver._failed_partials.add(live)
        saver._clear_failed_partials({"step-000007.i001"})
        assert live.exists()
        saver._clear_failed_partials(())
        assert not live.exists() and saver._failed_partials == set()
