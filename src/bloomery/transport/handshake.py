"""Authenticates both ends of a connection between peers, and derives the key of its frames.

With certificates the handshake runs inside TLS 1.3, and each end contributes 32 random bytes. Then TLS ends,
and the same TCP connection carries frames that the ring authenticates with the key; or, if either end wants
encryption, TLS goes on in a proxy. Without certificates, which is for loopback only, both ends prove in the
handshake that they know the run's token.

The dialler sends ConnectionHello, the listener Answer, the dialler Confirmation, the listener Welcome.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import select
import socket
import ssl
import threading
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
from bloomery.transport.trust import PeerRefused, Trust, check_names, derive_key, is_proof, proof

MAGIC = b"bloomery link 1\n"

Received = TypeVar("Received", bound=HandshakeMessage)


def send_message(connection: socket.socket, message: HandshakeMessage, *, until: float) -> bytes:
    """Send a message, and return its bytes, which both ends hash. until: the deadline, monotonic seconds."""
    content = encode(message)
    connection.settimeout(_left_s(until))
    connection.sendall(len(content).to_bytes(2, "big") + content)
    return content


def receive_message(
    connection: socket.socket, kind: type[Received], *, until: float
) -> tuple[Received, bytes]:
    """Receive a message of this kind and its bytes. PeerRefused: it is another message, or too long."""
    length = int.from_bytes(receive_exactly(connection, 2, until=until), "big")
    if length > MAX_BYTES:
        raise PeerRefused(f"it sent a handshake message of {length} bytes")
    content = receive_exactly(connection, length, until=until)
    try:
        return decode(content, kind), content
    except ProtocolError as error:
        raise PeerRefused(error.message) from error


def receive_exactly(connection: socket.socket, count: int, *, until: float) -> bytes:
    """Return `count` bytes. PeerRefused: the connection ended, or they did not come before `until`."""
    content = bytearray()
    while len(content) < count:
        connection.settimeout(_left_s(until))
        piece = connection.recv(count - len(content))
        if not piece:
            raise PeerRefused("the connection ended within the handshake")
        content += piece
    return bytes(content)


def _left_s(until: float) -> float:
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise PeerRefused("the handshake took too long")
    return left_s


DEADLINE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class AuthenticatedConnection:
    """A connection whose ends have authenticated each other.

    hello: what the dialler said of itself and of the purpose.
    connection: a plain, non-blocking socket; where the connection is encrypted, one end of a proxy.
    key: authenticates frames; only the two ends know it.
    """

    hello: ConnectionHello
    connection: socket.socket
    key: bytes


@dataclass(frozen=True, kw_only=True)
class OwnIdentity:
    """Who this peer is. encrypt: whether it wants tensors encrypted, not only authenticated."""

    run: str
    peer: str
    incarnation: str
    encrypt: bool = False


def handshake_as_dialler(
    connection: socket.socket, hello: ConnectionHello, trust: Trust, *, deadline_s: float = DEADLINE_S
) -> AuthenticatedConnection:
    """Make the handshake as the dialler.

    Owns the connection, and closes it before it raises PeerRefused, OSError or ssl.SSLError.

    hello: what this peer says; its nonce is replaced.
    deadline_s: for the whole handshake, seconds.
    """
    until = time.monotonic() + deadline_s
    try:
        if trust.to_dial is not None:
            connection.settimeout(deadline_s)
            connection = trust.to_dial.wrap_socket(connection)
            trust.check_certificate(connection)
            check_names(connection, hello.target)
        connection.settimeout(deadline_s)
        connection.sendall(MAGIC)
        sent = replace(hello, nonce=secrets.token_hex(RANDOM_BYTES))
        hello_bytes = send_message(connection, sent, until=until)
        answer, answer_bytes = receive_message(connection, Answer, until=until)
        if (answer.peer, answer.incarnation) != (hello.target, hello.target_incarnation):
            raise PeerRefused(f"'{hello.target}' was dialled, but another peer or life answered")
        prover, key = _keys(sent, answer, trust)
        if not is_proof(
            bytes.fromhex(answer.proof), prover, b"listener", hello_bytes, _without_proof(answer)
        ):
            raise PeerRefused("the listener does not know the run's secret")
        send_message(
            connection,
            Confirmation(proof=proof(prover, b"dialler", hello_bytes, answer_bytes).hex()),
            until=until,
        )
        welcome, _ = receive_message(connection, Welcome, until=until)
        if welcome.refused:
            raise PeerRefused(f"'{hello.target}' says: {welcome.refused}")
        plain = _finished(connection, encrypted=sent.encrypt or answer.encrypt)
    except BaseException:
        connection.close()
        raise
    return AuthenticatedConnection(hello=sent, connection=plain, key=key)


def handshake_as_listener(
    connection: socket.socket,
    identity: OwnIdentity,
    trust: Trust,
    *,
    admit: Callable[[ConnectionHello], str],
    deadline_s: float = DEADLINE_S,
) -> AuthenticatedConnection:
    """Make the handshake as the listener.

    Owns the connection, and closes it before it raises PeerRefused, OSError or ssl.SSLError.

    admit: called for an authenticated peer; returns why it is refused, or "".
    deadline_s: for the whole handshake, seconds.
    """
    until = time.monotonic() + deadline_s
    try:
        if trust.to_listen is not None:
            connection.settimeout(deadline_s)
            connection = trust.to_listen.wrap_socket(connection, server_side=True)
        trust.check_certificate(connection)
        if receive_exactly(connection, len(MAGIC), until=until) != MAGIC:
            raise PeerRefused("it does not speak this protocol")
        hello, hello_bytes = receive_message(connection, ConnectionHello, until=until)
        if isinstance(connection, ssl.SSLSocket):
            check_names(connection, hello.peer)
        answer = Answer(
            peer=identity.peer,
            incarnation=identity.incarnation,
            encrypt=identity.encrypt,
            nonce=secrets.token_hex(RANDOM_BYTES),
            proof="",
        )
        prover, key = _keys(hello, answer, trust)
        shown = proof(prover, b"listener", hello_bytes, _without_proof(answer)).hex()
        answer_bytes = send_message(connection, replace(answer, proof=shown), until=until)
        confirmation, _ = receive_message(connection, Confirmation, until=until)
        if not is_proof(bytes.fromhex(confirmation.proof), prover, b"dialler", hello_bytes, answer_bytes):
            raise PeerRefused("the dialler does not know the run's secret")
        refused = _misdirected(hello, identity) or admit(hello)
        send_message(connection, Welcome(refused=refused), until=until)
        if refused:
            raise PeerRefused(f"'{hello.peer}': {refused}")
        plain = _finished(connection, encrypted=hello.encrypt or answer.encrypt)
    except BaseException:
        connection.close()
        raise
    return AuthenticatedConnection(hello=hello, connection=plain, key=key)


def _keys(hello: ConnectionHello, answer: Answer, trust: Trust) -> tuple[bytes, bytes]:
    """Return the key of the proofs, and the connection's key.

    Both depend on the run's token and on the nonces, of which one is secret: without certificates the token,
    with certificates the nonces, because TLS hides them.
    """
    nonces = bytes.fromhex(hello.nonce) + bytes.fromhex(answer.nonce)
    unproven = replace(answer, proof="")
    salt = hashlib.sha256(f"({hashed_text(hello)}, {hashed_text(unproven)})".encode()).digest()
    secret = trust.token + nonces
    return (
        derive_key(secret, salt=salt, purpose="bloomery link proof"),
        derive_key(secret, salt=salt, purpose=f"bloomery link {hello.run}"),
    )


def _without_proof(answer: Answer) -> bytes:
    return hashed_text(replace(answer, proof="")).encode()


def _misdirected(hello: ConnectionHello, identity: OwnIdentity) -> str:
    if hello.run != identity.run:
        return f"this is the run '{identity.run}'"
    if (hello.target, hello.target_incarnation) != (identity.peer, identity.incarnation):
        return f"this is another peer or another life: '{identity.peer}'"
    if hello.peer == identity.peer:
        return "both ends have the same name, which each peer needs for itself"
    return ""


def _finished(connection: socket.socket, *, encrypted: bool) -> socket.socket:
    """Return the socket for the time after the handshake: plain TCP, or one end of a proxy that encrypts."""
    if not isinstance(connection, ssl.SSLSocket):
        connection.settimeout(0.0)
        return connection
    if encrypted:
        return tls_proxied(connection)
    connection.unwrap()
    plain = socket.socket(fileno=connection.detach())
    plain.settimeout(0.0)
    return plain


log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 18


def tls_proxied(connection: ssl.SSLSocket) -> socket.socket:
    """Return a plain, non-blocking socket whose bytes are sent and received encrypted over `connection`.

    It owns the connection. When either is closed, the other one is closed too.
    """
    ours, theirs = socket.socketpair()
    for end in (ours, theirs, connection):
        end.settimeout(0.0)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _PIECE_BYTES)
    threading.Thread(target=_TlsProxy(connection, ours).run, name="tls proxy", daemon=True).start()
    return theirs


class _TlsProxy:
    """Copies both directions on one thread, because two threads must not use one TLS connection."""

    def __init__(self, tls: ssl.SSLSocket, plain: socket.socket) -> None:
        self._tls, self._plain = tls, plain
        self._outward, self._inward = memoryview(b""), memoryview(b"")
        self._tls_wants_write = self._tls_wants_read = False

    def run(self) -> None:
        """Copy until one end is closed or fails."""
        try:
            while True:
                moved = self._move_outward() | self._move_inward()
                if not moved:
                    self._wait()
        except EOFError:
            pass
        except OSError as error:  # ssl.SSLError is an OSError
            log.info("an encrypted connection ended: %s", error)
        finally:
            self._tls.close()
            self._plain.close()

    def _move_outward(self) -> bool:
        moved = False
        if not self._outward:
            try:
                self._outward = memoryview(self._plain.recv(_PIECE_BYTES))
                moved = True
            except BlockingIOError:
                return False
            if not self._outward:
                raise EOFError
        try:
            self._tls_wants_read = False
            self._outward = self._outward[self._tls.send(self._outward) :]
            self._tls_wants_write = bool(self._outward)
            return True
        except ssl.SSLWantWriteError:
            self._tls_wants_write = True
        except ssl.SSLWantReadError:
            self._tls_wants_read = True
        return moved

    def _move_inward(self) -> bool:
        moved = False
        if not self._inward:
            try:
                self._inward = memoryview(self._tls.recv(_PIECE_BYTES))
                moved = True
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            if not self._inward:
                raise EOFError
        try:
            self._inward = self._inward[self._plain.send(self._inward) :]
            return True
        except BlockingIOError:
            return moved

    def _wait(self) -> None:
        """Wait until bytes can be copied. `poll` cannot see what TLS has read already, so ask TLS first."""
        if self._tls.pending() and not self._inward:
            return
        poll = select.poll()
        tls_events = select.POLLIN if not self._inward or self._tls_wants_read else 0
        tls_events |= select.POLLOUT if self._outward and self._tls_wants_write else 0
        plain_events = select.POLLIN if not self._outward else 0
        plain_events |= select.POLLOUT if self._inward else 0
        # `poll` reports an end that has closed at once, whatever it is asked for: of one that is not waited
        # for that would be again and again, as long as the other end takes no bytes.
        for end, events in ((self._tls, tls_events), (self._plain, plain_events)):
            if events:
                poll.register(end, events)
        poll.poll()
