"""Divides the blocks among pipeline stages by cost, and counts the parameters of stages and ranks.

Legend: t tensor-parallel ranks, d ranks that shard one copy (ZeRO), v vocabulary, h hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import lcm
from typing import TYPE_CHECKING, TypeAlias

from bloomery.config.model import ModelSection
from bloomery.config.parallel import ParallelSection
from bloomery.frozen import dataclass
from bloomery.plan.parameters import ModelParameters, count_parameters, query_width

if TYPE_CHECKING:
    from fractions import Fraction


Cost: TypeAlias = "int | Fraction"


@dataclass(frozen=True, kw_only=True)
class PipelineStage:
    """Consecutive blocks that one pipeline rank runs as a unit; the end stages embed and compute the loss.

    index: its place among all stages.
    rank: its index on the pipeline axis.
    """

    index: int
    rank: int
    blocks: range
    embeds: bool
    finishes: bool

    def __str__(self) -> str:
        """Return what the stage holds, blocks counted from 0: [embed|0-4], 5-10 or [65-69|head]."""
        parts = [
            f"{self.blocks.start}-{self.blocks.stop - 1}" if len(self.blocks) > 1 else f"{self.blocks[0]}"
        ]
        parts = ["embed"] * self.embeds + parts + ["head"] * self.finishes
        return f"[{'|'.join(parts)}]" if len(parts) > 1 else parts[0]


def stages_of(
    model: ModelSection, parallel: ParallelSection, *, vocabulary: int, sequence_length: int
) -> tuple[PipelineStage, ...]:
    """Return every stage of the pipeline, in order. Each block is in exactly one stage, and no stage is
    empty.

    The recipe must have been checked: there are enough blocks, and `blocks_per_stage` sums to them. Of one
    pipeline rank there is one stage, whatever a recipe for more says of theirs.
    """
    number = parallel.pipeline * parallel.chunks if parallel.pipeline > 1 else 1
    counts = parallel.blocks_per_stage if parallel.pipeline > 1 else (model.layers,)
    if not counts:
        ends = _end_costs(model, parallel.partition, vocabulary=vocabulary, sequence_length=sequence_length)
        counts = balanced_counts(model.layers, number, first=ends[0], last=ends[1])
    assert sum(counts) == model.layers and len(counts) == number, "every block is in one stage"
    bounds = [0, *accumulate(counts)]
    return tuple(
        PipelineStage(
            index=index,
            rank=rank_of_stage(index, pipeline=parallel.pipeline, schedule=parallel.schedule),
            blocks=range(start, stop),
            embeds=index == 0,
            finishes=index == number - 1,
        )
        for index, (start, stop) in enumerate(pairwise(bounds))
    )


def rank_of_stage(index: int, *, pipeline: int, schedule: str) -> int:
    """Return the pipeline rank of a stage: round robin, or with 'zbv' there and back, so that rank 0 has
    both ends.
    """
    turn, place = divmod(index, pipeline)
    return pipeline - 1 - place if schedule == "zbv" and turn % 2 else place


def balanced_counts(layers: int, stages: int, *, first: Cost, last: Cost) -> tuple[int, ...]:
    """Return the blocks of each stage that make the costliest stage cheapest, then the sum of squares least.

    first, last: what the embedding and the head cost, in blocks.
    """
    assert 1 <= stages <= layers
    unit = lcm(first.denominator, last.denominator)
    costs = [unit] * layers
    costs[0] += int(first * unit)
    costs[-1] += int(last * unit)
    sums = [0, *accumulate(costs)]
    bottleneck, _ = _cheapest(sums, stages, limit=None)
    _, counts = _cheapest(sums, stages, limit=bottleneck)
    return counts


def _cheapest(sums: Sequence[int], stages: int, *, limit: int | None) -> tuple[int, tuple[int, ...]]:
    """Return the least cost of cutting blocks into stages, and the counts; of equal cuts, the one whose last
    stages are the largest.

    limit: None minimises the largest stage; a number minimises the sum of squares, with no stage above it.
    """
    layers = len(sums) - 1
    best: list[tuple[int, tuple[int, ...]] | None] = [(0, ()), *[None] * layers]
    for stage in range(1, stages + 1):
        following: list[tuple[int, tuple[int, ...]] | None] = [None] * (layers + 1)
        for stop in range(stage, layers - (stages - stage) + 1):
            for start in range(stop - 1, stage - 2, -1):
                before, own = best[start], sums[stop] - sums[start]
                known = following[stop]
                alone = own if limit is None else own * own
                if (limit is not None and own > limit) or (known is not None and alone > known[0]):
                    break  # a stage that begins earlier costs even more
                if before is None:
                    continue
                cost = max(before[0], own) if limit is None else before[0] + alone
                if known is None or cost <= known[0]:
                    following[stop] = (cost, (*before[1], stop - start))
        best = following
    cheapest = best[layers]
    assert cheapest is not None, "as many blocks as stages, or more"
    return cheapest


def _end_costs(
    model: ModelSection, partition: str, *, vocabulary: int, sequence_length: int
) -> tuple[Cost, Cost]:
    """Return what embedding and head cost, in blocks. By operations, an embedding is a lookup and costs
    nothing.
    """
    if partition == "embeddings":
        return 1, 1
    counted = count_parameters(model, vocabulary=vocabulary, sequence_length=sequence_length)
    block = 2 * counted.block.matrices + 4 * sequence_length * query_width(model)
    from fractions import Fraction  # imported here, since it takes long to load and most plans need none

    return 0, Fraction(2 * vocabulary * model.hidden, block)


ROWS_ALIGNMENT = 8
"""A rank's rows of a split vocabulary are padded to a multiple of this, which matrix units need."""


@dataclass(frozen=True, kw_only=True)
class StageContents:
    """The contents of one stage, in elements.

    parameters: of the model; a tied embedding's second copy is not counted.
    weights: of each of its ranks, including that copy and the padding of a split vocabulary.
    masters: those of `weights` whose fp32 value and moments a rank keeps, without the alignment of buffers,
    below 0.1%.
    """

    stage: PipelineStage
    parameters: int
    weights: int
    masters: int


def contents_of(
    model: ModelSection, parallel: ParallelSection, *, vocabulary: int, sequence_length: int, data: int
) -> tuple[StageContents, ...]:
    """Return the contents of every stage in order; their `parameters` sum to those of the model.

    data: the data degree.
    """
    counted = count_parameters(model, vocabulary=vocabulary, sequence_length=sequence_length)
    shards = 1 if not parallel.zero else data if parallel.shard_degree == "auto" else parallel.shard_degree
    rows = padded_rows(vocabulary, degree=parallel.tensor)
    stages = stages_of(model, parallel, vocabulary=vocabulary, sequence_length=sequence_length)
    split, whole = _block_elements(model, counted)
    # A rank with both ends of a tied model has one embedding for them.
    echoes = model.tied and stages[0].rank != stages[-1].rank
    contents = []
    for stage in stages:
        few = _without_blocks_and_tables(counted, stage)
        tables = stage.embeds + (stage.finishes and (echoes or not model.tied))
        rank_parameters = (
            len(stage.blocks) * (split // parallel.tensor + whole) + few + tables * rows * model.hidden
        )
        logical = len(stage.blocks) * counted.block.total + few
        logical += (counted.embedding if stage.embeds else 0) + (counted.head if stage.finishes else 0)
        contents.append(
            StageContents(
                stage=stage,
                parameters=logical,
                weights=rank_parameters,
                masters=-(-rank_parameters // shards),
            )
        )
    return tuple(contents)


def padded_rows(vocabulary: int, *, degree: int) -> int:
    """Rows of the embedding that each tensor-parallel rank stores: its own and padding, as many on all."""
    largest = -(-vocabulary // degree)
    return largest if degree == 1 else -(-largest // ROWS_ALIGNMENT) * ROWS_ALIGNMENT


def _block_elements(model: ModelSection, counted: ModelParameters) -> tuple[int, int]:
    """Return (elements divided by t, elements whole on each rank) of one block.

    Norms, and biases of layers whose columns are split, are whole.
    """
    block = counted.block
    norms = block.attention_norm + block.query_key_norm + block.mlp_norm
    whole = norms + model.hidden * (model.attention_bias + model.mlp_bias)
    return block.total - whole, whole


def _without_blocks_and_tables(counted: ModelParameters, stage: PipelineStage) -> int:
    """Return the elements that are whole on each rank: learned positions and norms beside embedding and
    head.
    """
    first = counted.positions + counted.embedding_norm if stage.embeds else 0
    return first + (counted.final_norm if stage.finishes else 0)
