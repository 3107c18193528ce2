"""What a job that must leave makes of the answers that it gets, and keeps of those before them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.operate.test_departure import departure, journal

from bloomery.events.run_directory import RunDirectory
from bloomery.operate.departure import EXIT_TIMES, Departure
from bloomery.operate.schedulers.interface import SchedulerError


def test_a_job_that_was_warned_waits_for_what_the_scheduler_says_of_its_end(tmp_path: Path) -> None:
    watch = departure(RunDirectory(tmp_path), lambda: time.time() + 3600.0)
    watch.warned()
    assert watch.judge() == "", "nobody was asked yet"
    assert watch.check() == ""
    silent = departure(RunDirectory(tmp_path))
    silent.warned()
    assert silent.judge() == "" and "signalled" in silent.check()


def test_an_exit_counts_until_a_newer_one_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path).create()
    step, saved, ended = (1.0, "step", 1, 1), (4.0, "checkpoint", 1, 1), (10.0, "end", 1, 1)
    journal(run, step, saved, ended)
    run.operations.write_text(json.dumps({"event": "attempt_end", "time": 40.0, "status": 143}) + "\n")
    watch = departure(run, lambda: 20_000.0)
    monkeypatch.setattr(time, "time", lambda: 10_000.0)
    assert watch.check() == ""
    run.operations.unlink()
    needed_s = 3.0 * (3.0 + 1.0) + EXIT_TIMES * 30.0
    for moment, leaves in ((20_000.0 - needed_s - 1.0, False), (20_000.0 - needed_s + 1.0, True)):
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        assert bool(watch.check()) == leaves


def test_a_scheduler_that_is_silent_again_is_told_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[float | None] = [None, None, time.time() + 3600.0, None]

    def asked() -> float:
        answer = answers.pop(0)
        if answer is None:
            raise SchedulerError("SLURM does not answer")
        return answer

    watch = departure(RunDirectory(tmp_path), asked)
    told = []
    for _ in range(4):
        watch.warned()
        watch.ask()
        told.append(caplog.text.count("SLURM does not answer"))
    assert told == [1, 1, 1, 2]


def test_what_was_judged_once_stays_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, judged = departure(RunDirectory(tmp_path), poll_s=0.0), list[str]()
    monkeypatch.setattr(Departure, "judge", lambda watch: judged.append("x") or f"reason {len(judged)}")
    watch._repeat(watch._decide)
    assert (watch.reason, judged) == ("reason 1", ["x"])


def test_an_end_that_somebody_changes_is_noticed_within_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, clock = [time.time() + 3600.0], [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    watch = departure(RunDirectory(tmp_path), lambda: ends[-1])
    assert watch.check() == ""
    ends.append(time.time() + 5.0)
    for clock[0], leaves in ((159.0, False), (160.0, True)):
        assert bool(watch.check()) is leaves
