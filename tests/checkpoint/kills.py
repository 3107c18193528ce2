"""A trainer that only loads, saves and prunes, killed at random moments, and what is left of its run."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.checkpoint.small_run import Run
from tests.forked import forked

from bloomery.checkpoint.format.catalogue import checkpoints, verify
from bloomery.checkpoint.format.state import collect
from bloomery.checkpoint.load.loader import load_checkpoint
from bloomery.config.checkpoint import CheckpointSection
from bloomery.events.incarnation import Base
from bloomery.events.run_directory import RunDirectory
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave

SIZE = 1 << 18
DEADLINE_S = 120.0
_A_LOAD_S = 0.6
_A_SAVE_S = 0.2


def save_until_killed(path: str, background: str) -> None:
    """Restore, check what came back, and save step after step."""
    run = Run(size=SIZE)
    section = CheckpointSection(keep_last=2, keep_tenths=False, background=background)
    store = Store(RunDirectory(Path(path)), section)
    Path(path, "alive").touch()
    restored = store.restore(run.parts)
    step = 0 if restored is None else restored.step
    assert restored is None or run.equals(Run(size=SIZE).fill(step))
    while True:
        step += 1
        run.fill(step)
        if not store.begin_save(RunStateToSave(run.parts, step=step)):
            store.wait_for_saves()
            continue
        store.wait_staged()


@dataclass(kw_only=True)
class Soak:
    """What the kills met."""

    kills: int = 0
    steps: int = 0
    found: Counter[str] = field(default_factory=Counter)


def kill_again_and_again(path: Path, *, kills: int, seed: int) -> Soak:
    """Check after each kill that nothing committed is lost, and that the newest is whole and loads."""
    rundir, dice, soak = RunDirectory(path).create(), random.Random(seed), Soak()
    context = forked()
    newest: Base = (0, 0)
    for number in range(kills):
        (path / "alive").unlink(missing_ok=True)
        trainer = context.Process(
            target=save_until_killed, args=(str(path), ("off", "on")[number % 2]), daemon=True
        )
        trainer.start()
        in_a_save, before = number % 3 > 0, _directories(rundir)
        while not ((_directories(rundir) - before) if in_a_save else (path / "alive").exists()):
            trainer.join(0.001)
            assert trainer.is_alive(), "it ended by itself"
        trainer.join(dice.uniform(0.0, _A_SAVE_S if in_a_save else _A_LOAD_S))
        assert trainer.is_alive(), "it ended by itself: a restore was refused, or brought back something else"
        trainer.kill()
        trainer.join(DEADLINE_S)
        newest = _what_is_left(rundir, before=newest)
        leftovers = any(one.suffix == ".partial" for one in rundir.checkpoints.iterdir())
        soak.found["something unfinished" if leftovers else "nothing unfinished"] += 1
        soak.kills, soak.steps = soak.kills + 1, newest[0]
    with Store(rundir, CheckpointSection(background="off")) as store:
        store.restore(Run(size=SIZE).parts)
    assert not list(rundir.checkpoints.glob("*.partial")), "the next start sweeps"
    return soak


def _directories(rundir: RunDirectory) -> set[str]:
    return {one.name for one in rundir.checkpoints.iterdir()}


def _what_is_left(rundir: RunDirectory, *, before: Base) -> Base:
    found = checkpoints(rundir)
    if not found:
        assert before == (0, 0), f"{before} was committed and is lost"
        return before
    newest = found[-1]
    assert newest.base >= before, f"{before} was committed and is lost"
    assert verify(newest.directory) == []
    run = Run(size=SIZE)
    values = load_checkpoint(newest.directory, collect(run.parts).entries)
    run.moments.load_state_values(values["optim"])
    assert run.equals(Run(size=SIZE).fill(newest.step))
    return newest.base
