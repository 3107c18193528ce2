"""Which run a checkpoint is of, and who holds checkpoints while they are published."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.test_services_over_time import repeated

from bloomery.checkpoint.format.manifest import MANIFEST
from bloomery.cli import ckpt, run_inputs, sync
from bloomery.errors import CheckpointError
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.sync.keeper import SyncTurn


def test_the_sync_that_sends_a_run_holds_its_checkpoints_once_and_no_other_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir, begun = RunDirectory(tmp_path / "run").create(), list[Any]()
    publisher = SimpleNamespace(is_waiting=False)

    def thread(*, target: Any, args: Any, daemon: bool) -> Any:
        return SimpleNamespace(start=lambda: begun.append((target is sync._hold, args, daemon)))

    monkeypatch.setattr("threading.Thread", thread)

    def repeat(publisher: Any, *, beside: bool = False) -> list[Any]:
        begun.clear()
        repeated(monkeypatch, rundir, ends_at=3, look=lambda *given: None, publisher=publisher, beside=beside)
        return begun

    assert repeat(publisher) == [(True, (rundir, publisher), True)]
    assert repeat(None) == []
    other = SyncTurn(rundir)
    assert other.is_ours() and repeat(publisher, beside=True) == []
    os.close(other._file)  # as the kernel does when a process ends
    assert len(repeat(publisher, beside=True)) == 1


def test_a_checkpoint_that_is_given_from_beside_it_is_one_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "mine").create()
    inside = run.checkpoints / "step-000005.i001"
    inside.mkdir()
    (inside / MANIFEST).touch()
    with run.journal().open("w") as journal:
        journal.write('{"event": "receipt", "checkpoint": "step-000005.i001"}\n')
    monkeypatch.chdir(run.checkpoints)
    source = run_inputs.one_checkpoint(inside.name)
    assert source.place() == str(inside) and len(ckpt.receipts_of(source)) == 1
    assert [source.place() for source in ckpt._sources_at(inside.name)] == [str(inside)]
    with pytest.raises(CheckpointError) as refused:
        run_inputs.run_directory(Path(inside.name))
    assert refused.value.remedy == f"Give its run: {run.path}."
