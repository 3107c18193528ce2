"""The optimizer of each parameter group, stepped together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bloomery.checkpoint.state import Box, Json, StateEntry
from bloomery.config.optim import OptimSection
from bloomery.optim.adamw import FlatAdamW
from bloomery.optim.clip import GradientFacts
from bloomery.optim.muon import FlatMuon
from bloomery.parallel.precision import MasterWeights, entries_of


class Optimizers:
    """One `FlatAdamW` or `FlatMuon` for each group of the master weights."""

    def __init__(self, weights: MasterWeights, optim: OptimSection) -> None:
        self._weights = weights
        self._muon_ratio = (
            1.0
            if optim.muon_learning_rate == "auto"
            else float(optim.muon_learning_rate) / optim.learning_rate
        )
        self._members: list[FlatAdamW | FlatMuon] = []
        for group, master, gradient in zip(weights.layouts, weights.master, weights.gradient, strict=True):
            decay = 0.0 if group.rule == "plain" else optim.weight_decay
            if group.rule == "muon":
                self._members.append(
                    FlatMuon(
                        master,
                        gradient,
                        group.logical,
                        momentum=optim.muon_momentum,
                        weight_decay=decay,
                        iterations=optim.muon_iterations,
                    )
                )
            else:
                self._members.append(
                    FlatAdamW(
                        master,
                        gradient,
                        betas=(optim.beta1, optim.beta2),
                        epsilon=optim.epsilon,
                        weight_decay=decay,
                    )
                )

    def step(self, facts: GradientFacts, *, learning_rate: float) -> None:
        """One update of every group, or of none where the gradients are not finite."""
        for member in self._members:
            ratio = self._muon_ratio if isinstance(member, FlatMuon) else 1.0
            member.step(facts, learning_rate=learning_rate * ratio)

    def reset(self) -> None:
        """Forget every moment, as at the start of a run."""
        for member in self._members:
            for moment in member.moments.values():
                moment.zero_()
            if isinstance(member, FlatAdamW):
                member.updates.zero_()

    def state_entries(self) -> Iterable[StateEntry]:
        """Moments as logical tensors, and the count of applied updates of each AdamW group."""
        for group, member in zip(self._weights.layouts, self._members, strict=True):
            for suffix, flat in member.moments.items():
                yield from entries_of(group, flat, prefix="optim", suffix=suffix)
            if isinstance(member, FlatAdamW):
                yield StateEntry(
                    name=f"optim.{group.rule}.updates",
                    global_shape=(),
                    dtype="float32",
                    box=Box(offset=(), shape=()),
                    tensor=member.updates,
                    scope="peer",
                )

    def state_values(self) -> dict[str, Json]:
        """Nothing but tensors."""
        return {}

    def load_state_values(self, values: Mapping[str, Json]) -> None:
        """Nothing but tensors."""
