"""Requests in control files: when an empty one counts, which lines are read, and who carries them out."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.train.test_control import ALONE, CPU, agreed, control, rundir

from bloomery.config.checkpoint import ControlSection
from bloomery.config.setting import LARGEST_COUNT
from bloomery.errors import StoppedBySwitch
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import arm
from bloomery.parallel.mesh import Mesh
from bloomery.train.control import Control, read_rewind, read_settings, read_skips, refuse_when_stopped

__all__ = ["control", "rundir"]


def test_an_empty_request_is_left_for_a_moment_for_whoever_writes_it(
    control: Control, rundir: RunDirectory
) -> None:
    path = rundir.control("skip")
    path.touch()
    assert agreed(control).skip_requested == () and path.exists()
    path.write_text("1:2")
    assert agreed(control).skip_requested == ((1, 2),)
    path.touch()
    os.utime(path, (time.time() - 60, time.time() - 60))
    assert agreed(control).skip_requested == () and not path.exists()


@pytest.mark.parametrize(("age_s", "is_left"), [(4.5, True), (5.0, False)])
def test_an_empty_request_is_removed_once_five_seconds_have_passed(
    age_s: float, is_left: bool, control: Control, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rundir.control("skip")
    path.touch()
    os.utime(path, (1000.0, 1000.0))
    stand_in = SimpleNamespace(monotonic=lambda: 0.0, time=lambda: 1000.0 + age_s)
    monkeypatch.setattr("bloomery.train.control.time", stand_in)
    assert agreed(control).skip_requested == () and path.exists() is is_left


def test_what_the_first_rank_was_asked_for_is_carried_out_on_all_ranks(rundir: RunDirectory) -> None:
    first = {"set": "optim.clip = 2\n", "skip": "8:16\n", "rewind": "3\n"}
    mesh = Mesh(device=CPU, rank=1, world=2)
    object.__setattr__(mesh, "all_gather_object", lambda own: [first, own])
    control = Control(rundir, mesh)
    try:
        facts = control.agree([0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    finally:
        control.close()
    assert facts.settings_requested == (("optim.clip", "2"),)
    assert (facts.skip_requested, facts.rewind_requested) == (((8, 16),), (3, 0, 0))


def test_lines_that_cannot_be_read_are_told_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert read_settings("a.b = 1\nc\n") == (("a.b", "1"),)
    assert read_skips("0:8\n8:8\n9:8\n-1:3\nx:3\n3\n 4 : 5 \n") == ((0, 8), (4, 5))
    assert read_rewind("") == () and read_rewind("7\n") == (7, 0, 0)
    assert read_rewind("0\n") == (0, 0, 0) and read_rewind("0 0:5\n") == (0, 0, 5), "from the beginning"
    assert read_rewind("7 1:2\n8 3:3\n") == (8, 3, 3), "the last counts"
    assert read_rewind("x\n7 3:2\n-1 2:3\n7 a:b\n") == ()
    assert read_skips("²:3\n1:٣\n") == ((1, 3),), "digits of any script, and no powers"
    assert read_skips(f"0:{LARGEST_COUNT}\n") == ((0, LARGEST_COUNT),)
    assert read_skips(f"0:{10**19}\n0:{'9' * 5000}\n") == read_rewind(f"7 0:{10**19}\n{10**19}\n") == ()
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING] * (1 + 5 + 4 + 1 + 4)


def test_what_several_ranks_were_asked_is_asked_of_the_run(control: Control) -> None:
    facts = control.agree([2.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0])
    assert facts.save_requested and facts.stop_reason == "signal SIGTERM"
    assert control.agree([0.0, 0.0, 2.0, 2.0, 0.0, 0.0, 0.0]).stop_reason == "signal SIGINT"


def test_a_signal_that_reached_a_later_rank_alone_asks_for_a_save(rundir: RunDirectory) -> None:
    control = Control(rundir, Mesh(device=CPU, rank=1, world=2))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert control.local_facts().save == 1.0
    finally:
        control.close()


def test_no_rank_starts_where_the_switch_in_the_directory_of_its_recipe_is_armed(
    rundir: RunDirectory, tmp_path: Path
) -> None:
    (tmp_path / "switches").mkdir()
    section = ControlSection(directory=str(tmp_path / "switches"))
    refuse_when_stopped(rundir, section, ALONE)
    arm(tmp_path / "switches" / "stop")
    with pytest.raises(StoppedBySwitch, match=f"{tmp_path}/switches/stop .*is armed"):
        refuse_when_stopped(rundir, section, ALONE)
