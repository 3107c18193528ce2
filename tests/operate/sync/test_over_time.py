"""What a sync beside a launcher, and a tail of a run, do over a long time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery import durable
from bloomery.config.submit import SyncSection
from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import ObjectStat
from bloomery.operate.dashboard.growing_file import GrowingFile
from bloomery.operate.sync import keeper, published
from bloomery.operate.sync.keeper import SyncKeeper, SyncTurn
from bloomery.operate.sync.mirror import RunMirror
from bloomery.operate.sync.run_sync import RunSync
from bloomery.operate.sync.tail import RunTail


def test_a_sync_that_lived_for_more_than_the_longest_pause_is_started_again_after_the_shortest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, pauses, clock = list[str](), list[float](), [0.0]
    kept = SyncKeeper(
        RunDirectory(tmp_path), SyncSection(place="hf:a/b"), wait_s=lambda: 0.0, say=said.append
    )
    ends = iter([(1.0, 7), (1.0, 7), (601.0, -9), (600.0, 7), (0.0, 7)])

    def wait() -> int:
        lived_s, status = next(ends)
        clock[0] += lived_s
        return status

    process, refusals = SimpleNamespace(wait=wait), [OSError(11, "Resource temporarily unavailable")]

    def started() -> Any:
        if len(pauses) == 4 and refusals:
            raise refusals.pop()
        return process

    kept._process = process  # type: ignore[assignment]
    monkeypatch.setattr(kept, "_started", started)
    monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    kept._closing = SimpleNamespace(  # type: ignore[assignment]
        is_set=lambda: False, wait=lambda pause_s: pauses.append(pause_s) or len(pauses) == 5
    )
    kept._keep()
    assert pauses == [10.0, 20.0, 10.0, 20.0, 40.0]
    assert [line.partition(":")[0] for line in said] == [
        "the sync of logs ended with status 7", "the sync of logs ended by signal 9"
    ]  # fmt: skip


def test_a_tail_finds_the_journal_of_the_first_rank_once_it_is_there(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    tail = RunTail(run, every_steps=1)
    assert list(tail.new_lines()) == []
    step = {"event": "step", "time": 1e9, "step": 7, "loss": 2.0}
    run.journal(peer="oslo").write_text(json.dumps(step) + "\n")
    assert [line.partition(" step ")[2] for line in tail.new_lines()] == ["7 | loss 2.0000"]


def test_a_tail_tells_all_of_a_journal_that_is_longer_than_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lines = RunDirectory(tmp_path / "run").create(), GrowingFile.lines
    steps = [{"event": "step", "time": 1e9 + step, "step": step, "loss": 2.0} for step in range(1, 6)]
    run.journal().write_text("".join(json.dumps(step) + "\n" for step in steps))
    run.operations.write_text("")
    monkeypatch.setattr(GrowingFile, "lines", lambda file: lines(file, most_bytes=100))
    told = [line.partition(" step ")[2].split()[0] for line in RunTail(run, every_steps=1).new_lines()]
    assert told == ["1", "2", "3", "4", "5"]


def test_a_checkpoint_that_is_held_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, hold = list[int](), durable.hold_directory
    saved = tmp_path / "step-000005.i001"
    saved.mkdir()
    (saved / "part").write_text("weights")

    def noted(directory: Path) -> int | None:
        lock = hold(directory)
        held.extend([] if lock is None else [lock])
        return lock

    monkeypatch.setattr(durable, "hold_directory", noted)
    published._link(saved, tmp_path / "publishing" / saved.name)
    assert (tmp_path / "publishing" / saved.name / "part").stat().st_nlink == 2 and len(held) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held[0])
    monkeypatch.setattr(durable, "hold_directory", lambda directory: None)
    published._link(saved, tmp_path / "publishing" / "without-locks")
    assert (saved / "part").stat().st_nlink == 3


def test_a_dead_sync_that_cannot_be_started_once_more_ends_no_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = SyncKeeper(RunDirectory(tmp_path), SyncSection(place="hf:a/b"), wait_s=lambda: 60.0, say=print)
    done: list[str] = []
    process = SimpleNamespace(
        poll=lambda: 7, wait=lambda: 7, terminate=lambda: done.append("terminated"), pid=0
    )
    starts = iter([process])

    def started() -> Any:
        for one in starts:
            return one
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(kept, "_started", started)
    with kept:
        pass
    assert done == ["terminated"] and not kept._thread.is_alive()


@pytest.mark.parametrize("name", ["recipe.toml", "operations.jsonl"])
def test_what_cannot_be_read_is_told_and_what_is_gone_keeps_no_other_from_being_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run, held = RunDirectory(tmp_path / "run").create(), dict[str, bytes]()
    for path in (run.recipe, run.operations, run.path / "sources.toml"):
        path.write_text("a line\n")
    place: Any = SimpleNamespace(
        name="memory", most_bytes=1 << 20, entries=dict, publish=held.update, remove=lambda keys: None
    )
    failures: list[OSError] = [OSError(5, "Input/output error"), FileNotFoundError(2, "gone")]
    read, opened = Path.read_bytes, Path.open

    def refuse(path: Path) -> None:
        if path.name == name and failures:
            raise failures.pop(0)

    monkeypatch.setattr(Path, "read_bytes", lambda path: refuse(path) or read(path))
    monkeypatch.setattr(Path, "open", lambda path, mode="r": refuse(path) or opened(path, mode))
    sync = RunSync(run, place)
    with pytest.raises(StorageError, match="Reading what is to be sent"):
        sync.send_new()
    sync.send_new()
    assert set(held) == {"recipe.toml", "operations.jsonl", "sources.toml"} - {name}


def test_a_disk_that_refuses_what_is_fetched_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place: Any = SimpleNamespace(
        name="memory",
        entries=lambda: {"recipe.toml": ObjectStat(bytes=6, mark="m")},
        content=lambda key, *, begin=0: b"[run]\n",
    )

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "write_whole", refuse)
    with pytest.raises(StorageError, match="Writing what was fetched"):
        RunMirror(place, tmp_path / "m").fetch()


@pytest.mark.parametrize("call", ["os.open", "bloomery.durable.try_lock"])
def test_where_there_are_no_locks_each_sync_sends_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*given: Any) -> Any:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(call, refuse)
    turns = [SyncTurn(RunDirectory(tmp_path)) for _ in range(2)]
    assert [turn.is_ours() for turn in turns] == [True, True]


def test_a_published_checkpoint_names_its_run_from_within_its_directory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = RunDirectory(tmp_path / "mine").create(), list[str]()
    monkeypatch.chdir(run.path)

    def publish(name: str, exported: Path, *, message: str) -> None:
        said.append(f"{message}, {json.loads((exported / published.MARK).read_text())['run']}")

    repository: Any = SimpleNamespace(publish_branch=publish)
    publisher = published.CheckpointPublisher(
        RunDirectory(Path()), repository, export=lambda held, exported: exported.mkdir(parents=True)
    )
    publisher._publish("step-000007.i001")
    assert said == ["Step 7 of mine, mine"]
