"""`bloomery launch --supervise`: real ranks that are killed, stopped, and fail by themselves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.commands import bloomery, running, wait_for

from bloomery.events.heartbeat import RankBeat, read_beat
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.blame import FailureEvidence, RankEnd, diagnose
from bloomery.operate.ledger.books import read_ledger
from bloomery.operate.ledger.time_class import TimeClass
from bloomery.operate.standstill import StandstillLimits
from bloomery.operate.supervise import RestartBudget, why_no_restart

Train = Callable[..., list[str]]


@pytest.fixture
def supervised(train_command: Train) -> Train:
    return lambda *more: ["launch", *train_command(*more)[1:], "--nproc", "2", "--supervise"]


def told(run: RunDirectory, event: str) -> list[dict]:
    return [record for record in read_journal(run.operations) if record["event"] == event]


def beat_of(run: RunDirectory, *, attempt: int, from_step: int) -> RankBeat:
    """Wait until rank 1 of an attempt has made so many steps, and return its heartbeat."""
    path = run.heartbeat(rank=1)

    def has_come() -> bool:
        beat = read_beat(path)
        return beat is not None and beat.attempt.endswith(f"-{attempt}") and beat.step >= from_step

    wait_for(has_come)
    beat = read_beat(path)
    assert beat is not None
    return beat


def test_a_killed_and_a_stopped_rank_are_named_and_the_run_starts_again(
    supervised: Train, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    with running(*supervised("train.samples=4000"), log=tmp_path / "log") as launcher:
        os.kill(beat_of(run, attempt=0, from_step=6).pid, signal.SIGKILL)
        stopped = beat_of(run, attempt=1, from_step=12)
        os.kill(stopped.pid, signal.SIGSTOP)
        wait_for(lambda: len(told(run, "diagnosis")) == 2)
        wait_for(lambda: len(told(run, "attempt")) == 3)
        wait_for(lambda: run.chronicle.exists() and "· hang" in run.chronicle.read_text())
        said = launcher.said()
    killed, hang = told(run, "diagnosis")
    assert (killed["cause"], killed["culprit"]["rank"], killed["retries"]) == ("killed", 1, True)
    assert (hang["cause"], hang["culprit"]["rank"], hang["sure"]) == ("hang", 1, True), hang
    assert "rank 0 waits in the" in said.err and "for rank 1 on" in said.err
    assert "the process is stopped" in said.err and said.err.count("starting again") == 2
    ledger = read_ledger(run)
    assert ledger is not None and [incident.cause for incident in ledger.story.incidents] == [
        "killed",
        "hang",
    ]
    assert ledger.total_s == pytest.approx(2 * (ledger.end - ledger.begin))
    seconds = ledger.seconds
    assert seconds.get(TimeClass.UNEXPLAINED, 0.0) < 0.005 * ledger.total_s
    # Both ranks stood still for as long as a process may at least be silent.
    assert seconds[TimeClass.HANG] > 2 * StandstillLimits().silence_s
    assert seconds[TimeClass.TRAINING] > 0


def test_a_failure_that_would_repeat_is_not_started_again(supervised: Train, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.checkpoints.rmdir()
    run.checkpoints.write_text("a file is where a directory is needed")
    said = bloomery(*supervised("--nproc", "1"))
    assert said.status == 65, said
    (diagnosis,) = told(run, "diagnosis")
    assert diagnosis["cause"] == "exception" and not diagnosis["retries"]
    assert "not started again: the same start would fail again" in said.err
    assert len(told(run, "attempt")) == 1


def test_restarts_without_a_newer_checkpoint_come_to_an_end() -> None:
    killed = diagnose(FailureEvidence(ranks=[RankEnd(rank=0, host="node0", status=-9)]))
    budget = RestartBudget(without_progress=3, in_all=10)
    assert why_no_restart(killed, budget=budget, in_a_row=2, in_all=2) == ""
    assert "no newer checkpoint" in why_no_restart(killed, budget=budget, in_a_row=3, in_all=3)
    assert "10 times" in why_no_restart(killed, budget=budget, in_a_row=0, in_all=10)
