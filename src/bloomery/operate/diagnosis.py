"""The known causes of failures: what each means, its remedy, and whether a restart would fail again."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Cause(StrEnum):
    """The kinds of failure that are told apart; `REMEDIES` has what helps against each."""

    BAD_RECIPE = "bad recipe"
    BAD_GPU = "bad GPU"
    BUS_ERROR = "bus error"
    EXCEPTION = "exception"
    GPU_MEMORY = "GPU memory"
    GPU_MEMORY_AT_START = "GPU memory at the start"
    HANG = "hang"
    KILLED = "killed"
    NCCL_TIMEOUT = "NCCL time-out"
    NETWORK = "network"
    NODE_LOST = "node lost"
    NO_SPACE = "no space"
    OOM_KILLER = "out of memory"
    PREEMPTED = "preempted"
    QUOTA = "quota"
    RUN_BUSY = "run in use"
    SILENT_CORRUPTION = "silent corruption"
    STORAGE = "storage"
    UNFIT_NODE = "unfit node"
    CRASH = "crash in native code"
    UNKNOWN = "unknown"


REMEDIES: dict[Cause, str] = {
    Cause.BAD_RECIPE: "Correct the settings that the message names; the same recipe is refused again.",
    Cause.BAD_GPU: "Keep the node out of the next start, and report it to those who run the cluster.",
    Cause.BUS_ERROR: "Enlarge /dev/shm (docker: --shm-size) or lower data.prefetch; see df -h /dev/shm.",
    Cause.EXCEPTION: "Correct what the traceback names; the same start would raise it again.",
    Cause.GPU_MEMORY: "Lower train.micro_batch, or raise parallel degrees or recomputation.",
    Cause.GPU_MEMORY_AT_START: "End what an earlier job left on that node's GPUs (nvidia-smi names it).",
    Cause.HANG: "The run starts again from its newest checkpoint; keep the node out if it hangs again.",
    Cause.KILLED: "Find out who killed it; the run starts again from its newest checkpoint.",
    Cause.NCCL_TIMEOUT: "Keep the node out if it is named again; check its links.",
    Cause.NETWORK: "Check the links between the nodes (ib_write_bw, ethtool -S).",
    Cause.NODE_LOST: "Start again without the node, and report it to those who run the cluster.",
    Cause.NO_SPACE: "Free space or inodes where the message says, then start the same command again.",
    Cause.OOM_KILLER: "Free memory on the node, or lower data.prefetch and the number of ranks on it.",
    Cause.PREEMPTED: "Submit it again: it goes on from the newest checkpoint.",
    Cause.QUOTA: "Raise the quota or remove files of its owner, then start the same command again.",
    Cause.RUN_BUSY: "None is needed: the process that the message names goes on with the run.",
    Cause.SILENT_CORRUPTION: "Report the node; keep it out until `bloomery preflight RUN --long` passes.",
    Cause.STORAGE: "Check the file system that the message names (dmesg, lfs check servers, mount).",
    Cause.CRASH: "The run starts again; report the traceback in the log if it comes again.",
    Cause.UNFIT_NODE: "Do what preflight says; `bloomery preflight RUN --long` on the node lets it back.",
    Cause.UNKNOWN: "Read the logs of the rank that ended first.",
}

REPEATING = frozenset(
    {
        Cause.BAD_RECIPE,
        Cause.BUS_ERROR,
        Cause.EXCEPTION,
        Cause.GPU_MEMORY,
        Cause.NO_SPACE,
        Cause.QUOTA,
        Cause.RUN_BUSY,
    }
)
"""Causes after which the next start would fail again in the same way."""

NODE_IS_BAD = frozenset(
    {Cause.BAD_GPU, Cause.GPU_MEMORY_AT_START, Cause.NODE_LOST, Cause.SILENT_CORRUPTION, Cause.UNFIT_NODE}
)
"""Causes after which the node is kept out of the next start."""

EXIT_STATUSES: dict[Cause, int] = {
    Cause.BAD_RECIPE: 2,
    Cause.EXCEPTION: 65,
    Cause.GPU_MEMORY: 65,
    Cause.BUS_ERROR: 66,
    Cause.NO_SPACE: 66,
    Cause.QUOTA: 66,
    Cause.BAD_GPU: 67,
    Cause.GPU_MEMORY_AT_START: 67,
    Cause.NODE_LOST: 67,
    Cause.SILENT_CORRUPTION: 67,
    Cause.UNFIT_NODE: 67,
    Cause.PREEMPTED: 75,
}
"""The exit status of a supervised run by the cause of its last failure; GAVE_UP for all other causes."""

GAVE_UP = 68

REPEATING_STATUSES = tuple(sorted({EXIT_STATUSES[cause] for cause in REPEATING if cause in EXIT_STATUSES}))
"""The exit statuses after which nothing must be started again before a person has mended the cause."""


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The host, rank and GPU that caused a failure; "" and None where they are unknown."""

    host: str = ""
    rank: int | None = None
    gpu: str = ""

    def __str__(self) -> str:
        parts = [
            self.host,
            f"GPU {self.gpu}" if self.gpu else "",
            "" if self.rank is None else f"rank {self.rank}",
        ]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The cause of a failure and what shows it.

    culprit: where it happened.
    summary: one sentence.
    evidence: the lines that show the cause, each with its origin.
    sure: whether the evidence names the cause; False where it is only likely.
    """

    cause: Cause
    culprit: Culprit
    summary: str
    evidence: tuple[str, ...]
    sure: bool

    @property
    def retries(self) -> bool:
        """Whether the same start may succeed; False where it would fail again."""
        return self.cause not in REPEATING

    @property
    def remedy(self) -> str:
        """What to do next."""
        return REMEDIES[self.cause]

    @property
    def exit_status(self) -> int:
        """The exit status of a run that is given up for this cause."""
        return EXIT_STATUSES.get(self.cause, GAVE_UP)

    def __str__(self) -> str:
        who = f"{self.culprit}: " if str(self.culprit) else ""
        return f"{who}{self.summary}, {'sure' if self.sure else 'likely'}"

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as fields of an event."""
        return asdict(self) | {"retries": self.retries, "remedy": self.remedy, "cause": str(self.cause)}
