"""When a job must leave: its limit, the scheduler's signal, measured saves, and notices of maintenance."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from tests.faults.commands import events, running, steps_told, wait_for

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.departure import (
    EXIT_UNMEASURED_S,
    Departure,
    SaveTimes,
    measured_save,
    time_to_leave_s,
)
from bloomery.operate.maintenance import (
    MaintenanceNotice,
    notices_of_files,
)
from bloomery.operate.schedulers.interface import SchedulerError


def departure(run: RunDirectory, end: Callable[[], float | None] = lambda: None, **more) -> Departure:
    given = {"notices": (), "ahead_s": 1800.0, "unmeasured_s": 300.0}
    return Departure(run, end_of_job=end, **{**given, **more})


def test_the_last_save_is_given_three_times_the_longest_measured_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    assert measured_save(run) == SaveTimes(save_s=None, step_s=0.0)
    assert time_to_leave_s(measured_save(run), unmeasured_s=300.0) == 300.0
    with Journal(run.journal()) as journal:
        journal.write("step", incarnation=1, step=1, seconds=4.0)
        journal.write("checkpoint", incarnation=1, step=1)
    lines = [json.loads(line) for line in run.journal().read_text().splitlines()]
    lines[1]["time"] = lines[0]["time"] + 6.0
    run.journal().write_text("".join(json.dumps(line) + "\n" for line in lines))
    times = measured_save(run)
    assert (times.save_s, times.step_s) == (pytest.approx(6.0), 4.0)
    assert time_to_leave_s(times, unmeasured_s=300.0) == pytest.approx(30.0 + EXIT_UNMEASURED_S)
    with Journal(run.journal()) as journal:
        journal.write("end", incarnation=1, step=1, reason="signal SIGTERM", finished=False)
    with Journal(run.operations) as journal:
        journal.write("attempt_end", incarnation=0, step=1, attempt="a", status=143)
    gone = json.loads(run.operations.read_text())
    run.operations.write_text(json.dumps({**gone, "time": gone["time"] + 5.0}) + "\n")
    assert measured_save(run).exit_s == pytest.approx(5.0, abs=0.5)
    assert time_to_leave_s(measured_save(run), unmeasured_s=300.0) == pytest.approx(40.0, abs=1.0)
    end = time.time() + 100.0
    watch = departure(run, lambda: end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: end - 100.0)
        assert watch.check() == ""
        patch.setattr(time, "time", lambda: end - 38.0)
        assert "the last save is given 40 s" in watch.check()


def test_a_save_during_which_the_clock_was_set_back_is_not_measured(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    events = [
        {"event": "step", "time": 5000.0, "step": 1},
        {"event": "checkpoint", "time": 1400.0, "step": 1},
    ]
    run.journal().write_text("".join(json.dumps(event) + "\n" for event in events))
    assert measured_save(run).save_s is None
    assert time_to_leave_s(measured_save(run), unmeasured_s=300.0) == 300.0


def test_a_save_that_took_longer_than_the_job_leaves_half_of_it_for_training(tmp_path: Path) -> None:
    run, end = RunDirectory(tmp_path).create(), time.time() + 100.0
    with Journal(run.journal()) as journal:
        journal.write("step", incarnation=1, step=1, seconds=90.0)
        journal.write("checkpoint", incarnation=1, step=1)
    watch = departure(run, lambda: end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: end - 100.0)
        assert watch.check() == ""
        patch.setattr(time, "time", lambda: end - 45.0)
        assert "the last save is given 50 s" in watch.check()


def test_a_short_job_that_has_measured_no_save_trains_three_quarters_of_its_time(tmp_path: Path) -> None:
    end = time.time() + 100.0
    watch = departure(RunDirectory(tmp_path).create(), lambda: end)
    assert watch.check() == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: end - 20.0)
        assert "the last save is given 25 s" in watch.check()


def test_the_signal_counts_where_the_scheduler_does_not_say_when_the_job_ends(tmp_path: Path) -> None:
    def silent() -> float:
        raise SchedulerError("SLURM does not answer")

    known, unknown = (
        departure(RunDirectory(tmp_path), lambda: time.time() + 3600.0),
        departure(RunDirectory(tmp_path), silent),
    )
    for one in (known, unknown):
        one.warned()
    assert (known.check(), "signalled" in unknown.check()) == ("", True)


def test_maintenance_counts_from_half_an_hour_ahead(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    notices: list[MaintenanceNotice] = []
    watch = departure(run, notices=(lambda: notices,), poll_s=0.0)
    notices.append(MaintenanceNotice(at=time.time() + 1900.0, what="later"))
    assert watch.check() == ""
    notices.append(MaintenanceNotice(at=time.time() + 1700.0, what="soon"))
    assert watch.check() == "maintenance: soon"
    file = run.control_dir / "maintenance"
    file.write_text("2031-05-06T07:08\n")
    (notice,) = notices_of_files([file, run.control_dir / "none"])
    assert notice.at == datetime(2031, 5, 6, 7, 8).timestamp()
    begun = datetime(2031, 5, 6, 7, 8).timestamp()
    assert notices_of_files([file], after=begun - 1.0) == [notice] == notices_of_files([file], after=begun)
    assert notices_of_files([file], after=begun + 1.0) == [], "a job that starts later trains"
    file.write_text("")
    assert notices_of_files([file], after=begun + 1.0)[0].at == 0.0


def test_a_supervised_run_saves_and_ends_well_when_maintenance_is_announced(
    train_command: Callable[..., list[str]], tmp_path: Path
) -> None:
    command = ["launch", *train_command("train.samples=200000")[1:], "--nproc", "1", "--supervise"]
    run = RunDirectory(tmp_path / "run")
    with running(*command, log=tmp_path / "log") as launcher:
        launcher.wait_until(lambda: steps_told(run.path) >= 3)
        run.control_dir.mkdir(exist_ok=True)
        (run.control_dir / "maintenance").touch()
        said = launcher.ended()
    assert said.status == 0 and "maintenance: " in said.err, said
    assert checkpoints(run)[-1].step == steps_told(run.path) and events(run.path, "end")


def test_a_source_of_notices_that_breaks_does_not_keep_a_job_from_leaving(tmp_path: Path) -> None:
    asked: list[int] = []

    def breaks_once() -> list[MaintenanceNotice]:
        asked.append(1)
        if len(asked) == 1:
            raise AttributeError("'str' object has no attribute 'get'")
        return [MaintenanceNotice(at=0.0, what="now")]

    with departure(RunDirectory(tmp_path).create(), notices=(breaks_once,), poll_s=0.01) as watch:
        wait_for(lambda: watch.reason == "maintenance: now")


def test_an_unreadable_journal_counts_as_one_without_saves(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    run.journal().mkdir()
    end = time.time() + 5.0
    assert "the job ends in" in departure(run, lambda: end).check()


def test_the_schedulers_signal_asks_at_once_for_an_end_that_has_changed(tmp_path: Path) -> None:
    end = time.time() + 3600.0
    watch = departure(RunDirectory(tmp_path), lambda: end)
    assert watch.check() == ""
    end = time.time() + 5.0
    assert watch.check() == "", "it is asked each minute"
    watch.warned()
    assert "the job ends in" in watch.check()


def journal(run: RunDirectory, *events: tuple[float, str, int, int], seconds: float = 1.0) -> None:
    """Write (time, event, step, incarnation)."""
    records = [
        {"event": name, "time": time, "step": step, "incarnation": incarnation, "seconds": seconds}
        for time, name, step, incarnation in events
    ]
    run.journal().write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_longest_save_and_exit_count_of_saves_that_belong_to_their_steps(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    first = [
        (10.0, "step", 5, 1),
        (17.0, "checkpoint", 5, 1),
        (20.0, "step", 6, 1),
        (23.0, "checkpoint", 6, 1),
    ]
    again = [(90.0, "step", 6, 2), (91.0, "checkpoint", 6, 2), (96.0, "checkpoint", 5, 2)]
    ends = [(100.0, "end", 6, 2), (130.0, "end", 6, 2), (200.0, "end", 6, 2)]
    journal(run, *first, *again, *ends, seconds=4.0)
    run.journal().write_text(run.journal().read_text().replace('"seconds": 4.0', '"seconds": 5.5', 1))
    with run.operations.open("w") as file:
        for time_, status in ((50.0, 143), (104.0, 143), (139.0, 0), (190.0, 137), (206.0, 130)):
            file.write(json.dumps({"event": "attempt_end", "time": time_, "status": status}) + "\n")
    assert measured_save(run) == SaveTimes(save_s=7.0, step_s=5.5, exit_s=9.0)


@pytest.mark.parametrize(
    ("times", "unmeasured_s", "needed_s"),
    [
        (SaveTimes(save_s=None, step_s=50.0), 300.0, 300.0),
        (SaveTimes(save_s=None, step_s=50.0), 4.0, 10.0),
        (SaveTimes(save_s=1.0, step_s=2.0), 300.0, 10.0 + 15.0),
        (SaveTimes(save_s=6.0, step_s=4.0, exit_s=0.5), 300.0, 30.0 + 1.0),
        (SaveTimes(save_s=6.0, step_s=4.0, exit_s=30.0), 300.0, 30.0 + 60.0),
        (SaveTimes(save_s=0.0, step_s=4.0, exit_s=0.0), 300.0, 12.0),
    ],
)
def test_a_job_leaves_in_time_for_its_last_save_and_exit(
    times: SaveTimes, unmeasured_s: float, needed_s: float
) -> None:
    assert time_to_leave_s(times, unmeasured_s=unmeasured_s) == needed_s


def test_the_length_of_a_job_is_what_was_left_when_its_end_was_first_asked(tmp_path: Path) -> None:
    run, moment = RunDirectory(tmp_path).create(), [10_000.0]
    journal(run, (1.0, "step", 1, 1), (901.0, "checkpoint", 1, 1))  # a save of 15 minutes
    watch = departure(run, lambda: 13_600.0, unmeasured_s=3.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: moment[0])
        for moment[0], leaves in ((10_000.0, False), (11_799.0, False), (11_801.0, True)):
            watch.warned()
            assert bool(watch.check()) == leaves, "half of the hour is kept for the save"


def test_a_long_job_that_has_measured_no_save_leaves_as_long_before_its_end_as_the_recipe_says(
    tmp_path: Path,
) -> None:
    watch, moment = departure(RunDirectory(tmp_path), lambda: 20_000.0, unmeasured_s=300.0), [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: moment[0])
        for moment[0], leaves in ((10_000.0, False), (19_699.0, False), (19_701.0, True)):
            assert bool(watch.check()) == leaves


def test_a_save_counts_until_a_newer_one_was_measured_however_many_steps_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path).create()
    steps = [(1000.0 + number, "step", number, 1) for number in range(3, 4000)]
    saved = [(1.0, "step", 1, 1), (101.0, "checkpoint", 1, 1)]
    journal(run, *saved, *steps)
    assert measured_save(run).save_s is None
    watch = departure(run, lambda: 20_000.0, unmeasured_s=60.0)
    monkeypatch.setattr(time, "time", lambda: 10_000.0)
    assert watch.check() == ""
    journal(run, *steps)
    for moment, leaves in ((19_681.0, False), (19_683.0, True)):  # 3 × (100 s and a step), and 15 s
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        assert bool(watch.check()) == leaves
    journal(run, *steps, (9000.0, "step", 4000, 1), (9010.0, "checkpoint", 4000, 1))
    assert watch.check() == ""


def test_a_source_that_does_not_answer_lets_no_end_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, may_answer, asked = RunDirectory(tmp_path).create(), threading.Event(), threading.Event()
    answered: list[int] = []
    journal(run, (1.0, "step", 1, 1), (2.0, "checkpoint", 1, 1))

    def late() -> list[MaintenanceNotice]:
        asked.set()
        may_answer.wait(60.0)
        answered.append(1)
        return []

    moment = [10_000.0]
    monkeypatch.setattr(time, "time", lambda: moment[0])
    with departure(run, lambda: 20_000.0, notices=(late,), poll_s=0.01) as watch:
        assert asked.wait(60.0) and watch.reason == ""
        moment[0] = 19_995.0
        wait_for(lambda: watch.reason or answered)
        assert watch.reason == "the job ends in 5 s, and the last save is given 25 s"
        may_answer.set()


def test_an_end_that_nobody_tells_any_more_is_the_one_that_was_told_before(tmp_path: Path) -> None:
    answers = [time.time() + 5.0]

    def asked() -> float:
        if not answers:
            raise SchedulerError("SLURM does not answer")
        return answers.pop()

    watch = departure(RunDirectory(tmp_path), asked)
    for _ in range(2):
        assert "the job ends in" in watch.check()
        watch.warned()


def test_sources_of_notices_are_asked_every_few_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, clock = list[float](), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    watch = departure(RunDirectory(tmp_path), notices=(lambda: asked.append(clock[0]) or [],), poll_s=1.0)
    for clock[0] in (100.0, 104.9, 105.0, 106.0, 110.0):
        assert watch.check() == ""
    assert asked == [100.0, 105.0, 110.0]


def test_a_source_that_does_not_answer_hides_no_other(tmp_path: Path) -> None:
    def silent() -> list[MaintenanceNotice]:
        raise SchedulerError("SLURM does not answer")

    watch = departure(
        RunDirectory(tmp_path), notices=(silent, lambda: [MaintenanceNotice(at=0.0, what="now")])
    )
    assert watch.check() == "maintenance: now"


@pytest.mark.parametrize(("status", "exit_s"), [(0, 4.0), (130, 4.0), (143, 4.0), (137, None), (1, None)])
def test_an_exit_is_that_of_an_attempt_that_saved_and_stopped(
    tmp_path: Path, status: int, exit_s: float | None
) -> None:
    run = RunDirectory(tmp_path).create()
    journal(run, (100.0, "end", 6, 1))
    run.operations.write_text(json.dumps({"event": "attempt_end", "time": 104.0, "status": status}) + "\n")
    assert measured_save(run).exit_s == exit_s


def test_an_attempt_that_never_trained_does_not_take_the_end_of_the_one_before_for_its_own(
    tmp_path: Path,
) -> None:
    run = RunDirectory(tmp_path).create()
    journal(run, (100.0, "end", 6, 1))
    attempts = [("attempt", 10.0, "a"), ("attempt_end", 104.0, "a"), ("attempt", 90_000.0, "b")]
    attempts += [("attempt_end", 90_020.0, "b")]  # a signal came while its ranks loaded
    with run.operations.open("w") as file:
        for name, time_, attempt in attempts:
            record = {"event": name, "time": time_, "attempt": attempt, "status": 143}
            file.write(json.dumps(record) + "\n")
    assert measured_save(run).exit_s == 4.0


def test_a_damaged_line_does_not_keep_a_job_from_leaving(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    journal(run, (10.0, "step", 5, 1), (17.0, "checkpoint", 5, 1), (20.0, "end", 5, 1))
    damaged = [
        '{"event": "step"}',
        '{"event": "step", "time": null, "step": [1], "seconds": null}',
        '{"event": "step", "time": 1.0, "step": [1], "seconds": null}',
        '{"event": "end", "time": "noon"}',
        "[" * 100_000,
    ]
    run.journal().write_text("\n".join([*damaged, run.journal().read_text()]))
    run.operations.write_text('{"event": "attempt_end", "status": 0}\n')
    assert measured_save(run) == SaveTimes(save_s=7.0, step_s=1.0, exit_s=None)
    assert "the job ends in" in departure(run, lambda: time.time() + 5.0).check()


def test_operations_that_cannot_be_read_count_as_ones_without_exits(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    journal(run, (10.0, "step", 5, 1), (17.0, "checkpoint", 5, 1), (20.0, "end", 5, 1))
    run.operations.mkdir()
    assert measured_save(run) == SaveTimes(save_s=7.0, step_s=1.0, exit_s=None)


def test_a_job_that_should_have_ended_already_is_told_with_no_time_left(tmp_path: Path) -> None:
    assert (
        departure(RunDirectory(tmp_path), lambda: time.time() - 5.0).check().startswith("the job ends in 0 s")
    )


def test_a_watch_may_be_closed_before_it_began_and_its_thread_has_ended_after_it(tmp_path: Path) -> None:
    departure(RunDirectory(tmp_path)).close()
    with departure(RunDirectory(tmp_path), poll_s=0.01) as watch:
        assert all(thread.is_alive() for thread in watch._threads)
    assert not any(thread.is_alive() for thread in watch._threads)


def test_what_hinders_a_judgement_is_logged_once_until_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [KeyError("a"), KeyError("a"), ValueError("b"), KeyError("a")]

    def judge() -> str:
        if errors:
            raise errors.pop(0)
        return "the job ends"

    watch = departure(RunDirectory(tmp_path), poll_s=0.0)
    watch.judge = judge  # type: ignore[method-assign]
    watch._repeat(watch._decide)
    assert watch.reason == "the job ends"
    assert [message.rpartition("leave: ")[2] for message in caplog.messages] == [
        "KeyError: 'a'",
        "ValueError: b",
        "KeyError: 'a'",
    ]


def test_a_scheduler_that_does_not_answer_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def silent() -> float:
        raise SchedulerError("SLURM does not answer")

    watch = departure(RunDirectory(tmp_path), silent)
    for _ in range(3):
        assert watch.check() == ""
        watch._asked_end = float("-inf")
    assert caplog.text.count("SLURM does not answer") == 1
