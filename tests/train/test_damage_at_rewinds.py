"""A rewind that finds the checkpoint damaged to which it goes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.train.test_loop import events, go

from bloomery.config.load import LoadedRecipe
from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory
from bloomery.guard.verdict import Rewind, Rung
from bloomery.train import loop

Start = Callable[..., tuple[LoadedRecipe, Path]]
STEPS = ("train.samples=0", "train.steps=9", "train.ramp_up=[]", "checkpoint.every_steps=2")


def damage(checkpoint: Path) -> None:
    (weights,) = checkpoint.glob("model-*")
    with weights.open("r+b") as file:
        file.seek(-8, 2)
        file.write(b"damaged!")


def test_a_rewind_passes_over_a_damaged_checkpoint_and_makes_the_same_steps_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, asked = loop.judge, list[int]()
    clean = start(*STEPS, name="clean")
    assert go(*clean).finished
    loaded, path = start(*STEPS, name="damaged")

    def judge(guards, report):
        usual = real(guards, report)
        if report.step != 7 or asked:
            return usual
        asked.append(report.step)
        damage(path / "checkpoints" / "step-000004.i001")
        return Rewind(
            judged_step=7, to_step=5, latest_step=6, skip=range(0), rung=Rung.REPEAT, reason="planned"
        )

    monkeypatch.setattr(loop, "judge", judge)
    assert go(loaded, path).finished
    assert events(path, "start")[1]["step"] == 2
    assert "step-000004.i001 was passed over" in caplog.text
    assert loss_curve(RunDirectory(path)) == loss_curve(RunDirectory(clean[1]))


def test_a_rewind_whose_only_early_checkpoint_is_damaged_takes_its_backup(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backups = tmp_path / "backups"
    backups.mkdir()
    real, asked = loop.judge, list[int]()
    clean = start(*STEPS, name="clean")
    assert go(*clean).finished
    loaded, path = start(*STEPS, f"backup.url={backups.as_uri()}", name="damaged")
    copied = path / "backups" / "step-000002.i001.json"

    def judge(guards, report):
        usual = real(guards, report)
        if report.step != 7 or asked:
            return usual
        asked.append(report.step)
        deadline = time.monotonic() + 60.0
        while not copied.exists():
            assert time.monotonic() < deadline, "the checkpoint of step 2 was not backed up"
            time.sleep(0.02)
        damage(path / "checkpoints" / "step-000002.i001")
        return Rewind(
            judged_step=7, to_step=3, latest_step=6, skip=range(0), rung=Rung.REPEAT, reason="planned"
        )

    monkeypatch.setattr(loop, "judge", judge)
    assert go(loaded, path).finished
    assert events(path, "start")[1]["step"] == 2
    assert "step-000002.i001 was passed over" in caplog.text
    assert loss_curve(RunDirectory(path)) == loss_curve(RunDirectory(clean[1]))
