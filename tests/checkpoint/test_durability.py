"""What a power cut leaves of checkpoints and restored runs: what is promised was synced; what NFS keeps."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from tests.disk_calls import DiskCalls, recorded

from bloomery.checkpoint.format.catalogue import record_copy, verify
from bloomery.checkpoint.format.commit import begin_partial, remove_checkpoint, sweep
from bloomery.checkpoint.format.manifest import INDEX, MANIFEST
from bloomery.checkpoint.format.source import source_of
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.remote.remote_run import download_run_files, place_at, upload_run_files
from bloomery.checkpoint.remote.transfer import download_checkpoint
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.errors import StorageError
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory

NAME = "step-000003.i001"


def save(rundir: RunDirectory) -> Path:
    entries = [whole("model.w", torch.randn(20, 30)), whole("optim.w", torch.randn(20, 30), scope="peer")]
    return save_checkpoint(rundir.checkpoints, entries, step=3, incarnation=1)


def check_commit(calls: DiskCalls, checkpoint: Path) -> None:
    """Data files and index were synced before the manifest, and all names before the checkpoint's."""
    manifest, named = calls.index("sync", MANIFEST), calls.index("rename", checkpoint.name)
    data = [path.name for path in checkpoint.glob("*.safetensors")]
    assert len(data) == 2 and all(calls.synced_before(name, at=manifest) for name in (*data, INDEX))
    assert manifest < named and calls.names[named - 1] == ("sync", f"{checkpoint.name}.partial")
    assert calls.names[named + 1] == ("sync", "checkpoints")


def test_each_data_file_is_synced_before_the_manifest_and_the_manifest_before_the_name(rundir: RunDirectory):
    with recorded() as calls:
        saved = save(rundir)
    check_commit(calls, saved)
    assert len([call for call, _ in calls.names if call == "sync"]) == 6, (
        "four files, two directories, no more"
    )


def test_a_checkpoint_that_is_brought_back_is_synced_as_one_that_is_saved(
    rundir: RunDirectory, tmp_path: Path
):
    saved = save(rundir)
    with recorded() as calls:
        brought = download_checkpoint(source_of(saved), RunDirectory(tmp_path / "back").create().checkpoints)
    check_commit(calls, brought)


def test_a_note_of_a_copy_is_synced_before_a_local_checkpoint_may_go(rundir: RunDirectory):
    with recorded() as calls:
        record_copy(rundir, NAME, url="s3://b/c", what="all", bytes=1)
    name = f"{NAME}.json"
    assert calls.names[-3:] == [("sync", name), ("rename", name), ("sync", "backups")]


def test_what_a_restore_brings_beside_the_checkpoint_is_synced_and_an_empty_file_is_brought_again(
    rundir: RunDirectory, tmp_path: Path
):
    begin(rundir, base=None, reason="start")
    rundir.recipe.write_text("# the recipe\n")
    (rundir.path / "data").mkdir()
    (rundir.path / "data" / "tokenizer.json").write_text("{}")
    remote = place_at(f"file://{tmp_path}/elsewhere")
    upload_run_files(rundir, remote)
    back = RunDirectory(tmp_path / "back").create()
    with recorded() as calls:
        download_run_files(remote, back)
    for name, directory in (("000001.json", None), ("recipe.toml", "back"), ("tokenizer.json", "data")):
        synced = calls.index("sync", name)
        if directory is not None:
            assert calls.names[synced : synced + 3] == [("sync", name), ("rename", name), ("sync", directory)]
    back.recipe.write_text("")  # as a power cut leaves a file that was not synced
    (back.path / "data" / "tokenizer.json").write_text("mine")
    download_run_files(remote, back)
    assert back.recipe.read_text() == "# the recipe\n"
    assert (back.path / "data" / "tokenizer.json").read_text() == "mine", "what is there stays"


@pytest.fixture
def nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlink as an NFS client does with a file that was removed while somebody had it open."""
    real = os.unlink

    def unlink(path: str | Path, **more: int) -> None:
        if Path(path).name.startswith(".nfs"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        real(path, **more)

    monkeypatch.setattr(os, "unlink", unlink)


def test_files_that_nfs_keeps_for_a_reader_do_not_stop_a_start(
    rundir: RunDirectory, nfs: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    partial = rundir.checkpoints / f"{NAME}.partial"
    (partial / "deep").mkdir(parents=True)
    for name in ("model.safetensors", ".nfs0001", "deep/.nfs0002", "deep/other"):
        (partial / name).write_text("x")
    assert sweep(rundir.checkpoints) == [partial]
    assert {path.name for path in partial.rglob("*")} == {".nfs0001", "deep", ".nfs0002"}
    assert ".nfs0001" in caplog.text and "the next start removes it" in caplog.text
    (partial / ".nfs0001").rename(partial / "deep" / ".nfs0001")
    assert sweep(rundir.checkpoints) == [partial], "wherever in it they lie"
    begin_partial(partial)  # nor a save of the same name
    saved = save(rundir)
    assert saved.name == NAME and verify(saved) == []
    remove_checkpoint(saved)
    assert not saved.exists()
    monkeypatch.undo()  # the reader has closed its files
    assert sweep(rundir.checkpoints) and list(rundir.checkpoints.iterdir()) == []


def test_what_an_interrupted_removal_left_is_not_in_the_way_of_the_next(rundir: RunDirectory):
    saved, left = save(rundir), rundir.checkpoints / f"{NAME}.partial"
    left.mkdir()
    (left / "model-r00000-of-00001-000.safetensors").touch()
    remove_checkpoint(saved)
    assert list(rundir.checkpoints.iterdir()) == []


def test_other_files_that_cannot_be_removed_still_end_a_start(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    partial = rundir.checkpoints / f"{NAME}.partial"
    partial.mkdir()
    (partial / "model.safetensors").touch()

    def refusing(path: str | Path, **more: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "unlink", refusing)
    with pytest.raises(StorageError, match="Sweeping an unfinished checkpoint failed"):
        sweep(rundir.checkpoints)


def test_a_link_that_is_named_like_a_leftover_is_removed_and_what_it_leads_to_stays(
    rundir: RunDirectory, tmp_path: Path
):
    (tmp_path / "mine").mkdir()
    (rundir.checkpoints / f"{NAME}.partial").symlink_to(tmp_path / "mine")
    (rundir.checkpoints / "step-000004.i001.partial").symlink_to(tmp_path / "nowhere")
    assert len(sweep(rundir.checkpoints)) == 2
    assert list(rundir.checkpoints.iterdir()) == [] and (tmp_path / "mine").is_dir()


def test_a_link_that_leads_nowhere_is_not_in_the_way_of_a_save(tmp_path: Path) -> None:
    partial = tmp_path / "step-000001.i001.partial"
    partial.symlink_to(tmp_path / "gone")
    begin_partial(partial)
    assert partial.is_dir() and not partial.is_symlink() and not (tmp_path / "gone").exists()
