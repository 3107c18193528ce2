"""Opens a connection between peers: each proves who it is, and a key for its frames is derived.

With certificates: TLS 1.3, and inside it the greeting with 32 random bytes of each side; then TLS ends and
the same TCP connection carries frames that the ring authenticates with the key, or TLS goes on in a pump.
Without: the greeting alone, where both prove that they know the run's token; on loopback only.

The messages are short and strict, and each has a deadline.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from bloomery.protocol.encoding import ProtocolError, decode, encode
from bloomery.protocol.hello import (
    MAX_BYTES,
    RANDOM_BYTES,
    Answer,
    Confirmation,
    ConnectionHello,
    HandshakeMessage,
    Welcome,
    hashed_text,
)
from bloomery.transport.tls_proxy import tls_proxied
from bloomery.transport.trust import PeerRefused, Trust, check_names, derive_key, is_proof, proof

MAGIC = b"bloomery link 1\n"

Words = TypeVar("Words", bound=HandshakeMessage)


def say(connection: socket.socket, words: HandshakeMessage, *, until: float) -> bytes:
    """Send; returns the bytes, which both sides hash."""
    content = encode(words)
    connection.settimeout(_left(until))
    connection.sendall(len(content).to_bytes(2, "big") + content)
    return content


def hear(connection: socket.socket, kind: type[Words], *, until: float) -> tuple[Words, bytes]:
    """Receive what `say` sent, and its bytes. Refused: it is something else. until: a moment of the clock."""
    length = int.from_bytes(receive_exactly(connection, 2, until=until), "big")
    if length > MAX_BYTES:
        raise PeerRefused(f"a greeting of {length} bytes")
    content = receive_exactly(connection, length, until=until)
    try:
        return decode(content, kind), content
    except ProtocolError as error:
        raise PeerRefused(error.message) from error


def receive_exactly(connection: socket.socket, count: int, *, until: float) -> bytes:
    """`count` bytes, however slowly they come, but before `until`."""
    content = bytearray()
    while len(content) < count:
        connection.settimeout(_left(until))
        piece = connection.recv(count - len(content))
        if not piece:
            raise PeerRefused("the connection ended within the greeting")
        content += piece
    return bytes(content)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise PeerRefused("the greeting took too long")
    return left


DEADLINE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Greeted:
    """A connection whose ends know one another. connection: plain, whatever lies beneath."""

    greeting: ConnectionHello
    connection: socket.socket
    key: bytes


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who this peer is. encrypt: whether it wants tensors hidden, not authenticated alone."""

    run: str
    peer: str
    incarnation: str
    encrypt: bool = False


def greet(
    connection: socket.socket, greeting: ConnectionHello, trust: Trust, *, deadline_s: float = DEADLINE_S
) -> Greeted:
    """As the dialler. Takes the connection: on Refused, OSError or ssl.SSLError it is closed."""
    until = time.monotonic() + deadline_s
    try:
        if trust.to_dial is not None:
            connection.settimeout(deadline_s)
            connection = trust.to_dial.wrap_socket(connection)
            check_names(connection, greeting.target)
        connection.settimeout(deadline_s)
        connection.sendall(MAGIC)
        sent = replace(greeting, nonce=secrets.token_hex(RANDOM_BYTES))
        first = say(connection, sent, until=until)
        answer, second = hear(connection, Answer, until=until)
        if (answer.peer, answer.incarnation) != (greeting.target, greeting.target_incarnation):
            raise PeerRefused(f"'{greeting.target}' was dialled, and another life or peer answered")
        prover, key = _keys(sent, answer, trust)
        if not is_proof(bytes.fromhex(answer.proof), prover, b"listener", first, _without_proof(answer)):
            raise PeerRefused("the listener does not know the run's secret")
        say(connection, Confirmation(proof=proof(prover, b"dialler", first, second).hex()), until=until)
        welcome, _ = hear(connection, Welcome, until=until)
        if welcome.refused:
            raise PeerRefused(f"'{greeting.target}' says: {welcome.refused}")
        plain = _finished(connection, encrypted=sent.encrypt or answer.encrypt)
    except BaseException:
        connection.close()
        raise
    return Greeted(greeting=sent, connection=plain, key=key)


def receive(
    connection: socket.socket,
    identity: Identity,
    trust: Trust,
    *,
    admit: Callable[[ConnectionHello], str],
    deadline_s: float = DEADLINE_S,
) -> Greeted:
    """As the listener; see `greet`. admit: says why a greeting of a peer that is what it says is refused."""
    until = time.monotonic() + deadline_s
    try:
        if trust.to_listen is not None:
            connection.settimeout(deadline_s)
            connection = trust.to_listen.wrap_socket(connection, server_side=True)
        if receive_exactly(connection, len(MAGIC), until=until) != MAGIC:
            raise PeerRefused("it does not speak this protocol")
        greeting, first = hear(connection, ConnectionHello, until=until)
        if isinstance(connection, ssl.SSLSocket):
            check_names(connection, greeting.peer)
        answer = Answer(
            peer=identity.peer,
            incarnation=identity.incarnation,
            encrypt=identity.encrypt,
            nonce=secrets.token_hex(RANDOM_BYTES),
            proof="",
        )
        prover, key = _keys(greeting, answer, trust)
        shown = proof(prover, b"listener", first, _without_proof(answer)).hex()
        second = say(connection, replace(answer, proof=shown), until=until)
        confirmation, _ = hear(connection, Confirmation, until=until)
        if not is_proof(bytes.fromhex(confirmation.proof), prover, b"dialler", first, second):
            raise PeerRefused("the dialler does not know the run's secret")
        refused = _misdirected(greeting, identity) or admit(greeting)
        say(connection, Welcome(refused=refused), until=until)
        if refused:
            raise PeerRefused(f"'{greeting.peer}': {refused}")
        plain = _finished(connection, encrypted=greeting.encrypt or answer.encrypt)
    except BaseException:
        connection.close()
        raise
    return Greeted(greeting=greeting, connection=plain, key=key)


def _keys(greeting: ConnectionHello, answer: Answer, trust: Trust) -> tuple[bytes, bytes]:
    """The key for proofs and the connection's own. Secret are the token, or the nonces, which TLS hides."""
    nonces = bytes.fromhex(greeting.nonce) + bytes.fromhex(answer.nonce)
    unproven = replace(answer, proof="")
    salt = hashlib.sha256(f"({hashed_text(greeting)}, {hashed_text(unproven)})".encode()).digest()
    secret = trust.token + nonces
    return (
        derive_key(secret, salt=salt, purpose="bloomery link proof"),
        derive_key(secret, salt=salt, purpose=f"bloomery link {greeting.run}"),
    )


def _without_proof(answer: Answer) -> bytes:
    return hashed_text(replace(answer, proof="")).encode()


def _misdirected(greeting: ConnectionHello, identity: Identity) -> str:
    if greeting.run != identity.run:
        return f"this is the run '{identity.run}'"
    if (greeting.target, greeting.target_incarnation) != (identity.peer, identity.incarnation):
        return f"this is another life or peer: '{identity.peer}'"
    if greeting.peer == identity.peer:
        return "this is yourself: two peers have one name"
    return ""


def _finished(connection: socket.socket, *, encrypted: bool) -> socket.socket:
    """The connection as it is from now on: plain TCP, or one end of a pump that encrypts."""
    if not isinstance(connection, ssl.SSLSocket):
        connection.settimeout(0.0)
        return connection
    if encrypted:
        return tls_proxied(connection)
    connection.unwrap()
    plain = socket.socket(fileno=connection.detach())
    plain.settimeout(0.0)
    return plain
