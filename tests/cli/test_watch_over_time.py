"""What watch and dashboard do over hours, with a clock of the tests: looks, alerts, a dead man's switch."""

from __future__ import annotations

import json
import signal
import sys
import urllib.request
from argparse import Namespace
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.wait_clock import Clock

from bloomery.cli import dashboard, watch
from bloomery.events.run_directory import RunDirectory


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def watcher(path: str, *kinds: str) -> Any:
    incidents = {
        kind: SimpleNamespace(condition=SimpleNamespace(kind=kind, line=f"{kind} it is")) for kind in kinds
    }
    return SimpleNamespace(
        check=lambda: None, incidents=incidents, state="running", rundir=SimpleNamespace(path=path)
    )


def test_one_look_tells_each_run_and_fails_where_one_has_an_open_alert(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pinged: list[Any] = []
    monkeypatch.setattr(watch, "_ping", pinged.append)
    well, bad = watcher("runs/a"), watcher("runs/b", "hung", "disk")
    assert watch._once([well, bad], Namespace(json=False, ping="https://x")) == 1
    assert capsys.readouterr().out == "runs/a: running\nruns/b: running; hung, disk\n"
    assert watch._once([well], Namespace(json=False, ping=None)) == 0 and pinged == ["https://x", None]
    capsys.readouterr()
    assert watch._once([bad], Namespace(json=True, ping=None)) == 1
    opened = {"hung": "hung it is", "disk": "disk it is"}
    assert json.loads(capsys.readouterr().out) == {"run": "runs/b", "state": "running", "open": opened}


def test_a_watch_looks_and_pings_at_its_interval_until_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pinged, looks = Clock(monkeypatch, ends_at=3), list[Any](), list[str]()
    monkeypatch.setattr(watch, "EndSignal", lambda: clock)
    monkeypatch.setattr(watch, "_ping", pinged.append)
    one = watcher("runs/a")
    one.check = lambda: looks.append("look")
    watch._watch([one], Namespace(ping="https://x", interval=15))
    assert (looks, pinged, clock.waits) == (["look"] * 3, ["https://x"] * 3, [15, 15, 15])


def test_a_run_with_a_damaged_record_does_not_end_the_watch_of_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, looks = Clock(monkeypatch, ends_at=2), list[str]()
    monkeypatch.setattr(watch, "EndSignal", lambda: clock)
    broken, sound = watcher("runs/a"), watcher("runs/b")
    broken.check = lambda: float(None)  # type: ignore[arg-type]
    sound.check = lambda: looks.append("look")
    watch._watch([broken, sound], Namespace(ping=None, interval=15))
    assert looks == ["look"] * 2 and "runs/a could not be checked" in caplog.text


def test_a_dead_mans_switch_is_asked_and_one_that_is_away_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from http.client import IncompleteRead

    asked: list[Any] = []
    refused: list[Exception] = []

    @contextmanager
    def opened(url: str, *, timeout: float) -> Any:
        asked.append((url, timeout))
        if refused:
            raise refused[0]
        yield SimpleNamespace(read=lambda count: asked.append(count))

    monkeypatch.setattr(urllib.request, "urlopen", opened)
    watch._ping(None)
    watch._ping("https://x/1")
    assert asked == [("https://x/1", 10.0), 1] and not caplog.text
    for error in (OSError("away"), ValueError("odd"), IncompleteRead(b"")):
        refused[:] = [error]
        watch._ping("https://x/1")
    assert caplog.text.count("the dead-man's switch was not reached") == 3


def test_alerts_are_printed_and_sent_and_those_that_are_owed_only_sent(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bloomery.operate.watch import notify
    from bloomery.operate.watch import watcher as watching

    sent: list[Any] = []
    alerts: list[Any] = [
        SimpleNamespace(owed=None, title="it hangs", body="for\nlong"), SimpleNamespace(owed="json://one"),
    ]  # fmt: skip

    def made(rundir: Any, deliver: Any, **given: Any) -> Any:
        one = watcher(str(rundir.path))
        one.check = lambda: sent.append([deliver(alert) for alert in alerts])
        one.close = lambda: sent.append("closed")
        return one

    monkeypatch.setattr(watching, "RunWatcher", made)
    monkeypatch.setattr(notify, "refuse_bad_addresses", lambda addresses: sent.append(addresses))
    monkeypatch.setattr(
        notify, "AlertSender", lambda addresses: SimpleNamespace(send=lambda alert: (addresses, alert.owed))
    )
    monkeypatch.setattr("time.strftime", lambda form: "12:00:00")
    (rundir.path / "to").write_text("json://two")
    words = [str(rundir.path), "--once", "--to", "json://one", "--to-file", str(rundir.path / "to")]
    assert watch.run(words) == 0
    both = ["json://one", "json://two"]
    given = [(both, None), (both, "json://one")]
    assert sent == [both, given, "closed"]
    assert capsys.readouterr().out == f"12:00:00 it hangs: for | long\n{rundir.path}: running\n"
    assert watch.run([*words, "--json"]) == 0
    assert "it hangs" not in capsys.readouterr().out and sent[4] == given
    sent.clear()
    with suppress(OSError), Path("/dev/full").open("w") as full:  # its log lies on the disk that it warns of
        monkeypatch.setattr("sys.stdout", full)
        with suppress(OSError):
            watch.run(words)
    assert sent[1] == given, "it is sent all the same"


def test_what_is_open_is_acknowledged_for_each_run(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    found: list[list[str]] = [["hung"], ["disk", "gone"], [], []]
    monkeypatch.setattr(
        "bloomery.operate.watch.watcher.acknowledge",
        lambda rundir, kind: asked.append((rundir.path, kind)) or found.pop(0),
    )
    run = str(rundir.path)
    assert watch.run([run, run, "--ack"]) == 0
    assert capsys.readouterr().out == "acknowledged: hung, disk, gone\n"
    assert watch.run([run, run, "--ack", "hung"]) == 0
    assert capsys.readouterr().out == "nothing is open\n"
    assert asked == [(rundir.path, "")] * 2 + [(rundir.path, "hung")] * 2


def test_a_dashboard_serves_its_runs_until_the_signal_and_closes_what_it_opened(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import uvicorn

    from bloomery.operate.dashboard import server

    made: dict[str, Any] = {}
    closed: list[str] = []
    listener = SimpleNamespace(
        getsockname=lambda: ("::1", 8499, 0, 0), close=lambda: closed.append("listener")
    )

    class Web:
        should_exit = True

        def __init__(self, config: Any) -> None:
            made["config"] = config

        def run(self, *, sockets: Any) -> None:
            made["sockets"] = sockets
            made["handlers"] = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
            assert made["server"].is_closing()
            raise ZeroDivisionError

    def serving(paths: Any, rules: Any, *, interval_s: float, plan: Any) -> Any:
        made["serving"] = (paths, rules.has_actions, interval_s, plan)
        made["server"] = SimpleNamespace(application="application", runs="runs")
        return made["server"]

    def poller(runs: Any, *, poll_s: float) -> Any:
        made["poll"] = (runs, poll_s)
        stopped = SimpleNamespace(close=lambda: closed.append("poller"))
        return SimpleNamespace(start=lambda: stopped)

    monkeypatch.setattr(uvicorn, "Config", lambda application, **given: (application, given))
    monkeypatch.setattr(uvicorn, "Server", Web)
    monkeypatch.setattr(server, "DashboardServer", serving)
    monkeypatch.setattr(server, "RunPoller", poller)
    monkeypatch.setattr(dashboard, "_listener", lambda options: listener)
    monkeypatch.setattr("bloomery.operate.dashboard.access.new_token", lambda: "a token")
    monkeypatch.setattr("bloomery.operate.ledger.figures.read_plan", lambda path: f"plan of {path}")
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        with pytest.raises(ZeroDivisionError):
            dashboard.run([str(rundir.path), "none", "--actions", "--interval", "4", "--plan", "p.json"])
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    shown = capsys.readouterr()
    assert shown.out == (
        f"http://[::1]:8499/ shows {rundir.path}, none; Ctrl-C ends it\nthe token for actions: a token\n"
    )
    assert shown.err == "note: none is not there yet; the page shows it once it is\n"
    assert made["serving"] == ([rundir.path, Path("none")], True, 4.0, "plan of p.json")
    assert made["poll"] == ("runs", 2.0)
    assert made["config"][1]["ssl_certfile"] is None and made["sockets"] == [listener]
    assert signal.default_int_handler not in made["handlers"] and closed == ["poller", "listener"]
    assert sys.modules["uvicorn"] is uvicorn
