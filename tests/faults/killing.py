"""Kill -9 at chosen moments, the same command after each, and what became of the run."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.commands import Running, bloomery, running, steps_told

from bloomery.checkpoint.format.catalogue import checkpoints, verify
from bloomery.events.run_directory import RunDirectory

START, STEP, SAVE = "start-up", "step", "save"
A_STEP_S, A_SAVE_S = 0.03, 0.02
TICK_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When to kill: `after` is a share of the start-up, a number of steps, or seconds into a save."""

    kind: str
    after: float


@dataclass(frozen=True, kw_only=True)
class Killed:
    """One kill: the last step that was told, what the next start has to go on from, and what it broke off."""

    kind: str
    told: int
    kept: int
    broke_a_save: bool


def moments(count: int, *, seed: int) -> list[Moment]:
    """So many moments: start-up, steps and saves in turn, each somewhere in its stretch, shuffled."""
    dice = random.Random(seed)
    stretches = {START: (0.0, 1.1), STEP: (1.0, 9.0), SAVE: (0.0, A_SAVE_S)}
    kinds = [list(stretches)[number % 3] for number in range(count)]
    dice.shuffle(kinds)
    return [Moment(kind=kind, after=dice.uniform(*stretches[kind])) for kind in kinds]


def train_and_kill(
    command: Sequence[str], run: Path, plan: Sequence[Moment], *, start_up_s: float
) -> list[Killed]:
    """Give `command` again and again, kill it at each moment, and let it end at last.

    Checks after each kill that every checkpoint is whole and that the run did not go back.
    """
    killed: list[Killed] = []
    for number, moment in enumerate(plan):
        with running(*command, log=run.with_name(f"{run.name}-{number:02d}")) as trainer:
            if not _came(moment, trainer, run, start_up_s=start_up_s):
                said = trainer.said()
                raise AssertionError(f"it ended by itself before {moment}: {said}")
        killed.append(_what_is_left(moment, run))
    last = bloomery(*command)
    # A disk that is slow today skips a save, and says so.
    complaints = [line for line in last.err.splitlines() if "still being written" not in line]
    assert last.status == 0 and not complaints, last
    return killed


def _came(moment: Moment, trainer: Running, run: Path, *, start_up_s: float) -> bool:
    """Wait for the moment; false when the trainer ended before."""
    told, found = _lines_told(run), _directories(run)
    if moment.kind == START:
        # A quick machine may begin to train meanwhile: then that is the moment.
        due_s = time.monotonic() + moment.after * start_up_s
        return trainer.wait_until(lambda: time.monotonic() >= due_s or _lines_told(run) > told, tick_s=TICK_S)
    if moment.kind == STEP:
        steps, into_the_next = divmod(moment.after, 1)
        told_enough = trainer.wait_until(lambda: _lines_told(run) >= told + steps, tick_s=TICK_S)
        return told_enough and not trainer.is_over(within_s=into_the_next * A_STEP_S)
    return trainer.wait_until(lambda: _directories(run) - found, tick_s=TICK_S) and not trainer.is_over(
        within_s=moment.after
    )


def _what_is_left(moment: Moment, run: Path) -> Killed:
    # First, since a writer that outlives its trainer for a moment may yet end its save.
    broke_a_save = any(name.endswith(".partial") for name in _directories(run))
    found = checkpoints(RunDirectory(run))
    assert all(not verify(one.directory) for one in found)
    return Killed(
        kind=moment.kind,
        told=steps_told(run),
        kept=found[-1].step if found else 0,
        broke_a_save=broke_a_save,
    )


def _lines_told(run: Path) -> int:
    """How many steps the journal tells of, again after a kill or for the first time."""
    try:
        return RunDirectory(run).journal().read_bytes().count(b'"event": "step"')
    except FileNotFoundError:
        return 0


def _directories(run: Path) -> set[str]:
    try:
        return {path.name for path in (run / "checkpoints").iterdir()}
    except FileNotFoundError:
        return set()
