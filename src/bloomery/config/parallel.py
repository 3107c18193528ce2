"""`[parallel]`: how the model and the batch are split over ranks. Free: no layout changes what is learnt."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.model import Auto
from bloomery.config.setting import setting

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv")
SPLIT_BACKWARD = ("zero-bubble", "zbv")
"""Schedules that compute gradients of weights apart from those of activations."""


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """Degrees of the mesh, tensor innermost."""

    data: int | Auto = setting(
        "auto",
        kind="free",
        at_start=True,
        minimum=1,
        help="Data-parallel degree; 'auto' is what the other degrees leave.",
    )
    tensor: int = setting(
        1, kind="free", at_start=True, minimum=1, help="Tensor-parallel degree, inside a node."
    )
    pipeline: int = setting(
        1,
        kind="free",
        at_start=True,
        minimum=1,
        help="Pipeline-parallel degree: ranks that blocks are split over.",
    )
    schedule: str = setting(
        "1f1b",
        kind="free",
        at_start=True,
        choices=SCHEDULES,
        help="In which order stages pass micro-batches; a pipeline of 1 has none.",
    )
    chunks: int = setting(
        1,
        kind="free",
        at_start=True,
        minimum=1,
        help="Stages on each pipeline rank: 2 or more for 'interleaved', 2 for 'zbv'.",
    )
    partition: str = setting(
        "cost",
        kind="free",
        at_start=True,
        choices=("cost", "embeddings"),
        help="How blocks are dealt to stages: 'cost' balances operations, 'embeddings' counts embedding"
        " and head as a block each.",
    )
    blocks_per_stage: tuple[int, ...] = setting(
        (),
        kind="free",
        at_start=True,
        help="Blocks of each stage, in order; empty leaves it to the partition.",
    )
    recompute_per_stage: tuple[str, ...] = setting(
        (),
        kind="free",
        at_start=True,
        choices=("none", "selective", "full"),
        help="What each stage computes again in backward, in order; empty is train.recompute for all.",
    )
    sequence: bool = setting(
        False, kind="free", at_start=True, help="Sequence parallelism over the tensor-parallel ranks."
    )
    zero: int = setting(
        0,
        kind="free",
        at_start=True,
        minimum=0,
        maximum=3,
        help="ZeRO stage: 1 shards the optimizer, 2 gradients, 3 weights.",
    )
    shard_degree: int | Auto = setting(
        "auto",
        kind="free",
        at_start=True,
        minimum=1,
        help="Data-parallel ranks that share one copy of what ZeRO shards, the ranks of a node for instance;"
        " 'auto' is all of them.",
    )
    offload: str = setting(
        "none",
        kind="free",
        at_start=True,
        choices=("none", "cpu", "nvme"),
        help="Where masters and moments live and are updated: on the device, or in the CPU's memory.",
    )
    ranks_per_node: int | Auto = setting(
        "auto",
        kind="free",
        at_start=True,
        minimum=1,
        help="Accelerators of one node; 'auto' is what the node has.",
    )
