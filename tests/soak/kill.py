"""Twenty kills of a run, whose losses must be the unbroken run's, bit for bit; and of its backup."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.checkpoint.kill_points import kill_at_points
from tests.checkpoint.object_store import serving
from tests.faults.commands import running
from tests.faults.killing import moments, train_and_kill

from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory

KILLS = 20
OF_EACH_ACT = 40


@pytest.mark.slow
def test_twenty_kills_change_no_bit_of_the_loss_curve(
    train_command: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    begun = time.monotonic()
    seed = int(os.environ.get("BLOOMERY_SOAK_SEED", "1"))
    length = "train.samples=6000"
    with running(*train_command(length, run="unbroken"), log=tmp_path / "unbroken-log") as unbroken:
        unbroken.wait_until(lambda: RunDirectory(tmp_path / "unbroken").journal().exists())
        start_up_s = time.monotonic() - unbroken.begun
        assert unbroken.ended().status == 0
    killed = train_and_kill(
        train_command(length, "checkpoint.background=on"),
        tmp_path / "run",
        moments(KILLS, seed=seed),
        start_up_s=start_up_s,
    )
    curves = [loss_curve(RunDirectory(tmp_path / name)) for name in ("unbroken", "run")]
    figures = {
        "name": "kill -9 of the trainer",
        "seed": seed,
        "kills": len(killed),
        "at": Counter(one.kind for one in killed),
        "saves_broken_off": sum(one.broke_a_save for one in killed),
        "steps": len(curves[0]),
        "steps_lost": sum(one.told - one.kept for one in killed),
        "seconds": round(time.monotonic() - begun, 1),
        "same_losses": curves[0] == curves[1],
    }
    with capsys.disabled():
        print(json.dumps(figures))
    assert curves[0] == curves[1]


@pytest.mark.slow
def test_kills_at_any_point_of_an_upload_a_restore_and_a_download_leave_nothing_half(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    seed = int(os.environ.get("BLOOMERY_SOAK_SEED", "1"))
    with serving() as objects:
        told = kill_at_points(tmp_path, objects.new_bucket, kills=OF_EACH_ACT, seed=seed)
    figures = {
        "name": "kill -9 of upload, restore and download",
        "seed": seed,
        "kills": told.kills,
        "points": told.points,
        "seconds": round(time.monotonic() - begun, 1),
    }
    with capsys.disabled():
        print(json.dumps(figures))
    assert all(told.kills[act] > OF_EACH_ACT // 3 for act in told.points), told
