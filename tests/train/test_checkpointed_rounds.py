"""Which rounds a peer says that its checkpoints rest on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save.direct import save_streamed
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory
from bloomery.train import peering


def test_of_more_rounds_than_may_be_told_the_oldest_and_the_newest_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peering, "SAVES_AT_MOST", 3)
    rundir = RunDirectory(tmp_path).create()
    incarnation = begin(rundir, base=None, reason="start")
    for round in range(1, 6):
        entry = whole("model.a", torch.zeros(1))
        values = {"outer": {"round": round, "inside": False}}
        save_streamed(rundir.checkpoints, [entry], step=round, incarnation=incarnation, values=values)
    store = SimpleNamespace(checkpoints=lambda: checkpoints(rundir), listing_changed=lambda: (1,))
    trainer = SimpleNamespace(mesh=SimpleNamespace(is_first=True), store=store)
    assert peering._CheckpointedRounds(trainer).saves() == (1, 4, 5)
