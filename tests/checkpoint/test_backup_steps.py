"""What a backup does at each look: what it sends where, what it leaves, and what several places share."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.checkpoint.format import catalogue
from bloomery.checkpoint.format.catalogue import (
    CommittedCheckpoint,
    checkpoints,
    record_copy,
    remote_copies,
)
from bloomery.checkpoint.format.manifest import MANIFEST, DamagedCheckpoint
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.format.suspects import SUSPECT, mark_suspects, marks_to_send, newest_trusted
from bloomery.checkpoint.remote import backup as backup_module
from bloomery.checkpoint.remote.backup import Backup
from bloomery.checkpoint.remote.backup_duty import (
    Duty,
    backed_up_round,
    backup_url,
    due,
    uncopied,
    write_duty,
)
from bloomery.checkpoint.remote.remote_run import (
    place_at,
    remote_checkpoints,
    remote_incarnations,
    tell_of_newer,
)
from bloomery.checkpoint.remote.shared_upload import UploadCoordinator, read_request
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.config.checkpoint import BackupSection
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects

NAMES = ["step-000010.i001", "step-000020.i001", "step-000030.i001"]


@pytest.fixture
def run(rundir: RunDirectory) -> RunDirectory:
    begin(rundir, base=None, reason="start")
    save(rundir, 10, 20)
    return rundir


def save(rundir: RunDirectory, *steps: int, **values: dict[str, Any]) -> None:
    for step in steps:
        entries = [whole("model.a", torch.full((3,), float(step)))]
        save_checkpoint(rundir.checkpoints, entries, step=step, incarnation=1, values=values)


@pytest.fixture
def section(tmp_path: Path) -> BackupSection:
    return BackupSection(url=f"file://{tmp_path}/elsewhere")


def backup_of(run: RunDirectory, section: BackupSection, place: str = "") -> Backup:
    return Backup(run, section, run_name="small", place=place)


def test_each_place_has_records_of_its_own_of_copies_files_and_marks(
    run: RunDirectory, section: BackupSection, tmp_path: Path
) -> None:
    (run.path / "journal" / "0.jsonl").write_text('{"event": "start"}\n')
    second = backup_of(run, section, "second")
    second._copy_all()
    assert {path.name for path in run.backups.iterdir()} == {
        f"{NAMES[0]}.second.json",
        f"{NAMES[1]}.second.json",
        "mounts.second.json",
        "run-files.second.json",
    }
    there = place_at(second.url)
    assert [one.name for one in remote_checkpoints(there)] == NAMES[:2]
    assert there.content("journal/0.jsonl") == b'{"event": "start"}\n'
    assert mark_suspects(run, checkpoints(run), clean_step=20, why="rank 3 erred") == []
    assert mark_suspects(run, checkpoints(run), clean_step=15, why="rank 3 erred") == NAMES[1:2]
    assert marks_to_send(run, "s3://without/copies", place="second") == {}
    assert set(marks_to_send(run, second.url, place="second")) == {NAMES[1]}
    second._copy_all()
    assert there.exists(f"checkpoints/{NAMES[1]}/{SUSPECT}")
    assert (run.backups / f"{NAMES[1]}.mark-sent.second").exists()
    assert marks_to_send(run, second.url, place="second") == {} != marks_to_send(run, second.url)
    mark_suspects(run, checkpoints(run), clean_step=15, why="another reason")
    assert set(marks_to_send(run, second.url, place="second")) == {NAMES[1]}, "a new mark is sent again"


def test_what_a_killed_process_asked_of_other_ranks_is_withdrawn_at_the_start(
    run: RunDirectory, section: BackupSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.backups.mkdir(exist_ok=True)
    UploadCoordinator(run, world=2).ask(NAMES[0], url="s3://another/place", files=[])
    assert read_request(run) is not None
    backup = backup_of(run, section)
    monkeypatch.setattr(backup, "_thread", SimpleNamespace(start=lambda: None))
    backup.wake()
    assert read_request(run) is None


def test_the_newest_that_is_trusted_is_taken(run: RunDirectory) -> None:
    save(run, 30)
    listed = checkpoints(run)
    assert newest_trusted(listed) == listed[2] and newest_trusted([]) is None
    (listed[2].directory / SUSPECT).write_text('{"why": "a bit"}')
    assert newest_trusted(listed) == listed[1]


def test_where_nothing_is_left_the_store_is_not_asked_and_a_new_incarnation_is_told(
    run: RunDirectory, section: BackupSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, asked = backup_of(run, section), list[str]()
    place = backup_module.place_at

    def watched(url: str) -> object:
        asked.append(url)
        return place(url)

    monkeypatch.setattr(backup_module, "place_at", watched)
    backup._copy_all()
    assert asked == [backup.url] and len(remote_incarnations(place(backup.url))) == 1
    backup._copy_all()
    assert len(asked) == 1
    backup._has_files_left = True
    backup._copy_all()
    assert len(asked) == 2 and not backup._has_files_left
    begin(run, base=(10, 1), reason="rewind")
    backup._copy_all()
    assert len(asked) == 3 and len(remote_incarnations(place(backup.url))) == 2
    backup._copy_all()
    assert len(asked) == 3
    write_duty(run, Duty(peer="north", writes=False, covered=-1))
    save(run, 40)
    backup._copy_all()
    assert len(asked) == 3, "another peer makes the backups"
    new = RunDirectory(run.path.parent / "new").create()
    begin(new, base=None, reason="start")
    backup_of(new, section)._copy_all()
    assert len(asked) == 3, "nothing of the run is there yet"


def test_logs_wait_for_a_checkpoint_that_is_due_and_for_the_end(
    run: RunDirectory, section: BackupSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, went_on = backup_of(run, section), list[bool]()

    def more(*given: object, place: str, go_on: Callable[[], bool]) -> None:
        went_on.append(go_on())

    monkeypatch.setattr(backup_module, "upload_logs_and_data", more)
    backup._copy_all()
    assert went_on == [True] and not backup._has_files_left and not backup._sends_files
    save(run, 30)
    backup._send_more(place_at(backup.url))
    assert went_on[1:] == [False] and backup._has_files_left
    backup._copy_all()
    backup._stop.set()
    backup._send_more(place_at(backup.url))
    assert went_on[2:] == [True, False] and backup._has_files_left


def test_what_is_saved_during_an_upload_goes_next_and_logs_that_failed_are_still_to_be_sent(
    run: RunDirectory, section: BackupSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, sent, back_up = backup_of(run, section), list[str](), backup_module._back_up

    def saving(rundir: RunDirectory, checkpoint: CommittedCheckpoint, *given: Any, **named: Any) -> None:
        back_up(rundir, checkpoint, *given, **named)
        sent.append(checkpoint.name)
        if len(sent) == 1:
            save(run, 30)

    def away(*given: object, **named: object) -> None:
        raise OSError(5, "the store is away")

    monkeypatch.setattr(backup_module, "_back_up", saving)
    monkeypatch.setattr(backup_module, "upload_logs_and_data", away)
    with pytest.raises(StorageError, match="logs and data"):
        backup._copy_all()
    assert sent == [NAMES[1], NAMES[2], NAMES[0]]
    assert backup._has_files_left and not backup._sends_files


def test_a_checkpoint_that_was_pruned_on_its_way_is_no_failure_and_any_other_is(
    run: RunDirectory, section: BackupSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, sent = backup_of(run, section), list[str]()

    def failing(
        rundir: RunDirectory, checkpoint: CommittedCheckpoint, *given: object, **named: object
    ) -> None:
        sent.append(checkpoint.name)
        assert [item.name for item in backup.in_use()][-1] == checkpoint.name
        if checkpoint.name == NAMES[1]:
            for path in checkpoint.directory.iterdir():
                path.unlink()
            checkpoint.directory.rmdir()
        raise StorageError("a file is gone", remedy="")

    monkeypatch.setattr(backup_module, "_back_up", failing)
    with pytest.raises(StorageError, match="a file is gone"):
        backup._copy_all()
    assert sent == [NAMES[1], NAMES[0]], "the newest goes first"


def test_a_checkpoint_that_is_damaged_here_keeps_nothing_else_from_being_sent(
    run: RunDirectory, section: BackupSection
) -> None:
    (data,) = (run.checkpoints / NAMES[1]).glob("model*.safetensors")
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    (run.path / "logs").mkdir(exist_ok=True)
    (run.path / "logs" / "rank-0").write_text("a line")
    backup = backup_of(run, section)
    for _ in range(2):
        with pytest.raises(DamagedCheckpoint, match=f"{data} is not what was saved"):
            backup._copy_all()  # which the thread tells, as a try that failed
    keys = {entry.key for entry in Objects(backup.url).entries()}
    assert f"checkpoints/{NAMES[0]}/{MANIFEST}" in keys and "logs/rank-0" in keys
    assert not [key for key in keys if NAMES[1] in key]


def test_what_is_being_sent_stays_and_what_is_due_where_pruning_waits(
    run: RunDirectory, section: BackupSection, tmp_path: Path
) -> None:
    waits, passes = (
        backup_of(run, section),
        backup_of(run, BackupSection(url=f"file://{tmp_path}/far", prune_waits=False)),
    )
    assert [item.name for item in waits.in_use()] == NAMES[:2] and passes.in_use() == []
    passes._sending = NAMES[0]
    assert [item.name for item in passes.in_use()] == NAMES[:1]


def test_what_is_due_is_newer_than_the_newest_copy_and_what_has_no_copy_is_uncopied(
    run: RunDirectory, section: BackupSection
) -> None:
    save(run, 30)
    url = backup_url(section, "small")
    record_copy(run, NAMES[1], url=f"{url}/checkpoints/{NAMES[1]}", what="all", bytes=1)

    def names(found: list[CommittedCheckpoint]) -> list[str]:
        return [item.name for item in found]

    assert names(uncopied(run, section, run_name="small")) == [NAMES[0], NAMES[2]]
    assert names(due(run, section, run_name="small")) == [NAMES[2]]
    every = BackupSection(url=section.url, every_steps=20)
    assert names(uncopied(run, every, run_name="other")) == [NAMES[1]]
    assert uncopied(run, BackupSection(), run_name="small") == []
    write_duty(run, Duty(peer="north", writes=False, covered=99))
    assert names(uncopied(run, section, run_name="small")) == NAMES, "another place, and no rounds"
    assert uncopied(run, section, run_name="small", place="second") == []
    assert backup_of(run, section, "second")._uncopied() == [] != backup_of(run, section)._uncopied()
    write_duty(run, Duty(peer="north", writes=True, covered=99))
    save(run, 40, outer={"round": 4, "inside": False})
    assert names(uncopied(run, section, run_name="small")) == NAMES, "another's backup covers that round"
    second = names(uncopied(run, section, run_name="small", place="second"))
    assert second == [*NAMES, "step-000040.i001"], "at a further place nobody else's counts"


def test_the_place_of_a_runs_backups_is_its_own_and_each_peers(section: BackupSection) -> None:
    duty = Duty(peer="north", writes=True, covered=0)
    assert backup_url(BackupSection(url="s3://b/runs/"), "small") == "s3://b/runs/small"
    assert backup_url(BackupSection(url="s3://b"), "small", duty) == "s3://b/small/north"
    assert backup_url(BackupSection(), "small", duty) == ""


def test_only_the_first_place_counts_rounds(
    run: RunDirectory, section: BackupSection, tmp_path: Path
) -> None:
    write_duty(run, Duty(peer="north", writes=True, covered=-1))
    save(run, 30, outer={"round": 4, "inside": False})
    backup_of(run, BackupSection(url=f"file://{tmp_path}/far"), "second")._copy_all()
    assert backed_up_round(run) == -1 and NAMES[2] in remote_copies(run)
    backup_of(run, section)._copy_all()
    assert backed_up_round(run) == 4


def test_one_failure_is_told_once_until_it_works(
    run: RunDirectory,
    section: BackupSection,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backup, ends = backup_of(run, section), list[str]()
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        if not results:
            backup._stop.set()
        return True

    def look() -> None:
        result = results.pop(0)
        if result:
            raise StorageError(result, remedy="Mend it.")

    results = ["no space", "no space", "no route", "", "no route"]
    monkeypatch.setattr(backup, "_copy_all", look)
    monkeypatch.setattr(backup, "_wake", SimpleNamespace(wait=wait, clear=lambda: None))
    backup.on_all_copied = lambda: ends.append("copied")
    backup._run()
    assert [record.message.partition(" Mend")[0].split("\n")[0] for record in caplog.records] == [
        "no space",
        "no route",
        "no route",
    ]
    assert waits == [10.0, 20.0, 40.0, 600.0, 600.0] and (backup._tries, backup._failed_try) == (5, 5)
    write_duty(run, Duty(peer="north", writes=False, covered=-1))
    results, waits[:] = [""], []
    backup._stop.clear()
    backup._run()
    assert waits == [5.0], "who makes no backups looks often whether it is to"


def test_a_backup_that_was_never_woken_ends_without_a_word_of_copies(
    run: RunDirectory, section: BackupSection, caplog: pytest.LogCaptureFixture
) -> None:
    backup = backup_of(run, section)
    backup.on_all_copied = lambda: pytest.fail("nothing was copied")
    backup.close()
    assert "2 checkpoint(s) are not backed up" in caplog.text
    backup._copy_all()
    caplog.clear()
    backup.close()
    assert not caplog.text


def test_a_run_goes_on_from_backups_that_are_whole_early_enough_and_trusted(
    run: RunDirectory, section: BackupSection, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(run, 30)
    backup_of(run, section)._copy_all()
    new = RunDirectory(tmp_path / "new").create()
    backup = backup_of(new, section)

    def names(**how: Any) -> list[str]:
        return [copy.name for copy in backup.restorable(**how)]

    assert names() == NAMES[::-1]
    assert f"nothing is here: going on from the backup {backup.url}/checkpoints/{NAMES[2]}" in caplog.text
    assert new.incarnation(1).exists()
    caplog.clear()
    assert names(up_to_step=20, warns=False) == NAMES[1::-1] and not caplog.text
    assert names(instead_of=[NAMES[2]]) == NAMES[1::-1]
    assert "no checkpoint here can be gone on from" in caplog.text
    assert names(up_to_step=9, warns=False) == names(up_to_step=0, warns=False) == []
    with pytest.raises(CheckpointError, match="every checkpoint is suspect") as refused:
        names(instead_of=[*NAMES, "step-000040.i001"])
    assert ", ".join([*NAMES, "step-000040.i001"]) in refused.value.message, "also what only this place has"
    there = place_at(backup.url)
    there.put(f"checkpoints/{NAMES[1]}/{MANIFEST}", b"{")
    assert names(warns=False) == NAMES[::-1], "whose manifest is damaged is told when it is loaded"
    caplog.clear()
    tell_of_newer([], here="one")
    assert not caplog.text
    tell_of_newer(backup.restorable(warns=False), here=NAMES[0])
    assert NAMES[0] in caplog.text and f"{backup.url}/checkpoints/{NAMES[2]}" in caplog.text


def test_only_backups_that_are_newer_than_what_is_here_are_gone_on_from(
    run: RunDirectory, section: BackupSection, tmp_path: Path
) -> None:
    here = RunDirectory(tmp_path / "here")
    shutil.copytree(run.path, here.path)
    save(run, 30)
    backup_of(run, section)._copy_all()
    assert [copy.name for copy in backup_of(here, section).newer()] == NAMES[2:]
    assert backup_of(run, section).newer() == []
    behind = RunDirectory(tmp_path / "behind")
    shutil.copytree(here.path, behind.path)
    shutil.rmtree(behind.checkpoints / NAMES[0])
    begin(run, base=(10, 1), reason="the others went back, and on")
    backup_of(run, section)._copy_all()
    found = [copy.name for copy in backup_of(behind, section).newer()]
    assert found == NAMES[:1], "nothing that is here is part of the run any more"
    other = RunDirectory(tmp_path / "other").create()
    assert backup_of(other, section).newer() == [], "what has nothing restores"
    shutil.copytree(run.incarnations, other.incarnations, dirs_exist_ok=True)
    assert backup_of(other, section).newer() == [], "nor what has the lives of the run alone"
    shutil.rmtree(other.path)
    other.create()
    begin(other, base=None, reason="another start")
    save(other, 10)
    assert backup_of(other, section).newer() == [], "it is another run's"


def test_the_weights_alone_are_no_run_to_go_on_from(
    run: RunDirectory, section: BackupSection, tmp_path: Path
) -> None:
    backup_of(run, replace(section, what="model"))._copy_all()
    new = RunDirectory(tmp_path / "new").create()
    with pytest.raises(
        CheckpointError, match=r"(?s)hold the weights alone.*choose another run\.name or backup\.url"
    ):
        backup_of(new, section).restorable()
    assert backup_of(new, section).newer() == []
    here = RunDirectory(tmp_path / "here")
    shutil.copytree(run.path, here.path)
    save(run, 30)
    backup_of(run, replace(section, what="model"))._copy_all()
    assert backup_of(here, section).newer() == [], "though they are newer than what is here"


def test_a_look_reads_no_records_of_checkpoints_that_are_gone_and_no_more_for_many_files(
    run: RunDirectory, section: BackupSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: Counter[str] = Counter()
    for name in ("_read", "read_incarnations"):
        read = getattr(catalogue, name)
        monkeypatch.setattr(
            catalogue, name, lambda of, name=name, read=read: reads.update([name]) or read(of)
        )
    counts = []
    for past, files in ((0, 2), (30, 20)):
        for step in range(1000, 1000 + past):
            name = f"step-{step:06d}.i001"
            record_copy(run, name, url=f"{section.url}/small/checkpoints/{name}", what="all", bytes=1)
        for rank in range(files):
            (run.path / "journal" / f"0-{rank}.jsonl").write_text('{"event": "start"}\n' * (past + 1))
        backup = backup_of(run, section)
        save(run, 21 + past)
        reads.clear()
        backup._has_files_left = True
        backup._copy_all()
        assert backup.due() == [] and marks_to_send(run, backup.url) == {}
        assert place_at(backup.url).exists(f"journal/0-{files - 1}.jsonl")
        counts.append((reads["_read"], reads["read_incarnations"]))
    assert counts[0][0] <= 40 >= counts[1][0], "of 33 checkpoints and 20 files they were 1,500"
    assert counts[0][1] <= 8 >= counts[1][1]
