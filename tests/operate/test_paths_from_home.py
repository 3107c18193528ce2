"""Directories and files that a recipe names from the home directory are looked for there."""

from __future__ import annotations

from pathlib import Path

import pytest

from bloomery.cli import main
from bloomery.config.load import dump_recipe, load_recipe
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import Switches
from bloomery.operate.dashboard.run_reader import RunReader
from bloomery.operate.dashboard.run_summary import RunSummarizer
from bloomery.operate.departure import maintenance_files
from bloomery.operate.exclusions import Exclusions
from bloomery.operate.overview import overview
from bloomery.operate.watch.observe import RunObserver


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "switches").mkdir(parents=True)
    return tmp_path / "home"


def test_switches_notices_and_quarantine_from_the_home_directory_are_found(
    home: Path, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    (home / "switches" / "stop").touch()
    assert Switches.of_run(run, "~/switches").armed("stop") == home / "switches" / "stop"
    assert maintenance_files(run, "~/switches")[1] == home / "switches" / "maintenance"
    section = load_recipe("demo", ["submit.exclusions=~/shared.json"]).recipe.submit
    assert Exclusions.of(run, section).path == home / "shared.json"


def test_who_looks_on_finds_a_switch_below_the_home_directory_and_disarms_it(
    home: Path, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    run.recipe.write_text(dump_recipe(load_recipe("demo", ["control.directory=~/switches"]).recipe))
    (home / "switches" / "stop").touch()
    assert overview(run).verdict.state == "stopped"
    assert RunSummarizer(RunReader(run.path).read_all()).summary().state == "stopped"
    observer = RunObserver(run)
    observer.observe(now=5.0)
    assert observer.state == "stopped"
    assert main(["stop", str(run.path), "--disarm"]) == 0
    assert not (home / "switches" / "stop").exists()
