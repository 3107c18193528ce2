"""What places are asked, what a keeper runs, and what a tail and a publisher say, call by call."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.operate.sync.conftest import record

from bloomery.config.submit import SyncSection
from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import ObjectStat
from bloomery.operate.sync import keeper, pieces, places, published
from bloomery.operate.sync.hub import HubRepository
from bloomery.operate.sync.keeper import SyncKeeper
from bloomery.operate.sync.mirror import _is_expected
from bloomery.operate.sync.pieces import Piece, new_pieces
from bloomery.operate.sync.places import StorePlace, open_place
from bloomery.operate.sync.published import MARK, CheckpointPublisher
from bloomery.operate.sync.tail import RunTail


class Objects:
    """An object store that notes what it is asked, and refuses all where `refuses`."""

    def __init__(self, url: str, *, patience_s: float, create: bool) -> None:
        self.asked: list[Any] = [(url, patience_s, create)]
        self.refuses, self.keys = False, ["logs/a"]

    def _noted(self, *words: Any) -> None:
        self.asked.append(words)
        if self.refuses:
            raise OSError(5, "Input/output error")

    def entries(self) -> Any:
        self._noted("entries")
        return [SimpleNamespace(key=key, stat=ObjectStat(bytes=3, mark=f"m-{key}")) for key in self.keys]

    def put(self, key: str, content: bytes) -> None:
        self._noted("put", key, content)

    def delete(self, key: str) -> None:
        self._noted("delete", key)

    def content(self, key: str, *, begin: int) -> bytes:
        self._noted("content", key, begin)
        return b"abc"[begin:]


def test_a_store_is_asked_for_what_a_sync_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "Objects", Objects)
    place = StorePlace("s3://b/x", patience_s=7.0, create=False)
    store: Any = place._objects
    assert place.entries() == {"logs/a": ObjectStat(bytes=3, mark="m-logs/a")}
    place.publish({"b": b"1", "a": b"2"})
    place.remove(["c", "d"])
    assert place.content("e", begin=1) == b"bc" and place.content("e") == b"abc"
    assert store.asked == [
        ("s3://b/x", 7.0, False), ("entries",), ("put", "b", b"1"), ("put", "a", b"2"), ("delete", "c"),
        ("delete", "d"), ("content", "e", 1), ("content", "e", 0),
    ]  # fmt: skip
    assert (place.name, place.most_bytes) == ("s3://b/x", 32 << 20)
    store.keys.append("checkpoints/x")
    with pytest.raises(StorageError, match="s3://b/x holds backups"):
        place.entries()
    store.refuses = True
    for ask, doing in (
        (place.entries, "Listing s3://b/x"),
        (lambda: place.publish({"a": b""}), "Sending to s3://b/x"),
        (lambda: place.remove(["a"]), "Removing from s3://b/x"),
        (lambda: place.content("a"), "Reading s3://b/x"),
    ):
        with pytest.raises(StorageError, match=doing):
            ask()


def test_a_place_is_a_store_or_the_hub_by_its_first_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "Objects", Objects)
    for scheme in ("s3", "gs", "az", "file"):
        store = open_place(f"{scheme}://b/x", create=False)
        assert isinstance(store, StorePlace)
        assert store._objects.asked == [(f"{scheme}://b/x", 120.0, False)]  # type: ignore[attr-defined]
    hub = open_place("hf:a/b", is_public=True)
    assert isinstance(hub, HubRepository) and (hub.name, hub._is_public) == ("hf:a/b", True)
    assert not open_place("hf:a/b")._is_public  # type: ignore[attr-defined]
    for name in ("hf:a", "hf:a/b/c", "hf:a/b c", f"hf:{'a' * 97}/b", "hf:a/é", "hf:a/b\n"):
        with pytest.raises(StorageError, match="is no name of a repository"):
            open_place(name)
    open_place(f"hf:{'a' * 96}/b.c_d-e")


def test_a_place_that_is_none_is_told_with_what_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, remedy in (("ftp://b/x", "s3://bucket/path"), ("hf:a", "hf:OWNER/NAME")):
        with pytest.raises(StorageError) as refused:
            open_place(text)
        assert remedy in refused.value.remedy
    monkeypatch.setattr(places, "Objects", Objects)
    place = StorePlace("s3://b/x")
    store: Any = place._objects
    store.keys = ["logs/checkpoints/x"]
    assert set(place.entries()) == {"logs/checkpoints/x"}, "a log of any name is no backup"
    store.keys = ["checkpoints/x"]
    with pytest.raises(StorageError) as backups:
        place.entries()
    assert "with /logs" in backups.value.remedy


@pytest.mark.parametrize(
    ("waits_s", "ends_at", "asked_at", "said", "killed", "until"),
    [
        (60.0, 3.0, None, 0, False, 3.0),
        (600.0, 20.0, None, 1, False, 20.0),
        (10.0, None, None, 1, True, 10.0),
        (600.0, None, 2.0, 0, True, 2.0),
        (0.0, None, None, 0, True, 0.0),
    ],
)
def test_the_last_sync_is_waited_for_as_long_as_it_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits_s: float, ends_at: float | None,
    asked_at: float | None, said: int, killed: bool, until: float,
) -> None:  # fmt: skip
    clock, done, told = [0.0], list[str](), list[str]()
    handlers: dict[int, Any] = {}

    def sleep(seconds: float) -> None:
        assert seconds == 0.2
        clock[0] = round(clock[0] + seconds, 1)
        if asked_at is not None and clock[0] >= asked_at:
            handlers[signal.SIGTERM](signal.SIGTERM, None)

    def poll() -> int | None:
        return 0 if "kill" in done or (ends_at is not None and clock[0] >= ends_at) else None

    def install(number: int, handler: Any) -> Any:
        before = handlers.get(number, f"before {number}")
        handlers[number] = handler
        return before

    ended = threading.Event()

    def wait() -> int:
        if threading.current_thread() is threading.main_thread():
            done.append("wait")
        else:
            ended.wait(60.0)
        return 0

    process = SimpleNamespace(
        pid=7, poll=poll, terminate=lambda: ended.set() or done.append("terminate"), wait=wait
    )
    monkeypatch.setattr(os, "killpg", lambda group, number: done.append(f"{number.name} to {group}"))
    blocked: list[Any] = []
    monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(signal, "signal", install)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda how, mask: blocked.append((how, mask)) or {9})
    calls: list[Any] = []
    monkeypatch.setattr(
        keeper.subprocess, "Popen", lambda command, **more: calls.append((command, more)) or process
    )
    section = SyncSection(place="hf:a/b")

    def wait_s() -> float:
        done.append("how long?")
        return waits_s

    with SyncKeeper(RunDirectory(tmp_path), section, wait_s=wait_s, say=told.append):
        assert blocked == [(signal.SIG_BLOCK, {signal.SIGTERM}), (signal.SIG_SETMASK, {9})]
    ((command, options),) = calls
    assert command[0] == sys.executable and options == {"stdout": subprocess.DEVNULL, "process_group": 0}
    assert (
        done == ["terminate", "how long?", *(["SIGKILL to 7"] if killed else []), "wait"]
        and clock[0] == until
    )
    assert handlers == {number: f"before {number}" for number in (signal.SIGINT, signal.SIGTERM)}
    words = f"waiting for the last sync, {waits_s / 60:.0f} minutes at most; Ctrl-C ends the wait"
    assert told == [words] * said


def tail_of(tmp_path: Path, *events: dict[str, Any]) -> list[str]:
    run = RunDirectory(tmp_path / "run").create()
    run.journal().write_text("".join(json.dumps(event) + "\n" for event in events) + "[1]\nno JSON\n")
    return list(RunTail(run, every_steps=2).new_lines())


def test_a_tail_tells_each_event_in_a_line_in_the_order_of_their_times(tmp_path: Path) -> None:
    def at(seconds: float) -> str:
        return time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))

    told = tail_of(
        tmp_path,
        {
            "event": "step",
            "time": 1e9 + 5,
            "step": 4,
            "loss": 2.0,
            "gradient_norm": 0.25,
            "tokens_per_s": 12345.6,
        },
        {"event": "step", "time": 1e9 + 4, "step": 3, "loss": 2.0},
        {"event": "step", "time": 1e9 + 6, "step": 6, "loss": "NaN", "update_applied": False},
        {"event": "step", "time": 1e9 + 6, "step": "8"},
        {"event": "checkpoint", "time": 1e9 + 1, "step": 2, "path": "a\x1bb"},
        {"event": "evaluation", "time": 1e9 + 2, "step": 2, "held_out_loss": 3.0},
        {"event": "evaluation", "time": 1e9 + 2, "step": 2, "held_out_loss": "NaN"},
        {"event": "rewind", "time": 1e9 + 3, "step": 2, "incarnation": 1, "to_step": 1, "reason": "r"},
        {"event": "note", "time": 1e12, "step": 0, "text": "t", "by": "b"},
        {"event": "receipt", "time": 1e9},
    )
    assert told == [
        f"{at(1e9 + 1)} step 2: saved a b",
        f"{at(1e9 + 2)} step 2: held-out loss 3.0000",
        f"{at(1e9 + 3)} step 2: rewind: went back to step 1 or the checkpoint before it: r",
        f"{at(1e9 + 5)} step 4 | loss 2.0000 | norm 0.25 | 12,346 tokens/s",
        f"{at(1e9 + 6)} step 6 | UPDATE REFUSED",
        "--:--:-- note: b: t",
    ]


def test_pieces_go_on_where_the_last_one_may_have_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4)
    path = tmp_path / "log"
    path.write_bytes(b"ab\ncd\nef\ng")
    whole = [
        Piece(number=0, content=b"ab\n"),
        Piece(number=1, content=b"cd\n"),
        Piece(number=2, content=b"ef\n"),
    ]
    assert list(new_pieces(path, [])) == whole
    assert list(new_pieces(path, [3])) == whole[1:] and list(new_pieces(path, [3, 3, 3])) == []
    assert list(new_pieces(path, [3, 3, 2])) == whole[2:], "the newest has grown"
    assert list(new_pieces(path, [3, 3, 4])) == [], "it was written anew meanwhile"
    assert list(new_pieces(path, [3, 3, 5])) == whole, "it is shorter than what was sent"
    monkeypatch.setattr(pieces, "_LONGEST_RECORD", 8)
    path.write_bytes(b"x" * 40)
    assert [len(piece.content) for piece in new_pieces(path, [])] == [16, 16], (
        "without a line it is cut anywhere"
    )
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64)
    monkeypatch.setattr(pieces, "_LONGEST_RECORD", 1024)
    events = tmp_path / "events.out.tfevents.1"
    events.write_bytes(record(b"a") + record(b"b")[:-1])
    assert [piece.content for piece in new_pieces(events, [])] == [record(b"a")]


def test_only_files_that_a_sync_sends_are_expected() -> None:
    good = ["journal/0-0.jsonl", "logs/a.000001", "tensorboard/x/y", "operations.jsonl",
            "operations.jsonl.000002", "evaluations.jsonl", "rounds.jsonl",
            "incarnations/000001.json", "recipe.toml", "sources.toml",
            "stacks/0", "chronicle.md", "submission.json"]  # fmt: skip
    bad = [
        "checkpoints/x",
        "journal/",
        "/journal",
        "journal/..",
        "journal/.x",
        "x",
        "",
        "logs/a\n",
        "control/stop",
    ]
    assert [key for key in good if not _is_expected(key)] == [] == [key for key in bad if _is_expected(key)]


def test_a_checkpoint_is_exported_marked_and_published_and_a_failed_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory(tmp_path / "mine").create()
    for name in ("step-000010.i002", "step-000009.i001", "no name", "step-x"):
        (run.path / "publishing" / name).mkdir(parents=True)
    calls: list[Any] = []

    def publish(branch: str, directory: Path, *, message: str) -> None:
        calls.append((branch, message, json.loads((directory / MARK).read_text())))

    repository: Any = SimpleNamespace(
        make=lambda: calls.append("make"),
        branches=lambda: {"main", "step-000001.i001", "step-000002.i001"},
        files_of=lambda branch: {MARK: 1} if branch == "step-000001.i001" else {}, publish_branch=publish,
    )  # fmt: skip
    ours = CheckpointPublisher(run, repository, export=lambda source, target: target.mkdir())
    assert ours.is_waiting and ours.publish_held() == ["step-000009.i001", "step-000010.i002"]
    assert not ours.is_waiting and ours._published == {call[0] for call in calls[1:]}
    assert calls == [
        "make",
        ("step-000009.i001", "Step 9 of mine",
         {"run": "mine", "checkpoint": "step-000009.i001", "step": 9, "incarnation": 1}),
        ("step-000010.i002", "Step 10 of mine",
         {"run": "mine", "checkpoint": "step-000010.i002", "step": 10, "incarnation": 2}),
    ]  # fmt: skip
    (run.path / "publishing" / "step-000011.i002").mkdir()

    def fail(source: Path, target: Path) -> None:
        target.mkdir()
        raise OSError(28, "No space left on device")

    ours._export = fail
    with pytest.raises(StorageError, match="Exporting a checkpoint"):
        ours.publish_held()
    assert sorted(path.name for path in (run.path / "publishing").iterdir()) == [
        "no name", "step-000011.i002", "step-x",
    ]  # fmt: skip
    for step in range(20, 25):
        (run.path / "publishing" / f"step-{step:06d}.i002").mkdir()
    (run.path / "publishing" / ".step-000011.i002.export").mkdir()  # of a publisher that was killed
    monkeypatch.setattr(published, "checkpoints", lambda rundir: [])
    ours._publishing = ""
    with caplog.at_level(logging.WARNING):
        ours.hold()
    assert [entry.getMessage() for entry in caplog.records] == [
        f"step-{step:06d}.i002 is not published: 4 newer ones wait already" for step in (11, 20)
    ]
    assert sorted(path.name for path in (run.path / "publishing").iterdir()) == [
        "no name", *(f"step-{step:06d}.i002" for step in range(21, 25)), "step-x"
    ]  # fmt: skip
