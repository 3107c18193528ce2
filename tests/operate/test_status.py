"""What `bloomery status` prints of a run, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.guard.reports import report

from bloomery.cli import status
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory


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
