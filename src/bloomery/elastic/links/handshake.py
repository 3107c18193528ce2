"""The handshake of a connection: both ends learn who the other is, and derive a key that is the connection's.

With certificates: TLS 1.3, and inside it the greeting with 32 random bytes of each side; then TLS ends and
the same TCP connection carries frames that the ring authenticates with the key, or TLS goes on in a pump.
Without: the greeting alone, where both prove that they know the run's token; on loopback only.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from bloomery.elastic.links.greeting import (
    MAGIC,
    Answer,
    Confirmation,
    Greeting,
    Welcome,
    hear,
    receive_exactly,
    say,
)
from bloomery.elastic.links.keys import derive_key, is_proof, proof
from bloomery.elastic.links.pump import pumped
from bloomery.elastic.links.refusal import Refused
from bloomery.elastic.links.trust import Trust, check_names

DEADLINE_S = 10.0

_NONCE_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Greeted:
    """A connection whose ends know one another. connection: plain, whatever lies beneath."""

    greeting: Greeting
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
    connection: socket.socket, greeting: Greeting, trust: Trust, *, deadline_s: float = DEADLINE_S
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
        sent = replace(greeting, nonce=secrets.token_hex(_NONCE_BYTES))
        first = say(connection, sent, until=until)
        answer, second = hear(connection, Answer, until=until)
        if (answer.peer, answer.incarnation) != (greeting.target, greeting.target_incarnation):
            raise Refused(f"'{greeting.target}' was dialled, and another life or peer answered")
        prover, key = _keys(sent, answer, trust)
        if not is_proof(_unhex(answer.proof), prover, b"listener", first, _without_proof(answer)):
            raise Refused("the listener does not know the run's secret")
        say(connection, Confirmation(proof=proof(prover, b"dialler", first, second).hex()), until=until)
        welcome, _ = hear(connection, Welcome, until=until)
        if welcome.refused:
            raise Refused(f"'{greeting.target}' says: {welcome.refused}")
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
    admit: Callable[[Greeting], str],
    deadline_s: float = DEADLINE_S,
) -> Greeted:
    """As the listener; see `greet`. admit: says why a greeting of a peer that is what it says is refused."""
    until = time.monotonic() + deadline_s
    try:
        if trust.to_listen is not None:
            connection.settimeout(deadline_s)
            connection = trust.to_listen.wrap_socket(connection, server_side=True)
        if receive_exactly(connection, len(MAGIC), until=until) != MAGIC:
            raise Refused("it does not speak this protocol")
        greeting, first = hear(connection, Greeting, until=until)
        if isinstance(connection, ssl.SSLSocket):
            check_names(connection, greeting.peer)
        answer = Answer(
            peer=identity.peer,
            incarnation=identity.incarnation,
            encrypt=identity.encrypt,
            nonce=secrets.token_hex(_NONCE_BYTES),
            proof="",
        )
        prover, key = _keys(greeting, answer, trust)
        shown = proof(prover, b"listener", first, _without_proof(answer)).hex()
        second = say(connection, replace(answer, proof=shown), until=until)
        confirmation, _ = hear(connection, Confirmation, until=until)
        if not is_proof(_unhex(confirmation.proof), prover, b"dialler", first, second):
            raise Refused("the dialler does not know the run's secret")
        refused = _misdirected(greeting, identity) or admit(greeting)
        say(connection, Welcome(refused=refused), until=until)
        if refused:
            raise Refused(f"'{greeting.peer}': {refused}")
        plain = _finished(connection, encrypted=greeting.encrypt or answer.encrypt)
    except BaseException:
        connection.close()
        raise
    return Greeted(greeting=greeting, connection=plain, key=key)


def _keys(greeting: Greeting, answer: Answer, trust: Trust) -> tuple[bytes, bytes]:
    """The key for proofs and the connection's own. Secret are the token, or the nonces, which TLS hides."""
    nonces = _unhex(greeting.nonce) + _unhex(answer.nonce)
    if len(nonces) != 2 * _NONCE_BYTES:
        raise Refused("a nonce of another length")
    salt = hashlib.sha256(repr((greeting, replace(answer, proof=""))).encode()).digest()
    secret = trust.token + nonces
    return (
        derive_key(secret, salt=salt, purpose="bloomery link proof"),
        derive_key(secret, salt=salt, purpose=f"bloomery link {greeting.run}"),
    )


def _without_proof(answer: Answer) -> bytes:
    return repr(replace(answer, proof="")).encode()


def _unhex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise Refused("a greeting with a number that is none") from error


def _misdirected(greeting: Greeting, identity: Identity) -> str:
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
        return pumped(connection)
    connection.unwrap()
    plain = socket.socket(fileno=connection.detach())
    plain.settimeout(0.0)
    return plain
