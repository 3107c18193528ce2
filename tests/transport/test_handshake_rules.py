"""Which hello a listener admits, what each side says when it refuses, and what a frame of it may be."""

from __future__ import annotations

import hashlib
import logging
import select
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.diloco.elastic_peers import DEADLINE_S, TOKEN
from tests.protocol import example

from bloomery.protocol.hello import MAX_BYTES, Answer, ConnectionHello, Welcome, hashed_text
from bloomery.transport import handshake
from bloomery.transport.handshake import (
    MAGIC,
    OwnIdentity,
    _misdirected,
    _TlsProxy,
    handshake_as_dialler,
    handshake_as_listener,
    receive_exactly,
    receive_message,
    send_message,
)
from bloomery.transport.trust import PeerRefused, derive_key

B = OwnIdentity(run="r", peer="b", incarnation="b1")
HELLO = example.connection_hello(nonce="11" * 32)


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({}, ""),
        ({"run": "s"}, "this is the run 'r'"),
        ({"target": "c"}, "this is another peer or another life: 'b'"),
        ({"target_incarnation": "b2"}, "this is another peer or another life: 'b'"),
        ({"peer": "b"}, "both ends have the same name, which each peer needs for itself"),
    ],
)
def test_who_means_another_run_peer_or_life_is_told_whom_it_has_reached(
    changed: dict[str, str], refused: str
) -> None:
    assert _misdirected(example.connection_hello(**changed), B) == refused


def ends_of(
    *, admit: str = "", dialled: dict[str, Any] | None = None, answers: OwnIdentity = B
) -> tuple[Any, Any]:
    """What a handshake of two honest ends comes to at the dialler and at the listener."""
    here, there = socket.socketpair()
    ended: list[Any] = [None, None]

    def end(number: int, make: Any) -> None:
        try:
            ended[number] = make()
        except PeerRefused as error:
            ended[number] = str(error)

    hello = example.connection_hello(nonce="11" * 32, **dialled or {})
    listening = threading.Thread(
        target=end,
        args=(
            1,
            lambda: handshake_as_listener(
                there, answers, TOKEN, admit=lambda h: admit, deadline_s=DEADLINE_S
            ),
        ),
    )
    listening.start()
    end(0, lambda: handshake_as_dialler(here, hello, TOKEN, deadline_s=DEADLINE_S))
    listening.join()
    for connection, outcome in ((here, ended[0]), (there, ended[1])):
        assert (connection.fileno() == -1) is isinstance(outcome, str), "who refuses closes its end"
    return ended[0], ended[1]


def test_both_ends_have_one_key_that_is_new_each_time_and_the_hello_that_was_sent() -> None:
    keys = set()
    for _ in range(2):
        dialler, listener = ends_of(dialled={"rank": 3, "stream": 2, "circuit": "x"})
        assert dialler.key == listener.key and len(dialler.key) == 32
        assert dialler.hello == listener.hello and dialler.hello.nonce != HELLO.nonce
        assert (listener.hello.rank, listener.hello.stream, listener.hello.circuit) == (3, 2, "x")
        keys.add(dialler.key)
        for end in (dialler, listener):
            assert end.connection.gettimeout() == 0.0
            end.connection.close()
    assert len(keys) == 2


def test_a_refusal_is_told_to_the_dialler_in_the_listeners_words() -> None:
    assert ends_of(admit="there is no room") == ("'b' says: there is no room", "'a': there is no room")
    run = ends_of(dialled={"run": "s"}, admit="there is no room")
    assert run == ("'b' says: this is the run 'r'", "'a': this is the run 'r'")


@pytest.mark.parametrize(
    "answers",
    [OwnIdentity(run="r", peer="c", incarnation="b1"), OwnIdentity(run="r", peer="b", incarnation="b2")],
)
def test_a_dialler_that_reaches_another_peer_or_life_does_not_go_on(answers: OwnIdentity) -> None:
    dialler, listener = ends_of(answers=answers)
    assert dialler == "'b' was dialled, but another peer or life answered"
    assert listener == "the connection ended within the handshake"


@pytest.fixture
def pair() -> Any:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def deadline() -> float:
    return time.monotonic() + DEADLINE_S


def test_a_message_is_its_length_in_two_bytes_and_itself(pair: Any) -> None:
    here, there = pair
    content = send_message(here, HELLO, until=deadline())
    assert there.recv(1 << 16) == len(content).to_bytes(2, "big") + content
    here.sendall(len(content).to_bytes(2, "big") + content)
    assert receive_message(there, ConnectionHello, until=deadline()) == (HELLO, content)
    here.sendall(len(content).to_bytes(2, "big") + content)
    with pytest.raises(PeerRefused):
        receive_message(there, Welcome, until=deadline())


def test_of_a_message_that_is_too_long_nothing_is_read(pair: Any) -> None:
    here, there = pair
    here.sendall((MAX_BYTES + 1).to_bytes(2, "big") + b"x")
    with pytest.raises(PeerRefused, match=f"it sent a handshake message of {MAX_BYTES + 1} bytes"):
        receive_message(there, Welcome, until=deadline())
    assert there.recv(10) == b"x"
    here.sendall(MAX_BYTES.to_bytes(2, "big") + bytes(MAX_BYTES))
    with pytest.raises(PeerRefused, match=r"^(?!.*handshake message of)"):
        receive_message(there, Welcome, until=deadline())


def test_bytes_are_waited_for_until_the_deadline_or_the_end(pair: Any) -> None:
    here, there = pair
    here.sendall(b"abcdef")
    assert receive_exactly(there, 4, until=deadline()) == b"abcd"
    with pytest.raises(PeerRefused, match="the handshake took too long"):
        receive_exactly(there, 1, until=time.monotonic())
    here.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerRefused, match="the connection ended within the handshake"):
        receive_exactly(there, 3, until=deadline())


def test_who_does_not_speak_the_protocol_is_told_apart(pair: Any) -> None:
    here, there = pair
    here.sendall(b"x" * len(MAGIC))
    with pytest.raises(PeerRefused, match="it does not speak this protocol"):
        handshake_as_listener(there, B, TOKEN, admit=lambda hello: "", deadline_s=DEADLINE_S)


def test_a_proxy_whose_encrypted_end_fails_closes_both_and_says_why(
    pair: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain, other = pair
    plain.setblocking(False)
    other.settimeout(DEADLINE_S)
    caplog.set_level(logging.INFO, logger="bloomery.transport.handshake")
    closed: list[bool] = []

    def fail(most: int) -> bytes:
        raise ConnectionResetError(104, "Connection reset by peer")

    tls: Any = SimpleNamespace(recv=fail, close=lambda: closed.append(True))
    _TlsProxy(tls, plain).run()
    assert closed == [True] and other.recv(1) == b""
    assert caplog.messages == ["an encrypted connection ended: [Errno 104] Connection reset by peer"]


def test_a_proxy_does_not_wait_for_an_end_of_which_it_wants_nothing_now(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, other = pair
    plain.setblocking(False)
    other.close()  # which `poll` reports at once, whatever it waits for
    waited = list[Any]()

    class Poll:
        def register(self, end: Any, events: int) -> None:
            waited.append((end, events))

        def poll(self) -> None:
            raise EOFError

    tls: Any = SimpleNamespace(pending=lambda: 0, close=lambda: None)
    constants = {name: getattr(select, name) for name in ("POLLIN", "POLLOUT")}
    monkeypatch.setattr(handshake, "select", SimpleNamespace(poll=Poll, **constants))
    proxy = _TlsProxy(tls, plain)
    proxy._outward, proxy._tls_wants_write = memoryview(b"x"), True
    with pytest.raises(EOFError):
        proxy._wait()
    assert waited == [(tls, select.POLLIN | select.POLLOUT)]
    waited.clear()
    proxy._outward, proxy._inward, proxy._tls_wants_write = memoryview(b""), memoryview(b"x"), False
    with pytest.raises(EOFError):
        proxy._wait()
    assert waited == [(plain, select.POLLIN | select.POLLOUT)]


def test_keys_are_those_that_other_versions_derive_from_the_same_words() -> None:
    answer = Answer(peer="b", incarnation="b1", encrypt=False, nonce="22" * 32, proof="33" * 32)
    bare = hashed_text(replace(answer, proof=""))
    salt = hashlib.sha256(f"({hashed_text(HELLO)}, {bare})".encode()).digest()
    secret = TOKEN.token + b"\x11" * 32 + b"\x22" * 32
    keys = [
        derive_key(secret, salt=salt, purpose=f"bloomery link {purpose}") for purpose in ("proof", HELLO.run)
    ]
    assert handshake._keys(HELLO, answer, TOKEN) == tuple(keys)
    assert MAGIC == b"bloomery link 1\n"
