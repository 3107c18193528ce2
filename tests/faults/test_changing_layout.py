"""One run through the real command, its processes and its checkpoints, in one layout after another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.commands import Said, bloomery, events

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.load.loader import read_tensors
from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory

STEPS_EACH = 4
COMMON = (
    "train.ramp_up=[]",
    "train.micro_batch=1",
    "schedule.warmup=8",
    "schedule.decay=96",
    "optim.name=adamw",
    "optim.learning_rate=1e-2",
    "checkpoint.every_steps=0",
)
LAYOUTS = (
    ("4", "parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"),
    ("2", "parallel.zero=1"),
)


def command(train: Callable[..., list[str]], *more: str, steps: int, run: str = "run") -> list[str]:
    return train(*COMMON, "train.samples=0", f"train.steps={steps}", *more, run=run)


@pytest.mark.timeout(900)
def test_a_run_that_changes_its_layout_at_each_resume_learns_what_one_process_learns(
    train_command: Callable[..., list[str]], here: Callable[..., Said], tmp_path: Path
) -> None:
    for number, (ranks, *layout) in enumerate(LAYOUTS, 1):
        said = bloomery(*command(train_command, "--nproc", ranks, *layout, steps=number * STEPS_EACH))
        assert said.status == 0, said
    total = len(LAYOUTS) * STEPS_EACH
    one = here(*command(train_command, steps=total, run="one"))
    assert one.status == 0, one
    moved, alone = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "one")
    for (step, loss), (same, expected) in zip(loss_curve(moved), loss_curve(alone), strict=True):
        assert step == same
        assert loss == pytest.approx(expected, rel=1e-5), step
    assert [start["ranks"] for start in events(moved.path, "start")] == [4, 2]
    held_out = [[step["held_out_loss"] for step in events(run.path, "step")][-1] for run in (moved, alone)]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)
    theirs, own = (dict(read_tensors(checkpoints(run)[-1].directory)) for run in (moved, alone))
    assert theirs.keys() == own.keys()
    for name, tensor in own.items():
        beyond = (theirs[name] - tensor).abs() - 1e-3 * tensor.abs()
        # Adam divides by a gradient's size, so that rounding shows where there is next to none.
        assert (beyond > 2e-5).double().mean() <= 2e-3 and beyond.max() <= 1e-4, (name, beyond.max())
