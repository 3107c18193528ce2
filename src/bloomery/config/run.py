"""`[run]`: what the run is called, and where its randomness comes from."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Name and seed of the run."""

    name: str = setting(
        kind="free", at_start=True, help="Name of the run; its directory is runs/NAME unless --run says so."
    )
    seed: int = setting(
        1234, kind="fixed", minimum=0, help="Initial values, dropout and data order are functions of it."
    )
    hardware: str = setting(
        "",
        kind="free",
        at_start=True,
        help="Machine that `bloomery plan` assumes: a shipped hardware file's name, or a path.",
    )
    offline: bool = setting(
        False,
        kind="free",
        at_start=True,
        help="Forbid all use of the network, as BLOOMERY_OFFLINE=1 does for any command.",
    )
    notes: str = setting(
        "", kind="free", at_start=True, help="Free text: where figures come from, which choices are yours."
    )
