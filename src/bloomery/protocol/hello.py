"""The messages of the handshake with which a connection between two peers begins.

The dialler sends `ConnectionHello`, the listener `Answer`, the dialler `Confirmation`, the listener
`Welcome`. Neither end is authenticated before that is done, so each message is short and bounded.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from bloomery.protocol.encoding import Message, Name, ShortText, Text

MAX_BYTES = 2048
"""The most bytes that one message may have."""

RANDOM_BYTES = 32
"""The length of a nonce, and of a proof (SHA-256)."""

Purpose = Literal["ring", "probe", "relay", "serve", "fetch"]
Hexadecimal = Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{2 * RANDOM_BYTES}}}\Z")]


class HandshakeMessage(Message, frozen=True, kw_only=True):
    """The base of the four messages of the handshake."""


class ConnectionHello(HandshakeMessage, frozen=True, kw_only=True, rename={"rank": "lane"}):
    """The dialler's first message: who it is, whom it dials, and what the connection is for.

    On the wire `rank` is called `lane`, as in the first version of the protocol.

    run: the name of the run to which the dialler belongs.
    peer, incarnation: the dialler's name, and its process.
    target, target_incarnation: the name and the process of the peer that the dialler wants to reach.
    purpose: "ring" for tensors of an all_reduce, "probe" for a measurement of bandwidth, "relay" for one end
        of a connection of a ring that the listener forwards, "serve" for one on which the dialler waits for
        joining peers, "fetch" for a joining peer's, which the listener joins to one of those.
    rank, stream: with "ring", which of the connections between two peers this is. With "relay", which peer is
        expected at the other end (`relay.mark_of`); 0 and 0: any.
    sends: whether the dialler sends the tensors.
    encrypt: whether the dialler wants the tensors encrypted; they are authenticated in any case.
    circuit: with "relay", a name that both ends compute; the relay joins two connections of one name. With
        "fetch", the name of the peer that serves.
    nonce: 32 random bytes.
    """

    run: Name
    peer: Name
    incarnation: ShortText
    target: Name
    target_incarnation: ShortText
    purpose: Purpose
    rank: Annotated[int, Meta(ge=0, lt=4096)]
    stream: Annotated[int, Meta(ge=0, lt=256)]
    sends: bool
    encrypt: bool
    circuit: ShortText
    nonce: Hexadecimal


class Answer(HandshakeMessage, frozen=True, kw_only=True):
    """The listener's message: who it is, and a proof that it knows the run's secret.

    peer, incarnation: the listener's name, and its process.
    encrypt: whether the listener wants the tensors encrypted.
    nonce: 32 random bytes.
    """

    peer: Name
    incarnation: ShortText
    encrypt: bool
    nonce: Hexadecimal
    proof: Hexadecimal


class Confirmation(HandshakeMessage, frozen=True, kw_only=True):
    """The dialler's proof that it knows the run's secret."""

    proof: Hexadecimal


class Welcome(HandshakeMessage, frozen=True, kw_only=True):
    """The listener's last message. refused: why the listener closes the connection; "" if it keeps it."""

    refused: Text


def hashed_text(message: ConnectionHello | Answer) -> str:
    """Return a message as both ends hash it for their keys and proofs.

    This text is part of the protocol: both ends must write the same one, with the fields in order. It calls
    the first message and its fields by the names that they had in the first version of the protocol.
    """
    name = "Greeting" if isinstance(message, ConnectionHello) else "Answer"
    names = zip(message.__struct_encode_fields__, message.__struct_fields__, strict=True)
    fields = (f"{written}={getattr(message, field)!r}" for written, field in names)
    return f"{name}({', '.join(fields)})"
