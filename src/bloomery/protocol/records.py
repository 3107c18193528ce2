"""The records that peers of a run share through the coordinator. `keys.py` says at which key each lies.

A round goes so: each member writes that it is *ready*; one of them proposes an *attempt* (an epoch, and who
is in it in which order round the ring); each reduces, and writes *done* with the digest of its result, or
*failed*; one of them writes the *commit*. The commit and the shares of the next round are one transaction, so
each sample is given out exactly once. Round 0 is the beginning: a commit without an attempt, which says whose
state is the run's.
"""

from __future__ import annotations

import msgspec

from bloomery.protocol.encoding import (
    Count,
    Counts,
    Message,
    Name,
    Names,
    Norm,
    Number,
    NumberOrNone,
    Numbers,
    Ranges,
    RangesByName,
    Reasoned,
    Seconds,
    StreamPosition,
    Text,
    TextByName,
    Texts,
    Weights,
    printable,
)


class Member(Message, frozen=True, kw_only=True):
    """A peer that is present: it lies on the peer's lease.

    peer: its name.
    incarnation: a random name of this process of the peer; a restarted peer has another one.
    addresses: where its ring listens, 'host:port'.
    serves: URLs from which its state can be fetched.
    round, digest: the newest state that it holds; -1 and "" before it holds any.
    lanes: rings that it runs side by side, one for each of its ranks.
    recipe: fingerprint of the settings that must be equal on all peers.
    samples: of one inner step.
    relays: whether it forwards connections for peers that cannot be dialled.
    epoch: the highest that it has seen. Should the coordinator lose its data, epochs go on above it.
    overtaken: rounds that were committed without it since it came or was last in one, as while it fetches a
        state.
    backed_up: the newest round that it has backed up elsewhere; -1 for none, None where it makes no backups.
    saves: rounds on whose states its checkpoints on disk rest. It can go back to these, so their commits are
        kept.
    """

    peer: Name
    incarnation: Text
    addresses: Texts
    serves: Texts
    round: NumberOrNone
    digest: Text
    lanes: Count
    recipe: Text
    samples: Count
    relays: bool
    epoch: Number
    overtaken: Number
    backed_up: NumberOrNone | None
    saves: Numbers


class Ready(Reasoned, frozen=True, kw_only=True, omit_defaults=True):
    """What a peer offers to a round: its pseudo-gradient may be averaged, with the weight of its tokens.

    steps, tokens: of its share.
    spent: samples that trained what it offers.
    norm: of its pseudo-gradient; None where that is not finite.
    finite: whether every value of it is finite.
    wants_save: whether it asks for a checkpoint of the round on all peers.
    rewind_to: the round to which its guards want the whole run to go back; None where they do not.
    rung: the rung of the ladder that its guards ask for with it (`guard.verdict.Rung`); 0 for none.
    kept: samples that it uses while the round is decided (overlap_steps). They are the first of its next
        round if it is in this one's commit, and stay given out to it until then.
    skip: samples that nobody is to use from this commit on, whether or not the run goes back.
    why: the guards' reason.
    step_s: seconds of a usual step where steps go on while the round is decided (overlap_steps), for a ring
        begins between two; else 0.
    """

    peer: Name
    round: Number
    steps: Count
    tokens: Count
    spent: Ranges
    norm: Norm | None
    finite: bool
    wants_save: bool
    rewind_to: Number | None
    kept: Ranges
    skip: Ranges
    step_s: Seconds
    rung: Number = 0

    def __post_init__(self) -> None:
        if self.finite and self.norm is None:
            raise ValueError("a part that is finite has a norm")
        super().__post_init__()


class Attempt(Message, frozen=True, kw_only=True):
    """One try of a round's all_reduce.

    members: in the order of the ring.
    weights: of the members' parts, in the same order; their sum is 1.
    left_out: peers that were ready and may not take part, each with the reason.
    """

    round: Number
    epoch: Number
    members: Names
    weights: Weights
    left_out: TextByName

    def __post_init__(self) -> None:
        _check_unique(self.members)
        _clean_left_out(self)


class ProposedAttempt(Message, frozen=True, kw_only=True):
    """An attempt as it is stored, with what it was decided on.

    lives: of each member, in the attempt's order, the create_revision of its presence.
    offers: of each member, the mod_revision of its `Ready`. What a member writes there afterwards counts for
        nothing, but the attempt cannot be concluded any more.
    """

    attempt: Attempt
    lives: Counts
    offers: Counts


class Done(Message, frozen=True, kw_only=True):
    """What a peer holds after an attempt. digest: of the state with which it would go on."""

    peer: Name
    round: Number
    epoch: Number
    digest: Text


class Failed(Reasoned, frozen=True, kw_only=True):
    """An attempt went wrong for a peer, and its ranks use its connections no more.

    A peer that was only told to abort writes this too (kind "aborted", no culprit): one that writes nothing
    hangs.

    kind: "stalled", "unreachable", "parity", "aborted" or another word for what happened.
    culprit: the peer at the other end of the connection; None where none is known.
    """

    peer: Name
    round: Number
    epoch: Number
    kind: Text
    culprit: Name | None


class Commit(Reasoned, frozen=True, kw_only=True, omit_defaults=True):
    """A round, decided once for all peers.

    members: whose parts are in it; () where nothing was averaged (round 0, and a round that goes back).
    digest: of the state that every peer must hold now.
    position: in the stream of samples after the round, with nothing given out.
    sources: peers that hold the state.
    left_out: peers that were ready and are not in it, each with the reason.
    rewind_to: the round whose state is the run's again; None where the run goes on.
    rung: the highest rung that was asked for with it; 0 where guards asked for none.
    save: whether every peer makes a checkpoint of it.
    """

    round: Number
    epoch: Number
    members: Names
    digest: Text
    position: StreamPosition
    sources: Names
    left_out: TextByName
    rewind_to: Number | None
    save: bool
    rung: Number = 0

    def __post_init__(self) -> None:
        _check_unique(self.members)
        _check_unique(self.sources)
        _clean_left_out(self)
        super().__post_init__()


class RoundShares(Message, frozen=True, kw_only=True):
    """What each peer may use in a round. Newcomers add themselves until the round is committed.

    position: with everything that is given out as holes.
    shares: each peer's samples.
    live: peers that schedules count: a round consumes about live times one peer's own samples.
    """

    round: Number
    position: StreamPosition
    shares: RangesByName
    live: Count


class RecoveryRecord(Message, frozen=True, kw_only=True):
    """What a peer knows of the run, should the coordinator know less.

    epoch: the highest that it has seen.
    commit, shares: the newest commit that it read, and what was given out with it.
    held: the commit whose state its ranks hold, as their checkpoint tells it.
    """

    epoch: Number
    commit: Commit | None
    shares: RoundShares | None
    held: Commit | None

    @property
    def commits(self) -> tuple[Commit, ...]:
        """Every commit that it knows."""
        return tuple(commit for commit in (self.commit, self.held) if commit is not None)

    @property
    def round(self) -> int:
        """The latest round of them; -1 where it knows none."""
        return max((commit.round for commit in self.commits), default=-1)


class KnownRun(RecoveryRecord, frozen=True, kw_only=True):
    """The content of a run directory's `known.json`. run: whose commits these are."""

    run: Name


def _check_unique(names: tuple[str, ...]) -> None:
    if len(set(names)) != len(names):
        raise ValueError("a peer is named twice")


def _clean_left_out(record: Attempt | Commit) -> None:
    cleaned = {peer: printable(why) for peer, why in record.left_out.items()}
    msgspec.structs.force_setattr(record, "left_out", cleaned)
