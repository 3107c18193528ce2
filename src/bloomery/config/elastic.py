"""`[elastic]`: training between peers (DiLoCo). `inner_steps = 0` is a run of one peer."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class ElasticSection:
    """The outer optimizer and its exchange."""

    inner_steps: int = setting(0, kind="journalled", minimum=0, help="Steps between two rounds; 0: no peers.")
    outer_learning_rate: float = setting(
        0.7, kind="journalled", above=0.0, help="Of the outer Nesterov step."
    )
    outer_momentum: float = setting(
        0.9, kind="journalled", minimum=0.0, maximum=0.999999, help="Of the outer Nesterov step."
    )
    codec: str = setting(
        "int8",
        kind="journalled",
        choices=("int8", "int4", "bf16", "fp32"),
        help="Of pseudo-gradients on the wire.",
    )
    peers: int = setting(1, kind="free", at_start=True, minimum=1, help="Peers the run is planned for.")
