"""A frozen snapshot of a run's records in etcd at one revision, from which all decisions are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bloomery.coordination.offer_limits import OfferLimits
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

Link = frozenset[str]
"""A pair of members between which data passes, or does not."""


@dataclass(frozen=True, kw_only=True)
class ListedMember:
    """A member that is listed.

    life: create_revision of its key, which differs between two lives of one peer.
    modified: mod_revision of its key.
    seen_s: when this machine first saw this life, by the local monotonic clock, seconds.
    said_s: when this machine read the member's present record, likewise.
    """

    member: Member
    life: int
    modified: int
    seen_s: float
    said_s: float


@dataclass(frozen=True, kw_only=True)
class ListedOffer:
    """A member's offer in the round under way.

    modified: etcd's mod_revision of the offer's key. The key is bound to the member's lease: as long as the
    revision is the same, the member has neither changed its offer nor left.
    seen_s: when this machine first read an offer of this member, by the local monotonic clock, seconds.
    """

    ready: Ready
    modified: int
    seen_s: float


@dataclass(frozen=True, kw_only=True)
class ListedShares:
    """The shares of the round under way. modified: mod_revision of their key, a condition of the commit."""

    shares: RoundShares
    modified: int


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """A run as etcd held it at one revision.

    Every `…_s` is the local monotonic clock at which this machine learnt of something, in seconds.
    The round under way is the one after the newest commit.

    version: grows with each change that this machine reads.
    revision: etcd's, up to which everything is known.
    commits: those that are kept, by round.
    commit_revision: mod_revision of the newest commit.
    standing: shares of the round under way; None: they are not known.
    readies: offers of the round under way, by peer.
    tried: the attempt under way; None: there is none.
    tried_revision: mod_revision of the attempt's key.
    refused: mod_revision of a commit of the round under way that failed the check of `commits.objection`;
        0: there is none.
    dones: results that members announced of the attempt under way, by peer.
    failures: failures that members reported, of all attempts of the round under way.
    recovery_records: recovery records, by peer.
    revoked: serial numbers of revoked certificates.
    rates: bandwidths, megabits a second, as rates[sender][receiver].
    highest: the highest epoch that was ever seen, of whomever.
    own_highest: the highest epoch that this peer itself read from the coordinator.
    forgotten: whether the coordinator lost data: its epoch is below `own_highest` or one that a present
        member or record names, or its newest commit is of an earlier round than `peers_ahead` or this peer
        know.
    peers_ahead: members that know of a later round than the coordinator, in the order of names.
    remembered: if `forgotten`, the newest commit and shares that this machine read before; else None.
    limits: what offers may claim; None: who reads this run does not judge its offers.
    """

    version: int = 0
    revision: int = 0
    epoch: int = 0
    members: Mapping[str, ListedMember] = field(default_factory=dict)
    commits: Mapping[int, Commit] = field(default_factory=dict)
    commit_revision: int = 0
    committed_s: float = 0.0
    standing: ListedShares | None = None
    readies: Mapping[str, ListedOffer] = field(default_factory=dict)
    tried: ProposedAttempt | None = None
    tried_s: float = 0.0
    tried_revision: int = 0
    refused: int = 0
    dones: Mapping[str, Done] = field(default_factory=dict)
    failures: tuple[Failed, ...] = ()
    failed_s: float = 0.0
    recovery_records: Mapping[str, RecoveryRecord] = field(default_factory=dict)
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    revoked: frozenset[str] = frozenset()
    changed_s: float = 0.0
    heard_s: float = 0.0
    highest: int = 0
    own_highest: int = 0
    forgotten: bool = False
    peers_ahead: tuple[str, ...] = ()
    remembered: RecoveryRecord | None = None
    limits: OfferLimits | None = None

    @property
    def commit(self) -> Commit | None:
        """The newest commit; None before round 0 is committed."""
        return self.commits[max(self.commits)] if self.commits else None

    @property
    def round(self) -> int:
        """The number of the round under way."""
        return max(self.commits) + 1 if self.commits else 0

    @property
    def shares(self) -> RoundShares | None:
        """The shares of the round under way; None: they are not known."""
        return self.standing.shares if self.standing else None

    @property
    def working(self) -> set[str]:
        """Names of the members that have a share and can work on it.

        Such a member was listed before the share was leased, or holds the state of the newest commit. A peer
        that was started again within the round still has a share by name, but may be fetching that state.
        """
        digest = self.commit.digest if self.commit else ""
        shares = self.shares.shares if self.shares else {}
        listed = {name: self.members[name] for name in shares if name in self.members}
        return {
            name
            for name, present in listed.items()
            if present.life <= self.commit_revision or present.member.digest == digest
        }

    @property
    def away(self) -> set[str]:
        """Names of the peers that have a share and do not work on it."""
        return set(self.shares.shares if self.shares else ()) - self.working

    def holders(self, digest: str) -> dict[str, ListedMember]:
        """Return the members that hold the state of this digest, in the order of names; none for ""."""
        return {
            name: present
            for name, present in sorted(self.members.items())
            if present.member.digest == digest != ""
        }

    def lives(self, peers: tuple[str, ...]) -> tuple[int, ...]:
        """Return `ListedMember.life` of each of these members, all of which are listed."""
        return tuple(self.members[peer].life for peer in peers)

    def without(self, peer: str) -> RunSnapshot:
        """Return this snapshot as if that peer were not listed."""
        if peer not in self.members:
            return self
        return replace(self, members={name: other for name, other in self.members.items() if name != peer})
