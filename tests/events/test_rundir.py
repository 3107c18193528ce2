from pathlib import Path

import pytest

from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory


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
