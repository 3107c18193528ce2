"""The steps of a commit, one by one: what each leaves, removes, waits for, and says when it fails."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bloomery import errors
from bloomery.checkpoint.format import commit as commit_module
from bloomery.checkpoint.format.commit import (
    Part,
    abandon_part,
    begin_partial,
    commit,
    part_or_failure,
    part_record,
    part_record_path,
    publish,
    read_part_record,
    remove_checkpoint,
    wait_for_part_record,
    write_part_record,
)
from bloomery.checkpoint.format.deadlines import note_progress
from bloomery.checkpoint.format.manifest import (
    BLOCK_BYTES,
    INDEX,
    FileRecord,
    Index,
    IndexedBox,
    Manifest,
    checked_index,
    read_manifest,
)
from bloomery.checkpoint.format.source import STORED_AT, _without, stored_url
from bloomery.checkpoint.format.state import Box, StateEntry, whole
from bloomery.checkpoint.remote.backup_duty import (
    Duty,
    backed_up_round,
    is_covered,
    note_round,
    read_duty,
    write_duty,
)
from bloomery.checkpoint.save.direct import MARGIN_BYTES, DirectoryBackend, save_checkpoint
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.run_directory import RunDirectory

NAME = "step-000003.i001"
EMPTY = Part(files=(), boxes=())
USUAL = {"step": 3, "incarnation": 1, "time": 5.0, "values": {}, "about": {}}


@pytest.fixture
def partial(tmp_path: Path) -> Path:
    path = tmp_path / f"{NAME}.partial"
    path.mkdir()
    return path


def test_a_commit_into_a_directory_that_has_an_index_is_told_and_makes_no_checkpoint(partial: Path) -> None:
    (partial / INDEX).touch()
    with pytest.raises(StorageError, match="Saving a checkpoint failed"):
        commit(partial, [EMPTY], **USUAL)
    assert partial.exists() and not partial.with_suffix("").exists()


def test_what_is_published_has_nothing_of_the_ranks_beside_it_and_replaces_what_was_damaged(
    partial: Path,
) -> None:
    note_progress(partial, 3, 17)
    write_part_record(partial, 2, EMPTY)
    (partial / ".manifest.json.0123.draft").touch()
    (partial / "data").touch()
    (partial.with_suffix("") / "old").mkdir(parents=True)
    final = publish(partial, records=[part_record_path(partial, 2), part_record_path(partial, 5)])
    assert final.name == NAME and [path.name for path in final.iterdir()] == ["data"]
    assert not partial.exists()


def test_the_index_is_of_all_parts_and_the_manifest_counts_the_ranks(partial: Path) -> None:
    parts = [
        Part(files=(FileRecord(name=f"{name}.safetensors", bytes=0, xxh3_128="0" * 32, blocks=""),), boxes=())
        for name in "ab"
    ]
    manifest = read_manifest(commit(partial, [*parts, EMPTY], **{**USUAL, "about": {"told": 1}}))
    assert manifest.world == 3 and manifest.time == 5.0 and manifest.about == {"told": 1}
    assert [file.name for file in manifest.files] == ["a.safetensors", "b.safetensors"]


def test_a_save_begins_in_an_empty_directory_or_says_why_not(tmp_path: Path, partial: Path) -> None:
    (partial / "old").touch()
    begin_partial(partial)
    assert list(partial.iterdir()) == []
    partial.rmdir()
    partial.touch()
    begin_partial(partial)
    assert partial.is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Saving a checkpoint failed"):
        begin_partial(tmp_path / "file" / "a.partial")


def test_a_record_without_a_part_says_why_or_that_it_is_empty() -> None:
    with pytest.raises(StorageError, match="rank 7: /there is empty") as told:
        part_or_failure(b"{}", rank=7, place="/there")
    assert told.value.remedy == "Please report this."
    content = part_record(failure={"kind": "storage", "message": "no space", "remedy": "Free some."})
    with pytest.raises(StorageError, match="rank 7: no space") as told:
        part_or_failure(content, rank=7, place="/there")
    assert told.value.remedy == "Free some."
    assert part_or_failure(part_record(EMPTY), rank=7, place="/there") == EMPTY


def waited(
    partial: Path, *, until: float = 1e9, stall_s: float = float("inf"), seen: Callable[[int], None]
) -> Part:
    return wait_for_part_record(partial, 4, until=until, stall_s=stall_s, progressed=seen)


def test_who_waits_for_a_rank_hears_of_each_byte_once(partial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_module, "_PROGRESS_POLL_S", 0.0)
    heard: list[int] = []

    def seen(count: int) -> None:
        heard.append(count)
        if len(heard) == 1:
            note_progress(partial, 4, 250)
        else:
            write_part_record(partial, 4, EMPTY)

    note_progress(partial, 4, 100)
    assert waited(partial, seen=seen) == EMPTY and heard == [100, 150]
    assert part_record_path(partial, 4).exists(), "the record stays"


def test_a_rank_that_is_late_or_stuck_or_whose_directory_is_gone_is_told(partial: Path) -> None:
    with pytest.raises(
        StorageError, match=rf"(?s)rank 4 did not write its part of {NAME}.partial in time.*that rank's log"
    ):
        waited(partial, until=time.monotonic() - 1, seen=lambda count: None)
    with pytest.raises(StorageError, match=r"rank 4 has written nothing .* after 0 bytes(?s:.*)next save is"):
        waited(partial, until=time.monotonic() + 60, stall_s=-1.0, seen=lambda count: None)
    partial.rmdir()
    with pytest.raises(StorageError, match=r"(?s)was removed while it was written.*disk still mounted"):
        waited(partial, until=time.monotonic() + 60, seen=lambda count: None)


def test_an_empty_directory_that_cannot_be_removed_is_an_error_and_not_taken_for_one_that_nfs_keeps(
    partial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*where: object, **how: object) -> None:
        raise PermissionError(13, "Permission denied", str(partial))

    monkeypatch.setattr("os.rmdir", refuse)
    with pytest.raises(StorageError, match=r"Sweeping an unfinished checkpoint failed .*Permission"):
        commit_module.sweep(partial.parent)


def test_a_sweep_takes_unfinished_checkpoints_and_nothing_else(partial: Path) -> None:
    late = partial.with_name("step-1000000.i001.partial")
    late.mkdir()
    kept = [partial.with_name(name) for name in ("mine.partial", NAME, "step-000004.i001.partial-mine")]
    for path in kept:
        path.mkdir()
    assert commit_module.sweep(partial.parent) == [partial, late]
    assert sorted(partial.parent.iterdir()) == sorted(kept)


def test_a_rank_takes_back_its_own_files_alone_and_the_first_all(partial: Path) -> None:
    for name in ("mine", "other"):
        (partial / name).touch()
    abandon_part(partial, 1, files=["gone", "mine"], why={"kind": "", "message": "it broke", "remedy": ""})
    assert sorted(path.name for path in partial.iterdir()) == ["other", "part-r00001.json"]
    assert read_part_record(partial, 1) is None and read_part_record(partial, 2) is None
    abandon_part(partial, 0, files=[], why={})
    assert not partial.exists()
    abandon_part(partial, 1, files=["mine"], why={"message": "", "remedy": "", "kind": ""})
    note_progress(partial, 1, 4096)
    with pytest.raises(FileNotFoundError):
        write_part_record(partial, 1, EMPTY)
    assert not partial.exists(), "nobody makes the directory again"


def test_a_checkpoint_is_removed_also_where_an_earlier_removal_of_it_broke_off(partial: Path) -> None:
    (partial / "left").touch()
    final = partial.with_suffix("")
    final.mkdir()
    (final / "data").touch()
    remove_checkpoint(final)
    assert list(partial.parent.iterdir()) == []


def test_a_checkpoint_that_cannot_be_removed_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Removing an old checkpoint failed"):
        remove_checkpoint(tmp_path / NAME)


def test_a_save_leaves_a_margin_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1000 + MARGIN_BYTES - 1]
    monkeypatch.setattr(errors, "free_bytes", lambda path: free[0])
    partial = tmp_path / f"{NAME}.partial"
    with pytest.raises(StorageError, match="no space"):
        DirectoryBackend().begin(partial, bytes=1000)
    assert not partial.exists()
    free[0] += 1
    DirectoryBackend().begin(partial, bytes=1000)
    assert partial.is_dir()


def test_index_and_manifest_are_read_back_by_the_first_rank_and_files_by_each(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, [whole("model.a", torch.ones(9))], step=3, incarnation=1)
    records, place = read_manifest(saved).files, saved.with_name(f"{saved.name}.partial")
    for is_first in (True, False):
        assert DirectoryBackend().read_back(place, records, is_first=is_first) == ""
    index = (saved / INDEX).read_bytes()
    (saved / INDEX).write_bytes(index[:-1] + b" ")
    assert INDEX in DirectoryBackend().read_back(place, records, is_first=True)
    assert DirectoryBackend().read_back(place, records, is_first=False) == ""
    (saved / INDEX).write_bytes(index)
    path = saved / records[0].name
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    for is_first in (True, False):
        problem = DirectoryBackend().read_back(place, records, is_first=is_first)
        assert problem.startswith(f"{records[0].name} is not what was written")


def with_round(rundir: RunDirectory, step: int, outer: object) -> Path:
    entries = [whole("model.a", torch.ones(2))]
    values = {} if outer is None else {"outer": outer}
    return save_checkpoint(rundir.checkpoints, entries, step=step, incarnation=1, values=values)


def test_a_duty_that_cannot_be_read_is_none_and_only_a_plain_yes_makes_backups(rundir: RunDirectory) -> None:
    assert read_duty(rundir) is None and backed_up_round(rundir) == -1
    duty = Duty(peer="north", writes=True, covered=7)
    write_duty(rundir, duty)
    assert read_duty(rundir) == duty
    path = rundir.backups / "duty.json"
    for writes, expected in (("false", False), ('"true"', False), ("1", False), ("true", True)):
        path.write_text(f'{{"peer": "north", "writes": {writes}, "covered": 7}}')
        found = read_duty(rundir)
        assert found is not None and found.writes is expected
    for damaged in (
        "",
        "[]",
        '{"peer": "a", "writes": true}',
        '{"peer": "a", "writes": true, "covered": []}',
    ):
        path.write_text(damaged)
        assert read_duty(rundir) is None


def test_rounds_that_were_backed_up_only_grow_and_cover_what_is_as_old(rundir: RunDirectory) -> None:
    five = with_round(rundir, 10, {"round": 5, "inside": False})
    inside = with_round(rundir, 20, {"round": 5, "inside": True})
    four = with_round(rundir, 30, {"round": 4, "inside": True})
    for directory, known in ((five, 5), (four, 5), (with_round(rundir, 40, {"round": 6}), 5)):
        note_round(rundir, directory)
        assert backed_up_round(rundir) == known
    for place, covered in ((five, True), (inside, False), (four, True)):
        assert is_covered(place, Duty(peer="a", writes=False, covered=5)) is covered
    assert is_covered(inside, Duty(peer="a", writes=False, covered=6))
    assert not is_covered(five, Duty(peer="a", writes=False, covered=4))
    for step, outer in ((50, None), (60, {"round": "5", "inside": False}), (70, {"inside": False})):
        directory = with_round(rundir, step, outer)
        note_round(rundir, directory)
        assert backed_up_round(rundir) == 5
        assert not is_covered(directory, Duty(peer="a", writes=False, covered=99))


def test_an_entry_that_does_not_say_where_its_checkpoint_is_is_refused(tmp_path: Path) -> None:
    for content in ("", "[]", "{}"):
        (tmp_path / STORED_AT).write_text(content)
        with pytest.raises(CheckpointError, match="does not say where") as refused:
            stored_url(tmp_path)
        assert "the next start of the run writes it anew" in refused.value.remedy
    (tmp_path / STORED_AT).write_text('{"url": "s3://b/run"}')
    assert stored_url(tmp_path) == "s3://b/run"


def test_what_a_short_read_left_is_read_next() -> None:
    views = [memoryview(bytes(3)), memoryview(bytes(4)), memoryview(bytes(2))]
    for count, lengths in ((0, [3, 4, 2]), (2, [1, 4, 2]), (3, [4, 2]), (5, [2, 2]), (8, [1]), (9, [])):
        assert [len(view) for view in _without(views, count)] == lengths


def test_a_box_of_lists_is_one_of_tuples() -> None:
    box = Box([1, 2], [3, 4])  # type: ignore[arg-type]  — as JSON gives them
    assert box == Box((1, 2), (3, 4)) and hash(box) == hash(Box((1, 2), (3, 4)))
    tensor = torch.zeros(3, 4)
    entry = StateEntry(name="a.b", global_shape=[4, 6], dtype="float32", box=box, tensor=tensor)  # type: ignore[arg-type]
    assert entry.global_shape == (4, 6)
    with pytest.raises(ValueError, match="does not lie in"):
        replace(entry, global_shape=(4, 5))


def indexed(
    name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int, **more: object
) -> IndexedBox:
    usual = {"global_shape": (4, 6), "offset": (0, 0), "scope": "shared", "file": "f"}
    return IndexedBox(name=name, dtype=dtype, shape=shape, begin=begin, end=end, **{**usual, **more})


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        (
            [indexed("a", "float32", (2, 6), 0, 48), indexed("a", "float32", (2, 6), 48, 96, offset=(2, 0))],
            "",
        ),
        ([indexed("a", "int4", (2, 6), 0, 12)], "unknown element type"),
        ([indexed("a", "float32", (2, 6), 0, 48, offset=(3, 0))], "outside its tensor"),
        ([indexed("a", "float32", (2, 6), 53, 101)], "outside its file"),
        ([indexed("a", "float32", (2, 6), -1, 47)], "outside its file"),
        ([indexed("a", "float32", (2, 6), 0, 47)], "not the bytes of its shape"),
        (
            [indexed("a", "float32", (2, 6), 0, 48), indexed("a", "int32", (2, 6), 48, 96)],
            "two shapes or types",
        ),
        (
            [indexed("a", "int8", (1, 6), 0, 6), indexed("a", "int8", (1, 6), 6, 12, global_shape=(5, 6))],
            "two shapes or types",
        ),
    ],
)
def test_an_index_is_of_what_its_files_hold(boxes: list[IndexedBox], said: str) -> None:
    record = FileRecord(name="f", bytes=100, xxh3_128="0" * 32, blocks="0" * 16)
    facts = {"step": 1, "incarnation": 1, "time": 0.0, "world": 1, "about": {}, "values": {}}
    manifest = Manifest(**facts, files=(record,), index_bytes=0, index_xxh3_128="")
    index = Index(boxes=tuple(boxes), files={"f": record})
    if not said:
        assert checked_index(index, manifest) == index
    else:
        with pytest.raises(ValueError, match=said):
            checked_index(index, manifest)
    for wrong, why in (
        (replace(record, bytes=101), "101 bytes, the manifest 100"),
        (replace(record, blocks="0" * 32), "one hash for each block"),
        (replace(record, bytes=BLOCK_BYTES + 1), "bytes, the manifest"),
    ):
        with pytest.raises(ValueError, match=why):
            checked_index(Index(boxes=(), files={"f": wrong}), manifest)


@pytest.mark.parametrize(
    ("size", "hashes"), [(0, 0), (1, 1), (BLOCK_BYTES, 1), (BLOCK_BYTES + 1, 2), (2 * BLOCK_BYTES, 2)]
)
def test_an_index_has_a_hash_for_each_block_of_a_file_and_for_what_is_left(size: int, hashes: int) -> None:
    facts = {"step": 1, "incarnation": 1, "time": 0.0, "world": 1, "about": {}, "values": {}}
    for given in (hashes - 1, hashes, hashes + 1):
        record = FileRecord(name="f", bytes=size, xxh3_128="0" * 32, blocks="0" * 16 * max(given, 0))
        manifest = Manifest(**facts, files=(record,), index_bytes=0, index_xxh3_128="")
        index = Index(boxes=(), files={"f": record})
        if len(record.blocks) == 16 * hashes:
            assert checked_index(index, manifest) == index
        else:
            with pytest.raises(ValueError, match="one hash for each block"):
                checked_index(index, manifest)
