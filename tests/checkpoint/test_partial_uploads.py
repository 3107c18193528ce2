"""What a store holds of checkpoints that were sent in part, and removed before the rest was sent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.checkpoint.test_shared_upload import FILES, saved

from bloomery.checkpoint.format.catalogue import record_copy
from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.remote.partial_uploads import left_in_part, remove_left_in_part
from bloomery.checkpoint.remote.remote_run import place_at
from bloomery.checkpoint.remote.shared_upload import notes_of
from bloomery.checkpoint.remote.transfer import UploadInterrupted, upload_checkpoint
from bloomery.config.checkpoint import BackupSection
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory

FIRST, SECOND = "step-000001.i001", "step-000002.i001"


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    rundir = RunDirectory(tmp_path / "run").create()
    begin(rundir, base=None, reason="start")
    return rundir


def sent_in_part(rundir: RunDirectory, url: str, *, files: int, place: str = "") -> Path:
    """A checkpoint of which so many files were sent when the process was killed."""
    directory, asked = saved(rundir), list[int]()
    notes = notes_of(rundir, directory.name, place=place)
    with pytest.raises(UploadInterrupted):
        upload_checkpoint(
            directory, place_at(url), notes=notes, go_on=lambda: len(asked) < files and not asked.append(1)
        )
    return directory


def objects_of(url: str, name: str) -> list[str]:
    return [entry.key for entry in place_at(url).entries(f"checkpoints/{name}/")]


@pytest.mark.parametrize("place", ["", "second"])
def test_what_was_sent_of_a_checkpoint_that_is_gone_goes_with_the_next_backup(
    rundir: RunDirectory, tmp_path: Path, place: str
) -> None:
    backup = Backup(rundir, BackupSection(url=f"file://{tmp_path}/there"), run_name="run", place=place)
    directory = sent_in_part(rundir, backup.url, files=3, place=place)
    backup._copy_all()
    assert len(objects_of(backup.url, FIRST)) == FILES + 2, "it is here, and is sent to its end"

    shutil.rmtree(tmp_path / "there")
    (tmp_path / "there/run").mkdir(parents=True)
    for record in rundir.backups.glob("step-*.json"):
        record.unlink()
    directory = sent_in_part(rundir, backup.url, files=3, place=place)
    assert len(objects_of(backup.url, FIRST)) == 3
    saved(rundir, step=2)
    shutil.rmtree(directory)
    backup._copy_all()
    assert objects_of(backup.url, FIRST) == [] and len(objects_of(backup.url, SECOND)) == FILES + 2
    assert list(rundir.backups.glob("*.notes*")) == []


def test_it_goes_also_where_nothing_else_is_left_to_send_and_no_file_was_noted_yet(
    rundir: RunDirectory, tmp_path: Path
) -> None:
    backup = Backup(rundir, BackupSection(url=f"file://{tmp_path}/there"), run_name="run")
    backup._copy_all()
    directory = sent_in_part(rundir, backup.url, files=0)
    place_at(backup.url).put(f"checkpoints/{FIRST}/model-000.safetensors", b"whole, and not noted yet")
    shutil.rmtree(directory)
    backup._copy_all()
    assert objects_of(backup.url, FIRST) == []


def test_nothing_else_is_removed(rundir: RunDirectory, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there/run"
    directory = sent_in_part(rundir, url, files=3)
    assert left_in_part(rundir, url) == [], "it is still here"
    shutil.rmtree(directory)
    assert left_in_part(rundir, url) == [FIRST]
    assert left_in_part(rundir, f"file://{tmp_path}/elsewhere/run") == []
    assert left_in_part(rundir, url, place="second") == []
    remove_left_in_part(rundir, place_at(url), go_on=lambda: False)
    assert len(objects_of(url, FIRST)) == 3, "the run ends"
    place_at(url).put(f"checkpoints/{FIRST}/manifest.json", b"{}")
    remove_left_in_part(rundir, place_at(url), go_on=lambda: True)
    assert len(objects_of(url, FIRST)) == 4, "it is whole, whatever was recorded"
    assert left_in_part(rundir, url) == []
    notes_of(rundir, FIRST).write_text(json.dumps({"url": url}) + "\n{\n[]\n")
    record_copy(rundir, FIRST, url=f"{url}/checkpoints/{FIRST}", what="model", bytes=1)
    assert left_in_part(rundir, url) == [], "a verified copy was recorded"
