"""A run whose stages are two processes: what it learns, what it evaluates, and who can go on with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.commands import Said, bloomery, events

from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory

Train = Callable[..., list[str]]
LIKE_ONE = ("schedule.decay=96", "train.compile=off")


def test_two_stages_learn_what_one_process_learns_and_one_process_goes_on_from_them(
    train_command: Train, here: Callable[..., Said], tmp_path: Path
) -> None:
    assert here(*train_command(*LIKE_ONE, run="one")).status == 0
    stages = ("--nproc", "2", "parallel.pipeline=2")
    said = bloomery(*train_command(*LIKE_ONE, *stages, "train.samples=48"))
    assert (said.status, said.err) == (0, ""), said
    assert "pipeline ranks wait" in said.out  # 2 micro-batches at first
    assert here(*train_command(*LIKE_ONE)).status == 0
    run, one = tmp_path / "run", tmp_path / "one"
    expected = dict(loss_curve(RunDirectory(one)))
    found = dict(loss_curve(RunDirectory(run)))
    assert found.keys() == expected.keys()
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step], abs=1e-5), step
    evaluated = {e["step"]: e["held_out_loss"] for e in events(one, "step") if e.get("held_out_loss")}
    for record in events(run, "step"):
        if record.get("held_out_loss") and record["step"] in evaluated:
            assert record["held_out_loss"] == pytest.approx(evaluated[record["step"]], abs=1e-5)
