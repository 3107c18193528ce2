"""Predicts every collective and message of one rank in one optimizer step: kind, axis, bytes and number.

They are those of an ordinary step: none in which inner tensors are measured or bits are compared
(`guard.growth_steps`, `guard.corruption_steps`), nothing is saved, and no request waits. Exchanges between
peers are planned in `peer_round.py`.

A collective has two sizes. `payload_bytes` are those of the tensor that it is about: what is all-reduced or
reduced, the whole tensor of which ranks scatter or gather the parts, the message. `sent_bytes` are those that
a ring puts on the wire for each rank (Thakur et al. 2005, section 4): (n - 1)/n of the payload for
reduce_scatter, all_gather, reduce and broadcast, twice that for all_reduce. n: the ranks of the group.

Legend: b samples of a micro-batch, s sequence, h hidden, t tensor-parallel ranks, m micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, TypeAlias

from bloomery.config.model import ModelSection
from bloomery.config.optim import OptimSection
from bloomery.config.parallel import RECOMPUTATIONS, SPLIT_BACKWARD, ParallelSection
from bloomery.config.recipe import Recipe
from bloomery.frozen import dataclass
from bloomery.plan.block_cost import BYTES, ring_bytes
from bloomery.plan.pipeline_stages import PipelineStage, rank_of_stage, stages_of
from bloomery.plan.ranks import Degrees
from bloomery.plan.schedule import Phase
from bloomery.plan.weight_buffers import WeightBuffer, tensor_count, weight_buffers

Kind: TypeAlias = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast", "send", "receive"
]
Axis: TypeAlias = Literal["tensor", "pipeline", "shard", "replica", "data", "embedding", "world"]
"""The axes of `parallel/mesh.py`; 'pipeline' also stands for the channels between its stages, and 'world' for
all ranks."""

PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "reduce": 1, "broadcast": 1}
LINEARS = 4
"""The linear layers of a block whose factors fp8 rounds: queries to values, output, and two of the MLP.
Tensor parallelism splits the outputs of the first and the third, and the inputs of the others."""
NORM_BYTES = 2 * 8
"""The sum of squares and the number of zeros of the gradients, fp64."""
REPORT_BYTES = 14 * 8
"""The numbers of a step's report that are summed over all ranks (`train/metrics.py`), fp64."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Equal collectives, or messages, of one rank.

    ranks: the number of ranks of the group. times: how often a step has it.
    """

    kind: Kind
    axis: Axis
    payload_bytes: int
    ranks: int
    times: int = 1

    @property
    def sent_bytes(self) -> float:
        """The bytes that this rank sends for all of them; of reduce and broadcast, the mean of the ranks."""
        if self.kind in ("send", "receive"):
            return float(self.times * self.payload_bytes) if self.kind == "send" else 0.0
        return self.times * ring_bytes(self.payload_bytes, self.ranks, passes=PASSES[self.kind])


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What the collectives of a step depend on. Hashable.

    vocabulary: without the padding of a split one. loss_chunk: tokens whose logits exist at one time.
    scatters: whether gradients are summed by reduce_scatter; gloo's takes longer than its all_reduce, which
        then takes its place.
    compiles: whether blocks are compiled. An eager block that drops its output computes its last collective
        again with the rest, since the mask comes after it.
    fp8_scaling: what shares a scale where the phase multiplies in 8 bits.
    """

    model: ModelSection
    parallel: ParallelSection
    optim: OptimSection
    degrees: Degrees
    phase: Phase
    vocabulary: int
    sequence_length: int
    loss_chunk: int
    scatters: bool = True
    compiles: bool = True
    fp8_scaling: str = "tensor"

    @property
    def micro_batches(self) -> int:
        """The micro-batches of each rank."""
        return self.phase.global_batch // (self.phase.micro_batch * self.degrees.data)

    @property
    def stages(self) -> tuple[PipelineStage, ...]:
        """Every stage of the pipeline."""
        return _stages(self.model, self.parallel, self.vocabulary, self.sequence_length)

    @property
    def value_bytes(self) -> int:
        """The bytes of one working weight or activation."""
        return BYTES[self.phase.precision]

    @property
    def activation_bytes(self) -> int:
        """The bytes of the residual stream [b, s, h] of one micro-batch."""
        return self.phase.micro_batch * self.sequence_length * self.model.hidden * self.value_bytes


def step_shape(recipe: Recipe, degrees: Degrees, phase: Phase, *, vocabulary: int) -> StepShape:
    """Return what a step of a recipe depends on, on machines that sum by reduce_scatter.

    vocabulary: the model's, with 'auto' resolved. The phase's recomputation is resolved, too.
    """
    assert phase.recompute in RECOMPUTATIONS, "what is computed again is known"
    return StepShape(
        model=recipe.model,
        parallel=recipe.parallel,
        optim=recipe.optim,
        degrees=degrees,
        phase=phase,
        vocabulary=vocabulary,
        sequence_length=recipe.data.sequence_length,
        loss_chunk=recipe.train.loss_chunk,
        compiles=recipe.train.compile != "off",
        fp8_scaling=recipe.train.fp8_scaling,
    )


def step_collectives(shape: StepShape, *, pipeline: int) -> tuple[Collective, ...]:
    """Return what each rank at index `pipeline` of the pipeline axis does in a step, equal ones together.

    Ranks that differ only in their indices on the tensor and data axes do the same. With the schedule 'zbv'
    and ZeRO 2 the first rank's buffers that hold parameters of both ends are counted once a micro-batch,
    which is the most that the order of backwards can lead to.
    """
    own = [stage for stage in shape.stages if stage.rank == pipeline]
    buffers = weight_buffers(
        shape.model,
        shape.parallel,
        shape.optim,
        stages=own,
        degrees=shape.degrees,
        vocabulary=shape.vocabulary,
        sequence_length=shape.sequence_length,
    )
    counted: Counter[Collective] = Counter()
    of_micro_batch = [
        *(one for stage in own for one in _of_stage(shape, stage)),
        *_gathered_around_blocks(shape, buffers),
    ]
    for one in of_micro_batch:
        counted[one] += shape.micro_batches
    counted.update(_of_gradients(shape, buffers))
    counted.update(_of_update(shape, buffers, own))
    return tuple(
        Collective(kind=one.kind, axis=one.axis, payload_bytes=one.payload_bytes, ranks=one.ranks, times=n)
        for one, n in counted.items()
    )


@lru_cache(maxsize=16)
def _stages(
    model: ModelSection, parallel: ParallelSection, vocabulary: int, sequence_length: int
) -> tuple[PipelineStage, ...]:
    return stages_of(model, parallel, vocabulary=vocabulary, sequence_length=sequence_length)


def _of_stage(shape: StepShape, stage: PipelineStage) -> Iterator[Collective]:
    """Yield what forward and backward of a stage need for one micro-batch, beside weights and gradients."""
    yield from _messages(shape, stage)
    t = shape.degrees.tensor
    if t == 1:
        return
    recompute = shape.phase.recompute
    if shape.parallel.recompute_per_stage:
        recompute = shape.parallel.recompute_per_stage[stage.index]
    block = list(_of_block(shape, recompute))
    for _ in stage.blocks:
        yield from block
    enters, leaves = _region(shape)
    if stage.embeds:
        yield from (*leaves[0], *leaves[1])
    if stage.finishes:
        yield from (*enters[0], *enters[1])
        tokens = shape.phase.micro_batch * shape.sequence_length
        for first in range(0, tokens, shape.loss_chunk):
            # Log-partitions and the targets' logits, fp32, with a GPU's kernels as without.
            rows = min(shape.loss_chunk, tokens - first)
            yield Collective(kind="all_gather", axis="tensor", payload_bytes=t * 2 * rows * 4, ranks=t)


def _of_block(shape: StepShape, recompute: str) -> Iterator[Collective]:
    """Yield the collectives of one block over the tensor axis, for one micro-batch."""
    enters, leaves = _region(shape)
    scales = list(_scales_of_split_factors(shape))
    yield from (*[*enters[0], *leaves[0]] * 2, *scales * (LINEARS // 2))
    yield from (*[*enters[1], *leaves[1]] * 2, *scales * (LINEARS // 2))
    if recompute == "mlp":
        # Dropout comes after what is computed again; with `async_tensor` the product brings its exchange.
        yield from (*enters[0], *(leaves[0] if shape.parallel.async_tensor else ()), *scales)
    if recompute != "full":
        return  # what collectives returned is kept, or lies outside of what is computed again
    splits = shape.degrees.pipeline > 1 and shape.parallel.schedule in SPLIT_BACKWARD
    drops = shape.model.hidden_dropout > 0.0 and not shape.compiles
    repeats_last = splits or drops or shape.parallel.async_tensor
    # Computing again ends with the last tensor that the backward needs, which comes before the block's last
    # collective.
    yield from (*enters[0], *leaves[0], *enters[0], *(leaves[0] if repeats_last else ()))
    yield from scales * (LINEARS // 2)


_Passes: TypeAlias = tuple[Sequence[Collective], Sequence[Collective]]


def _region(shape: StepShape) -> tuple[_Passes, _Passes]:
    """Return the collectives (forward, backward) of entering a tensor-parallel region, and of leaving it."""

    def of(kind: Kind) -> Sequence[Collective]:
        if kind == "reduce_scatter" and not shape.scatters:
            kind = "all_reduce"
        return (
            Collective(
                kind=kind, axis="tensor", payload_bytes=shape.activation_bytes, ranks=shape.degrees.tensor
            ),
        )

    if shape.parallel.sequence:
        return (of("all_gather"), of("reduce_scatter")), (of("reduce_scatter"), of("all_gather"))
    return ((), of("all_reduce")), (of("all_reduce"), ())


def _scales_of_split_factors(shape: StepShape) -> Iterator[Collective]:
    """Yield the maxima over parts of factors of which one product in 8 bits takes its scales.

    Layers with split inputs need them forward, layers with split outputs backward. Blocks are never split.
    """
    if shape.phase.precision != "fp8" or shape.fp8_scaling not in ("tensor", "row"):
        return
    sizes = [1]  # of the activation or the gradient
    if shape.fp8_scaling == "row":
        sizes = [shape.phase.micro_batch * shape.sequence_length]
        if not _keeps_narrow_weights(shape):
            sizes.append(shape.model.hidden)  # of the weight, along what is split
    for size in sizes:
        yield Collective(
            kind="all_reduce",
            axis="tensor",
            payload_bytes=size * shape.value_bytes,
            ranks=shape.degrees.tensor,
        )


def _keeps_narrow_weights(shape: StepShape) -> bool:
    """Return whether 8-bit weights are kept between updates (`parallel/scaled_weights.py`)."""
    parallel = shape.parallel
    frees_weights = (parallel.zero == 3 and shape.degrees.shard > 1) or parallel.working == "by-block"
    return parallel.fp8_copies and not frees_weights


def _messages(shape: StepShape, stage: PipelineStage) -> Iterator[Collective]:
    """Yield the activations and gradients that pass between this stage and its neighbours on other ranks."""
    parallel, last = shape.parallel, len(shape.stages) - 1
    split = shape.degrees.tensor if parallel.sequence else 1
    for neighbour in (stage.index - 1, stage.index + 1):
        if not 0 <= neighbour <= last:
            continue
        rank = rank_of_stage(neighbour, pipeline=parallel.pipeline, schedule=parallel.schedule)
        if rank != stage.rank:
            kinds: tuple[Kind, ...] = ("send", "receive")
            for kind in kinds:
                yield Collective(
                    kind=kind, axis="pipeline", payload_bytes=shape.activation_bytes // split, ranks=2
                )


def _gathered_around_blocks(shape: StepShape, buffers: Sequence[WeightBuffer]) -> Iterator[Collective]:
    """Yield what ZeRO 3 gathers for one micro-batch: weights for each block's forward and its backward."""
    for buffer in buffers:
        if _is_gathered_by_block(shape, buffer):
            yield from [_gathered(shape, buffer)] * 2


def _is_gathered_by_block(shape: StepShape, buffer: WeightBuffer) -> bool:
    return shape.parallel.zero == 3 and shape.degrees.shard > 1 and buffer.bucket != ""


def _gathered(shape: StepShape, buffer: WeightBuffer) -> Collective:
    return Collective(
        kind="all_gather",
        axis="shard",
        payload_bytes=buffer.numel * shape.value_bytes,
        ranks=shape.degrees.shard,
    )


def _of_gradients(shape: StepShape, buffers: Sequence[WeightBuffer]) -> Iterator[Collective]:
    """Yield what sums the gradients of a step over the tensor, data and embedding axes."""
    degrees = shape.degrees
    shards, replicas = degrees.shard, degrees.data // degrees.shard
    is_sharded = shape.parallel.zero >= 2 and shards > 1
    bucket_bytes = round(shape.parallel.bucket_mb * 1e6)

    def summed(axis: Axis, numel: int, ranks: int) -> Iterator[Collective]:
        if ranks > 1:
            yield Collective(kind="all_reduce", axis=axis, payload_bytes=4 * numel, ranks=ranks)

    for buffer in buffers:
        own = buffer.held if is_sharded else buffer.numel
        if buffer.share == "partial":
            yield from summed("tensor", own, degrees.tensor)
        in_ranges = not is_sharded and buffer.share != "partial"
        for _ in range(shape.micro_batches if is_sharded else 1):
            for elements in buffer.ranges(bucket_bytes if in_ranges else 0):
                if shards > 1:
                    yield from _to_shards(shape, buffer, elements)
                elif in_ranges:
                    yield from summed("replica", len(elements), replicas)
        if shards > 1 or not in_ranges:
            yield from summed("replica", buffer.held, replicas)
        if buffer.share in ("echoed", "echo"):
            yield from summed("embedding", buffer.held, 2)


def _to_shards(shape: StepShape, buffer: WeightBuffer, elements: range) -> Iterator[Collective]:
    """Yield the collectives that sum a range of a gradient, each element on the rank that holds it."""

    def one(kind: Kind, numel: int) -> Collective:
        return Collective(kind=kind, axis="shard", payload_bytes=4 * numel, ranks=buffer.shards)

    if not shape.scatters:
        yield one("all_reduce", len(elements))
    elif len(elements) == buffer.numel:
        yield one("reduce_scatter", buffer.numel)
    else:
        for part in buffer.parts_of_shards(elements):
            yield one("reduce", len(part))


def _of_update(
    shape: StepShape, buffers: Sequence[WeightBuffer], own: Sequence[PipelineStage]
) -> Iterator[Collective]:
    """Yield what the norm, the update and the report need once a step."""
    degrees, model = shape.degrees, shape.model
    if degrees.world > 1:
        numbers = [NORM_BYTES, REPORT_BYTES]
        if shape.optim.clip_method == "tensor":
            numbers.append(8 * tensor_count(model))
        for size in numbers:
            yield Collective(kind="all_reduce", axis="world", payload_bytes=size, ranks=degrees.world)
    if shape.optim.qk_clip and not model.qk_norm and degrees.data > 1:
        maxima = sum(len(stage.blocks) for stage in own) * (model.heads // degrees.tensor)
        yield Collective(kind="all_reduce", axis="data", payload_bytes=4 * maxima, ranks=degrees.data)
    yield from _of_updated_weights(shape, buffers)
    yield from _scales_of_weights(shape, sum(len(stage.blocks) for stage in own))


def _of_updated_weights(shape: StepShape, buffers: Sequence[WeightBuffer]) -> Iterator[Collective]:
    """Yield what gathers the weights that were updated in shards and are then kept, range by range."""
    if shape.degrees.shard == 1:
        return
    bucket_bytes = round(shape.parallel.bucket_mb * 1e6)
    for buffer in buffers:
        if _is_gathered_by_block(shape, buffer):
            continue
        for elements in buffer.gathered_ranges(bucket_bytes):
            if len(elements) == buffer.numel:
                yield _gathered(shape, buffer)
                continue
            for part in buffer.parts_of_shards(elements):
                yield Collective(
                    kind="broadcast",
                    axis="shard",
                    payload_bytes=len(part) * shape.value_bytes,
                    ranks=shape.degrees.shard,
                )


def _scales_of_weights(shape: StepShape, blocks: int) -> Iterator[Collective]:
    """Yield the maxima over parts of weights, fp32, of which fp8 takes the scales of all layers."""
    if shape.phase.precision != "fp8" or not blocks:
        return
    degrees, layers = shape.degrees, LINEARS * blocks
    if shape.fp8_scaling == "tensor":
        axes: tuple[tuple[Axis, int], ...] = (("tensor", degrees.tensor), ("shard", degrees.shard))
        for axis, ranks in axes:
            if ranks > 1:
                yield Collective(kind="all_reduce", axis=axis, payload_bytes=4 * layers, ranks=ranks)
    elif shape.fp8_scaling == "row" and _keeps_narrow_weights(shape) and degrees.tensor > 1:
        # An unsplit side has the model's channels. Blocks gathered beside a forward are rounded one by one.
        times = blocks if degrees.shard > 1 and shape.parallel.overlap else 1
        size = 4 * layers * shape.model.hidden // times
        for _ in range(times):
            yield Collective(kind="all_reduce", axis="tensor", payload_bytes=size, ranks=degrees.tensor)
