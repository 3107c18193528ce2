"""Snapshots for joining peers, and what each rank found when it read its files back: step by step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.test_save_and_load_steps import NAME, snapshot

from bloomery import durable
from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.checkpoint.load.loader import read_tensors
from bloomery.checkpoint.save import peer_snapshots
from bloomery.checkpoint.save.peer_snapshots import PeerSnapshots
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.errors import StorageError


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def open_directory(directory: Path) -> Iterator[int]:
    file = os.open(directory, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


def test_a_snapshot_lies_in_a_place_of_its_own_that_is_this_users_and_locked(tmp_path: Path) -> None:
    before, memory = open_files(), tmp_path / "memory"
    offers = PeerSnapshots(memory, tmp_path / "run", Ranks())
    assert not offers.directory.exists() and offers.directory.parent == memory
    assert offers.directory.name.startswith("bloomery-offered-")
    other = PeerSnapshots(memory, tmp_path / "other", Ranks())
    assert other.directory != offers.directory
    found = [offers.add(snapshot(float(number))) for number in (1, 2)]
    assert open_files() == before + 1, "the lock alone is open: no writer stays beside it"
    assert found == [offers.directory / "1" / NAME, offers.directory / "2" / NAME]
    assert [
        path.name for path in offers.directory.iterdir()
    ] and offers.directory.stat().st_mode & 0o777 == 0o700
    assert (offers.directory / "1").stat().st_mode & 0o777 == 0o700
    assert read_manifest(offers.directory / "2" / NAME).values == {"train": {"position": 9}}
    with open_directory(offers.directory) as file:
        assert not durable.try_lock(file)
    assert found[0] is not None and found[1] is not None
    offers.remove(found[0])
    offers.remove(found[0])
    assert [path.name for path in offers.directory.iterdir()] == ["2"]
    offers.close()
    offers.close()
    assert not offers.directory.exists() and open_files() == before
    third = offers.add(snapshot(3.0))
    assert third == offers.directory / "3" / NAME, "one that was closed may be used again"
    with open_directory(offers.directory) as file:
        assert not durable.try_lock(file), "and is locked again"
    shutil.rmtree(offers.directory)
    offers.close()


def test_one_run_has_one_place_by_whichever_path_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    names = {
        PeerSnapshots(tmp_path / "memory", tmp_path / path, Ranks()).directory
        for path in ("run", "link", "run/../run")
    }
    assert len(names) == 1


def test_what_was_left_since_a_run_began_goes_with_its_first_snapshot(tmp_path: Path) -> None:
    offers = PeerSnapshots(tmp_path, tmp_path / "run", Ranks())
    left = tmp_path / "bloomery-offered-0123456789abcdef"
    for directory in (offers.directory, left):
        (directory / "1" / NAME).mkdir(parents=True)
    os.utime(left, (0, 0))
    assert offers.add(snapshot(1.0)) == offers.directory / "1" / NAME
    assert read_manifest(offers.directory / "1" / NAME).step == 3 and not left.exists()
    offers.close()


def test_only_the_first_rank_makes_and_removes_directories(tmp_path: Path) -> None:
    left = PeerSnapshots(tmp_path, tmp_path / "run", Ranks()).directory
    (left / "1" / NAME).mkdir(parents=True)

    def gather(value: Any) -> list[Any]:
        return [{"result": None, "failure": None}, value]

    second = PeerSnapshots(tmp_path, tmp_path / "run", Ranks(rank=1, world=2, gather=gather))
    assert second.directory == left and left.exists(), "the first rank's are left alone"
    second.remove(left / "1" / NAME)
    assert (left / "1").exists()
    second._ensure_saver()
    second.close()
    assert (left / "1").exists()
    PeerSnapshots(tmp_path, tmp_path / "run", Ranks())
    assert not left.exists(), "what an earlier life left goes"


def test_a_place_that_cannot_be_taken_is_told_and_offers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    offers = PeerSnapshots(tmp_path / "file" / "memory", tmp_path / "run", Ranks())
    assert offers.add(snapshot(1.0, step=7)) is None
    assert "joining peers cannot fetch the state of step 7 here: Taking memory for newcomers" in caplog.text
    offers = PeerSnapshots(tmp_path / "memory", tmp_path / "run", Ranks())
    assert offers.add(snapshot(1.0)) is not None
    (offers.directory / "2").mkdir()
    caplog.clear()
    assert offers.add(snapshot(2.0)) is None and "Taking memory for newcomers" in caplog.text
    with pytest.raises(StorageError, match="Taking memory for newcomers"):
        peer_snapshots._move(tmp_path / "none", tmp_path / "place")
    offers.close()


def test_a_snapshot_that_could_not_be_moved_is_never_offered_as_the_next_one(tmp_path: Path) -> None:
    offers = PeerSnapshots(tmp_path, tmp_path / "run", Ranks())
    offers._ensure_saver()
    (offers.directory / "1").mkdir()
    assert offers.add(snapshot(1.0)) is None
    assert [path.name for path in offers.directory.iterdir()] == ["1"], "its memory is free again"
    found = offers.add(snapshot(2.0))
    assert found is not None and dict(read_tensors(found))["model.a"].tolist() == [2.0] * 5
    offers.close()
