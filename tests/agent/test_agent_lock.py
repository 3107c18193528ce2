"""Two agents on one run directory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bloomery import durable
from bloomery.agent.agent_lock import only_agent
from bloomery.errors import RunBusy, StorageError
from bloomery.events.run_directory import RunDirectory


def test_a_second_agent_on_a_run_directory_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path / "run")
    with only_agent(rundir):
        told = rf"\(process {os.getpid()}\) leads the peer of"
        with pytest.raises(RunBusy, match=told) as busy, only_agent(rundir, wait_s=0.0):
            raise AssertionError
        assert "another --run" in busy.value.remedy
    with only_agent(rundir, wait_s=0.0):
        pass


def test_a_file_system_without_locks_hinders_no_agent_and_one_that_refuses_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, **how: object) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(durable, "try_lock", refuse)
    with only_agent(RunDirectory(tmp_path / "run")):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(StorageError), only_agent(RunDirectory(tmp_path / "file" / "run")):
        raise AssertionError
