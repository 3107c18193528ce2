"""The optimizer of each parameter group, stepped together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from bloomery.checkpoint.state import Json, StateEntry, whole
from bloomery.config.optim import OptimSection
from bloomery.optim.adamw import FlatAdamW
from bloomery.optim.clip import GradientFacts
from bloomery.optim.groups import GroupLayout, Rule
from bloomery.optim.muon import FlatMuon
from bloomery.parallel.precision import MasterWeights, entries_of, multiplies_bf16


class Optimizers:
    """One `FlatAdamW` or `FlatMuon` for each group of the master weights.

    precision: of the run. Muon's products are in bf16 where the device has units for them, but never in a run
    that computes in fp32: whoever chose that compares to many digits.
    """

    def __init__(self, weights: MasterWeights, optim: OptimSection, *, precision: str = "fp32") -> None:
        self._weights = weights
        self._peak = optim.learning_rate
        self._peaks = peak_rates(optim)
        # Applied updates of each rule's AdamW, for the bias correction. On the device, since a refused one
        # must not count.
        self._updates: dict[Rule, Tensor] = {
            group.rule: torch.zeros((), device=master.device)
            for group, master in zip(weights.layouts, weights.master, strict=True)
            if group.rule != "muon"
        }
        in_bf16 = precision != "fp32" and multiplies_bf16(weights.master[0].device)
        products = torch.bfloat16 if in_bf16 else torch.float32
        self._members = [
            _member(group, master, gradient, optim, self._updates.get(group.rule), products)
            for group, master, gradient in zip(weights.layouts, weights.master, weights.gradient, strict=True)
        ]

    def step(self, facts: GradientFacts, *, learning_rate: float) -> None:
        """One update of every group, or of none where the gradients are not finite.

        learning_rate: of the schedule; a group with a peak of its own follows it in proportion.
        """
        facts = facts.to(self._weights.master[0].device)
        for updates in self._updates.values():
            updates += 1
        for group, member in zip(self._weights.layouts, self._members, strict=True):
            member.step(facts, learning_rate=learning_rate * self._peaks[group.rule] / self._peak)
        for updates in self._updates.values():
            updates -= (~facts.finite).float()

    def reset(self) -> None:
        """Forget every moment, as at the start of a run."""
        for member in self._members:
            for moment in member.moments.values():
                moment.zero_()
        for updates in self._updates.values():
            updates.zero_()

    def state_entries(self) -> Iterable[StateEntry]:
        """Moments as logical tensors, and the count of applied updates of each rule's AdamW."""
        for group, member in zip(self._weights.layouts, self._members, strict=True):
            for suffix, flat in member.moments.items():
                yield from entries_of(group, flat, prefix="optim", suffix=suffix)
        for rule, updates in self._updates.items():
            yield whole(f"optim.{rule}.updates", updates, scope="peer")

    def state_values(self) -> dict[str, Json]:
        """Nothing but tensors."""
        return {}

    def load_state_values(self, values: Mapping[str, Json]) -> None:
        """Nothing but tensors."""


def peak_rates(optim: OptimSection) -> dict[Rule, float]:
    """The peak learning rate of each group."""
    own: dict[Rule, float | str] = {
        "muon": optim.muon_learning_rate,
        "embedding": optim.embedding_learning_rate,
        "head": optim.head_learning_rate,
    }
    rules: tuple[Rule, ...] = ("muon", "matrix", "embedding", "head", "plain")
    return {
        rule: optim.learning_rate if own.get(rule, "auto") == "auto" else float(own[rule]) for rule in rules
    }


def _member(
    group: GroupLayout,
    master: Tensor,
    gradient: Tensor,
    optim: OptimSection,
    updates: Tensor | None,
    products: torch.dtype,
) -> FlatAdamW | FlatMuon:
    if group.rule == "muon":
        return FlatMuon(
            master,
            gradient,
            group.logical,
            momentum=optim.muon_momentum,
            weight_decay=optim.weight_decay,
            iterations=optim.muon_iterations,
            products=products,
        )
    assert updates is not None, "every rule but muon follows AdamW, and has its count"
    is_embedding = group.rule in ("embedding", "head")
    decays = group.rule != "plain" and (optim.decay_embeddings or not is_embedding)
    return FlatAdamW(
        master,
        gradient,
        betas=(optim.beta1, optim.beta2),
        epsilon=optim.epsilon,
        weight_decay=optim.weight_decay if decays else 0.0,
        updates=updates,
    )
