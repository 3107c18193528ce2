"""The backup of a run as the place it goes on from, and what counts as backed up."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.checkpoint.object_store import ObjectStore
from tests.checkpoint.small_run import Run

from bloomery.checkpoint.format.catalogue import checkpoints, record_copy, remote_copies, verify
from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.checkpoint.format.suspects import SUSPECT, why_suspect
from bloomery.checkpoint.load.loader import read_tensors
from bloomery.checkpoint.remote import backup as backup_module
from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.remote.backup_duty import due
from bloomery.checkpoint.remote.remote_run import (
    remote_checkpoints,
    remote_incarnations,
    remote_source,
)
from bloomery.checkpoint.remote.transfer import download_checkpoint, upload_checkpoint
from bloomery.config.checkpoint import BackupSection, CheckpointSection
from bloomery.errors import CheckpointError
from bloomery.events.incarnation import begin, read_incarnations
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects
from bloomery.train.checkpoint_store import Store
from bloomery.train.loop import train
from bloomery.train.saved_state import RunStateToSave
from bloomery.train.settings import StartOptions

KEEP_ONE = CheckpointSection(keep_last=1, keep_tenths=False)
KEEP_ALL = CheckpointSection(keep_last=1000)
DEADLINE_S = 120.0


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/elsewhere"


def begun(
    rundir: RunDirectory, url: str, *, keeping: CheckpointSection = KEEP_ALL, **more
) -> tuple[Store, Backup, Run]:
    backup = Backup(rundir, BackupSection(url=url, **more), run_name="run")
    run, store = Run(), Store(rundir, keeping, backup=backup)
    store.restore(run.parts)
    return store, backup, run


def save(store: Store, run: Run, *steps: int) -> None:
    for step in steps:
        store.save(RunStateToSave(run.fill(step).parts, step=step))


def backed_up_run(path: Path, url: str, *steps: int) -> RunDirectory:
    rundir = RunDirectory(path).create()
    store, backup, run = begun(rundir, url)
    save(store, run, *steps)
    backup.close()
    return rundir


def test_a_restored_run_that_dies_before_its_first_save_goes_on_from_the_backup_again(
    tmp_path: Path, url: str
):
    shutil.rmtree(backed_up_run(tmp_path / "run", url, 7).path)
    rundir = RunDirectory(tmp_path / "run").create()
    for incarnation in (2, 3, 4):
        store, backup, run = begun(rundir, url)
        assert run.equals(Run().fill(7)) and store.incarnation == incarnation
        backup.close()
    assert read_incarnations(rundir) == {1: None, 2: (7, 1), 3: (7, 1), 4: (7, 1)}
    save(store, run, 8)
    store, _, run = begun(rundir, url)
    assert run.equals(Run().fill(8))


def test_a_start_that_lost_only_its_checkpoints_learns_of_what_another_machine_did_meanwhile(
    tmp_path: Path, url: str
):
    here = backed_up_run(tmp_path / "here", url, 7)
    shutil.rmtree(here.checkpoints)
    there = RunDirectory(tmp_path / "there").create()
    store, backup, run = begun(there, url)
    save(store, run, 9)
    backup.close()
    store, _, run = begun(here, url)
    assert run.equals(Run().fill(9)) and store.incarnation == 3


def test_a_start_takes_a_newer_backup_before_its_own_stale_checkpoint_and_says_so(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
):
    here = backed_up_run(tmp_path / "here", url, 7)
    there = RunDirectory(tmp_path / "there").create()
    store, backup, run = begun(there, url)
    save(store, run, 9, 11)
    backup.close()
    store, backup, run = begun(here, url)
    assert run.equals(Run().fill(11)) and store.incarnation == 3
    assert "step-000007.i001" in caplog.text and "step-000011.i002" in caplog.text
    save(store, run, 12)
    backup.close(wait_s=DEADLINE_S)
    assert backup.due() == [], "the backup knows this machine's life too"
    caplog.clear()
    store, backup, run = begun(here, url)
    assert run.equals(Run().fill(12)) and store.incarnation == 4 and not caplog.text


def test_a_start_whose_own_checkpoint_is_as_new_takes_it_also_where_the_backup_cannot_be_reached(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    here = backed_up_run(tmp_path / "here", url, 7)
    caplog.clear()
    _, _, run = begun(here, url)
    assert run.equals(Run().fill(7)) and not caplog.text

    def unreached(*arguments: object, **more: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("bloomery.checkpoint.remote.backup.remote_checkpoints", unreached)
    _, _, run = begun(here, url)
    assert run.equals(Run().fill(7)) and "could not be checked whether" in caplog.text


def test_a_run_that_two_machines_went_on_with_apart_is_refused_until_somebody_chooses(
    tmp_path: Path, url: str
):
    here = backed_up_run(tmp_path / "here", url, 7)
    store, backup, run = begun(RunDirectory(tmp_path / "there").create(), url)
    save(store, run, 9)
    backup.close()
    begin(here, base=(7, 1), reason="a start that died before its first save")
    with pytest.raises(CheckpointError, match="both continued as incarnation 2") as refused:
        begun(here, url)
    assert "move" in refused.value.remedy
    (here.path).rename(tmp_path / "moved")
    _, _, run = begun(here.create(), url)
    assert run.equals(Run().fill(9))


def test_a_start_without_a_checkpoint_is_refused_where_the_backups_are_another_runs(tmp_path: Path, url: str):
    backed_up_run(tmp_path / "one", url, 7)
    other = RunDirectory(tmp_path / "other").create()
    begin(other, base=None, reason="another start")
    with pytest.raises(CheckpointError, match="belongs to another run") as refused:
        begun(other, url)
    assert "backup.url" in refused.value.remedy
    assert read_incarnations(other) == {1: None}


def test_what_a_rewind_abandoned_is_not_gone_on_from(tmp_path: Path, url: str):
    rundir = RunDirectory(tmp_path / "run").create()
    store, backup, run = begun(rundir, url)
    save(store, run, 10, 20, 30)
    backup.close()
    _, backup, run = begun(rundir, url)
    store = Store(rundir, KEEP_ALL, backup=backup)
    store.restore(run.parts, reason="rewind", up_to_step=15)
    until(lambda: len(remote_incarnations(Objects(f"{url}/run"))) == 3)
    backup.close()
    remote = Objects(f"{url}/run")
    assert [source.name for source in remote_checkpoints(remote)] == ["step-000010.i001"]
    assert len(remote_checkpoints(remote, abandoned=True)) == 3
    assert remote_source(f"{url}/run").name == "step-000010.i001"
    shutil.rmtree(rundir.path)
    store, _, run = begun(rundir.create(), url)
    assert run.equals(Run().fill(10)) and store.incarnation == 4


def test_a_rewind_behind_all_that_is_here_goes_back_to_the_backup(tmp_path: Path, url: str):
    shutil.rmtree(backed_up_run(tmp_path / "run", url, 5, 10).path)
    store, _, run = begun(RunDirectory(tmp_path / "run").create(), url)
    assert run.equals(Run().fill(10))
    restored = store.restore(run.parts, reason="rewind", up_to_step=8)
    assert restored is not None and restored.step == 5 and run.equals(Run().fill(5))
    assert store.restore(run.parts, reason="rewind", up_to_step=4) is None


def marks(url: str) -> set[str]:
    return {item.name for item in remote_checkpoints(Objects(url + "/run")) if item.is_marked}


def test_backups_bear_the_marks_of_suspects_also_of_those_that_are_no_longer_here(tmp_path: Path, url: str):
    rundir = RunDirectory(tmp_path / "run").create()
    store, backup, run = begun(rundir, url, keeping=KEEP_ONE)
    for step in (5, 10, 15):
        save(store, run, step)
        until(lambda: not backup.due())
    assert len(remote_copies(rundir)) == 3 and [item.step for item in checkpoints(rundir)] == [15]
    assert store.mark_suspects(clean_step=7, why="rank 3 erred") == ["step-000015.i001"]
    backup.close()
    assert marks(url) == {"step-000010.i001", "step-000015.i001"}
    assert remote_source(url + "/run").name == "step-000005.i001"
    shutil.rmtree(rundir.path)
    restored = RunDirectory(tmp_path / "restored").create()
    _, _, run = begun(restored, url)
    assert run.equals(Run().fill(5))


def test_a_start_whose_own_checkpoints_are_suspect_takes_an_older_backup(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
):
    rundir = backed_up_run(tmp_path / "run", url, 5, 10)
    shutil.rmtree(rundir.checkpoints / "step-000005.i001")
    store, backup, _ = begun(rundir, url)
    store.mark_suspects(clean_step=7, why="rank 3 erred")
    backup.close(wait_s=DEADLINE_S)
    store, backup, run = begun(rundir, url)
    assert run.equals(Run().fill(5)) and "no checkpoint here can be gone on from" in caplog.text
    backup.close(wait_s=0)


def test_where_all_backups_are_suspect_no_run_begins_anew(tmp_path: Path, url: str):
    rundir = RunDirectory(tmp_path / "run").create()
    run, store = Run(), Store(rundir, KEEP_ALL)
    store.restore(run.parts)
    save(store, run, 5, 10)
    store.mark_suspects(clean_step=0, why="rank 3 erred")
    place = Objects(url + "/run")
    for checkpoint in checkpoints(rundir):
        upload_checkpoint(checkpoint.directory, place, notes=tmp_path / "notes")
    assert marks(url) == {"step-000005.i001", "step-000010.i001"}
    with pytest.raises(CheckpointError, match=r"every checkpoint is suspect.*000005.*000010") as refused:
        begun(RunDirectory(tmp_path / "other").create(), url)
    assert SUSPECT in refused.value.remedy
    with pytest.raises(CheckpointError, match="every checkpoint is suspect"):
        remote_source(url + "/run")
    fetched = download_checkpoint(remote_source(f"{url}/run/checkpoints/step-000010.i001"), tmp_path / "copy")
    assert why_suspect(fetched) == "rank 3 erred", "the copy of a suspect is one"


def test_a_backup_whose_manifest_is_other_json_is_passed_over_where_the_newest_intact_one_is_asked_for(
    tmp_path: Path, url: str
):
    shutil.rmtree(backed_up_run(tmp_path / "run", url, 5, 10).path)
    other = Path(url.removeprefix("file://"), "run/checkpoints/step-000010.i001/manifest.json")
    other.write_text("{}")
    backup = Backup(RunDirectory(tmp_path / "run").create(), BackupSection(url=url), run_name="run")
    run, store = Run(), Store(RunDirectory(tmp_path / "run"), KEEP_ALL, backup=backup)
    with pytest.raises(CheckpointError, match=r"000010/?.* is not the manifest of a bloomery checkpoint"):
        store.restore(run.parts)
    restored = store.restore(run.parts, fallback=True)
    assert restored is not None and restored.step == 5 and run.equals(Run().fill(5))
    backup.close(wait_s=0)


def names_due(rundir: RunDirectory, url: str, **more) -> list[int]:
    return [found.step for found in due(rundir, BackupSection(url=url, **more), run_name="run")]


def test_only_a_copy_at_the_runs_own_place_and_of_all_that_is_asked_for_counts(tmp_path: Path, url: str):
    rundir = backed_up_run(tmp_path / "run", url, 7)
    assert names_due(rundir, url) == [] == names_due(rundir, f"{url}/")
    assert names_due(rundir, f"{url}-2") == [7], "another place"
    assert [found.step for found in due(rundir, BackupSection(url=url), run_name="other")] == [7]
    assert names_due(rundir, url, what="model") == [], "all holds the weights, too"
    name, place = "step-000007.i001", f"{url}/run/checkpoints/step-000007.i001"
    record_copy(rundir, name, url="s3://else/checkpoints/step-000007.i001", what="model", bytes=1)
    assert names_due(rundir, url) == [], "a second copy does not make the first forgotten"
    record_copy(rundir, name, url=place, what="model", bytes=1)
    assert names_due(rundir, url) == [7] and names_due(rundir, url, what="model") == []
    (rundir.backups / f"{name}.json").write_text(
        f'{{"url": "{place}", "bytes": 1, "what": "all", "time": 0}}'
    )
    assert names_due(rundir, url) == [], "as earlier versions wrote it"
    (rundir.backups / f"{name}.json").write_text("{")
    assert names_due(rundir, url) == [7] and remote_copies(rundir) == {}


def test_a_record_of_another_place_or_of_the_weights_alone_lets_nothing_go(
    tmp_path: Path, object_store: ObjectStore
):
    """The place that is asked for now refuses: what an earlier setting copied must not count for it."""
    rundir, elsewhere = RunDirectory(tmp_path / "run").create(), f"file://{tmp_path}/elsewhere"
    for more in ({"what": "model"}, {}):
        store, backup, run = begun(rundir, elsewhere if more else object_store.new_bucket(), **more)
        with object_store.checking_credentials():
            save(store, run, *((1, 2) if more else (3,)))
            backup.close(wait_s=DEADLINE_S)
    store = Store(rundir, KEEP_ONE, backup=backup)
    store.restore(run.parts)
    with object_store.checking_credentials():
        save(store, run, 4)
    assert [found.step for found in store.checkpoints()] == [1, 2, 3, 4]


def test_the_weights_alone_never_take_the_place_of_a_whole_copy(tmp_path: Path, url: str):
    rundir = backed_up_run(tmp_path / "run", url, 7)
    done = upload_checkpoint(
        rundir.checkpoints / "step-000007.i001", Objects(f"{url}/run"), what="model", notes=tmp_path / "notes"
    )
    assert (done.what, done.bytes_sent) == ("all", 0)
    source = remote_source(f"{url}/run")
    assert verify(source) == [] and "parts" not in read_manifest(source).about


def test_the_weights_of_a_run_in_bf16_are_backed_up_alone_and_bit_for_bit(start, url: str):
    def go() -> Path:
        loaded, path = start(
            *("train.precision=bf16", "guard.stop_at_step=4", "checkpoint.every_steps=2"),
            *(f"backup.url={url}", "backup.what=model", "evaluate.every_steps=0"),
        )
        train(loaded, RunDirectory(path), StartOptions(say=lambda line: None))
        return path

    path = go()
    source, here = remote_source(f"{url}/tiny"), checkpoints(RunDirectory(path))[-1].directory
    assert verify(source) == [] and read_manifest(source).about["parts"] == ["model"]
    copied, whole = dict(read_tensors(source)), dict(read_tensors(here))
    assert set(copied) == {name for name in whole if name.startswith("model.")} < set(whole)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in copied.items())
    assert {tensor.dtype for tensor in copied.values()} == {torch.float32}, "the masters, not bf16 copies"
    names_there = {listed.key.rpartition("/")[2] for listed in Objects(f"{url}/tiny").entries("checkpoints/")}
    assert not any(name.startswith("optim") for name in names_there)
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="hold the weights alone") as refused:
        go()
    assert "run.name" in refused.value.remedy


def test_the_end_of_a_run_hears_once_that_all_is_copied_and_only_where_it_waited_for_that(
    rundir: RunDirectory, url: str
):
    told: list[str] = []

    def watched() -> tuple[Store, Backup, Run]:
        store, backup, run = begun(rundir, url)
        backup.on_all_copied = lambda: told.append(url)
        return store, backup, run

    store, backup, run = watched()
    save(store, run, 10)
    backup.close()
    assert told == [url] and not backup.due()
    store, backup, run = watched()
    save(store, run, 20)
    backup.close(wait_s=DEADLINE_S)
    assert told == [url] and not backup.due()


def test_what_failed_on_the_way_is_tried_once_more_at_the_end(
    rundir: RunDirectory, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backup_module, "_LONGEST_WAIT_S", 3600.0)
    monkeypatch.setattr(backup_module, "_SHORTEST_WAIT_S", 3600.0)  # by itself it would not be tried again
    store, backup, run = begun(rundir, object_store.new_bucket())
    with object_store.checking_credentials():
        save(store, run, 1)
        until(lambda: backup._told)
    backup.close(wait_s=DEADLINE_S)
    assert backup.due() == []


def until(seen: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_backup_of_the_last_clean_step_is_not_marked(tmp_path: Path):
    url = f"file://{tmp_path}/elsewhere"
    rundir = RunDirectory(tmp_path / "run").create()
    store, backup, run = begun(rundir, url, keeping=KEEP_ONE)
    for step in (5, 10):
        save(store, run, step)
        until(lambda: not backup.due())
    assert store.mark_suspects(clean_step=5, why="rank 3 erred") == ["step-000010.i001"]
    backup.close()
    assert marks(url) == {"step-000010.i001"}
