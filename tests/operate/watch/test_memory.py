"""What a watcher keeps for the next one: incidents, alerts that are owed, acknowledgements, and its life."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from tests.operate.watch.test_watcher import a_run, beat

from bloomery.config.load import dump_recipe, load_recipe
from bloomery.errors import RunBusy, StorageError
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.run_state import RunStatus, RunVerdict
from bloomery.operate.schedulers.interface import QueuedJob
from bloomery.operate.watch import observe
from bloomery.operate.watch.alerts import Alert, AlertRules, AlertWord, OpenIncident, WatchCondition
from bloomery.operate.watch.disk import DiskSample
from bloomery.operate.watch.watcher import RunWatcher, acknowledge

NOW = 1e9


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return a_run(tmp_path / "mine", beat_age_s=600)


def watcher(run: RunDirectory, send: Callable[[Alert], Alert | None] = lambda alert: None) -> RunWatcher:
    return RunWatcher(run, send, rules=AlertRules(escalate_s=1e6, settle_s=0.0))


def die(watching: RunWatcher) -> None:
    """End a watcher as the kernel does: its lock is free, and it has said nothing."""
    os.close(watching._lock)


@pytest.mark.parametrize(
    ("looks", "silent_s"),
    [((0, 10, 130), 0.0), ((0, 10, 131), 121.0), ((0, 100, 400), 0.0), ((0, 100, 401), 301.0)],
)
def test_a_watcher_is_missed_after_three_of_its_gaps_and_two_minutes_at_least(
    run: RunDirectory, looks: tuple[int, int, int], silent_s: float
) -> None:
    *before, after = looks
    first = watcher(run)
    for look in before:
        first.check(now=NOW + look)
    die(first)
    later = watcher(run)
    told = [alert.condition for alert in later.check(now=NOW + after) if alert.condition.kind == "watcher"]
    later.close()
    assert len(told) == (silent_s > 0.0)


def test_a_watcher_that_ended_as_it_should_is_not_missed(run: RunDirectory) -> None:
    first = watcher(run)
    first.check(now=NOW)
    with pytest.raises(RunBusy):
        watcher(run)
    first.close()
    later = watcher(run)
    assert [alert for alert in later.check(now=NOW + 9999) if alert.condition.kind == "watcher"] == []
    later.close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_keeps_nobody_from_watching(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with nullcontext() if number == errno.ENOLCK else pytest.raises(StorageError, match="Input/output"):
        watching = watcher(run)
        assert [alert.condition.kind for alert in watching.check(now=NOW)] == ["gone"]
        watching.close()


def test_what_is_owed_is_sent_by_the_next_watcher_to_those_who_have_not_taken_it(run: RunDirectory) -> None:
    first = watcher(run, lambda alert: replace(alert, owed=(1, 3)))
    (raised,) = first.check(now=NOW)
    die(first)
    sent: list[Alert] = []
    later = watcher(run, sent.append)
    later.check(now=NOW + 10)
    later.close()
    assert sent == [replace(raised, owed=(1, 3))]


def test_the_newest_hundred_alerts_are_owed_and_no_more(run: RunDirectory) -> None:
    watching = watcher(run, lambda alert: alert)
    old = Alert(run="x", word=AlertWord.RAISED, condition=WatchCondition(kind="old", line=""), began=0.0)
    watching._unsent = [replace(old, began=float(number)) for number in range(100)]
    (raised,) = watching.check(now=NOW)
    assert [alert.began for alert in watching._unsent[:-1]] == list(map(float, range(1, 100)))
    assert watching._unsent[-1] == raised
    watching.close()


def test_the_next_watcher_knows_since_when_and_what_was_free(run: RunDirectory) -> None:
    first = watcher(run)
    first.check(now=NOW)
    samples = [DiskSample(NOW - 60.0 * left, 7 << 30, 9) for left in (3, 2, 1)]
    first._observer.disks, first._observer.quotas = list(samples), {"group llm": samples[:2]}
    first.check(now=NOW + 30)
    first.close()
    later = watcher(run)
    assert (later._observer.since, later.state) == (NOW, "gone")
    assert later._observer.disks[:3] == samples and later._observer.quotas == {"group llm": samples[:2]}
    assert later.check(now=NOW + 60) == [], "the incident is known"
    (kept,) = later.incidents.values()
    assert (kept.began, kept.seen, kept.told) == (NOW, NOW + 60, NOW)
    later.close()


def cron(run: RunDirectory, *minutes: float) -> list[set[str]]:
    """Look at a run after so many minutes, each time with a watcher of its own; returns what was open."""
    shown = []
    for after in minutes:
        beat(run)
        watching = watcher(run)
        watching.check(now=NOW + 60.0 * after)
        watching.close()
        shown.append(set(watching.incidents))
    return shown


@pytest.mark.parametrize(
    ("kind", "silent", "first"), [("scheduler", "squeue is down", 15.0), ("queue", "", 20.0)]
)
def test_a_silent_scheduler_and_a_short_queue_are_told_as_soon_by_cron_as_by_a_service(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, kind: str, silent: str, first: float
) -> None:
    answer: list[tuple[list[QueuedJob], str]] = [([], silent)]
    monkeypatch.setattr(observe, "jobs_of_run", lambda rundir, recipe: answer[-1])
    run.recipe.write_text(dump_recipe(load_recipe("demo", ["submit.keep_queued=1"]).recipe))
    looks = [0.0, 10.0, 15.0, 20.0]
    assert cron(run, *looks) == [{kind} if look >= first else set() for look in looks]
    service = watcher(RunDirectory(a_run(run.path.parent / "served").path))
    service.rundir.recipe.write_text(run.recipe.read_text())
    for look in looks:
        beat(service.rundir)
        service.check(now=NOW + 60.0 * look)
        assert (kind in service.incidents) == (look >= first)
    service.close()
    assert cron(run, 20.0 + 61.0) == [set()], "in an hour without a look it may have been well"
    monkeypatch.setattr(observe, "jobs_of_run", lambda rundir, recipe: ([], ""))
    assert cron(run, 20.0 + 66.0, 20.0 + 71.0) == [set(), set()]
    monkeypatch.setattr(observe, "jobs_of_run", lambda rundir, recipe: answer[-1])
    seldom = cron(run, 400.0, 700.0, 1000.0)
    assert seldom == [set(), {kind}, {kind}], "where each look is hours after the last they are no gap"


def test_a_save_and_a_finding_count_for_cron_however_many_steps_follow_them(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "sample_disk", lambda path, *, now: DiskSample(now, 60, -1))
    save = run.checkpoints / "step-000500.i001"
    save.mkdir(parents=True)
    (save / "weights").write_bytes(b"w" * 70)
    spike = {"event": "guard", "time": NOW, "step": 500, "guard": "spike", "action": "stop", "reason": "high"}
    saved = {"event": "checkpoint", "time": NOW, "step": 500, "path": save.name}
    run.journal().write_text("".join(json.dumps(event) + "\n" for event in (spike, saved)))
    seen = {"no room for a save", "guard spike"}
    assert cron(run, 1.0, 2.0) == [seen, seen]
    with run.journal().open("a") as journal:
        journal.write(json.dumps({"event": "step", "time": NOW, "text": " " * (2 << 20)}) + "\n")
    assert cron(run, 3.0, 35.0) == [seen, {"no room for a save"}]


def opened(watching: RunWatcher, *kinds: str) -> None:
    for kind in kinds:
        condition = WatchCondition(kind=kind, line="")
        watching.incidents[kind] = OpenIncident(condition=condition, began=NOW, seen=NOW, told=NOW)


@pytest.mark.parametrize(("kind", "known"), [("slow", {"slow"}), ("", {"slow", "backup"}), ("queue", set())])
def test_a_person_acknowledges_one_incident_or_all_of_them(run: RunDirectory, kind: str, known: set) -> None:
    watching = watcher(run)
    opened(watching, "slow", "backup")
    watching._keep()
    assert set(acknowledge(run, kind)) == known
    watching._take_acknowledged()
    assert {name for name, incident in watching.incidents.items() if incident.acknowledged} == known
    opened(watching, "slow", "backup")
    watching._take_acknowledged()
    assert not any(incident.acknowledged for incident in watching.incidents.values()), "it counts once"
    watching.close()


def test_nothing_is_acknowledged_where_nobody_watches(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    assert acknowledge(run, "") == [] and not (run.path / "watch.ack").exists()


def test_an_incident_moves_with_a_clock_that_was_set_back(run: RunDirectory) -> None:
    watching = watcher(run)
    watching.check(now=NOW)
    watching.check(now=NOW + 20)
    watching.check(now=NOW - 1000)
    (incident,) = watching.incidents.values()
    assert (incident.began, incident.told) == (NOW - 1020, NOW - 1020)
    opened(watching, "slow")
    watching._set_back(300.0)
    assert watching.incidents["slow"].seen == NOW - 300.0
    assert watching._gap_s == 20, "the gap between two looks is as it was"
    watching.close()


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ("pending running", ["pending", "running"]),
        ("held starting", ["pending", "running"]),
        ("suspended stopped", ["pending", "cancelled"]),
        ("pending held failed", ["pending", "failed"]),
        ("running stopped", []),
    ],
)
def test_the_time_in_the_queue_is_written_down_for_the_ledger(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, states: str, told: list[str]
) -> None:
    left = states.split()
    monkeypatch.setattr(
        observe, "judge_state", lambda *_, **__: RunVerdict(state=RunStatus(left.pop(0)), why="x")
    )
    watching = watcher(run)
    for look in range(len(left)):
        watching.check(now=NOW + look)
    watching.close()
    assert [event["state"] for event in read_journal(run.operations) if event["event"] == "job"] == told


def test_a_state_that_nobody_knows_is_not_over_and_one_that_is_known_is(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [RunStatus.HUNG, RunStatus.UNKNOWN, RunStatus.RUNNING]
    monkeypatch.setattr(observe, "judge_state", lambda *_, **__: RunVerdict(state=states.pop(0), why="x"))
    watching = watcher(run)
    words = [[str(alert.word) for alert in watching.check(now=NOW + look)] for look in range(3)]
    watching.close()
    assert words == [["new"], [], ["over"]]


def test_a_run_that_moves_again_is_told_to_whom_it_was_told_before(run: RunDirectory) -> None:
    watching = watcher(run)
    watching.check()
    beat(run)
    (over,) = watching.check()
    watching.close()
    assert (over.word, over.condition.kind) == (AlertWord.RESOLVED, "gone")
    record = json.loads(run.watch.read_text())
    assert (record["incidents"], record["ended"], record["state"]) == ({}, True, "running")
