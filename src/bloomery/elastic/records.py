"""What peers of a run agree on through the coordinator, as plain data. `control/` says where each lies.

A round's life: members are *ready* → somebody proposes an *attempt* (an epoch: who, in which order round the
ring) → each reduces and says *done* with the digest of its result → somebody commits. A commit and the shares
of the next round are one transaction, so a sample is given out exactly once. Round 0 is the beginning: a
commit without an attempt, which says whose state is the run's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bloomery.data.position import Position
from bloomery.data.ranges import Ranges


@dataclass(frozen=True, kw_only=True)
class Member:
    """A peer that is present, under its lease.

    incarnation: a random name of this life of the peer. addresses: where its ring listens, 'host:port'.
    serves: URLs of its state. round, digest: the newest state it holds; -1 and "" before it has any. lanes:
    rings it runs side by side. recipe: fingerprint of what must be equal between peers. samples: of one inner
    step. relays: whether it forwards for peers that cannot be dialled.
    """

    peer: str
    incarnation: str
    addresses: tuple[str, ...]
    serves: tuple[str, ...]
    round: int
    digest: str
    lanes: int
    recipe: str
    samples: int
    relays: bool = False
    epoch: int = 0
    """The highest it has seen: should the coordinator lose its data, epochs go on above it."""
    overtaken: int = 0
    """Rounds that were committed without it since it came or was last in one: while it fetches, above all."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What a peer brings to a round: steps and tokens of its share, and whether its part may be averaged.

    spent: what trained the part. kept: what it goes on to use while the round is decided (overlap_steps): its
    first samples of the next round, if it is in this one's commit; it stays given out until then.
    rewind_to: the round to which its guards want the whole run to go back; None: none. skip: samples that
    nobody is to use from this commit on, whether or not the run goes back. step_s: of a usual step, where
    steps go on while the round is decided (overlap_steps), since a ring begins between two; else 0.
    """

    peer: str
    round: int
    steps: int
    tokens: int
    spent: Ranges
    norm: float
    finite: bool
    wants_save: bool = False
    rewind_to: int | None = None
    kept: Ranges = ()
    skip: Ranges = ()
    why: str = ""
    step_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try of a round's all-reduce. members: in ring order; weights: of their parts; sum 1."""

    round: int
    epoch: int
    members: tuple[str, ...]
    weights: tuple[float, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Peers that were ready and may not take part, and why."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a peer holds after an attempt: the digest of the state it would go on with."""

    peer: str
    round: int
    epoch: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Failed:
    """An attempt went wrong for a peer, and its ranks have let go of it. culprit: the peer at the other end.

    Those who were only told to abort say so too (kind "aborted", no culprit): who says nothing does not move.
    """

    peer: str
    round: int
    epoch: int
    kind: str
    culprit: str | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A round, decided once for everybody. position: after it, nothing given out.

    members: whose parts are in it; () where nothing was averaged (round 0, a rewind). rewind_to: the round
    whose state is the run's again. digest: of the state that every peer must hold now. source: peers that
    hold it.
    """

    round: int
    epoch: int
    members: tuple[str, ...]
    digest: str
    position: Position
    sources: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    rewind_to: int | None = None
    save: bool = False
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What each peer may take in a round. Newcomers add themselves until the round is committed."""

    round: int
    position: Position
    """With what is given out as holes."""
    shares: Mapping[str, Ranges]
    live: int
    """Peers that schedules count: what this round consumes is about live × one peer's own samples."""
