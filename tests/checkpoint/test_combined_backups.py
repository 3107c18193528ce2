"""Backups to several places, used like one: all are woken, asked and awaited."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.checkpoint.format.catalogue import CommittedCheckpoint, record_copy
from bloomery.checkpoint.format.source import RemoteCheckpoint
from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.remote.backup_duty import Duty, write_duty
from bloomery.checkpoint.remote.places import CombinedBackups, _name_in, sections, waiting_for_copies
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.config.checkpoint import BackupSection
from bloomery.config.environment import OfflineRefused
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects


class Place:
    """A stand-in for the backup to one place: it notes what it was asked."""

    def __init__(self, *names: str, items: Collection[int] = (), failure: Exception | None = None) -> None:
        self.copies = [RemoteCheckpoint(Objects("file:///tmp"), name) for name in names]
        self.items = [
            CommittedCheckpoint(step=step, incarnation=1, directory=Path(str(step))) for step in items
        ]
        self.failure, self.asked, self.marked = failure, list[object](), set[str]()
        self.on_all_copied: Callable[[], None] = lambda: None

    def wake(self) -> None:
        self.asked.append("wake")

    def due(self) -> list[CommittedCheckpoint]:
        return self.items

    def in_use(self) -> list[CommittedCheckpoint]:
        return self.items[:1]

    def close(self, *, wait_s: float | None) -> None:
        self.asked.append(wait_s)

    def newer(self) -> list[RemoteCheckpoint]:
        return self.copies

    def restorable(self, **how: object) -> list[RemoteCheckpoint]:
        self.asked.append(how)
        if self.failure is not None:
            raise self.failure
        return self.copies

    def part_of_run(self, copies: Any) -> list[RemoteCheckpoint]:
        return list(copies)


def both(*places: Place) -> CombinedBackups:
    return CombinedBackups(places)  # type: ignore[arg-type]


def test_all_places_are_woken_asked_and_awaited_and_the_first_ones_copy_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = Place("step-000009.i003", "step-000010.i001", items=(30, 10))
    second = Place("step-000010.i001", "step-000010.i002", items=(20, 30))
    combined = both(first, second)
    told: list[int] = []
    combined.on_all_copied = lambda: told.append(1)
    for place in (first, second):
        place.on_all_copied()
    combined.on_all_copied()
    assert len(told) == 3
    assert [item.step for item in combined.due()] == [10, 20, 30]
    assert [item.step for item in combined.in_use()] == [20, 30]
    found = combined.restorable(instead_of=["a"], up_to_step=7)
    assert [copy.name for copy in found] == ["step-000010.i002", "step-000010.i001", "step-000009.i003"]
    assert found[1] is first.copies[1] and [copy.name for copy in combined.newer()] == [c.name for c in found]
    combined.wake()
    combined.close(wait_s=2.5)
    asked = [{"instead_of": ["a"], "up_to_step": 7, "warns": False}, "wake", 2.5]
    assert first.asked == second.asked == asked
    assert "no checkpoint here can be gone on from" in caplog.text


def test_a_place_that_fails_is_passed_over_only_where_another_has_something(
    caplog: pytest.LogCaptureFixture,
) -> None:
    down, weights = (
        Place(failure=StorageError("down", remedy="")),
        Place(failure=CheckpointError("half", remedy="")),
    )
    with pytest.raises(StorageError, match="down"):
        both(down, weights).restorable()
    with pytest.raises(CheckpointError, match="half"):
        both(Place(), weights, down).restorable()
    assert "passed over" not in caplog.text
    caplog.set_level(logging.WARNING)
    assert len(both(down, Place("step-000010.i001"), weights).restorable()) == 1
    assert caplog.text.count("was passed over") == 2
    assert both(Place(), Place()).restorable() == []


def test_a_bucket_that_no_network_may_be_used_for_is_passed_over_where_a_disk_has_something(
    rundir: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOOMERY_OFFLINE", "1")
    bucket = Backup(rundir, BackupSection(url="s3://bucket/x"), run_name="run")
    with pytest.raises(OfflineRefused):
        CombinedBackups([bucket, Place()]).restorable()  # type: ignore[list-item]
    found = CombinedBackups([bucket, Place("step-000010.i001")]).restorable()  # type: ignore[list-item]
    assert [copy.name for copy in found] == ["step-000010.i001"]


def test_what_one_place_marks_as_suspect_is_taken_from_no_other(rundir: RunDirectory, tmp_path: Path) -> None:
    places = [Objects(f"file://{tmp_path}/{name}/run") for name in ("near", "far")]
    for remote in places:
        for name in ("step-000010.i001", "step-000020.i001"):
            remote.put(f"checkpoints/{name}/manifest.json", b"{}")
    combined = CombinedBackups(
        [
            Backup(rundir, BackupSection(url=f"file://{tmp_path}/{name}"), run_name="run")
            for name in ("near", "far")
        ]
    )
    places[1].put("checkpoints/step-000020.i001/suspect.json", b'{"why": "rank 3 erred"}')
    assert [copy.name for copy in combined.restorable()] == ["step-000010.i001"]
    places[0].put("checkpoints/step-000010.i001/suspect.json", b'{"why": "rank 3 erred"}')
    with pytest.raises(
        CheckpointError, match=r"every checkpoint is suspect .*step-000010\.i001, step-000020"
    ):
        combined.restorable()
    assert combined.restorable(up_to_step=30) == []


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("checkpoints/step-000010.i001/manifest.json", "step-000010.i001"),
        ("checkpoints/step-000010.i001/deep/file", "step-000010.i001"),
        ("checkpoints/step-000010.i001/", ""),
        ("checkpoints/step-000010.i001", ""),
        ("checkpoints/export/model.safetensors", ""),
        ("checkpoints/", ""),
    ],
)
def test_only_what_lies_in_a_checkpoint_is_of_one(key: str, name: str) -> None:
    assert _name_in(key) == name


def test_pruning_leaves_what_is_due_to_a_place_that_it_waits_for(rundir: RunDirectory) -> None:
    begin(rundir, base=None, reason="start")
    for step in (10, 20):
        save_checkpoint(rundir.checkpoints, [], step=step, incarnation=1)
    first, second = "step-000010.i001", "step-000020.i001"
    near, far = BackupSection(url="s3://near"), BackupSection(url="s3://far")

    def waiting(backup: BackupSection, further: BackupSection) -> set[str]:
        recipe: Any = SimpleNamespace(backup=backup, second_backup=further, run=SimpleNamespace(name="mine"))
        named = {"": backup, "second": further}
        assert sections(recipe) == {place: one for place, one in named.items() if one.url}
        return waiting_for_copies(rundir, recipe)

    nowhere, unheeded = BackupSection(), BackupSection(url="s3://near", prune_waits=False)
    assert waiting(nowhere, nowhere) == set() == waiting(unheeded, nowhere)
    assert waiting(near, nowhere) == {first, second} == waiting(nowhere, far)
    record_copy(rundir, first, url=f"s3://near/mine/checkpoints/{first}", what="all", bytes=1)
    assert waiting(near, nowhere) == {second} and waiting(near, far) == {first, second}
    write_duty(rundir, Duty(peer="north", writes=False, covered=-1))
    assert waiting(unheeded, far) == set(), "another peer copies to a further place"
