"""Copies in memory for other peers: each is of its own state, whatever its step."""

from __future__ import annotations

from pathlib import Path

import torch
from small_run import Run

from bloomery.checkpoint.load import read_tensors
from bloomery.checkpoint.store import Store
from bloomery.checkpoint.verify import verify
from bloomery.config.keeping import CheckpointSection
from bloomery.events.rundir import RunDir


def test_the_states_of_two_rounds_at_one_step_are_two_copies(tmp_path: Path) -> None:
    section = CheckpointSection(background="off", memory_directory=str(tmp_path / "memory"))
    store, run = Store(RunDir(tmp_path / "run"), section), Run()
    store.restore(run.parts)
    offered, expected = [], []
    for round in range(3):
        offered.append(store.offer(run.fill(round).parts, step=7))
        expected.append({entry.name: entry.tensor.clone() for entry in run.parts["model"].state_entries()})
    assert offered[0] is not None and not offered[0].exists(), "only two are kept"
    for directory, tensors in zip(offered[1:], expected[1:], strict=True):
        assert directory is not None and not verify(directory)
        found = dict(read_tensors(directory))
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    store.close()
    assert not any(path.is_file() for path in (tmp_path / "memory").rglob("*"))
