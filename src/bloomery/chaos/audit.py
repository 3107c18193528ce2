"""Audits a chaos run: samples committed against computed, and whether each sample counted exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from bloomery.coordination.etcd import Etcd
from bloomery.data.position import total
from bloomery.protocol.encoding import decode
from bloomery.protocol.keys import Keys
from bloomery.protocol.records import Commit

MISTAKES_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class RunAudit:
    """consumed: samples that trained the model. computed: samples that some peer trained on, kept or not.

    attempts: of rounds, the committed ones too. peers: in a round on average. loss: the mean of the peers'
    last, on held-out text where there is some. mistakes: what must never be, in words; () where the data was
    counted exactly once.
    """

    rounds: int
    attempts: int
    peers: float
    consumed: int
    computed: int
    loss: float | None
    mistakes: tuple[str, ...]

    @property
    def lost_share(self) -> float:
        """Of what was computed, how much is in no commit."""
        return 1 - self.consumed / self.computed if self.computed else 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "lost_share": self.lost_share}


def read_commits(endpoint: str, run: str) -> list[Commit]:
    """The commits of a run that the coordinator still has, in order."""
    with Etcd([endpoint]) as etcd:
        found = [decode(item.value, Commit) for item in etcd.list(Keys(run).commits).items]
    return sorted(found, key=lambda commit: commit.round)


def audit(
    commits: Sequence[Commit], journals: Mapping[str, Sequence[Mapping[str, Any]]], *, samples: int
) -> RunAudit:
    """Count. journals: of each peer's first rank, its events in order. samples: of the whole run."""
    steps = {peer: [one for one in events if one["event"] == "step"] for peer, events in journals.items()}
    losses = [found for events in journals.values() if (found := _loss(events)) is not None]
    averaged = [commit for commit in commits if commit.members]
    return RunAudit(
        rounds=len(averaged),
        attempts=max((commit.epoch for commit in commits), default=0),
        peers=sum(len(commit.members) for commit in averaged) / len(averaged) if averaged else 0.0,
        consumed=commits[-1].position.consumed if commits else 0,
        computed=sum(int(one["global_batch"]) for events in steps.values() for one in events),
        loss=sum(losses) / len(losses) if losses else None,
        mistakes=tuple(_mistakes(commits, samples=samples)),
    )


def _loss(events: Sequence[Mapping[str, Any]]) -> float | None:
    """The last loss on held-out text; where there was none, that of the last step."""
    for kind in ("held_out_loss", "loss"):
        found = [float(one[kind]) for one in events if one.get(kind) is not None]
        if found:
            return found[-1]
    return None


def _mistakes(commits: Sequence[Commit], *, samples: int) -> list[str]:
    if not commits:
        return ["no round was ever committed"]
    found = []
    for earlier, later in pairwise(commits):
        if later.round != earlier.round + 1:
            found.append(f"round {later.round} follows round {earlier.round}")
        if later.rewind_to is None and later.position.consumed < earlier.position.consumed:
            found.append(f"round {later.round} has consumed less than the one before")
        if later.members and later.epoch <= earlier.epoch and earlier.members:
            found.append(f"round {later.round} has no epoch of its own")
    last = commits[-1].position
    if last.consumed < samples:
        found.append(f"{last.consumed} of {samples} samples are committed")
    if last.holes:
        found.append(f"{total(last.holes)} samples below the end were given out and never committed")
    return found[:MISTAKES_SHOWN]
