"""What reports, their pictures and notes tell of a run, as whole texts."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.test_demo_steps import Recorder
from tests.cli.test_what_views_tell import MORNING

from bloomery.cli import dashboard, report
from bloomery.errors import BloomeryError, TrainingFailed
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.ledger.figures import PlannedRun
from bloomery.operate.ledger.time_class import MEANINGS, TimeClass

KINDS = [TimeClass.TRAINING, *[kind for kind in TimeClass if kind is not TimeClass.TRAINING][:1]]
LEDGER: Any = SimpleNamespace(
    seconds={KINDS[0]: 3 * 3_600.0, KINDS[1]: 3_600.0}, total_s=4 * 3_600.0, ranks=(0, 1), begin=MORNING,
    end=MORNING + 7_200.0, best_tokens_per_s=12_345.6, effective_time=0.756, ettr=0.812,
    token_goodput=lambda speed=None: 0.5 if speed is None else speed / 1e5,
    by_cause=lambda: {"a cause of many words that does not fit into the table": (3, 600.0, 1_234)},
    history=SimpleNamespace(step=1_500, kept_steps=1_400, kept_tokens=5_600_000),
    bins=[{KINDS[0]: 30.0, KINDS[1]: 10.0}, {}],
)  # fmt: skip
PLAN = PlannedRun(tokens_per_s=20_000.0, tokens=11_200_000, days=1.25, goodput=0.9)


def test_a_report_has_the_time_of_each_class_its_figures_and_its_causes() -> None:
    text = report.report_text(LEDGER)
    flat = " ".join(text.replace("─", "").split())
    begin, end = (datetime.fromtimestamp(at).strftime("%d %b %H:%M") for at in (MORNING, MORNING + 7_200))
    meanings = [" ".join(MEANINGS[kind].split()) for kind in KINDS]
    assert flat == (
        f"class time share what it is {KINDS[0]} 90.0 min 75.0% {meanings[0]} "
        f"{KINDS[1]} 30.0 min 25.0% {meanings[1]} all 2.0 h 100.0% {begin} to {end}, mean of 2 ranks "
        "figure definition effective time 75.6% kept steps / all time "
        "ETTR 81.2% kept steps / (all time - deliberate stops); time in the queue counts as lost "
        "goodput of tokens 50.0% kept tokens / (all time x 12,346 tokens/s) "
        "cause incidents time steps lost a cause of many words that does not fit into the t 3 10.0 min 1,234 "
        "step 1,500; 1,400 steps and 5,600,000 tokens kept"
    )
    beside = " ".join(report._figures_text(LEDGER, PLAN).split())
    assert beside.endswith(
        "goodput vs. plan 20.0% kept tokens / (all time x the plan's tokens/s) planned goodput 90.0% "
        "planned training days / planned calendar days planned speed 20,000 tokens/s; measured "
        "12,346 tokens/s planned days 1.2 at the pace so far: 0.2"
    )
    one = SimpleNamespace(**{**vars(LEDGER), "ranks": (0,), "by_cause": dict})
    assert "mean of 1 rank\n" in report.report_text(one) and "incidents" not in report.report_text(one)


def test_the_picture_of_a_ledger_stacks_the_classes_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    drawing = Recorder(calls)
    drawing.get_cmap = lambda name: lambda place: f"{name} {place}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(use=drawing.use, pyplot=drawing))
    report.draw_ledger(LEDGER, Path("r.png"), title="runs/mine")
    bars = [call for call in calls if call[0] == "bar"]
    common = {"width": 1.0, "align": "edge"}
    assert bars == [
        ("bar", [0.0, 1.0], [75.0, 0.0],
         common | {"bottom": [0.0, 0.0], "color": "tab20 0", "label": str(KINDS[0])}),
        ("bar", [0.0, 1.0], [25.0, 0.0],
         common | {"bottom": [75.0, 0.0], "color": "tab20 1", "label": str(KINDS[1])}),
    ]  # fmt: skip
    (settings,) = [call[1] for call in calls if call[0] == "set"]
    assert settings["title"] == "runs/mine: effective time 75.6%, ETTR 81.2%"
    assert settings["ylim"] == (0, 100)
    assert calls[-2:] == [("savefig", Path("r.png"), {}), ("close", {})]


def test_a_report_is_read_until_the_moment_given_and_written_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, asked = RunDirectory(tmp_path / "run").create().path, list[Any]()
    found: list[Any] = [LEDGER]
    monkeypatch.setattr("bloomery.operate.ledger.figures.read_plan", lambda path: PLAN)
    monkeypatch.setattr(
        "bloomery.operate.ledger.figures.ledger_figures", lambda ledger, plan: {"plan": plan is PLAN}
    )
    monkeypatch.setattr(
        "bloomery.operate.ledger.run_ledger.read_ledger",
        lambda rundir, *, until, bins: asked.append((rundir.path, until, bins)) or found[0],
    )
    monkeypatch.setattr(
        "bloomery.operate.dashboard.saved_page.saved_page",
        lambda paths, *, plan: f"page of {paths[0].name}, {plan is PLAN}",
    )
    monkeypatch.setattr(report, "draw_ledger", lambda ledger, path, *, title: asked.append((path, title)))
    monkeypatch.setattr(report, "report_text", lambda ledger, plan: f"the report, {plan is PLAN}")
    html, png, plan = tmp_path / "x.html", tmp_path / "x.png", tmp_path / "plan.json"
    words = [str(run), "--until", "2026-03-04T05:06:07", "--plan", str(plan)]
    assert report.run([*words, "--html", str(html), "--png", str(png)]) == 0
    assert capsys.readouterr().out == f"the report, True\nwrote {html} and {png}\n"
    assert asked == [(run, MORNING, 120), (png, str(run))] and html.read_text() == "page of run, True"
    assert report.run([*words, "--json", "--html", str(html)]) == 0
    assert capsys.readouterr().out == '{"plan": true}\n' and asked[2:] == [(run, MORNING, 0)]
    assert report.run([str(run)]) == 0
    assert capsys.readouterr().out == "the report, False\n" and asked[3:] == [(run, None, 0)]
    found[0] = None
    with pytest.raises(TrainingFailed, match="nothing was ever started in it"):
        report.run([str(run)])


def test_a_note_is_added_by_whom_it_says_and_its_chronicle_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, notes, path = str(RunDirectory(tmp_path / "run").create().path), list[Any](), [tmp_path / "c.md"]
    monkeypatch.setattr(
        "bloomery.operate.ledger.chronicle.add_note", lambda rundir, text, *, by: notes.append((text, by))
    )
    monkeypatch.setattr("bloomery.operate.ledger.chronicle.write_chronicle", lambda rundir: path[0])
    assert report.note([run, "a fan broke", "--by", "Ada"]) == 0 and notes == [("a fan broke", "Ada")]
    assert capsys.readouterr().out == f"{tmp_path}/c.md\n"
    assert report.note([run, "--json"]) == 0 and len(notes) == 1
    assert json.loads(capsys.readouterr().out) == {"noted": None, "chronicle": f"{tmp_path}/c.md"}
    path[0] = None  # type: ignore[call-overload]
    assert report.note([run, "early"]) == 0 and "begins with the first start" in capsys.readouterr().out
    assert report.note([run, "early", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"noted": "early", "chronicle": None}
    with pytest.raises(BloomeryError, match="The note is empty"):
        report.note([run, " "])
    assert dashboard._PORT == 8421
