"""`[checkpoint]`, `[evaluate]`, `[log]` and `[guard]`: what is kept, measured, told and refused."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When state is saved and how long it is kept. 0 switches an interval off."""

    every_steps: int = setting(500, kind="free", minimum=0, help="Save each so many steps.")
    every_samples: int = setting(0, kind="free", minimum=0, help="Save each so many samples.")
    every_minutes: float = setting(30.0, kind="free", minimum=0.0, help="Save each so many minutes.")
    keep_last: int = setting(3, kind="free", minimum=1, help="Newest checkpoints that are kept.")
    keep_every_steps: int = setting(
        0, kind="free", minimum=0, help="Checkpoints at multiples of this are kept for good."
    )
    keep_tenths: bool = setting(
        True, kind="free", help="Keep at least one checkpoint for each tenth of the run."
    )
    at_end: bool = setting(True, kind="free", help="Save when the run ends or is stopped.")
    background: str = setting(
        "auto",
        kind="free",
        at_start=True,
        choices=("auto", "on", "off"),
        help="Save beside the training, with memory of twice the state; auto: where that is over 64 MB.",
    )
    partner_copies: bool = setting(
        False,
        kind="free",
        at_start=True,
        help="Keep the newest state in memory, each rank's also on another node: a restart needs no disk.",
    )
    memory_directory: str = setting(
        "/dev/shm",
        kind="free",
        at_start=True,
        help="Where partner_copies lie: a memory file system of each node.",
    )
    throttle: bool = setting(
        True,
        kind="free",
        help="Spread copying over a step, and writing so that steps hardly notice; off: as fast as can be.",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateSection:
    """Held-out loss during the run."""

    every_steps: int = setting(500, kind="free", minimum=0, help="Evaluate each so many steps; 0 never.")
    samples: int = setting(64, kind="free", minimum=1, help="Held-out samples of one evaluation.")
    at_end: bool = setting(True, kind="free", help="Evaluate when the samples are done.")


@dataclass(frozen=True, kw_only=True)
class LogSection:
    """What is told, and how often."""

    every_steps: int = setting(10, kind="free", minimum=1, help="A log line each so many steps.")
    tensorboard: bool = setting(
        True, kind="free", at_start=True, help="Write TensorBoard files to the run directory."
    )


@dataclass(frozen=True, kw_only=True)
class GuardSection:
    """What stops or rewinds a run. 0 switches a guard off."""

    refused_updates: int = setting(
        20, kind="free", minimum=0, help="Stop after so many updates in a row that were not finite."
    )
    stop_after_minutes: float = setting(
        0.0, kind="free", minimum=0.0, help="Save and stop after so many minutes in this process."
    )
    stop_at_step: int = setting(0, kind="free", minimum=0, help="Save and stop after this step.")
    spike_threshold: float = setting(
        0.0, kind="free", minimum=0.0, help="A loss this far (nats) above its running median is a spike."
    )
    spike_patience: int = setting(
        5, kind="free", minimum=1, help="Steps in a row above the threshold before the run is rewound."
    )
    spike_window: int = setting(100, kind="free", minimum=2, help="Steps the running median looks back on.")
    spike_rewind_steps: int = setting(
        100, kind="free", minimum=1, help="How many steps before the spike the run is rewound to, at least."
    )
    spike_skip_steps: int = setting(
        200,
        kind="free",
        minimum=0,
        help="How many steps' samples after the rewind point are skipped, at least up to the spike.",
    )
    spike_rewinds: int = setting(
        3, kind="free", minimum=1, help="Stop instead when so many rewinds did not help."
    )
