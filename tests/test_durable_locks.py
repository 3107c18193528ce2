"""Locks of files: who holds one, who waits for it and how long, and files that were removed meanwhile."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from bloomery import durable


def test_a_lock_is_waited_for_as_long_as_was_asked(tmp_path: Path, monkeypatch):
    (tmp_path / "lock").touch()
    holder, waiter = (os.open(tmp_path / "lock", os.O_RDONLY) for _ in range(2))
    assert durable.try_lock(holder)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            durable.unlock(holder)

    monkeypatch.setattr(durable.time, "sleep", pause)
    assert durable.wait_for_lock(waiter, timeout_s=600, poll_s=0.25) and pauses == [0.25] * 3
    for file in (holder, waiter):
        os.close(file)


def test_a_lock_names_its_owner_and_ends_with_the_block(tmp_path: Path):
    path = tmp_path / "new" / "lock"
    with durable.locked(path, owner="process 1 on here"):
        with pytest.raises(durable.LockHeld) as refused, durable.locked(path, owner="process 2"):
            raise AssertionError("two hold it")
        assert refused.value.owner == "process 1 on here" and str(path) in str(refused.value)
    with durable.locked(path, owner="2"):
        assert path.read_text() == "2"


def test_who_waits_for_a_lock_is_told_once_and_gets_it_when_it_is_free(tmp_path: Path):
    path, waiting, got = tmp_path / "lock", threading.Event(), threading.Event()
    told: list[str] = []

    def say(owner: str) -> None:
        told.append(owner)
        waiting.set()

    def wait() -> None:
        with durable.locked(path, owner="second", timeout_s=60, on_wait=say):
            got.set()

    with durable.locked(path, owner="first"):
        thread = threading.Thread(target=wait)
        thread.start()
        assert waiting.wait(timeout=60) and not got.is_set()
    assert got.wait(timeout=60) and told == ["first"]
    thread.join(timeout=60)


def test_a_lock_that_its_owner_removed_with_its_directory_is_taken_anew(tmp_path: Path):
    path, waiting = tmp_path / "parts" / "lock", threading.Event()
    held: list[bool] = []

    def wait() -> None:
        with durable.locked(path, owner="second", timeout_s=60, on_wait=lambda owner: waiting.set()):
            held.append(path.read_text() == "second")

    thread = threading.Thread(target=wait)
    with durable.locked(path, owner="first"):
        thread.start()
        assert waiting.wait(timeout=60)
        path.unlink()
        path.parent.rmdir()
    thread.join(timeout=60)
    assert held == [True]


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_lock_that_is_removed_between_opening_and_locking_it_is_taken_anew(
    tmp_path: Path, monkeypatch, is_made_again: bool
):
    path, lock, removed = tmp_path / "parts" / "lock", durable.try_lock, list[Path]()

    def late(file: int) -> bool:
        if not removed:
            removed.append(path)
            path.unlink()
            path.parent.rmdir()
            if is_made_again:
                durable.write_whole_unsynced(path, "another process")
        return lock(file)

    monkeypatch.setattr(durable, "try_lock", late)
    with durable.locked(path, owner="me"):
        assert path.read_text() == "me"


def test_an_owner_is_told_once_however_long_it_is_waited_for(tmp_path: Path, monkeypatch):
    path, told, pauses = tmp_path / "lock", list[str](), list[float]()
    path.touch()
    holder = os.open(path, os.O_RDONLY)
    assert durable.try_lock(holder)
    with pytest.raises(durable.LockHeld, match="held by another process"), durable.locked(path, owner="me"):
        raise AssertionError("two hold it")
    path.write_text("process 7")
    with pytest.raises(durable.LockHeld, match="held by process 7"), durable.locked(path, owner="me"):
        raise AssertionError("two hold it")

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            os.close(holder)

    monkeypatch.setattr(durable.time, "sleep", pause)
    with durable.locked(path, owner="me", timeout_s=600, on_wait=told.append):
        assert told == ["process 7"] and len(pauses) == 3


def test_shared_locks_live_together_and_keep_an_exclusive_one_out(tmp_path: Path):
    path = tmp_path / "lock"
    path.touch()
    files = [os.open(path, os.O_RDONLY) for _ in range(3)]
    try:
        assert durable.try_lock(files[0], shared=True) and durable.try_lock(files[1], shared=True)
        assert not durable.try_lock(files[2])
        assert not durable.wait_for_lock(files[2], timeout_s=0)
        durable.unlock(files[1])
        assert durable.wait_for_lock(files[1], timeout_s=0, shared=True)
        for file in files[:2]:
            durable.unlock(file)
        assert durable.wait_for_lock(files[2], timeout_s=0)
    finally:
        for file in files:
            os.close(file)
