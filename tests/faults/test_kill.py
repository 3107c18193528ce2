"""Three kills in the suite; `make soak PART=kill` does twenty."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.faults.commands import running
from tests.faults.killing import SAVE, START, STEP, Moment, train_and_kill

from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory

PLAN = (Moment(kind=STEP, after=7.5), Moment(kind=START, after=0.8), Moment(kind=SAVE, after=0.005))


def test_a_run_that_is_killed_again_and_again_learns_bit_for_bit_the_same(
    train_command: Callable[..., list[str]], tmp_path: Path
) -> None:
    length = "train.samples=600"
    with running(*train_command(length, run="unbroken"), log=tmp_path / "unbroken-log") as unbroken:
        killed = train_and_kill(
            train_command(length, "checkpoint.background=on"), tmp_path / "run", PLAN, start_up_s=2.0
        )
        assert unbroken.ended().status == 0
    curves = [loss_curve(RunDirectory(tmp_path / name)) for name in ("unbroken", "run")]
    assert len(curves[0]) > 30
    assert curves[0] == curves[1]
    # A slow disk may not have ended a save within the first seven steps; then the third start begins anew.
    assert killed[0].told >= 7
    assert killed[2].broke_a_save or killed[2].kept > killed[0].kept
