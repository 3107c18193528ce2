"""`[optim]`, `[schedule]` and `[loss]`: how weights move, and what they are asked to lower."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.model import Auto
from bloomery.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class OptimSection:
    """The inner optimizer."""

    name: str = setting(
        "adamw",
        kind="fixed",
        choices=("adamw", "muon"),
        help="'muon' orthogonalises the blocks' matrices and leaves the rest to AdamW.",
    )
    learning_rate: float = setting(kind="journalled", above=0.0, help="Peak learning rate.")
    beta1: float = setting(0.9, kind="journalled", minimum=0.0, maximum=0.999999, help="Adam's first decay.")
    beta2: float = setting(
        0.95, kind="journalled", minimum=0.0, maximum=0.999999, help="Adam's second decay."
    )
    epsilon: float = setting(1e-8, kind="journalled", above=0.0, help="Adam's denominator guard.")
    weight_decay: float = setting(
        0.1, kind="journalled", minimum=0.0, help="Decoupled decay of matrices; never of norms and biases."
    )
    decay_embeddings: bool = setting(True, kind="journalled", help="Weight decay on embeddings too.")
    clip: float = setting(
        1.0, kind="journalled", minimum=0.0, help="Largest global gradient norm; 0 does not clip."
    )
    embedding_learning_rate: float | Auto = setting(
        "auto", kind="journalled", above=0.0, help="Peak for the embedding; 'auto' is learning_rate."
    )
    head_learning_rate: float | Auto = setting(
        "auto", kind="journalled", above=0.0, help="Peak for an untied head; 'auto' is learning_rate."
    )
    muon_learning_rate: float | Auto = setting(
        "auto", kind="journalled", above=0.0, help="Peak for Muon's matrices; 'auto' is learning_rate."
    )
    muon_momentum: float = setting(
        0.95, kind="journalled", minimum=0.0, maximum=0.999999, help="Muon's decay."
    )
    muon_iterations: int = setting(
        5, kind="journalled", minimum=1, maximum=12, help="Newton-Schulz iterations of a Muon step."
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """Learning rate against progress. All lengths share one unit."""

    shape: str = setting(
        "cosine",
        kind="journalled",
        choices=("cosine", "linear", "wsd", "constant"),
        help="After the warm-up. 'wsd' holds the peak and cools down over the last share.",
    )
    unit: str = setting(
        "samples", kind="journalled", choices=("samples", "tokens", "steps"), help="Unit of warmup and decay."
    )
    warmup: int = setting(0, kind="journalled", minimum=0, help="Linear warm-up from 0 to the peak.")
    decay: int | Auto = setting(
        "auto",
        kind="journalled",
        minimum=1,
        help="Where the decay ends, counted from the start of the run; 'auto' is the run's length.",
    )
    floor: float = setting(
        0.0, kind="journalled", minimum=0.0, help="Learning rate after the decay, held from then on."
    )
    cooldown_share: float = setting(
        0.2, kind="journalled", above=0.0, maximum=1.0, help="Part of `decay` that the WSD cooldown takes."
    )
    cooldown_shape: str = setting(
        "sqrt",
        kind="journalled",
        choices=("sqrt", "linear"),
        help="WSD cooldown: peak × (1 − sqrt(x)) or peak × (1 − x).",
    )


@dataclass(frozen=True, kw_only=True)
class LossSection:
    """Terms added to the cross entropy."""

    z_loss: float = setting(
        0.0,
        kind="journalled",
        minimum=0.0,
        help="Weight of the squared log-partition (PaLM); 0 leaves it out.",
    )
