"""`[parallel]`: how the model and the batch are split over ranks. Free: no layout changes what is learnt."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.model import Auto
from bloomery.config.setting import setting


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
    pipeline: int = setting(1, kind="free", at_start=True, minimum=1, help="Pipeline stages.")
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
