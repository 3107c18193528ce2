"""A run whose directory is moved away while it trains, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.train.test_loop import events, go

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.config.load import LoadedRecipe
from bloomery.errors import StorageError
from bloomery.events.heartbeat import Heartbeat
from bloomery.events.run_directory import RunDirectory
from bloomery.train import loop

Start = Callable[..., tuple[LoadedRecipe, Path]]
STEPS = ("train.samples=0", "train.steps=10", "train.ramp_up=[]", "checkpoint.every_steps=2")


def moving(monkeypatch: pytest.MonkeyPatch, moves: dict[int, tuple[Path, Path]]) -> None:
    """Let a directory be renamed after a step, before what the guards ask for is done."""
    real = loop.judge

    def judge(guards, report):
        if report.step in moves:
            origin, target = moves[report.step]
            assert not target.exists(), "nothing made the run directory anew"
            origin.rename(target)
        return real(guards, report)

    monkeypatch.setattr(loop, "judge", judge)


def test_a_run_that_was_moved_away_makes_no_directory_anew_and_saves_again_once_it_is_back(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = tmp_path / "away"
    loaded, path = start(*STEPS)
    moving(monkeypatch, {3: (path, away), 7: (away, path)})
    assert go(loaded, path).finished
    failed = events(path, "checkpoint_failed")
    assert [record["step"] for record in failed] == [4, 6]
    assert f"{path} is not there any more. Was it moved or removed?" in failed[0]["why"]
    assert [record["step"] for record in events(path, "step")] == list(range(1, 11))
    assert {item.step for item in checkpoints(RunDirectory(path))} == {2, 8, 10}


def test_a_run_whose_directory_stays_away_ends_with_an_error(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, path = start(*STEPS)
    moving(monkeypatch, {3: (path, tmp_path / "away")})
    with pytest.raises(StorageError, match="Was it moved or removed"):
        go(loaded, path)
    assert not path.exists()


def test_a_heartbeat_makes_its_own_directory_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Heartbeat(tmp_path / "heartbeat" / "0-0").write()
    assert (tmp_path / "heartbeat" / "0-0").is_file()
    Heartbeat(tmp_path / "moved" / "heartbeat" / "0-0").write()
    assert not (tmp_path / "moved").exists() and "the heartbeat cannot be written" in caplog.text
