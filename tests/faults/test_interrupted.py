"""Ctrl-C, and two trainers that want the same run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.faults.commands import Running, Said, bloomery, events, running, steps_told

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.events.run_directory import RunDirectory

Train = Callable[..., list[str]]
Here = Callable[..., Said]
ENDLESS = "train.samples=1000000"


def at_work(trainer: Running, run: Path) -> None:
    assert trainer.wait_until(lambda: steps_told(run) >= 3), trainer.said()


def one_step_more(train: Callable[..., Said], command: list[str], run: Path) -> None:
    """Give the same command again, and let it stop after its first step."""
    # What is committed: after a kill the journal may not tell of it yet.
    before = checkpoints(RunDirectory(run))[-1].step
    done = train(*command, f"guard.stop_at_step={before + 1}")
    assert (done.status, done.err) == (0, ""), done
    assert events(run, "start")[-1]["step"] == before
    assert events(run, "end")[-1]["step"] == before + 1


def test_ctrl_c_saves_says_how_to_go_on_and_the_same_command_does(
    train_command: Train, here: Here, tmp_path: Path
) -> None:
    run, command = tmp_path / "run", train_command(ENDLESS, "checkpoint.every_steps=0")
    with running(*command, log=tmp_path / "log") as trainer:
        at_work(trainer, run)
        trainer.process.send_signal(signal.SIGINT)
        said = trainer.ended()
    assert (said.status, said.err) == (130, "")
    assert "saved and stopped at step" in said.out and "The same command goes on" in said.out
    assert events(run, "checkpoint")[-1]["step"] == steps_told(run)
    assert bloomery("ckpt", "verify", run).status == 0
    one_step_more(here, command, run)


def test_a_second_trainer_is_refused_while_the_first_lives_and_takes_over_when_it_is_dead(
    train_command: Train, here: Here, tmp_path: Path
) -> None:
    run, command = tmp_path / "run", train_command(ENDLESS)
    with running(*command, log=tmp_path / "log") as trainer:
        at_work(trainer, run)
        said = here(*command)
        said.refuses(f"is being trained by process {trainer.process.pid} on {os.uname().nodename}")
        said.refuses("Stop that one first", "control/stop", "--run")
        assert len(events(run, "start")) == 1 and trainer.process.poll() is None
        trainer.wait_until(lambda: events(run, "checkpoint"))
        trainer.process.kill()
    one_step_more(here, command, run)
    assert [record["incarnation"] for record in events(run, "start")] == [1, 2]


def test_signals_after_it_has_saved_and_stopped_change_nothing(train_command: Train, tmp_path: Path) -> None:
    run, command = tmp_path / "run", train_command(ENDLESS, "checkpoint.every_steps=0")
    with running(*command, log=tmp_path / "log") as trainer:
        at_work(trainer, run)
        trainer.process.send_signal(signal.SIGTERM)
        assert trainer.wait_until(lambda: events(run, "end"))
        sent = 0
        while not trainer.is_over(within_s=0.001):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                trainer.process.send_signal(number)
            sent += 1
        said = trainer.ended()
    assert sent and said.status == 128 + signal.SIGTERM, said
    assert "saved and stopped at step" in said.out and "Traceback" not in said.err
