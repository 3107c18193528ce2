"""What each pipeline stage holds, and how much of it each of its ranks does. Arithmetic alone.

Legend: t tensor-parallel ranks, d ranks that shard one copy (ZeRO), v vocabulary, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.model import ModelSection
from bloomery.config.parallel import ParallelSection
from bloomery.plan.partition import Stage, stages_of
from bloomery.plan.shapes import ModelParameters, count_parameters

ROWS_ALIGNMENT = 8
"""A split vocabulary's rows on each rank are padded to a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class StageContents:
    """One stage, in elements.

    parameters: of the model, a tied embedding's second copy not counted. weights: of each of its ranks, that
    copy and the padding of a split vocabulary included. masters: of those, the ones whose fp32 value and
    moments a rank keeps, but for the alignment of buffers, below 0.1%.
    """

    stage: Stage
    parameters: int
    weights: int
    masters: int


def contents_of(
    model: ModelSection, parallel: ParallelSection, *, vocabulary: int, sequence_length: int, data: int
) -> tuple[StageContents, ...]:
    """Every stage in order; over all of them `parameters` add up to the model. data: the data degree."""
    counted = count_parameters(model, vocabulary=vocabulary, sequence_length=sequence_length)
    shards = 1 if not parallel.zero else data if parallel.shard_degree == "auto" else parallel.shard_degree
    rows = _rows_of_a_rank(vocabulary, tensor=parallel.tensor)
    stages = stages_of(model, parallel, vocabulary=vocabulary, sequence_length=sequence_length)
    split, whole = _block_elements(model, counted)
    # A rank with both ends of a tied model has one embedding for them.
    echoes = model.tied and stages[0].rank != stages[-1].rank
    found = []
    for stage in stages:
        few = _without_blocks_and_tables(counted, stage)
        tables = stage.embeds + (stage.finishes and (echoes or not model.tied))
        held = len(stage.blocks) * (split // parallel.tensor + whole) + few + tables * rows * model.hidden
        logical = len(stage.blocks) * counted.block.total + few
        logical += (counted.embedding if stage.embeds else 0) + (counted.head if stage.finishes else 0)
        found.append(StageContents(stage=stage, parameters=logical, weights=held, masters=-(-held // shards)))
    return tuple(found)


def _rows_of_a_rank(vocabulary: int, *, tensor: int) -> int:
    largest = -(-vocabulary // tensor)
    return largest if tensor == 1 else -(-largest // ROWS_ALIGNMENT) * ROWS_ALIGNMENT


def _block_elements(model: ModelSection, counted: ModelParameters) -> tuple[int, int]:
    """(split over t, whole on each) elements of one block: norms and biases of split columns are whole."""
    block = counted.block
    whole = block.attention_norm + block.mlp_norm + (2 * model.hidden if model.bias else 0)
    return block.total - whole, whole


def _without_blocks_and_tables(counted: ModelParameters, stage: Stage) -> int:
    """Learned positions and the norm beside the embedding, the final norm beside the head: whole on each."""
    first = counted.positions + counted.embedding_norm if stage.embeds else 0
    return first + (counted.final_norm if stage.finishes else 0)
