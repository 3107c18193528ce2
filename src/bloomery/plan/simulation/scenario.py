"""What a simulated run is made of: the machine, its failures, its checkpoints; or peers and their links.

Times carry their unit. Rates are those of the whole run unless they say "per GPU" or "per peer".
"""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.setting import setting

HOURS_PER_DAY = 24.0


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """`[run]`: what it is called, how long it is watched."""

    name: str = setting(kind="free", help="Name of the scenario.")
    notes: str = setting("", kind="free", help="Where its figures come from.")
    days: float = setting(365.0, kind="free", above=0.0, maximum=36_500.0, help="Simulated days.")


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    """`[cluster]`: the machine, and what its owner does to it."""

    gpus: int = setting(kind="free", minimum=1, help="GPUs that the run needs.")
    gpus_per_node: int = setting(8, kind="free", minimum=1, help="GPUs of one node.")
    spare_nodes: int = setting(0, kind="free", minimum=0, help="Nodes kept ready to replace a broken one.")
    repair_hours: float = setting(
        48.0, kind="free", above=0.0, help="Mean time until a broken node is back, as a spare."
    )
    replacement_hours: float = setting(
        4.0, kind="free", minimum=0.0, help="Mean wait for another node where no spare is left."
    )
    job_hours: float = setting(
        0.0, kind="free", minimum=0.0, help="The scheduler ends a job after so long; 0 never."
    )
    queue_hours: float = setting(
        0.0, kind="free", minimum=0.0, help="Mean wait in the queue for the next job."
    )
    maintenance_every_days: float = setting(
        0.0, kind="free", minimum=0.0, help="The machine is taken away each so many days; 0 never."
    )
    maintenance_hours: float = setting(8.0, kind="free", minimum=0.0, help="How long it is away.")
    straggler_every_days: float = setting(
        0.0, kind="free", minimum=0.0, help="Mean time between nodes that become slow; 0 never."
    )
    straggler_slowdown: float = setting(
        1.3, kind="free", minimum=1.0, help="How much longer steps take with a slow node."
    )
    straggler_found_hours: float = setting(
        6.0, kind="free", minimum=0.0, help="Until the slow node is found and replaced."
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """`[checkpoint]`: how often, and what a save and a restart cost."""

    every_minutes: float = setting(kind="free", above=0.0, help="Training time between two saves.")
    blocking_s: float = setting(0.0, kind="free", minimum=0.0, help="Training stands still for each save.")
    durable_s: float = setting(
        0.0, kind="free", minimum=0.0, help="Until a save that has begun can be restored."
    )
    restart_s: float = setting(300.0, kind="free", minimum=0.0, help="To start all ranks again.")
    load_s: float = setting(60.0, kind="free", minimum=0.0, help="To load the newest checkpoint.")


@dataclass(frozen=True, kw_only=True)
class FailureSection:
    """`[[failures]]`: one kind, by how often it was seen: count in days on gpus."""

    name: str = setting(kind="free", help="What breaks.")
    count: float = setting(kind="free", minimum=0.0, help="How often it was seen …")
    days: float = setting(kind="free", above=0.0, help="… in so many days …")
    gpus: int = setting(kind="free", minimum=1, help="… on so many GPUs.")
    takes_node: bool = setting(True, kind="free", help="Whether a node has to be replaced.")
    detection_s: float = setting(60.0, kind="free", minimum=0.0, help="Until it is noticed.")

    @property
    def per_gpu_hour(self) -> float:
        """Failures of one GPU in an hour."""
        return self.count / (self.days * HOURS_PER_DAY * self.gpus)


@dataclass(frozen=True, kw_only=True)
class ElasticSection:
    """`[elastic]`: peers between sites, that meet in rounds."""

    peers: int = setting(kind="free", minimum=1, help="Peers that take part when all are there.")
    inner_steps: int = setting(100, kind="free", minimum=1, help="Optimizer steps of a round (H).")
    step_s: float = setting(kind="free", above=0.0, help="Seconds of one inner step on an average peer.")
    speed_spread: float = setting(
        0.0, kind="free", minimum=0.0, maximum=0.9, help="Peers' speeds lie in 1 ± this, evenly."
    )
    parameters: float = setting(kind="free", above=0.0, help="Parameters that are averaged.")
    bits: float = setting(
        8.0, kind="free", above=0.0, maximum=64.0, help="Bits of one value on the wire: 32, 16, 8 or 4."
    )
    bandwidth_mbit_s: float = setting(
        kind="free", above=0.0, help="Of the ring's slowest link, each way, in 10⁶ bit/s."
    )
    latency_ms: float = setting(0.0, kind="free", minimum=0.0, help="One way, of an average link.")
    fragments: int = setting(
        1, kind="free", minimum=1, help="Parts of the model that are averaged one by one (streaming)."
    )
    overlap: bool = setting(False, kind="free", help="Whether training goes on while a part is averaged.")
    outer_s: float = setting(0.0, kind="free", minimum=0.0, help="The outer optimizer's step.")
    leaves_per_peer_day: float = setting(
        0.0, kind="free", minimum=0.0, help="How often a peer says goodbye and goes."
    )
    crashes_per_peer_day: float = setting(0.0, kind="free", minimum=0.0, help="How often one just dies.")
    detection_s: float = setting(
        10.0, kind="free", minimum=0.0, help="Until a peer that died is known to be dead."
    )
    absent_hours: float = setting(12.0, kind="free", minimum=0.0, help="Mean time until it comes back.")
    join_s: float = setting(0.0, kind="free", minimum=0.0, help="A joiner needs so long for the state.")
    join_blocks: bool = setting(False, kind="free", help="Whether the others wait for a joiner.")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run on one cluster, or a run between peers: exactly one of `cluster` and `elastic` is given."""

    run: RunSection
    cluster: ClusterSection | None = None
    checkpoint: CheckpointSection | None = None
    failures: tuple[FailureSection, ...] = ()
    elastic: ElasticSection | None = None

    @property
    def hours(self) -> float:
        """Simulated hours."""
        return self.run.days * HOURS_PER_DAY
