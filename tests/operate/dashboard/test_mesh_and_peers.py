"""The panels of ranks and peers: who is slow, what each stage holds, the ring, rounds, forks, plans."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.operate.dashboard.written_run import WrittenRun

from bloomery.agent.round_driver import _ring_facts
from bloomery.cli import main
from bloomery.config.load import parse_recipe
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.events.heartbeat import Heartbeat, RankActivity, interval_of, read_beat
from bloomery.events.journal import Journal
from bloomery.operate.dashboard import panels
from bloomery.operate.dashboard.mesh_panel import MeshPanel, mesh_panel
from bloomery.operate.dashboard.panels import goodput, newest_first
from bloomery.operate.dashboard.peer_panel import rounds
from bloomery.operate.dashboard.run_events import shown_event
from bloomery.operate.dashboard.run_reader import RunReader
from bloomery.operate.ledger.figures import PlannedRun

NEVER_S = 3600.0
RECIPE = """
[run]
name = "mesh"
[train]
steps = 9
global_batch = 8
[optim]
learning_rate = 1e-3
[model]
layers = 2
hidden = 32
heads = 2
[data]
sequence_length = 32
[parallel]
tensor = 2
pipeline = 2
"""


def ranks_of(run: WrittenRun, seconds: list[float], *, world: int) -> None:
    """Write what each rank writes: a heartbeat, and a journal of steps that took it so long by itself."""
    for rank, own_s in enumerate(seconds):
        beat = Heartbeat(
            run.rundir.heartbeat(rank=rank), rank=rank, world=world, host="node1", interval_s=NEVER_S
        )
        beat.at(step=30, memory_bytes=1e9 * (1 + rank))
        beat.enter(RankActivity.COMPUTING)
        beat.write()
        with Journal(run.rundir.journal(rank=rank)) as journal:
            for step in range(30):
                journal.write(
                    "step", incarnation=1, step=step, spent={"forward and backward": own_s, "evaluating": 9.0}
                )


def panel_of(run: WrittenRun, recipe: str = RECIPE) -> MeshPanel:
    return mesh_panel(RunReader(run.rundir.path).read_all(), parse_recipe(recipe, label="mesh").recipe)


def test_the_rank_for_which_others_wait_stands_out_at_its_place(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    ranks_of(run, [0.10, 0.10, 0.10, 0.19, 0.10, 0.10, 0.104, 0.10], world=8)
    panel = panel_of(run)
    assert panel.degrees == {"pipeline": 2, "data": 2, "tensor": 2}
    assert [row.rank for row in panel.rows if row.is_slow] == [3]
    assert panel.rows[3].place == {"pipeline": 0, "data": 1, "tensor": 1}
    assert "wait for rank 3 on node1 (1.90 ×)" in panel.told
    assert [(stage.stage, stage.ranks, stage.fullest) for stage in panel.stages] == [(0, 4, 3), (1, 4, 7)]
    assert panel.stages[1].most_bytes == 8e9 and panel.stages[0].mean_bytes == 2.5e9


def test_ranks_that_work_alike_are_told_as_such_and_bad_files_are_no_error(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    assert panel_of(run).rows == []
    ranks_of(run, [0.1, 0.102], world=2)
    run.rundir.heartbeat(rank=1).write_text('{"rank": 1, "world": 2, "memory_bytes": "much"}')
    panel = panel_of(run, RECIPE.replace("pipeline = 2", "pipeline = 1"))
    assert [row.rank for row in panel.rows] == [0] and panel.told == ""
    panel = panel_of(run)
    assert panel.degrees == {}  # four ranks are wanted and two are there: no place is told
    assert [(stage.stage, stage.ranks, stage.most_bytes) for stage in panel.stages] == [(0, 1, 1e9)]


def test_ranks_are_compared_with_the_faster_half_by_their_last_twenty_steps(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    ranks_of(run, [0.1] * 3 + [0.2] * 4, world=8)
    with Journal(run.rundir.journal(rank=0)) as journal:
        for step in range(30, 50):
            journal.write("step", incarnation=1, step=step, spent={"forward and backward": 0.15})
    panel = panel_of(run)
    assert [row.own_s for row in panel.rows[:2]] == [pytest.approx(0.15), pytest.approx(0.1)]
    assert [row.rank for row in panel.rows if row.is_slow] == [0, 3, 4, 5, 6]


def test_the_memory_of_a_rank_that_has_told_of_none_is_not_known(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    Heartbeat(run.rundir.heartbeat(), rank=0, world=1, host="node1", interval_s=NEVER_S).write()
    panel = panel_of(run)
    assert [row.memory_bytes for row in panel.rows] == [None] and panel.stages == []


def test_ranks_that_have_told_of_no_step_do_not_make_the_others_slow(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    ranks_of(run, [0.0, 0.1, 0.0, 0.1, 0.0, 0.0, 0.0, 0.1], world=8)
    panel = panel_of(run)
    assert [row.rank for row in panel.rows if row.is_slow] == [] and "0.100 s a step" in panel.told


def test_a_rank_is_silent_after_three_heartbeats_that_did_not_come(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    ranks_of(run, [0.1, 0.1], world=2)
    last = Heartbeat(run.rundir.heartbeat(rank=1), rank=1, world=2, host="node1", interval_s=NEVER_S)
    last.enter(RankActivity.ENDED)
    last.write()
    reader, interval_s = RunReader(run.rundir.path).read_all(), interval_of(2)
    beat = read_beat(run.rundir.heartbeat())
    assert beat is not None
    for missed, is_silent in ((2.5, False), (3.5, True)):
        now = beat.time + missed * interval_s
        first, ended = mesh_panel(reader, None, now=now).rows
        assert (first.silent_s is not None) == is_silent and ended.silent_s is None


def test_a_ring_has_its_order_and_the_rates_of_its_links(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start()
    attempt: Any = SimpleNamespace(attempt=SimpleNamespace(members=("c", "a", "b")))
    facts = _ring_facts(attempt, RunSnapshot(rates={"c": {"a": 80.0}, "a": {"b": 20.5, "c": 3.0}}))
    assert facts == {"ring": ["c", "a", "b"], "ring_mbit_s": [80.0, 20.5, None]}
    assert _ring_facts(None, RunSnapshot()) == {}
    with Journal(run.rundir.rounds) as journal:
        for number in (1, 2):
            told = {"round": number, "peer": "a", "included": True, "ring_s": 0.5}
            journal.write(
                "round", incarnation=1, step=0, members=["a", "b", "c"][: 4 - number], **told, **facts
            )
        journal.write("left_out", incarnation=1, step=0, round=2, whom="c", why="it is too slow")
    told = rounds(RunReader(run.rundir.path).read_all())
    assert told["ring"] == [["c", 80.0], ["a", 20.5], ["b", None]]
    assert {peer["name"]: peer["in_newest"] for peer in told["peers"]} == {"a": True, "b": True, "c": False}
    assert told["rounds"][1]["begin"] == told["rounds"][0]["end"] <= told["rounds"][1]["end"]
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize("ring", [None, "abc", [1, "<b>"], {}])
def test_a_strange_ring_is_no_error(ring: object, tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.event("round", round=1, members=["a"], included=True, ring=ring, ring_mbit_s=["x", {}])
    told = rounds(RunReader(run.rundir.path).read_all())
    assert told["ring"] == ([["1", None], ["<b>", None]] if ring == [1, "<b>"] else [])


@pytest.mark.parametrize("facts", [{"round": "one"}, {"round": 1, "time": -5.0}, {"round": None}])
def test_without_a_round_that_can_be_shown_there_is_no_panel(
    facts: dict[str, object], tmp_path: Path
) -> None:
    run = WrittenRun(tmp_path / "run")
    run.event("round", members=["a"], included=True, **facts)
    assert rounds(RunReader(run.rundir.path).read_all()) == {}


@pytest.mark.parametrize(
    ("told", "shown"), [(0, 0.0), (0.5, 0.5), (9e10, 9e10), (1e11, None), (-0.5, None), ("1", None)]
)
def test_seconds_and_rates_that_can_be_none_are_not_shown(
    told: object, shown: object, tmp_path: Path
) -> None:
    run = WrittenRun(tmp_path / "run")
    run.event("round", round=1, members=["a"], included=True, ring_s=told, ring=["a"], ring_mbit_s=[told])
    panel = rounds(RunReader(run.rundir.path).read_all())
    assert panel["rounds"][0]["ring_s"] == shown and panel["ring"] == [["a", shown]]


def test_the_newest_ring_is_shown_though_a_later_round_had_none(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    for number, ring in enumerate((["a", "b"], ["b", "c"], [])):
        run.event("round", round=number, members=["a"], included=True, ring=ring)
    told = rounds(RunReader(run.rundir.path).read_all())
    assert told["ring"] == [["b", None], ["c", None]]


def test_a_fork_names_the_run_that_it_comes_from(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "fork")
    run.start()
    record = json.loads(run.rundir.incarnation(1).read_bytes()) | {"fork_of": "/runs/first"}
    run.rundir.incarnation(1).write_text(json.dumps(record))
    assert RunReader(run.rundir.path).read_all().fork_of == "/runs/first"
    run.start(base=(40, 1), reason="start")
    assert RunReader(run.rundir.path).read_all().fork_of == "/runs/first, at step 40"
    second = json.loads(run.rundir.incarnation(2).read_bytes())
    run.rundir.incarnation(2).write_text(json.dumps(second | {"fork_of": "/runs/second"}))
    run.start(base=(60, 2), reason="start")
    assert RunReader(run.rundir.path).read_all().fork_of == "/runs/second, at step 60", "the run it left last"
    assert RunReader(WrittenRun(tmp_path / "other").rundir.path).read_all().fork_of == ""


def test_a_plan_stands_beside_what_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start()
    run.steps(20)
    reader = RunReader(run.rundir.path).read_all()
    plan = PlannedRun(tokens_per_s=5120.0, tokens=10**6, days=2.0, goodput=0.9)
    assert goodput(reader, plan)["plan"]["planned_tokens_per_s"] == 5120.0
    assert "plan" not in goodput(reader)
    file = tmp_path / "plan.json"
    file.write_text("{}")
    assert main(["dashboard", str(run.rundir.path), "--plan", str(file), "--port", "0"]) == 2
    assert "bloomery plan RECIPE --json > plan.json" in capsys.readouterr().err


def test_a_round_without_this_peer_is_told_in_words() -> None:
    told = {
        "event": "round",
        "time": 5.0,
        "round": 3,
        "included": False,
        "members": ["a", "b"],
        "digest": "d" * 32,
    }
    assert shown_event(told | {"included": True}, number=0) is None
    (first, third) = (shown_event(told | change, number=0) for change in ({"round": 0, "members": []}, {}))
    assert first is not None and first.text == "round 0: the state that all peers begin with"
    assert third is not None and third.text == "round 3 was made by 2 peers without this one"


def test_a_dear_table_takes_half_a_percent_of_a_core_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, spent, made = [0.0], [0.0], [0.0]
    monkeypatch.setattr(
        panels, "time", SimpleNamespace(monotonic=lambda: clock[0], thread_time=lambda: spent[0])
    )

    def compute() -> float:
        made.append(clock[0])
        clock[0] += 3.0
        spent[0] += 3.0
        return clock[0]

    table = panels.CachedValue(compute, least_s=20.0)
    while clock[0] < 20_000.0:
        table.get()
        clock[0] += 1.0
    first, *others = made[1:]
    assert others[0] - first < 30.0  # the first, which also imports, tells nothing of the next
    assert 3.0 * len(others) <= 0.005 * 20_000.0 + 2 * 3.0 and len(others) > 20


def test_a_table_that_waited_for_a_disk_is_made_again_as_soon_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(panels, "time", SimpleNamespace(monotonic=lambda: clock[0], thread_time=lambda: 0.0))
    waits_s = iter([0.0, 60.0, 0.0])

    def compute() -> float:
        clock[0] += next(waits_s)
        return clock[0]

    table = panels.CachedValue(compute, least_s=2.5)
    table.get()
    for clock[0], made_at in ((10.0, 70.0), (72.0, 70.0), (73.0, 73.0)):
        assert table.get() == made_at


def test_the_newest_save_is_that_of_the_largest_step_whatever_its_digits() -> None:
    names = ["step-999999.i001", "step-1000000.i002", "<b>", "step-1000000.i010", "step-000001.i001"]
    ordered = ["step-1000000.i010", "step-1000000.i002", "step-999999.i001", "step-000001.i001", "<b>"]
    assert newest_first(names) == ordered


def test_a_rank_whose_journal_cannot_be_read_is_shown_without_its_seconds(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    ranks_of(run, [0.1, 0.1], world=2)
    run.rundir.journal(rank=1).unlink()
    run.rundir.journal(rank=1).mkdir()
    assert [(row.rank, row.own_s > 0.0) for row in panel_of(run).rows] == [(0, True), (1, False)]
