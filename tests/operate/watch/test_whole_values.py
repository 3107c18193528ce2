"""Conditions, samples, records and messages of a watcher, as whole values."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.operate.watch.test_watcher import a_run

from bloomery.config.load import dump_recipe, load_recipe
from bloomery.errors import BloomeryError, RunBusy, StorageError
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.events.shared_memory import shared_memory_space
from bloomery.operate import submission
from bloomery.operate.node_shm import NodeShm, shm_warning
from bloomery.operate.run_state import RunObservation, RunStatus, RunVerdict
from bloomery.operate.schedulers.interface import JobState, QueuedJob
from bloomery.operate.watch import disk, notify, observe, quota
from bloomery.operate.watch import watcher as watcher_module
from bloomery.operate.watch.alerts import Alert, AlertRules, AlertWord, OpenIncident, WatchCondition
from bloomery.operate.watch.conditions import WatchedQuota, WatchedRun, WatchLimits, conditions_of
from bloomery.operate.watch.disk import DiskForecast, DiskSample, forecast_full, thinned
from bloomery.operate.watch.observe import RunObserver
from bloomery.operate.watch.quota import MountedAt
from bloomery.operate.watch.watcher import RunWatcher, acknowledge

GIB = 1 << 30


def test_all_that_is_wrong_with_a_run_is_told_in_this_order_with_what_helps() -> None:
    run = WatchedRun(
        path="r", verdict=RunVerdict(state=RunStatus.PENDING, why="Priority"), now=10_000.0, since=1_000.0,
        disk=DiskSample(0.0, 2 * GIB, 5), forecast=DiskForecast(what="space", full_in_s=60.0),
        quotas=[WatchedQuota(owner="user ann", left=DiskSample(0.0, GIB, 5),
                             forecast=DiskForecast(what="inodes", full_in_s=90.0))],
        save_bytes=3 * GIB, shm_used=0.95, failed_save="it is full", unsaved_copy_s=9_000.0,
        shm=[NodeShm(host="n7", free_bytes=GIB, total_bytes=20 * GIB)],
        guards=[(9_000.0, "spike", "old"), (9_500.0, "plateau", "flat"), (9_900.0, "spike", "new")],
        step_s=(3.0, 3.5, 4.0), usual_step_s=(1.0, 1.0), silent_s=130.0, unheard="down", unheard_s=700.0,
        jobs=1, wanted_jobs=2, short_s=1_000.0, awaited_s=1_200.0, peers_command="look",
    )  # fmt: skip
    helps = "quota -s, or lfs quota -h; bloomery ckpt list r"
    told = conditions_of(run, WatchLimits(idle_s=7_200.0))
    assert [(condition.kind, condition.line, condition.command, condition.group) for condition in told] == [
        ("pending too long", "in the queue for 2.5 h: Priority", "bloomery status r", ""),
        ("not running", "nothing has trained for 2.5 h: pending (Priority)", "bloomery status r --nodes", ""),
        ("scheduler", "the scheduler has not answered for 11.7 min: down", "bloomery status r --nodes", ""),
        ("queue", "1 of 2 jobs run or wait for 16.7 min: when it ends nothing follows",
         "bloomery submit r", ""),
        ("no room for a save", "the next checkpoint does not fit: 3.00 GiB, and 2.00 GiB are free",
         "bloomery ckpt list r", ""),
        ("disk space", "the disk is full in 60.0 s at the present pace", "df -h r; bloomery ckpt list r", ""),
        ("shm", "/dev/shm of this machine is 95% full: data loaders end with a bus error",
         "ls -lS /dev/shm; df -h /dev/shm", ""),
        ("node shm", f"{shm_warning(run.shm)}; data loaders end with a bus error",
         "on n7: ls -lS /dev/shm; df -h /dev/shm", ""),
        ("no quota for a save (user ann)",
         "the next checkpoint exceeds the quota of user ann: 3.00 GiB, 1.00 GiB left", helps, ""),
        ("quota files (user ann)",
         "the quota of user ann for files is used up in 90.0 s at the present pace", helps, ""),
        ("saves fail", "it is full", "df -h r; df -i r", ""),
        ("backup", "the newest checkpoint has had no copy elsewhere for 2.5 h", "bloomery ckpt list r", ""),
        ("guard spike", "new", "bloomery guard replay r", ""),
        ("guard plateau", "flat", "bloomery guard replay r", ""),
        ("slow", "steps take 3.5 s, and took 1 s before", "bloomery report r --json", ""),
        ("peers", "all ranks of this peer have waited for other peers for 20.0 min", "look", ""),
        ("watcher", "no watcher looked at this run for 2.2 min",
         "bloomery watch r (as a service, or cron)", ""),
    ]  # fmt: skip
    gone = WatchedRun(path="r", verdict=RunVerdict(state=RunStatus.GONE), now=9.0, since=0.0)
    assert conditions_of(gone, WatchLimits()) == [
        WatchCondition(kind="gone", line="the run is gone", command="bloomery status r", group="state")
    ]
    idle = [
        [one.kind for one in conditions_of(WatchedRun(path="r", verdict=RunVerdict(state=state), now=9.0,
                                                      since=0.0), WatchLimits(idle_s=1.0))]
        for state in (RunStatus.STOPPED, RunStatus.NEW, RunStatus.COMPLETING, RunStatus.RUNNING)
    ]  # fmt: skip
    assert idle == [["not running"]] * 3 + [[]]


def test_samples_that_are_close_replace_each_other_and_of_too_many_every_other_one_stays() -> None:
    samples: list[DiskSample] = []
    for time in (0.0, 2.0, 4.0, 4.5, 5.0, 9.0, 9.5):
        samples = thinned(samples, DiskSample(time, 1, 1))
    assert [sample.time for sample in samples] == [0.0, 4.5, 9.0, 9.5]
    full = [DiskSample(10.0 * number, 1, 1) for number in range(288)]
    assert thinned(full[:-1], full[-1]) == full
    more = thinned(full, DiskSample(2880.0, 1, 1))
    assert [sample.time for sample in more] == [20.0 * number for number in range(144)] + [2880.0]
    assert thinned(full, DiskSample(15.0, 2, 2)) == [*full[:2], DiskSample(15.0, 2, 2)]


def test_a_forecast_needs_five_samples_and_reaches_a_hundred_times_as_far_as_was_seen() -> None:
    def left_s(count: int, *, free: int, per_look: int, every_s: float = 60.0) -> float | None:
        samples = [DiskSample(every_s * number, free - per_look * number, -1) for number in range(count)]
        forecast = forecast_full(samples)
        return None if forecast is None else forecast.full_in_s

    assert left_s(4, free=1000, per_look=10) is None
    assert left_s(5, free=1000, per_look=10) == 96 * 60.0
    # Five samples a minute apart span 240 s, so that 24,000 s are told: 400 looks' worth of space after them.
    assert left_s(5, free=4040, per_look=10) == 24_000.0 and left_s(5, free=4041, per_look=10) is None
    assert left_s(6, free=1000, per_look=0) is None and left_s(6, free=1000, per_look=-5) is None
    steady = [DiskSample(60.0 * number, 5, 300 - number) for number in range(9)]
    assert forecast_full(steady) == DiskForecast(what="inodes", full_in_s=292 * 60.0)
    freed = [1000, 900, 800, 700, 860, 850, 840, 830, 820, 810]
    falls = [DiskSample(60.0 * number, free, -1) for number, free in enumerate(freed)]
    assert forecast_full(falls) == DiskForecast(what="space", full_in_s=81 * 60.0)


@pytest.mark.parametrize("taken", [(0, 51, 52, 3, 4), (0, 51, 52, 53, 54)])
def test_a_save_that_comes_or_goes_does_not_change_how_fast_a_disk_fills(taken: tuple[int, ...]) -> None:
    assert disk._fall_per_s([(60.0 * number, -60.0 * bytes) for number, bytes in enumerate(taken)]) == 1.0


def test_what_one_look_shows_is_all_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path / "run")
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = ["submit.keep_queued=3", "backup.url=file:///x", "control.directory=~/c"]
    recipe = load_recipe("demo", settings).recipe
    run.recipe.write_text(dump_recipe(recipe))
    job = QueuedJob(job="7", state=JobState.PENDING, state_text="PD", submitted=400.0)
    asked: list[Any] = []

    def scheduler(section: Any, path: Path) -> Any:
        asked.append((section, path))
        return SimpleNamespace(jobs=lambda *, name, run: asked.append((name, run)) or [job])

    def observed(rundir: Any, jobs: Any, *, switches: Any, silent: str) -> RunObservation:
        asked.append((rundir, list(jobs), list(switches), silent))
        return RunObservation(path="seen")

    verdict = RunVerdict(state=RunStatus.PENDING, why="Priority", job=job)
    monkeypatch.setattr(submission, "scheduler_of", scheduler)
    monkeypatch.setattr(observe, "observe_run", observed)
    monkeypatch.setattr(
        observe, "judge_state", lambda seen, *, limits: verdict if seen.path == "seen" else None
    )
    free, left = DiskSample(500.0, 9, 9), DiskSample(500.0, 8, 8)
    monkeypatch.setattr(observe, "sample_disk", lambda path, *, now: free._replace(time=now))
    monkeypatch.setattr(observe, "sample_quotas", lambda path, *, now: {"user a": left._replace(time=now)})
    monkeypatch.setattr(observe, "shared_memory_space", lambda: (75, 100))
    (run.checkpoints / "c2").mkdir()
    (run.checkpoints / "c2" / "part").write_bytes(bytes(70))
    observer = RunObserver(run)
    for number, time in ((1, 300.0), (2, 350.0)):
        observer._take({"event": "checkpoint", "time": time, "path": f"c{number}"})
    observer._take({"event": "checkpoint_failed", "time": 360.0, "step": 9, "why": "no"})
    observer._take({"event": "guard", "time": 370.0, "step": 9, "guard": "g", "action": "a", "reason": "r"})
    assert observer.observe(now=500.0, silent_s=3.0) == WatchedRun(
        path=str(run.path), verdict=verdict, now=500.0, since=400.0, disk=free, forecast=None,
        quotas=[WatchedQuota(owner="user a", left=left, forecast=None)], save_bytes=70, shm_used=0.25,
        saves=[300.0, 350.0], failed_save="no checkpoint at step 9: no",
        guards=((370.0, "g", "step 9: a: r"),), step_s=(), usual_step_s=(), unsaved_copy_s=200.0,
        silent_s=3.0, jobs=1, wanted_jobs=3, short_s=0.0,
    )  # fmt: skip
    assert asked == [
        (recipe.submit, run.path),
        (recipe.run.name, run.path),
        (run, [job], [tmp_path / "c"], ""),
    ]
    assert observer.observe(now=544.0).short_s == 44.0 and len(asked) == 4, "it is asked each 45 s"
    observer.observe(now=545.0)
    assert len(asked) == 7
    assert [sample.time for sample in observer.quotas["user a"]] == [500.0]
    observer.observe(now=560.0)
    assert [sample.time for sample in observer.quotas["user a"]] == [500.0, 560.0], "and quotas each minute"
    assert [sample.time for sample in observer.disks] == [500.0, 544.0, 545.0, 560.0]


def test_a_watcher_keeps_all_that_the_next_one_needs(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine", beat_age_s=600)
    watching = RunWatcher(run, lambda alert: None, rules=AlertRules(settle_s=0.0))
    lock = (run.path / "watch.lock").read_text()
    assert lock == f"process {os.getpid()} on {os.uname().nodename}\n"
    with pytest.raises(RunBusy, match=f"watched already by {lock.strip()}"):
        RunWatcher(run, lambda alert: None)
    condition = WatchCondition(kind="slow", line="l", command="c", group="g")
    incident = OpenIncident(condition=condition, began=1.0, seen=2.0, told=3.0, escalations=4)
    alert = Alert(run="mine", word=AlertWord.ESCALATED, condition=condition, began=5.0, owed=(1,))
    watching.incidents, watching._unsent = {"g": incident}, [alert]
    watching._alive, watching._gap_s, watching._ended = 50.0, 10.0, False
    watching._observer.state, watching._observer.since = "hung", 40.0
    watching._observer.unheard_since, watching._observer.short_since = 30.0, 20.0
    watching._observer.disks = [DiskSample(1.0, 2, 3)]
    watching._observer.quotas = {"user a": [DiskSample(4.0, 5, 6)]}
    watching._observer.saves.append((7.0, "step-000007.i001"))
    watching._observer.guards.append((8.0, "spike", "step 8: stop: high"))
    watching._observer.failed_save = "no checkpoint at step 9: full"
    watching._keep()
    told = {"kind": "slow", "line": "l", "command": "c", "group": "g"}
    record = json.loads(run.watch.read_text())
    assert record == {
        "alive": 50.0, "gap_s": 10.0, "ended": False, "state": "hung", "since": 40.0,
        "unheard_since": 30.0, "short_since": 20.0,
        "incidents": {"g": {"condition": told, "began": 1.0, "seen": 2.0, "told": 3.0, "escalations": 4,
                            "acknowledged": False}},
        "unsent": [{"run": "mine", "word": "still", "began": 5.0, "condition": told, "owed": [1]}],
        "disks": [[1.0, 2, 3]], "quotas": {"user a": [[4.0, 5, 6]]},
        "saves": [[7.0, "step-000007.i001"]], "guards": [[8.0, "spike", "step 8: stop: high"]],
        "failed_save": "no checkpoint at step 9: full",
    }  # fmt: skip
    os.close(watching._lock)
    seen = (watching._observer.saves, watching._observer.guards, watching._observer.failed_save)
    again = RunWatcher(run, lambda alert: None)
    assert (again._observer.saves, again._observer.guards, again._observer.failed_save) == seen
    os.close(again._lock)
    for name in ("quotas", "unheard_since", "short_since", "saves", "guards", "failed_save"):
        del record[name]
    del record["unsent"][0]["owed"]  # as an earlier version wrote them
    run.watch.write_text(json.dumps(record))
    later = RunWatcher(run, lambda alert: None)
    assert (later._alive, later._gap_s, later._ended, later.state) == (50.0, 10.0, False, "hung")
    assert (later.incidents, later._observer.since) == ({"g": incident}, 40.0)
    assert (later._observer.unheard_since, later._observer.short_since) == (0.0, 0.0)
    assert later._observer.disks == [DiskSample(1.0, 2, 3)] and later._observer.quotas == {}
    assert not (later._observer.saves or later._observer.guards or later._observer.failed_save)
    assert [(kept.word, kept.owed) for kept in later._unsent] == [(AlertWord.ESCALATED, None)]
    later._record([alert, replace(alert, word=AlertWord.RESOLVED)], before="pending")
    later.close()
    job, recorded, over = read_journal(run.operations)
    assert (over["event"], over["word"], over["kind"]) == ("alert", "over", "slow")
    assert (job["event"], job["state"], job["incarnation"], job["step"]) == ("job", "failed", 0, 0)
    fields = {name: recorded[name] for name in ("event", "word", "incarnation", "step", *told)}
    assert fields == {"event": "alert", "word": "still", "incarnation": 0, "step": 0, **told}


def test_a_disk_that_refuses_what_a_watcher_keeps_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = a_run(tmp_path / "mine")
    watching = RunWatcher(run, lambda alert: None)

    def refuse(*words: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watcher_module.durable, "write_whole_unsynced", refuse)
    monkeypatch.setattr(observe, "sample_disk", refuse)
    with caplog.at_level(logging.WARNING):
        watching.check(now=5.0)
    said = [entry.getMessage() for entry in caplog.records]
    assert any("Keeping what the watcher saw" in line for line in said)
    assert f"{run.path}: No space left on device" in said
    watching._keep = lambda: (_ for _ in ()).throw(BloomeryError("no", remedy=""))  # type: ignore[method-assign]
    watching.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(watching._lock)
    monkeypatch.setattr(watcher_module.os, "open", refuse)
    with pytest.raises(StorageError, match="Opening the lock of the watcher"):
        RunWatcher(run, lambda alert: None)


def test_an_acknowledgement_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    incident = {"condition": {"kind": "slow", "line": ""}, "began": 0, "seen": 0, "told": 0}
    run.watch.write_text(json.dumps({"incidents": {"slow": incident}}))
    assert acknowledge(run, "slow") == ["slow"] and (run.path / "watch.ack").read_text() == "slow\n"

    def refuse(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watcher_module.durable, "append", refuse)
    with pytest.raises(StorageError, match="Acknowledging"):
        acknowledge(run, "")
    assert acknowledge(run, "queue") == []


def test_addresses_that_apprise_does_not_know_are_found_by_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def ask(request: dict[str, Any]) -> tuple[int, str]:
        asked.append(request)
        return (3 if any("bad" in address for address in request["addresses"]) else 0), ""

    monkeypatch.setattr(notify, "_ask", ask)
    known = [True]
    monkeypatch.setattr(notify.importlib.util, "find_spec", lambda name: known[0] or None)
    notify.refuse_bad_addresses([])
    assert asked == []
    notify.refuse_bad_addresses(["a://x", "b://y"])
    assert asked == [{"addresses": ["a://x", "b://y"]}]
    with pytest.raises(BloomeryError, match=r"Address 2 \(averyveryverylongsch://…\) is none"):
        notify.refuse_bad_addresses(["a://x", "averyveryverylongscheme://bad", "bad://z"])
    assert asked[2:] == [{"addresses": ["a://x"]}, {"addresses": ["averyveryverylongscheme://bad"]}]
    known[0] = False
    with pytest.raises(BloomeryError, match="apprise, which is not installed"):
        notify.refuse_bad_addresses(["a://x"])


def test_a_process_sends_an_alert_and_what_it_says_last_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []
    answer = SimpleNamespace(returncode=0, stdout=b"0\n1\xff\n", stderr=b"")

    def run(command: Any, **options: Any) -> Any:
        calls.append((command, options))
        return answer

    monkeypatch.setattr(notify.subprocess, "run", run)
    assert notify._ask({"a": 1}) == (0, "0\n1\ufffd\n") and not caplog.records
    command = [sys.executable, "-m", "bloomery.operate.watch.notify"]
    given = {"input": b'{"a": 1}', "capture_output": True, "timeout": 30.0, "check": False}
    assert calls == [(command, given)]
    for status, said, told in (
        (3, b"", None),
        (4, b"first\nlast \n \n", "an alert was not sent: last "),
        (9, b"", "an alert was not sent: status 9"),
    ):
        caplog.clear()
        answer.returncode, answer.stderr = status, said
        assert notify._ask({})[0] == status
        assert [entry.getMessage() for entry in caplog.records] == ([told] if told else [])

    def late(command: Any, **options: Any) -> Any:
        raise subprocess.TimeoutExpired(command, options["timeout"], output=None)

    def missing(command: Any, **options: Any) -> Any:
        raise FileNotFoundError("the secret")

    for fails, words in ((late, "every address within 30 s"), (missing, "not sent: FileNotFoundError")):
        caplog.clear()
        monkeypatch.setattr(notify.subprocess, "run", fails)
        assert notify._ask({}) == (4, "")
        assert words in caplog.text and "secret" not in caplog.text


@pytest.mark.parametrize(
    ("request_", "status", "said"),
    [
        ({"addresses": ["good", "bad"]}, 3, ""),
        ({"addresses": ["good", "dead"]}, 0, ""),
        ({"addresses": ["good", "good"], "title": "t", "body": "b"}, 0, "01"),
        ({"addresses": ["dead", "good"], "title": "t", "body": "b"}, 4, "1"),
    ],
)
def test_the_process_names_who_took_the_alert(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request_: Any, status: int, said: str
) -> None:
    class Apprise:
        def add(self, address: str) -> bool:
            self.address = address
            return address != "bad"

        def notify(self, *, title: str, body: str, body_format: str) -> bool:
            assert (title, body, body_format) == ("t", "b", "text")
            return self.address == "good"

    fake = ModuleType("apprise")
    fake.Apprise, fake.NotifyFormat = Apprise, SimpleNamespace(TEXT="text")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apprise", fake)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request_)))
    assert notify._main() == status
    assert "".join(sorted(capsys.readouterr().out.split())) == said


def test_a_quota_that_nobody_tells_of_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quota.mounted_at(tmp_path / "none") is None and quota.sample_quotas(tmp_path / "x", now=1.0) == {}
    mount = MountedAt(kind="xfs", place="/home", source="/dev/a")
    monkeypatch.setattr(quota, "mounted_at", lambda path: mount)
    monkeypatch.setattr(quota, "_owners", lambda path: iter([("-u", "ann", 5), ("-g", "llm", 6)]))
    texts = {5: "/home 100 200 300 - 5 0 10 -\n", 6: ""}
    monkeypatch.setattr(quota, "_asked", lambda mount, flag, number: texts[number])
    assert quota.sample_quotas(tmp_path, now=7.0) == {"user ann": DiskSample(7.0, 200 << 10, 5)}
    texts[6] = "/dev/a 400* 0 300 - 20* 0 10 -\n"
    assert quota.sample_quotas(tmp_path, now=7.0)["group llm"] == DiskSample(7.0, 0, 0)
    monkeypatch.undo()
    monkeypatch.setattr(quota.shutil, "which", lambda name: name)
    for failure in (OSError("no"), subprocess.TimeoutExpired("quota", 10.0)):

        def fail(command: Any, failure: BaseException = failure, **options: Any) -> Any:
            assert options == {"capture_output": True, "timeout": 10.0, "check": False}
            raise failure

        monkeypatch.setattr(quota.subprocess, "run", fail)
        assert quota._asked(mount, "-u", 5) == ""


def test_shared_memory_that_cannot_be_asked_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_memory_space(Path("/no/such/place")) == (0, 0)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_blocks=0, f_frsize=4096))
    assert observe._used_share_here(()) is None
