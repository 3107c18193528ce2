"""Impostors that skip their own checks, on each side apart: the other side alone has to find them out.

An impostor speaks the protocol by hand: it knows the messages and whatever it has heard, and not the secret.
"""

from __future__ import annotations

import queue
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from tests.diloco.elastic_peers import DEADLINE_S, TOKEN, Authority
from tests.protocol import example

from bloomery.coordination.credentials import read_certificate
from bloomery.transport import handshake
from bloomery.transport.handshake import (
    MAGIC,
    Answer,
    AuthenticatedConnection,
    Confirmation,
    ConnectionHello,
    OwnIdentity,
    Welcome,
    handshake_as_dialler,
    handshake_as_listener,
    receive_message,
    send_message,
)
from bloomery.transport.trust import PeerRefused, Trust

B = OwnIdentity(run="r", peer="b", incarnation="b1")
HELLO = example.connection_hello(
    run="r", peer="a", incarnation="a1", target="b", target_incarnation="b1", purpose="ring", nonce="11" * 32
)
NO_PROOF = "00" * 32
Impostor = Callable[[socket.socket], object]


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "authority", "run r")


def deadline() -> float:
    return time.monotonic() + DEADLINE_S


def against(
    impostor: Impostor, honest: Callable[[socket.socket], AuthenticatedConnection]
) -> AuthenticatedConnection:
    """What the honest end makes of a connection whose other end is the impostor's."""
    here, there = socket.socketpair()

    def pretend() -> None:
        with (
            there,
            suppress(OSError, ssl.SSLError, PeerRefused),
        ):  # the honest end closes when it has seen enough
            there.settimeout(DEADLINE_S)
            impostor(there)

    thread = threading.Thread(target=pretend)
    thread.start()
    try:
        return honest(here)
    finally:
        thread.join(2 * DEADLINE_S)


def dialled(trust: Trust) -> Callable[[socket.socket], AuthenticatedConnection]:
    return lambda connection: handshake_as_dialler(connection, HELLO, trust, deadline_s=DEADLINE_S)


def accepted(trust: Trust) -> Callable[[socket.socket], AuthenticatedConnection]:
    def accept(connection: socket.socket) -> AuthenticatedConnection:
        return handshake_as_listener(connection, B, trust, admit=lambda hello: "", deadline_s=DEADLINE_S)

    return accept


def listener_without_secret(connection: socket.socket) -> None:
    """Answers as 'b', shows a made-up proof, and welcomes whatever the dialler proves."""
    assert connection.recv(len(MAGIC), socket.MSG_WAITALL) == MAGIC
    receive_message(connection, ConnectionHello, until=deadline())
    answer = Answer(peer="b", incarnation="b1", encrypt=False, nonce="22" * 32, proof=NO_PROOF)
    send_message(connection, answer, until=deadline())
    receive_message(connection, Confirmation, until=deadline())
    send_message(connection, Welcome(refused=""), until=deadline())


def dialler_without_secret(connection: socket.socket) -> None:
    """Says hello as 'a', takes any proof of the listener, and shows a made-up one."""
    connection.sendall(MAGIC)
    send_message(connection, HELLO, until=deadline())
    receive_message(connection, Answer, until=deadline())
    send_message(connection, Confirmation(proof=NO_PROOF), until=deadline())
    receive_message(connection, Welcome, until=deadline())


@pytest.mark.parametrize("secured", ["by a token", "by certificates", "by encryption"])
def test_who_reads_or_writes_after_the_handshake_never_waits(authority, secured):
    """Connections are read by a thread that serves many of them."""
    identity = replace(B, encrypt=secured == "by encryption")
    mine, theirs = (TOKEN, TOKEN) if secured == "by a token" else map(authority.trust, "ab")
    waits = []

    def listen(connection: socket.socket) -> None:
        made = handshake_as_listener(
            connection, identity, theirs, admit=lambda hello: "", deadline_s=DEADLINE_S
        )
        waits.append(made.connection.getblocking())

    with against(listen, dialled(mine)).connection as end:
        waits.append(end.getblocking())
    assert waits == [False, False]


@pytest.mark.parametrize("sends", ["the dialler", "the listener"])
def test_more_than_an_encrypted_connection_holds_arrives_whole_once_it_is_read(authority, sends):
    identity, made = replace(B, encrypt=True), queue.SimpleQueue()
    listening, done = authority.trust("b"), threading.Event()

    def listen(connection: socket.socket) -> None:
        made.put(
            handshake_as_listener(
                connection, identity, listening, admit=lambda hello: "", deadline_s=DEADLINE_S
            )
        )
        done.wait(DEADLINE_S)

    dialling, listener = socket.socketpair()
    thread = threading.Thread(target=listen, args=(listener,))
    thread.start()
    ends = [dialled(authority.trust("a"))(dialling).connection, made.get(timeout=DEADLINE_S).connection]
    sending, receiving = ends if sends == "the dialler" else ends[::-1]
    content = random.Random(1).randbytes(1 << 20)
    sent = 0
    sending.settimeout(0.3)
    with suppress(TimeoutError):  # once all that lies between the ends is full
        while True:
            sent += sending.send(content[sent % len(content) :])
    receiving.settimeout(DEADLINE_S)
    received = bytearray()
    while len(received) < sent:
        received += receiving.recv(1 << 20)
    assert received == (content * (sent // len(content) + 1))[:sent]
    done.set()
    thread.join(DEADLINE_S)
    for end in ends:
        end.close()


def test_a_listener_that_does_not_know_the_secret_is_refused_by_the_dialler():
    with pytest.raises(PeerRefused, match="the listener does not know the run's secret"):
        against(listener_without_secret, dialled(TOKEN))


def test_a_dialler_that_does_not_know_the_secret_is_refused_by_the_listener():
    with pytest.raises(PeerRefused, match="the dialler does not know the run's secret"):
        against(dialler_without_secret, accepted(TOKEN))


def test_a_proof_heard_on_one_connection_opens_no_other():
    heard: list[Confirmation] = []

    def listens_in(connection: socket.socket) -> None:
        """Stands between an honest dialler and an honest listener, and keeps the dialler's proof."""
        mine, listeners = socket.socketpair()
        thread = threading.Thread(target=accepted(TOKEN), args=(listeners,))
        thread.start()
        with mine:
            mine.settimeout(DEADLINE_S)
            mine.sendall(connection.recv(len(MAGIC), socket.MSG_WAITALL))
            for source, sink, kind in (
                (connection, mine, ConnectionHello),
                (mine, connection, Answer),
                (connection, mine, Confirmation),
                (mine, connection, Welcome),
            ):
                words, _ = receive_message(source, kind, until=deadline())
                if isinstance(words, Confirmation):
                    heard.append(words)
                send_message(sink, words, until=deadline())
            thread.join(DEADLINE_S)

    against(listens_in, dialled(TOKEN)).connection.close()

    def replays(connection: socket.socket) -> None:
        connection.sendall(MAGIC)
        send_message(connection, HELLO, until=deadline())
        receive_message(connection, Answer, until=deadline())
        send_message(connection, heard[0], until=deadline())

    with pytest.raises(PeerRefused, match="the dialler does not know the run's secret"):
        against(replays, accepted(TOKEN))


def test_a_listener_with_another_peers_certificate_is_refused_by_the_dialler(authority):
    """'c' belongs to the run, and answers as 'b'."""
    with pytest.raises(PeerRefused, match="'b' shows a certificate of c"):
        against(accepted(authority.trust("c")), dialled(authority.trust("a")))


def test_a_dialler_with_another_peers_certificate_is_refused_by_the_listener(authority):
    """'c' belongs to the run, and says hello as 'a'."""
    with pytest.raises(PeerRefused, match="'a' shows a certificate of c"):
        against(dialled(authority.trust("c")), accepted(authority.trust("b")))


@pytest.mark.parametrize("side", ["listener", "dialler"])
def test_an_end_whose_certificate_was_revoked_is_refused_by_the_other(authority, side):
    honest = authority.trust("a" if side == "listener" else "b")
    other = authority.trust("b" if side == "listener" else "a")
    pretend, honest_end = (accepted, dialled) if side == "listener" else (dialled, accepted)
    shown = authority.directory / f"{'b' if side == 'listener' else 'a'}.pem"
    honest.revoked.add(read_certificate(shown).serial)
    with pytest.raises(PeerRefused, match="was revoked"):
        against(pretend(other), honest_end(honest))


@pytest.mark.parametrize("side", ["listener", "dialler"])
def test_an_end_of_another_authority_that_trusts_everybody_is_refused(authority, tmp_path, side):
    foreign = Authority(tmp_path / "foreign", "run r")
    honest = authority.trust("a" if side == "listener" else "b")
    impostor = foreign.trust("b" if side == "listener" else "a")
    for context in (impostor.to_listen, impostor.to_dial):
        assert context is not None
        context.load_verify_locations(authority.file)  # it has no objection to the other end
    pretend, honest_end = (accepted, dialled) if side == "listener" else (dialled, accepted)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        against(pretend(impostor), honest_end(honest))


def test_the_deadline_is_that_of_all_bytes_and_not_of_each(monkeypatch):
    clock, waits = [50.0], []
    monkeypatch.setattr(handshake.time, "monotonic", lambda: clock[0])

    class Trickling:
        def settimeout(self, seconds):
            waits.append(seconds)

        def recv(self, count):
            clock[0] += 2.0
            return b"x"

    assert handshake.receive_exactly(Trickling(), 4, until=60.0) == b"xxxx"
    assert waits == [10.0, 8.0, 6.0, 4.0]
    with pytest.raises(PeerRefused, match="too long"):
        handshake.receive_exactly(Trickling(), 4, until=62.0)


@pytest.mark.parametrize("listener_wants", [False, True])
@pytest.mark.parametrize("dialler_wants", [False, True])
def test_what_lies_between_two_ends_of_which_one_wants_encryption_reads_nothing_of_theirs(
    authority, dialler_wants, listener_wants
):
    (here, near), (far, there) = socket.socketpair(), socket.socketpair()
    passed = bytearray()

    def forward(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                passed.extend(piece)
                sink.sendall(piece)

    made = queue.SimpleQueue()
    identity, trust = replace(B, encrypt=listener_wants), authority.trust("b")

    def listen() -> None:
        made.put(handshake_as_listener(there, identity, trust, admit=lambda hello: "", deadline_s=DEADLINE_S))

    hello = example.connection_hello(encrypt=dialler_wants, nonce="11" * 32)
    threads = [
        threading.Thread(target=forward, args=(near, far), daemon=True),
        threading.Thread(target=forward, args=(far, near), daemon=True),
        threading.Thread(target=listen, daemon=True),
    ]
    for thread in threads:
        thread.start()
    dialler = handshake_as_dialler(here, hello, authority.trust("a"), deadline_s=DEADLINE_S)
    listener = made.get(timeout=DEADLINE_S)
    with near, far, dialler.connection as one, listener.connection as other:
        for sender, receiver in ((one, other), (other, one)):
            sender.sendall(b"of a tensor")
            receiver.settimeout(DEADLINE_S)
            assert receiver.recv(11, socket.MSG_WAITALL) == b"of a tensor"
    assert passed.count(b"of a tensor") == (0 if dialler_wants or listener_wants else 2)
