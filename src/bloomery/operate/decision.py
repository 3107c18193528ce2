"""The decisions that all launchers of a job follow: the next attempt and its hosts, or the exit status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bloomery.operate.failure_evidence import FailureEvidence, RankEnd
from bloomery.operate.hang import HangFinding
from bloomery.operate.newest_checkpoint import NO_CHECKPOINT, NewestCheckpoint

HANG, SILENT, FAILURE = "hang", "silent", "failure"
"""Why an attempt ends on all nodes: the ranks of the first two are killed, those of the third may end."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The next attempt of a job, or its end.

    number: counts from 1.
    hosts: the hosts that start ranks, in the order of their ranks; () at the end.
    ranks: the number of ranks that each of them starts.
    meeting: HOST:PORT of rank 0.
    status: the exit status of every launcher; None while the job goes on.
    why: a sentence for people; "" where there is nothing to say.
    newest: the newest checkpoint when the attempt began.
    in_a_row, in_all: restarts since a newer checkpoint, and so far.
    bad: the hosts that are left out from now on.
    measured_s: the longest turn of each activity in earlier attempts, in seconds.
    """

    number: int
    hosts: tuple[str, ...] = ()
    ranks: int = 0
    meeting: str = ""
    status: int | None = None
    why: str = ""
    newest: NewestCheckpoint = NO_CHECKPOINT
    in_a_row: int = 0
    in_all: int = 0
    bad: tuple[str, ...] = ()
    measured_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """The number of ranks of the attempt."""
        return self.ranks * len(self.hosts)

    def share(self, host: str) -> range:
        """Return the ranks that a host starts; empty for a spare."""
        if host not in self.hosts:
            return range(0)
        first = self.hosts.index(host) * self.ranks
        return range(first, first + self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Return the decision as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Decision:
        """Return the decision that `to_json` described."""
        named = {"newest": NewestCheckpoint(**record["newest"])}
        return cls(**{**record, **named, "hosts": tuple(record["hosts"]), "bad": tuple(record["bad"])})


@dataclass(frozen=True, kw_only=True)
class ShareResult:
    """How the ranks of one host ended.

    status: the exit status of the launcher for this attempt.
    kernel: what the host's kernel log has gained. shm_free: the free share of its /dev/shm.
    shm_free_gib: the free space there in GiB.
    """

    host: str
    status: int
    ends: tuple[RankEnd, ...]
    kernel: tuple[str, ...] = ()
    shm_free: float | None = None
    shm_free_gib: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ShareResult:
        """Return the result that `to_json` described."""
        ends = tuple(RankEnd(**end) for end in record["ends"])
        return cls(**{**record, "ends": ends, "kernel": tuple(record["kernel"])})


def evidence_of(
    decision: Decision, results: Mapping[str, ShareResult], *, ending: Mapping[str, Any] | None
) -> FailureEvidence:
    """Return all that the hosts know of how an attempt ended. ending: the record that ended it; None: none.

    The ranks of a host without a result have no exit status.
    """
    ends = [end for result in results.values() for end in result.ends]
    lost = [host for host in decision.hosts if host not in results]
    ends += [RankEnd(rank=rank, host=host) for host in lost for rank in decision.share(host)]
    shares = [result.shm_free for result in results.values() if result.shm_free is not None]
    rooms = [result.shm_free_gib for result in results.values() if result.shm_free_gib is not None]
    hang = ending.get("finding") if ending else None
    return FailureEvidence(
        ranks=sorted(ends, key=lambda end: end.rank),
        kernel={host: result.kernel for host, result in results.items()},
        hang=None if lost or not hang else _finding(hang),
        silent_hosts=lost,
        shm_free=min(shares, default=None),
        shm_free_gib=min(rooms, default=None),
        first_step=max(decision.newest.step, 0),
    )


def _finding(record: Mapping[str, Any]) -> HangFinding:
    tuples = {name: tuple(record[name]) for name in ("culprits", "hosts", "evidence")}
    return HangFinding(**{**record, **tuples})
