"""What a check for silent corruption costs a run at the default interval, with one micro-batch a step.

One process on one thread makes a step, and then what a check adds to one of several replicas: two
micro-batches computed once more, and digests of their gradients, of the weights and of the reduced gradients.
Both are in processor time, in turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import torch
from contract import Measurement, measurement, report
from prevention import RECIPE, SIZES

from bloomery.config.checkpoint import GuardSection
from bloomery.config.load import parse_recipe
from bloomery.data_loader.batches import MicroBatch
from bloomery.parallel.bit_digest import digest_of_all
from bloomery.parallel.build import build_training_model
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.optimizers import Optimizers
from bloomery.plan.schedule import phase_at
from bloomery.train.state import Goal, TrainState
from bloomery.train.step import StepParts, train_step


def main() -> int:
    """Measure and report. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    return report([measured(arguments.size, rounds=arguments.rounds)], as_json=arguments.json)


def measured(size: str, *, rounds: int) -> Measurement:
    """Return what a check costs a run at the default interval."""
    torch.set_num_threads(1)
    settings = ["train.global_batch=4"]
    recipe = parse_recipe(RECIPE.format(**SIZES[size]), settings, label="corruption").recipe
    length, vocabulary = recipe.data.sequence_length, int(recipe.model.vocabulary)
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
        phase=phase_at(recipe.train, 0),
        model=model,
        optimizers=Optimizers(model.weights, recipe.optim),
        loss_scale=None,
        clip=lambda state: recipe.optim.clip,
        sequence_length=length,
        learning_rate=lambda state: 1e-3,
        wait_staged=lambda: None,
    )
    tokens = torch.randint(0, vocabulary, (4, length), generator=torch.Generator().manual_seed(1))
    batch = MicroBatch(tokens=tokens, targets=tokens, documents=None, samples=torch.arange(4))
    state = TrainState(goal=Goal(steps=1))
    steps, checks = [], []
    for index in range(rounds + 1):
        begun = time.process_time()
        train_step(parts, [batch], state)
        between = time.process_time()
        for _ in range(2):
            model.digest_gradients(batch, 0, weight=1.0)
        digest_of_all(model.weights.master)
        digest_of_all(model.weights.reduced_gradient)
        if index:
            steps.append(between - begun)
            checks.append(time.process_time() - between)
    every = GuardSection().corruption_steps
    share = median(check / step for check, step in zip(checks, steps, strict=True)) / every
    return measurement(
        f"corruption: a check every {every} steps",
        100 * share,
        unit="% of a run",
        reference=f"a step {1000 * median(steps):.0f} ms, a check {1000 * median(checks):.0f} ms",
        bar="<= 1",
    )


if __name__ == "__main__":
    sys.exit(main())
