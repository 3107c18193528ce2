"""Backups to two places at once: each with its own cadence and contents, and the logs and data of the run."""

import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from tests.checkpoint.small_run import Run

from bloomery.checkpoint.format.catalogue import checkpoints, remote_copies
from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.remote.places import CombinedBackups
from bloomery.checkpoint.remote.remote_run import download_run_files, place_at, remote_checkpoints
from bloomery.cli import main
from bloomery.config.checkpoint import BackupSection, CheckpointSection
from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave

KEEP_ONE = CheckpointSection(keep_last=1, keep_tenths=False)
DEADLINE_S = 60.0


def places(rundir: RunDirectory, first: BackupSection, second: BackupSection) -> CombinedBackups:
    return CombinedBackups(
        [
            Backup(rundir, first, run_name="run"),
            Backup(rundir, second, run_name="run", place="second"),
        ]
    )


def begun(rundir: RunDirectory, backup: CombinedBackups) -> tuple[Store, Run]:
    run, store = Run(), Store(rundir, KEEP_ONE, backup=backup)
    store.restore(run.parts)
    return store, run


def save(store: Store, run: Run, *steps: int) -> None:
    for step in steps:
        store.save(RunStateToSave(run.fill(step).parts, step=step))


def wait_until_copied(backup: CombinedBackups) -> None:
    until = time.monotonic() + DEADLINE_S
    while backup.due() and time.monotonic() < until:
        time.sleep(0.01)
    assert not backup.due()


def steps_at(url: Path) -> list[str]:
    return [copy.name for copy in remote_checkpoints(place_at(f"file://{url}/run"))]


def test_two_places_have_their_own_cadence_and_contents(tmp_path: Path):
    rundir = RunDirectory(tmp_path / "run").create()
    near = BackupSection(url=f"file://{tmp_path}/near")
    far = BackupSection(url=f"file://{tmp_path}/far", every_steps=2, what="model")
    backup = places(rundir, near, far)
    store, run = begun(rundir, backup)
    for step in (1, 2, 3, 4):
        save(store, run, step)
        wait_until_copied(backup)
    backup.close()

    assert len(steps_at(tmp_path / "near")) == 4
    assert steps_at(tmp_path / "far") == ["step-000002.i001", "step-000004.i001"]
    assert {copy.what for copy in remote_copies(rundir)["step-000004.i001"]} == {"all", "model"}
    assert [item.step for item in checkpoints(rundir)] == [4], "both have what is to be there"


@pytest.mark.parametrize("waits", [True, False])
def test_pruning_waits_for_a_place_that_is_down_only_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
):
    send = Objects.send

    def down(remote: Objects, key: str, path: Path):
        if "/far" in remote.url:
            raise OSError(5, "the store is down")
        return send(remote, key, path)

    monkeypatch.setattr(Objects, "send", down)
    rundir = RunDirectory(tmp_path / "run").create()
    near = BackupSection(url=f"file://{tmp_path}/near")
    far = BackupSection(url=f"file://{tmp_path}/far", prune_waits=waits)
    backup = places(rundir, near, far)
    store, run = begun(rundir, backup)
    for step in (1, 2, 3):
        save(store, run, step)
        until = time.monotonic() + DEADLINE_S
        while len(steps_at(tmp_path / "near")) < step and time.monotonic() < until:
            time.sleep(0.01)
    backup.close(wait_s=0.5)
    store.save(RunStateToSave(run.fill(4).parts, step=4))

    left = [item.step for item in checkpoints(rundir)]
    assert left == [1, 2, 3, 4] if waits else 1 not in left


def test_a_checkpoint_that_is_being_sent_stays_also_where_pruning_waits_for_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    send, sending, go_on = Objects.send, threading.Event(), threading.Event()

    def slowly(remote: Objects, key: str, path: Path):
        sending.set()
        assert go_on.wait(DEADLINE_S)
        return send(remote, key, path)

    monkeypatch.setattr(Objects, "send", slowly)
    rundir = RunDirectory(tmp_path / "run").create()
    far = BackupSection(url=f"file://{tmp_path}/far", prune_waits=False)
    backup = CombinedBackups([Backup(rundir, far, run_name="run")])
    store, run = begun(rundir, backup)
    save(store, run, 1)
    assert sending.wait(DEADLINE_S)
    save(store, run, 2, 3, 4)
    meanwhile = [item.step for item in checkpoints(rundir)]
    go_on.set()
    backup.close()
    assert 1 in meanwhile and 2 not in meanwhile
    assert steps_at(tmp_path / "far")[0] == "step-000001.i001"


def test_a_start_takes_the_newest_of_both_places_and_does_without_one_that_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    near = BackupSection(url=f"file://{tmp_path}/near", every_steps=5)
    far = BackupSection(url=f"file://{tmp_path}/far")
    rundir = RunDirectory(tmp_path / "run").create()
    backup = places(rundir, near, far)
    store, run = begun(rundir, backup)
    for step in (5, 7):
        save(store, run, step)
        wait_until_copied(backup)
    backup.close()
    shutil.rmtree(rundir.path)

    store, run = begun(rundir.create(), places(rundir, near, far))
    assert run.equals(Run().fill(7)), "the second place has the newer one"

    shutil.rmtree(rundir.path)
    lost = Backup(rundir.create(), far, run_name="run", place="second")
    monkeypatch.setattr(
        lost, "restorable", lambda **_: (_ for _ in ()).throw(StorageError("down", remedy=""))
    )
    store, run = begun(rundir, CombinedBackups([Backup(rundir, near, run_name="run"), lost]))
    assert run.equals(Run().fill(5)) and "passed over: down" in caplog.text


@pytest.mark.parametrize("is_here", [False, True])
def test_what_a_rewind_left_behind_stays_so_where_only_the_second_place_knows_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_here: bool
):
    near, far = (BackupSection(url=f"file://{tmp_path}/{name}") for name in ("near", "far"))
    rundir = RunDirectory(tmp_path / "run").create()
    backup = places(rundir, near, far)
    store, run = begun(rundir, backup)
    save(store, run, 1)
    wait_until_copied(backup)
    shutil.copytree(rundir.path, tmp_path / "earlier")
    save(store, run, 2)
    wait_until_copied(backup)
    backup.close()

    second = Backup(rundir, far, run_name="run", place="second")
    store = Store(rundir, KEEP_ONE, backup=second)
    store.restore(run.parts, up_to_step=1, reason="rewind")
    save(store, run, 3)
    wait_until_copied(CombinedBackups([second]))
    second.close()

    there = RunDirectory(tmp_path / ("earlier" if is_here else "new")).create()
    both = places(there, near, far)
    found = both.newer() if is_here else both.restorable()
    left = ["step-000003.i002"] if is_here else ["step-000003.i002", "step-000001.i001"]
    assert [copy.name for copy in found] == left
    assert is_here or "step-000002" not in caplog.text


def test_logs_and_data_are_backed_up_once_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sent: list[str] = []
    send = Objects.send

    def watched(remote: Objects, key: str, path: Path):
        sent.append(key)
        return send(remote, key, path)

    monkeypatch.setattr(Objects, "send", watched)
    rundir = RunDirectory(tmp_path / "run").create()
    files = {
        "data/train.bin": os.urandom(9999),
        "data/tokenizer.json": b"{}",
        "journal/0-0.jsonl": b'{"event": "start"}\n',
        "logs/0-0.log": b"hello\n",
        "tensorboard/events.out": os.urandom(99),
        "chronicle.md": b"# chronicle\n",
    }
    for name, content in files.items():
        (rundir.path / name).parent.mkdir(exist_ok=True)
        (rundir.path / name).write_bytes(content)
    near = BackupSection(url=f"file://{tmp_path}/near")
    far = BackupSection(url=f"file://{tmp_path}/far", data=False, logs=False)
    backup = places(rundir, near, far)
    store, run = begun(rundir, backup)
    save(store, run, 1)
    wait_until_copied(backup)
    with (rundir.path / "journal/0-0.jsonl").open("ab") as journal:
        journal.write(b'{"event": "step"}\n')
    save(store, run, 2)
    backup.close()

    assert sent.count("data/train.bin") == 1 and sent.count("journal/0-0.jsonl") in (1, 2)
    assert not (tmp_path / "far/run/data/train.bin").exists()
    assert (tmp_path / "far/run/data/tokenizer.json").exists(), "every place has what a run needs"
    there = RunDirectory(tmp_path / "there").create()
    download_run_files(place_at(f"file://{tmp_path}/near/run"), there)
    expected = files | {"journal/0-0.jsonl": files["journal/0-0.jsonl"] + b'{"event": "step"}\n'}
    assert {name: (there.path / name).read_bytes() for name in files} == expected


def test_the_end_waits_for_logs_that_are_being_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rundir = RunDirectory(tmp_path / "run").create()
    (rundir.path / "journal").mkdir(exist_ok=True)
    for name in ("0-0", "0-1"):
        (rundir.path / f"journal/{name}.jsonl").write_text("{}\n")
    backup = Backup(rundir, BackupSection(url=f"file://{tmp_path}/near"), run_name="run")
    send, is_sending = Objects.send, threading.Event()

    def slow(remote: Objects, key: str, path: Path):
        if key == "journal/0-0.jsonl":
            is_sending.set()
            assert not backup._stop.wait(0.3), "the end did not wait"
        return send(remote, key, path)

    monkeypatch.setattr(Objects, "send", slow)
    run, store = Run(), Store(rundir, KEEP_ONE, backup=backup)
    store.restore(run.parts)
    save(store, run, 1)
    assert is_sending.wait(DEADLINE_S)
    backup.close()
    assert {path.name for path in (tmp_path / "near/run/journal").iterdir()} >= {"0-0.jsonl", "0-1.jsonl"}


def test_a_backup_by_hand_goes_to_both_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rundir = RunDirectory(tmp_path / "run").create()
    run, store = Run(), Store(rundir, KEEP_ONE)
    store.restore(run.parts)
    save(store, run, 3)
    urls = [f"backup.url=file://{tmp_path}/near", f"second_backup.url=file://{tmp_path}/far"]
    assert main(["config", "show", "demo", *urls]) == 0
    rundir.recipe.write_text(capsys.readouterr().out)
    (rundir.path / "journal/0-0.jsonl").write_text('{"event": "start"}\n')

    assert main(["ckpt", "backup", str(rundir.path)]) == 0

    names = {path.name for path in tmp_path.glob("*/*/checkpoints/*")}
    assert names == {"step-000003.i001"} and len(list(tmp_path.glob("*/*/journal/0-0.jsonl"))) == 2
    assert len(remote_copies(rundir)["step-000003.i001"]) == 2
    assert capsys.readouterr().out.count("verified") == 2
