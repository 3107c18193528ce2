"""Addresses, and sockets that listen at them and dial them."""

from __future__ import annotations

import selectors
import socket
from contextlib import closing
from dataclasses import replace

import pytest
from tests.diloco.elastic_peers import DEADLINE_S, TOKEN

from bloomery.errors import PeerError
from bloomery.transport import sockets
from bloomery.transport.connection_manager import _advertised
from bloomery.transport.sockets import (
    RateLimiter,
    TcpTimeouts,
    addresses_of,
    dial,
    join_address,
    open_listener,
    prepare,
    split_address,
)
from bloomery.transport.trust import Trust


@pytest.mark.parametrize(
    ("listen", "answers"),
    [
        ("127.0.0.1:0", ["127.0.0.1"]),
        ("[::1]:0", ["::1"]),
        ("[::]:0", ["127.0.0.1", "::1"]),
        ("0.0.0.0:0", ["127.0.0.1"]),
    ],
)
def test_a_listener_answers_at_its_address_and_one_at_all_of_ipv6_at_those_of_ipv4_too(listen, answers):
    with closing(open_listener(listen)) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            if host in answers:
                dial([join_address(host, port)], TOKEN, deadline_s=DEADLINE_S).close()
            else:
                with pytest.raises(ConnectionError):
                    dial([join_address(host, port)], TOKEN, deadline_s=DEADLINE_S)


def test_an_address_that_another_listens_at_is_one_message_with_a_remedy():
    with closing(open_listener("127.0.0.1:0")) as listener:
        (address,) = addresses_of([listener])
        with pytest.raises(PeerError, match=f"Nothing can listen on {address}") as refused:
            open_listener(address)
    assert "elastic.listen" in refused.value.remedy


@pytest.mark.parametrize("address", ["127.0.0.1:29600", "[::1]:29600", "a.example.org:0", ":65535"])
def test_an_address_is_its_host_and_its_port(address):
    assert join_address(*split_address(address)) == address


@pytest.mark.parametrize("address", ["", "here", "here:", "here:x", "here:65536", "::1:29600", "here:-1"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(PeerError, match="is not an address") as refused:
        split_address(address)
    assert "host:port" in refused.value.remedy and "[::1]:29600 for IPv6" in refused.value.remedy


def test_why_no_address_can_be_dialled_is_told_of_each():
    with closing(open_listener("127.0.0.1:0")) as closed:
        (nowhere,) = addresses_of([closed])
    with pytest.raises(ConnectionError) as failed:
        dial([nowhere, "192.0.2.1:9"], TOKEN, deadline_s=DEADLINE_S)
    assert f"{nowhere}: Connection refused" in str(failed.value)
    assert "192.0.2.1 is another machine, and this peer has no certificates" in str(failed.value)
    with pytest.raises(ConnectionError, match="the peer has no address"):
        dial([], TOKEN, deadline_s=DEADLINE_S)


def test_an_address_that_a_peer_mistyped_keeps_nobody_from_its_other_one():
    mistyped = ["here", "site..example.org:29600", f"{'x' * 64}.example.org:29600"]
    with closing(open_listener("127.0.0.1:0")) as listener:
        dial([*mistyped, *addresses_of([listener])], TOKEN, deadline_s=DEADLINE_S).close()
    with pytest.raises(ConnectionError) as failed:
        dial(mistyped, TOKEN, deadline_s=DEADLINE_S)
    told = str(failed.value)
    assert "'here' is not an address" in told and "site..example.org:29600: " in told


def test_an_address_is_tried_once_the_one_before_it_was_silent_for_a_moment():
    """Nothing accepts at the first one, where the queue of those that want to connect is full."""
    with socket.socket() as silent, closing(open_listener("127.0.0.1:0")) as listener:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        addresses = addresses_of([silent, listener])
        waiting = [socket.socket() for _ in range(8)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        with dial(addresses, TOKEN, deadline_s=DEADLINE_S) as connection:
            assert connection.getpeername() == listener.getsockname()
            assert connection.getblocking()
        with pytest.raises(ConnectionError, match="no answer in time"):
            dial(addresses[:1], TOKEN, deadline_s=0.1)
        for one in waiting:
            one.close()


def test_where_peers_are_on_other_machines_none_is_dialled_at_loopback():
    elsewhere: Trust = replace(TOKEN, dials_loopback=False)
    with (
        closing(open_listener("127.0.0.1:0")) as listener,
        pytest.raises(ConnectionError, match="is this machine, and not where its peer is"),
    ):
        dial(addresses_of([listener]), elsewhere, deadline_s=DEADLINE_S)


def test_a_long_lived_connection_sends_at_once_and_is_given_up_by_the_kernel_when_it_is_silent():
    patience = TcpTimeouts(idle_s=7, probe_s=3, probes=4, unanswered_s=2.5)
    with socket.socket() as connection:
        prepare(connection, patience)
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 7),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2500),
        ):
            assert connection.getsockopt(level, option) == value, option


@pytest.mark.parametrize(
    ("bytes_s", "piece"), [(0.0, 1 << 20), (1e4, 4096), (1e6, 62_500), (4e6, 250_000), (1e9, 1 << 20)]
)
def test_a_slow_sender_takes_turns_every_sixteenth_of_a_second(bytes_s, piece):
    assert RateLimiter(bytes_s).piece_bytes == piece


def test_what_is_advertised_has_the_port_that_was_taken_where_it_names_none():
    with closing(open_listener("127.0.0.1:0")) as listener, closing(open_listener("[::1]:0")) as other:
        port = listener.getsockname()[1]
        assert _advertised([listener, other], ()) == addresses_of([listener, other])
        told = _advertised([listener, other], ("one.example.org:0", "two.example.org:20"))
        assert told == (f"one.example.org:{port}", "two.example.org:20")
    assert _advertised([], ("one.example.org:20",)) == (), "nobody listens there"


def test_a_connection_is_given_up_after_half_a_minute_of_silence_and_sooner_while_it_sends():
    usual = TcpTimeouts()
    assert usual.idle_s + usual.probes * usual.probe_s == 30 and usual.idle_s == 15
    assert usual.idle_s < usual.unanswered_s == 20.0


def test_congestion_is_controlled_as_between_sites_where_the_kernel_can(monkeypatch):
    assert sockets._CONGESTION_CONTROL == b"bbr"
    with socket.socket() as connection:
        for control in (b"reno", b"not-of-this-kernel"):
            monkeypatch.setattr(sockets, "_CONGESTION_CONTROL", control)
            prepare(connection, TcpTimeouts())
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert told.rstrip(b"\0") == b"reno"


@pytest.mark.parametrize(
    ("address", "place", "family", "is_dual"),
    [
        ("127.0.0.1:7", ("127.0.0.1", 7), socket.AF_INET, False),
        ("[::1]:7", ("::1", 7), socket.AF_INET6, False),
        ("[::]:7", ("::", 7), socket.AF_INET6, True),
        (":7", ("", 7), socket.AF_INET, False),
    ],
)
def test_hundreds_may_wait_to_be_accepted_and_no_port_is_shared(monkeypatch, address, place, family, is_dual):
    made = []
    monkeypatch.setattr(socket, "create_server", lambda at, **options: made.append((at, options)))
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    open_listener(address)
    options = {"family": family, "backlog": 512, "reuse_port": False, "dualstack_ipv6": is_dual}
    assert made == [(place, options)]


def test_an_address_without_a_route_is_noted_and_the_next_one_tried(monkeypatch):
    made, failures = [], []

    class Refusing(socket.socket):
        def connect(self, place):
            made.append(self)
            raise OSError(101, "Network is unreachable")

    places = iter([("h:1", socket.AF_INET, ("192.0.2.1", 1))])
    with selectors.DefaultSelector() as selector, monkeypatch.context() as patched:
        patched.setattr(socket, "socket", Refusing)
        assert sockets._start_next(places, selector, failures), "there may be more"
        assert not sockets._start_next(places, selector, failures)
    assert failures == ["h:1: Network is unreachable"] and [one.fileno() for one in made] == [-1]


def test_of_several_addresses_that_are_tried_those_that_did_not_answer_first_are_given_up(monkeypatch):
    made = []

    class Noted(socket.socket):
        def connect(self, place):
            made.append(self)
            super().connect(place)

    monkeypatch.setattr(sockets, "STAGGER_S", 0.01)
    with socket.socket() as silent, closing(open_listener("127.0.0.1:0")) as listener:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        waiting = [socket.socket() for _ in range(8)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        with monkeypatch.context() as patched:
            patched.setattr(socket, "socket", Noted)
            connection = dial(addresses_of([silent, listener]), TOKEN, deadline_s=DEADLINE_S)
        assert made[-1] is connection and len(made) == 2
        assert [one.fileno() == -1 for one in made] == [True, False]
        for one in (*waiting, connection):
            one.close()
