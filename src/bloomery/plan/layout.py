"""The layout of a model over accelerators: degrees, pipeline stages and sharding, and the pipeline bubble.

Legend: p pipeline stages, v chunks (virtual stages) of each, t tensor, d data, m micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from bloomery.config.parallel import RECOMPUTATIONS
from bloomery.config.recipe import Recipe
from bloomery.frozen import dataclass
from bloomery.plan.parameters import ModelParameters
from bloomery.plan.pipeline_stages import stages_of as partition


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to split a model and its batch. It is hashable, because it is a key in tables of stage
    times.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sequence: bool = False
    async_tensor: bool = False
    """Whether the exchanges of sequence parallelism overlap the products beside them."""
    zero: int = 0
    shard: int = 0
    """The number of data-parallel neighbours that share one copy of what is sharded; 0 means all of them."""
    offload: bool = False
    """Whether masters and moments live and are updated in the CPU's memory."""
    rounds_by_block: bool = False
    """Whether working weights are rounded from the masters for each block, instead of kept."""
    keeps_fp8: bool = True
    """Whether matrices of 8 bits are kept where working weights are."""
    overlaps: bool = True
    """Whether gradients are summed, and sharded weights gathered, beside the computation."""
    prefetch_blocks: int = 2
    """How many blocks' weights ZeRO 3 gathers ahead of the one that is computed, where it overlaps."""
    schedule: str = "1f1b"
    chunks: int = 1
    per_node: int = 8
    blocks: tuple[int, ...] = ()
    """The number of blocks of each pipeline rank, if a recipe's partition sets it; empty means as even as
    possible.
    """
    recompute: tuple[str, ...] = ()
    """What each pipeline rank recomputes, if a recipe sets it stage by stage."""
    head_rank: int = -1
    """The pipeline rank with the head; with 'zbv' it is the first, which has the embedding too."""

    @property
    def replica(self) -> int:
        """The number of accelerators that hold the model once."""
        return self.tensor * self.pipeline

    @property
    def world(self) -> int:
        """The number of accelerators of all replicas."""
        return self.replica * self.data

    @property
    def shards(self) -> int:
        """The number of parts into which ZeRO divides one copy of what it shards; 1 if it shards nothing."""
        if not self.zero:
            return 1
        return min(self.shard, self.data) if self.shard else self.data

    @property
    def nodes(self) -> int:
        """The number of machines; the last may be used in part."""
        return -(-self.world // self.per_node)

    @property
    def data_in_node(self) -> int:
        """The number of ranks of a data-parallel group on one node, whose ranks are numbered along the tensor
        axis first and the data axis next.
        """
        return max(1, min(self.data, self.per_node // self.tensor))

    @property
    def leaves_node(self) -> bool:
        """Whether pipeline stages lie on several machines."""
        return self.pipeline > 1 and self.world > self.per_node

    def __str__(self) -> str:
        """Return the layout in short, as tables show it: TP4·PP12·DP8."""
        chunks = f"×{self.chunks}" if self.chunks > 1 else ""
        shards = f"/{self.shards}" if self.zero and self.shards != self.data else ""
        offload = "+CPU" if self.offload else ""
        return f"TP{self.tensor}·PP{self.pipeline}{chunks}·DP{self.data}·Z{self.zero}{shards}{offload}"


def layout_of(recipe: Recipe, *, accelerators: int, per_node: int, vocabulary: int) -> Layout:
    """Return the recipe's layout; the data degree is `accelerators` divided by the other degrees."""
    parallel = recipe.parallel
    pipeline = parallel.pipeline
    chunks = parallel.chunks if pipeline > 1 else 1
    blocks = [0] * pipeline
    recompute = ["full"] * pipeline
    head_rank = 0
    if pipeline > 1:
        for stage in partition(
            recipe.model, parallel, vocabulary=vocabulary, sequence_length=recipe.data.sequence_length
        ):
            blocks[stage.rank] += len(stage.blocks)
            if parallel.recompute_per_stage:
                # Of the stages on one rank, the one that keeps the most activations decides.
                both = (recompute[stage.rank], parallel.recompute_per_stage[stage.index])
                recompute[stage.rank] = min(both, key=RECOMPUTATIONS.index)
            head_rank = stage.rank if stage.finishes else head_rank
    return Layout(
        tensor=parallel.tensor,
        pipeline=pipeline,
        data=max(1, accelerators // (parallel.tensor * pipeline)),
        sequence=parallel.sequence and parallel.tensor > 1,
        async_tensor=parallel.async_tensor and parallel.sequence and parallel.tensor > 1,
        zero=parallel.zero,
        shard=0 if parallel.shard_degree == "auto" else parallel.shard_degree,
        offload=parallel.offload == "cpu",
        rounds_by_block=parallel.working == "by-block",
        keeps_fp8=parallel.fp8_copies,
        overlaps=parallel.overlap,
        prefetch_blocks=parallel.prefetch_blocks,
        schedule=parallel.schedule,
        chunks=chunks,
        per_node=per_node,
        blocks=tuple(blocks) if pipeline > 1 else (),
        recompute=tuple(recompute) if parallel.recompute_per_stage and pipeline > 1 else (),
        head_rank=head_rank,
    )


def bubble_slots(layout: Layout) -> float:
    """Return the idle slots of one pass over the pipeline, in units of one micro-batch's forward and
    backward.

    They are (p − 1)/v (Narayanan et al., 2021, §2.2). Zero-bubble schedules leave a third of that, if a
    backward divides into two halves that are each as long as a forward (Qi et al., 2023).
    """
    left = {"zero-bubble": 1 / 3, "zbv": 1 / 3}.get(layout.schedule, 1.0)
    return (layout.pipeline - 1) * left / layout.chunks


def bubble_share(layout: Layout, micro_batches: int) -> float:
    """Return the share of a step in which a stage is idle: (p − 1)/(m + p − 1) for 1F1B."""
    idle = bubble_slots(layout)
    return idle / (micro_batches + idle)


@dataclass(frozen=True, kw_only=True)
class StageParameters:
    """The parameters that one pipeline stage holds, not divided by t."""

    blocks: int
    has_embedding: bool
    has_head: bool
    recompute: str = ""
    """What its blocks recompute, if that differs from the phase's setting."""


def stage_parameters(layout: Layout, parameters: ModelParameters) -> tuple[StageParameters, ...]:
    """Return the parameters that each pipeline rank holds, in all its chunks together."""
    if not layout.blocks:
        return even_stages(parameters, layout.pipeline, parameters.embedding / parameters.block.total)
    head = layout.head_rank % layout.pipeline
    return tuple(
        StageParameters(
            blocks=count,
            has_embedding=index == 0,
            has_head=index == head,
            recompute=layout.recompute[index] if layout.recompute else "",
        )
        for index, count in enumerate(layout.blocks)
    )


@lru_cache(maxsize=4096)
def even_stages(
    parameters: ModelParameters, pipeline: int, head_in_blocks: float
) -> tuple[StageParameters, ...]:
    """Return the blocks of each stage, counting the embedding on the first stage and the head on the last as
    blocks.

    head_in_blocks: what the embedding or the head weighs, in blocks. BLOOM's vocabulary of 250k weighs 1.5,
    so its 70 blocks on 12 stages become 5, 10 × 6, 5.
    """
    layers = parameters.layers
    if pipeline == 1:
        return (StageParameters(blocks=layers, has_embedding=True, has_head=True),)
    most = 1 + layers // pipeline
    candidates = [_even(layers, pipeline, ends=ends) for ends in range(min(round(head_in_blocks), most) + 1)]
    blocks = min(candidates, key=lambda counts: _heaviest(counts, head_in_blocks))
    return tuple(
        StageParameters(blocks=count, has_embedding=index == 0, has_head=index == pipeline - 1)
        for index, count in enumerate(blocks)
    )


def _heaviest(counts: Sequence[int], end: float) -> float:
    return max(*counts, counts[0] + end, counts[-1] + end)


def _even(layers: int, stages: int, *, ends: int) -> Sequence[int]:
    """Return the blocks of each stage, as even as whole blocks allow.

    ends: number of blocks that the first and the last stage carry besides.
    """
    low, surplus = divmod(layers + 2 * ends, stages)
    # A remainder goes to the middle, where its activations live shorter than on the first stage.
    order = sorted(range(stages), key=lambda index: (index in (0, stages - 1), abs(index - stages // 2)))
    counts = [low] * stages
    for index in order[:surplus]:
        counts[index] += 1
    for index in {0, stages - 1}:
        counts[index] -= ends
    while min(counts) < 1:
        poor, rich = counts.index(min(counts)), counts.index(max(counts))
        counts[poor] += 1
        counts[rich] -= 1
    return counts
