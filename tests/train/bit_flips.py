"""Flips single bits on one rank while it trains: in weights, gradients and activations, at planned steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SITES = ("weights", "gradient", "reduced gradient", "activation", "activation of a repetition")


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One bit that flips on one rank, once, in the step after `after` completed ones."""

    after: int
    rank: int
    site: str
    seed: int


def plan_flips(count: int, *, ranks: int, first: int, every: int, seed: int) -> list[Flip]:
    """Flips `every` steps apart: those of weights at any step, others at the checked one, a multiple."""
    draw = random.Random(seed)
    flips = []
    for number in range(count):
        site = SITES[number % len(SITES)]
        early = draw.randrange(every // 2) if site == "weights" else 0
        after = first + number * every - early
        flips.append(Flip(after=after, rank=draw.randrange(ranks), site=site, seed=draw.randrange(1 << 30)))
    return flips


class Planted:
    """Plants the flips of a rank; picklable, for `train_on_ranks`."""

    def __init__(self, flips: Sequence[Flip]) -> None:
        self.waiting = list(flips)
        self.armed: list[Flip] = []

    def __call__(self, rank: int) -> None:
        from bloomery.parallel.build import TrainingModel
        from bloomery.parallel.precision import MasterWeights

        self.waiting = [flip for flip in self.waiting if flip.rank == rank]
        self._plant_in_model(TrainingModel)
        self._plant_in_weights(MasterWeights)

    def _take(self, site: str) -> Flip | None:
        chosen = next((flip for flip in self.armed if flip.site == site), None)
        if chosen is not None:
            self.armed.remove(chosen)
        return chosen

    def _plant_in_model(self, model: Any) -> None:
        accumulate, digest = model.accumulate, model.digest_gradients

        def accumulating(itself: Any, micro_batches: Any, step: int, *, weight: Any) -> Any:
            while self.waiting and self.waiting[0].after <= step:
                self.armed.append(self.waiting.pop(0))
            if flip := self._take("weights"):
                _flip(itself.weights.master[flip.seed % len(itself.weights.master)], flip.seed)
            if flip := self._take("activation"):
                _flip_next_output(itself.decoder, flip.seed)
            return accumulate(itself, micro_batches, step, weight=weight)

        def digesting(itself: Any, micro_batch: Any, step: int, *, weight: Any) -> Any:
            if flip := self._take("activation of a repetition"):
                _flip_next_output(itself.decoder, flip.seed)
            return digest(itself, micro_batch, step, weight=weight)

        model.accumulate, model.digest_gradients = accumulating, digesting

    def _plant_in_weights(self, weights: Any) -> None:
        add, reduce = weights._accumulate, weights.reduce

        def adding(itself: Any, parameter: Any, *, is_last: bool = True) -> None:
            flip = self._take("gradient") if parameter.grad is not None else None
            if flip:
                _flip(parameter.grad, flip.seed)
            add(itself, parameter, is_last=is_last)

        def reducing(itself: Any) -> None:
            reduce(itself)
            if flip := self._take("reduced gradient"):
                _flip(itself.reduced_gradient[flip.seed % len(itself.reduced_gradient)], flip.seed)

        weights._accumulate, weights.reduce = adding, reducing


def _flip(tensor: Any, seed: int) -> None:
    """Flip a random bit of a random element that is not 0, in place."""
    import torch

    draw = random.Random(seed)
    flat = tensor.detach().view(-1)
    filled = flat.nonzero().view(-1)
    at = int(filled[draw.randrange(len(filled))]) if len(filled) else 0
    bits = flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()])
    width = 8 * flat.element_size()
    bit = draw.randrange(width)
    bits[at] ^= -(1 << bit) if bit == width - 1 else 1 << bit


def _flip_next_output(decoder: Any, seed: int) -> None:
    """Flip a bit in what a random block computes in its next forward."""
    block = random.Random(seed).choice(list(decoder.blocks))

    def flip(module: Any, inputs: Any, output: Any) -> None:
        handle.remove()
        _flip(output.data, seed)

    handle = block.register_forward_hook(flip)
