"""What stays of a look at a run once its clock, its recipe, its scheduler or its watcher was another one."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest
from tests.operate.watch.test_observe import NOW, Scheduled, event
from tests.operate.watch.test_watcher import a_run

from bloomery import durable
from bloomery.config.load import dump_recipe, load_recipe
from bloomery.errors import RunBusy
from bloomery.events import journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.run_state import RunStatus, RunVerdict
from bloomery.operate.schedulers.interface import SchedulerError
from bloomery.operate.watch import observe, watcher
from bloomery.operate.watch.conditions import WatchedQuota, WatchedRun, WatchLimits, conditions_of
from bloomery.operate.watch.disk import DiskSample
from bloomery.operate.watch.observe import RunObserver
from bloomery.operate.watch.watcher import RunWatcher


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose only process is gone."""
    return a_run(tmp_path / "run", beat_age_s=600.0)


def test_a_recipe_that_no_longer_can_be_read_is_not_taken_from_memory(run: RunDirectory) -> None:
    observer = RunObserver(run)
    run.recipe.write_text(dump_recipe(load_recipe("demo").recipe))
    os.utime(run.recipe, (NOW, NOW))
    assert observer._current_recipe() is not None
    run.recipe.write_text("[future]\nsetting = 1\n")
    os.utime(run.recipe, (NOW - 1, NOW - 1))  # as of a backup that was copied with its times
    assert observer._current_recipe() is None


def test_a_full_disk_that_has_no_room_for_the_name_of_the_watcher_is_watched(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    watches = RunWatcher(run, lambda alert: None)
    with pytest.raises(RunBusy, match="watched already by another process"):
        RunWatcher(run, lambda alert: None)
    assert [alert.condition.kind for alert in watches.check()] == ["gone"]
    watches.close()


def test_a_run_without_a_directory_of_switches_has_none_where_the_watcher_runs(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    real = observe.observe_run
    monkeypatch.setattr(
        observe, "observe_run", lambda *told, **more: asked.append(more["switches"]) or real(*told, **more)
    )
    run.recipe.write_text(dump_recipe(load_recipe("demo").recipe))
    RunObserver(run).observe(now=NOW)
    assert asked == [[]]


def test_a_scheduler_that_is_silent_once_more_is_unheard_since_then(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Scheduled(run, monkeypatch)
    down = SchedulerError("down", remedy="")
    for answer, at, unheard_s in ((down, 0.0, 0.0), (down, 60.0, 60.0), ([], 120.0, 0.0), (down, 180.0, 0.0)):
        queue.answer = answer
        assert queue.observer.observe(now=NOW + at).unheard_s == unheard_s
    assert queue.observer.unheard_since == NOW + 180.0


def test_quotas_are_asked_for_again_after_a_minute_and_after_a_clock_was_set_back(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(observe, "sample_quotas", lambda path, *, now: asked.append(now) or {})
    observer = RunObserver(run)
    for now in (NOW, NOW + 59.0, NOW + 60.0, NOW - 3600.0):
        observer.observe(now=now)
    assert asked == [NOW, NOW + 60.0, NOW - 3600.0]


def test_no_more_is_remembered_after_a_clock_was_set_back_than_before(run: RunDirectory) -> None:
    observer = RunObserver(run)
    observer.observe(now=NOW)
    observer.set_back(5.0)
    for number in range(100):
        observer._take(event("checkpoint", path="x", time=NOW + number))
        observer._take(event("guard", guard="spike", action="stop", time=NOW + number))
    seen = observer.observe(now=NOW)
    assert (len(seen.saves), len(seen.guards)) == (20, 50)


@pytest.mark.parametrize(("age_s", "is_gone"), [(10.0, False), (25.0, True)])
def test_ranks_are_silent_after_a_quarter_of_a_minute(tmp_path: Path, age_s: float, is_gone: bool) -> None:
    seen = RunObserver(a_run(tmp_path / "run", beat_age_s=age_s)).observe(now=NOW)
    assert (seen.verdict.state == RunStatus.RUNNING) is not is_gone


def opened(path: Path) -> int:
    """How many descriptors of this process are open at a path."""
    links = list[Path]()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(link.readlink())
    return links.count(path)


def test_who_watches_a_run_is_named_in_full_and_nothing_of_who_did_before(run: RunDirectory) -> None:
    (run.path / "watch.lock").write_text(f"process 123456789 on a-node-of-{'long' * 10}-name\n")
    watcher = RunWatcher(run, send=lambda alert: None)
    with pytest.raises(RunBusy) as busy:
        RunWatcher(run, send=lambda alert: None)
    here = f"process {os.getpid()} on {os.uname().nodename}"
    assert busy.value.message == f"{run.path} is watched already by {here}."
    assert opened(run.path / "watch.lock") == 1, "that of the watcher itself"
    watcher.close()
    RunWatcher(run, send=lambda alert: None).close()


def test_alerts_are_written_to_a_record_that_others_write_too(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[int] = []

    def wait_for_lock(file: int, *, timeout_s: float) -> bool:
        locked.append(file)
        return durable.try_lock(file)

    monkeypatch.setattr(journal.durable, "wait_for_lock", wait_for_lock)
    watcher = RunWatcher(run, send=lambda alert: None)
    assert watcher.check(now=NOW)
    assert locked, "each line is written under the lock of the file"
    watcher.close()


def test_others_of_the_group_may_watch_a_run_after_its_first_watcher(run: RunDirectory) -> None:
    before = os.umask(0o002)
    try:
        RunWatcher(run, send=lambda alert: None).close()
    finally:
        os.umask(before)
    assert (run.path / "watch.lock").stat().st_mode & 0o777 == 0o664


@pytest.mark.parametrize(("free_bytes", "is_told"), [(-1, False), (0, True)])
def test_a_quota_that_is_used_up_has_no_room_for_a_save(free_bytes: int, is_told: bool) -> None:
    quota = WatchedQuota(owner="group llm", left=DiskSample(NOW, free_bytes, 5), forecast=None)
    verdict = RunVerdict(state=RunStatus.RUNNING)
    seen = WatchedRun(path="r", verdict=verdict, now=NOW, since=NOW, quotas=[quota], save_bytes=7)
    kinds = [condition.kind for condition in conditions_of(seen, WatchLimits())]
    assert kinds == ["no quota for a save (group llm)"] * is_told


def test_a_run_is_judged_by_the_limits_of_its_watcher(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, limits = list[object](), WatchLimits(idle_s=5.0)
    monkeypatch.setattr(watcher, "conditions_of", lambda seen, limits: told.append(limits) or [])
    for more in ({"limits": limits}, {}):
        watching = RunWatcher(run, send=lambda alert: None, **more)
        watching.check(now=NOW)
        watching.close()
    assert told == [limits, WatchLimits()] and limits != WatchLimits()
