"""Predicts the time of one optimizer step on a layout, and its bottleneck.

A step is m micro-batches through the slowest stage, filling and draining the pipeline, the reduction over the
data-parallel ranks, that of a tied embedding over the pipeline's ends, and the update. It also waits for the
slowest node.
"""

from __future__ import annotations

import math
from functools import lru_cache

from bloomery.frozen import dataclass
from bloomery.plan.block_cost import (
    Spent,
    Workload,
    accumulation_s,
    attention_passes,
    block_passes,
    elementwise_pass,
    embedding_passes,
    expansion,
    head_passes,
    internode_bytes_per_s,
    moving_s,
    muon_s,
    ring_s,
)
from bloomery.plan.layout import StageParameters, bubble_slots, stage_parameters
from bloomery.plan.memory import rank_parameters
from bloomery.plan.parameters import ModelParameters
from bloomery.plan.pipeline_stages import padded_rows

LOW, HIGH = 0.83, 1.2
"""The range around the estimate, by which published runs of equal shape differ (tests/plan)."""

UPDATE_BYTES = 34
"""The bytes that norm, AdamW and rounding move for each parameter: the fp32 gradient twice, master and
moments both ways.
"""

HOST_BYTES_PER_S = 20e9
"""Bytes/s of one accelerator's share of its machine: to and from the CPU's memory, and through it in an
update there. PCIe 4.0 × 16 reaches the first; the second is an eighth of what two sockets with eight
channels of DDR4 reach.
"""

BACKWARD_SHARE = 2 / 3
"""The share of a micro-batch's time that its backward takes: two matmuls for each one of the forward."""

LEAST_EXPOSED = 0.1
"""The share of an exchange that nothing hides: the first and the last bucket."""

VISIBLE_TRANSFER = 0.2
"""The share of the messages between stages that nothing hides in the steady pipeline."""

TOKEN_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of one step by what takes them; they sum to `seconds`."""

    compute_s: float
    memory_s: float
    tensor_s: float
    pipeline_bubble_s: float
    pipeline_transfer_s: float
    data_parallel_s: float
    update_s: float
    waiting_s: float
    data_s: float

    @property
    def seconds(self) -> float:
        """The most likely duration of the step."""
        parts = (
            self.compute_s,
            self.memory_s,
            self.tensor_s,
            self.pipeline_bubble_s,
            self.pipeline_transfer_s,
        )
        return sum(parts) + self.data_parallel_s + self.update_s + self.waiting_s + self.data_s

    @property
    def low_s(self) -> float:
        """The duration of the step at best."""
        return self.seconds * LOW

    @property
    def high_s(self) -> float:
        """The duration of the step at worst."""
        return self.seconds * HIGH

    @property
    def bottleneck(self) -> str:
        """The name of the part that takes the most time."""
        named = {
            "compute": self.compute_s,
            "memory": self.memory_s + self.update_s,
            "TP": self.tensor_s,
            "PP bubble": self.pipeline_bubble_s + self.pipeline_transfer_s,
            "DP": self.data_parallel_s,
            "data": self.data_s,
        }
        return max(named, key=lambda name: named[name])


def step_time(work: Workload, parameters: ModelParameters, *, global_batch: int, recompute: str) -> StepTime:
    """Return the time of one step of `global_batch` samples.

    The batch must be divisible by micro-batch × data degree.
    """
    layout = work.layout
    stages = stages_for(work, parameters)
    micro_batches = global_batch // (work.micro_batch * layout.data)
    passes, held = _all_stages(work, parameters, recompute)
    slowest = max(passes, key=lambda stage: stage.total_s)
    # Filling and draining pass every stage once, the slowest is counted already, and each takes 1/v of its
    # time.
    idle = (sum(stage.total_s for stage in passes) - slowest.total_s) * bubble_slots(layout)
    bubble = idle / (layout.pipeline - 1) if layout.pipeline > 1 else 0.0
    steady = slowest * micro_batches
    transfer = _transfer_s(work, micro_batches) + _tied_ends_s(work)
    exchange = _exchange_s(work, held, micro_batches=micro_batches, slot_s=slowest.total_s)
    update = _update_s(work, held, stages, micro_batches=micro_batches)
    done = steady.total_s + bubble + transfer + exchange + update
    waiting = done * _waiting_share(work)
    reading = global_batch * work.sequence_length * TOKEN_BYTES
    reading_s = reading / (work.hardware.storage.read_gb_per_s * 1e9)
    return StepTime(
        compute_s=steady.compute_s,
        memory_s=steady.memory_s,
        tensor_s=steady.tensor_s,
        pipeline_bubble_s=bubble,
        pipeline_transfer_s=transfer,
        data_parallel_s=exchange,
        update_s=update,
        waiting_s=waiting,
        data_s=max(0.0, reading_s - done - waiting),  # data is read ahead while the step before runs
    )


def stages_for(work: Workload, parameters: ModelParameters) -> tuple[StageParameters, ...]:
    """Return what each pipeline rank holds."""
    return stage_parameters(work.layout, parameters)


@lru_cache(maxsize=65536)
def _block(work: Workload, recompute: str) -> Spent:
    """Return the time of one block for one micro-batch: both passes, and what is recomputed."""
    passes = block_passes(work)
    spent = passes.forward + passes.backward
    if recompute == "full":
        return spent + passes.forward
    if recompute == "elementwise":
        return spent + elementwise_pass(work)
    if recompute == "mlp":
        return spent + elementwise_pass(work) + expansion(work)
    if recompute == "selective" and work.forms_scores:
        return spent + attention_passes(work).forward
    return spent


@lru_cache(maxsize=4096)
def _ends(work: Workload) -> tuple[Spent, Spent]:
    """Return the time of the embedding and of the head for one micro-batch, both passes."""
    embedding, head = embedding_passes(work), head_passes(work)
    return embedding.forward + embedding.backward, head.forward + head.backward


@lru_cache(maxsize=64)  # the batches of a ramp-up differ only in the number of micro-batches
def _all_stages(
    work: Workload, parameters: ModelParameters, recompute: str
) -> tuple[tuple[Spent, ...], float]:
    """Return each stage's time for one micro-batch, and the parameters of the rank that holds the most."""
    stages = stages_for(work, parameters)
    embedding, head = _ends(work)
    held: dict[StageParameters, float] = {}  # most stages are alike
    times: dict[StageParameters, Spent] = {}
    for stage in set(stages):
        held[stage] = rank_parameters(parameters, stage, work)
        spent = _block(work, stage.recompute or recompute) * stage.blocks + Spent(
            memory_s=accumulation_s(work, held[stage])
        )
        if stage.has_embedding:
            spent = spent + embedding
        if stage.has_head:
            spent = spent + head
        times[stage] = spent
    return tuple(times[stage] for stage in stages), max(held.values())


def boundary_bytes(work: Workload) -> float:
    """Return the bytes that one rank sends to the next stage for one micro-batch in one direction."""
    split = work.layout.tensor if work.layout.sequence else 1
    return work.tokens * work.model.hidden * work.value_bytes / split


def _transfer_s(work: Workload, micro_batches: int) -> float:
    """Return the seconds of sending activations forward and gradients back that nothing hides.

    These are one transfer each way for every chunk while the pipeline fills, and the latency in its steady
    part.
    """
    layout, hardware = work.layout, work.hardware
    if layout.pipeline == 1:
        return 0.0
    speed = hardware.link_bytes_per_s
    latency = hardware.node.link_us * 1e-6
    if layout.leaves_node:
        speed, latency = internode_bytes_per_s(hardware) / layout.per_node, hardware.network.latency_us * 1e-6
    once = boundary_bytes(work) / (speed or 1e9) + latency
    visible = (layout.pipeline - 1) + VISIBLE_TRANSFER * micro_batches * layout.chunks
    return 2 * once * visible


def _tied_ends_s(work: Workload) -> float:
    """Return the seconds in which a pipeline's ends sum the gradients of a tied embedding, once a step.

    Each end has its own, in fp32, and sums its shard over both after everything else was summed.
    """
    layout = work.layout
    if layout.pipeline == 1 or layout.head_rank == 0 or not work.model.tied:
        return 0.0
    rows = padded_rows(work.vocabulary, degree=layout.tensor)
    size = 4 * rows * work.model.hidden / layout.shards
    # Each rank of a machine has a pair of its own, and all pairs exchange at once.
    per_node = 1 if layout.leaves_node else 2
    return ring_s(work.hardware, size, 2, passes=2, per_node=per_node, sharing=layout.per_node)


def _exchange_s(work: Workload, held: float, *, micro_batches: int, slot_s: float) -> float:
    """Return the exposed seconds of reducing gradients over the data-parallel ranks and gathering weights.

    As the trainer does it: sums hide beside backwards (ZeRO 0 and 1: the last micro-batch's, 2 and 3: each),
    weights that ZeRO 3 gathers hide beside forwards and backwards, and those that ZeRO 1 and 2 gather after
    the update beside the first forward. `parallel.overlap = false` hides nothing.
    held: the parameters of the rank that holds the most.
    slot_s: seconds of one micro-batch.
    """
    layout = work.layout
    if layout.data == 1:
        return 0.0
    shards, replicas = layout.shards, layout.data // layout.shards
    # The ranks of a shard group are neighbours; replicas lie across the groups.
    shards_in_node = min(shards, layout.data_in_node)
    replicas_in_node = max(1, layout.data_in_node // shards)

    def ring(size: float, ranks: int, per_node: int, *, passes: int) -> float:
        sharing = max(1, layout.per_node // per_node)
        return ring_s(work.hardware, size, ranks, passes=passes, per_node=per_node, sharing=sharing)

    # The all_reduce between replicas of a shard comes once in a step, after everything else is summed.
    across = ring(held * 4 / shards, replicas, replicas_in_node, passes=2)
    share = work.hardware.node.overlap if layout.overlaps else 0.0
    if shards == 1:
        return _exposed_s(across, beside_s=share * BACKWARD_SHARE * slot_s)
    times = exchanges_of(layout.zero, micro_batches)
    scattered = times.scattered * ring(held * 4, shards, shards_in_node, passes=1)
    gathered = times.gathered * ring(held * work.value_bytes, shards, shards_in_node, passes=1)
    if layout.zero == 3:
        return across + _exposed_s(scattered + gathered, beside_s=share * slot_s * micro_batches)
    backwards_s = share * BACKWARD_SHARE * slot_s * times.scattered
    first_forward_s = share * (1 - BACKWARD_SHARE) * slot_s
    summed = _exposed_s(scattered, beside_s=backwards_s)
    return across + summed + _exposed_s(gathered, beside_s=first_forward_s)


def _exposed_s(moved_s: float, *, beside_s: float) -> float:
    """Return the seconds of an exchange that nothing hides. beside_s: seconds of it that computing hides."""
    return max(moved_s - beside_s, LEAST_EXPOSED * moved_s)


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """How often a step moves all gradients to their shards, and all weights from their shards."""

    scattered: int
    gathered: int


def exchanges_of(zero: int, micro_batches: int) -> Exchanges:
    """Return how often a ZeRO stage moves gradients and weights in a step.

    ZeRO 1 reduces the step's sum. From 2 on no rank has room for the sum, so each micro-batch is reduced.
    ZeRO 3 gathers weights for each micro-batch's forward and again for its backward.
    """
    return Exchanges(
        scattered=micro_batches if zero >= 2 else 1, gathered=2 * micro_batches if zero == 3 else 1
    )


def _update_s(
    work: Workload, held: float, stages: tuple[StageParameters, ...], *, micro_batches: int
) -> float:
    share = 1 / work.layout.shards
    roundings = 2 * micro_batches if work.layout.rounds_by_block and work.precision != "fp32" else 0
    if work.layout.offload:
        # While the CPU updates some masters, gradients of others come and masters of others go, in fp32.
        copied = LEAST_EXPOSED * 2 * 4 * share
        return (UPDATE_BYTES * share + copied + 4 * roundings) * held / HOST_BYTES_PER_S
    spent = moving_s(work.hardware, UPDATE_BYTES * held * share, kernels=20)
    if roundings:
        spent += moving_s(work.hardware, (4 + 2) * roundings * held, kernels=roundings * stages[0].blocks)
    if work.muon_iterations:
        spent += muon_s(work, max(stage.blocks for stage in stages) * share)
    return spent


def _waiting_share(work: Workload) -> float:
    """Return how much later than the mean the slowest node ends: jitter × sqrt(2 ln nodes)."""
    nodes = work.layout.nodes
    return work.hardware.operation.step_jitter * math.sqrt(2 * math.log(nodes)) if nodes > 1 else 0.0
