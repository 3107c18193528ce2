"""`bloomery drill`: the phases of a recovery, and the table of time-outs (tests/soak/ has real faults)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from tests.faults.commands import bloomery

from bloomery.cli.drill import drill_text, timeouts_text
from bloomery.cli.tables import COLUMNS
from bloomery.config.submit import SubmitSection
from bloomery.events import timeouts
from bloomery.events.heartbeat import RankActivity, RankBeat
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.drill.allocation import DrillNodes
from bloomery.operate.drill.exercise import DrillPlan, DrillResult, _let_nodes_back
from bloomery.operate.drill.faults import EFFECTS, DrillFault, DrillTarget, inject
from bloomery.operate.drill.phases import RecoveryPhases, phases_of
from bloomery.operate.exclusions import Exclusions, QuarantinedNode
from bloomery.operate.standstill import StandstillLimits
from bloomery.operate.timeouts import contradictions, run_timeouts

Train = Callable[..., list[str]]


def beat(*, rank: int = 0, gap_s: float = 0.0, **longest_s: float) -> RankBeat:
    activities = {RankActivity[name.upper()]: seconds for name, seconds in longest_s.items()}
    return RankBeat(rank=rank, world=2, gap_s=gap_s, longest_s=activities, first_s=activities)


def test_phases_follow_one_another_and_add_up() -> None:
    operations = [
        {"event": "attempt", "time": 50.0},
        {"event": "attempt_end", "time": 103.0},
        {"event": "attempt", "time": 104.5},
    ]
    events = [
        {"event": "start", "time": 60.0, "spent": {"loading a checkpoint": 9.0}},
        {"event": "step", "time": 99.0},
        {"event": "step", "time": 100.5},  # of the ranks that were still there
        {"event": "start", "time": 110.0, "spent": {"loading a checkpoint": 1.5}},
        {"event": "step", "time": 110.25},
        {"event": "step", "time": 111.0},
    ]
    phases = phases_of(100.0, noticed=102.0, operations=operations, events=events)
    assert phases == RecoveryPhases(
        noticed=2.0, ended=1.0, restarted=1.5, started=4.0, loaded=1.5, stepped=0.25
    )
    assert phases.total_s == 10.25


def test_a_phase_that_did_not_come_is_none_and_the_next_begins_where_the_last_ended() -> None:
    slow = phases_of(100.0, noticed=None, operations=[], events=[{"event": "step", "time": 103.0}])
    assert slow == RecoveryPhases(stepped=3.0) and slow.total_s == 3.0
    ended = [{"event": "attempt_end", "time": 101.0}]
    given_up = phases_of(100.0, noticed=102.0, operations=ended, events=[])
    assert (given_up.noticed, given_up.ended, given_up.total_s) == (2.0, 0.0, None)
    anew = phases_of(
        100.0, noticed=102.0, operations=[*ended, {"event": "attempt", "time": 105.0}], events=[]
    )
    assert anew == RecoveryPhases(noticed=2.0, ended=0.0, restarted=3.0), "no second counts twice"


@pytest.mark.parametrize(
    ("operations", "events", "expected"),
    [
        ([("attempt_end", 100.0)], [("step", None), ("step", 100.0), ("step", 103.0)], {"stepped": 3.0}),
        ([("attempt_end", 102.0)], [("step", 101.0)], {"ended": 2.0}),
        (
            [("attempt", 104.0), ("attempt", 200.0)],
            [("step", 105.0), ("start", 110.0), ("start", 112.0), ("step", 113.0)],
            {"restarted": 4.0, "started": 6.0, "loaded": 0.0, "stepped": 3.0},
        ),
        (
            [("attempt", 104.0)],
            [("start", 104.0), ("step", 104.0), ("start", 110.0), ("step", 111.0)],
            {"restarted": 4.0, "started": 6.0, "loaded": 0.0, "stepped": 1.0},
        ),
    ],
)
def test_a_recovery_is_of_what_came_after_the_fault_and_after_the_first_new_attempt(
    operations: list[tuple[str, float]], events: list[tuple[str, float | None]], expected: dict[str, float]
) -> None:
    records, journal = (
        [{"event": name, "time": time} for name, time in told] for told in (operations, events)
    )
    found = phases_of(100.0, noticed=None, operations=records, events=journal)
    assert found == RecoveryPhases(**expected)


def test_time_outs_follow_the_slowest_rank() -> None:
    beats = {0: beat(gap_s=1.0, computing=2.0, saving=5.0), 1: beat(rank=1, gap_s=9.0, computing=8.0)}
    table = {timeout.name: timeout.seconds for timeout in run_timeouts(beats)}
    assert table["silence of a process"] == 18.0
    assert table["hang in a step"] == 24.0
    assert table["hang in a save"] == 15.0
    assert table["hang in loading"] == 1800.0  # not measured yet
    assert table["hang in evaluating"] == 80.0  # ten times the longest step
    assert table["hang in a compiling step"] == 480.0
    assert {row.name: row.seconds for row in run_timeouts({})}["hang in a compiling step"] == 1800.0
    compiled = run_timeouts({0: replace(beats[0], first_s={RankActivity.COMPUTING: 170.0})})
    assert {row.name: row.seconds for row in compiled}["hang in a compiling step"] == 510.0
    assert table["hang at the end"] == 315.0
    assert table["a collective"] == timeouts.COLLECTIVE_TIMEOUT_S
    assert list(table.values()) == sorted(table.values())


def test_a_standstill_that_torch_ends_first_is_told() -> None:
    quick = {0: beat(computing=2.0, saving=5.0, loading=1.0, evaluating=1.0)}
    assert contradictions(run_timeouts(quick)) == []
    slow = {0: beat(computing=2.0, saving=250.0, loading=1.0, evaluating=1.0)}
    (line,) = contradictions(run_timeouts(slow))
    assert line.startswith("a hang in a save is noticed after 750 s, and torch ends a collective")


def test_a_standstill_is_noticed_first_only_if_it_is_noticed_before_torchs_time_out() -> None:
    third = timeouts.COLLECTIVE_TIMEOUT_S / 3
    assert len(contradictions(run_timeouts({0: beat(saving=third, evaluating=1.0, loading=1.0)}))) > len(
        contradictions(run_timeouts({0: beat(saving=third - 1.0, evaluating=1.0, loading=1.0)}))
    )


def test_a_quick_evaluation_is_given_as_long_as_anything_else() -> None:
    table = {timeout.name: timeout.seconds for timeout in run_timeouts({0: beat(evaluating=1.0)})}
    assert table["hang in evaluating"] == StandstillLimits().least_s


def test_each_time_out_has_the_limit_of_its_own() -> None:
    limits = StandstillLimits(first_s=70.0, evaluation_s=50.0, ending_s=90.0, silence_s=8.0, compile_s=200.0)
    table = {row.name: row.seconds for row in run_timeouts({0: beat(computing=1.0)}, limits=limits)}
    assert (table["hang in first eager turns"], table["hang in evaluating"]) == (70.0, 50.0)
    assert (table["hang at the end"], table["silence of a process"]) == (90.0, 8.0)
    assert table["hang in a compiling step"] == 200.0


def test_the_tables_fit_the_terminal(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path / "run")
    rundir.create()
    hours = RankBeat(
        world=2048, gap_s=1234.567, longest_s=dict.fromkeys(RankActivity, 12345.678), attempt="a"
    )
    phases = RecoveryPhases(noticed=599.9, ended=599.9, restarted=599.9, started=599.9, stepped=599.9)
    result = DrillResult(
        fault=DrillFault.LAUNCHER, survived=False, phases=phases, cause="a cause of many words " * 5
    )
    rundir.heartbeat().parent.mkdir(parents=True, exist_ok=True)
    rundir.heartbeat().write_text(json.dumps(hours.__dict__))
    measured, unmeasured = timeouts_text(rundir, world=1), timeouts_text(RunDirectory(tmp_path), world=1)
    assert "3 × longest 1.23e+04 s" in measured and "not measured yet" in unmeasured
    for text in (measured, unmeasured, drill_text([result], None)):
        assert max(map(len, text.splitlines())) <= COLUMNS
        assert "…" not in text


def test_an_unknown_fault_and_a_run_that_exists_are_refused(
    train_command: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    recipe, run = train_command()[1], tmp_path / "run"
    bloomery("drill", recipe, "--faults", "kill,meteor").refuses("'kill,meteor'", "the kinds are", "launcher")
    (run / "recipe.toml").touch()
    bloomery("drill", recipe, "--run", run).refuses(str(run), "holds a run already")
    bloomery("drill", "--timeouts", tmp_path / "none").refuses("none")
    assert set(EFFECTS) == set(DrillFault)
    assert not list(scratch.iterdir())


def test_the_shared_memory_of_the_machine_is_never_filled(tmp_path: Path) -> None:
    target = DrillTarget(rundir=RunDirectory(tmp_path), beats=[beat()], launcher=0)
    with pytest.raises(AssertionError, match="private /dev/shm"):
        inject(DrillFault.SHM, target, Random(0))


@pytest.mark.parametrize("is_allocation", [True, False])
def test_a_node_whose_launcher_the_drill_killed_is_let_back_where_the_list_is_the_drills_own(
    tmp_path: Path, *, is_allocation: bool
) -> None:
    rundir = RunDirectory(tmp_path / "run")
    rundir.create()
    exclusions = Exclusions.of(rundir, SubmitSection())
    exclusions.add(QuarantinedNode(host="node2", cause="node lost", since=1.0))
    nodes = DrillNodes(count=2, here="node1", is_allocation=is_allocation)
    _let_nodes_back(DrillPlan(rundir=rundir, command=(), world=2, faults=(), nodes=nodes))
    assert set(exclusions.nodes()) == (set() if is_allocation else {"node2"})
