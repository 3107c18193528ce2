"""What `bloomery status` prints of a run, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.guard.reports import report

from bloomery.cli import status
from bloomery.config.load import dump_recipe, load_recipe
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.overview import overview


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    rundir = RunDirectory(tmp_path / "runs" / "mine").create()
    with Journal(rundir.journal()) as journal:
        journal.write("start", incarnation=1, step=0)
        reported = report(7, loss=2.5, held_out_loss=2.75).to_json()
        journal.write("step", incarnation=1, **reported)
    return rundir


def test_programs_get_every_run_as_json(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    status.run(["--under", str(run.path.parent), "--json"])
    (shown,) = json.loads(capsys.readouterr().out)["runs"]
    assert (shown["name"], shown["step"], shown["loss"]) == ("mine", 7, 2.5)


def test_people_see_the_losses_of_a_run_that_has_some(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    status.run([str(run.path)])
    assert "2.5" in (shown := capsys.readouterr().out) and "held-out 2.75" in shown
    RunDirectory(run.path.parent / "young").create()
    status.run([str(run.path.parent / "young")])
    assert "held-out" not in capsys.readouterr().out


def test_a_scheduler_that_is_not_set_up_is_no_matter_of_a_run_that_nobody_submitted(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("squeue", "sbatch", "scontrol", "sacct"):
        (tmp_path / command).write_text("#!/bin/sh\necho 'fatal: no configuration source' >&2; exit 1\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    run.recipe.write_text(dump_recipe(load_recipe("demo").recipe))
    assert overview(run).warnings == ()
    (run.path / "submission.json").write_text("{}")
    assert "no configuration source" in " ".join(overview(run).warnings)
