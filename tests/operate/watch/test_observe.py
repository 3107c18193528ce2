"""What a watcher remembers of a run between its looks, and what it forgets."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.operate.watch.test_watcher import a_run, beat

from bloomery.config.load import dump_recipe, load_recipe
from bloomery.errors import BloomeryError
from bloomery.events.heartbeat import RankActivity, RankBeat
from bloomery.events.run_directory import RunDirectory
from bloomery.operate import submission
from bloomery.operate.node_shm import NodeShm
from bloomery.operate.overview import overview
from bloomery.operate.run_state import RunStatus, RunVerdict
from bloomery.operate.schedulers.interface import JobState, QueuedJob, SchedulerError
from bloomery.operate.submission import keep_submission, submission_of
from bloomery.operate.watch import observe
from bloomery.operate.watch.conditions import WatchLimits, conditions_of
from bloomery.operate.watch.disk import DiskSample, sample_disk
from bloomery.operate.watch.observe import JournalTail, RunObserver

NOW = 1e9


def event(name: str, **fields: Any) -> dict[str, Any]:
    return {"event": name, "time": NOW, **fields}


def line(name: str, **fields: Any) -> bytes:
    return json.dumps(event(name, **fields)).encode() + b"\n"


def told(tail: JournalTail) -> list[str]:
    return [event["event"] for event in tail.read()]


def test_a_journal_is_read_from_its_whole_lines_and_anew_where_it_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(line("a") + line("b")[:-9])
    tail = JournalTail(path)
    assert told(tail) == ["a"]
    path.write_bytes(line("a") + b"no event\n[1]\n" + b"[" * 100_000 + b"\n" + line("b") + line("c"))
    assert told(tail) == ["b", "c"] and told(tail) == []
    path.write_bytes(line("d"))
    assert told(tail) == ["d"]


def test_of_a_journal_that_has_grown_by_far_too_much_the_end_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "_FIRST_BYTES", 2 * len(line("a0")))
    monkeypatch.setattr(observe, "_MOST_BYTES", 5 * len(line("a0")))
    path = tmp_path / "journal"
    path.write_bytes(b"".join(line(f"a{number}") for number in range(4)))
    tail = JournalTail(path)
    assert told(tail) == ["a2", "a3"]
    for count, read in ((5, ["b0", "b1", "b2", "b3", "b4"]), (6, ["b4", "b5"])):
        with path.open("ab") as file:
            file.write(b"".join(line(f"b{number}") for number in range(count)))
        assert told(tail) == read


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose only process is gone."""
    return a_run(tmp_path / "run", beat_age_s=600.0)


def test_the_newest_twenty_steps_are_compared_with_those_before_them(run: RunDirectory) -> None:
    observer = RunObserver(run)
    for begins in ("start", "phase"):
        observer.observe(now=NOW)
        observer._take(event(begins))
        assert not observer._step_s and not observer._usual_step_s
        for number in range(40):
            seen = observer.observe(now=NOW)
            assert (seen.step_s, len(seen.usual_step_s)) == ((), max(0, number - 20))
            observer._take(event("step", seconds=float(number)))
        seen = observer.observe(now=NOW)
        assert (seen.step_s, seen.usual_step_s) == (tuple(range(20, 40)), tuple(range(20)))


def test_guards_that_let_the_run_go_on_and_events_without_a_time_are_passed_over(run: RunDirectory) -> None:
    observer = RunObserver(run)
    for action in ("carryon", "rewind"):
        observer._take(event("guard", guard="spike", action=action, reason="9.5", step=7))
    observer._take(event("guard", guard="plateau", action="stop") | {"time": "soon"})
    assert observer.observe(now=NOW).guards == ((NOW, "spike", "step 7: rewind: 9.5"),)


def test_the_size_of_a_save_is_that_of_the_newest_checkpoint(run: RunDirectory) -> None:
    observer = RunObserver(run)
    for name, size in (("step-1", 300), ("step-2", 70)):
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / "part").write_bytes(bytes(size))
        observer._take(event("checkpoint", path=name))
    observer._take(event("checkpoint_failed", step=3, why="no room"))
    seen = observer.observe(now=NOW)
    assert (seen.save_bytes, seen.failed_save) == (70, "no checkpoint at step 3: no room")
    observer._take(event("checkpoint", path="step-1"))
    assert observer.observe(now=NOW).failed_save == ""


def job(number: int, state: JobState, **more: Any) -> QueuedJob:
    return QueuedJob(job=str(number), state=state, state_text=str(state), **more)


class Scheduled:
    """A run that wants three jobs in the queue, and the scheduler's answer: jobs, or that it is silent."""

    def __init__(self, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: list[QueuedJob] | BloomeryError = []
        run.recipe.write_text(dump_recipe(load_recipe("demo", ["submit.keep_queued=3"]).recipe))
        keep_submission(run, submission_of("demo", [], nproc=1))
        monkeypatch.setattr(
            submission, "scheduler_of", lambda *_: SimpleNamespace(jobs=lambda **_: self._jobs())
        )
        self.observer = RunObserver(run)

    def _jobs(self) -> list[QueuedJob]:
        if isinstance(self.answer, BloomeryError):
            raise self.answer
        return self.answer

    def depth(self, now: float) -> tuple[int, int, float]:
        seen = self.observer.observe(now=now)
        return seen.jobs, seen.wanted_jobs, seen.short_s


def test_a_queue_is_short_from_the_first_look_that_found_too_few_jobs_that_are_not_over(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Scheduled(run, monkeypatch)
    waiting = [job(number, JobState.PENDING) for number in (1, 2)]
    queue.answer = [*waiting, job(3, JobState.ENDED), job(4, JobState.FAILED)]
    assert queue.depth(NOW) == (2, 3, 0.0) and queue.depth(NOW + 50) == (2, 3, 50.0)
    assert queue.depth(NOW + 100) == (2, 3, 100.0)
    queue.answer = [*waiting, job(5, JobState.HELD)]
    assert queue.depth(NOW + 150) == (3, 3, 0.0)
    queue.answer = waiting
    assert queue.depth(NOW + 200) == (2, 3, 0.0) and queue.depth(NOW + 250) == (2, 3, 50.0)
    queue.answer = SchedulerError("down", remedy="")
    beat(run)
    assert queue.depth(NOW + 300) == (0, 3, 0.0), "it trains, and nobody knows what waits"


def test_each_task_of_an_array_that_waits_counts_as_a_job(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Scheduled(run, monkeypatch)
    queue.answer = [job(1, JobState.RUNNING), job(2, JobState.PENDING, tasks=8)]
    beat(run)
    assert queue.depth(NOW) == (9, 3, 0.0)


def test_a_run_that_was_stopped_wants_no_full_queue(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Scheduled(run, monkeypatch)
    verdicts = [RunVerdict(state=state) for state in (RunStatus.STOPPED, RunStatus.FINISHED)]
    for verdict in verdicts:
        assert queue.observer._queue_depth(queue.observer._current_recipe(), verdict, NOW) == (0, 3)
        assert queue.observer.short_since == 0.0
    for state in (RunStatus.RUNNING, RunStatus.STARTING, RunStatus.PENDING):
        queue.observer.forget_queue()
        queue.observer._queue_depth(queue.observer._current_recipe(), RunVerdict(state=state), NOW)
        assert queue.observer.short_since == NOW


def test_a_scheduler_is_unheard_since_it_first_did_not_answer_and_its_jobs_are_unknown(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Scheduled(run, monkeypatch)
    queue.answer = [job(7, JobState.PENDING, submitted=NOW - 500.0)]
    seen = queue.observer.observe(now=NOW)
    assert (seen.verdict.state, seen.since, seen.unheard_s) == (RunStatus.PENDING, NOW - 500.0, 0.0)
    queue.answer = SchedulerError("down", remedy="")
    for later in (50.0, 100.0, 170.0):
        seen = queue.observer.observe(now=NOW + later)
        assert (seen.unheard, seen.unheard_s, seen.jobs) == ("down", later - 50.0, 0)
        assert (queue.observer.state, seen.since) == ("pending", NOW - 500.0)
    queue.answer = [job(8, JobState.HELD, submitted=NOW + 900.0)]  # by a clock that is ahead
    seen = queue.observer.observe(now=NOW + 230.0)
    assert (seen.unheard_s, seen.since) == (0.0, NOW + 230.0)


def test_the_next_of_several_jobs_waits_since_the_one_before_it_ended_not_since_it_was_submitted(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, now = Scheduled(run, monkeypatch), time.time()
    beat(run)
    queue.answer = [job(8, JobState.PENDING, submitted=now - 72_000.0)]
    seen = queue.observer.observe(now=now + 60.0)
    assert seen.verdict.state == RunStatus.PENDING and now - 2.0 < seen.since <= now + 60.0
    assert conditions_of(seen, WatchLimits(idle_s=3600.0)) == []


def test_what_is_remembered_moves_with_a_clock_that_is_set_back(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Scheduled(run, monkeypatch)
    observer = queue.observer
    observer._take(event("checkpoint", path="a"))
    observer._take(event("guard", guard="spike", action="stop"))
    queue.answer = [job(7, JobState.PENDING, submitted=NOW - 500.0)]
    observer.observe(now=NOW)
    queue.answer = SchedulerError("down", remedy="")
    observer.observe(now=NOW + 60.0)
    observer.set_back(1000.0)
    observer._jobs_time = 0.0
    seen = observer.observe(now=NOW + 90.0 - 1000.0)
    assert (seen.since, seen.unheard_s, seen.saves) == (NOW - 1500.0, 30.0, [NOW - 1000.0])
    assert [time for time, _, _ in seen.guards] == [NOW - 1000.0]
    observer.short_since = 0.0
    observer.set_back(5.0)
    assert observer.short_since == 0.0, "it was not short"
    observer.short_since = 90.0
    observer.set_back(5.0)
    assert observer.short_since == 85.0


def test_a_recipe_is_read_again_once_it_was_written_again(run: RunDirectory) -> None:
    observer = RunObserver(run)
    for number, wanted in enumerate((3, 5)):
        run.recipe.write_text(dump_recipe(load_recipe("demo", [f"submit.keep_queued={wanted}"]).recipe))
        os.utime(run.recipe, (NOW + number, NOW + number))
        recipe = observer._current_recipe()
        assert recipe is not None and recipe.submit.keep_queued == wanted


def test_the_newest_checkpoint_is_without_a_copy_since_the_oldest_save_after_the_last_copy(
    run: RunDirectory,
) -> None:
    wants = ["backup.url=file:///elsewhere"]
    observer, recipe = RunObserver(run), load_recipe("demo", wants).recipe
    assert observer._unsaved_copy_s(recipe, NOW) == 0.0
    for after_s, name in ((100.0, "a"), (200.0, "b"), (400.0, "c")):
        observer._take({"event": "checkpoint", "time": NOW + after_s, "path": name})
    assert observer._unsaved_copy_s(recipe, NOW + 1000.0) == 900.0, "none has a copy"
    assert observer._unsaved_copy_s(load_recipe("demo").recipe, NOW + 1000.0) == 0.0
    now_and_then = load_recipe("demo", [*wants, "backup.every_steps=9"]).recipe
    assert observer._unsaved_copy_s(now_and_then, NOW + 1000.0) == 0.0
    run.backups.mkdir(exist_ok=True)
    for name, without_s in (("a", 800.0), ("b", 600.0), ("c", 0.0)):
        (run.backups / f"{name}.json").touch()
        assert observer._unsaved_copy_s(recipe, NOW + 1000.0) == without_s


def test_each_place_of_backups_is_to_have_the_checkpoints_of_its_own_cadence(run: RunDirectory) -> None:
    wants = ["backup.url=file:///near", "second_backup.url=file:///far", "second_backup.every_steps=20"]
    observer, recipe = RunObserver(run), load_recipe("demo", wants).recipe
    for step in (10, 20, 30):
        name = f"step-{step:06d}.i001"
        observer._take({"event": "checkpoint", "time": NOW + step, "path": name})
        (run.backups / f"{name}.json").parent.mkdir(exist_ok=True)
        (run.backups / f"{name}.json").touch()
    assert observer._unsaved_copy_s(recipe, NOW + 100.0) == 80.0, "step 20 is not at the second place"
    (run.backups / "step-000020.i001.second.json").touch()
    assert observer._unsaved_copy_s(recipe, NOW + 100.0) == 0.0


@pytest.mark.parametrize(("files", "inodes"), [(100, 77), (0, -1)])
def test_free_is_what_this_user_may_take(monkeypatch: pytest.MonkeyPatch, files: int, inodes: int) -> None:
    facts = SimpleNamespace(
        f_frsize=4096, f_blocks=8000, f_bavail=2000, f_bfree=3000, f_favail=77, f_files=files
    )
    monkeypatch.setattr(os, "statvfs", lambda path: facts)
    assert sample_disk(Path("/"), now=5.0) == DiskSample(5.0, 2000 * 4096, inodes)
    assert observe._used_share_here(()) == 0.75
    here = NodeShm(host=os.uname().nodename, free_bytes=1, total_bytes=2)
    assert observe._used_share_here([here]) is None, "its ranks tell of it"


def test_no_more_than_two_hundred_usual_steps_and_twenty_saves_are_remembered(run: RunDirectory) -> None:
    observer = RunObserver(run)
    observer.observe(now=NOW)  # which reads the journal so far
    for number in range(300):
        observer._take(event("step", seconds=float(number)))
        observer._take({"event": "checkpoint", "time": float(number), "path": "x"})
        observer._take({"event": "guard", "time": float(number), "guard": "g", "action": "stop"})
    seen = observer.observe(now=NOW)
    assert seen.usual_step_s == tuple(map(float, range(80, 280)))
    assert list(seen.saves) == list(map(float, range(280, 300)))
    assert [time for time, _, _ in seen.guards] == list(map(float, range(250, 300)))


def test_a_peer_that_has_waited_too_long_for_others_is_told_with_the_command_that_shows_them(
    tmp_path: Path,
) -> None:
    run, now = RunDirectory(tmp_path / "mine").create(), time.time()
    settings = ["elastic.inner_steps=5", "elastic.coordinator=http://10.0.0.9:2379", "run.name=night"]
    run.recipe.write_text(dump_recipe(load_recipe("demo", settings).recipe))
    waits = RankBeat(activity=RankActivity.WAITING_FOR_PEERS, since=now - 1000.0, time=now, host="far")
    run.heartbeat().parent.mkdir(parents=True, exist_ok=True)
    run.heartbeat().write_text(json.dumps(asdict(waits)))
    seen = RunObserver(run).observe(now=now)
    assert seen.verdict.state == RunStatus.RUNNING and 1000.0 <= seen.awaited_s < 1100.0
    assert seen.peers_command == "bloomery coordinate --status night --endpoints http://10.0.0.9:2379"
    run.recipe.write_text(dump_recipe(load_recipe("demo", ["elastic.inner_steps=5", "run.name=x"]).recipe))
    assert RunObserver(run).observe(now=now).peers_command == "bloomery coordinate --status x"
    (warning,) = overview(run).warnings
    assert warning.startswith("all ranks have waited for other peers for 1")
    run.recipe.write_text(dump_recipe(load_recipe("demo").recipe))
    assert RunObserver(run).observe(now=now).peers_command == ""


def test_when_a_disk_and_a_quota_are_full_is_foretold_from_all_looks(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(now: float) -> DiskSample:
        return DiskSample(now, int(1e9 - 1e6 * (now - NOW)), -1)

    monkeypatch.setattr(observe, "sample_disk", lambda path, *, now: left(now))
    monkeypatch.setattr(observe, "sample_quotas", lambda path, *, now: {"user a": left(now)})
    observer = RunObserver(run)
    for look in range(6):
        seen = observer.observe(now=NOW + 60.0 * look)
    (quota,) = seen.quotas
    for forecast in (seen.forecast, quota.forecast):
        assert forecast is not None and (forecast.what, forecast.full_in_s) == ("space", 700.0)
