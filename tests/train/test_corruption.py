"""Bits that flip on one of four ranks are found within the interval, undone, and the right rank is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.train.bit_flips import SITES, Flip, Planted
from tests.train.real_ranks import train_on_ranks
from tests.train.test_loop import events

from bloomery.config.load import LoadedRecipe
from bloomery.events.machine_faults import machine_faults
from bloomery.events.run_directory import RunDirectory

Start = Callable[..., tuple[LoadedRecipe, Path]]
EVERY = 4
SETTINGS = (
    "train.samples=0",
    "train.ramp_up=[]",
    "train.global_batch=8",
    "train.micro_batch=1",
    "evaluate.every_steps=0",
    f"guard.corruption_steps={EVERY}",
    f"checkpoint.every_steps={EVERY}",
    "guard.corruption_faults=1000",
    "parallel.data=4",
)


def trained(start: Start, name: str, *settings: str, flips: tuple[Flip, ...] = (), ranks: int = 4) -> Path:
    """Train on real ranks with planted flips; return the run's path."""
    loaded, path = start(*SETTINGS, *settings, name=name)
    sources = f"data.sources={loaded.recipe.data.sources[0]}"
    plant = Planted(flips=flips) if flips else None
    ends = train_on_ranks(ranks, path, *SETTINGS, sources, *settings, plant=plant)
    assert set(ends) == {"the samples are done"}, ends
    return path


def assert_found(path: Path, flips: tuple[Flip, ...], *, every: int) -> None:
    """Each flip has its record: the right rank, for sure, at the check at or after it."""
    found = [
        ([machine["rank"] for machine in record["machines"]], record["is_certain"], record["step"])
        for record in events(path, "corruption")
    ]
    faults = machine_faults(RunDirectory(path))
    assert [(fault.rank, fault.step) for fault in faults] == [(ranks[0], step) for ranks, _, step in found]
    check = [-(-flip.after // every) * every for flip in flips]
    assert found == [([flip.rank], True, at + 1) for flip, at in zip(flips, check, strict=True)]


def test_flips_in_weights_gradients_and_activations_are_found_named_and_undone(start: Start) -> None:
    flips = tuple(
        Flip(after=4 + 8 * number - (site == "weights"), rank=(3 * number + 1) % 4, site=site, seed=number)
        for number, site in enumerate(SITES)
    )
    path = trained(start, "flipped", "train.steps=38", flips=flips)
    assert_found(path, flips, every=EVERY)
    refused = [record["step"] for record in events(path, "step") if not record["update_applied"]]
    assert refused == [record["step"] for record in events(path, "corruption")]
