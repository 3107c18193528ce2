"""Checkpoints that silent corruption may have spoiled are marked, and nothing goes on from them silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.small_run import Run
from tests.checkpoint.test_store import begun, save_at

from bloomery.checkpoint.format.catalogue import checkpoints, record_copy
from bloomery.checkpoint.format.suspects import (
    SUSPECT,
    mark_suspects,
    marks_to_send,
    send_marks,
    trusted,
    unmarked,
    why_suspect,
)
from bloomery.cli import main
from bloomery.errors import CheckpointError
from bloomery.evaluate.saved_files import _newest_of
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects


def facts_of(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["ckpt", "show", str(checkpoint), "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_a_start_and_a_rewind_pass_over_what_is_suspect_and_say_so(
    rundir: RunDirectory, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run()
    store, _ = begun(rundir, run)
    save_at(store, run, 10, 20, 30)
    names = store.mark_suspects(clean_step=15, why="rank 3 erred")
    assert names == ["step-000020.i001", "step-000030.i001"]
    assert store.reaches_back_to(25) and store.newest(up_to_step=25).step == 10
    read = [_newest_of(rundir.path, fallback=fallback).name for fallback in (False, True)]
    assert read == ["step-000010.i001"] * 2, "nor does a command that only reads take it"
    store, restored = begun(rundir, run)
    assert restored is not None and restored.step == 10 and run.equals(Run().fill(10))
    assert "step-000030.i001 is passed over as suspect: rank 3 erred" in caplog.text
    shown = [
        facts_of(rundir.checkpoints / name, capsys)["suspect"] for name in ("step-000010.i001", names[0])
    ]
    assert shown == ["", "rank 3 erred"]


def test_a_copy_in_memory_of_what_is_marked_on_the_disk_is_not_gone_on_from(rundir: RunDirectory) -> None:
    run = Run()
    store, _ = begun(rundir, run)
    save_at(store, run, 10, 20, 30)
    store.mark_suspects(clean_step=15, why="rank 3 erred")
    assert unmarked(rundir, [(10, 1), (20, 1), (30, 1), (40, 1), (40, 0)]) == {(10, 1), (40, 1)}
    (rundir.checkpoints / "step-000030.i001" / SUSPECT).unlink()  # a person trusts it
    assert unmarked(rundir, [(20, 1), (30, 1)]) == {(30, 1)}


def test_a_run_of_suspects_alone_is_refused_until_a_person_trusts_one(rundir: RunDirectory) -> None:
    run = Run()
    store, _ = begun(rundir, run)
    save_at(store, run, 10, 20)
    store.mark_suspects(clean_step=0, why="rank 3 erred")
    assert not store.reaches_back_to(20)
    with pytest.raises(
        CheckpointError, match=r"(?s)every checkpoint is suspect.*remove suspect\.json from one you trust"
    ) as refused:
        begun(rundir, run)
    assert SUSPECT in refused.value.remedy
    (rundir.checkpoints / "step-000010.i001" / SUSPECT).unlink()
    _, restored = begun(rundir, run)
    assert restored is not None and restored.step == 10


def test_who_only_looks_which_are_trusted_is_told_nothing_of_the_others(
    rundir: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    store, _ = begun(rundir, run)
    save_at(store, run, 10, 20, 30)
    store.mark_suspects(clean_step=10, why="rank 3 erred")
    (rundir.checkpoints / "step-000030.i001" / SUSPECT).unlink()
    caplog.clear()
    assert [item.step for item in trusted(checkpoints(rundir))] == [10, 30] and not caplog.text
    assert [item.step for item in trusted(checkpoints(rundir), warns=True)] == [10, 30]
    assert caplog.text.count("passed over") == 1 and "step-000020.i001 is passed over" in caplog.text


@pytest.mark.parametrize("content", ["", "[]", json.dumps({"time": 1})])
def test_a_mark_that_is_damaged_counts(tmp_path: Path, content: str) -> None:
    assert why_suspect(tmp_path) == ""
    (tmp_path / SUSPECT).write_text(content)
    assert why_suspect(tmp_path) == "its mark cannot be read"
    (tmp_path / SUSPECT).unlink()
    (tmp_path / SUSPECT).mkdir()
    assert why_suspect(tmp_path) == "its mark cannot be read"


def test_backups_of_what_a_rewind_abandoned_are_not_marked(rundir: RunDirectory) -> None:
    begin(rundir, base=None, reason="start")
    begin(rundir, base=(5, 1), reason="rewind")
    for name in ("step-000005.i001", "step-000010.i001", "step-000012.i002"):
        record_copy(rundir, name, url=f"s3://b/checkpoints/{name}", what="all", bytes=1)
    assert mark_suspects(rundir, [], clean_step=4, why="rank 3 erred") == []
    noted = sorted(path.name for path in rundir.backups.glob("*.mark"))
    assert noted == ["step-000005.i001.mark", "step-000012.i002.mark"]


def test_a_mark_that_could_not_be_sent_is_still_to_be_sent(
    rundir: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise OSError(5, "no answer")

    begin(rundir, base=None, reason="start")
    remote, name = Objects(f"file://{tmp_path}/store"), "step-000005.i001"
    record_copy(rundir, name, url=f"{remote.url}/checkpoints/{name}", what="all", bytes=1)
    mark_suspects(rundir, [], clean_step=4, why="rank 3 erred")
    with monkeypatch.context() as cut:
        cut.setattr(Objects, "put", away)
        with pytest.raises(OSError, match="no answer"):
            send_marks(rundir, remote)
    assert list(marks_to_send(rundir, remote.url)) == [name]
    send_marks(rundir, remote)
    assert remote.exists(f"checkpoints/{name}/{SUSPECT}") and marks_to_send(rundir, remote.url) == {}


def test_a_backup_of_the_weights_alone_is_marked_as_well(rundir: RunDirectory, tmp_path: Path) -> None:
    begin(rundir, base=None, reason="start")
    remote, name = Objects(f"file://{tmp_path}/store"), "step-000005.i001"
    record_copy(rundir, name, url=f"{remote.url}/checkpoints/{name}", what="model", bytes=1)
    mark_suspects(rundir, [], clean_step=4, why="rank 3 erred")
    send_marks(rundir, remote)
    assert remote.exists(f"checkpoints/{name}/{SUSPECT}")
