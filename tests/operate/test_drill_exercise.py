"""Whole drills of a run of two small programs: a launcher that starts its rank again, and a rank."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from bloomery.errors import TrainingFailed
from bloomery.events.heartbeat import read_beat
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.drill import exercise as exercise_module
from bloomery.operate.drill.allocation import DrillNodes
from bloomery.operate.drill.exercise import DrillPlan, DrillResult, exercise
from bloomery.operate.drill.faults import DrillFault

RANK = """
import os, sys, time
from pathlib import Path
from bloomery.events.heartbeat import Heartbeat, RankActivity
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
run, parent, first = RunDirectory(Path(sys.argv[1])), os.getppid(), int(sys.argv[2])
beat, journal = Heartbeat(run.heartbeat()), Journal(run.journal())
journal.write("start", incarnation=1, step=first, spent={"loading a checkpoint": 0.001})
step = first
while os.getppid() == parent:  # it ends with its launcher
    step += 1
    print("step", step, file=sys.stderr, flush=True)
    beat.at(step=step, incarnation=1)
    beat.enter(RankActivity.COMPUTING)
    beat.write()
    if step == first + 1:  # a heartbeat may be written between a step and its line
        time.sleep(0.2)
    journal.write("step", incarnation=1, step=step)
    time.sleep(0.01)
"""
LAUNCHER = """
import os, subprocess, sys
from pathlib import Path
from bloomery.events.heartbeat import ATTEMPT
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
path, rank, attempts = sys.argv[1], sys.argv[2], int(sys.argv[3])
journal = Journal(RunDirectory(Path(path)).operations)
print("beginning", file=sys.stderr, flush=True)
for number in range(attempts):
    name = f"{os.getpid()}-{number}"
    journal.write("attempt", incarnation=0, step=0, attempt=name)
    environment = os.environ | {ATTEMPT: name}
    status = subprocess.run([sys.executable, "-c", rank, path, "100"], env=environment).returncode
    print(f"rank 0 was ended by signal {-status}", file=sys.stderr, flush=True)
    journal.write("attempt_end", incarnation=0, step=0, attempt=name, status=status)
    journal.write("diagnosis", incarnation=0, step=0, attempt=name, cause="killed")
print("no further attempt", file=sys.stderr, flush=True)
"""


class SmallRun(DrillNodes):
    """A drill's machine, with the program above in place of `bloomery launch`."""

    def launch(self) -> list[str]:
        return [sys.executable, "-c", LAUNCHER]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    rundir = RunDirectory(tmp_path / "run").create()
    for name in ("one", "two"):
        (rundir.checkpoints / name).mkdir()
        (rundir.checkpoints / name / "manifest.json").touch()
    monkeypatch.setattr(exercise_module, "newest_step", lambda rundir: 100)
    meeting = tmp_path / "meeting"
    meeting.touch()
    monkeypatch.setenv("BLOOMERY_RENDEZVOUS_FILE", str(meeting))
    return rundir


def drilled(
    run: RunDirectory, *faults: DrillFault, attempts: int = 9, **more: float
) -> tuple[list[DrillResult], list[str]]:
    """Return what came of each fault, and what was said."""
    command, said = (str(run.path), RANK, str(attempts)), list[str]()
    plan = DrillPlan(rundir=run, command=command, world=1, faults=faults, nodes=SmallRun(), steps_between=3)
    for name, value in more.items():
        setattr(plan, name, value)
    return list(exercise(plan, say=said.append)), said


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_each_fault_is_injected_into_a_run_that_steps_and_followed_until_it_steps_again(
    run: RunDirectory, tmp_path: Path
) -> None:
    faults = (DrillFault.STORE, DrillFault.KILL, DrillFault.LAUNCHER)
    results, said = drilled(run, *faults)
    assert [result.fault for result in results] == list(faults)
    assert all(result.survived for result in results) and len(said) == 3
    assert [result.cause for result in results] == ["", "killed", ""]
    store, kill, launcher = (result.phases for result in results)
    assert (store.noticed, store.restarted, store.total_s) == (None, None, store.stepped)
    assert not (tmp_path / "meeting").exists()
    for phases in (kill, launcher):
        assert phases.noticed is not None and phases.restarted is not None and phases.total_s is not None
        assert 0.0 < phases.total_s < 60.0 and phases.loaded == pytest.approx(0.001, abs=0.0005)
    names = [event["attempt"] for event in read_journal(run.operations) if event["event"] == "attempt"]
    first, second = (names[place].partition("-")[0] for place in (0, -1))
    assert names == [f"{first}-0", f"{first}-1", f"{second}-0"] and first != second
    beat = read_beat(run.heartbeat())
    assert beat is not None and not lives(int(second)), "the drill ends the run with itself"
    deadline = time.monotonic() + 20.0
    while lives(beat.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not lives(beat.pid)


def test_a_run_that_is_not_started_again_has_not_survived(run: RunDirectory) -> None:
    ((result,), _) = drilled(run, DrillFault.KILL, attempts=1)
    assert (result.survived, result.cause, result.phases.total_s) == (False, "killed", None)
    assert result.phases.noticed is not None and result.phases.ended is not None


def test_a_run_that_ends_by_itself_is_told_with_its_last_words(run: RunDirectory) -> None:
    with pytest.raises(TrainingFailed, match="ended by itself:\nbeginning\nno further attempt"):
        drilled(run, DrillFault.KILL, attempts=0)


def test_a_run_that_makes_no_steps_or_no_checkpoints_is_given_up_after_a_while(run: RunDirectory) -> None:
    with pytest.raises(TrainingFailed, match="made no 100000 steps and 1 checkpoints in 1 s"):
        drilled(run, DrillFault.KILL, patience_s=0.7, steps_between=100_000)
    (run.checkpoints / "two" / "manifest.json").unlink()
    with pytest.raises(TrainingFailed, match="and 2 checkpoints"):  # a damaged one leaves one to go back to
        drilled(run, DrillFault.FLIP, patience_s=0.7)
