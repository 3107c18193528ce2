"""`[train]`: how long, in which batches, in which precision."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.setting import setting

PRECISIONS = ("auto", "bf16", "fp32", "fp16", "fp8")


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """Length and batches of the run. Exactly one of samples, tokens and steps is above 0."""

    samples: int = setting(0, kind="free", minimum=0, help="Length of the run in samples.")
    tokens: int = setting(0, kind="free", minimum=0, help="Length of the run in tokens.")
    steps: int = setting(0, kind="free", minimum=0, help="Length of the run in optimizer steps.")
    global_batch: int = setting(kind="journalled", minimum=1, help="Samples of one optimizer step.")
    micro_batch: int = setting(
        1, kind="free", minimum=1, help="Samples of one forward and backward on one rank."
    )
    ramp_up: tuple[int, ...] = setting(
        (),
        kind="journalled",
        help="[start, increment, samples]: the global batch grows from start by increment over samples.",
    )
    micro_batch_changes: tuple[tuple[int, int], ...] = setting(
        (), kind="free", help="[[from_sample, micro_batch], …]."
    )
    precision: str = setting(
        "auto",
        kind="journalled",
        choices=PRECISIONS,
        help="Of the matrix products; masters, accumulation and reductions are fp32. 'auto' is bf16 where "
        "the device multiplies it natively, else fp32. 'fp16' scales the loss dynamically; 'fp8' is the "
        "hybrid: E4M3 forward, E5M2 backward.",
    )
    precision_changes: tuple[tuple[int, str], ...] = setting(
        (), kind="journalled", choices=PRECISIONS, help="[[from_sample, precision], …]."
    )
    recompute: str = setting(
        "none",
        kind="free",
        choices=("none", "selective", "full"),
        help="Activations computed again in backward.",
    )
    compile: str = setting(
        "auto",
        kind="free",
        at_start=True,
        choices=("auto", "on", "off"),
        help="torch.compile of the model; 'auto' leaves it off where the run is shorter than its cost.",
    )
    loss_chunk: int = setting(
        1024,
        kind="free",
        at_start=True,
        minimum=1,
        help="Tokens whose logits exist at the same time in the loss.",
    )
