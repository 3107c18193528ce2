"""The messages between a peer's agent and its ranks, over a socket that only this user can reach.

The agent (`bloomery peer`) holds the lease, knows the other peers, and hands over connected descriptors; the
ranks compute and reduce. Every rank has a connection of its own to the agent, and all ranks receive the same
decisions in the same order. Agent and ranks run from one installation: strictness catches mistakes and mixed
versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta

from bloomery.protocol.encoding import (
    Count,
    FewTexts,
    Message,
    Norm,
    Number,
    NumberOrNone,
    Numbers,
    ProtocolError,
    Ranges,
    Reasoned,
    StreamPosition,
    Text,
    TextByText,
    decode_union,
    encode,
)
from bloomery.protocol.records import Attempt, Commit, Ready

MAX_BYTES = 160 * 1024
"""The most bytes of one message. The kernel accepts this much at once with its default settings."""

MAX_DESCRIPTORS = 253
"""The most descriptors of one message, a limit of the kernel (SCM_MAX_FD)."""

KEY_BYTES = 32
RANKS_AT_MOST = 65_536

RoundActivity = Literal["start", "compile", "step", "evaluate", "ring", "offer", "save", "wait"]
"""What a rank is doing, as it reports to its agent."""

RankIndex = Annotated[int, Meta(ge=0, lt=RANKS_AT_MOST)]
Descriptors = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...], Meta(max_length=MAX_DESCRIPTORS)]
ConnectionKeys = Annotated[
    tuple[Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)], ...],
    Meta(max_length=MAX_DESCRIPTORS),
]
RingSeconds = Annotated[float, Meta(ge=0.0, le=1e9)]


class _Tagged(Message, frozen=True, kw_only=True, tag_field="is"):
    """A message whose field `is` names its kind."""


class _TaggedReason(Reasoned, frozen=True, kw_only=True, tag_field="is"):
    """A tagged message with a reason in words."""


class Hello(_Tagged, frozen=True, kw_only=True, tag="hello"):
    """A rank's first message. rank, world: its index and how many ranks its peer has. process: its id."""

    rank: RankIndex
    world: Annotated[int, Meta(ge=1, le=RANKS_AT_MOST)]
    process: Annotated[int, Meta(ge=0, lt=1 << 31)]


class Moving(_Tagged, frozen=True, kw_only=True, tag="moving"):
    """What a rank is doing now. step: the inner step that it is making, or made last."""

    activity: RoundActivity
    step: Count


class DataIdentity(_Tagged, frozen=True, kw_only=True, tag="reading"):
    """What identifies the stream of samples, equal on all peers. The first rank sends it, once."""

    identity: TextByText


class StateHeld(_Tagged, frozen=True, kw_only=True, tag="holding"):
    """Which state a rank holds now.

    round: the round after which the state is; -1 before any.
    digest: the digest of the peer's whole shared state; all ranks send the same.
    step: how many inner steps this peer has made.
    samples: how many samples this peer uses in one inner step.
    position: the position in the stream after the round; None if the checkpoint does not record it.
    saves: the rounds whose states this peer's checkpoints on disk contain; the first rank sends them.
    """

    round: NumberOrNone
    digest: Text
    step: Count
    samples: Count
    position: StreamPosition | None
    saves: Numbers


class StateCopied(_Tagged, frozen=True, kw_only=True, tag="copied"):
    """The ranks have copied a committed state into memory, because a `CopyState` asked for it.

    The first rank sends it.

    round, digest: the state.
    directory: a checkpoint of exactly this state, from which other peers may be served; None if there was no
        room for it.
    """

    round: Number
    digest: Text
    directory: Path | None


class StateRefused(_TaggedReason, frozen=True, kw_only=True, tag="state refused"):
    """A rank refuses a `ReplaceState` or `CatchUp`, since the digest differs. `StateHeld` follows."""


class RankReady(_Tagged, frozen=True, kw_only=True, tag="ready"):
    """A rank offers its peer's part of a round. The part stays unchanged until the round is committed.

    number: that of the `StartRound` that it answers.
    """

    ready: Ready
    number: Number


class RankRingDone(_Tagged, frozen=True, kw_only=True, tag="ring done"):
    """A rank's all_reduce of this epoch is complete. digest: the digest of the state that would follow."""

    epoch: Number
    digest: Text


class RankRingFailed(_TaggedReason, frozen=True, kw_only=True, tag="ring failed"):
    """A rank's all_reduce of this epoch failed.

    kind: a word for what happened; "cancelled" if the agent asked for it.
    culprit: "next" or "previous" in the ring, or a peer's name; None if none is known.
    """

    epoch: Number
    kind: Text
    culprit: Text | None


class AbortAck(_Tagged, frozen=True, kw_only=True, tag="heeded"):
    """A rank has read an `Abort`, so it does not hang; it no longer uses the connections of that epoch."""

    epoch: Number


class RankLeaves(_TaggedReason, frozen=True, kw_only=True, tag="leave"):
    """A rank ends on purpose. The agent takes the peer off the list and sends all ranks `StopTraining`."""


class StartRound(_Tagged, frozen=True, kw_only=True, tag="go"):
    """Take part in a round with the state that the ranks hold, which is the run's.

    round: the round to train.
    position: the position after the round before; samples that any peer may use in this round are its holes.
    live: how many peers schedules of the learning rate count.
    samples: this peer's share. A joining peer has none until the next round: it offers a part of no steps and
        no tokens at once, whose weight is 0, and takes part in the ring, so that it holds the next state too.
    number: how many of these messages the agent has sent, with this one. The agent ignores a part that
        answers an earlier one.

    The agent may send it again within a round. If `samples` contain what the ranks have offered, they offer
    that again, because the coordinator has lost the offer. If they offered a part without samples and get
    samples now, they begin again with these. During an attempt the agent sends them no first samples, because
    it may be committed with the part that they have offered.
    """

    round: Number
    position: StreamPosition
    live: Count
    samples: Ranges
    number: Number


class ReplaceState(_TaggedReason, frozen=True, kw_only=True, tag="replace"):
    """Load this checkpoint, which was fetched as the run's state after `round`, and send `StateHeld` again.

    round: the round of the commit.
    digest: the digest that the loaded tensors must have. If it is another, the ranks send `StateRefused` and
        return to this peer's own checkpoint. The round is no proof: after a rewind, the state of a later
        round is that of an earlier round's checkpoint.
    position: the position of the commit. The position in the checkpoint may be later, because the peer that
        made it may have used samples of the next round already.
    directory: the checkpoint.
    """

    round: Number
    digest: Text
    position: StreamPosition
    directory: Path


class FlushRound(_Tagged, frozen=True, kw_only=True, tag="hurry"):
    """Offer this peer's part after the step that is under way, because the other peers wait for it."""

    round: Number


class HopConnections(Message, frozen=True, kw_only=True):
    """The connections of one rank's ring to both neighbours. The rank that gets them closes them.

    rank: the index of the ring, one for each rank of a peer.
    next_fds, previous_fds: descriptors of the connections to the next and from the previous member.
    send_keys, receive_keys: the key of each of these connections, in the same order.
    """

    rank: Annotated[int, Meta(ge=0, lt=4096)]
    next_fds: Descriptors
    previous_fds: Descriptors
    send_keys: ConnectionKeys
    receive_keys: ConnectionKeys

    def __post_init__(self) -> None:
        if (len(self.next_fds), len(self.previous_fds)) != (len(self.send_keys), len(self.receive_keys)):
            raise ValueError("each connection has one key")


class Reduce(_Tagged, frozen=True, kw_only=True, tag="reduce"):
    """Run the all_reduce of an attempt.

    attempt: the attempt.
    index: the index of this peer in `attempt.members`.
    hops: the connections that the rank uses, by rank.
    stall_s: after how many seconds without a byte a connection counts as broken.
    deadline_s: how many seconds the whole all_reduce may take.
    norm_limit: the largest norm that the average can have if what each member says of its part is true; None
        if that is not known.
    """

    attempt: Attempt
    index: Annotated[int, Meta(ge=0, lt=4096)]
    hops: Annotated[tuple[HopConnections, ...], Meta(max_length=MAX_DESCRIPTORS)]
    stall_s: RingSeconds
    deadline_s: RingSeconds
    norm_limit: Norm | None


class Abort(_TaggedReason, frozen=True, kw_only=True, tag="abort"):
    """Cancel the all_reduce of this epoch, however far it is. Another attempt may follow."""

    epoch: Number


class Committed(_Tagged, frozen=True, kw_only=True, tag="committed"):
    """The round is decided. included: whether this peer's part is in it, so that its result is the run's."""

    commit: Commit
    included: bool


class KeepAverage(_Tagged, frozen=True, kw_only=True, tag="keep average"):
    """Write the average of the attempt that this rank has just reduced to a file: other peers miss the round.

    The commit of the round follows, which includes this peer's part.

    epoch, digest: of the commit. A rank that prepared another state writes nothing.
    file: where this rank writes its elements of the average, by `StoredAverage.save`.
    """

    epoch: Number
    digest: Text
    file: Path


class CatchUp(_Tagged, frozen=True, kw_only=True, tag="catch up"):
    """Make the outer step of a round that this peer was not in, with the average that others had.

    The ranks hold the state of the round before, and send `StateHeld` again, after a `StateRefused` if the
    state that follows from the file has not the digest.

    round, digest, position: of the commit of the round that this peer missed.
    file: this rank's elements of the average, for `StoredAverage.load`.
    """

    round: Number
    digest: Text
    position: StreamPosition
    file: Path


class CopyState(_Tagged, frozen=True, kw_only=True, tag="copy state"):
    """Keep copies of these states for joining peers, and remove all others.

    keep: the digests of the copies that stay.
    makes: the digest of the state to copy as well; "" for none. The ranks copy the state that they hold when
        they read this, as soon as no ring reads their weights, and send `StateCopied`.
    """

    keep: FewTexts
    makes: Text


class StopTraining(_TaggedReason, frozen=True, kw_only=True, tag="halt"):
    """End the training. failed: whether an error is the cause."""

    failed: bool


RankMessage = (
    Hello
    | Moving
    | DataIdentity
    | StateHeld
    | StateCopied
    | StateRefused
    | RankReady
    | RankRingDone
    | RankRingFailed
    | AbortAck
    | RankLeaves
)
"""All messages from a rank to its agent."""

AgentMessage = (
    StartRound
    | ReplaceState
    | CatchUp
    | FlushRound
    | Reduce
    | Abort
    | KeepAverage
    | CopyState
    | Committed
    | StopTraining
)
"""All messages from an agent to its ranks."""


def encode_local(message: RankMessage | AgentMessage) -> bytes:
    """Return a message as bytes for the socket. Raises ValueError where it is too long for it."""
    content = encode(message)
    if len(content) > MAX_BYTES:
        raise ValueError(f"a message of {len(content)} bytes; {MAX_BYTES} fit")
    return content


def descriptors_of(message: RankMessage | AgentMessage) -> tuple[int, ...]:
    """Return the descriptors that travel with a message, in the order in which the decoders take them."""
    if not isinstance(message, Reduce):
        return ()
    descriptors = tuple(fd for hop in message.hops for fd in (*hop.next_fds, *hop.previous_fds))
    if len(descriptors) > MAX_DESCRIPTORS:
        raise ValueError(
            f"{len(descriptors)} connections for one rank; {MAX_DESCRIPTORS} fit: use fewer streams"
        )
    return descriptors


def decode_rank_message(content: bytes, descriptors: Sequence[int] = ()) -> RankMessage:
    """Return the message that a rank sent. Raises ProtocolError; the caller then closes the descriptors."""
    message = cast(RankMessage, decode_union(content, RankMessage, "message of a rank"))
    _expect_none(descriptors)
    return message


def decode_agent_message(content: bytes, descriptors: Sequence[int] = ()) -> AgentMessage:
    """Return the message that an agent sent, with the received descriptors in it.

    Raises ProtocolError; the caller then closes the descriptors.
    """
    message = cast(AgentMessage, decode_union(content, AgentMessage, "message of an agent"))
    if isinstance(message, Reduce):
        return _with_descriptors(message, descriptors)
    _expect_none(descriptors)
    return message


def _with_descriptors(reduce: Reduce, descriptors: Sequence[int]) -> Reduce:
    """Replace the sender's descriptors, whose numbers mean nothing in this process, by the received ones."""
    left, hops = list(descriptors), []
    for hop in reduce.hops:
        following, left = left[: len(hop.next_fds)], left[len(hop.next_fds) :]
        preceding, left = left[: len(hop.previous_fds)], left[len(hop.previous_fds) :]
        if (len(following), len(preceding)) != (len(hop.next_fds), len(hop.previous_fds)):
            raise ProtocolError("message of an agent", "fewer descriptors than keys")
        hops.append(msgspec.structs.replace(hop, next_fds=tuple(following), previous_fds=tuple(preceding)))
    _expect_none(left)
    return msgspec.structs.replace(reduce, hops=tuple(hops))


def _expect_none(descriptors: Sequence[int]) -> None:
    if descriptors:
        raise ProtocolError("message", f"{len(descriptors)} descriptors came that belong to nothing")
