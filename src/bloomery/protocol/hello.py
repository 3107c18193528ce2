"""The messages of the handshake with which a connection between two peers begins.

The dialler sends `ConnectionHello`, the listener `Answer`, the dialler `Confirmation`, the listener
`Welcome`. Nobody is authenticated before the end, so each is short and bounded.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from bloomery.protocol.encoding import Message, Name, ShortText, Text

MAX_BYTES = 2048
"""Of one message."""

RANDOM_BYTES = 32
"""Of a nonce, and of a proof (SHA-256)."""

Purpose = Literal["ring", "probe", "relay"]
Hexadecimal = Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{2 * RANDOM_BYTES}}}\Z")]


class HandshakeMessage(Message, frozen=True, kw_only=True):
    """One of the four messages."""


class ConnectionHello(HandshakeMessage, frozen=True, kw_only=True):
    """The dialler's first message: who it is, whom it dials, and what the connection is for.

    target, target_incarnation: the peer that it means to reach.
    purpose: tensors of a ring, a measurement of bandwidth, or one end of a connection through this relay.
    lane, stream: with "ring", which of the connections between two peers this is.
    sends: whether the dialler sends the tensors.
    encrypt: whether the dialler wants the tensors encrypted, beyond authenticated.
    circuit: with "relay", a name that both ends compute, by which the relay joins them.
    nonce: 32 random bytes.
    """

    run: Name
    peer: Name
    incarnation: ShortText
    target: Name
    target_incarnation: ShortText
    purpose: Purpose
    lane: Annotated[int, Meta(ge=0, lt=4096)]
    stream: Annotated[int, Meta(ge=0, lt=256)]
    sends: bool
    encrypt: bool
    circuit: ShortText
    nonce: Hexadecimal


class Answer(HandshakeMessage, frozen=True, kw_only=True):
    """The listener's message: who it is, and a proof that it knows the run's secret.

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
    """The listener's last message. refused: why it closes the connection; "" where it does not."""

    refused: Text


def hashed_text(message: ConnectionHello | Answer) -> str:
    """Return a message as both ends hash it for their keys and proofs.

    This is part of the protocol: both ends must write the same text, fields in order. In it the first message
    keeps the name that it had when the protocol was made.
    """
    name = "Greeting" if isinstance(message, ConnectionHello) else "Answer"
    fields = (f"{field}={getattr(message, field)!r}" for field in message.__struct_fields__)
    return f"{name}({', '.join(fields)})"
