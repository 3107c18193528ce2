"""Who holds the checkpoints of a run while they are published, and from when on."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.test_services_over_time import repeated

from bloomery.cli import sync
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
