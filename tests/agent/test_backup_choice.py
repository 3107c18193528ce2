"""Who backs a run up, as its members see it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.protocol import example

from bloomery.agent import backup_choice
from bloomery.agent.backup_choice import BackupChoice
from bloomery.checkpoint.remote.backup_duty import Duty, read_duty
from bloomery.coordination.snapshot import ListedMember, RunSnapshot
from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory


def listed(**members: tuple[int, int | None]) -> RunSnapshot:
    """Life and newest backed-up round of each member."""
    return RunSnapshot(
        commits={8: example.commit(round=8)},
        members={
            name: ListedMember(
                member=example.member(
                    peer=name,
                    incarnation="1",
                    addresses=(),
                    serves=(),
                    round=3,
                    digest="d",
                    ranks=1,
                    recipe="r",
                    samples=4,
                    backed_up=backed_up,
                ),
                life=life,
                modified=life,
                seen_s=0.0,
                said_s=0.0,
            )
            for name, (life, backed_up) in members.items()
        },
    )


def test_the_first_that_can_backs_up_the_next_takes_over_and_what_is_confirmed_stays_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rundir = RunDirectory(tmp_path / "b")
    backups = BackupChoice(rundir, me="b")
    assert read_duty(rundir) == Duty(peer="b", writes=False, covered=-1)
    backups.update(listed(b=(9, -1), c=(5, 9)))  # round 9 is not committed yet
    assert read_duty(rundir) == Duty(peer="b", writes=False, covered=-1)
    backups.update(listed(a=(1, None), b=(9, -1), c=(5, 7)))  # a makes no backups
    assert read_duty(rundir) == Duty(peer="b", writes=False, covered=7)
    backups.update(listed(a=(1, None), b=(9, -1), d=(12, 3)))  # c is gone
    assert read_duty(rundir) == Duty(peer="b", writes=True, covered=7)
    assert caplog.messages == ["this peer makes the backups of the run"]
    backups.update(listed(a=(1, None), d=(12, 8)))  # b is not listed: it says nothing anew
    assert read_duty(rundir) == Duty(peer="b", writes=True, covered=7)
    assert BackupChoice(rundir, me="b") and read_duty(rundir) == Duty(peer="b", writes=False, covered=7)


def test_a_duty_that_could_not_be_written_is_written_with_the_next_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rundir = RunDirectory(tmp_path / "a")
    backups = BackupChoice(rundir, me="a")

    def full(rundir: RunDirectory, duty: Duty) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(backup_choice, "write_duty", full)
        backups.update(listed(a=(1, -1)))
    assert "the disk is full" in caplog.text and read_duty(rundir) == Duty(peer="a", writes=False, covered=-1)
    backups.update(listed(a=(1, -1)))
    assert read_duty(rundir) == Duty(peer="a", writes=True, covered=-1)
