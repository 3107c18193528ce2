"""Ranks that back a checkpoint up together: who sends what, what is read back, and what is passed over."""

import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.checkpoint.object_store import ObjectStore
from tests.checkpoint.small_run import Run
from tests.checkpoint.test_background import wait_for

from bloomery.checkpoint.format.catalogue import checkpoints, remote_copies, verify
from bloomery.checkpoint.format.manifest import DamagedCheckpoint, FileRecord, read_manifest
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.remote import backup as backup_module
from bloomery.checkpoint.remote import shared_upload
from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.remote.remote_run import remote_source
from bloomery.checkpoint.remote.shared_upload import (
    BackupHelper,
    FileSender,
    UploadCoordinator,
    notes_of,
    read_notes,
    read_request,
)
from bloomery.checkpoint.remote.transfer import upload_checkpoint
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.config.checkpoint import BackupSection, CheckpointSection
from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave

FILES, WORLD = 8, 4


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"stall_s": shared_upload.STALL_S, "poll_s": 0.01, "place": ""}
    monkeypatch.setattr(UploadCoordinator.__init__, "__kwdefaults__", usual)


@pytest.fixture
def senders(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Which thread sent each file."""
    seen: dict[str, str] = {}
    send = Objects.send

    def watched(remote: Objects, key: str, path: Path):
        seen[path.name] = threading.current_thread().name
        return send(remote, key, path)

    monkeypatch.setattr(Objects, "send", watched)
    return seen


def saved(rundir: RunDirectory, step: int = 1) -> Path:
    """A checkpoint with a file for each of FILES parts."""
    entries = [whole(f"part{number}.w", torch.full((999,), float(number))) for number in range(FILES)]
    return save_checkpoint(rundir.checkpoints, entries, step=step, incarnation=1)


def sent_by_all(rundir: RunDirectory, url: str, *, helpers: int, **more: float) -> Path:
    directory = saved(rundir)
    running = [BackupHelper(rundir, rank=rank, world=WORLD, poll_s=0.01) for rank in range(1, 1 + helpers)]
    try:
        upload_checkpoint(
            directory,
            Objects(url),
            notes=notes_of(rundir, directory.name),
            others=UploadCoordinator(rundir, world=WORLD, **more),
        )
    finally:
        for helper in running:
            helper.close()
    assert read_request(rundir) is None and not list(rundir.backups.glob("*.notes*"))
    return directory


def test_each_rank_sends_its_share_and_nothing_that_the_store_vouches_for_is_read_back(
    rundir: RunDirectory, object_store: ObjectStore, senders: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    read_back: list[str] = []
    digest = Objects.digest

    def watched(remote: Objects, key: str) -> str:
        read_back.append(key.rpartition("/")[2])
        return digest(remote, key)

    monkeypatch.setattr(Objects, "digest", watched)
    url = object_store.new_bucket()
    directory = sent_by_all(rundir, url, helpers=WORLD - 1)
    assert len(senders) == FILES and set(read_back) <= {"index.json", "manifest.json"}
    names = [name for name in senders.values() if name == "backup-helper"]
    assert len(names) == FILES * (WORLD - 1) // WORLD, "the first rank sent its own share alone"
    assert verify(remote_source(f"{url}/checkpoints/{directory.name}")) == []


def test_the_share_of_a_rank_that_sends_nothing_is_sent_by_the_first(
    rundir: RunDirectory, tmp_path: Path, senders: dict[str, str], caplog: pytest.LogCaptureFixture
):
    url = f"file://{tmp_path}/elsewhere"
    directory = sent_by_all(rundir, url, helpers=1, stall_s=0.5)
    assert len(senders) == FILES and "rank 3 has sent no file" in caplog.text
    assert list(senders.values()).count("backup-helper") <= FILES // WORLD
    assert verify(remote_source(f"{url}/checkpoints/{directory.name}")) == []


def test_a_file_that_is_damaged_here_is_found_while_it_is_sent(
    rundir: RunDirectory, object_store: ObjectStore
):
    directory = saved(rundir)
    path = next(directory.glob("part3*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    remote = Objects(object_store.new_bucket())
    with pytest.raises(DamagedCheckpoint, match=f"{path} is not what was saved"):
        upload_checkpoint(directory, remote, notes=rundir.path / "notes")
    assert not remote.exists(f"checkpoints/{directory.name}/{path.name}"), "nobody takes it for the file"


@pytest.mark.parametrize("size", [1, 5 << 20, (5 << 20) + 1, (11 << 20) + 7])
def test_the_sum_that_the_store_answers_with_is_that_of_the_bytes_that_were_sent(
    tmp_path: Path, object_store: ObjectStore, size: int
):
    path, remote = tmp_path / "file", Objects(object_store.new_bucket())
    path.write_bytes((b"0123456789abcdef" * (size // 16 + 1))[:size])
    sent = remote.send("key", path)
    assert sent.is_proven and remote.digest("key") == sent.xxh3_128


def test_checkpoints_between_two_uploads_are_passed_over_and_the_newest_goes_first(
    rundir: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first upload takes as long as three saves. Then the newest goes, and those between need not."""
    order, go_on, back_up = list[str](), threading.Event(), backup_module._back_up

    def slowly(run: RunDirectory, checkpoint, *more, **others) -> None:
        order.append(checkpoint.name)
        assert go_on.wait(120)
        back_up(run, checkpoint, *more, **others)

    monkeypatch.setattr(backup_module, "_back_up", slowly)
    backup = Backup(rundir, BackupSection(url=f"file://{tmp_path}/elsewhere"), run_name="run")
    section, run = CheckpointSection(keep_last=1, keep_tenths=False, keep_best=0), Run()
    store = Store(rundir, section, backup=backup)
    store.restore(run.parts)
    store.save(RunStateToSave(run.fill(1).parts, step=1))
    wait_for(lambda: order)
    for step in (2, 3, 4):
        store.save(RunStateToSave(run.fill(step).parts, step=step))
    assert [found.step for found in store.checkpoints()] == [1, 2, 3, 4], "all wait for the backup"
    go_on.set()
    wait_for(lambda: "step-000004.i001" in remote_copies(rundir))
    assert backup.due() == [] and order[1] == "step-000004.i001"
    store.save(RunStateToSave(run.fill(5).parts, step=5))
    backup.close()
    assert [found.step for found in checkpoints(rundir)] == [5]
    assert "step-000005.i001" in remote_copies(rundir)


def test_a_sender_notes_what_it_verified_and_sends_it_no_second_time(rundir: RunDirectory, tmp_path: Path):
    directory = saved(rundir)
    record = read_manifest(directory).files[0]
    remote, notes = Objects(f"file://{tmp_path}/elsewhere"), rundir.path / "notes"
    assert FileSender(directory, remote, notes=notes, noted={}).send(record) == record.bytes
    assert FileSender(directory, remote, notes=notes, noted={}).send(record) == 0


def test_a_file_that_is_too_short_in_the_store_is_sent_again_whatever_was_noted(
    rundir: RunDirectory, tmp_path: Path
):
    directory = saved(rundir)
    record = read_manifest(directory).files[0]
    remote, notes = Objects(f"file://{tmp_path}/elsewhere"), rundir.path / "notes"
    key = f"checkpoints/{directory.name}/{record.name}"
    remote.put(key, (directory / record.name).read_bytes()[:-1])
    noted = {record.name: remote.stat(key).mark}
    assert FileSender(directory, remote, notes=notes, noted=noted).send(record) == record.bytes
    assert remote.content(key) == (directory / record.name).read_bytes()


def test_files_that_were_removed_from_the_store_since_they_were_noted_are_sent_again(
    rundir: RunDirectory, tmp_path: Path
):
    """An upload is killed when the other ranks have sent their shares, and somebody tidies the store."""
    url, directory = f"file://{tmp_path}/elsewhere", saved(rundir)
    for rank in range(1, WORLD):
        notes = notes_of(rundir, directory.name, rank=rank)
        sender = FileSender(directory, Objects(url), notes=notes, noted={})
        for file in read_manifest(directory).files[rank::WORLD]:
            sender.send(file)
    shutil.rmtree(tmp_path / "elsewhere/checkpoints")
    sent_by_all(rundir, url, helpers=0, stall_s=0.1)
    assert verify(remote_source(f"{url}/checkpoints/{directory.name}")) == []


def test_a_backup_from_which_a_file_goes_before_its_manifest_is_written_is_none(
    rundir: RunDirectory, tmp_path: Path
):
    directory, store = saved(rundir), tmp_path / "elsewhere"

    def remove_one(done: int, total: int) -> None:
        for path in store.glob("checkpoints/*/part0*") if done > total / 2 else ():
            path.unlink()

    with pytest.raises(StorageError, match="is not there in full now"):
        upload_checkpoint(
            directory, Objects(f"file://{store}"), notes=rundir.path / "notes", progress=remove_one
        )
    assert not list(store.glob("checkpoints/*/manifest.json"))


def test_a_backup_in_which_a_file_became_shorter_before_its_manifest_is_written_is_none(
    rundir: RunDirectory, tmp_path: Path
):
    directory, store = saved(rundir), tmp_path / "elsewhere"

    def shorten_one(done: int, total: int) -> None:
        for path in store.glob("checkpoints/*/part0*") if done > total / 2 else ():
            path.write_bytes(b"cut")

    with pytest.raises(StorageError, match="is not there in full now"):
        upload_checkpoint(
            directory, Objects(f"file://{store}"), notes=rundir.path / "notes", progress=shorten_one
        )
    assert not list(store.glob("checkpoints/*/manifest.json"))


def test_a_rank_whose_store_refused_once_sends_its_share_all_the_same(
    rundir: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    directory, url = saved(rundir), Objects(f"file://{tmp_path}/elsewhere").url
    refused, send = list[str](), FileSender.send

    def refusing_once(sender: FileSender, record: FileRecord) -> int:
        if not refused:
            refused.append(record.name)
            raise OSError(5, "the store is away")
        return send(sender, record)

    monkeypatch.setattr(FileSender, "send", refusing_once)
    files, notes = read_manifest(directory).files, notes_of(rundir, directory.name)
    rundir.backups.mkdir(exist_ok=True)
    helper = BackupHelper(rundir, rank=1, world=2, poll_s=0.01)
    try:
        UploadCoordinator(rundir, world=2).ask(directory.name, url=url, files=files)
        wait_for(lambda: set(read_notes(notes, url)) == {file.name for file in files[1::2]})
    finally:
        helper.close()


def test_what_a_store_does_not_vouch_for_is_read_back(
    rundir: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    directory = saved(rundir)
    record, send = read_manifest(directory).files[0], Objects.send

    def damaging(remote: Objects, key: str, path: Path):
        sent = send(remote, key, path)
        stored = tmp_path / "elsewhere" / key
        stored.write_bytes(bytes(record.bytes))
        return sent

    remote = Objects(f"file://{tmp_path}/elsewhere")
    monkeypatch.setattr(Objects, "send", damaging)
    with pytest.raises(OSError, match="is not what was sent"):
        FileSender(directory, remote, notes=rundir.path / "notes", noted={}).send(record)
    assert not (rundir.path / "notes").exists()


def test_each_place_and_each_rank_has_its_own_notes_and_requests(rundir: RunDirectory):
    name = "step-000001.i001"
    assert notes_of(rundir, name) == rundir.backups / f"{name}.notes"
    assert notes_of(rundir, name, rank=3) == rundir.backups / f"{name}.notes-r00003"
    second = notes_of(rundir, name, rank=3, place="second")
    assert second == rundir.backups / f"{name}.second.notes-r00003"
    files = [FileRecord(name="a", bytes=5, xxh3_128="ab", blocks="")]
    first, other = UploadCoordinator(rundir, world=2), UploadCoordinator(rundir, world=2, place="second")
    first.ask(name, url="s3://one", files=files)
    other.ask(name, url="s3://two", files=files * 2)
    asked = read_request(rundir)
    assert asked is not None and (asked.url, asked.checkpoint, asked.files) == (
        "s3://one",
        name,
        tuple(files),
    )
    there = read_request(rundir, "second")
    assert there is not None and there.url == "s3://two" and there.token != asked.token
    first.end()
    first.end()
    assert read_request(rundir) is None and read_request(rundir, "second") == there
    for damaged in ("", "[]", "{}", '{"token": 1, "checkpoint": "a", "url": "b", "files": 5}'):
        (rundir.backups / "sending.second.json").write_text(damaged)
        assert read_request(rundir, "second") is None


def test_a_rank_that_helps_with_a_further_place_notes_it_there(rundir: RunDirectory, tmp_path: Path):
    directory, url = saved(rundir), Objects(f"file://{tmp_path}/elsewhere").url
    rundir.backups.mkdir(exist_ok=True)
    files = read_manifest(directory).files
    helper = BackupHelper(rundir, rank=1, world=3, poll_s=0.01, place="second")
    try:
        UploadCoordinator(rundir, world=3, place="second").ask(directory.name, url=url, files=files)
        notes = notes_of(rundir, directory.name, place="second")
        wait_for(lambda: set(read_notes(notes, url)) == {file.name for file in files[1::3]})
    finally:
        helper.close()
    assert read_notes(notes_of(rundir, directory.name), url) == {}
    assert read_notes(notes, f"{url}2") == {}, "what another store has says nothing of this one"


def test_notes_of_what_a_store_has_lost_go_and_all_others_stay(rundir: RunDirectory):
    rundir.backups.mkdir(exist_ok=True)
    notes = notes_of(rundir, "step-000001.i001")
    lines = [f'{{"url": "s3://b", "file": "{name}", "mark": "{name}1"}}' for name in "abc"]
    notes.write_bytes("\n".join([*lines[:2], "[]", "{", ""]).encode() + b"\xff\xfe\n")
    notes_of(rundir, "step-000001.i001", rank=2).write_text(lines[2] + "\n")
    files = [FileRecord(name=name, bytes=7, xxh3_128="", blocks="") for name in "abcd"]
    shared_upload.forget_removed(notes, "s3://b", files=files, sizes={"a": 7, "b": 6})
    assert read_notes(notes, "s3://b") == {"a": "a1"}
    assert notes.read_text().splitlines()[:3] == [lines[0], "[]", "{"]


def test_who_is_told_to_stop_waits_for_no_other_rank(rundir: RunDirectory):
    rundir.backups.mkdir(exist_ok=True)
    files = [FileRecord(name=name, bytes=7, xxh3_128="", blocks="") for name in "abcd"]
    answers = iter([True, True, False])
    waiting = UploadCoordinator(rundir, world=2, poll_s=0.0)
    assert list(waiting.unsent("step", url="s3://b", files=files, go_on=lambda: next(answers))) == []
    late = UploadCoordinator(rundir, world=2, poll_s=0.0, stall_s=-1.0)
    left = late.unsent("step", url="s3://b", files=files, go_on=lambda: True)
    assert [file.name for file in left] == ["b", "d"]


def test_after_the_first_file_that_cannot_be_sent_no_further_one_is(
    rundir: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tried: list[str] = []

    def refusing(sender: FileSender, record: FileRecord) -> int:
        tried.append(record.name)
        if len(tried) == 1:
            raise OSError(5, "the store is away")
        time.sleep(0.05)
        return record.bytes

    monkeypatch.setattr(FileSender, "send", refusing)
    with pytest.raises(StorageError, match="the store is away"):
        upload_checkpoint(saved(rundir), Objects(f"file://{tmp_path}/elsewhere"), notes=rundir.path / "notes")
    assert len(tried) < FILES
