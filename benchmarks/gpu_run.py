"""Trains a recipe as a user does, reads its journal, and compares it with what `bloomery plan` said.

`gpu.py` uses it for the bars that no single step shows: the training beside an asynchronous save, and the
planner's step time and memory.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

Command = Callable[[Sequence[str]], str]
"""Runs a command and returns what it printed; raises CommandFailed."""

STEPS, SAVE_EVERY = 90, 30
"""Two saves, the first of them long enough after the compilation for steps without one."""
FIRST_STEPS = 5
"""Steps at the start of a process that compile and touch memory, and do not count."""
LEAST_VOCABULARY = 320
"""A tokenizer has all bytes, and something to learn."""
LOSS_CHUNK = 2048
"""Tokens whose logits exist at one time in what is measured: twice the default (see docs/notes/gpu.md)."""
BYTES_PER_PARAMETER = 12
COPIES_OF_A_STATE = 4
"""Two checkpoints on the disk and two buffers in memory."""


class CommandFailed(Exception):
    """A command ended with another status than 0; the message says which."""


class NoTime(CommandFailed):
    """A command was not begun, since too little time was left."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of steps while a save was being written, and while none was."""

    beside: tuple[float, ...]
    alone: tuple[float, ...]

    @property
    def mean_ratio(self) -> float:
        """The mean step beside a save, against the median of the others; NaN where either is missing."""
        return fmean(self.beside) / median(self.alone) if self.beside and self.alone else float("nan")

    @property
    def median_ratio(self) -> float:
        """The median step beside a save, against that of the others."""
        return median(self.beside) / median(self.alone) if self.beside and self.alone else float("nan")


def recipe_text(sizes: dict[str, int], *, length: int, samples: int, steps: int, compiled: bool) -> str:
    """The recipe of a model of these sizes on the source code of this Python, that saves on the way."""
    model = "".join(f"{name} = {sizes[name]}\n" for name in ("layers", "hidden", "heads", "ffn"))
    save_every = SAVE_EVERY if steps > SAVE_EVERY else steps // 2
    vocabulary = max(sizes["vocabulary"], LEAST_VOCABULARY)
    return f"""\
[run]
name = "gpu-benchmark"

[model]
{model}vocabulary = {vocabulary}

[data]
sources = ["python:stdlib"]
tokenizer_vocabulary = {min(4096, vocabulary)}
sequence_length = {length}
held_out_every = 0

[train]
steps = {steps}
global_batch = {samples}
micro_batch = {samples}
loss_chunk = {LOSS_CHUNK}
compile = "{"on" if compiled else "off"}"

[optim]
learning_rate = 3e-4

[schedule]
shape = "constant"
warmup = 0

[checkpoint]
every_steps = {save_every}
every_minutes = 0.0
keep_last = 1
keep_best = 0
keep_tenths = false
at_end = false
background = "on"

[evaluate]
every_steps = 0
at_end = false

[log]
tensorboard = false
"""


def trained(recipe: Path, run: Path, command: Command) -> list[dict[str, Any]]:
    """Train the recipe, and return the events of its journal."""
    command([sys.executable, "-m", "bloomery", "train", str(recipe), "--run", str(run), "--plain"])
    lines = (run / "journal" / "0-0.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def step_times(events: Sequence[dict[str, Any]]) -> StepTimes:
    """Divide the steps of a journal: a save lasts from the step that it is of to its `checkpoint` event.

    A step's seconds are those between its event and the one before, with all that the run does in between.
    """
    steps = [event for event in events if event["event"] == "step"]
    saves = [
        (event["step"], event["time"])
        for event in events
        if event["event"] in ("checkpoint", "checkpoint_failed")
    ]
    beside, alone = [], []
    for before, step in pairwise(steps):
        if step["step"] <= FIRST_STEPS:
            continue
        is_beside = any(first < step["step"] and before["time"] < ended for first, ended in saves)
        (beside if is_beside else alone).append(step["time"] - before["time"])
    return StepTimes(beside=tuple(beside), alone=tuple(alone))


def planned(recipe: Path, machine: Path, command: Command) -> tuple[float, float]:
    """(seconds a step, bytes at most without what the process takes for itself) as the planner says."""
    told = command(
        [
            *(sys.executable, "-m", "bloomery", "plan", str(recipe)),
            *("--hardware", str(machine), "--gpus", "1", "--json"),
        ]
    )
    figures = json.loads(told)
    return figures["speed"]["step_s"], _peak_bytes(figures["memory"])


def _peak_bytes(memory: dict[str, Any]) -> int:
    reserved: int = memory["stages"][memory["peak_stage"]]["reserved"]
    return int(memory["peak_bytes"]) - reserved


def roomy_directory(parameters: float) -> Path:
    """A new directory: in memory, if that has room for the run's checkpoints, else where temporary files go.

    A disk that is slower than the training would tell of the disk alone.
    """
    memory = Path("/dev/shm")
    wanted = COPIES_OF_A_STATE * BYTES_PER_PARAMETER * parameters
    has_room = memory.is_dir() and shutil.disk_usage(memory).free >= wanted
    return Path(tempfile.mkdtemp(prefix="bloomery-gpu-", dir=memory if has_room else None))
