"""How much of a run a page reads and keeps, and how old what it shows may be."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.operate.dashboard.written_run import healed_run

from bloomery.events.heartbeat import RankBeat
from bloomery.operate.dashboard import mesh_panel as mesh_module
from bloomery.operate.dashboard import panels, viewed_run
from bloomery.operate.dashboard import server as server_module
from bloomery.operate.dashboard.access import AccessRules
from bloomery.operate.dashboard.growing_file import GrowingFile
from bloomery.operate.dashboard.mesh_panel import mesh_panel
from bloomery.operate.dashboard.peer_panel import rounds
from bloomery.operate.dashboard.run_reader import RunReader
from bloomery.operate.dashboard.run_summary import RunSummarizer, night_words
from bloomery.operate.dashboard.server import DashboardServer, RunPoller
from bloomery.operate.dashboard.viewed_run import ViewedRun


def test_each_table_is_computed_again_as_rarely_as_it_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Callable[[], Any], float]] = []

    def cached(compute: Callable[[], Any], *, least_s: float) -> Any:
        made.append((compute, least_s))
        return SimpleNamespace()

    asked: list[Any] = []
    monkeypatch.setattr(viewed_run, "CachedValue", cached)
    monkeypatch.setattr(RunSummarizer, "recipe", "recipe")
    monkeypatch.setattr(viewed_run.panels, "saves", lambda reader, recipe: asked.append(("saves", recipe)))
    monkeypatch.setattr(viewed_run.panels, "goodput", lambda reader, plan: asked.append(plan))
    monkeypatch.setattr(viewed_run, "mesh_panel", lambda reader, recipe: asked.append(("ranks", recipe)))
    plan: Any = "plan"
    ViewedRun(tmp_path, interval_s=7.5, plan=plan)
    assert [least_s for _, least_s in made] == [7.5, 10.0, 60.0, 10.0]
    for compute, _ in made[1:]:
        compute()
    assert asked == [("saves", "recipe"), "plan", ("ranks", "recipe")]


def test_the_ranks_of_a_large_run_are_looked_at_up_to_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def beat(path: Path) -> RankBeat:
        read.append(path.name)
        return RankBeat(world=2000, pid=1)

    monkeypatch.setattr(viewed_run, "read_beat", beat)
    viewed = ViewedRun(tmp_path)
    viewed.check_ranks()
    assert len(read) == len(set(read)) == 64
    monkeypatch.setattr(mesh_module, "read_beat", beat)
    monkeypatch.setattr(mesh_module, "_mean_spent", lambda reader, rank: {})
    assert [row.rank for row in mesh_panel(viewed.reader, None, now=5.0).rows] == list(range(512))


def test_rounds_and_peers_are_kept_up_to_a_number(tmp_path: Path) -> None:
    reader = RunReader(tmp_path)
    names = [f"p{number:04}" for number in range(600)]
    for number in range(2100):
        members = names if number == 2099 else []
        event = {"event": "round", "round": number, "time": 1.0 + number, "members": members, "ring": members}
        reader._take_other(json.dumps(event).encode())
    assert [event["round"] for event in reader.news.rounds] == list(range(100, 2100))
    told = rounds(reader)
    assert [peer["name"] for peer in told["peers"]] == names[:512] and len(told["ring"]) == 512


def test_a_call_reads_four_mebibytes_of_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes((b"x" * 1023 + b"\n") * (5 << 10))
    tail = GrowingFile(path)
    assert len(tail.lines()) == 4 << 10 and tail.is_behind
    assert len(tail.lines()) == 1 << 10 and not tail.is_behind


def test_a_ledger_is_counted_for_a_journal_of_so_many_bytes_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = RunReader(tmp_path / "run")
    reader.rundir.create()
    with reader.rundir.journal().open("wb") as file:
        file.truncate(256 << 20)
    monkeypatch.setattr(panels, "read_ledger", lambda rundir, *, ranks: None)
    assert panels.goodput(reader) == {"problem": "Nothing has trained here yet."}
    with reader.rundir.journal().open("ab") as file:
        file.truncate((256 << 20) + 1)
    command = f"bloomery report {reader.rundir.path}"
    assert panels.goodput(reader) == {"problem": f"The journal has 268 MB: `{command}` counts it."}


def test_a_poller_reads_until_it_is_closed() -> None:
    polled = threading.Event()
    reader = SimpleNamespace(poll=polled.set, is_behind=False)
    run: Any = SimpleNamespace(reader=reader, check_ranks=lambda: None)
    poller = RunPoller([run], poll_s=60.0).start()
    assert polled.wait(60.0)
    poller.close()
    assert not poller._thread.is_alive()


def test_each_file_of_the_page_is_served_as_what_it_is() -> None:
    place = resources.files("bloomery.operate.dashboard").joinpath("static")
    kinds = {".css": "text/css", ".js": "text/javascript", "": "text/plain"}
    server = DashboardServer([], AccessRules())
    for name in ("dashboard.css", "charts.js", "tables.js", "pictures.js", "dashboard.js",
                 "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css", "uplot/LICENSE"):  # fmt: skip
        asked: Any = SimpleNamespace(path_params={"name": name})
        answer = asyncio.run(server._static(asked))
        assert (answer.status_code, answer.body) == (200, place.joinpath(name).read_bytes())
        assert answer.headers["content-type"] == f"{kinds[Path(name).suffix]}; charset=utf-8"


def test_each_run_of_a_server_is_shown_at_its_interval_and_beside_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(server_module, "ViewedRun", lambda path, **more: made.append((path, more)))
    plan: Any = "plan"
    DashboardServer([tmp_path / "a", tmp_path / "b"], AccessRules(), interval_s=7.5, plan=plan)
    told = {"interval_s": 7.5, "plan": plan}
    assert made == [(tmp_path / "a", told), (tmp_path / "b", told)]
    DashboardServer([tmp_path], AccessRules())
    assert made[2:] == [(tmp_path, {"interval_s": 2.5, "plan": None})]


def test_the_head_of_a_page_has_where_a_run_comes_from_its_night_and_its_columns(tmp_path: Path) -> None:
    run = healed_run(tmp_path / "run")
    record = json.loads(run.rundir.incarnation(1).read_bytes()) | {"fork_of": "/runs/first"}
    run.rundir.incarnation(1).write_text(json.dumps(record))
    reader = RunReader(run.rundir.path).read_all()
    written = reader.columns.last("time")
    assert written is not None
    shown = RunSummarizer(reader).summary(now=written + 60.0)
    assert shown.fork_of.startswith("/runs/first") and shown.night == night_words(reader, now=written + 60.0)
    assert (shown.names, shown.written) == (reader.columns.names, written)
    assert (shown.state, shown.why != "") == ("gone", True) and shown.loss == reader.columns.last("loss")
