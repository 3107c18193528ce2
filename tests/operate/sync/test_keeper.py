"""The keeper that runs a sync beside a launcher, and starts it again."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from bloomery.config.submit import SyncSection
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.sync import keeper
from bloomery.operate.sync.keeper import SyncKeeper, restart_pause_s


def test_a_keeper_runs_the_command_of_its_section_and_ends_it(
    bare: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = SyncKeeper(bare, SyncSection(place="hf:a/b"), wait_s=lambda: 1.0, say=print)
    words = ["-m", "bloomery", "sync", str(bare.path), "hf:a/b", "--every", "60.0", "--beside"]
    assert plain._command[1:] == words
    section = SyncSection(place="hf:a/b", every_minutes=2.5, checkpoints=True)
    full = SyncKeeper(bare, section, wait_s=lambda: 0.0, say=print)
    assert full._command[1:] == [*words[:6], "2.5", "--beside", "--checkpoints"]
    full._command = ["sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"]
    monkeypatch.setattr(keeper, "_TICK_S", 0.01)
    with full:
        pass
    assert full._process.poll() == -9, "what ignores the signal does not outlive the launcher"


def test_the_pause_before_a_sync_is_started_again_doubles_up_to_ten_minutes() -> None:
    pauses = [restart_pause_s(in_a_row) for in_a_row in (0, 1, 2, 5, 6, 7, 10**6)]
    assert pauses == [10.0, 20.0, 40.0, 320.0, 600.0, 600.0, 600.0]


def test_a_sync_that_dies_beside_a_launcher_is_started_again_and_that_is_told_once(
    bare: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sync writes a byte into a pipe; the first two end, and the third waits for what never comes."""
    monkeypatch.setattr(keeper, "_FIRST_PAUSE_S", 0.0)
    said: list[str] = []
    kept = SyncKeeper(bare, SyncSection(place="hf:a/b"), wait_s=lambda: 0.0, say=said.append)
    count, lives, never = (tmp_path / name for name in ("count", "lives", "never"))
    for pipe in (lives, never):
        os.mkfifo(pipe)
    script = f"echo >> {count}; echo > {lives}; [ $(wc -l < {count}) = 3 ] || exit 7; cat {never}"
    kept._command = ["sh", "-c", script]
    with lives.open("r+b", buffering=0) as pipe_of_lives, kept:
        assert [pipe_of_lives.read(1) for _ in range(3)] == [b"\n"] * 3
    assert kept._process.poll() in (-9, -15) and count.read_bytes() == b"\n" * 3
    assert len(said) == 1 and said[0].startswith("the sync of logs ended with status 7: it is started again")


def test_a_sync_that_is_dead_at_the_end_is_started_once_more_for_the_last_lines(
    bare: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_TICK_S", 0.01)
    told = threading.Event()
    kept = SyncKeeper(bare, SyncSection(place="hf:a/b"), wait_s=lambda: 60.0, say=lambda line: told.set())
    kept._command = ["sh", "-c", f"echo >> {tmp_path / 'count'}; exit 7"]
    with kept:
        assert told.wait(60.0)
    assert kept._process.poll() == 7 and (tmp_path / "count").read_bytes() == b"\n\n"
