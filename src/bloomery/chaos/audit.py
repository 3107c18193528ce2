"""Audits a chaos run: compares committed with computed samples, and checks that each counted exactly once."""

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
    """What the commits and journals of a chaos run add up to.

    rounds: committed rounds that had members.
    attempts: attempts at rounds, the committed ones included.
    peers: the mean number of peers in a committed round.
    consumed: samples that trained the model.
    computed: samples that some peer trained on, whether its work was committed or lost.
    loss: the mean of the peers' last losses, on held-out text where they have one; None: no peer has a loss.
    mistakes: one sentence for each violated invariant, at most MISTAKES_SHOWN; () when there is none.
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
        """The share of the computed samples that is in no commit, from 0 to 1."""
        return 1 - self.consumed / self.computed if self.computed else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the audit as plain data."""
        return {**asdict(self), "lost_share": self.lost_share}


def read_commits(endpoint: str, run: str) -> list[Commit]:
    """Return the commits of a run that the coordinator still has, by round."""
    with Etcd([endpoint]) as etcd:
        commits = [decode(item.value, Commit) for item in etcd.list(Keys(run).commits).items]
    return sorted(commits, key=lambda commit: commit.round)


def audit(
    commits: Sequence[Commit], journals: Mapping[str, Sequence[Mapping[str, Any]]], *, samples: int
) -> RunAudit:
    """Return the audit of a run.

    commits: the run's commits by round.
    journals: the events of each peer's first rank, in order, by peer.
    samples: the number of samples of the whole run.
    """
    steps = {
        peer: [event for event in events if event["event"] == "step"] for peer, events in journals.items()
    }
    losses = [loss for events in journals.values() if (loss := _loss(events)) is not None]
    averaged = [commit for commit in commits if commit.members]
    return RunAudit(
        rounds=len(averaged),
        attempts=max((commit.epoch for commit in commits), default=0),
        peers=sum(len(commit.members) for commit in averaged) / len(averaged) if averaged else 0.0,
        consumed=commits[-1].position.consumed if commits else 0,
        computed=sum(int(event["global_batch"]) for events in steps.values() for event in events),
        loss=sum(losses) / len(losses) if losses else None,
        mistakes=tuple(_mistakes(commits, samples=samples)),
    )


def _loss(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the last loss on held-out text, or else that of the last step; None: there is neither."""
    for kind in ("held_out_loss", "loss"):
        losses = [float(event[kind]) for event in events if event.get(kind) is not None]
        if losses:
            return losses[-1]
    return None


def _mistakes(commits: Sequence[Commit], *, samples: int) -> list[str]:
    if not commits:
        return ["no round was ever committed"]
    mistakes = []
    for earlier, later in pairwise(commits):
        if later.round != earlier.round + 1:
            mistakes.append(f"round {later.round} follows round {earlier.round}")
        if later.rewind_to is None and later.position.consumed < earlier.position.consumed:
            mistakes.append(f"round {later.round} has consumed less than the one before")
        if later.members and later.epoch <= earlier.epoch and earlier.members:
            mistakes.append(f"round {later.round} has no epoch of its own")
    last = commits[-1].position
    if last.consumed < samples:
        mistakes.append(f"{last.consumed} of {samples} samples are committed")
    if last.holes:
        mistakes.append(f"{total(last.holes)} samples below the end were given out and never committed")
    return mistakes[:MISTAKES_SHOWN]
