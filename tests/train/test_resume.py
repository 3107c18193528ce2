"""The recipe of a run, without which it cannot be resumed, outlives a power cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.disk_calls import recorded

from bloomery.config.load import load_recipe
from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.train.settings import changes_of, keep_recipe


def test_the_recipe_is_synced_before_it_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    rundir, loaded = RunDirectory(tmp_path / "run").create(), load_recipe("demo-small")
    with recorded() as calls:
        keep_recipe(loaded, rundir)
    assert calls.names == [
        call
        for name in ("recipe.toml", "sources.toml")
        for call in (("sync", name), ("rename", name), ("sync", "run"))
    ]
    assert changes_of(loaded, rundir) == changes_of(loaded, RunDirectory(tmp_path / "none"))


def test_a_disk_that_refuses_the_recipe_is_told_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the run directory should be")
    with pytest.raises(StorageError, match=r"Writing the run's recipe failed at .*recipe\.toml"):
        keep_recipe(load_recipe("demo-small"), RunDirectory(tmp_path / "run"))
