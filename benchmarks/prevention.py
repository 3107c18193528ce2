"""What each switch against loss spikes costs a training step, in turns with a step that has none of them.

One process on one thread makes a step of each variant in each round, in an order that changes. A ratio is the
median over rounds of two steps of one round, both in processor time, so that other work on the machine
disturbs both alike.
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
vocabulary = 4096
tied = true
[data]
sources = ["python:stdlib"]
sequence_length = {length}
[train]
steps = 100
global_batch = 8
micro_batch = 4
precision = "fp32"
[optim]
name = "muon"
learning_rate = 1e-3
"""
SIZES = {
    "small": dict(layers=2, hidden=256, heads=4, length=256),
    "tiny": dict(layers=1, hidden=32, heads=2, length=16),
}
PLAIN = "none"
SWITCHES: dict[str, list[str]] = {
    PLAIN: [],
    "z-loss": ["loss.z_loss=1e-4"],
    "embedding norm": ["model.embedding_norm=true"],
    "QK-norm": ["model.qk_norm=true"],
    "QK-clip, every 8th query": ["optim.qk_clip=100"],
    "QK-clip, all queries": ["optim.qk_clip=100", "optim.qk_clip_stride=1"],
    "clipping by z-score": ["optim.clip_method=z-score"],
    "clipping by tensor": ["optim.clip_method=tensor"],
    "skipping outliers": ["optim.skip_outliers=6"],
}
REPORTED_ONLY = ("QK-clip, all queries",)
"""Not the default, and known to cost as much as the scores: reported without a bar."""


def main() -> int:
    """Measure every switch and report. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = {name: _step_of(arguments.size, settings) for name, settings in SWITCHES.items()}
    return report(_measurements(_timed(steps, arguments.rounds)), as_json=arguments.json)


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
    )
    tokens = torch.randint(0, vocabulary, (8, length), generator=torch.Generator().manual_seed(1))
    batches = [
        MicroBatch(tokens=part, targets=part, documents=None, samples=torch.arange(len(part)))
        for part in tokens.split(4)
    ]
    state = TrainState(goal=Goal(steps=1))

    def step() -> None:
        train_step(parts, batches, state)

    return step


def _timed(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Return each variant's processor seconds, round by round; the first round is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for index in range(rounds + 1):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            started = time.process_time()
            steps[name]()
            if index:
                seconds[name].append(time.process_time() - started)
    return seconds


def _measurements(seconds: dict[str, list[float]]) -> list[Measurement]:
    found = []
    for name, own in seconds.items():
        if name == PLAIN:
            continue
        ratio = median(one / plain for one, plain in zip(own, seconds[PLAIN], strict=True))
        found.append(
            measurement(
                f"prevention: {name}",
                100 * (ratio - 1),
                unit="% of a step",
                reference=f"a step without it takes {1000 * median(seconds[PLAIN]):.0f} ms of one processor",
                bar=None if name in REPORTED_ONLY else "<= 2",
            )
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
