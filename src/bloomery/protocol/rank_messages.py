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
    Message,
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
"""Of one message; the kernel takes this much at once without any setting."""

MAX_DESCRIPTORS = 253
"""The kernel's limit for one message (SCM_MAX_FD)."""

KEY_BYTES = 32
RANKS_AT_MOST = 65_536

Phase = Literal["start", "compile", "step", "evaluate", "ring", "offer", "save", "wait"]
"""What a rank can be doing."""

RankIndex = Annotated[int, Meta(ge=0, lt=RANKS_AT_MOST)]
Descriptors = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...], Meta(max_length=MAX_DESCRIPTORS)]
ConnectionKeys = Annotated[
    tuple[Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)], ...],
    Meta(max_length=MAX_DESCRIPTORS),
]
RingSeconds = Annotated[float, Meta(ge=0.0, le=1e9)]


class _Tagged(Message, frozen=True, kw_only=True, tag_field="is"):
    """A message whose field `is` says which one it is."""


class _TaggedReason(Reasoned, frozen=True, kw_only=True, tag_field="is"):
    """A tagged message with a reason in words."""


class Hello(_Tagged, frozen=True, kw_only=True, tag="hello"):
    """A rank's first message. rank, world: within its peer. process: its id."""

    rank: RankIndex
    world: Annotated[int, Meta(ge=1, le=RANKS_AT_MOST)]
    process: Annotated[int, Meta(ge=0, lt=1 << 31)]


class Moving(_Tagged, frozen=True, kw_only=True, tag="moving"):
    """What a rank is doing now. step: the inner step that is under way or done last."""

    phase: Phase
    step: Count


class DataIdentity(_Tagged, frozen=True, kw_only=True, tag="reading"):
    """What the stream of samples is made of: equal on all peers. The first rank sends it, once."""

    identity: TextByText


class StateHeld(_Tagged, frozen=True, kw_only=True, tag="holding"):
    """Which state a rank holds now.

    round: of the state; -1 before any.
    digest: of the peer's whole shared state, equal on all ranks.
    directory: a checkpoint of exactly it, on disk or in memory, from which other peers may be served; None
        while there is none.
    samples: of one inner step of this peer.
    position: after the round; None where a checkpoint does not tell it.
    saves: rounds on whose states this peer's checkpoints on disk rest; the first rank sends them.
    """

    round: NumberOrNone
    digest: Text
    step: Count
    directory: Path | None
    samples: Count
    position: StreamPosition | None
    saves: Numbers


class StateRefused(_TaggedReason, frozen=True, kw_only=True, tag="state refused"):
    """What `ReplaceState` named is not the state that it said. `StateHeld` comes again afterwards."""


class RankReady(_Tagged, frozen=True, kw_only=True, tag="ready"):
    """A rank offers its peer's part of a round. The part stays unchanged until the round is committed."""

    ready: Ready


class RankRingDone(_Tagged, frozen=True, kw_only=True, tag="ring done"):
    """A rank's all_reduce of this epoch completed. digest: of the state that would follow."""

    epoch: Number
    digest: Text


class RankRingFailed(_TaggedReason, frozen=True, kw_only=True, tag="ring failed"):
    """A rank's all_reduce of this epoch failed.

    kind: the word for what happened; "cancelled" where the agent asked for it.
    culprit: "next" or "previous" in the ring, or a peer's name; None where none is known.
    """

    epoch: Number
    kind: Text
    culprit: Text | None


class AbortAck(_Tagged, frozen=True, kw_only=True, tag="heeded"):
    """A rank has read an abort: it does not hang, and uses the connections of that epoch no more."""

    epoch: Number


class RankLeaves(_TaggedReason, frozen=True, kw_only=True, tag="leave"):
    """A rank ends by intention. Other peers wait for no lease, and all ranks receive `StopTraining`."""


class StartRound(_Tagged, frozen=True, kw_only=True, tag="go"):
    """Take part in a round: the state that is held is the right one.

    position: after the round before, with everything that is given out as holes.
    live: peers that schedules count.
    samples: this peer's share. Without any it is a newcomer that begins with the next round: it offers a part
        of no steps and no tokens at once (its weight is 0), takes part in the ring, and so holds what the
        others hold.

    Sent again within a round: where `samples` hold what was offered, offer that again, for the coordinator
    has lost it; where nothing was offered but samples came, begin anew with these.
    """

    round: Number
    position: StreamPosition
    live: Count
    samples: Ranges


class ReplaceState(_TaggedReason, frozen=True, kw_only=True, tag="replace"):
    """Load this checkpoint, which was fetched as the run's state after `round`, and send `StateHeld` again.

    digest: what the loaded tensors must have. Where they have another, send `StateRefused`, and go back to
        this peer's own checkpoint. The round alone does not tell: once a run went back, an earlier round's
        checkpoint has a later one's state.
    position: the commit's. The source of the checkpoint may have been within the next round, and have used
        samples of that.
    """

    round: Number
    digest: Text
    position: StreamPosition
    directory: Path


class FlushRound(_Tagged, frozen=True, kw_only=True, tag="hurry"):
    """The other peers wait: offer what there is after the step that is under way."""

    round: Number


class HopConnections(Message, frozen=True, kw_only=True):
    """The connections of one lane's ring to both neighbours. The rank closes them.

    next_fds, previous_fds: descriptors to the next and from the previous member.
    send_keys, receive_keys: the key of each.
    """

    lane: Annotated[int, Meta(ge=0, lt=4096)]
    next_fds: Descriptors
    previous_fds: Descriptors
    send_keys: ConnectionKeys
    receive_keys: ConnectionKeys

    def __post_init__(self) -> None:
        if (len(self.next_fds), len(self.previous_fds)) != (len(self.send_keys), len(self.receive_keys)):
            raise ValueError("each connection has one key")


class Reduce(_Tagged, frozen=True, kw_only=True, tag="reduce"):
    """Run the all_reduce of an attempt.

    index: this peer's place in `attempt.members`.
    stall_s: seconds without a byte after which a connection counts as broken.
    deadline_s: seconds that the whole may take.
    """

    attempt: Attempt
    index: Annotated[int, Meta(ge=0, lt=4096)]
    hops: Annotated[tuple[HopConnections, ...], Meta(max_length=MAX_DESCRIPTORS)]
    stall_s: RingSeconds
    deadline_s: RingSeconds


class Abort(_TaggedReason, frozen=True, kw_only=True, tag="abort"):
    """Cancel the all_reduce of this epoch, wherever it is: another attempt follows."""

    epoch: Number


class Committed(_Tagged, frozen=True, kw_only=True, tag="committed"):
    """The round is decided. included: whether this peer's part is in it: then its result is the run's."""

    commit: Commit
    included: bool


class StopTraining(_TaggedReason, frozen=True, kw_only=True, tag="halt"):
    """End the training. failed: whether this is no end that anybody asked for."""

    failed: bool


RankMessage = (
    Hello
    | Moving
    | DataIdentity
    | StateHeld
    | StateRefused
    | RankReady
    | RankRingDone
    | RankRingFailed
    | AbortAck
    | RankLeaves
)
"""From a rank to its agent."""

AgentMessage = StartRound | ReplaceState | FlushRound | Reduce | Abort | Committed | StopTraining
"""From an agent to its ranks."""


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
    """Return what a rank sent. Raises ProtocolError; the descriptors stay the caller's then."""
    message = cast(RankMessage, decode_union(content, RankMessage, "message of a rank"))
    _expect_none(descriptors)
    return message


def decode_agent_message(content: bytes, descriptors: Sequence[int] = ()) -> AgentMessage:
    """Return what the agent sent, with these descriptors in it. Raises ProtocolError; see above."""
    message = cast(AgentMessage, decode_union(content, AgentMessage, "message of an agent"))
    if isinstance(message, Reduce):
        return _with_descriptors(message, descriptors)
    _expect_none(descriptors)
    return message


def _with_descriptors(reduce: Reduce, descriptors: Sequence[int]) -> Reduce:
    """Put the received descriptors in the place of the sender's, whose numbers mean nothing here."""
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
