"""The settings of `[parallel]`: tensor, data and pipeline degrees, pipeline schedule, ZeRO, recomputation."""

from __future__ import annotations

from bloomery.config.model import Auto
from bloomery.config.setting import setting
from bloomery.frozen import dataclass

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv")
SPLIT_BACKWARD = ("zero-bubble", "zbv")
"""Pipeline schedules that compute the gradients of weights and of activations in separate passes."""
RECOMPUTATIONS = ("none", "elementwise", "selective", "mlp", "full")
"""What is computed again in the backward: from what keeps the most to what keeps the least."""
WITHIN_ONE_BACKWARD = ("elementwise", "mlp")
"""Recomputations that keep what products return for one backward, which `SPLIT_BACKWARD` splits."""


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """Degrees of parallelism, and what ZeRO shards; ranks of one tensor-parallel group are consecutive."""

    data: int | Auto = setting(
        "auto",
        kind="free",
        at_start=True,
        minimum=1,
        help="Data-parallel degree; 'auto' is the number of ranks divided by the other degrees.",
    )
    tensor: int = setting(
        1,
        kind="free",
        at_start=True,
        minimum=1,
        help="Tensor-parallel degree; a tensor-parallel group must fit in a node.",
    )
    pipeline: int = setting(
        1,
        kind="free",
        at_start=True,
        minimum=1,
        help="Pipeline-parallel degree: number of ranks that the blocks are split over.",
    )
    schedule: str = setting(
        "1f1b",
        kind="free",
        at_start=True,
        choices=SCHEDULES,
        help="Pipeline schedule; without effect where pipeline = 1.",
    )
    chunks: int = setting(
        1,
        kind="free",
        at_start=True,
        minimum=1,
        help="Number of stages on each pipeline rank: 2 or more for 'interleaved', 2 for 'zbv'.",
    )
    partition: str = setting(
        "cost",
        kind="free",
        at_start=True,
        choices=("cost", "embeddings"),
        help="How blocks are divided among stages: 'cost' balances the operations of the stages; "
        "'embeddings' balances the blocks, and counts the embedding and the head as one block each.",
    )
    blocks_per_stage: tuple[int, ...] = setting(
        (),
        kind="free",
        at_start=True,
        help="Number of blocks of each stage, in order; [] divides them by partition.",
    )
    recompute_per_stage: tuple[str, ...] = setting(
        (),
        kind="free",
        at_start=True,
        choices=RECOMPUTATIONS,
        help="Activation recomputation of each stage, in order; [] uses train.recompute for all stages.",
    )
    sequence: bool = setting(
        False,
        kind="free",
        at_start=True,
        help="Whether the activations between tensor-parallel layers are split over the sequence (sequence "
        "parallelism).",
    )
    async_tensor: bool = setting(
        False,
        kind="free",
        at_start=True,
        help="Whether the exchanges of sequence parallelism overlap the matmuls beside them (asynchronous "
        "tensor parallelism), through memory that GPUs of one node map from each other; refused at the start "
        "where they cannot. On CPUs exchanges follow matmuls as without it.",
    )
    zero: int = setting(
        0,
        kind="free",
        at_start=True,
        minimum=0,
        maximum=3,
        help="ZeRO stage: 1 shards the optimizer state over data-parallel ranks, 2 gradients too, 3 weights "
        "too.",
    )
    shard_degree: int | Auto = setting(
        "auto",
        kind="free",
        at_start=True,
        minimum=1,
        help="Number of data-parallel ranks over which ZeRO shards one copy, for instance the ranks of a "
        "node; 'auto' is all of them.",
    )
    offload: str = setting(
        "none",
        kind="free",
        at_start=True,
        choices=("none", "cpu"),
        help="Where master weights and optimizer moments are stored and updated: 'none' on the device, "
        "'cpu' in host memory.",
    )
    working: str = setting(
        "kept",
        kind="free",
        at_start=True,
        choices=("kept", "by-block"),
        help="Whether weights in the working precision are 'kept' beside the fp32 masters, or rounded from "
        "them 'by-block' when a block is computed: 16 bytes per parameter instead of 18 with AdamW, for a "
        "pass over the masters in each forward and backward.",
    )
    fp8_copies: bool = setting(
        True,
        kind="free",
        at_start=True,
        help="Whether 'fp8' keeps two copies of the blocks' matrices in 8 bits, which are made once a step, "
        "where working weights are kept: 2 bytes per parameter. Off, each product rounds its weight, with "
        "the same bits.",
    )
    overlap: bool = setting(
        True,
        kind="free",
        at_start=True,
        help="Whether gradients are summed over data-parallel ranks, and sharded or updated weights are "
        "gathered, while the backward and the forward go on. Off, the same collectives follow them, with the "
        "same bits.",
    )
    prefetch_blocks: int = setting(
        2,
        kind="free",
        at_start=True,
        minimum=0,
        help="Number of blocks whose sharded weights (zero = 3) are gathered ahead, while the blocks before "
        "them are computed, in forward and backward; so many blocks and one more have weights in memory at "
        "one time. Without effect where overlap = false.",
    )
    bucket_mb: float = setting(
        25.0,
        kind="free",
        at_start=True,
        minimum=0.0,
        help="Megabytes of fp32 gradients that data-parallel ranks sum at one time under ZeRO 0 and 1 (2 and "
        "3 sum those of a block); 0: each optimizer group at one time. The updated weights of four times as "
        "many elements are gathered at one time under ZeRO 1.",
    )
    ranks_per_node: int | Auto = setting(
        "auto",
        kind="free",
        at_start=True,
        minimum=1,
        help="Number of ranks on each node; 'auto' is the number of its accelerators.",
    )
