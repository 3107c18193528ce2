"""The held-out loss as an interlude of the run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bloomery.config.keeping import EvaluateSection
from bloomery.data.batches import MicroBatch
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.mesh import Mesh
from bloomery.train.state import TrainState


class HeldOutLoss:
    """Mean cross entropy over a fixed choice of held-out windows, the same at each evaluation."""

    def __init__(
        self, section: EvaluateSection, batches: Sequence[MicroBatch], *, model: TrainingModel, mesh: Mesh
    ) -> None:
        self.section = section
        self._batches = tuple(batches)
        self._model, self._mesh = model, mesh
        self._seen: tuple[object, ...] = ()

    def due(self, state: TrainState) -> bool:
        """At each multiple of the interval, and when the samples are done."""
        every = self.section.every_steps
        return (every > 0 and state.step % every == 0) or (self.section.at_end and state.done)

    def is_owed(self, state: TrainState) -> bool:
        """Whether a run that ends here was not evaluated: its last round came after its last report."""
        return self.due(state) and self._seen != _where(state)

    def run(self, state: TrainState) -> dict[str, float]:
        """`held_out_loss`, nats a token. Collective over the peer: each replica takes its windows."""
        self._seen = _where(state)
        mine = self._model.entropy(self._batches[self._mesh.data.index :: self._mesh.data.degree])
        sums = torch.tensor([mine.nats, mine.tokens], dtype=torch.float64, device=self._mesh.device)
        nats, tokens = self._mesh.pipeline.sum(self._mesh.data.sum(sums)).tolist()
        return {"held_out_loss": nats / tokens}


def _where(state: TrainState) -> tuple[object, ...]:
    return state.step, state.position, state.under_way
