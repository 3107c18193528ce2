"""An upload, step by step: what is asked of the store, in which order, and what is left of it."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.checkpoint.format.manifest import INDEX, MANIFEST, DamagedCheckpoint, FileRecord, read_manifest
from bloomery.checkpoint.format.source import LocalCheckpoint
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.format.suspects import SUSPECT
from bloomery.checkpoint.remote import shared_upload
from bloomery.checkpoint.remote.shared_upload import (
    BackupHelper,
    FileSender,
    UploadCoordinator,
    notes_of,
    read_notes,
    read_request,
)
from bloomery.checkpoint.remote.transfer import UploadInterrupted, download_checkpoint, upload_checkpoint
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects, StoreUnreachable


@pytest.fixture
def saved(rundir: RunDirectory) -> Path:
    entries = [whole(f"{part}.a", torch.full((50,), 2.0)) for part in ("model", "optim", "train")]
    return save_checkpoint(rundir.checkpoints, entries, step=3, incarnation=1)


@pytest.fixture
def remote(tmp_path: Path) -> Objects:
    return Objects(f"file://{tmp_path}/store")


class Asked:
    """What is asked of a store, as (what, key)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, str]] = []
        for name in ("put", "send", "delete", "digest"):
            monkeypatch.setattr(Objects, name, self._watched(name, getattr(Objects, name)))

    def _watched(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def watched(store: Objects, key: str, *given: object, **named: object) -> Any:
            self.log.append((name, key.rpartition("/")[2]))
            return act(store, key, *given, **named)

        return watched


def test_a_suspect_is_marked_before_its_manifest_which_is_written_last(
    saved: Path, remote: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (saved / SUSPECT).write_text('{"why": "rank 3 erred"}')
    asked = Asked(monkeypatch)
    names = [file.name for file in read_manifest(saved).files]
    upload_checkpoint(saved, remote, notes=tmp_path / "notes")
    writes = [(what, name) for what, name in asked.log if what != "digest"]
    assert writes == [
        *(("send", name) for name in names),
        *(("put", name) for name in (SUSPECT, INDEX, MANIFEST)),
    ]
    assert not list(tmp_path.glob("notes*"))
    asked.log.clear()
    again = upload_checkpoint(saved, remote, notes=tmp_path / "notes")
    assert again.bytes_sent == 0 and {what for what, _ in asked.log} == {"digest", "put"}
    assert [name for what, name in asked.log if what == "put"] == [SUSPECT]
    asked.log.clear()
    remote.put(f"checkpoints/{saved.name}/{MANIFEST}", b"another content")
    asked.log.clear()
    sent = upload_checkpoint(saved, remote, notes=tmp_path / "notes").bytes_sent
    assert ("delete", MANIFEST) in asked.log and sent == (saved / MANIFEST).stat().st_size
    assert asked.log.index(("delete", MANIFEST)) < asked.log.index(("put", MANIFEST))
    assert asked.log.index(("delete", MANIFEST)) < asked.log.index(("digest", names[0]))


def test_an_upload_that_is_told_to_stop_sends_no_further_file_and_keeps_its_notes(
    saved: Path, remote: Objects, tmp_path: Path
) -> None:
    answers, told = iter([True, False, False]), list[int]()
    with pytest.raises(UploadInterrupted, match=saved.name):
        upload_checkpoint(
            saved,
            remote,
            notes=tmp_path / "notes",
            go_on=lambda: next(answers),
            progress=lambda done, total: told.append(done),
        )
    first = read_manifest(saved).files[0]
    assert [entry.key.rpartition("/")[2] for entry in remote.entries()] == [first.name]
    assert list(read_notes(tmp_path / "notes", remote.url)) == [first.name] and told == [first.bytes]


def test_the_first_rank_withdraws_its_request_however_the_upload_ends(
    saved: Path, remote: Objects, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, others = notes_of(rundir, saved.name), UploadCoordinator(rundir, world=2, poll_s=0.0, stall_s=-1)
    seen: list[object] = []

    def refused(sender: FileSender, record: FileRecord) -> int:
        seen.append(read_request(rundir))
        raise OSError(5, "no answer")

    with monkeypatch.context() as away:
        away.setattr(FileSender, "send", refused)
        with pytest.raises(StorageError, match=f"The backup of {saved.name} failed"):
            upload_checkpoint(saved, remote, notes=notes, others=others)
    assert seen[0] is not None and read_request(rundir) is None
    answers = iter([True, True, False])
    with pytest.raises(UploadInterrupted):
        upload_checkpoint(saved, remote, notes=notes, others=others, go_on=lambda: next(answers, False))
    assert not remote.exists(f"checkpoints/{saved.name}/{MANIFEST}") and read_request(rundir) is None
    done = upload_checkpoint(saved, remote, notes=notes, others=others)
    second = read_manifest(saved).files[1]
    texts = sum((saved / name).stat().st_size for name in (INDEX, MANIFEST))
    assert done.bytes_sent == second.bytes + texts, "the first and the last were sent and noted before"


@pytest.mark.parametrize("world", [1, 2])
def test_as_many_files_are_sent_at_a_time_as_was_asked_for(
    saved: Path, remote: Objects, rundir: RunDirectory, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, send, sent = threading.Barrier(2), FileSender.send, list[str]()

    def sending(sender: FileSender, record: FileRecord) -> int:
        sent.append(record.name)
        if len(sent) <= 2:
            together.wait(10.0)
        return send(sender, record)

    monkeypatch.setattr(FileSender, "send", sending)
    others = UploadCoordinator(rundir, world=world, poll_s=0.0, stall_s=-1.0)
    upload_checkpoint(saved, remote, notes=notes_of(rundir, saved.name), others=others, workers=2)
    assert len(sent) == 3


def test_what_a_killed_upload_of_a_checkpoint_left_on_a_disk_goes_with_the_next(
    saved: Path, remote: Objects, tmp_path: Path
) -> None:
    cut = Path(remote.url.removeprefix("file://")) / "checkpoints" / saved.name / "model-r0.safetensors#1"
    cut.parent.mkdir(parents=True)
    cut.touch()
    os.utime(cut, (0, 0))
    upload_checkpoint(saved, remote, notes=tmp_path / "notes")
    assert not cut.exists() and remote.exists(f"checkpoints/{saved.name}/{MANIFEST}")


def test_a_rank_that_is_alone_asks_nobody(
    saved: Path, remote: Objects, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = UploadCoordinator(rundir, world=1)
    monkeypatch.setattr(alone, "ask", lambda *_, **__: pytest.fail("there is nobody"))
    done = upload_checkpoint(saved, remote, notes=notes_of(rundir, saved.name), others=alone)
    assert done.bytes_sent == done.bytes and done.url == f"{remote.url}/checkpoints/{saved.name}"


def test_what_a_note_vouches_for_is_not_read_back_and_what_differs_is_sent_anew(
    saved: Path, remote: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, notes = read_manifest(saved).files[0], tmp_path / "deep" / "notes"
    key = f"checkpoints/{saved.name}/{record.name}"
    FileSender(saved, remote, notes=notes, noted={}).send(record)
    mark = remote.stat(key).mark
    line = {"url": remote.url, "file": record.name, "mark": mark}
    assert notes.read_text() == json.dumps(line) + "\n"
    asked = Asked(monkeypatch)
    assert FileSender(saved, remote, notes=notes, noted={record.name: mark}).send(record) == 0
    assert asked.log == [] and len(notes.read_text().splitlines()) == 1
    assert FileSender(saved, remote, notes=notes, noted={record.name: "older"}).send(record) == 0
    assert asked.log == [("digest", record.name)] and len(notes.read_text().splitlines()) == 2
    remote.put(key, bytes(record.bytes))
    asked.log.clear()
    assert FileSender(saved, remote, notes=notes, noted={record.name: mark}).send(record) == record.bytes
    assert [what for what, _ in asked.log][:2] == ["digest", "send"]
    remote.put(key, b"half")
    asked.log.clear()
    sender = FileSender(saved, remote, notes=notes, noted={})
    assert sender.send(record) == record.bytes and asked.log[0] == ("send", record.name)
    assert sender.stat("none") is None and sender.sizes() == {record.name: record.bytes}
    (saved / record.name).write_bytes(bytes(record.bytes))
    remote.put(key, b"half")
    with pytest.raises(DamagedCheckpoint, match=f"{saved / record.name} is not what was saved"):
        sender.send(record)


def test_notes_of_all_ranks_count_and_the_later_one_of_a_file(rundir: RunDirectory) -> None:
    rundir.backups.mkdir(exist_ok=True)
    notes = notes_of(rundir, "step-000001.i001")
    lines = [{"url": url, "file": file, "mark": mark} for url, file, mark in (
        ("s3://b", "one", "1"), ("s3://c", "one", "2"), ("s3://b", "one", "3"))]  # fmt: skip
    notes.write_text("\n".join(map(json.dumps, lines)) + '\n{"url": "s3://b", "file": "tw')
    further = {"url": "s3://b", "file": "two", "mark": "4"}
    notes_of(rundir, "step-000001.i001", rank=2).write_text('{"url": "s3:\n' + json.dumps(further) + "\n")
    assert read_notes(notes, "s3://b") == {"one": "3", "two": "4"}
    assert read_notes(notes, "s3://c") == {"one": "2"}
    before = notes.read_text()
    files = [FileRecord(name="other", bytes=7, xxh3_128="", blocks="")]
    shared_upload.forget_removed(notes, "s3://b", files=files, sizes={})
    assert notes.read_text() == before, "nothing is written where nothing was noted of what is gone"


def test_a_rank_that_sends_nothing_is_named_with_what_is_left_to_the_first(
    rundir: RunDirectory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir.backups.mkdir(exist_ok=True)
    files = [FileRecord(name=name, bytes=7, xxh3_128="", blocks="") for name in "abcdefg"]
    notes = notes_of(rundir, "step", rank=1)
    noted = {"url": "s3://b", "file": "b", "mark": "1"}
    notes.write_text(json.dumps(noted) + "\n")
    stalled = {1: iter([False, True]), 2: iter([False, False, False])}
    made = iter((1, 2))
    watched: list[tuple[int, int]] = []

    class Watch:
        def __init__(self, stall_s: float) -> None:
            self.rank = next(made)
            assert stall_s == 600.0

        def is_stalled(self, number: int) -> bool:
            watched.append((self.rank, number))
            return next(stalled[self.rank])

    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            lines = [json.dumps({**noted, "file": name}) + "\n" for name in ("c", "f")]
            notes_of(rundir, "step", rank=2).write_text("".join(lines))

    monkeypatch.setattr(shared_upload, "StallWatch", Watch)
    monkeypatch.setattr(shared_upload, "time", SimpleNamespace(sleep=pause))
    waiting = UploadCoordinator(rundir, world=3)
    left = list(waiting.unsent("step", url="s3://b", files=files, go_on=lambda: True))
    assert [file.name for file in left] == ["e"] and pauses == [2.0] * 3
    assert watched == [(1, 1), (2, 0), (1, 1), (2, 0), (2, 0)]
    assert [record.message for record in caplog.records] == [
        "rank 1 has sent no file of the backup of step for 600 s: rank 0 sends the 1 left"
    ]


class Helper(BackupHelper):
    """The other ranks' side without its thread."""

    def __init__(self, rundir: RunDirectory, looks: Iterator[bool]) -> None:
        self._place, self._rundir, self._rank, self._world, self._poll_s = "", rundir, 2, 3, 7.0
        self.waits: list[float] = []

        def wait(seconds: float) -> bool:
            self.waits.append(seconds)
            return next(looks)

        self._stop: Any = SimpleNamespace(wait=wait, is_set=lambda: False)


def test_a_rank_serves_each_request_once_and_tells_each_failure_once(
    saved: Path, remote: Objects, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    rundir.backups.mkdir(exist_ok=True)
    files = read_manifest(saved).files
    asking = UploadCoordinator(rundir, world=3)
    asking.ask(saved.name, url=remote.url, files=files)
    failures = [OSError(5, "away")] * 2 + [OSError(5, "full"), KeyError("odd"), None, None]
    tried: list[str] = []

    def send(sender: FileSender, record: FileRecord) -> int:
        tried.append(record.name)
        failure = failures.pop(0)
        if failure is not None:
            raise failure
        return record.bytes

    monkeypatch.setattr(FileSender, "send", send)
    helper = Helper(rundir, iter([False] * 6 + [True]))
    helper._run()
    assert tried == [files[2].name] * 4, "then that request is over"
    assert helper.waits == [7.0, 14.0, 28.0, 56.0, 7.0, 7.0, 7.0], "a store that refuses is asked ever less"
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 3 and [text for text in told if "away" in text] == told[:1] and "full" in told[1]
    assert all(text.startswith("rank 2 could not send its share of a backup") for text in told)
    asking.ask(saved.name, url=remote.url, files=files)
    Helper(rundir, iter([False, False, True]))._run()
    assert len(tried) == 5
    asking.end()
    Helper(rundir, iter([False, True]))._run()
    assert len(tried) == 5
    asking.ask(saved.name, url=remote.url, files=files)
    failures[:] = [DamagedCheckpoint("a file here is not what was saved")]
    Helper(rundir, iter([False, False, True]))._run()
    assert len(tried) == 6, "what is damaged here is not sent again and again"


def test_a_failure_that_comes_again_after_a_success_is_told_again(
    saved: Path, remote: Objects, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    rundir.backups.mkdir(exist_ok=True)
    asking, failures = UploadCoordinator(rundir, world=3), [True, False, True]

    def send(sender: FileSender, record: FileRecord) -> int:
        if failures.pop(0):
            raise OSError(5, "away")
        return 0

    def looks() -> Iterator[bool]:
        for number in range(3):
            if number != 1:
                asking.ask(saved.name, url=remote.url, files=read_manifest(saved).files)
            yield False
        yield True

    monkeypatch.setattr(FileSender, "send", send)
    Helper(rundir, looks())._run()
    assert failures == [] and len(caplog.messages) == 2 and caplog.messages[0] == caplog.messages[1]


def test_a_rank_leaves_off_as_soon_as_another_request_is_made(
    saved: Path, remote: Objects, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir.backups.mkdir(exist_ok=True)
    record = read_manifest(saved).files[0]
    asking, tried, made = UploadCoordinator(rundir, world=3), list[str](), list[dict[str, Any]]()
    asking.ask(saved.name, url=remote.url, files=[record] * 9)
    init = FileSender.__init__

    def watched(sender: FileSender, directory: Path, remote: Objects, **named: Any) -> None:
        made.append({"directory": directory, "url": remote.url, **named})
        init(sender, directory, remote, **named)

    def send(sender: FileSender, file: FileRecord) -> int:
        tried.append(file.name)
        if len(tried) == 2:
            asking.ask(saved.name, url=remote.url, files=[])
        return 0

    noted = {"url": remote.url, "file": "sent", "mark": "1"}
    notes_of(rundir, saved.name, rank=1).write_text(json.dumps(noted) + "\n")
    monkeypatch.setattr(FileSender, "__init__", watched)
    monkeypatch.setattr(FileSender, "send", send)
    request = read_request(rundir)
    assert request is not None
    Helper(rundir, iter([]))._serve(request)
    assert len(tried) == 2
    own = {"notes": notes_of(rundir, saved.name, rank=2), "noted": {"sent": "1"}}
    assert made == [{"directory": saved, "url": remote.url, **own}]


def test_a_store_that_does_not_answer_is_no_damage_and_nothing_becomes_visible(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away(LocalCheckpoint):
        """A checkpoint whose files, or whose mark, cannot be reached."""

        def __init__(self, what: str) -> None:
            super().__init__(saved)
            self.what = what

        def open(self, file: str) -> Any:
            if self.what == "files":
                raise StoreUnreachable(5, "no answer")
            return super().open(file)

        def content(self, file: str, *, at_most: int) -> bytes:
            if file == self.what:
                raise StoreUnreachable(5, "no answer")
            return super().content(file, at_most=at_most)

    for what in ("files", SUSPECT):
        with pytest.raises(StorageError, match=f"Fetching {saved.name} failed"):
            download_checkpoint(Away(what), tmp_path / "here")
        assert [path.name for path in (tmp_path / "here").iterdir()] == [f"{saved.name}.partial"]
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Copying a checkpoint failed"):
        download_checkpoint(LocalCheckpoint(saved), tmp_path / "file")
    damaged = tmp_path / "here" / saved.name
    damaged.mkdir()
    (damaged / "left").touch()
    done: list[tuple[int, int]] = []
    fetched = download_checkpoint(
        LocalCheckpoint(saved), tmp_path / "here", progress=lambda *at: done.append(at)
    )
    assert not (fetched / "left").exists() and len(done) == 3
    assert [path.name for path in (tmp_path / "here").iterdir()] == [saved.name]
