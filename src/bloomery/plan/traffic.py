"""What one rank sends in one step, by axis of the mesh, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.plan.blockcost import Workload, tensor_bytes
from bloomery.plan.kernels import ring_bytes
from bloomery.plan.layout import Stage
from bloomery.plan.memory import rank_parameters
from bloomery.plan.shapes import ModelParameters
from bloomery.plan.steptime import boundary_bytes, data_parallel_bytes


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes a step: sent by the rank that sends most on each axis, and by all ranks together."""

    tensor_bytes: float
    pipeline_bytes: float
    data_bytes: float
    all_tensor_bytes: float
    all_pipeline_bytes: float
    all_data_bytes: float

    @property
    def total_bytes(self) -> float:
        """Of all ranks on all axes."""
        return self.all_tensor_bytes + self.all_pipeline_bytes + self.all_data_bytes


def step_traffic(
    work: Workload,
    parameters: ModelParameters,
    stages: tuple[Stage, ...],
    *,
    micro_batches: int,
    recompute: str,
) -> Traffic:
    """One step of `micro_batches` for each replica."""
    layout = work.layout
    tensor = [_stage_tensor_bytes(work, stage, micro_batches, recompute) for stage in stages]
    data = [
        data_parallel_bytes(work, rank_parameters(parameters, stage, work), micro_batches) for stage in stages
    ]
    hop = micro_batches * boundary_bytes(work)
    # Chunks pass every boundary, and the one from the last stage back to the first between two of them.
    hops = (layout.pipeline * layout.chunks - 1) if layout.pipeline > 1 else 0
    most_hops = 2 * layout.chunks if layout.pipeline > 2 or layout.chunks > 1 else 1
    ranks = layout.tensor * layout.data
    return Traffic(
        tensor_bytes=max(tensor),
        pipeline_bytes=hop * most_hops if layout.pipeline > 1 else 0.0,
        data_bytes=max(data),
        all_tensor_bytes=sum(tensor) * ranks,
        all_pipeline_bytes=2 * hop * hops * ranks,
        all_data_bytes=sum(data) * ranks,
    )


def _stage_tensor_bytes(work: Workload, stage: Stage, micro_batches: int, recompute: str) -> float:
    """Two all-reduces forward and two backward in each block, two more where forward is repeated."""
    if work.layout.tensor == 1:
        return 0.0
    exchanges = stage.blocks * (6 if (stage.recompute or recompute) == "full" else 4)
    exchanges += (1 if stage.has_embedding else 0) + (1 if stage.has_head else 0)
    return micro_batches * exchanges * ring_bytes(tensor_bytes(work), work.layout.tensor, passes=2)
