"""A path that begins with a `~` of somebody whom this machine does not know is told like any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bloomery.config.begin_from import weights_directory
from bloomery.config.data import DataSection, DatasetSection
from bloomery.config.find import find_recipe, from_home
from bloomery.config.load import load_recipe
from bloomery.config.submit import SubmitSection
from bloomery.data.dataset_shares import held_out_weights
from bloomery.data.prepare import dataset_prefixes
from bloomery.data.remote_files import Remote
from bloomery.data.sources import find_files
from bloomery.data.tokenizer import find_tokenizer, load_tokenizer
from bloomery.errors import BloomeryError
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import Switches
from bloomery.operate.departure import maintenance_files
from bloomery.operate.exclusions import Exclusions
from bloomery.train.settings import changes_of, keep_recipe

STRANGER = "~nobody-of-this-name/x"


def test_a_home_directory_takes_the_place_of_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert from_home("~/runs/a") == from_home(Path("~/runs/a")) == Path("/home/me/runs/a")
    assert from_home("~root") != Path("~root") and from_home("a/~b") == Path("a/~b")
    assert from_home(STRANGER) == Path(STRANGER)


@pytest.mark.parametrize(
    "use",
    [
        lambda: find_files([STRANGER]),
        lambda: load_tokenizer(find_tokenizer(f"{STRANGER}.json"), end_of_document="e"),
        lambda: held_out_weights(DataSection(weights_file=STRANGER, sequence_length=8)),
        lambda: Remote(STRANGER),
        lambda: weights_directory(STRANGER),
        lambda: find_recipe(f"{STRANGER}.toml"),
    ],
    ids=["sources", "tokenizer", "weights_file", "fetch", "init.from", "recipe"],
)
def test_what_lies_with_an_unknown_user_is_refused_by_its_name(use: Callable[[], object]) -> None:
    with pytest.raises(BloomeryError, match="nobody-of-this-name"):
        use()


@pytest.mark.parametrize(
    "use",
    [
        lambda run: Exclusions.of(run, SubmitSection(exclusions="~/x/y")).path.parent,
        lambda run: Switches.of_run(run, "~/x").directories[-1],
        lambda run: maintenance_files(run, "~/x")[-1].parent,
    ],
    ids=["exclusions", "switches", "maintenance"],
)
def test_a_place_of_operators_lies_in_the_home_directory(
    use: Callable[[RunDirectory], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert use(RunDirectory(Path("run"))) == Path("/home/me/x")


def test_a_dataset_of_an_unknown_user_has_a_path_that_is_not_there(tmp_path: Path) -> None:
    section = DataSection(datasets=(DatasetSection(name="a", path=STRANGER),), sequence_length=8)
    assert dataset_prefixes(section, tmp_path) == {STRANGER: Path(STRANGER)}


def test_a_relative_place_of_several_runs_begins_where_the_training_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stop`, `watch` and others read it from the run's record, in whatever directory they run."""
    monkeypatch.chdir(tmp_path)
    given = ["control.directory=switches", "submit.exclusions=../bad.json"]
    loaded = load_recipe("demo", given)
    rundir = RunDirectory(tmp_path / "run").create()
    keep_recipe(loaded, rundir)
    assert not changes_of(load_recipe("demo", given), rundir)
    (tmp_path / "switches").mkdir()
    (tmp_path / "switches/stop").touch()
    monkeypatch.chdir("/")
    kept = load_recipe(str(rundir.recipe)).recipe
    assert Switches.of_run(rundir, kept.control.directory).armed("stop") == tmp_path / "switches/stop"
    assert Exclusions.of(rundir, kept.submit).path == tmp_path / "../bad.json"
    at_home = load_recipe("demo", ["control.directory=~/switches"]).recipe
    assert at_home.control.directory == "~/switches", "each node has its own"
    assert load_recipe("demo").recipe.control.directory == ""
