"""A run as the coordinator knows it at one revision: the frozen value that decisions are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bloomery.protocol.records import (
    Commit,
    Done,
    Failed,
    Member,
    ProposedAttempt,
    Ready,
    RecoveryRecord,
    RoundShares,
)


@dataclass(frozen=True, kw_only=True)
class Present:
    """A member that is listed. life, modified: revisions of its key, when created and when last written.

    seen_s, said_s: since when that is known here, by the local clock.
    """

    member: Member
    life: int
    modified: int
    seen_s: float
    said_s: float


@dataclass(frozen=True, kw_only=True)
class Offered:
    """What a member brings to the round under way, and since when that is known here.

    modified: revision of its key, which lies on the member's lease: while it is unchanged, so is the member.
    """

    ready: Ready
    modified: int
    seen_s: float


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The shares of the round under way. modified: revision of their key, which a commit compares."""

    shares: RoundShares
    modified: int


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """A run at `revision`. Times are of this machine's monotonic clock: when something became known here.

    version: grows with each change. commits: those still kept, by round; commit_revision: of the newest.
    readies, tried, dones, failures: of the round under way, which is the one after the newest commit.
    forgotten: the coordinator has lost what it knew: its epoch is below one that was seen, or its newest
    commit is of an earlier round than `witnesses` (members, in the order of names) or this peer know.
    heard_s: when the coordinator was last heard.
    """

    version: int = 0
    revision: int = 0
    epoch: int = 0
    members: Mapping[str, Present] = field(default_factory=dict)
    commits: Mapping[int, Commit] = field(default_factory=dict)
    commit_revision: int = 0
    committed_s: float = 0.0
    standing: Standing | None = None
    readies: Mapping[str, Offered] = field(default_factory=dict)
    tried: ProposedAttempt | None = None
    tried_s: float = 0.0
    tried_revision: int = 0
    """At which the attempt was proposed."""
    refused: int = 0
    """Revision of a commit of the round under way that nobody goes on from (`evidence`); 0: there is none."""
    dones: Mapping[str, Done] = field(default_factory=dict)
    """Of the attempt under way, by peer."""
    failures: tuple[Failed, ...] = ()
    """Of all attempts of the round."""
    failed_s: float = 0.0
    testimonies: Mapping[str, RecoveryRecord] = field(default_factory=dict)
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    changed_s: float = 0.0
    heard_s: float = 0.0
    highest: int = 0
    """The highest epoch that was ever seen."""
    forgotten: bool = False
    witnesses: tuple[str, ...] = ()
    remembered: RecoveryRecord | None = None
    """Where the coordinator has forgotten: the newest that was seen here before."""

    @property
    def commit(self) -> Commit | None:
        """The newest."""
        return self.commits[max(self.commits)] if self.commits else None

    @property
    def round(self) -> int:
        """The one under way."""
        return max(self.commits) + 1 if self.commits else 0

    @property
    def shares(self) -> RoundShares | None:
        """Of the round under way."""
        return self.standing.shares if self.standing else None

    @property
    def working(self) -> set[str]:
        """Members that have a share and can be at it: since it was given out, or with its state.

        A peer that was started again within the round has its share by name, and may still be fetching.
        """
        digest = self.commit.digest if self.commit else ""
        named = self.shares.shares if self.shares else {}
        there = {name: self.members[name] for name in named if name in self.members}
        return {
            name
            for name, one in there.items()
            if one.life <= self.commit_revision or one.member.digest == digest
        }

    def holders(self, digest: str) -> dict[str, Present]:
        """Members that are listed with this state, in the order of names."""
        return {name: one for name, one in sorted(self.members.items()) if one.member.digest == digest != ""}

    def lives(self, peers: tuple[str, ...]) -> tuple[int, ...]:
        """The lives of these members, who are listed."""
        return tuple(self.members[peer].life for peer in peers)
