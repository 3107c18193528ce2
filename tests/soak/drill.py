"""`bloomery drill` with a real run, whose rank is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.commands import bloomery

from bloomery.operate.drill.phases import RecoveryPhases

Train = Callable[..., list[str]]


@pytest.mark.slow
def test_a_killed_rank_is_survived_and_nothing_is_left_behind(
    train_command: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    recipe = train_command()[1]
    done = bloomery("drill", recipe, "train.samples=400000", "--faults", "kill", "--steps", "2", "--json")
    assert done.status == 0, done
    (result,) = json.loads(done.out)["faults"]
    assert (result["fault"], result["survived"], result["cause"]) == ("kill", True, "killed")
    assert all(result["phases"][phase] is not None for phase in RecoveryPhases.__annotations__)
    assert 0 < result["total_s"] == pytest.approx(sum(result["phases"].values()))
    assert not list(scratch.glob("bloomery-drill-*"))


@pytest.mark.slow
def test_more_faults_than_the_supervisor_bears_without_a_save_wait_for_one(train_command: Train) -> None:
    recipe = train_command()[1]
    kills = ("--faults", "kill", "--rounds", "5", "--steps", "2", "--json")
    done = bloomery("drill", recipe, "train.samples=400000", "checkpoint.every_steps=300", *kills)
    assert done.status == 0, done
    assert [fault["survived"] for fault in json.loads(done.out)["faults"]] == [True] * 5
