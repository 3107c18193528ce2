"""One alert for each incident, again when it is ignored, and when it is over; forecasts of full disks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.operate.node_shm import NodeShm
from bloomery.operate.run_state import RunStatus, RunVerdict
from bloomery.operate.watch.alerts import (
    Alert,
    AlertRules,
    AlertWord,
    OpenIncident,
    WatchCondition,
    incidents_from_json,
    incidents_to_json,
    update,
)
from bloomery.operate.watch.conditions import WatchedRun, WatchLimits, conditions_of
from bloomery.operate.watch.disk import (
    DiskForecast,
    DiskSample,
    directory_bytes,
    does_not_fit,
    forecast_full,
    thinned,
)

RULES = AlertRules(escalate_s=100.0, settle_s=30.0)


def told(looks: list[tuple[float, list[str]]], *, rules: AlertRules = RULES) -> list[tuple[float, str, str]]:
    incidents: dict[str, OpenIncident] = {}
    alerts = []
    for now, kinds in looks:
        conditions = [WatchCondition(kind=kind, line=f"{kind} at {now}") for kind in kinds]
        incidents, new = update(incidents, conditions, run="mine", now=now, rules=rules)
        incidents = incidents_from_json(incidents_to_json(incidents))  # as between two processes
        alerts += [(now, str(alert.word), alert.condition.kind) for alert in new]
    return alerts


def test_an_incident_is_told_once_and_once_when_it_is_over() -> None:
    looks = [(0.0, ["hung"]), (15.0, ["hung"]), (30.0, []), (45.0, ["hung"]), (60.0, []), (80.0, [])]
    assert told(looks) == [(0.0, "new", "hung"), (80.0, "over", "hung")]


def test_a_run_that_hangs_and_is_then_gone_is_one_incident() -> None:
    hung, gone = (WatchCondition(kind=kind, line=kind, group="state") for kind in ("hung", "gone"))
    incidents, first = update({}, [hung], run="mine", now=0.0, rules=RULES)
    incidents, second = update(incidents, [gone], run="mine", now=15.0, rules=RULES)
    assert len(first) == 1 and second == [] and incidents["state"].condition.kind == "gone"
    _, last = update(incidents, [], run="mine", now=60.0, rules=RULES)
    assert [alert.condition.kind for alert in last] == ["gone"]


def test_what_is_ignored_is_told_again_at_doubling_times() -> None:
    looks = [(float(now), ["gone"]) for now in range(0, 800, 10)]
    assert told(looks) == [
        (0.0, "new", "gone"),
        (100.0, "still", "gone"),
        (300.0, "still", "gone"),
        (700.0, "still", "gone"),
    ]


def test_who_wants_an_alert_at_each_look_gets_it_however_often_it_was_sent() -> None:
    looks = [(float(now), ["gone"]) for now in range(1200)]
    assert len(told(looks, rules=AlertRules(escalate_s=0.0))) == 1200


def test_what_a_person_knows_is_not_told_again() -> None:
    condition = WatchCondition(kind="gone", line="x")
    known = {"gone": OpenIncident(condition=condition, began=0, seen=0, told=0, acknowledged=True)}
    incidents, alerts = update(known, [condition], run="mine", now=1e6, rules=RULES)
    assert alerts == [] and incidents["gone"].acknowledged
    _, alerts = update(incidents, [], run="mine", now=2e6, rules=RULES)
    assert [alert.word for alert in alerts] == [AlertWord.RESOLVED]


def test_an_alert_says_since_when_and_what_helps_until_it_is_over() -> None:
    condition = WatchCondition(kind="gone", line="no process", command="bloomery submit r")
    incidents, told = update({}, [condition], run="mine", now=50.0, rules=RULES)
    for now, conditions in ((150.0, [condition]), (200.0, [])):
        incidents, new = update(incidents, conditions, run="mine", now=now, rules=RULES)
        told += new
    assert [(str(alert.word), alert.began) for alert in told] == [
        ("new", 50.0),
        ("still", 50.0),
        ("over", 50.0),
    ]
    assert [alert.body for alert in told] == ["no process\nbloomery submit r"] * 2 + ["no process"]
    assert {alert.title for alert in told} == {f"[mine] {word}: gone" for word in ("new", "still", "over")}
    bare = Alert(run="mine", word=AlertWord.RAISED, condition=WatchCondition(kind="x", line="y"), began=0.0)
    assert bare.body == "y"


def test_an_incident_that_cannot_be_read_hides_no_other() -> None:
    condition = WatchCondition(kind="gone", line="x")
    kept = incidents_to_json({"gone": OpenIncident(condition=condition, began=1.0, seen=2.0, told=3.0)})
    for wrong in ({}, {"condition": {"kind": "x"}}, None):
        assert set(incidents_from_json({"wrong": wrong, **kept})) == {"gone"}
    assert incidents_from_json([]) == {}


@given(st.lists(st.tuples(st.floats(1, 60), st.sets(st.sampled_from(["a", "b"]))), max_size=40))
def test_no_incident_is_new_twice_without_being_over_between(looks: list[tuple[float, set[str]]]) -> None:
    now, timed = 0.0, []
    for gap, kinds in looks:
        now += gap
        timed.append((now, sorted(kinds)))
    for kind in ("a", "b"):
        words = [word for _, word, of in told(timed) if of == kind and word != "still"]
        assert words == ["new", "over"] * (len(words) // 2) + ["new"] * (len(words) % 2)


def filled(rate: float, *, hours: float, every_s: float = 60.0, save: float = 0.0) -> list[DiskSample]:
    """A disk of 1 TB whose logs grow at `rate` bytes a second; checkpoints come and go each hour."""
    rng, samples = random.Random(1), list[DiskSample]()
    for count in range(int(hours * 3600 / every_s)):
        time = count * every_s
        taken = save if time % 3600 > 1800 else 0.0
        free = 1e12 - rate * time - taken + rng.gauss(0, 1e6)
        samples = thinned(samples, DiskSample(time, int(free), -1))
    return samples


@pytest.mark.parametrize("save", [0.0, 2e9])
def test_a_full_disk_is_forecast_within_a_tenth_of_the_truth(save: float) -> None:
    samples = filled(1e7, hours=12, save=save)
    assert len(samples) <= 288 and samples[0].time == 0.0
    forecast = forecast_full(samples)
    assert forecast is not None and forecast.what == "space"
    truth_s = (1e12 - save / 2 - 1e7 * samples[-1].time) / 1e7
    assert forecast.full_in_s == pytest.approx(truth_s, rel=0.1)


@pytest.mark.parametrize("seconds", [60, 70, 90, 120])
def test_saves_that_come_and_go_do_not_sway_a_short_forecast(seconds: int) -> None:
    for phase in range(0, 20, 3):
        samples = list[DiskSample]()
        for time in range(seconds + 1):
            save = 8 if (time + phase) % 20 >= 11 else 0
            samples = thinned(samples, DiskSample(float(time), (256 - time - save) << 20, -1))
        forecast = forecast_full(samples)
        assert forecast is not None
        full = next(time for time in range(999) if time + (8 if (time + phase) % 20 >= 11 else 0) >= 256)
        assert forecast.full_in_s == pytest.approx(full - seconds, rel=0.1), phase


def test_inodes_run_out_too_and_a_disk_that_empties_does_not() -> None:
    samples = [DiskSample(60.0 * count, 10**12, 100_000 - 100 * count) for count in range(100)]
    forecast = forecast_full(samples)
    assert forecast is not None and forecast.what == "inodes"
    assert forecast.full_in_s == pytest.approx((100_000 - 9_900) / 100 * 60)
    assert forecast_full([DiskSample(60.0 * count, 10**9 + count, -1) for count in range(100)]) is None
    assert forecast_full(samples[:3]) is None


def test_a_disk_that_the_next_save_fills_is_full_now() -> None:
    samples = [
        DiskSample(60.0 * minute, (201 - 2 * minute - (8 if minute % 5 == 0 else 0)) << 20, -1)
        for minute in range(100)
    ]
    forecast = forecast_full(samples)
    assert forecast is not None and forecast.full_in_s == 0.0


def test_the_forecast_is_of_the_whole_time_and_not_of_its_beginning() -> None:
    def left_s(faster: int) -> float:
        free, samples = 10**12, list[DiskSample]()
        for minute in range(288):
            samples.append(DiskSample(60.0 * minute, free, -1))
            free -= 10**8 * (faster if minute > 144 else 1)
        forecast = forecast_full(samples)
        assert forecast is not None
        return forecast.full_in_s

    assert left_s(9) < 0.5 * left_s(1)


def test_of_space_and_inodes_the_one_that_runs_out_first_is_told() -> None:
    for space_left, inodes_left, first in ((200, 500, "space"), (500, 200, "inodes")):
        samples = [
            DiskSample(60.0 * count, (space_left - count) << 30, 1000 * (inodes_left - count))
            for count in range(100)
        ]
        forecast = forecast_full(samples)
        assert forecast is not None and forecast.what == first
        assert forecast.full_in_s == pytest.approx(60.0 * 101, rel=0.05)


def test_the_bytes_of_a_checkpoint_are_those_of_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for name, size in (("a", 300), ("b", 7), ("below/c", 10_000)):
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert directory_bytes(tmp_path) == 307 and directory_bytes(tmp_path / "gone") == 0


def test_what_was_freed_begins_a_new_forecast() -> None:
    falling = [DiskSample(60.0 * count, 10**12 - 10**9 * count, -1) for count in range(60)]
    freed = [DiskSample(3600 + 60.0 * count, 10**12 - 5 * 10**8 * count, -1) for count in range(60)]
    forecast = forecast_full([*falling, *freed])
    assert forecast is not None
    assert forecast.full_in_s == pytest.approx((10**12 - 295 * 10**8) / (5 * 10**8) * 60, rel=0.1)


def test_a_minute_says_nothing_of_a_day() -> None:
    seen = [DiskSample(15.0 * count, 10**12 - 10**7 * 15 * count, -1) for count in range(5)]
    assert forecast_full(seen) is None, "it would be full in 28 hours at this pace"


def seen(state: RunStatus = RunStatus.RUNNING, *, since: float = 0.0, **fields) -> list[WatchCondition]:
    run = WatchedRun(
        path="runs/mine", verdict=RunVerdict(state=state, why="why"), now=10_000.0, since=since, **fields
    )
    return conditions_of(run, WatchLimits(pending_s=3600, idle_s=7200, disk_s=86400))


def test_states_that_a_person_should_look_at_are_conditions_with_a_command() -> None:
    for state in (RunStatus.HUNG, RunStatus.GONE, RunStatus.FAILED, RunStatus.HELD, RunStatus.NEVER):
        (condition,) = seen(state)
        assert condition.kind == str(state) and condition.line == "why" and "bloomery" in condition.command
    assert seen(RunStatus.RUNNING) == seen(RunStatus.FINISHED) == []
    assert [condition.kind for condition in seen(RunStatus.PENDING)] == ["pending too long", "not running"]
    assert [condition.kind for condition in seen(RunStatus.PENDING, since=5000.0)] == ["pending too long"]
    assert seen(RunStatus.PENDING, since=9000.0) == []
    assert [condition.kind for condition in seen(RunStatus.STOPPED)] == ["not running"]


def test_disks_saves_guards_speed_and_a_silent_watcher_are_conditions() -> None:
    full = DiskSample(0.0, 10, -1)
    assert does_not_fit(full, 10) and not does_not_fit(full, 9) and not does_not_fit(full, 0)
    kinds = {
        "no room for a save": {"disk": full, "save_bytes": 10},
        "shm": {"shm_used": 0.95},
        "saves fail": {"failed_save": "no space"},
        "no checkpoint": {"saves": [0.0, 100.0, 200.0], "since": 300.0},
        "backup": {"unsaved_copy_s": 8000.0},
        "guard spike": {"guards": [(9000.0, "spike", "the loss rose")]},
        "slow": {"step_s": [3.0] * 5, "usual_step_s": [1.0] * 50},
        "watcher": {"silent_s": 500.0},
    }
    for kind, fields in kinds.items():
        assert [condition.kind for condition in seen(**fields)] == [kind]
    assert seen(guards=[(1.0, "spike", "long ago")]) == []
    (hostile,) = seen(failed_save="a\n\x1b[31mb\u2028c")
    assert hostile.line == "a [31mb c"


FULL = {"what": "space", "full_in_s": 86400.0}


@pytest.mark.parametrize(
    ("kind", "at_limit", "beyond", "words"),
    [
        ("scheduler", {"unheard": "down", "unheard_s": 600.0}, {"unheard_s": 601.0}, ("10.0 min: down",)),
        ("queue", {"jobs": 1, "wanted_jobs": 3, "short_s": 900.0}, {"short_s": 901.0},
            ("1 of 3 jobs", "when it ends nothing follows", "bloomery submit runs/mine")),
        ("queue", {"jobs": 0, "wanted_jobs": 3, "short_s": 900.0}, {"short_s": 901.0}, ("nothing trains",)),
        ("disk space", {"forecast": DiskForecast(**FULL)},
            {"forecast": DiskForecast(**FULL | {"full_in_s": 86399.0})},
            ("disk is full in 24.0 h", "df -h runs/")),
        ("disk inodes", {"forecast": DiskForecast(**FULL)},
            {"forecast": DiskForecast(what="inodes", full_in_s=60.0)},
            ("no inodes are left", "df -i runs/mine")),
        ("no room for a save", {"disk": DiskSample(0.0, 3 << 30, -1), "save_bytes": 2 << 30},
            {"save_bytes": 3 << 30}, ("3.00 GiB, and 3.00 GiB are free", "bloomery ckpt list runs/mine")),
        ("shm", {"shm_used": 0.9}, {"shm_used": 0.91}, ("91% full",)),
        ("node shm", {"shm": [NodeShm(host="n7", free_bytes=2 << 30, total_bytes=20 << 30)]},
            {"shm": [NodeShm(host="n7", free_bytes=1 << 30, total_bytes=20 << 30)]},
            ("nearly full on n7 (95% used, 1.00 of 20.00 GiB free): remove", "on n7: ls -lS /dev/shm")),
        ("backup", {"unsaved_copy_s": 7200.0}, {"unsaved_copy_s": 7201.0}, ("2.0 h",)),
        ("slow", {"step_s": [3.0, 3.0, 9.0], "usual_step_s": [2.0, 2.0, 0.1]}, {"step_s": [3.2, 3.2, 0.1]},
            ("3.2 s, and took 2 s",)),
        ("peers", {"awaited_s": 0.0}, {"awaited_s": 0.1, "peers_command": "look"}, ("other peers", "; look")),
        ("guard spike", {"guards": [(8199.0, "spike", "the loss rose")]},
            {"guards": [(8200.0, "spike", "the loss rose")]}, ("the loss rose",)),
        ("no checkpoint", {"saves": [4000.0, 6000.0, 7000.0]}, {"saves": [2000.0, 3000.0, 6900.0, 6990.0]},
            ("no checkpoint for 50.2 min; they came every 16.7 min", "bloomery save runs/mine")),
        ("no checkpoint", {"saves": [8000.0, 8100.0, 8200.0]}, {"saves": [8000.0, 8100.0, 8199.0]},
            ("30.0 min",)),
        ("watcher", {"silent_s": 0.0}, {"silent_s": 0.1}, ("bloomery watch runs/mine",)),
    ],
)  # fmt: skip
def test_each_condition_begins_beyond_its_limit_and_says_what_helps(
    kind: str, at_limit: dict, beyond: dict, words: tuple[str, ...]
) -> None:
    assert seen(**at_limit) == []
    (condition,) = seen(**at_limit | beyond)
    assert condition.kind == kind
    assert all(part in f"{condition.line}; {condition.command}" for part in words), condition


def test_a_run_that_does_not_run_owes_no_checkpoint_and_two_saves_tell_of_no_rhythm() -> None:
    saves = [0.0, 100.0, 200.0]
    assert seen(saves=saves[:2]) == [] and seen(RunStatus.FINISHED, saves=saves) == []
    assert seen(step_s=[9.0]) == seen(usual_step_s=[1.0]) == []
    assert [condition.kind for condition in seen(saves=saves)] == ["no checkpoint"]
    assert [condition.kind for condition in seen(saves=saves, failed_save="no room")] == ["saves fail"]


def test_the_remedy_of_a_state_is_its_command_and_a_long_line_is_cut() -> None:
    verdict = RunVerdict(state=RunStatus.HUNG, why="x" * 500, remedy="cancel job 7; the next goes on")
    limits = WatchLimits(idle_s=1.0)
    (condition,) = conditions_of(WatchedRun(path="r", verdict=verdict, now=9e5, since=0.0), limits)
    assert condition.command == verdict.remedy and condition.group == "state"
    assert len(condition.line) == 400 and condition.line == "x" * 399 + "…"
    exact = WatchedRun(path="r", verdict=RunVerdict(state=RunStatus.GONE, why="y" * 400), now=1.0, since=0.0)
    assert conditions_of(exact, limits)[0].line == "y" * 400


def test_a_run_that_has_just_started_again_owes_no_checkpoint_for_the_time_that_it_was_away() -> None:
    saves = [0.0, 100.0, 200.0]  # it is 10,000 by now
    assert seen(saves=saves, since=9000.0) == []
    assert [condition.kind for condition in seen(saves=saves, since=8000.0)] == ["no checkpoint"]


def test_what_nobody_acknowledges_is_told_again_after_half_an_hour_and_an_hour_more() -> None:
    looks = [(now, ["slow"]) for now in (0.0, 1799.0, 1800.0, 5399.0, 5400.0)]
    over: list[tuple[float, list[str]]] = [(5429.0, []), (5430.0, [])]
    assert told([*looks, *over], rules=AlertRules()) == [
        (0.0, "new", "slow"), (1800.0, "still", "slow"), (5400.0, "still", "slow"), (5430.0, "over", "slow")
    ]  # fmt: skip


def test_a_run_that_waits_or_that_its_time_limit_stopped_is_told_of_beyond_the_limit() -> None:
    def kinds(verdict: RunVerdict, now: float, *, idle_s: float | None = None) -> list[str]:
        run = WatchedRun(path="r", verdict=verdict, now=now, since=0.0)
        return [condition.kind for condition in conditions_of(run, WatchLimits(idle_s=idle_s))]

    stopped = RunVerdict(state=RunStatus.STOPPED, why="its time was over", is_at_limit=True)
    assert [kinds(stopped, now) for now in (900.0, 901.0)] == [[], ["nothing follows"]]
    waits = RunVerdict(state=RunStatus.PENDING)
    assert [kinds(waits, now) for now in (3600.0, 3601.0)] == [[], ["pending too long"]]
    assert [kinds(waits, now, idle_s=60.0) for now in (60.0, 61.0)] == [[], ["not running"]]


@pytest.mark.parametrize(
    ("kind", "at_limit", "beyond"),
    [
        ("guard spike", {"guards": [(9959.0, "spike", "x")]}, {"guards": [(9960.0, "spike", "x")]}),
        ("no checkpoint", {"saves": [9932.0, 9941.0, 9950.0]}, {"saves": [9931.0, 9940.0, 9949.0]}),
        ("no checkpoint", {"saves": [9800.0, 9850.0, 9900.0]}, {"saves": [9700.0, 9719.0, 9738.0]}),
        ("backup", {"unsaved_copy_s": 60.0}, {"unsaved_copy_s": 61.0}),
        ("scheduler", {"unheard_s": 70.0}, {"unheard_s": 71.0}),
        ("queue", {"short_s": 80.0}, {"short_s": 81.0}),
        ("slow", {"step_s": (2.0,), "usual_step_s": (1.0,)}, {"step_s": (2.1,)}),
        ("disk space", {"forecast": DiskForecast(what="space", full_in_s=30.0)},
            {"forecast": DiskForecast(what="space", full_in_s=29.0)}),
    ],
)  # fmt: skip
def test_each_condition_has_the_limit_of_its_own(kind: str, at_limit: dict, beyond: dict) -> None:
    limits = WatchLimits(
        disk_s=30.0, guard_s=40.0, save_times=5.0, save_least_s=50.0, backup_s=60.0, unheard_s=70.0,
        short_s=80.0, limit_s=90.0, slow_times=2.0,
    )  # fmt: skip
    verdict = RunVerdict(state=RunStatus.RUNNING)

    def kinds(**fields: Any) -> list[str]:
        run = WatchedRun(path="r", verdict=verdict, now=10_000.0, **{"since": 0.0, **fields})
        return [condition.kind for condition in conditions_of(run, limits)]

    assert (kinds(**at_limit), kinds(**at_limit | beyond)) == ([], [kind])
    stopped = RunVerdict(state=RunStatus.STOPPED, is_at_limit=True)
    told = [
        len(conditions_of(WatchedRun(path="r", verdict=stopped, now=now, since=0.0), limits))
        for now in (90.0, 91.0)
    ]
    assert told == [0, 1]
