"""Disks that are full or cannot be written to: told, and what was saved stays whole."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.faults.commands import Said, bloomery, events, running, steps_told
from tests.machine import may_mount, mounted

from bloomery.errors import free_bytes

Train = Callable[..., list[str]]
Here = Callable[..., Said]
QUIET = ("evaluate.every_steps=0", "checkpoint.every_steps=0")
MOUNT = "root, to mount a file system"


def fill(disk: Path, *, leave: int) -> Path:
    """Take all of a disk but `leave` bytes."""
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, free_bytes(disk) - leave)))
    return filler


def fill_beside_others(disk: Path) -> Path:
    """Take all of a disk that somebody else writes to meanwhile."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    return filler


@pytest.mark.needs(may_mount, rights=MOUNT)
def test_a_disk_that_fills_up_is_told_training_goes_on_to_its_end_and_room_lets_it_be_saved(
    train_command: Train, here: Here, tmp_path: Path
) -> None:
    command = train_command()
    with mounted(tmp_path / "disk", "size=24m") as disk:
        run = disk / "run"
        shutil.copytree(tmp_path / "run", run)
        command[command.index("--run") + 1] = str(run)
        assert here(*command, "guard.stop_at_step=5").status == 0
        filler = fill(disk, leave=200_000)
        here(*command).refuses("no space", "MB needed", "MB free", "Free some space")
        assert steps_told(run) > 10  # past the saves that were refused
        assert next(record["step"] for record in events(run, "checkpoint_failed")) == 10
        assert bloomery("ckpt", "verify", run).status == 0
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000005.i001"]
        filler.unlink()
        assert here(*command).status == 0
        assert [record["finished"] for record in events(run, "end")] == [False, True]


@pytest.mark.needs(may_mount, rights=MOUNT)
def test_a_disk_without_room_for_a_line_is_told_too(train_command: Train, here: Here, tmp_path: Path) -> None:
    command = train_command("guard.stop_at_step=5")
    with mounted(tmp_path / "disk", "size=24m") as disk:
        run = disk / "run"
        shutil.copytree(tmp_path / "run", run)
        command[command.index("--run") + 1] = str(run)
        assert here(*command).status == 0
        filler = fill(disk, leave=0)
        here(*command, "guard.stop_at_step=6").refuses(str(run), "No space left", "Free some space")
        assert bloomery("ckpt", "verify", run).status == 0
        filler.unlink()
        assert here(*command, "guard.stop_at_step=6").status == 0


@pytest.mark.needs(may_mount, rights=MOUNT)
def test_a_disk_without_room_for_a_line_does_not_end_the_training_and_no_step_is_missing_after(
    train_command: Train, tmp_path: Path
) -> None:
    command = train_command("train.samples=1000000", "log.every_steps=1", *QUIET)
    with mounted(tmp_path / "disk", "size=24m") as disk:
        run = disk / "run"
        shutil.copytree(tmp_path / "run", run)
        command[command.index("--run") + 1] = str(run)
        with running(*command, log=tmp_path / "log") as trainer:
            assert trainer.wait_until(lambda: steps_told(run) >= 3), trainer.said()
            filler = fill_beside_others(disk)
            assert trainer.wait_until(lambda: "Writing the journal failed" in trainer.said().err)
            last = steps_told(run)
            assert trainer.wait_until(lambda: f"step {last + 30}/" in trainer.said().out), trainer.said()
            assert steps_told(run) < last + 30
            filler.unlink()
            assert trainer.wait_until(lambda: steps_told(run) > last + 30), trainer.said()
            trainer.process.send_signal(signal.SIGINT)
            said = trainer.ended()
        assert said.status == 130 and "Training goes on" in said.err and "Traceback" not in said.err, said
        steps = [record["step"] for record in events(run, "step")]
        assert steps == list(range(1, len(steps) + 1))


@pytest.mark.needs(may_mount, rights=MOUNT)
def test_a_file_system_without_inodes_is_told_as_that(
    train_command: Train, here: Here, tmp_path: Path
) -> None:
    command = train_command("guard.stop_at_step=1")
    with mounted(tmp_path / "disk", "size=24m,nr_inodes=12") as disk:
        for number in range(40):
            try:
                (disk / f"{number}").touch()
            except OSError:
                break
        command[command.index("--run") + 1] = str(disk / "run")
        here(*command).refuses("no inodes are left", "MB free", "df -i")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; the next test is root's")
def test_a_directory_that_is_not_mine_to_write_is_told(
    train_command: Train, here: Here, tmp_path: Path
) -> None:
    command = train_command("guard.stop_at_step=1")
    (tmp_path / "run").chmod(0o500)
    try:
        here(*command).refuses(str(tmp_path / "run"), "Permission denied", "Make it writable")
    finally:
        (tmp_path / "run").chmod(0o700)


@pytest.mark.needs(may_mount, rights=MOUNT)
def test_a_read_only_disk_is_told(train_command: Train, here: Here, tmp_path: Path) -> None:
    command = train_command("guard.stop_at_step=1")
    with mounted(tmp_path / "disk", "ro") as disk:
        command[command.index("--run") + 1] = str(disk / "run")
        here(*command).refuses(str(disk / "run"), "Read-only", "Make it writable")
