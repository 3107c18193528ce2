"""Computes the held-out loss between two steps: of each dataset, and of all together."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bloomery.config.checkpoint import EvaluateSection
from bloomery.config.recipe import Recipe
from bloomery.data.dataset_shares import held_out_weights
from bloomery.data.prepare import Prepared
from bloomery.data_loader.batches import MicroBatch, held_out_batches
from bloomery.data_loader.packs import IGNORED
from bloomery.parallel.build import TrainingModel
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.rank_zero_task import ReportProgress
from bloomery.train.data_stream import held_out_documents
from bloomery.train.state import TrainState

log = logging.getLogger(__name__)

_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class HeldOutBatch:
    """A batch of windows of one dataset's held-out text."""

    dataset: str
    batch: MicroBatch


class HeldOutLoss:
    """Computes the mean cross entropy, in nats per token, over a fixed choice of held-out windows, which is
    the same at each evaluation.
    """

    def __init__(
        self,
        section: EvaluateSection,
        batches: Sequence[HeldOutBatch],
        *,
        model: TrainingModel,
        mesh: Mesh,
        ratios: Mapping[str, float] | None = None,
        report_progress: ReportProgress,
    ) -> None:
        """ratios: of the datasets in the loss of all; None weighs each token alike.

        report_progress: called between batches, so that a long evaluation does not count as hung.
        """
        self.section = section
        self._batches = tuple(batches)
        self._datasets = tuple(dict.fromkeys(window.dataset for window in batches))
        self._model, self._mesh = model, mesh
        self._ratios, self._report_progress = ratios, report_progress
        self._seen: tuple[object, ...] = ()

    def due(self, state: TrainState) -> bool:
        """Whether to evaluate: at each multiple of the interval, and when the samples are used up."""
        interval = self.section.every_steps
        return (interval > 0 and state.step % interval == 0) or (self.section.at_end and state.done)

    def is_owed(self, state: TrainState) -> bool:
        """Whether a run that ends here was not evaluated, because its last round came after its last
        report.
        """
        return self.due(state) and self._seen != _where(state)

    def run(self, state: TrainState) -> dict[str, Any]:  # Any: of the report's fields
        """Return `held_out_loss` in nats per token, over all windows or by the ratios, and
        `held_out_by_dataset`.

        Collective over the peer: each replica takes its windows.
        """
        self._seen = _where(state)
        own = self._batches[self._mesh.data.index :: self._mesh.data.degree]
        rows = []
        for dataset in self._datasets:
            batches = [window.batch for window in own if window.dataset == dataset]
            entropy = self._model.entropy(batches, report_progress=self._report_progress)
            rows.append([entropy.nats, entropy.tokens])
        sums = torch.tensor(rows, dtype=torch.float64, device=self._mesh.device)
        self._mesh.pipeline.all_reduce(self._mesh.data.all_reduce(sums))
        self._mesh.wait_for_device()
        table = sums.tolist()
        nats, tokens = (sum(column) for column in zip(*table, strict=True))
        losses = {name: row[0] / row[1] for name, row in zip(self._datasets, table, strict=True)}
        loss = nats / tokens
        if self._ratios is not None:
            whole = sum(self._ratios[name] for name in losses)
            loss = sum(loss * self._ratios[name] for name, loss in losses.items()) / whole
        return {"held_out_loss": loss, "held_out_by_dataset": losses if len(losses) > 1 else None}


def build_held_out(
    recipe: Recipe, prepared: Prepared, model: TrainingModel, mesh: Mesh, *, report_progress: ReportProgress
) -> HeldOutLoss | None:
    """Return what computes the held-out loss of a run; None where it has no held-out text that counts.

    `evaluate.samples` windows are spread over the datasets by their weights, at least one each. A dataset of
    whose windows no token counts is named and left out: its mean would be one over nothing.

    report_progress: called between the batches of each evaluation.
    """
    batches = list[HeldOutBatch]()
    parts = held_out_documents(recipe.data, prepared)
    shares = _shares([part.weight for part in parts], recipe.evaluate.samples)
    for part, windows in zip(parts, shares, strict=True):
        own = [
            HeldOutBatch(dataset=part.name, batch=batch)
            for batch in held_out_batches(
                part.documents,
                sequence_length=recipe.data.sequence_length,
                rows=min(recipe.evaluate.samples, _ROWS),
                eod=prepared.end_of_document_id,
                limit=windows,
                answers_alone=bool(recipe.data.prompt_field),
                divisor=model.decoder.sequence_degree,
            )
        ]
        if any(bool((each.batch.targets != IGNORED).any()) for each in own):
            batches += own
        elif own and mesh.is_first:
            log.warning(
                "no loss of %r is measured: the windows that are taken of it are all prompt, and answers "
                "alone count. Raise evaluate.samples or data.sequence_length.",
                part.name,
            )
    if not batches:  # there is nothing to evaluate on
        return None
    ratios = None
    if held_out_weights(recipe.data) is not None:
        ratios = {part.name: part.weight for part in parts}
    return HeldOutLoss(
        recipe.evaluate, batches, model=model, mesh=mesh, ratios=ratios, report_progress=report_progress
    )


def _shares(weights: Sequence[float], count: int) -> list[int]:
    """Return how many of `count` windows each dataset gets, by weight and rounded up, so at least one."""
    total = sum(weights) or 1.0
    return [max(1, -int(-count * weight // total)) for weight in weights]


def _where(state: TrainState) -> tuple[object, ...]:
    return state.step, state.position, state.under_way
