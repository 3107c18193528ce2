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


def test_a_run_that_is_gone_or_was_given_up_says_the_command_that_goes_on_and_why(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status.run([str(run.path)]) == 1
    assert f"bloomery launch {run.path} --supervise" in capsys.readouterr().out
    with Journal(run.operations) as journal:
        journal.write("attempt_end", incarnation=0, step=7, attempt="a", status=137)
        said = {"cause": "killed", "summary": "rank 1 was ended by SIGKILL", "remedy": "Find out who did"}
        journal.write("diagnosis", incarnation=0, step=7, attempt="a", gives_up="3 restarts", **said)
    run.control("stop").write_text("")
    assert status.run([str(run.path)]) == 1
    shown = capsys.readouterr().out
    assert "killed: rank 1 was ended by SIGKILL; not started again: 3 restarts" in shown
    assert f"bloomery stop {run.path} --disarm" in shown
