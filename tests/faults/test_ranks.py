"""Two ranks on one machine: what they learn, how they stop, and how they die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.commands import Said, bloomery, events, running, steps_told, wait_for

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory

Train = Callable[..., list[str]]
TWO = ("--nproc", "2")
LENGTH = "train.samples=800"
"""Long enough that a request comes before the end, however late the test is."""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_two_ranks_take_requests_stop_together_go_on_and_learn_what_one_process_learns(
    train_command: Train, here: Callable[..., Said], tmp_path: Path
) -> None:
    # On a machine with other work the guard of the speed would speak.
    run, command = tmp_path / "run", train_command(LENGTH, *TWO, "guard.throughput=false")
    RunDirectory(run).create().control("set").write_text("checkpoint.every_steps = 2\n")
    with running(*command, log=tmp_path / "log") as launcher:
        assert launcher.wait_until(lambda: events(run, "checkpoint")), launcher.said()
        launcher.process.terminate()
        said = launcher.ended()
    assert (said.status, said.err) == (143, "")
    assert said.out.count("saved and stopped at step") == 1 and "signal SIGTERM" in said.out
    for name, fields in (("setting", ("step", "key")), ("end", ("step", "reason"))):
        told = [[[one[key] for key in fields] for one in events(run, name, rank=rank)] for rank in (0, 1)]
        assert told[0] == told[1] and len(told[0]) == 1, told
    assert events(run, "checkpoint")[0]["step"] == 2
    last = bloomery(*command)
    assert (last.status, last.err) == (0, "")
    assert here(*train_command(LENGTH, run="one")).status == 0
    curves = [loss_curve(RunDirectory(run), rank=rank) for rank in (0, 1)]
    assert curves[0] == curves[1]
    for (step, two), (same, one) in zip(curves[0], loss_curve(RunDirectory(tmp_path / "one")), strict=True):
        assert step == same
        assert two == pytest.approx(one, abs=1e-5), step


def test_when_a_rank_or_the_launcher_dies_all_end_and_the_same_command_goes_on(
    train_command: Train, tmp_path: Path
) -> None:
    run, command = tmp_path / "run", train_command("train.samples=1000000", *TWO)
    with running(*command, log=tmp_path / "first") as launcher:
        assert launcher.wait_until(lambda: events(run, "checkpoint")), launcher.said()
        (victim,) = (record["pid"] for record in events(run, "start", rank=1))
        os.kill(victim, signal.SIGKILL)
        launcher.ended().refuses(
            f"rank 1 (process {victim}) on", "was ended by SIGKILL", "the same command goes on", status=137
        )
    assert bloomery("ckpt", "verify", run).status == 0
    before = checkpoints(RunDirectory(run))[-1].step  # what is committed: the journal may not tell of it yet
    with running(*command, log=tmp_path / "second") as launcher:
        assert launcher.wait_until(lambda: len(events(run, "start", rank=1)) == 2), launcher.said()
        assert launcher.wait_until(lambda: steps_told(run, rank=1) > before)
        ranks = [events(run, "start", rank=rank)[-1] for rank in (0, 1)]
        assert [record["step"] for record in ranks] == [before, before]
        launcher.process.kill()
        launcher.process.wait()
    wait_for(lambda: not any(is_alive(record["pid"]) for record in ranks))


def test_a_rank_that_refuses_is_blamed_and_ends_the_other(train_command: Train, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()  # the launcher refuses what is not there; the ranks see what is inside
    said = bloomery(*train_command(f"data.sources={tmp_path / 'empty.txt'}", *TWO))
    said.refuses("empty.txt", status=1)
    assert "rank 0 (process" in said.err and said.err.count("failed with status 1") == 1
