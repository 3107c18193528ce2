"""`[backup]`: a second place for checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.setting import setting

SCHEMES = ("s3", "gs", "az", "file")


@dataclass(frozen=True, kw_only=True)
class BackupSection:
    """Where checkpoints are copied to beside the training. Credentials come from the environment."""

    url: str = setting(
        "",
        kind="free",
        at_start=True,
        help="s3://bucket/path, gs://…, az://… or file:///path: checkpoints are copied to URL/run.name.",
    )
    what: str = setting(
        "all",
        kind="free",
        at_start=True,
        choices=("all", "model"),
        help="The whole state, or the weights alone.",
    )
    every_steps: int = setting(
        0, kind="free", at_start=True, minimum=0, help="Only checkpoints at multiples of this; 0: every one."
    )
    finish_minutes: float = setting(
        60.0, kind="free", at_start=True, minimum=0.0, help="So long the end of a run waits for its backups."
    )
