"""A run of which the tests of the dashboard's answers each have their own copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.operate.dashboard.written_run import WrittenRun, healed_run

from bloomery.config.load import dump_recipe, load_recipe, override


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> WrittenRun:
    made = healed_run(tmp_path_factory.mktemp("written") / "healed")
    settings = ["train.samples=1600", "train.global_batch=8", "train.ramp_up=[]"]
    made.rundir.recipe.write_text(dump_recipe(override(load_recipe("demo").recipe, settings)))
    return made


@pytest.fixture
def run(written: WrittenRun, tmp_path: Path) -> WrittenRun:
    """A run with a spike and a rewind, of which each test has its own copy."""
    shutil.copytree(written.rundir.path, tmp_path / "healed")
    made = WrittenRun(tmp_path / "healed")
    made.incarnation, made.step = written.incarnation, written.step
    return made
