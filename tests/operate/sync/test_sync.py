"""A run that trains here is followed elsewhere, through a store and through the Hub."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from tests.faults.commands import wait_for
from tests.operate.sync.conftest import record, write_steps
from tests.operate.sync.hub_server import Hub

from bloomery.config.submit import SyncSection
from bloomery.errors import StorageError
from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.stacks import process_state
from bloomery.operate.sync import pieces
from bloomery.operate.sync.keeper import SyncKeeper
from bloomery.operate.sync.mirror import RunMirror
from bloomery.operate.sync.places import StorePlace, SyncPlace, open_place
from bloomery.operate.sync.run_sync import RunSync
from bloomery.operate.sync.tail import RunTail


@pytest.fixture(params=["store", "hub"])
def place(request: pytest.FixtureRequest, hub: Hub, tmp_path: Path) -> SyncPlace:
    return open_place(f"file://{tmp_path / 'store'}" if request.param == "store" else "hf:people/tiny")


def contents(directory: Path) -> dict[str, bytes]:
    """Return the files that a sync sends, by name."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.startswith(".") and path.stat().st_size
    }


def test_a_mirror_elsewhere_has_the_bytes_of_the_run_after_each_sync(
    run: RunDirectory, place: SyncPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 500)
    sync, elsewhere = RunSync(run, place), tmp_path / "elsewhere"
    mirror = RunMirror(place, elsewhere)
    for step in range(6, 18, 4):
        sync.send_new()
        mirror.fetch()
        assert contents(elsewhere) == contents(run.path)
        write_steps(run, step, step + 4)
        run.chronicle.write_text(f"up to step {step}\n")
        with (run.tensorboard / "events.out.tfevents.1.vm").open("ab") as file:
            file.write(record(b"x" * step))
    assert RunSync(run, place).send_new().count > 0, "another process goes on where the first one was"
    RunMirror(place, elsewhere).fetch()
    assert contents(elsewhere) == contents(run.path)
    assert loss_curve(RunDirectory(elsewhere)) == loss_curve(run)
    marks = (elsewhere / ".followed.json").stat()
    assert (sync.send_new().count, RunMirror(place, elsewhere).fetch()) == (0, 0)
    assert (elsewhere / ".followed.json").stat().st_ino == marks.st_ino, "it was not written again"


def test_a_file_that_was_written_anew_replaces_its_pieces(
    run: RunDirectory, place: SyncPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 150)
    log, elsewhere = run.log(host="vm", rank=0), tmp_path / "elsewhere"
    log.write_text("an old line\n" * 40)
    sync, mirror = RunSync(run, place), RunMirror(place, elsewhere)
    sync.send_new()
    mirror.fetch()
    log.write_text("a new line\n" * 12)
    sync.send_new()
    mirror.fetch()
    assert contents(elsewhere) == contents(run.path)
    log.write_text("another line\n" * 30)  # longer than before: told by the piece that changed
    RunSync(run, place).send_new()
    assert sum(key.startswith("logs/vm-0") for key in place.entries()) > 1


def test_a_place_with_the_logs_of_another_run_is_refused_and_stays_as_it_was(
    run: RunDirectory, place: SyncPlace, tmp_path: Path
) -> None:
    place.publish({"incarnations/0-by-hand.txt": b"x"})
    RunSync(run, place).send_new()
    before = place.entries()
    other = RunDirectory(tmp_path / "other").create()
    other.recipe.write_text("[run]\nname = 'other'\n")
    assert RunSync(other, place).send_new().count == 0, "a run that has not begun is sent nowhere"
    other.incarnation(1).write_text('{"base": null, "began": "later"}')
    write_steps(other, 1, 3)
    for _ in range(2):
        with pytest.raises(StorageError, match="holds the logs of another run"):
            RunSync(other, place).send_new()
    assert place.entries() == before
    moved = run.path.rename(tmp_path / "moved")
    RunDirectory(moved).incarnation(2).write_text('{"base": [5, 1]}')
    assert RunSync(RunDirectory(moved), place).send_new().count == 1, "the same run goes on elsewhere"


def test_a_refused_commit_loses_nothing(run: RunDirectory, hub: Hub, tmp_path: Path) -> None:
    place = open_place("hf:people/tiny")
    sync = RunSync(run, place)
    hub.refusals = 1
    with pytest.raises(StorageError, match="Sending to hf:people/tiny failed"):
        sync.send_new()
    sync.send_new()
    RunMirror(place, tmp_path / "elsewhere").fetch()
    assert contents(tmp_path / "elsewhere") == contents(run.path)


def test_a_new_repository_is_private_and_a_look_is_one_commit(run: RunDirectory, hub: Hub) -> None:
    RunSync(run, open_place("hf:people/tiny")).send_new()
    made = hub.repositories["people/tiny"]
    assert made.private and len(made.commits["main"]) == 2
    RunSync(run, open_place("hf:people/open", is_public=True)).send_new()
    assert not hub.repositories["people/open"].private


def test_who_may_not_write_is_told_what_to_do(
    run: RunDirectory, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody")
    with pytest.raises(StorageError, match="failed") as refused:
        RunSync(run, open_place("hf:people/tiny")).send_new()
    assert "hf auth login" in refused.value.remedy and "hf_of_somebody" not in str(refused.value)


@pytest.mark.parametrize("text", ["http://host/logs", "ftp://host/x", "runs/mine", "hf:nobody", "hf:a/b/c"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(StorageError) as refused:
        open_place(text)
    assert refused.value.remedy


def test_a_place_of_backups_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "store" / "checkpoints").mkdir(parents=True)
    (tmp_path / "store" / "checkpoints" / "x").write_bytes(b"x")
    with pytest.raises(StorageError, match="holds backups"):
        RunSync(run, StorePlace(f"file://{tmp_path / 'store'}")).send_new()


def test_names_from_elsewhere_lead_nowhere(run: RunDirectory, hub: Hub, tmp_path: Path) -> None:
    place = open_place("hf:people/tiny")
    RunSync(run, place).send_new()
    bad = ["journal/../../out", "../out", "out", "journal/.hidden", "recipe.toml/../../out", "logs/a\x1b[2J"]
    repository = hub.repositories["people/tiny"]
    repository.commit("main", repository.files("main") | dict.fromkeys(bad, b"out\n"))
    RunMirror(place, tmp_path / "elsewhere").fetch()
    assert contents(tmp_path / "elsewhere") == contents(run.path)
    assert not list(tmp_path.rglob("out"))


def test_a_tail_tells_due_steps_saves_and_failures_in_their_order(run: RunDirectory) -> None:
    tail = RunTail(run, every_steps=5)
    assert [line[15:] for line in tail.new_lines()] == ["step 5 | loss 3.9500 | 1,000 tokens/s"]
    write_steps(run, 6, 11)
    with run.operations.open("a") as operations:
        operations.write(
            '{"event":"note","time":9e9,"incarnation":0,"step":0,"text":"by \\u001b[2Jhand"}\n{"torn'
        )
    seen = [line[15:] for line in tail.new_lines()]
    assert seen[0] == "step 10 | loss 3.9000 | 1,000 tokens/s" and "hand" in seen[1]
    assert "\x1b" not in seen[1]
    assert list(tail.new_lines()) == []


def test_a_sync_beside_a_launcher_sends_the_last_lines_at_its_end(run: RunDirectory, tmp_path: Path) -> None:
    section = SyncSection(place=f"file://{tmp_path / 'store'}")
    with SyncKeeper(run, section, wait_s=lambda: 120.0, say=print):
        write_steps(run, 6, 9)
    RunMirror(open_place(section.place), tmp_path / "elsewhere").fetch()
    assert contents(tmp_path / "elsewhere") == contents(run.path)


def test_an_export_does_not_outlive_a_sync_that_takes_too_long(run: RunDirectory, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun")
    ours = SyncKeeper(run, SyncSection(place=f"file://{tmp_path}"), wait_s=lambda: 0.0, say=print)
    ours._command = ["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/begun; wait"]
    with ours:
        export = int((tmp_path / "begun").read_text())
        assert process_state(export) not in ("", "Z")
    try:
        wait_for(lambda: process_state(export) in ("", "Z"))
    finally:
        with suppress(ProcessLookupError):
            os.kill(export, signal.SIGKILL)


def test_signals_are_the_launchers_own_again_after_the_last_sync(run: RunDirectory, tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        with SyncKeeper(run, SyncSection(place=f"file://{tmp_path}"), wait_s=lambda: 0.0, say=print):
            pass
        assert [signal.getsignal(number) for number in numbers] == before
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
