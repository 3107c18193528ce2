"""What viewers, actions, runs and the rows of a page are beside others of their kind."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.operate.dashboard.written_run import WrittenRun, healed_run

from bloomery.config.load import dump_recipe, load_recipe, override
from bloomery.events.heartbeat import RankBeat
from bloomery.events.journal import read_journal
from bloomery.operate.dashboard import actions, panels, run_summary
from bloomery.operate.dashboard import server as server_module
from bloomery.operate.dashboard.access import AccessRules
from bloomery.operate.dashboard.actions import ActionRequest, carry_out
from bloomery.operate.dashboard.panels import events_with_places, saves
from bloomery.operate.dashboard.prometheus import metrics_text
from bloomery.operate.dashboard.run_reader import RunReader
from bloomery.operate.dashboard.run_summary import RunSummarizer, night_words
from bloomery.operate.dashboard.server import DashboardServer
from bloomery.operate.dashboard.viewed_run import ViewedRun
from bloomery.operate.exclusions import Exclusions
from bloomery.operate.run_state import RunStatus, RunVerdict
from bloomery.plan.schedule import steps_of_peer


def test_a_viewer_who_leaves_takes_no_answer_from_those_who_asked_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = DashboardServer([tmp_path], AccessRules())
    asked: Any = SimpleNamespace(url=SimpleNamespace(path="/api/panels", query="run=0"))

    async def view() -> bytes:
        may_answer = asyncio.Event()

        async def computed(make: Callable[[], bytes]) -> bytes:
            await may_answer.wait()
            return make()

        monkeypatch.setattr(server_module, "run_in_threadpool", computed)
        leaving, staying = (asyncio.ensure_future(server._shared(asked, lambda: b"told")) for _ in range(2))
        await asyncio.sleep(0.0)
        leaving.cancel()
        await asyncio.sleep(0.0)
        may_answer.set()
        return bytes((await staying).body)

    assert asyncio.run(view()) == b"told"


def test_samples_that_were_asked_to_be_skipped_before_are_skipped_too(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    for what in ("0:8", "16:24"):
        carry_out(run.rundir, ActionRequest(run=0, action="skip", what=what), by="ann")
    assert run.rundir.control("skip").read_text() == "0:8\n16:24\n"


def test_an_action_is_recorded_among_what_supervisors_write_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, locked = WrittenRun(tmp_path / "run"), list[int]()
    monkeypatch.setattr(
        "bloomery.events.journal.durable.wait_for_lock", lambda file, *, timeout_s: bool(locked.append(file))
    )
    carry_out(run.rundir, ActionRequest(run=0, action="save"), by="ann")
    assert locked and [event["action"] for event in read_journal(run.rundir.operations)] == ["save"]


def test_a_node_that_is_excluded_is_told_to_all_runs_of_its_list_and_since_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, shared = WrittenRun(tmp_path / "run"), tmp_path / "shared.json"
    recipe = load_recipe("demo", [f'submit.exclusions="{shared}"']).recipe
    run.rundir.recipe.write_text(dump_recipe(recipe))
    monkeypatch.setattr(actions, "time", SimpleNamespace(time=lambda: 1234.5))
    carry_out(run.rundir, ActionRequest(run=0, action="exclude", what="n1"), by="ann")
    assert Exclusions(shared).nodes()["n1"].since == 1234.5


def test_the_metrics_of_each_run_are_beside_those_of_the_others(tmp_path: Path) -> None:
    first, second = healed_run(tmp_path / "a"), WrittenRun(tmp_path / "b")
    second.start()
    second.steps(3, gradient_norm=7.5)
    viewed = [ViewedRun(run.rundir.path) for run in (first, second)]
    for one in viewed:
        one.reader.read_all()
    lines = [line for line in metrics_text(viewed).splitlines() if not line.startswith("#")]

    def values(name: str) -> list[tuple[str, float]]:
        told = [line.rpartition(" ") for line in lines if line.startswith(f"bloomery_{name}{{")]
        return [(labels.partition('run="')[2][0], float(value)) for labels, _, value in told]

    assert values("step") == [("a", 91.0), ("b", 3.0)]
    assert values("gradient_norm") == [("a", 0.5), ("b", 7.5)]
    assert [run for run, _ in values("state")] == ["a"] * len(RunStatus) + ["b"] * len(RunStatus)


def test_events_of_all_journals_are_told_in_the_order_of_time(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.event("note", time=20.0, text="of the training")
    run.operation("note", time=10.0, text="of a person")
    events = events_with_places(RunReader(run.rundir.path).read_all())
    assert [(event["time"], event["text"]) for event in events] == [
        (10.0, "somebody: of a person"),
        (20.0, "somebody: of the training"),
    ]


def test_why_a_save_is_kept_is_judged_by_the_recipe_and_by_no_look_into_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = WrittenRun(tmp_path / "run"), list[Any]()
    recipe = override(load_recipe("demo").recipe, ["train.steps=400", "train.tokens=0", "train.samples=0"])
    kept = SimpleNamespace(checkpoint=SimpleNamespace(name="step-000007.i001", step=7), why=["newest"])

    def plan(rundir: Any, *, section: Any, run_length_steps: int, is_intact: Any) -> list[Any]:
        asked.append((rundir, section, run_length_steps, is_intact(kept.checkpoint)))
        return [kept]

    monkeypatch.setattr(panels, "prune_plan", plan)
    run.event("checkpoint", path="step-000007.i001", step=7, time=55.0)
    (row,) = saves(RunReader(run.rundir.path).read_all(), recipe)
    length = steps_of_peer(recipe.train, recipe.elastic, sequence_length=recipe.data.sequence_length)
    assert asked == [(run.rundir, recipe.checkpoint, length, True)] and length == 400
    assert (row.time, row.kept) == (55.0, "newest")


@pytest.mark.parametrize(("state", "is_advised"), [(RunStatus.RUNNING, True), (RunStatus.PENDING, False)])
def test_ranks_of_a_job_that_has_ended_are_not_silent_while_the_next_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: RunStatus, is_advised: bool
) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start()
    beat = RankBeat(world=1, activity="forward and backward", time=1000.0, host="elsewhere")
    run.rundir.heartbeat().write_text(json.dumps(beat.__dict__))
    monkeypatch.setattr(run_summary, "judge_state", lambda seen, *, limits: RunVerdict(state=state))
    shown = RunSummarizer(RunReader(run.rundir.path).read_all()).summary(now=5000.0)
    assert any("Look at rank 0" in line for line in shown.advice) is is_advised


def test_the_steps_of_all_branches_that_were_left_in_the_night_are_counted(tmp_path: Path) -> None:
    run = healed_run(tmp_path / "run")
    run.event("rewind", to_step=80, reason="spike")
    run.start(base=(80, 2), reason="rewind")
    run.steps(5)
    reader = RunReader(run.rundir.path).read_all()
    assert len(reader.columns.discarded) == 2
    assert "85 steps" in (told := night_words(reader, now=time.time())) and "21 steps discarded" in told
