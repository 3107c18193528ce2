"""What syncs and follows do from their start to the signal that ends them."""

from __future__ import annotations

import errno
import os
import signal
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.wait_clock import Clock

from bloomery.cli import sync
from bloomery.config.load import dump_recipe, load_recipe, override
from bloomery.errors import BloomeryError, CheckpointError, StorageError, UsageError
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.sync.keeper import SyncTurn


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def repeated(
    monkeypatch: pytest.MonkeyPatch, rundir: RunDirectory, *, ends_at: int, look: Callable[..., None],
    publisher: Any = None, **options: Any,
) -> Clock:  # fmt: skip
    clock = Clock(monkeypatch, ends_at=ends_at)
    monkeypatch.setattr(sync, "EndSignal", lambda: clock)
    monkeypatch.setattr(sync, "_look", look)
    monkeypatch.setattr("signal.pthread_sigmask", lambda how, numbers: None)
    monkeypatch.setattr(sync, "_hold", lambda rundir, publisher: None)
    given = Namespace(**{"every": 0.2, "beside": False, **options})
    sync._repeat(rundir, "the sync", publisher, given)  # type: ignore[arg-type]
    return clock


def clock_at() -> float:
    import time

    return time.monotonic() - 1_000.0


def test_uploads_come_every_so_many_minutes(rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    repeated(monkeypatch, rundir, ends_at=9, look=lambda *given: looks.append(clock_at()))
    # Each 12 seconds, looked at every 5 seconds, and once more at the end.
    assert looks == [0.0, 15.0, 30.0, 40.0]


def test_a_refused_upload_is_tried_again_after_its_time_or_five_minutes(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[float] = []

    def refuse(*given: Any) -> None:
        looks.append(clock_at())
        raise StorageError("no answer", remedy="")

    repeated(monkeypatch, rundir, ends_at=64, look=refuse, every=60.0)
    assert looks == [0.0, 300.0, 315.0] and capsys.readouterr().err.count("bloomery sync: no answer") == 3
    looks.clear()
    publisher = SimpleNamespace(is_waiting=True)
    repeated(monkeypatch, rundir, ends_at=5, look=refuse, every=0.2, publisher=publisher)
    assert looks == [0.0, 15.0, 20.0], "checkpoints that are held wait as long"


def test_held_checkpoints_are_published_before_the_logs_are_due(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []
    publisher = SimpleNamespace(is_waiting=False)

    def look(found: Any, publisher: Any, options: Any) -> None:
        looks.append((clock_at(), found))
        publisher.is_waiting = clock_at() == 0.0

    repeated(monkeypatch, rundir, ends_at=4, look=look, publisher=publisher, every=60.0)
    assert looks == [(0.0, "the sync"), (5.0, None), (15.0, "the sync")]


def test_a_sync_waits_for_its_run_and_ends_with_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    parents = [7, 7, 7, 1]
    monkeypatch.setattr("os.getppid", lambda: parents.pop(0))
    rundir = RunDirectory(tmp_path / "none")
    clock = repeated(
        monkeypatch, rundir, ends_at=99, look=lambda *given: looks.append(clock_at()), beside=True
    )
    assert clock.waits == [0.0, 5.0, 5.0] and looks == []
    parents[:] = [7, 7, 1]
    monkeypatch.setattr("os.getppid", lambda: parents.pop(0))
    made = RunDirectory(tmp_path / "made").create()
    repeated(monkeypatch, made, ends_at=99, look=lambda *given: looks.append(clock_at()), beside=True)
    assert looks == [0.0, 5.0], "the last lines are sent"


def test_one_sync_at_a_time_sends_a_run_that_several_machines_have_started(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    first = SyncTurn(rundir)
    assert first.is_ours() and first.is_ours()

    def looked(*given: Any) -> None:
        looks.append(clock_at())

    repeated(monkeypatch, rundir, ends_at=9, look=looked, beside=True)
    assert not looks, "not even at its end: the other one sends the last lines"
    repeated(monkeypatch, rundir, ends_at=9, look=looked)
    assert len(looks) == 4, "who calls it by hand need not wait"
    looks.clear()
    os.close(first._file)  # as the kernel does when a process ends
    repeated(monkeypatch, rundir, ends_at=9, look=looked, beside=True)
    assert len(looks) == 4


def test_a_disk_that_refuses_ends_no_sync(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*given: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    repeated(monkeypatch, rundir, ends_at=3, look=refuse)
    assert capsys.readouterr().err.count("bloomery sync: [Errno 116] Stale file handle") == 2


def test_checkpoints_are_held_as_they_come_whatever_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held: list[str] = []
    pauses: list[float] = []
    rundir = RunDirectory(tmp_path / "run")

    class Ended(Exception):
        """The process ended."""

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        rundir.create()
        if len(pauses) == 4:
            raise Ended

    def hold() -> None:
        held.append("held")
        if len(held) == 1:
            raise StorageError("the disk is full", remedy="")
        if len(held) == 2:
            raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("time.sleep", pause)
    publisher: Any = SimpleNamespace(hold=hold)
    with pytest.raises(Ended):
        sync._hold(rundir, publisher)
    assert len(held) == 3 and pauses == [5.0] * 4
    told = "bloomery sync: the disk is full\nbloomery sync: [Errno 116] Stale file handle\n"
    assert capsys.readouterr().err == told


def test_what_a_launcher_held_back_is_let_through_and_no_refusal_ends_a_sync(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, masks = Clock(monkeypatch, ends_at=2), list[Any]()

    def refuse(*given: Any) -> None:
        raise CheckpointError("it cannot be exported", remedy="")

    monkeypatch.setattr(sync, "EndSignal", lambda: clock)
    monkeypatch.setattr(sync, "_look", refuse)
    monkeypatch.setattr("signal.pthread_sigmask", lambda how, numbers: masks.append((how, numbers)))
    options = Namespace(every=60.0, beside=False)
    assert sync._repeat(rundir, "the sync", None, options) == 1  # type: ignore[arg-type]
    assert masks == [(signal.SIG_UNBLOCK, {signal.SIGTERM})]
    assert capsys.readouterr().err.count("it cannot be exported") == 2


@pytest.mark.parametrize(("refused", "status"), ((1, 0), (2, 1)))
def test_a_sync_ends_with_the_status_of_its_last_upload(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, refused: int, status: int
) -> None:
    clock, looks = Clock(monkeypatch, ends_at=2), list[int]()

    def look(*given: Any) -> None:
        looks.append(len(looks) + 1)
        if looks[-1] == refused:
            raise StorageError("no answer", remedy="")

    monkeypatch.setattr(sync, "EndSignal", lambda: clock)
    monkeypatch.setattr(sync, "_look", look)
    monkeypatch.setattr("signal.pthread_sigmask", lambda how, numbers: None)
    options = Namespace(every=60.0, beside=False)
    assert sync._repeat(rundir, "the sync", None, options) == status  # type: ignore[arg-type]
    assert looks == [1, 2]


def test_a_look_holds_what_was_saved_just_now_before_it_publishes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done: list[str] = []
    publisher: Any = SimpleNamespace(
        hold=lambda: done.append("hold"), publish_held=lambda: done.append("publish") or ["step-1"]
    )
    sync._look(None, publisher, Namespace(json=False, once=False, place="hf:me/x"))
    assert done == ["hold", "publish"]
    assert capsys.readouterr().out.endswith("hf:me/x: 0 B in 0 files; published step-1\n")


def test_options_of_a_sync_go_before_its_recipe(rundir: RunDirectory) -> None:
    rundir.recipe.write_text(
        dump_recipe(override(load_recipe("demo").recipe, ["sync.place=hf:me/x", "sync.every_minutes=7"]))
    )
    plain = sync._parse([str(rundir.path)])
    assert (plain.place, plain.every, plain.checkpoints) == ("hf:me/x", 7.0, False)
    given = sync._parse([str(rundir.path), "--every", "3", "--checkpoints"])
    assert (given.every, given.checkpoints) == (3.0, True)


def test_a_follow_writes_into_no_run_that_trained_there(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(StorageError, match="holds a run of its own"):
        sync.follow([f"file://{tmp_path}", "--into", str(tmp_path / "run"), "--once"])


def test_a_sync_is_of_a_run_its_place_and_its_checkpoints(
    rundir: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.operate.sync import hub, places, published, run_sync

    made: list[Any] = []

    class Repository:
        """A repository of the Hub."""

    monkeypatch.setattr(hub, "HubRepository", Repository)
    monkeypatch.setattr(
        places, "open_place", lambda place, *, is_public: made.append((place, is_public)) or Repository()
    )
    monkeypatch.setattr(
        published, "CheckpointPublisher", lambda rundir, place, *, export: made.append(export) or "publisher"
    )
    monkeypatch.setattr(run_sync, "RunSync", lambda rundir, place: made.append(rundir.path) or "sync")
    monkeypatch.setattr(sync, "_look", lambda *given: made.append(("look", *given[:2])))
    monkeypatch.setattr(sync, "_repeat", lambda *given: made.append(("repeat", *given[:3])) or 3)
    path = str(rundir.path)
    assert sync.sync([path, "s3://b/x", "--once"]) == 0
    assert made == [("s3://b/x", False), rundir.path, ("look", "sync", None)]
    made.clear()
    assert sync.sync([path, "hf:me/x", "--checkpoints", "--public"]) == 3, "that of the last upload"
    assert made == [("hf:me/x", True), sync._export, rundir.path, ("repeat", rundir, "sync", "publisher")]
    made.clear()
    with pytest.raises(BloomeryError, match="none does not exist"):
        sync.sync([str(tmp_path / "none"), "s3://b/x", "--once"])
    made.clear()
    assert sync.sync([str(tmp_path / "none"), "s3://b/x", "--beside"]) == 3
    assert made[-1] == ("repeat", RunDirectory(tmp_path / "none"), "sync", None)
    with pytest.raises(UsageError, match="s3://b/x is no repository of the Hub"):
        sync.sync([path, "s3://b/x", "--checkpoints"])


def test_a_follow_shows_the_past_and_then_what_comes_from_here_or_elsewhere(
    rundir: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bloomery.operate.sync import mirror, places, tail

    made: list[Any] = []
    refuses = [False]

    class Mirror:
        def __init__(self, place: Any, into: Path) -> None:
            made.append((place, into))

        def fetch(self) -> None:
            made.append("fetch")
            if refuses[0]:
                raise StorageError("no answer", remedy="Wait.")

    class Tail:
        def __init__(self, rundir: RunDirectory, *, every_steps: int) -> None:
            made.append((rundir.path, every_steps))
            self.left = [[f"line {number}" for number in range(30)], ["new"], []]

        def new_lines(self) -> list[str]:
            return self.left.pop(0)

    monkeypatch.setattr(mirror, "RunMirror", Mirror)
    monkeypatch.setattr(tail, "RunTail", Tail)
    monkeypatch.setattr(places, "open_place", lambda source, *, create: f"{source} {create}")
    clocks: list[Clock] = []
    monkeypatch.setattr(sync, "EndSignal", lambda: clocks.append(Clock(monkeypatch, ends_at=3)) or clocks[-1])
    path = str(rundir.path)
    assert sync.follow([path, "--once", "--lines", "2", "--steps", "7"]) == 0
    assert capsys.readouterr().out == "line 28\nline 29\n" and made == [(rundir.path, 7)] and not clocks
    assert sync.follow([path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 21 and lines[-1] == "new" and clocks[0].waits == [2, 2, 2]
    sync.follow([path, "--once", "--lines", "0"])
    assert len(capsys.readouterr().out.splitlines()) == 30
    made.clear()
    into = tmp_path / "into"
    assert sync.follow(["s3://b/x", "--into", str(into), "--once"]) == 0
    assert made == [("s3://b/x False", into), "fetch", (into, 10)]
    made.clear()
    assert sync.follow(["hf:me/x"]) == 0 and clocks[1].waits == [60, 60, 60]
    assert made[1:] == ["fetch", (made[0][1], 10), "fetch", "fetch"] and not made[0][1].exists()
    for source in (path, "hf:me/x"):
        assert sync.follow([source, "--interval", "7"]) == 0 and clocks[-1].waits == [7, 7, 7]
    capsys.readouterr()
    tails: Any = Tail(rundir, every_steps=1)
    tails.left = [["a"], ["b"]]
    refuses[0] = True
    sync._follow_on(Mirror("place", into), tails, interval_s=4.0)
    told = "bloomery follow: no answer\na\nbloomery follow: no answer\nb\n"
    assert capsys.readouterr().out == told and clocks[-1].waits == [4.0] * 3
