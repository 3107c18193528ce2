"""The evidence that launchers collect about a failure, for the rules that find its cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bloomery.operate.diagnosis import Culprit
from bloomery.operate.flight_recorder import Flight
from bloomery.operate.hang import HangFinding


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank ended.

    device: the torch device of the rank. bus: the PCI bus of its GPU, "0000:3b:00"; "" where it is not known.
    status: its exit status, negative for a signal; None while it runs or where it is unknown.
    is_killed_here: whether its own launcher killed it, so that the signal says nothing of the cause.
    error: the exception in its heartbeat; "" where there is none.
    log: the last lines that it printed.
    step: the steps that it has made.
    flight: the last collectives that torch's flight recorder has of it; {} where it dumped none.
    children: the process numbers of the processes that it has started, as the kernel's log gives them; None
        where they are unknown, as in a container that numbers processes in its own way.
    """

    rank: int
    host: str = ""
    device: str = ""
    bus: str = ""
    pid: int = 0
    status: int | None = None
    is_killed_here: bool = False
    error: str = ""
    log: str = ""
    step: int = 0
    flight: Flight = field(default_factory=dict)
    children: Sequence[int] | None = None

    @property
    def culprit(self) -> Culprit:
        """The names of this rank as the culprit of a failure."""
        return Culprit(host=self.host, rank=self.rank, gpu=self.gpu)

    @property
    def gpu(self) -> str:
        """The index of its GPU on the host; "" without one."""
        return self.device.partition(":")[2] if self.device.startswith("cuda") else ""


@dataclass(frozen=True, kw_only=True)
class FailureEvidence:
    """Everything that was collected of a failure.

    ranks: how each rank ended.
    kernel: the lines of each host's kernel log since the attempt began.
    scheduler: the scheduler's state of the job, such as "PREEMPTED"; "" without a scheduler.
    messages: what launchers and the scheduler printed.
    hang: which ranks held up the run; None where it did not hang.
    silent_hosts: the hosts that no longer write heartbeats.
    shm_free: the free share of /dev/shm; None where it is unknown.
    shm_free_gib: its free space in GiB, the least of all hosts; None where it is unknown.
    first_step: the step from which the attempt began.
    """

    ranks: Sequence[RankEnd] = ()
    kernel: Mapping[str, Sequence[str]] = field(default_factory=dict)
    scheduler: str = ""
    messages: Sequence[str] = ()
    hang: HangFinding | None = None
    silent_hosts: Sequence[str] = ()
    shm_free: float | None = None
    shm_free_gib: float | None = None
    first_step: int = 0
