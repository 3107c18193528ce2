"""What a supervisor counts as progress, in real run directories: also after a rewind, which undoes steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.diagnosis import GAVE_UP
from bloomery.operate.newest_checkpoint import NO_CHECKPOINT, NewestCheckpoint, newest_checkpoint
from bloomery.operate.supervise import AttemptWatch, RestartBudget, supervise


class Training:
    """Attempts that start from the newest checkpoint, rewind, save, and are killed."""

    def __init__(self, path: Path) -> None:
        self.rundir, self.said = RunDirectory(path).create(), list[str]()
        self.incarnation = 0

    def start(self) -> None:
        newest = newest_checkpoint(self.rundir)
        base = None if newest == NO_CHECKPOINT else (newest.step, newest.incarnation)
        self.incarnation = begin(self.rundir, base=base, reason="start")

    def rewind(self, step: int, incarnation: int) -> None:
        self.incarnation = begin(self.rundir, base=(step, incarnation), reason="rewind")

    def save(self, step: int) -> None:
        directory = self.rundir.checkpoints / f"step-{step:06d}.i{self.incarnation:03d}"
        directory.mkdir()
        (directory / "manifest.json").write_text("{}")

    def supervised(self, *attempts: Callable[[], None]) -> int:
        """Return the exit status of a supervisor that allows one restart in a row without progress."""
        left = iter(attempts)

        def attempt(watch: AttemptWatch) -> int:
            self.start()
            next(left)()
            watch.ended({0: -9}, killed=())
            return 137

        status = supervise(
            self.rundir,
            attempt,
            world=1,
            host="node0",
            say=self.said.append,
            budget=RestartBudget(without_progress=1, in_all=4),
        )
        assert list(left) == []
        return status


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "run")


def test_what_is_saved_after_a_rewind_is_progress_though_its_step_is_lower(training: Training) -> None:
    def first() -> None:
        training.save(50)
        training.save(100)

    def rewinds() -> None:
        training.rewind(50, 1)
        training.save(60)

    later = [lambda step=step: training.save(step) for step in (70, 80, 90)]
    assert training.supervised(first, rewinds, *later) == GAVE_UP
    assert training.said[-1] == "not started again: it has been restarted 4 times"
    assert newest_checkpoint(training.rundir) == NewestCheckpoint(incarnation=6, step=90)


def test_a_rewind_alone_is_no_progress(training: Training) -> None:
    def first() -> None:
        training.save(50)
        training.save(100)

    def rewinds() -> None:
        training.rewind(50, 1)

    assert training.supervised(first, rewinds) == GAVE_UP
    assert training.said[-1] == "not started again: 1 restarts in a row brought no newer checkpoint"
