"""One connection, whose ends agree to use it for an attempt."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from bloomery.transport.connection import Connection, ConnectionPlace
from bloomery.transport.trust import PeerRefused, proof


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    """Those of a peer that sends on the connection and of one that receives."""
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
    yield tuple(
        Connection(
            place=ConnectionPlace("x", "x1", 0, 0, sends), connection=end, key=b"k" * 32, way="dialled"
        )
        for end, sends in zip(pair, (True, False), strict=True)
    )
    for end in pair:
        end.close()


def test_a_connection_is_agreed_on_once_both_ends_asked_for_it_for_the_same_attempt(ends) -> None:
    sending, receiving = ends
    assert not sending.is_agreed and not receiving.receive_begin()
    sending.send_begin(3)
    assert receiving.receive_begin() and receiving.received_epoch == 3
    assert not sending.is_agreed and not receiving.is_agreed
    receiving.send_begin(2)
    assert sending.receive_begin()
    assert not sending.is_agreed and not receiving.is_agreed
    receiving.send_begin(3)
    assert sending.receive_begin()
    assert sending.is_agreed and receiving.is_agreed


def test_of_what_follows_a_request_nothing_is_read(ends) -> None:
    sending, receiving = ends
    sending.send_begin(3)
    sending.connection.send(b"of the ring")
    assert receiving.receive_begin()
    assert receiving.connection.recv(64) == b"of the ring"


def test_a_request_that_comes_in_pieces_counts_once_it_is_whole(ends) -> None:
    sending, receiving = ends
    sending.send_begin(3)
    request = receiving.connection.recv(64)
    for place, byte in enumerate(request):
        assert receiving.received_epoch == 0
        sending.connection.send(bytes([byte]))
        assert receiving.receive_begin() == (place == len(request) - 1)
    assert receiving.received_epoch == 3


def test_a_request_of_an_earlier_attempt_or_of_the_wrong_end_is_refused(ends) -> None:
    sending, receiving = ends
    sending.send_begin(3)
    earlier = receiving.connection.recv(64)
    sending.send_begin(4)
    assert receiving.receive_begin()
    sending.connection.send(earlier)
    with pytest.raises(PeerRefused, match="epoch 3 after epoch 4"):
        receiving.receive_begin()
    receiving.connection.send(earlier)  # what one end sent is not what the other one may send
    with pytest.raises(PeerRefused, match="no peer of this run"):
        sending.receive_begin()


def test_an_end_that_is_closed_or_takes_nothing_is_noticed(ends) -> None:
    sending, receiving = ends
    with pytest.raises(OSError):
        while True:
            sending.send_begin(sending.sent_epoch + 1)
    asked = sending.sent_epoch
    with pytest.raises(OSError):
        sending.send_begin(asked + 1)
    assert sending.sent_epoch == asked, "a request that was not sent is not noted"
    sending.connection.close()
    while receiving.received_epoch < asked:
        assert receiving.receive_begin()
    with pytest.raises(PeerRefused, match="closed by the other end"):
        receiving.receive_begin()


def test_a_request_that_comes_again_counts_once_more_and_one_with_another_word_is_refused(ends) -> None:
    sending, receiving = ends
    for _ in range(2):
        sending.send_begin(3)
        assert receiving.receive_begin() and receiving.received_epoch == 3
    sending.send_begin(4)
    request = receiving.connection.recv(64)
    sending.connection.send(b"x" + request[1:])
    with pytest.raises(PeerRefused, match="no peer of this run"):
        receiving.receive_begin()


def test_a_request_lies_on_the_wire_as_other_versions_read_it(ends) -> None:
    sending, receiving = ends
    sending.send_begin(3)
    request = receiving.connection.recv(64)
    code = proof(b"k" * 32, b"begin, sender", bytes(7) + b"\x03")[:20]
    assert request == b"blom" + bytes(7) + b"\x03" + code
    receiving.send_begin(3)
    code = proof(b"k" * 32, b"begin, receiver", bytes(7) + b"\x03")[:20]
    assert sending.connection.recv(64)[12:] == code
