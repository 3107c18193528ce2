"""What marks, duties, entries and exports promise is synced before it is relied on, and notes are not."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.disk_calls import recorded

from bloomery.checkpoint.format.catalogue import checkpoints, record_copy
from bloomery.checkpoint.format.commit import Part, begin_partial, publish, write_part_record
from bloomery.checkpoint.format.data_file import HashingWriter, write_image
from bloomery.checkpoint.format.deadlines import note_progress
from bloomery.checkpoint.format.manifest import MANIFEST, FileRecord
from bloomery.checkpoint.format.source import STORED_AT
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.format.suspects import SUSPECT, mark_suspects, send_marks
from bloomery.checkpoint.remote.backup_duty import Duty, note_round, write_duty
from bloomery.checkpoint.remote.places import ObjectRunStorage
from bloomery.checkpoint.remote.remote_run import upload_logs_and_data
from bloomery.checkpoint.remote.shared_upload import UploadCoordinator, forget_removed
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.checkpoint.writer.store_place import enter_stored
from bloomery.config.checkpoint import BackupSection
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory
from bloomery.interchange.weight_files import PlannedTensor, write_checksums, write_shards
from bloomery.objects import Objects

NAME = "step-000003.i001"


def saved(rundir: RunDirectory) -> Path:
    begin(rundir, base=None, reason="start")
    values = {"outer": {"round": 4, "inside": False}}
    return save_checkpoint(
        rundir.checkpoints, [whole("model.a", torch.ones(3))], step=3, incarnation=1, values=values
    )


def whole_write(name: str, directory: str) -> list[tuple[str, str]]:
    return [("sync", name), ("rename", name), ("sync", directory)]


def test_a_mark_is_synced_beside_its_checkpoint_and_among_the_backups(rundir: RunDirectory) -> None:
    saved(rundir)
    with recorded() as calls:
        mark_suspects(rundir, checkpoints(rundir), clean_step=1, why="rank 3 erred")
    assert calls.names[:3] == whole_write(SUSPECT, NAME)
    assert calls.names[-3:] == whole_write(f"{NAME}.mark", "backups")


def test_that_a_mark_was_sent_is_noted_durably_after_it_was_sent(
    rundir: RunDirectory, tmp_path: Path
) -> None:
    saved(rundir)
    remote = Objects(f"file://{tmp_path}/store")
    record_copy(rundir, NAME, url=f"{remote.url}/checkpoints/{NAME}", what="all", bytes=1)
    mark_suspects(rundir, checkpoints(rundir), clean_step=1, why="rank 3 erred")
    with recorded() as calls:
        send_marks(rundir, remote)
    assert calls.names[-3:] == whole_write(f"{NAME}.mark-sent", "backups")
    assert remote.exists(f"checkpoints/{NAME}/{SUSPECT}")


def test_a_duty_and_a_round_that_was_backed_up_are_synced(rundir: RunDirectory) -> None:
    checkpoint = saved(rundir)
    with recorded() as calls:
        write_duty(rundir, Duty(peer="north", writes=True, covered=-1))
        note_round(rundir, checkpoint)
    duty = calls.index("sync", "duty.json")
    assert calls.names[duty:] == whole_write("duty.json", "backups") + whole_write("round.json", "backups")


def test_an_entry_of_a_stored_checkpoint_is_synced_before_it_has_its_name(
    rundir: RunDirectory, tmp_path: Path
) -> None:
    draft = rundir.checkpoints / f"{NAME}.partial"
    remote, number = Objects(f"file://{tmp_path}/store/mine"), begin(rundir, base=None, reason="start")
    with recorded() as calls:
        enter_stored(draft, b"{}", url=remote.place(f"checkpoints/{NAME}"), mark=(SUSPECT, b"mark"))
    named = calls.index("rename", NAME)
    assert calls.names[named - 4 : named + 2] == [
        *[("sync", name) for name in (SUSPECT, STORED_AT, MANIFEST, draft.name)],
        ("rename", NAME),
        ("sync", "checkpoints"),
    ]
    remote.put(f"incarnations/{number:06d}.json", rundir.incarnation(number).read_bytes())
    for file in (MANIFEST, SUSPECT):
        remote.put(f"checkpoints/{NAME}/{file}", b"{}")
    with recorded() as calls:
        ObjectRunStorage(rundir, remote.url).refresh()
    assert calls.names == [], "it is entered and marked already"
    (rundir.checkpoints / NAME / SUSPECT).unlink()
    with recorded() as calls:
        ObjectRunStorage(rundir, remote.url).refresh()
    assert calls.names == whole_write(SUSPECT, NAME)


def test_a_data_file_is_synced_whichever_way_it_is_written(tmp_path: Path) -> None:
    with recorded() as calls:
        write_image(tmp_path / "a.bin", memoryview(bytearray(4096)), length=3)
        with HashingWriter(tmp_path / "b.bin") as writer:
            writer.write(memoryview(b"abc"))
            writer.finish()
    assert calls.names == [("sync", "a.bin"), ("sync", "b.bin")]


def test_what_only_living_processes_read_costs_no_sync(rundir: RunDirectory, tmp_path: Path) -> None:
    partial = tmp_path / f"{NAME}.partial"
    begin_partial(partial)
    rundir.backups.mkdir(exist_ok=True)
    files = [FileRecord(name="a", bytes=1, xxh3_128="", blocks="")]
    notes = rundir.backups / f"{NAME}.notes"
    notes.write_text('{"url": "s3://b", "file": "a", "mark": "1"}\n')
    (rundir.path / "journal").mkdir(exist_ok=True)
    (rundir.path / "journal" / "0.jsonl").write_text("{}\n")
    with recorded() as calls:
        note_progress(partial, 1, 7)
        write_part_record(partial, 1, Part(files=(), boxes=()))
        UploadCoordinator(rundir, world=2).ask(NAME, url="s3://b", files=files)
        forget_removed(notes, "s3://b", files=files, sizes={})
    assert [name for what, name in calls.names if what == "sync"] == [] and notes.read_text() == ""
    remote = Objects(f"file://{tmp_path}/store")
    with recorded() as calls:
        upload_logs_and_data(rundir, remote, BackupSection(url=remote.url))
    about_the_record = [call for call in calls.names if call[1] == "run-files.json"]
    assert about_the_record == [("rename", "run-files.json")]


def test_a_checkpoint_has_its_name_on_the_disk_when_it_is_published(tmp_path: Path) -> None:
    partial = tmp_path / f"{NAME}.partial"
    partial.mkdir()
    with recorded() as calls:
        publish(partial)
    assert calls.names == [("rename", NAME), ("sync", tmp_path.name)]


def test_shards_their_index_and_their_checksums_are_each_synced(tmp_path: Path) -> None:
    plan = [PlannedTensor(name=name, shape=(3,), dtype=torch.float32) for name in "ab"]
    with recorded() as calls:
        sums = write_shards(tmp_path, plan, [(name, torch.ones(3)) for name in "ab"], max_shard_bytes=12)
        write_checksums(tmp_path, known=sums)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert calls.names == [
        ("sync", name) for name in (*names, "model.safetensors.index.json", "checksums.xxh128")
    ]
