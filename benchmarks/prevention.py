"""What each switch against loss spikes costs a training step, in pairs with a step that has none of them.

One process on one thread makes both steps of a pair one after the other, now this one first, now that one. A
ratio is the median over the pairs, in processor time, so that other work on the machine disturbs both alike.
The pairs of all switches are made in turns, and no more of them are begun after `--seconds`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from contract import Measurement, measurement, report

from bloomery.config.load import parse_recipe
from bloomery.data_loader.batches import MicroBatch
from bloomery.parallel.build import build_training_model
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.optimizers import Optimizers
from bloomery.plan.schedule import phase_at
from bloomery.train.state import Goal, TrainState
from bloomery.train.step import StepParts, train_step

RECIPE = """
[run]
name = "prevention"
[model]
layers = {layers}
hidden = {hidden}
heads = {heads}
vocabulary = 1024
tied = true
[data]
sources = ["python:stdlib"]
sequence_length = {length}
[train]
steps = 100
global_batch = 4
micro_batch = 2
precision = "fp32"
[optim]
learning_rate = 1e-3
"""
SIZES = {
    "small": dict(layers=2, hidden=256, heads=4, length=128),
    "tiny": dict(layers=1, hidden=32, heads=2, length=16),
}
PLAIN, PLAIN_MUON = "none", "none, with Muon"
SWITCHES: dict[str, list[str]] = {
    PLAIN: [],
    PLAIN_MUON: ["optim.name=muon"],
    "z-loss": ["loss.z_loss=1e-4"],
    "embedding norm": ["model.embedding_norm=true"],
    "QK-norm": ["model.qk_norm=true"],
    "QK-clip, every 8th query": ["optim.name=muon", "optim.qk_clip=100"],
    "QK-clip, all queries": ["optim.name=muon", "optim.qk_clip=100", "optim.qk_clip_stride=1"],
    "clipping by z-score": ["optim.clip_method=z-score"],
    "clipping by tensor": ["optim.clip_method=tensor"],
    "skipping outliers": ["optim.skip_outliers=6"],
    "inner sizes, at each step": ["guard.growth_steps=1"],
}
REPORTED_ONLY = ("QK-clip, all queries", "inner sizes, at each step")
"""Not the default: reported without a bar. Inner sizes are measured every 50 steps."""


def main() -> int:
    """Measure every switch and report. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--pairs", type=int, default=25, help="pairs of steps for each switch")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no more pairs after so long")
    arguments = parser.parse_args()
    found = measured(arguments.size, pairs=arguments.pairs, seconds=arguments.seconds)
    return report(found, as_json=arguments.json)


def measured(size: str, *, pairs: int, seconds: float) -> list[Measurement]:
    """Return what each switch costs a step. seconds: after so long no more pairs are begun."""
    torch.set_num_threads(1)
    steps = {name: _step_of(size, settings) for name, settings in SWITCHES.items()}
    return _measurements(_timed(steps, pairs, seconds=seconds))


def _step_of(size: str, settings: list[str]) -> Callable[[], None]:
    """Return a function that makes the next training step of a model with these settings."""
    recipe = parse_recipe(RECIPE.format(**SIZES[size]), settings, label="prevention").recipe
    phase, length = phase_at(recipe.train, 0), recipe.data.sequence_length
    vocabulary = int(recipe.model.vocabulary)
    model = build_training_model(
        recipe.model,
        vocabulary=vocabulary,
        sequence_length=length,
        optim=recipe.optim,
        loss=recipe.loss,
        loss_chunk=recipe.train.loss_chunk,
        seed=0,
        mesh=Mesh(device=torch.device("cpu")),
        parallel=recipe.parallel,
        compiled=False,
    )
    model.initialise(seed=0, bigrams=lambda: torch.empty(0))
    parts = StepParts(
        phase=phase,
        model=model,
        optimizers=Optimizers(model.weights, recipe.optim),
        loss_scale=None,
        clip=lambda state: recipe.optim.clip,
        sequence_length=length,
        learning_rate=lambda state: 1e-3,
        wait_staged=lambda: None,
        sizes_every=lambda: int(recipe.guard.growth_steps == 1),
    )
    tokens = torch.randint(0, vocabulary, (4, length), generator=torch.Generator().manual_seed(1))
    batches = [
        MicroBatch(tokens=part, targets=part, documents=None, samples=torch.arange(len(part)))
        for part in tokens.split(2)
    ]
    state = TrainState(goal=Goal(steps=1))

    def step() -> None:
        train_step(parts, batches, state)

    return step


Pair = tuple[float, float]


def _timed(steps: dict[str, Callable[[], None]], pairs: int, *, seconds: float) -> dict[str, list[Pair]]:
    """Return the processor seconds of each switch's pairs: (with the switch, without).

    The first step of each is left out. seconds: after so long no more pairs are begun; each switch has three.
    """
    timed: dict[str, list[Pair]] = {name: [] for name in steps if name not in (PLAIN, PLAIN_MUON)}
    for step in steps.values():
        step()
    begun = time.perf_counter()
    for index in range(pairs):
        if index >= 3 and time.perf_counter() - begun > seconds:
            break
        for name, own in timed.items():
            without = steps[PLAIN_MUON if "optim.name=muon" in SWITCHES[name] else PLAIN]
            if index % 2:
                plain = _seconds(without)
                own.append((_seconds(steps[name]), plain))
            else:
                own.append((_seconds(steps[name]), _seconds(without)))
    return timed


def _seconds(step: Callable[[], None]) -> float:
    started = time.process_time()
    step()
    return time.process_time() - started


def _measurements(timed: dict[str, list[Pair]]) -> list[Measurement]:
    return [
        measurement(
            f"prevention: {name}",
            100 * (median(own / without for own, without in pairs) - 1),
            unit="% of a step",
            reference=f"median of {len(pairs)} pairs; a step without it takes "
            f"{1000 * median(without for _, without in pairs):.0f} ms of one processor",
            bar=None if name in REPORTED_ONLY else "<= 2",
        )
        for name, pairs in timed.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
