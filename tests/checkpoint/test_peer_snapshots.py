"""Copies in memory for other peers: each is of its own state, whatever its step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from tests.checkpoint.small_run import Run

from bloomery import errors
from bloomery.checkpoint.format.catalogue import verify
from bloomery.checkpoint.load.loader import read_tensors
from bloomery.config.checkpoint import CheckpointSection
from bloomery.events.run_directory import RunDirectory
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave


def test_the_states_of_two_rounds_at_one_step_are_two_copies(tmp_path: Path) -> None:
    section = CheckpointSection(background="off", memory_directory=str(tmp_path / "memory"))
    store, run = Store(RunDirectory(tmp_path / "run"), section), Run()
    store.restore(run.parts)
    offered, expected = [], []
    for round in range(3):
        offered.append(store.copy_for_peers(RunStateToSave(run.fill(round).parts, step=7)))
        expected.append({entry.name: entry.tensor.clone() for entry in run.parts["model"].state_entries()})
    assert offered[0] is not None and offered[0].exists(), "it stays until it is removed"
    store.remove_copy(offered[0])
    assert not offered[0].parent.exists()
    for directory, tensors in zip(offered[1:], expected[1:], strict=True):
        assert directory is not None and not verify(directory)
        found = dict(read_tensors(directory))
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    store.close()
    assert not any(path.is_file() for path in (tmp_path / "memory").rglob("*"))


def test_the_copy_that_a_killed_life_of_a_run_left_goes_with_its_next_start(tmp_path: Path) -> None:
    section = CheckpointSection(background="off", memory_directory=str(tmp_path / "memory"))
    process = os.fork()
    if process == 0:
        run, killed = Run(), Store(RunDirectory(tmp_path / "run"), section)
        killed.restore(run.parts)
        killed.copy_for_peers(RunStateToSave(run.fill(0).parts, step=1))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)
    assert any(path.is_file() for path in (tmp_path / "memory").rglob("*"))
    store = Store(RunDirectory(tmp_path / "run"), section)
    assert not any(
        path.is_file() for path in (tmp_path / "memory").rglob("*")
    )  # nobody asked for another one
    store.close()


def test_copies_that_a_killed_process_left_go_with_the_next_offer_and_those_of_living_ones_stay(
    tmp_path: Path,
) -> None:
    memory = tmp_path / "memory"
    section = CheckpointSection(background="off", memory_directory=str(memory))
    left, young = memory / "bloomery-offered-0123456789abcdef", memory / "bloomery-offered-fedcba9876543210"
    for directory in (left, young):
        (directory / "1").mkdir(parents=True)
        (directory / "1" / "data").write_bytes(b"a whole state")
    os.utime(left, (0, 0))
    stores = {}
    for name in ("living", "new"):
        run, stores[name] = Run(), Store(RunDirectory(tmp_path / name), section)
        stores[name].restore(run.parts)
        offered = stores[name].copy_for_peers(RunStateToSave(run.fill(0).parts, step=1))
        assert offered is not None and not left.exists() and young.exists()
        os.utime(offered.parent.parent, (0, 0))
    assert len(list(memory.glob("bloomery-offered-*"))) == 3, "each has its lock"
    for store in stores.values():
        store.close()


def test_where_there_is_no_memory_for_a_copy_none_is_offered_and_the_next_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    section = CheckpointSection(background="off", memory_directory=str(tmp_path / "memory"))
    store, run = Store(RunDirectory(tmp_path / "run"), section), Run()
    store.restore(run.parts)
    with monkeypatch.context() as full:
        full.setattr(errors, "free_bytes", lambda path: 0)
        assert store.copy_for_peers(RunStateToSave(run.fill(1).parts, step=7)) is None
    assert "joining peers cannot fetch the state of step 7 here" in caplog.text
    offered = store.copy_for_peers(RunStateToSave(run.fill(2).parts, step=8))
    assert offered is not None and verify(offered) == []
    store.close()
