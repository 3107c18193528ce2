"""Says what exists only briefly in a step whose gradients are sharded: at the loss, or in a backward."""

from __future__ import annotations

from bloomery.frozen import dataclass
from bloomery.plan.block_cost import Workload
from bloomery.plan.layout import StageParameters
from bloomery.plan.parameters import ModelParameters


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The bytes that exist at one moment of a micro-batch, beside what the whole step keeps."""

    weights: float = 0.0
    gradients: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        """Their sum, in bytes."""
        return self.weights + self.gradients + self.activations + self.logits + self.buffers


def moments_of_shards(
    work: Workload,
    parameters: ModelParameters,
    stage: StageParameters,
    *,
    has_more_micro_batches: bool,
    beside: Moment,
) -> tuple[Moment, Moment]:
    """Return the two moments of ZeRO 2 and 3 of which either may be the peak: the loss, and the backward of
    the last block, which is the first.

    At the loss no block has weights, and before any block's backward the logits are freed. A group of
    parameters has its whole gradient from its first part until that is reduced; where reductions overlap,
    until those of the next block begin, so that two blocks have whole gradients. The embedding's comes last
    in a micro-batch, and stays until the next one reduces another. A tied one begins with the head's part.

    has_more_micro_batches: whether a step has more than one on this rank.
    beside: logits of the loss; activations that are computed again, and gradients before they are added.
    """
    layout, width = work.layout, 4 if work.precision == "fp32" else 2
    one_block = parameters.block.total / layout.tensor
    ahead = layout.prefetch_blocks if layout.overlaps else 0
    gathered = min(stage.blocks, 1 + ahead) * one_block if layout.zero == 3 else 0.0
    embedding = 4 * parameters.embedding / layout.tensor if stage.has_embedding else 0.0
    last_one = embedding if layout.overlaps and has_more_micro_batches else 0.0
    is_tied = work.model.tied and stage.has_head
    at_loss = Moment(gradients=last_one, logits=beside.logits)
    at_backward = Moment(
        weights=width * gathered,
        gradients=4 * min(stage.blocks, 2 if layout.overlaps else 1) * one_block
        + (last_one + embedding if is_tied else 0.0),
        activations=beside.activations,
        buffers=beside.buffers,
    )
    return at_loss, at_backward
