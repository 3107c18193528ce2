"""Copies elsewhere, against a real S3 API: uploaded, read back, resumed, restored from, refused."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.object_store import ENVIRONMENT, ObjectStore
from tests.checkpoint.small_run import Run
from tests.checkpoint.test_background import wait_for

from bloomery.checkpoint.format.catalogue import remote_copies, verify
from bloomery.checkpoint.format.manifest import BLOCK_BYTES, DamagedCheckpoint, read_manifest
from bloomery.checkpoint.format.source import RemoteCheckpoint
from bloomery.checkpoint.format.state import Box, StateEntry, collect, whole
from bloomery.checkpoint.format.verified_reader import VerifiedReader
from bloomery.checkpoint.load.loader import load_checkpoint
from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.remote.backup_duty import due
from bloomery.checkpoint.remote.remote_run import remote_checkpoints, remote_source, upload_run_files
from bloomery.checkpoint.remote.transfer import UploadInterrupted, upload_checkpoint
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.config.checkpoint import BackupSection, CheckpointSection
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects, storage_failure, without_secrets
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave

KEEP_ONE = CheckpointSection(keep_last=1, keep_tenths=False)


@pytest.fixture(params=["s3", "file"])
def url(request, tmp_path: Path) -> str:
    """An empty place: a bucket, or a directory."""
    if request.param == "file":
        return f"file://{tmp_path}/elsewhere"
    return request.getfixturevalue("object_store").new_bucket()


def saved(tmp_path: Path, number: int = 1) -> Path:
    state = collect(Run().fill(number).parts)
    return save_checkpoint(
        tmp_path / "checkpoints", state.entries, step=number, incarnation=1, values=state.values
    )


def uploaded(tmp_path: Path, url: str, **more):
    return upload_checkpoint(saved(tmp_path), Objects(url), notes=tmp_path / "notes", **more)


def test_a_checkpoint_is_copied_whole_and_restored_from_there(tmp_path: Path, url: str):
    done = uploaded(tmp_path, url)
    assert done.bytes == done.bytes_sent and done.url.endswith("step-000001.i001")
    assert not (tmp_path / "notes").exists()
    (source,) = remote_checkpoints(Objects(url))
    assert verify(source) == []
    other = Run()
    values = load_checkpoint(source, collect(other.parts).entries)
    other.moments.load_state_values(values["optim"])
    assert other.equals(Run().fill(1))
    again = upload_checkpoint(
        tmp_path / "checkpoints" / "step-000001.i001", Objects(url), notes=tmp_path / "n"
    )
    assert again.bytes_sent == 0, "it is there already"


def test_the_weights_alone_are_a_checkpoint_of_their_own(tmp_path: Path, url: str):
    uploaded(tmp_path, url, what="model")
    source = remote_source(url)
    assert verify(source) == []
    assert read_manifest(source).about["parts"] == ["model"]
    run = Run()
    load_checkpoint(source, run.weights.state_entries(), parts={"model"})
    assert torch.equal(run.weights.tensors["model.half"], Run().fill(1).weights.tensors["model.half"])
    with pytest.raises(CheckpointError, match="missing in the checkpoint"):
        load_checkpoint(source, collect(run.parts).entries)


def test_a_restore_fetches_what_it_needs_and_little_more(tmp_path: Path, url: str):
    tensor = torch.randn(3000, 1000)
    entries = [whole("model.a", tensor), whole("optim.a", torch.randn(3000, 1000))]
    directory = save_checkpoint(tmp_path, entries, step=3, incarnation=1)
    upload_checkpoint(directory, Objects(url), notes=tmp_path / "notes")
    box = Box((1000, 0), (500, 1000))
    mine, read = torch.zeros(500, 1000), list[int]()
    entry = StateEntry(name="model.a", global_shape=(3000, 1000), dtype="float32", box=box, tensor=mine)
    load_checkpoint(remote_source(url), [entry], parts={"model"}, count=read.append)
    assert torch.equal(mine, tensor[1000:1500])
    assert sum(read) <= mine.nbytes + 2 * BLOCK_BYTES


def test_an_interrupted_upload_sends_only_what_is_missing(tmp_path: Path, url: str):
    directory = saved(tmp_path)
    files = read_manifest(directory).files
    assert len(files) == 2
    answers = iter([True, False])
    notes = tmp_path / "notes"
    with pytest.raises(UploadInterrupted):
        upload_checkpoint(directory, Objects(url), notes=notes, go_on=lambda: next(answers))
    assert remote_checkpoints(Objects(url)) == [], "without a manifest it is none"
    done = upload_checkpoint(directory, Objects(url), notes=notes)
    assert done.bytes_sent == done.bytes - files[0].bytes
    assert verify(remote_source(url)) == []


def test_an_upload_over_another_content_that_dies_midway_leaves_no_checkpoint_there(tmp_path: Path, url: str):
    """The old manifest names files of which some are replaced already: it must be gone before the first."""
    uploaded(tmp_path / "old", url)
    directory = save_checkpoint(tmp_path / "new", collect(Run().fill(7).parts).entries, step=1, incarnation=1)
    answers = iter([True, False])
    with pytest.raises(UploadInterrupted):
        upload_checkpoint(directory, Objects(url), notes=tmp_path / "new-notes", go_on=lambda: next(answers))
    assert remote_checkpoints(Objects(url)) == []
    upload_checkpoint(directory, Objects(url), notes=tmp_path / "new-notes")
    assert verify(remote_source(url)) == []


def test_what_was_verified_and_changed_since_is_sent_again(tmp_path: Path, url: str):
    directory = saved(tmp_path)
    first = read_manifest(directory).files[0]
    answers = iter([True, False])
    with pytest.raises(UploadInterrupted):
        upload_checkpoint(directory, Objects(url), notes=tmp_path / "notes", go_on=lambda: next(answers))
    key = f"checkpoints/{directory.name}/{first.name}"
    Objects(url).put(key, bytes(first.bytes))
    upload_checkpoint(directory, Objects(url), notes=tmp_path / "notes")
    assert verify(remote_source(url)) == []


def test_what_changed_since_it_was_saved_is_found_and_never_committed(tmp_path: Path, url: str):
    directory = saved(tmp_path)
    victim = next(directory.glob("optim-*"))
    content = bytearray(victim.read_bytes())
    content[5000] ^= 1
    victim.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="is not what was saved") as refused:
        upload_checkpoint(directory, Objects(url), notes=tmp_path / "notes")
    assert victim.name in refused.value.message
    assert remote_checkpoints(Objects(url)) == []


def test_damage_at_the_other_end_is_named(tmp_path: Path, url: str):
    uploaded(tmp_path, url)
    source, remote = remote_source(url), Objects(url)
    record = read_manifest(source).files[0]
    key = f"checkpoints/step-000001.i001/{record.name}"
    content = bytearray(remote.content(key))
    content[-3] ^= 1
    remote.put(key, bytes(content))
    (problem,) = verify(source)
    assert problem.file == record.name and problem.offset == 0
    with pytest.raises(DamagedCheckpoint, match=record.name):
        load_checkpoint(source, collect(Run().parts).entries)
    remote.put(key, bytes(content[:-50]))
    assert "truncated" in str(verify(source)[0])
    with pytest.raises(DamagedCheckpoint):
        load_checkpoint(source, collect(Run().parts).entries)
    remote.delete(key)
    assert "missing" in str(verify(source)[0])
    with pytest.raises(DamagedCheckpoint, match="is missing"):
        load_checkpoint(source, collect(Run().parts).entries)


@pytest.fixture(scope="module")
def ends(object_server: ObjectStore):
    """Objects around the size of a block, and what they hold."""
    from tests.checkpoint.test_verified_reader import record_of

    with pytest.MonkeyPatch.context() as environment:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": object_server.endpoint}).items():
            environment.setenv(name, value)
        remote = Objects(object_server.new_bucket())
    contents = {size: os.urandom(size) for size in (1, 999, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1)}
    for size, content in contents.items():
        remote.put(f"{size}", content)
    return remote, contents, {size: record_of(f"{size}", content) for size, content in contents.items()}


@given(st.data())
def test_a_remote_read_never_gives_bytes_beyond_the_objects_end(ends, data: st.DataObject):
    remote, contents, records = ends
    size = data.draw(st.sampled_from(sorted(contents)))
    near = st.sampled_from([0, 1, size - 1, size, size + 1, size + BLOCK_BYTES, 2 * BLOCK_BYTES])
    begin = max(0, data.draw(near))
    length = max(1, data.draw(near))
    source = RemoteCheckpoint(remote, "")
    with source.open(str(size)) as opened:
        target = bytearray(b"\xaa" * length)
        half = length // 2
        views = [memoryview(target)[:half], memoryview(target)[half:]]
        count = opened.read_into(views, begin=begin)
    there = contents[size][begin : begin + length]
    assert count == len(there) and target[:count] == there
    assert target[count:] == b"\xaa" * (length - count), "what lies beyond is left alone"
    assert source.content(str(size), at_most=length) == contents[size][:length]
    assert source.size(str(size)) == size
    with VerifiedReader(source, records[size]) as reader:
        buffer = bytearray(min(3, size))
        reader.read([(size - len(buffer), memoryview(buffer))])
        assert buffer == contents[size][-len(buffer) :]


def test_wrong_credentials_and_a_missing_bucket_are_told_without_the_secret(
    tmp_path: Path, object_store: ObjectStore, monkeypatch
):
    url = object_store.new_bucket()
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    with object_store.checking_credentials(), pytest.raises(StorageError) as refused:
        uploaded(tmp_path, url)
    assert "AWS_ACCESS_KEY_ID" in refused.value.remedy
    assert url in refused.value.message and secret not in str(refused.value)
    with pytest.raises(StorageError, match="NoSuchBucket") as refused:
        uploaded(tmp_path, "s3://no-such-bucket-here")
    assert "bucket" in refused.value.remedy
    assert without_secrets(f"key={secret}&sig=abc123 x") == "key=***&sig=*** x"
    assert "***" not in str(storage_failure(OSError(5, "plain"), doing="It"))


def test_without_any_credentials_it_is_said_that_there_are_none(
    tmp_path: Path, object_store: ObjectStore, monkeypatch
):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(StorageError) as refused:
        upload_checkpoint(
            saved(tmp_path), Objects("s3://some-bucket", patience_s=0.5), notes=tmp_path / "notes"
        )
    assert "Credentials are missing" in refused.value.remedy, refused.value.message


def test_a_place_that_nobody_answers_at_is_told(tmp_path: Path, object_store: ObjectStore, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StorageError) as refused:
        upload_checkpoint(
            saved(tmp_path), Objects("s3://some-bucket", patience_s=0.5), notes=tmp_path / "notes"
        )
    assert "reachable" in refused.value.remedy


def begun(rundir: RunDirectory, url: str, **more) -> tuple[Store, Backup, Run]:
    section = BackupSection(url=url, **more)
    backup = Backup(rundir, section, run_name="run")
    run = Run()
    store = Store(rundir, KEEP_ONE, backup=backup)
    store.restore(run.parts)
    return store, backup, run


def test_each_checkpoint_is_backed_up_beside_the_training_and_goes_only_then(rundir: RunDirectory, url: str):
    store, backup, run = begun(rundir, url)
    for step in (1, 2, 3):
        store.save(RunStateToSave(run.fill(step).parts, step=step))
        wait_for(lambda: backup.due() == [])  # else those between two uploads would be passed over
    backup.close()
    assert due(rundir, BackupSection(url=url), run_name="run") == []
    assert set(remote_copies(rundir)) == {f"step-00000{step}.i001" for step in (1, 2, 3)}
    there = remote_checkpoints(Objects(f"{url}/run"))
    assert [source.name for source in there] == sorted(remote_copies(rundir))
    assert all(verify(source) == [] for source in there)
    store.save(RunStateToSave(run.fill(4).parts, step=4))
    assert [found.step for found in store.checkpoints()] == [4]


def test_without_credentials_training_goes_on_and_every_copy_is_kept(
    rundir: RunDirectory, object_store: ObjectStore, caplog
):
    store, backup, run = begun(rundir, object_store.new_bucket())
    with object_store.checking_credentials():
        for step in (1, 2, 3):
            store.save(RunStateToSave(run.fill(step).parts, step=step))
        backup.close(wait_s=60)
    assert [found.step for found in store.checkpoints()] == [1, 2, 3]
    assert "the local copies are kept" in caplog.text and "not backed up" in caplog.text
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in caplog.text
    later = Backup(rundir, BackupSection(url=backup._section.url), run_name="run")
    later.wake()
    later.close()
    assert later.due() == [], "the next start goes on with it"


def test_a_run_that_lost_its_directory_goes_on_from_its_backup(tmp_path: Path, url: str):
    first, backup, run = begun(RunDirectory(tmp_path / "one").create(), url)
    first.save(RunStateToSave(run.fill(7).parts, step=7))
    backup.close()
    second = RunDirectory(tmp_path / "two").create()
    store, backup, run = begun(second, url)
    assert run.equals(Run().fill(7)) and store.incarnation == 2
    store.save(RunStateToSave(run.fill(8).parts, step=8))
    backup.close()
    assert [source.name for source in remote_checkpoints(Objects(f"{url}/run"))] == [
        "step-000007.i001",
        "step-000008.i002",
    ]


def test_the_backups_of_another_run_are_left_alone(tmp_path: Path, url: str):
    one = RunDirectory(tmp_path / "one").create()
    begin(one, base=None, reason="start")
    upload_run_files(one, Objects(url))
    other = RunDirectory(tmp_path / "other").create()
    begin(other, base=None, reason="another start")
    with pytest.raises(CheckpointError, match="another run"):
        upload_run_files(other, Objects(url))


def test_only_what_is_to_be_backed_up_waits_for_it(rundir: RunDirectory, url: str):
    store, backup, run = begun(rundir, url, every_steps=2)
    for step in (1, 2, 3):
        store.save(RunStateToSave(run.fill(step).parts, step=step))
    backup.close()
    assert set(remote_copies(rundir)) == {"step-000002.i001"}
