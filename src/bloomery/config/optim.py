"""The settings of `[optim]`, `[schedule]` and `[loss]`: optimizer, learning rate, and terms of the loss."""

from __future__ import annotations

from bloomery.config.model import Auto
from bloomery.config.setting import setting
from bloomery.frozen import dataclass


@dataclass(frozen=True, kw_only=True)
class OptimSection:
    """The optimizer of each step; between peers, the inner optimizer."""

    name: str = setting(
        "adamw",
        kind="fixed",
        choices=("adamw", "muon"),
        help="Optimizer. 'muon' updates the blocks' matrices by Muon and everything else by AdamW.",
    )
    learning_rate: float = setting(kind="journalled", above=0.0, help="Peak learning rate.")
    beta1: float = setting(
        0.9, kind="journalled", minimum=0.0, maximum=0.999999, help="Decay of Adam's first moment."
    )
    beta2: float = setting(
        0.95, kind="journalled", minimum=0.0, maximum=0.999999, help="Decay of Adam's second moment."
    )
    epsilon: float = setting(
        1e-8, kind="journalled", above=0.0, help="Added to the denominator of Adam's update."
    )
    weight_decay: float = setting(
        0.1,
        kind="journalled",
        minimum=0.0,
        help="Decoupled weight decay of matrices; norms and biases are never decayed.",
    )
    decay_embeddings: bool = setting(True, kind="journalled", help="Whether embeddings are decayed, too.")
    clip: float = setting(
        1.0,
        kind="journalled",
        minimum=0.0,
        help="Gradients with a larger global norm are scaled down to this norm; 0 does not clip.",
    )
    clip_method: str = setting(
        "norm",
        kind="journalled",
        choices=("norm", "z-score", "tensor"),
        help="How gradients are clipped: 'norm' only by optim.clip; 'z-score' also where the norm is far "
        "above its running mean (ZClip); 'tensor' each tensor by its own running norm, after 100 steps by "
        "optim.clip (AdaGC).",
    )
    clip_z_score: float = setting(
        2.5, kind="journalled", above=0.0, help="For 'z-score': the z-score above which the norm is clipped."
    )
    clip_ratio: float = setting(
        1.05,
        kind="journalled",
        minimum=1.0,
        help="For 'tensor': the multiple of a tensor's running gradient norm that clipping leaves.",
    )
    skip_outliers: float = setting(
        0.0,
        kind="journalled",
        minimum=0.0,
        help="Refuses an update whose gradient norm is this many standard deviations above the mean of the "
        "last 128; 0 refuses none. 6 is usual.",
    )
    qk_clip: float = setting(
        0.0,
        kind="journalled",
        minimum=0.0,
        help="Rescales after each update the query and key weights of heads whose largest attention logit "
        "was above this (QK-clip of MuonClip; 100 is usual); 0 rescales none.",
    )
    qk_clip_stride: int = setting(
        8,
        kind="journalled",
        minimum=1,
        help="For qk_clip: each head's largest logit is looked for in every n-th query of a sample; 1 looks "
        "at all, which costs as much as the scores themselves.",
    )
    embedding_learning_rate: float | Auto = setting(
        "auto",
        kind="journalled",
        above=0.0,
        help="Peak learning rate of the embedding; 'auto' is learning_rate.",
    )
    head_learning_rate: float | Auto = setting(
        "auto",
        kind="journalled",
        above=0.0,
        help="Peak learning rate of an untied head; 'auto' is learning_rate.",
    )
    muon_learning_rate: float | Auto = setting(
        "auto",
        kind="journalled",
        above=0.0,
        help="Peak learning rate of Muon's matrices; 'auto' is learning_rate.",
    )
    muon_momentum: float = setting(
        0.95, kind="journalled", minimum=0.0, maximum=0.999999, help="Decay of Muon's momentum."
    )
    muon_iterations: int = setting(
        5, kind="journalled", minimum=1, maximum=12, help="Newton-Schulz iterations in a Muon step."
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """The learning rate over the run. `warmup` and `decay` count in `unit`."""

    shape: str = setting(
        "cosine",
        kind="journalled",
        choices=("cosine", "linear", "wsd", "constant"),
        help="Shape of the schedule after the warm-up. 'wsd' (warmup, stable, decay) holds the peak and "
        "cools down at the end.",
    )
    unit: str = setting(
        "samples",
        kind="journalled",
        choices=("samples", "tokens", "steps"),
        help="Unit in which warmup and decay count.",
    )
    warmup: int = setting(
        0, kind="journalled", minimum=0, help="Length of the linear warm-up from 0 to the peak, in unit."
    )
    decay: int | Auto = setting(
        "auto",
        kind="journalled",
        minimum=1,
        help="End of the decay, in unit from the start of the run; 'auto' is the run's length.",
    )
    floor: float = setting(
        0.0, kind="journalled", minimum=0.0, help="Learning rate at the end of the decay and after it."
    )
    cooldown_share: float = setting(
        0.2,
        kind="journalled",
        above=0.0,
        maximum=1.0,
        help="Share of decay that the cooldown of 'wsd' takes.",
    )
    cooldown_shape: str = setting(
        "sqrt",
        kind="journalled",
        choices=("sqrt", "linear"),
        help="Shape of the cooldown of 'wsd' from the peak p at its share x: 'sqrt' is p × (1 − sqrt(x)), "
        "'linear' is p × (1 − x).",
    )


@dataclass(frozen=True, kw_only=True)
class LossSection:
    """Terms added to the cross entropy."""

    z_loss: float = setting(
        0.0,
        kind="journalled",
        minimum=0.0,
        help="Weight of the squared log-partition function in the loss (PaLM); 0 leaves it out.",
    )
