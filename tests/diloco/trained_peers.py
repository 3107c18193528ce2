"""The recipe of small rounds, and what peers that trained by it left on the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.load.loader import read_tensors
from bloomery.config.load import LoadedRecipe
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory

Start = Callable[..., tuple[LoadedRecipe, Path]]

ELASTIC = (
    "elastic.inner_steps=3",
    "elastic.codec=fp32",
    "train.ramp_up=[]",
    "train.global_batch=4",
    "train.samples=48",
    "model.hidden_dropout=0.0",
)


def newest(path: Path) -> Path:
    return checkpoints(RunDirectory(path))[-1].directory


def tensors(path: Path, prefix: str) -> dict[str, torch.Tensor]:
    return dict(read_tensors(newest(path), prefix=prefix))


def steps(path: Path) -> list[dict]:
    return [record for record in read_journal(RunDirectory(path).journal()) if record["event"] == "step"]
