"""Five kills in the suite; `make soak PART=checkpoints` does a hundred."""

import os
import signal
from pathlib import Path

import pytest
from tests.checkpoint.kills import kill_again_and_again
from tests.checkpoint.small_run import Run

from bloomery.checkpoint.format.catalogue import checkpoints, verify
from bloomery.config.checkpoint import CheckpointSection
from bloomery.events.run_directory import RunDirectory
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave


def test_kills_at_random_moments_lose_nothing_that_was_committed(tmp_path: Path):
    assert kill_again_and_again(tmp_path / "run", kills=5, seed=7).kills == 5


@pytest.mark.parametrize("background", ["on", "off"])
def test_two_incarnations_that_save_at_once_leave_the_younger_ones_run_whole(
    rundir: RunDirectory, background: str
):
    """The older was thought dead: what it still commits is not seen, and what it had begun is swept away."""
    section = CheckpointSection(keep_last=1000, background=background)
    run = Run()
    with Store(rundir, section) as old, Store(rundir, section) as young:
        old.restore(run.parts)
        old.save(RunStateToSave(run.fill(1).parts, step=1))
        if background == "on":
            writer = old._saver.background and old._saver.background.writer_pid
            assert writer
            os.kill(writer, signal.SIGSTOP)
            old.begin_save(RunStateToSave(run.fill(2).parts, step=2))
            old.wait_staged()
        restored = young.restore(run.parts)
        assert restored is not None and restored.step == 1
        young.begin_save(RunStateToSave(run.fill(2).parts, step=2))
        young.wait_staged()
        if background == "on":
            os.kill(writer, signal.SIGCONT)
            old.wait_for_saves()
            assert any(one.failure is not None for one in old.take_save_results()), "its place was swept away"
        old.save(RunStateToSave(run.fill(3).parts, step=3))
        young.wait_for_saves()
    found = checkpoints(rundir)
    assert [one.base for one in found] == [(1, 1), (2, 2)]
    assert all(verify(one.directory) == [] for one in found)
