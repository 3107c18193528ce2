"""A small run, on the GPU where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import bloomery

_SMALL = {
    "data.sources": ["python:stdlib"],
    "data.tokenizer_vocabulary": 300,
    "model.layers": 2,
    "schedule.shape": "constant",
    "schedule.warmup": 4,
}


def train_small(run: Path, settings: Mapping[str, object]) -> Path:
    """Train a small recipe in the directory `run`, going on with what is there, and return it.

    settings: what differs from it, as in {"train.steps": 6}.
    """
    bloomery.fit(bloomery.recipe("demo-small", {**_SMALL, **settings}), run=run, progress=False)
    return run
