"""What a drill waits for and takes for a recovery, by records and heartbeats that are written here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.errors import TrainingFailed
from bloomery.events.heartbeat import RankActivity, RankBeat
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.drill import exercise as module
from bloomery.operate.drill.allocation import DrillNodes
from bloomery.operate.drill.exercise import (
    DrillPlan,
    DrillResult,
    _await_ranks_end,
    _has_stepped,
    _Launcher,
    _recovery,
    _stepping,
    exercise,
)
from bloomery.operate.drill.faults import DrillFault
from bloomery.operate.drill.phases import RecoveryPhases

HERE = os.getpid()


class Clock:
    """Seconds that pass only while somebody sleeps; what shall happen then is told by moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.later: dict[float, Callable[[], None]] = {}
        self.monotonic = self.time = lambda: self.now
        monkeypatch.setattr(module, "time", self)

    def sleep(self, seconds: float) -> None:
        assert seconds == 0.05
        self.now = round(self.now + seconds, 2)
        for moment in [moment for moment in self.later if moment <= self.now]:
            self.later.pop(moment)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> dict[int, RankBeat]:
    """The heartbeats that the drill reads; they can be changed."""
    shown = {rank: beat(rank=rank) for rank in range(2)}

    def read(rundir: RunDirectory, *, ranks: range, attempt: str) -> dict[int, RankBeat]:
        assert list(ranks) == [0, 1] and attempt == ""
        return dict(shown)

    monkeypatch.setattr(module, "read_beats", read)
    return shown


def beat(**fields: Any) -> RankBeat:
    told = {"world": 2, "step": 20, "incarnation": 1, "pid": HERE, "attempt": "b", "host": "here"}
    return RankBeat(**{**told, **fields})


def plan_of(tmp_path: Path, **fields: Any) -> DrillPlan:
    told = {"command": ("r",), "world": 2, "faults": (), "steps_between": 5, "patience_s": 10.0}
    return DrillPlan(rundir=RunDirectory(tmp_path / "run").create(), **{**told, **fields})


def launcher_of(plan: DrillPlan, *, ended: bool = False, pid: int = 77) -> _Launcher:
    process: Any = SimpleNamespace(poll=lambda: 1 if ended else None, pid=pid)
    return _Launcher(plan, process)


ACROSS = DrillNodes(count=2, here="here", is_allocation=True)


def test_the_ranks_of_a_killed_launcher_are_waited_for_until_none_lives(
    tmp_path: Path, clock: Clock, beats: dict[int, RankBeat]
) -> None:
    plan = plan_of(tmp_path)
    clock.later = {1002.0: beats.clear}
    _await_ranks_end(plan, 1010.0)
    assert clock.now == 1002.0
    beats[1] = beat(rank=1)
    beats[0] = beat(pid=2**30)
    _await_ranks_end(plan, 1010.0)
    assert clock.now == 1010.0, "one of them lives to the deadline"


def test_a_rank_lives_whatever_its_name_until_it_has_ended(tmp_path: Path) -> None:
    command = tmp_path / "Z Zz"
    shutil.copy(shutil.which("sleep") or "", command)
    with subprocess.Popen([str(command), "60"]) as rank:
        assert module._lives(RankBeat(pid=rank.pid), DrillNodes())
        rank.kill()
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        assert not module._lives(RankBeat(pid=rank.pid), DrillNodes()), "nobody has waited for it yet"


def saved(plan: DrillPlan, count: int) -> None:
    for number in range(count):
        (plan.rundir.checkpoints / f"c{number}").mkdir(exist_ok=True)
        (plan.rundir.checkpoints / f"c{number}" / "manifest.json").touch()


def test_all_ranks_are_returned_when_the_slowest_has_made_its_steps(
    tmp_path: Path, clock: Clock, beats: dict[int, RankBeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path)
    saved(plan, 1)
    monkeypatch.setattr(module, "newest_step", lambda rundir: 8)
    beats[0] = beat(step=23)
    moves = {1001.0: (40, 24), 1002.0: (41, 25)}  # the slowest was at step 20, and shall make five
    for moment, steps in moves.items():
        made = {rank: beat(rank=rank, step=step) for rank, step in enumerate(steps)}
        clock.later[moment] = lambda made=made: beats.update(made)  # type: ignore[misc]
    assert _stepping(plan, launcher_of(plan), saves=1, newer_than=7) == [
        beat(step=41),
        beat(rank=1, step=25),
    ]
    assert clock.now == 1002.0


@pytest.mark.parametrize(
    ("changed", "saves", "newest", "beyond"),
    [
        ({"activity": RankActivity.ENDED}, 1, 8, ""),
        ({"pid": 2**30}, 1, 8, ""),
        ({"attempt": "a"}, 1, 8, ""),
        ({"incarnation": 0}, 1, 8, ""),
        (None, 1, 8, ""),
        ({}, 2, 8, ""),
        ({}, 1, 7, " beyond step 7"),
        ({}, 1, 0, " beyond step 0"),
    ],
)
def test_no_fault_is_injected_before_all_ranks_run_and_enough_is_saved(
    tmp_path: Path,
    clock: Clock,
    beats: dict[int, RankBeat],
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any] | None,
    saves: int,
    newest: int,
    beyond: str,
) -> None:
    plan = plan_of(tmp_path, steps_between=0, patience_s=2.0)
    saved(plan, 1)
    monkeypatch.setattr(module, "newest_step", lambda rundir: newest)
    if changed is None:
        del beats[1]
    elif "incarnation" in changed:
        beats.update({rank: beat(rank=rank, **changed) for rank in beats})
    elif changed:
        beats[1] = beat(rank=1, **changed)
    words = f"made no 0 steps and {saves} checkpoints{beyond} in 2 s"
    with pytest.raises(TrainingFailed, match=words) as refused:
        _stepping(plan, launcher_of(plan), saves=saves, newer_than=newest if beyond else -1)
    assert "checkpoint.every_steps" in refused.value.remedy and "--patience" in refused.value.remedy
    assert clock.now == 1002.0


def test_a_run_that_has_ended_by_itself_is_not_waited_for(
    tmp_path: Path, clock: Clock, beats: dict[int, RankBeat]
) -> None:
    plan = plan_of(tmp_path)
    launcher = launcher_of(plan, ended=True)
    launcher.said.append((1.0, "out of memory"))
    with pytest.raises(TrainingFailed, match="ended by itself:\nout of memory\n") as refused:
        _stepping(plan, launcher, saves=1, newer_than=-1)
    assert refused.value.remedy == "Mend it first."
    assert clock.now == 1000.0


def test_a_run_that_ends_after_its_first_steps_is_not_waited_for(
    tmp_path: Path, clock: Clock, beats: dict[int, RankBeat]
) -> None:
    plan, looks = plan_of(tmp_path, steps_between=100, patience_s=600.0), [True, True, True]

    class Ending:
        @property
        def is_running(self) -> bool:
            return bool(looks) and looks.pop()

        def last_words(self) -> str:
            return "out of memory"

    with pytest.raises(TrainingFailed, match="ended by itself:\nout of memory"):
        _stepping(plan, Ending(), saves=0, newer_than=-1)  # type: ignore[arg-type]
    assert clock.now < 1010.0


def record(path: Path, *events: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"incarnation": 1, "step": 0, **event}) + "\n" for event in events))


ATTEMPT = {"event": "attempt", "time": 1001.0, "attempt": "b"}
START = {"event": "start", "time": 1002.0, "step": 16}
STEP = {"event": "step", "time": 1003.0, "step": 17}


@pytest.mark.parametrize(
    ("operations", "journal", "steps", "stepped"),
    [
        ([ATTEMPT], [START, STEP], (17, 17), True),
        ([ATTEMPT], [START, STEP], (16, 17), False),
        ([], [START, STEP], (17, 17), False),
        ([ATTEMPT | {"time": 1000.0}], [START, STEP], (17, 17), False),
        ([ATTEMPT | {"attempt": "c"}], [START, STEP], (17, 17), False),
        ([ATTEMPT | {"attempt": "c"}, ATTEMPT, {"event": "note", "time": 9999.0}], [START, STEP],
         (17, 17), True),
        ([ATTEMPT], [STEP], (17, 17), False),
        ([ATTEMPT], [START], (17, 17), False),
        ([ATTEMPT], [STEP, START], (17, 17), False),
        ([ATTEMPT], [START | {"time": 1000.0}, STEP], (17, 17), False),
        ([ATTEMPT], [START, STEP, START | {"step": 18}], (17, 17), False),
        ([ATTEMPT], [START, START | {"step": 12}, STEP], (13, 13), True),
    ],
)  # fmt: skip
def test_a_run_steps_again_when_its_newest_attempt_has_written_a_step(
    tmp_path: Path,
    beats: dict[int, RankBeat],
    operations: list[dict[str, Any]],
    journal: list[dict[str, Any]],
    steps: tuple[int, int],
    stepped: bool,
) -> None:
    plan = plan_of(tmp_path)
    record(plan.rundir.operations, *operations)
    record(plan.rundir.journal(), *journal)
    beats.update({rank: beat(rank=rank, step=step) for rank, step in enumerate(steps)})
    assert _has_stepped(plan, DrillFault.KILL, 1000.0, 20) is stepped
    if stepped:
        beats[1] = beat(rank=1, step=30, attempt="a")
        assert not _has_stepped(plan, DrillFault.KILL, 1000.0, 20)
        del beats[1]
        assert not _has_stepped(plan, DrillFault.KILL, 1000.0, 20)


def test_a_run_that_lives_through_a_fault_makes_more_steps_than_it_makes_between_two(
    tmp_path: Path, beats: dict[int, RankBeat]
) -> None:
    plan = plan_of(tmp_path)
    beats.update({0: beat(step=26), 1: beat(step=26)})
    assert _has_stepped(plan, DrillFault.SLOW, 1000.0, 20)
    beats[1] = beat(step=25)
    assert not _has_stepped(plan, DrillFault.SLOW, 1000.0, 20)


def test_a_recovery_has_the_first_cause_that_was_found_after_the_fault(
    tmp_path: Path, clock: Clock, beats: dict[int, RankBeat]
) -> None:
    plan = plan_of(tmp_path)
    found = [
        {"event": "diagnosis", "cause": f"c{time:.0f}", "time": time} for time in (999.0, 1000.5, 1002.5)
    ]
    record(plan.rundir.operations, found[0], ATTEMPT | {"event": "attempt_end", "time": 1000.75}, *found[1:],
           ATTEMPT)  # fmt: skip
    record(plan.rundir.journal(), START, STEP)
    launcher = launcher_of(plan)
    launcher.said.append((1000.25, "rank 0 was ended by signal 9"))
    clock.later = {1004.0: lambda: beats.update({rank: beat(rank=rank, step=17) for rank in beats})}
    for rank in beats:
        beats[rank] = beat(rank=rank, step=16)
    phases = RecoveryPhases(noticed=0.25, ended=0.5, restarted=0.25, started=1.0, loaded=0.0, stepped=1.0)
    assert _recovery(plan, launcher, DrillFault.KILL, 1000.0, step=20) == DrillResult(
        fault=DrillFault.KILL, survived=True, phases=phases, cause="c1000"
    )
    assert clock.now == 1004.0


def test_a_run_that_does_not_step_within_the_patience_or_ends_has_not_survived(
    tmp_path: Path, clock: Clock, beats: dict[int, RankBeat]
) -> None:
    plan = plan_of(tmp_path)
    lost = DrillResult(fault=DrillFault.KILL, survived=False, phases=RecoveryPhases())
    assert _recovery(plan, launcher_of(plan), DrillFault.KILL, 1000.0, step=20) == lost
    assert clock.now == 1010.0
    assert _recovery(plan, launcher_of(plan, ended=True), DrillFault.KILL, 1000.0, step=20) == lost
    assert clock.now == 1010.0
    record(plan.rundir.operations, ATTEMPT)
    record(plan.rundir.journal(), START, STEP)
    beats.update({rank: beat(rank=rank, step=17) for rank in range(2)})
    assert _has_stepped(plan, DrillFault.KILL, 1000.0, 20), "and then its launcher ended"
    assert not _recovery(plan, launcher_of(plan, ended=True), DrillFault.KILL, 1000.0, step=20).survived


def test_a_launcher_that_was_killed_is_started_once_more_after_its_ranks_have_ended(
    tmp_path: Path, clock: Clock, beats: dict[int, RankBeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, done = plan_of(tmp_path), list[Any]()
    launcher = launcher_of(plan, ended=True)
    monkeypatch.setattr(
        module, "_await_ranks_end", lambda plan, deadline: (done.append(deadline), clock.sleep(0.05))
    )
    monkeypatch.setattr(module, "_let_nodes_back", lambda plan: done.append("back"))
    monkeypatch.setattr(_Launcher, "start", lambda launcher: done.append("start"))
    result = _recovery(plan, launcher, DrillFault.LAUNCHER, 998.0, step=20)
    assert done == [1010.0, "back", "start"] and clock.now == 1010.0
    assert (result.survived, result.phases) == (False, RecoveryPhases(noticed=2.0))


def test_a_supervisor_that_would_give_up_is_spared_until_the_run_has_saved_again(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [
        *[DrillFault.KILL] * 2,
        DrillFault.SLOW,
        *[DrillFault.KILL] * 3,
        DrillFault.FLIP,
        DrillFault.KILL,
    ]
    newest = iter([8, 8, 8, 8, 12, 12, 12, 12])
    waits, done, begun = list[tuple[int, int]](), list[Any](), list[float]()
    told = [beat(step=20, pid=5), beat(rank=1, step=23)]

    def stepping(plan: DrillPlan, launcher: _Launcher, *, saves: int, newer_than: int) -> list[RankBeat]:
        waits.append((saves, newer_than))
        return told

    def inject(fault: DrillFault, target: Any, rng: Any) -> Callable[[], None]:
        assert (target.beats, target.launcher, target.nodes) == (told, 77, plan.nodes)
        assert target.shm == Path("/proc/5/root/dev/shm") and target.rundir == plan.rundir
        assert rng.getstate() == Random(7).getstate()
        begun.append(clock.now)
        clock.sleep(0.05)
        if len(done) == 2 and fault is DrillFault.SLOW:
            raise ProcessLookupError
        return lambda: done.append("undo")

    def recovery(plan: Any, launcher: Any, fault: DrillFault, struck: float, *, step: int) -> DrillResult:
        assert (struck, step) == (begun[-1], 23)
        return DrillResult(fault=fault, survived=True, phases=RecoveryPhases())

    plan = plan_of(tmp_path, faults=faults, private_shm_mib=1, nodes=ACROSS, seed=7)
    monkeypatch.setattr(module, "_stepping", stepping)
    monkeypatch.setattr(module, "inject", inject)
    monkeypatch.setattr(module, "_recovery", recovery)
    monkeypatch.setattr(module, "newest_step", lambda rundir: next(newest))
    monkeypatch.setattr(
        _Launcher, "start", lambda launcher: setattr(launcher, "process", SimpleNamespace(pid=77))
    )
    monkeypatch.setattr(_Launcher, "end", lambda launcher: done.append("end"))
    said: list[str] = []
    results = exercise(plan, say=said.append)
    first = next(results)
    assert first.fault is DrillFault.KILL and done == [] and said == ["kill: injected at step 20"]
    assert next(results).fault is DrillFault.KILL and done == ["undo"]
    # A rank that ended before it could be slowed down gives no result.
    assert [result.fault for result in results] == [*faults[3:]]
    assert waits == [(1, -1), (1, -1), (1, -1), (1, -1), (1, 8), (1, -1), (2, -1), (1, 12)]
    assert done.count("undo") == 14 and done[-1] == "end", "once after each fault, and all at the end"
