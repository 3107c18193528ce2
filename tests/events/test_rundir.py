from pathlib import Path

import pytest

from bloomery.errors import StorageError
from bloomery.events.run_directory import CONTROLS, RunDirectory


def test_a_run_directory_is_made_once_and_again(tmp_path: Path):
    rundir = RunDirectory(tmp_path / "run")
    assert not rundir.exists()
    rundir.create().create()
    assert rundir.exists()
    assert rundir.journal(peer="a", rank=3) == tmp_path / "run" / "journal" / "a-3.jsonl"
    assert rundir.incarnation(7).name == "000007.json"
    assert rundir.control("stop").parent.is_dir()


def test_a_directory_that_cannot_be_made_is_named_with_a_remedy():
    with pytest.raises(StorageError) as refused:
        RunDirectory(Path("/proc/bloomery/run")).create()
    assert "/proc/bloomery/run" in refused.value.message
    assert refused.value.remedy


def test_a_run_directory_below_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        RunDirectory(tmp_path / "file" / "run").create()


def test_there_are_five_requests(tmp_path: Path):
    with pytest.raises(ValueError, match="save, stop, skip, rewind, set"):
        RunDirectory(tmp_path).control("pause")


def test_every_file_of_a_run_has_a_place_of_its_own_in_its_directory(tmp_path: Path):
    rundir = RunDirectory(tmp_path)
    properties = [name for name, item in vars(RunDirectory).items() if isinstance(item, property)]
    names = [name for name in properties if name != "name"]
    places = [
        *(getattr(rundir, name) for name in names),
        *(rundir.control(request) for request in CONTROLS),
        *(
            place(peer=peer, rank=rank)
            for place in (rundir.journal, rundir.heartbeat, rundir.stacks)
            for peer, rank in (("0", 0), ("0", 1), ("1", 0))
        ),
        *(rundir.incarnation(number) for number in (1, 12)),
        *(rundir.log(host=host, rank=rank) for host, rank in (("a", 0), ("a", 1), ("b", 0))),
    ]
    assert len(names) > 15 and len(set(places)) == len(places)
    assert all(place.is_relative_to(tmp_path) and place != tmp_path for place in places)


@pytest.mark.parametrize(
    ("path", "word"), [("runs/a", "runs/a"), ("a b/ü", "'a b/ü'"), ("it's", "'it'\"'\"'s'")]
)
def test_commands_that_messages_name_can_be_copied_into_a_shell(path: str, word: str):
    assert RunDirectory(Path(path)).as_word() == word


def test_a_run_was_started_once_its_recipe_or_its_first_incarnation_is_there(tmp_path: Path):
    rundir = RunDirectory(tmp_path)
    assert not rundir.exists()
    rundir.recipe.write_text("")
    assert rundir.exists()
    rundir.recipe.unlink()
    rundir.incarnations.mkdir()
    assert rundir.exists()


def test_the_journals_of_a_run_are_those_of_its_ranks_by_name(tmp_path: Path):
    rundir = RunDirectory(tmp_path).create()
    assert rundir.journals() == []
    for rank in (3, 1, 2, 0):
        rundir.journal(rank=rank).touch()
    rundir.journal().with_suffix(".partial").touch()
    assert rundir.journals() == [rundir.journal(rank=rank) for rank in range(4)]


@pytest.mark.parametrize(("here", "path"), [("mine", "."), ("mine/control", ".."), ("mine", "control/..")])
def test_a_run_that_is_given_from_within_has_the_name_of_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, path: str
):
    RunDirectory(tmp_path / "mine").create()
    monkeypatch.chdir(tmp_path / here)
    assert RunDirectory(path).name == "mine"


def test_a_run_may_be_named_by_a_text(tmp_path: Path):
    rundir = RunDirectory(str(tmp_path))
    assert rundir.path == tmp_path and rundir == RunDirectory(tmp_path)
    assert rundir.create().exists()
