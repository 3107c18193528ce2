"""Faults that are planted in a training's steps: poisoned samples, a wrong learning rate, a NaN on one rank.

What each step was given is recorded, so that a test can compare the samples of a run with what was planned.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bloomery.data_loader.batches import MicroBatch
from bloomery.train import loop

VOCABULARY = 300
"""Tokens that repeats are drawn from."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong in a run.

    record: the directory of what each rank's steps were given; None records nothing.
    poison: "shuffled" tokens, or absurd "repeats" of one token, in the samples of `span`.
    rate: the factor of the learning rate in the steps of `steps`.
    nan_rank: the rank with a weight that is NaN in the steps of `steps`; None: no rank.
    times: what goes wrong in `steps` does so until the run went back so often.
    peer: the peer, named by its thread, that has the faults; "": all.
    """

    record: Path | None = None
    poison: str = ""
    span: range = range(0)
    steps: range = range(0)
    rate: float = 1.0
    nan_rank: int | None = None
    times: float = 1
    peer: str = ""


def plant(faults: Faults, rank: int) -> None:
    """Let the trainings of this process have these faults on this rank."""
    loop.train_step = faulty(loop.train_step, faults, rank=rank)


def faulty(real: Callable[..., Any], faults: Faults, *, rank: int = 0) -> Callable[..., Any]:
    """Return `train_step` with faults."""
    newest, went_back = defaultdict[str, int](int), Counter[str]()

    def train_step(parts: Any, micro_batches: Sequence[MicroBatch], state: Any) -> Any:
        step, thread = state.step + 1, threading.current_thread().name  # peers are threads of a test
        went_back[thread] += step <= newest[thread]
        newest[thread] = step
        if faults.record is not None:
            _record(faults.record, rank, step, micro_batches)
        if faults.peer and thread != faults.peer:
            return real(parts, micro_batches, state)
        micro_batches = [_poisoned(batch, faults) for batch in micro_batches]
        strikes = step in faults.steps and went_back[thread] < faults.times
        if strikes and faults.rate != 1.0:
            right = parts.learning_rate
            parts = replace(parts, learning_rate=lambda state: faults.rate * right(state))
        if strikes and rank == faults.nan_rank:
            return _with_nan(real, parts, micro_batches, state)
        return real(parts, micro_batches, state)

    return train_step


def samples_of(record: Path, rank: int = 0) -> list[int]:
    """Return the samples of a rank's steps in their order; of a step that was made again, the last time."""
    steps: dict[int, list[int]] = {}
    for line in (record / f"{rank}.jsonl").read_text().splitlines():
        given = json.loads(line)
        for later in [step for step in steps if step > given["step"]]:
            del steps[later]
        steps[given["step"]] = given["samples"]
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return [sample for step in sorted(steps) for sample in steps[step]]


def _record(directory: Path, rank: int, step: int, micro_batches: Sequence[MicroBatch]) -> None:
    samples = [sample for batch in micro_batches for sample in batch.samples.tolist()]
    with (directory / f"{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "samples": samples}) + "\n")


def _poisoned(batch: MicroBatch, faults: Faults) -> MicroBatch:
    if not any(sample in faults.span for sample in batch.samples.tolist()):
        return batch
    tokens, targets = batch.tokens.clone(), batch.targets.clone()
    for row, sample in enumerate(batch.samples.tolist()):
        if sample in faults.span:
            generator = torch.Generator().manual_seed(sample)
            window = torch.cat([tokens[row], targets[row, -1:]])  # [s + 1]
            if faults.poison == "shuffled":
                window = window[torch.randperm(len(window), generator=generator)]
            else:
                window = torch.randint(VOCABULARY, (1,), generator=generator).expand(len(window))
            tokens[row], targets[row] = window[:-1], window[1:]
    return replace(batch, tokens=tokens, targets=targets)


def _with_nan(real: Callable[..., Any], parts: Any, micro_batches: Any, state: Any) -> Any:
    weight = next(parts.model.decoder.parameters()).data
    right = weight.clone()
    weight.view(-1)[0] = torch.nan
    try:
        return real(parts, micro_batches, state)
    finally:
        weight.copy_(right)
