"""The settings of `[submit]` and `[sync]`: what a run asks of a scheduler, and where it sends its logs."""

from __future__ import annotations

from bloomery.config.model import Auto
from bloomery.config.setting import setting
from bloomery.frozen import dataclass

SCHEDULERS = ("slurm", "machine", "kubernetes")


@dataclass(frozen=True, kw_only=True)
class SubmitSection:
    """What `bloomery submit` asks of the scheduler. Empty texts and 0 leave the choice to the scheduler."""

    scheduler: str = setting(
        "auto",
        kind="free",
        at_start=True,
        choices=("auto", *SCHEDULERS),
        help="'slurm', 'machine' (a queue in the run directory, only on this machine), or 'kubernetes' (an "
        "Indexed Job, by kubectl); 'auto' is slurm where sbatch is found, else machine.",
    )
    nodes: int | Auto = setting(
        "auto",
        kind="free",
        at_start=True,
        minimum=1,
        help="Number of nodes of a job, without spares; 'auto' follows from the degrees of [parallel] and "
        "ranks_per_node, and is 1 where these are 'auto' too.",
    )
    spares: int = setting(
        0,
        kind="free",
        at_start=True,
        minimum=0,
        help="Further nodes of a job that wait until one of the others is lost or bad.",
    )
    minutes: float = setting(
        1200.0, kind="free", at_start=True, above=0.0, help="Time limit of a job, in minutes."
    )
    tasks: int = setting(
        1,
        kind="free",
        at_start=True,
        minimum=1,
        help="Number of jobs, each of which goes on where the one before it ended.",
    )
    queue: str = setting(
        "array",
        kind="free",
        at_start=True,
        choices=("array", "chain"),
        help="How jobs follow each other in SLURM: an array of which one task runs at a time, or jobs that "
        "depend on each other.",
    )
    keep_queued: int = setting(
        0,
        kind="free",
        at_start=True,
        minimum=0,
        help="Number of jobs that are kept in the queue, the running one included: each job submits what is "
        "missing when it starts, as a chain; 0 submits `tasks` jobs and no more.",
    )
    signal_before_s: int = setting(
        300,
        kind="free",
        at_start=True,
        minimum=60,
        help="Seconds before the time limit at which the scheduler sends SIGUSR1; SLURM may send it 60 s "
        "earlier.",
    )
    gpus_per_node: int = setting(
        0, kind="free", at_start=True, minimum=0, help="GPUs of each node; 0 asks for none."
    )
    cpus_per_node: int = setting(
        0,
        kind="free",
        at_start=True,
        minimum=0,
        help="Processor cores of each node; 0: the scheduler's choice.",
    )
    memory_per_node: str = setting(
        "", kind="free", at_start=True, help="Memory of each node as the scheduler writes it, such as '400G'."
    )
    partition: str = setting("", kind="free", at_start=True, help="SLURM's partition.")
    account: str = setting("", kind="free", at_start=True, help="SLURM's account.")
    qos: str = setting("", kind="free", at_start=True, help="SLURM's quality of service.")
    reservation: str = setting("", kind="free", at_start=True, help="SLURM's reservation.")
    constraint: str = setting("", kind="free", at_start=True, help="Features that nodes must have.")
    nice: int = setting(
        0, kind="free", at_start=True, minimum=0, help="How far the priority is lowered, for others' jobs."
    )
    exclude: tuple[str, ...] = setting(
        (), kind="free", at_start=True, help="Names of nodes that are never used, beside those in quarantine."
    )
    exclusions: str = setting(
        "",
        kind="free",
        at_start=True,
        help="File of the nodes in quarantine, which several runs may share. A relative path begins where "
        "the training is started. Empty: exclusions.json in the run directory.",
    )
    group: str = setting(
        "",
        kind="free",
        at_start=True,
        help="Group that owns the run directory and may write in it; empty: the directory's own group.",
    )
    setup: tuple[str, ...] = setting(
        (),
        kind="free",
        at_start=True,
        help="Lines of shell that a job runs first, for instance 'module load cuda'.",
    )
    image: str = setting(
        "", kind="free", at_start=True, help="Container image of the pods of Kubernetes, with bloomery in it."
    )
    namespace: str = setting(
        "", kind="free", at_start=True, help="Namespace of the Job of Kubernetes; empty: that of the context."
    )
    volumes: tuple[str, ...] = setting(
        (),
        kind="free",
        at_start=True,
        help="Volume claims of Kubernetes and where they are mounted, as 'CLAIM:/PATH'; the run "
        "directory lies on one that all nodes may write.",
    )
    more: tuple[str, ...] = setting(
        (), kind="free", at_start=True, help="Further options of sbatch, for instance '--exclusive'."
    )


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
