"""The settings of `[sync]`: where a supervised run sends its logs while it trains."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class SyncSection:
    """Where logs go while a run trains, and checkpoints. Credentials come from the environment."""

    place: str = setting(
        "",
        kind="free",
        at_start=True,
        help="s3://bucket/path, gs://…, az://…, file:///path, or hf:OWNER/NAME for a repository of the Hub, "
        "which is made private. `launch --supervise` sends journals, logs and TensorBoard files there; "
        "`bloomery sync` does it by hand. Empty: nowhere.",
    )
    every_minutes: float = setting(
        60.0, kind="free", at_start=True, above=0.0, help="Minutes between two times of sending what is new."
    )
    checkpoints: bool = setting(
        False,
        kind="free",
        at_start=True,
        help="Publish every checkpoint too, exported for transformers, on a branch of its own; for the Hub.",
    )
