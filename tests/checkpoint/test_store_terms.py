"""A run that saves to object storage: what is entered, claimed, waited for, told and removed, by value."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.checkpoint.format.commit import Part
from bloomery.checkpoint.format.deadlines import PartProgress, progress_path
from bloomery.checkpoint.format.manifest import INDEX, MANIFEST, FileRecord, read_manifest
from bloomery.checkpoint.format.source import STORED_AT, LocalCheckpoint, RemoteCheckpoint
from bloomery.checkpoint.format.state import CollectedState, StateSnapshot, whole
from bloomery.checkpoint.format.suspects import SUSPECT
from bloomery.checkpoint.remote import places
from bloomery.checkpoint.remote.places import (
    LocalRunStorage,
    ObjectRunStorage,
    remove_kept,
    run_storage,
    store_url,
)
from bloomery.checkpoint.save.direct import ObjectStoreBackend, save_checkpoint
from bloomery.checkpoint.writer import part_place, store_place
from bloomery.checkpoint.writer.part_place import DirectoryPartWriter
from bloomery.checkpoint.writer.store_place import ObjectPartWriter, enter_stored
from bloomery.config.checkpoint import CheckpointSection
from bloomery.errors import RunBusy, StorageError
from bloomery.events.incarnation import begin, read_incarnations
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects

NAME = "step-000003.i001"
EMPTY = Part(files=(), boxes=())
USUAL: dict[str, Any] = {"step": 3, "incarnation": 1, "time": 5.0, "values": {}, "about": {}}


@pytest.fixture
def remote(tmp_path: Path) -> Objects:
    return Objects(f"file://{tmp_path}/store/mine")


def keys(remote: Objects) -> list[str]:
    return [entry.key for entry in remote.entries()]


def writer(rundir: RunDirectory, remote: Objects, name: str = NAME) -> ObjectPartWriter:
    return ObjectPartWriter(rundir.checkpoints / f"{name}.partial", remote.url)


def test_an_entry_says_where_its_checkpoint_is_and_whether_it_is_suspect(rundir: RunDirectory) -> None:
    draft = rundir.checkpoints / f"{NAME}.partial"
    draft.mkdir()
    (draft / "left").touch()
    final = enter_stored(draft, b"manifest", url="s3://b/run", mark=(SUSPECT, b"mark"))
    assert final == rundir.checkpoints / NAME and not draft.exists()
    contents = {path.name: path.read_bytes() for path in final.iterdir()}
    assert contents == {
        MANIFEST: b"manifest",
        STORED_AT: b'{"url": "s3://b/run"}\n',
        SUSPECT: b"mark",
    }
    enter_stored(draft, b"again", url="s3://b/other")
    contents = {path.name: path.read_bytes() for path in final.iterdir()}
    assert contents == {MANIFEST: b"again", STORED_AT: b'{"url": "s3://b/other"}\n'}
    (rundir.path / "file").touch()
    with pytest.raises(StorageError, match="Entering a checkpoint failed"):
        enter_stored(rundir.path / "file" / f"{NAME}.partial", b"", url="")


def test_a_commit_enters_the_checkpoint_and_removes_what_the_ranks_noted(
    rundir: RunDirectory, remote: Objects, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = writer(rundir, remote)
    place.record(1, EMPTY)
    remote.put("saving/step-000009.i001/part-r00001.json", b"{}")
    place.commit_parts([EMPTY, EMPTY], **{**USUAL, "values": {"train": {"a": 1}}, "about": {"told": 1}})
    left = [f"checkpoints/{NAME}/{INDEX}", f"checkpoints/{NAME}/{MANIFEST}"]
    assert keys(remote) == [*left, "saving/step-000009.i001/part-r00001.json"]
    manifest = read_manifest(rundir.checkpoints / NAME)
    assert (manifest.step, manifest.incarnation, manifest.time, manifest.world) == (3, 1, 5.0, 2)
    assert manifest.values == {"train": {"a": 1}} and manifest.about == {"told": 1}
    url = f"{remote.url}/checkpoints/{NAME}"
    assert json.loads((rundir.checkpoints / NAME / STORED_AT).read_text()) == {"url": url}

    def away(*_: object) -> None:
        raise OSError(5, "no answer")

    second = writer(rundir, remote, "step-000004.i001")
    second.record(1, EMPTY)
    monkeypatch.setattr(Objects, "delete_all", away)
    second.commit_parts([EMPTY], **{**USUAL, "step": 4})
    assert "what ranks noted of step-000004.i001 stays for now: [Errno 5] no answer" in caplog.text
    assert (rundir.checkpoints / "step-000004.i001").is_dir(), "the checkpoint is made all the same"


def test_a_run_that_went_on_elsewhere_takes_no_save_of_an_earlier_life(
    rundir: RunDirectory, remote: Objects
) -> None:
    for name in ("000001.json", "000002.json", "000010.json", "notes.json", "00000x.json"):
        remote.put(f"incarnations/{name}", b"{}")
    place = writer(rundir, remote)
    for incarnation in (1, 2, 9):
        with pytest.raises(RunBusy) as busy:
            place.commit_parts([EMPTY], **{**USUAL, "incarnation": incarnation})
        assert busy.value.message == (
            f"another process has gone on with {remote.url} as incarnation 10, and this one is incarnation "
            f"{incarnation}: what it saves is no longer part of the run"
        )
        assert "stop it and start this one again" in busy.value.remedy
    place.commit_parts([EMPTY], **{**USUAL, "incarnation": 10})


def test_who_comes_back_after_a_commit_finds_that_it_is_done_and_enters_it(
    rundir: RunDirectory, remote: Objects
) -> None:
    place = writer(rundir, remote)
    for rank in (0, 1):
        assert place.written_before({"rank": rank}) is None
    record = FileRecord(name="f", bytes=1, xxh3_128="0" * 32, blocks="")
    part = Part(files=(record,), boxes=())
    place.record(1, part)
    assert place.written_before({"rank": 1}) == part and place.written_before({"rank": 2}) is None
    remote.put(f"checkpoints/{NAME}/{MANIFEST}", b"manifest")
    assert place.written_before({"rank": 2}) == EMPTY and not (rundir.checkpoints / NAME).exists()
    assert place.written_before({"rank": 0}) == EMPTY
    assert (rundir.checkpoints / NAME / MANIFEST).read_bytes() == b"manifest"


def test_the_first_rank_shows_progress_for_each_record_and_each_note_of_the_others(
    rundir: RunDirectory, remote: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, counts, pauses = writer(rundir, remote), list[int](), list[float]()
    progress = PartProgress(lambda count: None)
    part = [Part(files=(FileRecord(name=n, bytes=1, xxh3_128="", blocks=""),), boxes=()) for n in "ab"]
    note = f"saving/{NAME}/{progress_path(rundir.path, 2).name}"

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        counts.append(progress.count)
        match len(pauses):
            case 1:
                remote.put(note, b"5")
            case 3:
                remote.put(note, b"55")
                place.record(2, part[1])
            case 4:
                place.record(1, part[0])
        assert len(pauses) < 9

    monkeypatch.setattr(store_place.time, "sleep", pause)
    found = place._parts_of_others({"world": 3, "parts_s": 1e6, "stall_s": 1e6}, progress)
    assert found == part, "in the order of the ranks"
    assert counts == [0, 1, 1, 2] and progress.count == 3
    assert place._parts_of_others({"world": 1, "parts_s": 1.0, "stall_s": 1.0}, progress) == []
    with pytest.raises(StorageError, match="rank 3 did not write its part"):
        place._parts_of_others({"world": 4, "parts_s": -1.0, "stall_s": 1e6}, progress)
    with pytest.raises(StorageError, match=r"rank 3 has written nothing .* 7 s, after what it noted last"):
        monkeypatch.setattr(store_place, "StallWatch", lambda stall_s: SimpleNamespace(is_stalled=bool))
        remote.put(f"saving/{NAME}/{progress_path(rundir.path, 3).name}", b"5")
        place._parts_of_others({"world": 4, "parts_s": 1e6, "stall_s": 7.0}, progress)


def test_what_is_staged_is_sent_in_chunks_as_soon_as_each_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[object] = []
    monkeypatch.setattr(store_place, "_CHUNK_BYTES", 4)
    monkeypatch.setattr(store_place, "wait_until_filled", lambda buffer, bytes: log.append(("wait", bytes)))
    throttle = SimpleNamespace(rest=lambda: log.append("rest"))
    monkeypatch.setattr(store_place, "CpuThrottle", lambda is_urgent: throttle)
    buffer: Any = SimpleNamespace(view=memoryview(b"--0123456789--"), is_urgent=False)
    progress: Any = SimpleNamespace(add=lambda count: log.append(count))
    pieces = [bytes(piece) for piece in store_place._staged(buffer, 2, 10, progress)]
    assert pieces == [b"0123", b"4567", b"89"]
    assert log == [("wait", 6), 4, "rest", ("wait", 10), 4, "rest", ("wait", 12), 2]


def test_a_save_at_once_to_a_store_begins_anew_and_is_cleared_unless_it_is_committed(
    rundir: RunDirectory, remote: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, partial = ObjectStoreBackend(remote.url), rundir.checkpoints / f"{NAME}.partial"
    assert backend.store == remote.url
    for key in (f"checkpoints/{NAME}/old", f"saving/{NAME}/part", "checkpoints/other/kept"):
        remote.put(key, b"")
    backend.begin(partial, bytes=5)
    assert keys(remote) == ["checkpoints/other/kept"] and partial.is_dir()
    part = backend.write(
        partial, [whole("model.a", torch.ones(3))], rank=2, world=5, wrote=lambda count: None
    )
    (file,) = part.files
    assert file.name == "model-r00002-of-00005-000.safetensors" and part.boxes[0].name == "model.a"
    assert backend.read_back(partial, part.files, is_first=True) == ""
    backend.clear(partial)
    assert keys(remote) == ["checkpoints/other/kept"] and not partial.exists()

    def away(*_: object) -> None:
        raise OSError(5, "no answer")

    monkeypatch.setattr(Objects, "exists", away)
    with pytest.raises(StorageError, match="Saving a checkpoint"):
        backend.begin(partial, bytes=5)


def test_a_save_at_once_to_a_store_makes_the_checkpoint_with_all_that_it_was_given(
    rundir: RunDirectory, remote: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bloomery.checkpoint.save.direct.now", lambda: 6.0)
    backend, partial = ObjectStoreBackend(remote.url), rundir.checkpoints / f"{NAME}.partial"
    snapshot = StateSnapshot(
        step=3,
        incarnation=1,
        state=CollectedState(entries=(), values={}),
        values={"train": {"position": 9}},
        about={"told": 1},
        run_length_steps=None,
    )
    backend.begin(partial, bytes=0)
    backend.commit(partial, [EMPTY, EMPTY], snapshot)
    manifest = read_manifest(rundir.checkpoints / NAME)
    assert (manifest.step, manifest.incarnation, manifest.time, manifest.world) == (3, 1, 6.0, 2)
    assert (manifest.values, manifest.about) == ({"train": {"position": 9}}, {"told": 1})


def test_a_run_is_kept_where_its_settings_say(rundir: RunDirectory, tmp_path: Path) -> None:
    here = run_storage(rundir, CheckpointSection(), run_name="mine")
    assert isinstance(here, LocalRunStorage) and here.url == ""
    section = CheckpointSection(url=f"file://{tmp_path}/store/")
    there = run_storage(rundir, section, run_name="mine")
    assert isinstance(there, ObjectRunStorage) and there.url == f"file://{tmp_path}/store/mine"
    assert store_url(CheckpointSection(), run_name="mine") == ""
    source = there.source(NAME)
    assert isinstance(source, RemoteCheckpoint) and source.place("f") == f"{there.url}/checkpoints/{NAME}/f"
    local = here.source(NAME)
    assert isinstance(local, LocalCheckpoint) and local.path == rundir.checkpoints / NAME


def test_a_run_in_its_directory_sweeps_begins_and_removes_there(
    rundir: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    storage = LocalRunStorage(rundir)
    (rundir.checkpoints / f"{NAME}.partial").mkdir()
    storage.refresh()
    assert caplog.messages == [f"removed an unfinished checkpoint: {NAME}.partial"]
    assert storage.begin(base=None, reason="start") == 1
    saved = save_checkpoint(rundir.checkpoints, [whole("model.a", torch.ones(3))], step=3, incarnation=1)
    assert storage.begin(base=(3, 1), reason="rewind") == 2
    assert read_incarnations(rundir) == {1: None, 2: (3, 1)}
    assert storage.mark([NAME]) == [NAME]
    storage.saved()
    storage.remove(saved)
    assert not saved.exists()
    again = save_checkpoint(rundir.checkpoints, [whole("model.a", torch.ones(3))], step=4, incarnation=2)
    remove_kept(again)
    assert list(rundir.checkpoints.iterdir()) == []


def test_a_run_in_a_store_learns_removes_marks_and_sends_what_belongs_there(
    rundir: RunDirectory, remote: Objects, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    storage = ObjectRunStorage(rundir, remote.url)
    (rundir.checkpoints / f"{NAME}.partial").mkdir()
    writer(rundir, remote).commit_parts([EMPTY], **USUAL)
    other = RunDirectory(rundir.path.parent / "other").create()
    begin(other, base=None, reason="start")
    remote.put("incarnations/000001.json", other.incarnation(1).read_bytes())
    for key in (
        "checkpoints/step-000009.i001/manifest.json.bak",
        "checkpoints/step-000007.i001/f",
        "saving/x/note",
    ):
        remote.put(key, b"")
    (rundir.checkpoints / f"{NAME}.partial").mkdir()
    gone = rundir.checkpoints / "step-000001.i001"
    enter_stored(gone.with_name(f"{gone.name}.partial"), b"{}", url=f"{remote.url}/checkpoints/{gone.name}")
    own = save_checkpoint(rundir.checkpoints, [whole("model.a", torch.ones(3))], step=8, incarnation=1)
    caplog.clear()
    storage.refresh()
    assert caplog.messages == [
        f"removed an unfinished checkpoint: {remote.url}/checkpoints/{name}"
        for name in ("step-000007.i001", "step-000009.i001")
    ]
    assert [key for key in keys(remote) if not key.startswith("incarnations")] == [
        f"checkpoints/{NAME}/{INDEX}",
        f"checkpoints/{NAME}/{MANIFEST}",
    ]
    assert sorted(path.name for path in rundir.checkpoints.iterdir()) == [NAME, own.name]
    assert read_incarnations(rundir) == {1: None} and storage.begin(base=(3, 1), reason="restart") == 2
    assert remote.exists("incarnations/000002.json")
    (rundir.checkpoints / NAME / SUSPECT).write_bytes(b"mark")
    assert storage.mark([NAME]) == [NAME]
    assert remote.content(f"checkpoints/{NAME}/{SUSPECT}") == b"mark"
    rundir.recipe.write_text("# recipe\n")
    storage.saved()
    assert remote.content("recipe.toml") == b"# recipe\n"

    def away(*_: object, **__: object) -> None:
        raise OSError(5, "no answer")

    with monkeypatch.context() as cut:
        cut.setattr(places, "upload_run_files", away)
        storage.saved()
    assert "the run's recipe is not beside its checkpoints: [Errno 5] no answer" in caplog.text
    storage.remove(rundir.checkpoints / NAME)
    assert [key for key in keys(remote) if key.startswith("checkpoints")] == []
    assert not (rundir.checkpoints / NAME).exists()
    monkeypatch.setattr(Objects, "entries", away)
    monkeypatch.setattr(Objects, "create", away)
    monkeypatch.setattr(Objects, "put", away)
    (rundir.checkpoints / NAME).mkdir()
    (rundir.checkpoints / NAME / SUSPECT).write_bytes(b"mark")
    for act, doing in (
        (storage.refresh, "Looking for checkpoints"),
        (lambda: storage.begin(base=None, reason="start"), "Beginning an incarnation"),
        (lambda: storage.mark([NAME]), "Marking a checkpoint"),
    ):
        with pytest.raises(StorageError, match=doing):
            act()


def test_an_entry_that_no_longer_says_where_its_checkpoint_is_is_made_anew_at_a_start(
    rundir: RunDirectory, remote: Objects
) -> None:
    begin(rundir, base=None, reason="start")
    remote.put("incarnations/000001.json", rundir.incarnation(1).read_bytes())
    writer(rundir, remote).commit_parts([EMPTY], **USUAL)
    place = rundir.checkpoints / NAME / STORED_AT
    place.write_text("{")
    ObjectRunStorage(rundir, remote.url).refresh()
    assert json.loads(place.read_text()) == {"url": f"{remote.url}/checkpoints/{NAME}"}


def test_half_of_a_commit_is_taken_back_and_a_whole_one_is_brought_to_its_end(tmp_path: Path) -> None:
    partial = tmp_path / f"{NAME}.partial"
    partial.mkdir()
    for name in (INDEX, MANIFEST, "data"):
        (partial / name).touch()
    place = DirectoryPartWriter(partial)
    order = {"rank": 0, "world": 3}
    assert place.written_before(order) is None and [path.name for path in partial.iterdir()] == ["data"]
    assert place.written_before({"rank": 1}) is None
    saved = save_checkpoint(tmp_path / "saved", [whole("model.a", torch.ones(3))], step=3, incarnation=1)
    partial.joinpath("data").unlink()
    for path in saved.iterdir():
        path.rename(partial / path.name)
    for rank in (1, 2):
        (partial / f"part-r{rank:05d}.json").touch()
    assert part_place._is_whole(partial) and not part_place._is_whole(saved)
    assert place.written_before({"rank": 3}) == EMPTY, "its record went, for the manifest is there"
    assert place.written_before(order) == EMPTY and not partial.exists()
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / NAME).iterdir()) == [
        INDEX,
        MANIFEST,
        "model",
    ]
    assert place.written_before({"rank": 1}) == EMPTY


def test_the_first_rank_waits_for_each_other_rank_in_turn_and_shows_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    progress = PartProgress(lambda count: None)
    order = {
        **{"world": 4, "parts_s": 60.0, "stall_s": 7.0, "time": 5.0, "values": {"train": {}}},
        **{"checkpoint": {"step": 3, "incarnation": 1, "about": {"told": 1}}},
    }

    def wait(partial: Path, rank: int, **how: Any) -> Part:
        asked.append((partial, rank, how.pop("until"), how))
        progress.add(100)
        return Part(files=(), boxes=())

    monkeypatch.setattr(part_place, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    monkeypatch.setattr(part_place, "wait_for_part_record", wait)
    monkeypatch.setattr(part_place, "commit", lambda *given, **how: asked.append((given, how)))
    DirectoryPartWriter(tmp_path).commit(EMPTY, order, progress)
    how = {"stall_s": 7.0, "progressed": progress.add}
    assert asked[:3] == [(tmp_path, rank, 1060.0, how) for rank in (1, 2, 3)] and progress.count == 303
    records = [tmp_path / f"part-r0000{rank}.json" for rank in (1, 2, 3)]
    about = {"step": 3, "incarnation": 1, "about": {"told": 1}}
    assert asked[3] == (
        (tmp_path, [EMPTY] * 4),
        {"time": 5.0, "values": {"train": {}}, "records": records, **about},
    )


def test_the_manifest_goes_before_all_else_and_what_has_none_goes_too(
    rundir: RunDirectory, remote: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[list[str]] = []
    delete, delete_all = Objects.delete, Objects.delete_all

    def one(store: Objects, key: str) -> None:
        removed.append([key])
        delete(store, key)

    def several(store: Objects, keys: Any) -> None:
        removed.append(sorted(keys))
        delete_all(store, removed[-1])

    monkeypatch.setattr(Objects, "delete", one)
    monkeypatch.setattr(Objects, "delete_all", several)
    for files, expected in (
        ((MANIFEST, INDEX, "f"), [[MANIFEST], ["f", INDEX]]),
        (("f",), [["f"]]),
    ):
        removed.clear()
        for file in files:
            remote.put(f"checkpoints/{NAME}/{file}", b"{}")
        draft = rundir.checkpoints / f"{NAME}.partial"
        entry = enter_stored(draft, b"{}", url=f"{remote.url}/checkpoints/{NAME}")
        places.remove_stored(entry)
        assert [keys for keys in removed if keys][: len(expected)] == expected
        assert keys(remote) == [] and not entry.exists()
