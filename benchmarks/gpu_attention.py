"""Chooses the kernel of attention for a job of `gpu.py`, as the start of a run does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peers_throughput import Shape

from bloomery.config.model import ModelSection
from bloomery.model.attention_choice import (
    MEASURED,
    AttentionSizes,
    Timer,
    device_time_s,
    measure,
    quickest,
)
from bloomery.parallel.precision import DTYPES
from bloomery.plan.parameters import head_size, kv_heads


def chosen_attention(
    section: ModelSection,
    shape: Shape,
    job: Mapping[str, Any],
    device: torch.device,
    *,
    samples: int,
    time_s: Timer = device_time_s,
) -> tuple[str, dict[str, float]]:
    """The quickest kernel for a micro-batch, and the seconds of each; ('', {}) where a run measures none.

    samples: of a micro-batch.
    """
    documents = "document_tokens" in job
    is_plain = section.position != "alibi" and section.attention_dropout == 0.0 and not documents
    if device.type != "cuda" or not is_plain:
        return "", {}
    sizes = AttentionSizes(
        samples=samples,
        heads=section.heads,
        kv_heads=kv_heads(section),
        length=shape.sequence_length,
        width=head_size(section),
        dtype=DTYPES[job["precision"]],
    )
    seconds, _ = measure(MEASURED, sizes, device, time_s=time_s)
    return quickest(seconds), seconds
