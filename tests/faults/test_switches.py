"""`bloomery stop` and `save`: two ranks stop at one step, and queued starts end until it is disarmed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.faults.commands import Said, bloomery, events, running, steps_told

from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory

Train = Callable[..., list[str]]
Here = Callable[..., Said]
ENDLESS = ("train.samples=1000000", "checkpoint.every_steps=0", "optim.name=adamw")


def test_two_ranks_stop_at_one_step_and_the_queue_ends_task_by_task(
    train_command: Train, here: Here, tmp_path: Path
) -> None:
    run, command = tmp_path / "run", train_command(*ENDLESS, "--nproc", "2")
    with running(*command, log=tmp_path / "log") as trainer:
        assert trainer.wait_until(lambda: steps_told(run) >= 2), trainer.said()
        armed = here("stop", run)
        assert armed.status == 0 and f"{run}/control/stop is armed" in armed.out
        said = trainer.ended()
    assert (said.status, said.err) == (0, "")
    assert f"Starts end at once until `bloomery stop {run} --disarm`" in said.out
    last = [loss_curve(RunDirectory(run), rank=rank)[-1] for rank in (0, 1)]
    assert last[0] == last[1] and events(run, "checkpoint")[-1]["step"] == last[0][0]
    queued = bloomery(*command)
    assert queued.status == 0 and queued.err.count("Nothing was trained") == 1, queued
    assert "armed by" in queued.err and f"bloomery stop {run} --disarm" in queued.err
    assert len(events(run, "start")) == 1
    assert "is disarmed" in here("stop", run, "--disarm").out
    assert "stop is not armed" in here("stop", run, "--disarm").out


def test_a_save_and_a_stop_in_the_directory_of_ones_choice(
    train_command: Train, here: Here, tmp_path: Path
) -> None:
    run, switches = tmp_path / "run", tmp_path / "switches"
    switches.mkdir()
    command = train_command(*ENDLESS, f"control.directory={switches}")
    with running(*command, log=tmp_path / "log") as trainer:
        assert trainer.wait_until(lambda: steps_told(run) >= 1), trainer.said()
        assert here("save", "--at", switches).status == 0
        assert trainer.wait_until(lambda: events(run, "checkpoint")), trainer.said()
        assert not (switches / "save").exists() and trainer.process.poll() is None
        here("stop", "--at", switches)
        said = trainer.ended()
    assert said.status == 0 and f"{switches}/stop" in said.out
    assert f"the switch {switches}/stop (armed by" in here(*command).err
    assert f"{switches}/stop is disarmed" in here("stop", run, "--disarm").out


def test_a_switch_of_nothing_is_refused(here: Here, tmp_path: Path) -> None:
    here("stop", tmp_path / "none").refuses("There is no run in", status=1)
    here("stop", "--at", tmp_path / "none").refuses("There is no directory", "control.directory", status=1)
    here("save").refuses("give RUN or --at DIR", status=2)
