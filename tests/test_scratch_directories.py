"""Directories of processes: locked while their process lives, removed after it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bloomery.cli.ranks import RankRange, run_ranks
from bloomery.durable import hold_directory, remove_abandoned


def make(root: Path, name: str, *, age_s: float) -> Path:
    directory = root / name
    directory.mkdir()
    (directory / "file").touch()
    moment = directory.stat().st_mtime - age_s
    os.utime(directory, (moment, moment))
    return directory


def test_only_what_is_old_this_users_and_locked_by_nobody_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, locked = make(tmp_path, "one-left", age_s=3600), make(tmp_path, "one-locked", age_s=3600)
    young, other = make(tmp_path, "one-young", age_s=0), make(tmp_path, "other", age_s=3600)
    (tmp_path / "one-link").symlink_to(other)
    os.utime(tmp_path / "one-link", (0, 0), follow_symlinks=False)
    with pytest.raises(OSError, match="one-link"):
        hold_directory(tmp_path / "one-link")
    held = hold_directory(locked)
    assert held is not None and hold_directory(locked) is None
    remove_abandoned(tmp_path, "one-")
    assert not left.exists()
    assert locked.exists() and young.exists() and (other / "file").exists()
    assert (tmp_path / "one-link").is_symlink()
    os.close(held)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "getuid", lambda: locked.stat().st_uid + 1)
        remove_abandoned(tmp_path, "one-")
    assert locked.exists(), "it is another user's"
    before = len(list(Path("/proc/self/fd").iterdir()))
    remove_abandoned(tmp_path, "one-")
    assert not locked.exists() and len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_new_directory_has_a_minute_to_be_locked_and_no_child_inherits_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make(tmp_path, "one-new", age_s=0)
    made = directory.stat().st_mtime
    monkeypatch.setattr("bloomery.durable.time.time", lambda: made + 59.0)
    remove_abandoned(tmp_path, "one-")
    assert directory.exists()
    held = hold_directory(directory)
    assert held is not None and not os.get_inheritable(held)
    os.close(held)
    monkeypatch.setattr("bloomery.durable.time.time", lambda: made + 60.0)
    remove_abandoned(tmp_path, "one-")
    assert not directory.exists()


def test_what_a_killed_launcher_left_goes_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import os, signal, sys\n"
        "from bloomery.cli.ranks import RankRange, run_ranks\n"
        "kill = [sys.executable, '-c', f'import os; os.kill({os.getpid()}, {int(signal.SIGKILL)})']\n"
        "run_ranks(kill, RankRange(count=1, world=1), environment=os.environ)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], env=os.environ | {"TMPDIR": str(tmp_path)})
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("bloomery-*")
    os.utime(left, (0, 0))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_ranks([sys.executable, "-c", ""], RankRange(count=1, world=1), environment=os.environ) == 0
    assert not any(tmp_path.iterdir())
