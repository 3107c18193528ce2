"""Sums the collectives and messages of a step by axis: of the busiest rank, and of all ranks."""

from __future__ import annotations

from typing import Any

from bloomery.frozen import dataclass
from bloomery.plan.collectives import StepShape, step_collectives

NAMES = {"shard": "data", "replica": "data"}
"""The parts of the data axis, by the name under which they are shown."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What ranks exchange in a step, by axis; see `collectives.py` for what is counted.

    `NAME_calls` are the collectives, sends and receives of the rank that begins the most. `NAME_bytes` are
    the bytes that the rank sends that sends the most, and `all_NAME_bytes` those of all ranks together.
    embedding: between the first and the last stage, which share a tied embedding.
    world: norms and reports, over all ranks.
    """

    tensor_calls: int = 0
    pipeline_calls: int = 0
    data_calls: int = 0
    embedding_calls: int = 0
    world_calls: int = 0
    tensor_bytes: float = 0.0
    pipeline_bytes: float = 0.0
    data_bytes: float = 0.0
    embedding_bytes: float = 0.0
    world_bytes: float = 0.0
    all_tensor_bytes: float = 0.0
    all_pipeline_bytes: float = 0.0
    all_data_bytes: float = 0.0
    all_embedding_bytes: float = 0.0
    all_world_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """The bytes of all ranks on all axes."""
        pair = self.all_embedding_bytes + self.all_world_bytes
        return self.all_tensor_bytes + self.all_pipeline_bytes + self.all_data_bytes + pair


def step_traffic(shape: StepShape) -> Traffic:
    """Return the traffic of one step."""
    ranks = shape.degrees.tensor * shape.degrees.data  # that do the same, at each index of the pipeline axis
    fields: dict[str, Any] = {}  # Any: calls are integers, bytes are not
    for pipeline in range(shape.degrees.pipeline):
        calls: dict[str, int] = {}
        sent: dict[str, float] = {}
        for one in step_collectives(shape, pipeline=pipeline):
            axis = NAMES.get(one.axis, one.axis)
            calls[axis] = calls.get(axis, 0) + one.times
            sent[axis] = sent.get(axis, 0.0) + one.sent_bytes
        for axis in calls:
            fields[f"{axis}_calls"] = max(fields.get(f"{axis}_calls", 0), calls[axis])
            fields[f"{axis}_bytes"] = max(fields.get(f"{axis}_bytes", 0.0), sent[axis])
            whole = f"all_{axis}_bytes"
            fields[whole] = fields.get(whole, 0.0) + ranks * sent[axis]
    return Traffic(**fields)
