"""A trainer that saves to object storage, killed at random moments, and what the store holds then."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.checkpoint.kills import DEADLINE_S, SIZE, Soak
from tests.checkpoint.small_run import Run
from tests.forked import forked

from bloomery.checkpoint.format.catalogue import verify
from bloomery.checkpoint.format.manifest import MANIFEST, parse_name
from bloomery.checkpoint.format.source import RemoteCheckpoint
from bloomery.checkpoint.format.state import collect
from bloomery.checkpoint.load.loader import load_checkpoint
from bloomery.checkpoint.remote.places import run_storage
from bloomery.checkpoint.remote.remote_run import remote_checkpoints
from bloomery.config.checkpoint import CheckpointSection
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave

NAME, KEPT = "mine", 3
_WITHIN_A_SAVE_S = 0.3


def save_until_killed(path: str, url: str, background: str, environment: dict[str, str]) -> None:
    """Restore from the store on a node that has nothing, check what came, and save step after step."""
    os.environ |= environment
    section = CheckpointSection(url=url, keep_last=KEPT, keep_tenths=False, background=background)
    rundir, run = RunDirectory(Path(path)).create(), Run(size=SIZE)
    with Store(rundir, section, place=run_storage(rundir, section, run_name=NAME)) as store:
        restored = store.restore(run.parts)
        step = 0 if restored is None else restored.step
        assert restored is None or run.equals(Run(size=SIZE).fill(step))
        Path(path, "alive").touch()
        while True:
            step += 1
            store.save(RunStateToSave(run.fill(step).parts, step=step))


def kill_again_and_again(path: Path, url: str, *, kills: int, seed: int) -> Soak:
    """Check after each kill that the newest checkpoint loads, and that none that is kept was lost.

    Each life has a run directory of its own. A life that was killed may go on with a commit that its writer
    had begun, so what was seen must stay until KEPT newer ones are there.
    """
    dice, soak, context = random.Random(seed), Soak(), forked()
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    store = Objects(f"{url}/{NAME}")
    seen: set[str] = set()
    for number in range(kills):
        node = path / f"node-{number}"
        background = ("off", "on")[number % 2]
        trainer = context.Process(
            target=save_until_killed, args=(str(node), url, background, environment), daemon=True
        )
        before = _unfinished(store)
        trainer.start()
        _until_begun(trainer, node, store, before, in_a_save=number % 3 > 0)
        trainer.join(dice.uniform(0.0, _WITHIN_A_SAVE_S))
        assert trainer.is_alive(), "it ended by itself: a restore was refused, or brought back something else"
        trainer.kill()
        trainer.join(DEADLINE_S)
        seen = _what_is_left(store, seen)
        soak.found["something unfinished" if _unfinished(store) else "nothing unfinished"] += 1
        soak.kills += 1
    soak.steps = max(((parse_name(name) or (0, 0))[0] for name in seen), default=0)
    section = CheckpointSection(url=url, keep_last=KEPT, keep_tenths=False, background="off")
    last = RunDirectory(path / "last").create()
    with Store(last, section, place=run_storage(last, section, run_name=NAME)) as store_of_last:
        store_of_last.restore(Run(size=SIZE).parts)
    assert not _unfinished(store), "the next start removes what was not committed"
    return soak


def _until_begun(trainer, node: Path, store: Objects, before: set[str], *, in_a_save: bool) -> None:
    """Wait until the trainer is within a save, or has restored."""
    until = time.monotonic() + DEADLINE_S
    while not ((_unfinished(store) - before) if in_a_save else (node / "alive").exists()):
        trainer.join(0.001)
        assert trainer.is_alive(), "it ended by itself"
        assert time.monotonic() < until, "it began no save"


def _unfinished(store: Objects) -> set[str]:
    """The checkpoints of which something is in the store, and no manifest."""
    keys = [entry.key.split("/") for entry in store.entries("checkpoints/")]
    committed = {key[1] for key in keys if key[-1] == MANIFEST}
    return {key[1] for key in keys} - committed


def _what_is_left(store: Objects, seen: set[str]) -> set[str]:
    """Check what the store holds; return the names of what is committed."""
    found = list(_intact(store))
    names = {source.name for source in found}
    for lost in seen - names:
        newer = [name for name in names if parse_name(name) > parse_name(lost)]
        assert len(newer) >= KEPT, f"{lost} was committed and is lost; there are {sorted(names)}"
    if found:
        run = Run(size=SIZE)
        values = load_checkpoint(found[-1], collect(run.parts).entries)
        run.moments.load_state_values(values["optim"])
        assert run.equals(Run(size=SIZE).fill((parse_name(found[-1].name) or (0, 0))[0]))
    return names


def _intact(store: Objects) -> Iterator[RemoteCheckpoint]:
    """Yield the visible checkpoints, oldest first; one that pruning removes meanwhile is passed over."""
    for source in remote_checkpoints(store):
        with suppress(FileNotFoundError):
            problems = verify(source)
            assert problems == [] or source.name not in {one.name for one in remote_checkpoints(store)}
            if not problems:
                yield source
