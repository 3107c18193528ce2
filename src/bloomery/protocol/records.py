"""The records that peers of a run share through the coordinator. `keys.py` spells the key of each.

A round takes these steps. Each member writes that it is *ready*. One member proposes an *attempt*: an epoch,
and the members in the order of the ring. Each of them reduces, and writes *done* with the digest of its
result, or *failed*. One member writes the *commit* together with the shares of the next round, in one
transaction, so that each sample is shared out exactly once. Round 0 is the beginning: a commit without an
attempt, which says whose state is the run's.
"""

from __future__ import annotations

import msgspec

from bloomery.protocol.encoding import (
    Count,
    Counts,
    FewRanges,
    FewTexts,
    Message,
    Name,
    Names,
    Norm,
    Number,
    NumberOrNone,
    Numbers,
    PastParts,
    Ranges,
    RangesByName,
    Reasoned,
    Seconds,
    StepSamples,
    StreamPosition,
    Text,
    TextByName,
    Texts,
    Weights,
    printable,
)

PROTOCOL, PROTOCOL_VERSION = "the protocol between peers", "4"
"""What a peer publishes beside its settings, so that versions that differ in it refuse each other by name.

2: parts tell how many steps they span, and the ring has a codec for what is still being added up.
3: a peer tells which state it wants, and copies a state when somebody wants it.
4: averages of missed rounds are fetched as the ring sent them, in place of fp32.
"""


class Member(Message, frozen=True, kw_only=True, omit_defaults=True, rename={"ranks": "lanes"}):
    """A peer that is present. The record is attached to the peer's lease and vanishes with it.

    peer: the peer's name.
    incarnation: a random name of this process of the peer; a restarted peer has another one.
    addresses: where other peers dial it, each 'host:port'; () if it cannot be dialled.
    serves: URLs at which it serves copies of states, and averages of rounds; 'relay:' if it cannot be
        dialled and keeps reverse connections to peers that relay.
    round, digest: the round and the digest of the state that it holds; -1 and "" before it holds any.
    ranks: how many rings it runs side by side, one for each of its ranks; `lanes` in the record.
    recipe: a fingerprint of the settings that must be equal on all peers.
    samples: how many samples it uses in one inner step.
    relays: whether it forwards connections for peers that cannot be dialled.
    epoch: the highest epoch that it has seen. If the coordinator loses its data, later epochs are above it.
    overtaken: how many rounds were committed without it since it joined or was last in one, for instance
        while it fetched a state.
    backed_up: the newest round that it has backed up; -1 if there is none, None if it makes no backups.
    saves: the rounds whose states its checkpoints on disk contain. It can go back to these, so their commits
        are kept.
    copies: the digests of the states of which it serves copies.
    wants: the digest of the state that it wants to fetch; "" if it wants none.
    """

    peer: Name
    incarnation: Text
    addresses: Texts
    serves: Texts
    round: NumberOrNone
    digest: Text
    ranks: Count
    recipe: Text
    samples: StepSamples
    relays: bool
    epoch: Number
    overtaken: Number
    backed_up: NumberOrNone | None
    saves: Numbers
    copies: FewTexts = ()
    wants: Text = ""


class Ready(Reasoned, frozen=True, kw_only=True, omit_defaults=True):
    """What a peer offers to a round: its pseudo-gradient may be averaged, with the weight of its tokens.

    With several fragments, a round's pseudo-gradient is of one fragment and spans all steps since that
    fragment was last averaged; its weight is the tokens of these steps, `drift_tokens`.

    peer: the peer's name.
    round: the round.
    steps, tokens: how many steps it made in the round, and how many tokens they used.
    spent: the samples that these steps used.
    norm: the norm of its pseudo-gradient; None if that is not finite.
    finite: whether every value of its pseudo-gradient is finite.
    wants_save: whether it asks for a checkpoint of the round on all peers.
    rewind_to: the round to which its guards want the whole run to go back; None if they do not.
    rung: which remedy its guards ask for with that (`guard.verdict.Rung`); 0 for none.
    kept: the samples that it uses while the round is decided (elastic.overlap_steps). If it is in this
        round's commit they are the first of its next share; until then they stay shared out to it.
    skip: the samples that no peer may use after this commit, whether or not the run goes back.
    why: the guards' reason.
    step_s: the usual seconds of a step if steps continue while the round is decided (elastic.overlap_steps),
        since it begins the ring only between two steps; else 0.
    drift_steps, drift_tokens: how many steps, and how many of this peer's tokens, the pseudo-gradient
        spans; 0 where that is `steps` and `tokens`.
    feedback: the norm of the quantisation errors that the peer adds (error feedback), in the unit of the
        average.
    past: (steps, norm) of its last pseudo-gradients of this fragment that were averaged.
    coordinator_s: the usual seconds of a round trip from this peer to the coordinator.
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
    skip: FewRanges
    step_s: Seconds
    rung: Number = 0
    drift_steps: Count = 0
    drift_tokens: Count = 0
    feedback: Norm = 0.0
    past: PastParts = ()
    coordinator_s: Seconds = 0.0

    @property
    def spanned_steps(self) -> int:
        """How many steps the pseudo-gradient spans."""
        return self.drift_steps or self.steps

    @property
    def weight_tokens(self) -> int:
        """The tokens by which the pseudo-gradient is weighted."""
        return self.drift_tokens or self.tokens

    def __post_init__(self) -> None:
        if self.finite and self.norm is None:
            raise ValueError("a part that is finite has a norm")
        super().__post_init__()


class Attempt(Message, frozen=True, kw_only=True):
    """One try of a round's all_reduce.

    round: the round.
    epoch: the number of the attempt; each attempt in a run has a higher one.
    members: the names of the members, in the order of the ring.
    weights: the weights of the members' parts, in the same order; their sum is 1.
    left_out: the peers that were ready and may not take part, each with the reason.
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
    """An attempt as it is stored, with the revisions of the records on which it was decided.

    attempt: the attempt.
    lives: the create_revision of each member's `Member`, in the attempt's order.
    offers: the mod_revision of each member's `Ready`, in the attempt's order. If a member writes that record
        again the attempt does not use it, but can no longer be concluded either.
    """

    attempt: Attempt
    lives: Counts
    offers: Counts


class Done(Message, frozen=True, kw_only=True):
    """A peer has reduced in an attempt. digest: the digest of the state that it would hold next."""

    peer: Name
    round: Number
    epoch: Number
    digest: Text


class Failed(Reasoned, frozen=True, kw_only=True):
    """An attempt failed for a peer, and its ranks no longer use the attempt's connections.

    A peer that aborted because another one failed writes this too, with the kind "aborted" and no culprit. So
    a peer that writes nothing is known to hang.

    kind: "stalled", "unreachable", "parity", "aborted" or another word for what happened.
    culprit: the peer at the other end of the connection; None if that is not known.
    """

    peer: Name
    round: Number
    epoch: Number
    kind: Text
    culprit: Name | None


class Commit(Reasoned, frozen=True, kw_only=True, omit_defaults=True):
    """The decision about a round, which is made once and holds for all peers.

    round: the round.
    epoch: the epoch in which it was decided.
    members: the peers whose parts are in it; () if nothing was averaged (round 0, and a rewind).
    digest: the digest of the state that every peer must hold now.
    position: the position in the stream of samples after the round, before the next round's are shared out.
    sources: the peers that hold the state.
    left_out: the peers that were ready and are not in it, each with the reason.
    rewind_to: the round whose state is the run's state again; None if the run continues.
    rung: the highest remedy that guards asked for with the rewind (`guard.verdict.Rung`); 0 for none.
    save: whether every peer makes a checkpoint of this round.
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
    """The samples that each peer may use in a round. Joining peers add themselves until the commit.

    round: the round.
    position: the position in the stream, in which all samples that are shared out are holes.
    shares: each peer's samples, by its name.
    live: how many peers schedules count: a round consumes about `live` times the samples of one peer.
    """

    round: Number
    position: StreamPosition
    shares: RangesByName
    live: Count


class RecoveryRecord(Message, frozen=True, kw_only=True):
    """What a peer knows of the run, for a coordinator that has lost its data.

    epoch: the highest epoch that the peer has seen.
    commit, shares: the newest commit that it has read, and the shares written with it; None if none.
    held: the commit whose state its ranks hold, according to their checkpoint; None if there is none.
    """

    epoch: Number
    commit: Commit | None
    shares: RoundShares | None
    held: Commit | None

    @property
    def commits(self) -> tuple[Commit, ...]:
        """The commits in this record."""
        return tuple(commit for commit in (self.commit, self.held) if commit is not None)

    @property
    def round(self) -> int:
        """The latest round of these commits; -1 if there is none."""
        return max((commit.round for commit in self.commits), default=-1)


class KnownRun(RecoveryRecord, frozen=True, kw_only=True):
    """The content of a run directory's `known.json`. run: the name of the run."""

    run: Name


def _check_unique(names: tuple[str, ...]) -> None:
    if len(set(names)) != len(names):
        raise ValueError("a peer is named twice")


def _clean_left_out(record: Attempt | Commit) -> None:
    cleaned = {peer: printable(why) for peer, why in record.left_out.items()}
    msgspec.structs.force_setattr(record, "left_out", cleaned)
