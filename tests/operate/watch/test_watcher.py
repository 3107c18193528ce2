"""`bloomery watch` on run directories, and the messages that reach a server."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from bloomery.cli import main
from bloomery.config.load import dump_recipe, load_recipe
from bloomery.errors import RunBusy
from bloomery.events.heartbeat import RankActivity
from bloomery.events.journal import Journal, read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate import submission
from bloomery.operate.overview import overview
from bloomery.operate.submission import keep_submission, note_cancelled, submission_of
from bloomery.operate.watch import observe
from bloomery.operate.watch.alerts import Alert, AlertRules, AlertWord, WatchCondition
from bloomery.operate.watch.disk import DiskSample, forecast_full, thinned
from bloomery.operate.watch.notify import AlertSender
from bloomery.operate.watch.watcher import RunWatcher


class Received(HTTPServer):
    """A server that keeps what is posted to it; `status` is what it answers."""

    status = 200

    def __init__(self) -> None:
        self.messages: list[dict] = []
        self.pings = self.requests = 0
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Received

    def do_POST(self) -> None:
        self.server.requests += 1
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.status == 200:
            self.server.messages.append(message)
        self._answer(self.server.status)

    def do_GET(self) -> None:
        self.server.pings += 1
        self._answer(200)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *values: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Received]:
    received = Received()
    yield received
    received.shutdown()
    received.server_close()


def a_run(path: Path, *, beat_age_s: float = 0.0, error: str = "") -> RunDirectory:
    """A run directory as a started run leaves it, whose only rank wrote its heartbeat some time ago."""
    run = RunDirectory(path).create()
    run.incarnation(1).write_text('{"base": null}')
    with Journal(run.journal()) as journal:
        journal.write("start", incarnation=1, step=0, reason="start", ranks=1)
        journal.write("step", incarnation=1, step=1, seconds=0.1)
    beat(run, age_s=beat_age_s, error=error)
    return run


def beat(run: RunDirectory, *, age_s: float = 0.0, error: str = "") -> None:
    moment = time.time() - age_s
    activity = RankActivity.ENDED if error else RankActivity.COMPUTING
    record = {"rank": 0, "world": 1, "step": 1, "activity": activity, "since": moment, "time": moment}
    run.heartbeat().write_text(json.dumps({**record, "moves": int(moment * 1000), "error": error, "pid": 1}))
    os.utime(run.heartbeat(), (moment, moment))


def test_a_run_that_is_gone_reaches_people_once_and_so_does_its_return(
    tmp_path: Path, server: Received, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "mine", beat_age_s=600)
    look = ["watch", str(run.path), "--once", "--to", f"json://{server.place}/alerts"]
    assert main([*look, "--ping", f"http://{server.place}/ping"]) == 1
    assert main(look) == 1
    assert [message["title"] for message in server.messages] == ["[mine] new: gone"]
    assert "bloomery submit" in server.messages[0]["message"] and server.pings == 1
    assert "[mine] new: gone" in capsys.readouterr().out
    beat(run)
    record = json.loads((run.path / "watch.json").read_text())
    record["incidents"]["state"]["seen"] -= 1000
    (run.path / "watch.json").write_text(json.dumps(record))
    assert main([*look, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "running"
    assert [message["title"] for message in server.messages][1:] == ["[mine] over: gone"]
    words = [event["word"] for event in read_journal(run.operations) if event["event"] == "alert"]
    assert words == ["new", "over"]


def test_a_run_that_its_limit_stopped_and_that_nothing_follows_reaches_people_once(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine", beat_age_s=600)
    with Journal(run.journal()) as journal:
        journal.write("end", incarnation=1, step=1, reason="signal SIGTERM", finished=False, failed=False)
    left = {"attempt": "n1-7-a-0", "status": 143, "left": "the job ends in 24 s"}
    with Journal(run.operations, is_shared=True) as operations:
        operations.write("attempt_end", incarnation=0, step=1, **left)
    alerts: list[Alert] = []
    watcher, now = RunWatcher(run, lambda alert: alerts.append(alert)), time.time()
    for later_s in range(0, 1000, 100):
        watcher.check(now=now + later_s)
    assert alerts == []
    watcher.check(now=now + 1000)
    watcher.check(now=now + 1015)
    (alert,) = alerts
    assert alert.condition.kind == "nothing follows"
    assert "not finished" in alert.condition.line and "the job ends in 24 s" in alert.condition.line
    assert alert.condition.command == f"bloomery submit {run.path}"
    note_cancelled(run, ["7"])
    watcher.check(now=now + 1030)
    watcher.check(now=now + 1100)
    watcher.close()
    assert [str(alert.word) for alert in alerts] == ["new", "over"]


def test_a_machine_with_the_commands_of_slurm_and_no_cluster_misses_no_run_that_nobody_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("squeue", "sbatch"):
        (tmp_path / command).write_text("#!/bin/sh\necho 'fatal: no configuration source' >&2; exit 1\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    run = a_run(tmp_path / "mine", beat_age_s=600)
    run.recipe.write_text(dump_recipe(load_recipe("demo").recipe))
    assert overview(run).verdict.state == "gone"
    assert main(["watch", str(run.path), "--once"]) == 1
    assert "[mine] new: gone" in capsys.readouterr().out
    keep_submission(run, submission_of("demo", [], nproc=1))
    run.watch.unlink()
    assert overview(run).verdict.state == "unknown"
    assert main(["watch", str(run.path), "--once"]) == 0
    assert capsys.readouterr().out == f"{run.path}: unknown\n"


def test_one_look_at_several_runs_fails_where_any_of_them_is_in_trouble(tmp_path: Path) -> None:
    gone, well = a_run(tmp_path / "gone", beat_age_s=600), a_run(tmp_path / "well")
    for runs in ([gone, well], [well, gone]):
        assert main(["watch", *(str(run.path) for run in runs), "--once"]) == 1
    assert main(["watch", str(well.path), "--once"]) == 0


def test_a_scheduler_that_is_silent_makes_no_run_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path / "mine", beat_age_s=600)
    keep_submission(run, submission_of("demo", ["submit.scheduler=slurm"], nproc=1))
    tools = tmp_path / "tools"
    tools.mkdir()
    squeue = tools / "squeue"
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")

    def answers(shell: str) -> None:
        squeue.write_text(f"#!/bin/sh\n{shell}\n")
        squeue.chmod(0o755)

    answers("echo 'Unable to contact slurm controller' >&2; exit 1")
    watcher = RunWatcher(run, lambda alert: None)
    began = time.time()
    assert watcher.check(now=began) == [] and watcher.state == "unknown"
    answers("")
    assert [alert.condition.kind for alert in watcher.check(now=began + 20)] == ["gone"]
    answers("exit 1")
    alerts = [alert for after_s in range(100, 900, 100) for alert in watcher.check(now=began + after_s)]
    assert [(alert.condition.kind, alert.word) for alert in alerts] == [("scheduler", AlertWord.RAISED)]
    assert watcher.state == "gone", "it is not over either"
    watcher.close()


def test_a_watcher_sees_as_much_after_the_clock_was_set_back(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine", error="ValueError: of mine", beat_age_s=200)
    watcher = RunWatcher(run, lambda alert: None, rules=AlertRules(escalate_s=100))
    began = time.time() + 86400.0
    (raised,) = watcher.check(now=began)
    assert watcher.check(now=began + 60.0) == []
    began -= 86400.0
    assert watcher.check(now=began + 60.0) == []
    (told_again,) = watcher.check(now=began + 170.0)
    assert raised.word == AlertWord.RAISED and told_again.word == AlertWord.ESCALATED
    beat(run)
    (over,) = watcher.check(now=began + 210.0)
    assert over.word == AlertWord.RESOLVED
    watcher.close()


def test_a_disk_and_a_scheduler_are_looked_at_after_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tomorrow = [DiskSample(86400.0 + 30.0 * look, 500 << 30, 10**6) for look in range(60)]
    today = [DiskSample(30.0 * look, (500 - look) << 30, 10**6) for look in range(60)]
    samples: list[DiskSample] = []
    for sample in tomorrow + today:
        samples = thinned(samples, sample)
    assert forecast_full(samples) is not None and samples == today
    run = a_run(tmp_path / "mine")
    keep_submission(run, submission_of("demo", ["submit.scheduler=slurm"], nproc=1))
    asked: list[float] = []
    monkeypatch.setattr(submission, "scheduler_of", lambda *_: SimpleNamespace(jobs=lambda **_: []))
    monkeypatch.setattr(observe.RunObserver, "_sample", lambda self, now: asked.append(self._jobs_time))
    observer = observe.RunObserver(run)
    for now in (86400.0, 86410.0, 20.0, 30.0, 80.0):
        observer.observe(now=now)
    assert asked == [86400.0, 86400.0, 20.0, 20.0, 80.0]


def test_an_alert_that_a_server_refuses_is_sent_again(tmp_path: Path, server: Received) -> None:
    run = a_run(tmp_path / "mine", error="ValueError: of mine", beat_age_s=200)
    server.status = 500
    look = ["watch", str(run.path), "--once", "--to", f"json://{server.place}/alerts"]
    assert main(look) == 1 and server.messages == []
    server.status = 200
    assert main(look) == 1
    (message,) = server.messages
    assert message["title"] == "[mine] new: failed" and "ValueError: of mine" in message["message"]


def test_an_address_that_took_an_alert_does_not_get_it_again_while_another_is_dead(
    tmp_path: Path, server: Received, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "mine", error="ValueError: of mine", beat_age_s=200)
    dead = ["--to", "json://127.0.0.1:9/gone"]
    look = ["watch", str(run.path), "--once", *dead, "--to", f"json://{server.place}/alerts"]
    assert [main(look) for _ in range(3)] == [1, 1, 1]
    assert len(server.messages) == 1 and capsys.readouterr().out.count("new: failed") == 1
    # The dead address is replaced by a living one, which gets what that was owed.
    look[4] = f"json://{server.place}/alerts"
    assert main(look) == 1 and len(server.messages) == 2
    assert main(look) == 1 and len(server.messages) == 2


def test_an_address_that_fails_is_tried_again_after_ever_longer_waits(server: Received) -> None:
    clock = iter((0.0, 0.0, 14.0, 15.0, 15.0, 44.0, 45.0, 45.0, 105.0))
    sender = AlertSender([f"json://{server.place}/alerts"], clock=lambda: next(clock))
    condition = WatchCondition(kind="gone", line="the run is gone")
    alert = Alert(run="mine", word=AlertWord.RAISED, condition=condition, began=0.0)
    server.status, tries = 500, []
    for _ in range(5):
        before = server.requests
        owed = sender.send(alert)
        assert owed is not None and owed.owed == (0,)
        tries.append(server.requests - before)
    assert tries == [1, 0, 1, 0, 1]
    server.status = 200
    assert sender.send(alert) is None and len(server.messages) == 1


def test_what_a_person_acknowledged_is_not_escalated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "mine", beat_age_s=600)
    now, alerts = time.time(), list[Alert]()
    watcher = RunWatcher(run, lambda alert: alerts.append(alert), rules=AlertRules(escalate_s=60))
    watcher.check(now=now)
    watcher.check(now=now + 61)
    watcher.close()
    assert [str(alert.word) for alert in alerts] == ["new", "still"]
    assert main(["watch", str(run.path), "--ack"]) == 0
    assert "acknowledged: gone" in capsys.readouterr().out
    watcher = RunWatcher(run, lambda alert: alerts.append(alert), rules=AlertRules(escalate_s=60))
    watcher.check(now=now + 1000)
    watcher.close()
    assert [alert.condition.kind for alert in alerts][2:] == []


def test_a_watcher_that_died_is_missed_by_the_next(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine")
    alerts: list[Alert] = []
    now = time.time()
    watcher = RunWatcher(run, lambda alert: alerts.append(alert))
    with pytest.raises(RunBusy, match="watched already by process"):
        RunWatcher(run, lambda alert: None)
    watcher.check(now=now)
    watcher.check(now=now + 15)
    os.close(watcher._lock)  # as the kernel does when the process is killed
    beat(run, age_s=-2000)
    following = RunWatcher(run, lambda alert: alerts.append(alert))
    following.check(now=now + 2000)
    following.close()
    assert [alert.condition.kind for alert in alerts] == ["watcher"]
    assert "33.1 min" in alerts[0].condition.line


def test_guards_and_failing_saves_are_read_as_the_journal_grows(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine")
    alerts: list[Alert] = []
    watcher = RunWatcher(run, lambda alert: alerts.append(alert))
    watcher.check()
    with Journal(run.journal()) as journal:
        journal.write("guard", incarnation=1, step=2, guard="spike", action="watch", reason="the loss rose")
        journal.write("checkpoint_failed", incarnation=1, step=2, why="No space left on device")
    beat(run)
    watcher.check()
    with Journal(run.journal()) as journal:
        journal.write("checkpoint", incarnation=1, step=3, path="step-000003.i001")
    beat(run)
    watcher.check(now=time.time() + 60)
    watcher.close()
    told = [(str(alert.word), alert.condition.kind) for alert in alerts]
    assert told == [("new", "saves fail"), ("new", "guard spike"), ("over", "saves fail")]


def test_a_queue_that_is_no_longer_kept_full_is_told_until_it_is(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine")
    run.recipe.write_text(
        Path("recipes/demo.toml").read_text() + '\n[submit]\nscheduler = "machine"\nkeep_queued = 2\n'
    )
    alerts, now = list[Alert](), time.time()
    watcher = RunWatcher(run, lambda alert: alerts.append(alert))
    for passed_s in (0, 600, 901):
        beat(run, age_s=-passed_s)
        watcher.check(now=now + passed_s)
    watcher.close()
    (told,) = [alert.condition for alert in alerts if alert.condition.kind == "queue"]
    assert "0 of 2 jobs run or wait" in told.line and "bloomery submit" in told.command


def test_addresses_that_nobody_knows_are_refused_without_their_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "mine")
    addresses = tmp_path / "addresses"
    addresses.write_text("# people\nnosuch://user:secret@host\n")
    assert main(["watch", str(run.path), "--once", "--to-file", str(addresses)]) == 1
    said = capsys.readouterr().err
    assert "nosuch://" in said and "secret" not in said
    assert main(["watch", str(run.path), "--once", "--to-file", str(tmp_path / "none")]) == 1
    assert main(["watch", str(tmp_path / "none"), "--once"]) == 1


def test_watching_loads_neither_torch_nor_numpy(tmp_path: Path) -> None:
    import subprocess
    import sys

    from tests.faults.commands import _environment  # the environment of commands that a person runs

    run = a_run(tmp_path / "mine")
    code = (
        "import sys; from bloomery.cli import main; main(['watch', sys.argv[1], '--once']);"
        "assert not {'torch', 'numpy', 'apprise', 'pandas'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code, str(run.path)], check=True, timeout=120, env=_environment())


def test_an_alert_names_its_run_from_within_its_directory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path / "mine", error="KeyError: 'loss'")
    monkeypatch.chdir(tmp_path / "mine")
    watcher = RunWatcher(RunDirectory(Path()), send=lambda alert: None)
    alerts = watcher.check()
    watcher.close()
    assert alerts and {alert.run for alert in alerts} == {"mine"}
