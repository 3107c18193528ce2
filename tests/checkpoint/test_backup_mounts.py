"""Backups to a disk of its own: where it is not mounted, nothing is written there and nothing counts."""

import json
import shutil
from pathlib import Path

import pytest
from tests.checkpoint.small_run import Run
from tests.checkpoint.test_background import wait_for

from bloomery.checkpoint.format.catalogue import remote_copies
from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.remote.mounts import mount_point
from bloomery.checkpoint.remote.remote_run import place_at, remote_checkpoints
from bloomery.checkpoint.remote.shared_upload import BackupHelper, UploadCoordinator
from bloomery.cli import main
from bloomery.config.checkpoint import BackupSection, CheckpointSection
from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """The mount point of the disk for backups."""
    (tmp_path / "mnt").mkdir()
    return tmp_path / "mnt"


def saved(rundir: RunDirectory, disk: Path, *steps: int) -> None:
    """Go on with a run, and back each step up, as far as that succeeds."""
    backup = Backup(rundir, BackupSection(url=f"file://{disk}"), run_name="run")
    run, store = Run(), Store(rundir, CheckpointSection(keep_last=9), backup=backup)
    try:
        store.restore(run.parts)
        for step in steps:
            store.save(RunStateToSave(run.fill(step).parts, step=step))
    finally:
        backup.close()


def backed_up(rundir: RunDirectory, disk: Path, *steps: int) -> None:
    """The same, with a record as where the disk is a file system of its own."""
    saved(rundir, disk, *steps)
    record = rundir.backups / "mounts.json"
    assert json.loads(record.read_text()) == {f"file://{disk}/run": mount_point(disk)}
    record.write_text(json.dumps({f"file://{disk}/run": str(disk)}))


def unmounted(disk: Path) -> Path:
    """Leave what a mount point is without its disk: an empty directory. Return where the contents are."""
    away = disk.rename(disk.with_name("away"))
    disk.mkdir()
    return away


def at(disk: Path) -> list[str]:
    return [copy.name for copy in remote_checkpoints(place_at(f"file://{disk}/run"))]


def test_the_mount_point_of_a_path_is_where_its_file_system_begins_also_before_the_path_is_made(
    tmp_path: Path,
):
    assert mount_point(Path("/proc/self/made/later")) == "/proc"
    (tmp_path / "link").symlink_to("/proc/self")
    assert mount_point(tmp_path / "link" / "fd") == "/proc"
    assert Path(mount_point(tmp_path)).is_mount() and tmp_path.is_relative_to(mount_point(tmp_path))


def test_where_the_disk_is_not_mounted_nothing_is_written_and_nothing_counts_as_backed_up(
    tmp_path: Path, disk: Path, caplog: pytest.LogCaptureFixture
):
    rundir = RunDirectory(tmp_path / "run").create()
    backed_up(rundir, disk, 1)
    away = unmounted(disk)
    saved(rundir, disk, 2)

    assert list(disk.iterdir()) == [] and f"nothing is mounted at {disk}" in caplog.text
    assert list(remote_copies(rundir)) == ["step-000001.i001"]
    disk.rmdir()
    away.rename(disk)
    saved(rundir, disk, 3)
    assert set(remote_copies(rundir)) == {"step-000001.i001", "step-000002.i002", "step-000003.i003"}
    assert len(at(disk)) == 3


def test_what_an_earlier_mistake_left_below_the_mount_point_is_not_taken_for_the_disk(
    tmp_path: Path, disk: Path, caplog: pytest.LogCaptureFixture
):
    rundir = RunDirectory(tmp_path / "run").create()
    backed_up(rundir, disk, 1)
    away = unmounted(disk)
    shutil.copytree(away / "run" / "incarnations", disk / "run" / "incarnations")
    saved(rundir, disk, 2)
    assert f"nothing is mounted at {disk}" in caplog.text
    assert [path.name for path in (disk / "run").iterdir()] == ["incarnations"]


def test_a_node_that_mounts_what_is_above_the_disk_finds_the_backups_there_and_goes_on(
    tmp_path: Path, disk: Path, caplog: pytest.LogCaptureFixture
):
    rundir = RunDirectory(tmp_path / "run").create()
    backed_up(rundir, disk, 1)
    caplog.clear()
    saved(rundir, disk, 2)
    assert len(at(disk)) == 2 and not caplog.text


def test_a_run_that_lost_its_checkpoints_does_not_begin_anew_where_its_backups_are_not_mounted(
    tmp_path: Path, disk: Path
):
    rundir = RunDirectory(tmp_path / "run").create()
    backed_up(rundir, disk, 1)
    unmounted(disk)
    shutil.rmtree(rundir.checkpoints)
    rundir.checkpoints.mkdir()
    with pytest.raises(StorageError, match="nothing is mounted"):
        saved(rundir, disk, 2)
    assert list(disk.iterdir()) == [] and list(rundir.checkpoints.iterdir()) == []


def test_a_directory_of_backups_that_is_gone_is_asked_for_and_one_that_was_made_anew_is_taken(
    tmp_path: Path, disk: Path, caplog: pytest.LogCaptureFixture
):
    rundir = RunDirectory(tmp_path / "run").create()
    saved(rundir, disk, 1)
    (rundir.backups / "mounts.json").unlink()  # as of an earlier version
    shutil.rmtree(disk / "run")
    saved(rundir, disk, 2)
    assert f"{disk}/run is gone, to which step-000001.i001 was backed up" in caplog.text
    assert list(disk.iterdir()) == []
    (disk / "run").mkdir()
    saved(rundir, disk, 3)
    assert at(disk) == ["step-000002.i002", "step-000003.i003"]


def test_the_first_backup_to_the_file_system_of_the_run_itself_is_told_once(
    tmp_path: Path, disk: Path, caplog: pytest.LogCaptureFixture
):
    rundir = RunDirectory(tmp_path / "run").create()
    saved(rundir, disk, 1)
    saved(rundir, disk, 2)
    assert caplog.text.count("go to the file system of the run itself") == 1
    assert len(at(disk)) == 2


def test_a_rank_on_a_node_without_the_disk_sends_nothing_below_its_mount_point(
    tmp_path: Path, disk: Path, caplog: pytest.LogCaptureFixture
):
    rundir = RunDirectory(tmp_path / "run").create()
    UploadCoordinator(rundir, world=2).ask("step-000001.i001", url=f"file://{disk}/run", files=())
    helper = BackupHelper(rundir, rank=1, world=2, poll_s=0.01)
    try:
        wait_for(lambda: "rank 1 could not send its share of a backup" in caplog.text)
    finally:
        helper.close()
    assert f"{disk}/run does not exist" in caplog.text and list(disk.iterdir()) == []


def test_copies_by_hand_look_for_the_disk_too(tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]):
    rundir = RunDirectory(tmp_path / "run").create()
    backed_up(rundir, disk, 1)
    assert main(["config", "show", "demo", "run.name=run", f"backup.url=file://{disk}"]) == 0
    rundir.recipe.write_text(capsys.readouterr().out)
    assert main(["ckpt", "copy", str(rundir.path), f"file://{disk}/by-hand"]) == 0
    (rundir.backups / "mounts.copies.json").write_text(json.dumps({f"file://{disk}/by-hand": str(disk)}))
    unmounted(disk)
    for command in (["backup", str(rundir.path)], ["copy", str(rundir.path), f"file://{disk}/by-hand/"]):
        assert main(["ckpt", *command]) == 1
        assert f"nothing is mounted at {disk}" in capsys.readouterr().err
    assert list(disk.iterdir()) == []
