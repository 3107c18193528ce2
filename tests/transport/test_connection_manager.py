"""Connections between peers: brought together, kept, renewed; strangers refused and nobody harmed."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import pytest
from tests.diloco.elastic_peers import (
    DEADLINE_S,
    IMPATIENT,
    TOKEN,
    Authority,
    are_ends_of_one,
    connection_manager,
    contact,
    gathered,
    hop,
    pair,
    raw,
    until,
)
from tests.protocol import example

from bloomery.transport.bandwidth_probe import ProbeSizes
from bloomery.transport.connection_pool import Cancelled, LinkError
from bloomery.transport.handshake import handshake_as_dialler
from bloomery.transport.sockets import dial
from bloomery.transport.trust import PeerRefused, Trust


@pytest.fixture
def opened():
    with ExitStack() as stack:

        def open_station(*arguments, **options):
            return stack.enter_context(closing(connection_manager(*arguments, **options)))

        yield open_station


@pytest.fixture(params=["token", "certificates", "encrypted"])
def two(request, opened, tmp_path):
    if request.param == "token":
        return opened("a"), opened("b")
    authority = Authority(tmp_path / "authority", "run r")
    encrypt = request.param == "encrypted"
    return opened("a", authority.trust("a"), encrypt=encrypt), opened("b", authority.trust("b"))


def test_both_ends_get_the_same_connections_and_keys(two):
    a, b = two
    sending, receiving = pair(a, b, epoch=1, streams=3)
    assert [link.place.stream for link in sending] == [0, 1, 2]
    assert all(are_ends_of_one(s, r) for s, r in zip(sending, receiving, strict=True))
    assert len({link.key for link in sending}) == 3


def test_connections_are_kept_after_a_good_ring_and_renewed_after_a_bad_one(two):
    a, b = two
    first, _ = pair(a, b, epoch=1)
    for each in two:
        each.pool.release(1)
    second, receiving = pair(a, b, epoch=2)
    assert [link.key for link in second] == [link.key for link in first]
    assert all(are_ends_of_one(s, r) for s, r in zip(second, receiving, strict=True))
    for each in two:
        each.pool.discard(2)
    third, receiving = pair(a, b, epoch=3)
    assert not {link.key for link in third} & {link.key for link in first}
    assert all(are_ends_of_one(s, r) for s, r in zip(third, receiving, strict=True))


def test_a_large_message_comes_through_whole_in_both_directions(two):
    (sending,), (receiving,) = pair(*two, epoch=1, streams=1)
    content = bytes(range(256)) * 8192
    got = {}

    def send(link):
        link.connection.sendall(content)

    def receive(name, link):
        taken = bytearray()
        while len(taken) < len(content):
            taken += link.connection.recv(1 << 16)
        got[name] = bytes(taken) == content

    for link in (sending, receiving):
        link.connection.settimeout(DEADLINE_S)
    work = [
        threading.Thread(target=send, args=(sending,)),
        threading.Thread(target=send, args=(receiving,)),
        threading.Thread(target=receive, args=("forth", receiving)),
        threading.Thread(target=receive, args=("back", sending)),
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join(DEADLINE_S)
    assert got == {"forth": True, "back": True}


def test_a_ring_of_two_has_connections_in_both_directions(opened):
    a, b = opened("a"), opened("b")
    of_a, of_b = gathered(
        (a, [hop(b, sends=True), hop(b, sends=False)]),
        (b, [hop(a, sends=True), hop(a, sends=False)]),
        epoch=1,
    )
    assert all(are_ends_of_one(s, r) for s, r in zip(of_a[:2], of_b[2:], strict=True))
    assert all(are_ends_of_one(s, r) for s, r in zip(of_b[:2], of_a[2:], strict=True))


def test_a_kept_connection_that_died_is_replaced_before_the_ring(opened):
    a, b = opened("a"), opened("b")
    first, _ = pair(a, b, epoch=1)
    first[1].connection.shutdown(socket.SHUT_RDWR)
    for each in (a, b):
        each.pool.release(1)
    second, receiving = pair(a, b, epoch=2)
    assert second[0].key == first[0].key and second[1].key != first[1].key
    assert all(are_ends_of_one(s, r) for s, r in zip(second, receiving, strict=True))


def test_bytes_that_an_idle_connection_should_not_carry_end_it(opened):
    a, b = opened("a"), opened("b")
    first, _ = pair(a, b, epoch=1, streams=1)
    for each in (a, b):
        each.pool.release(1)
    first[0].connection.send(b"x" * 64)
    until(lambda: b.pool.size == 0)
    second, receiving = pair(a, b, epoch=2, streams=1)
    assert are_ends_of_one(second[0], receiving[0]) and second[0].key != first[0].key


def test_a_peer_that_cannot_be_dialled_dials(opened):
    a, hidden = opened("a"), opened("b", listen=())
    assert hidden.addresses == ()
    sending, receiving = pair(a, hidden, epoch=1)
    assert all(are_ends_of_one(s, r) for s, r in zip(sending, receiving, strict=True))
    sending, receiving = pair(hidden, a, epoch=2)
    assert all(are_ends_of_one(s, r) for s, r in zip(sending, receiving, strict=True))


def test_an_address_that_nobody_answers_at_leaves_it_to_the_other_end(opened):
    a, b = opened("a"), opened("b", turns=IMPATIENT)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
    sending, receiving = gathered(
        (a, [hop(b, sends=True, addresses=(nowhere,))]), (b, [hop(a, sends=False)]), epoch=1
    )
    assert all(are_ends_of_one(s, r) for s, r in zip(sending, receiving, strict=True))
    assert {link.way for link in sending} == {"accepted"}


def test_of_several_addresses_the_one_that_answers_serves(opened):
    a, b = opened("a"), opened("b", listen=("127.0.0.1:0", "[::1]:0"))
    assert len(b.addresses) == 2 and b.addresses[1].startswith("[::1]:")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
    sending, receiving = gathered(
        (a, [hop(b, sends=True, addresses=(nowhere, b.addresses[1]))]), (b, [hop(a, sends=False)]), epoch=1
    )
    assert all(are_ends_of_one(s, r) for s, r in zip(sending, receiving, strict=True))
    assert {link.connection.family for link in sending} == {socket.AF_INET6}


def test_where_peers_are_on_other_machines_a_loopback_address_of_one_is_not_dialled(opened):
    a, b = opened("a", replace(TOKEN, dials_loopback=False)), opened("b", turns=IMPATIENT)
    with pytest.raises(ConnectionError, match="is this machine, and not where its peer is"):
        a.probe(contact(b), sizes=ProbeSizes(streams=1), deadline_s=DEADLINE_S)
    sending, _ = pair(a, b, epoch=1)
    assert {link.way for link in sending} == {"accepted"}


def test_an_address_that_is_unknown_keeps_nobody_from_the_next_one(opened):
    a, b = opened("a"), opened("b")
    known = contact(b, ("nowhere.invalid:1", *b.addresses))
    assert a.probe(known, sizes=ProbeSizes(streams=1), deadline_s=DEADLINE_S).rtt_ms > 0


def test_two_peers_that_cannot_be_dialled_meet_at_a_relay(opened, tmp_path):
    authority = Authority(tmp_path / "authority", "run r")
    relay = opened("r", authority.trust("r"), is_relay=True)
    a, b = (opened(name, authority.trust(name), listen=(), relays=lambda: (contact(relay),)) for name in "ab")
    sending, receiving = pair(a, b, epoch=1, relays=True)
    assert {link.way for link in sending} == {"relayed"}
    assert all(are_ends_of_one(s, r) for s, r in zip(sending, receiving, strict=True))


def test_a_member_that_dials_without_end_keeps_neither_descriptors_nor_others_out(opened, monkeypatch):
    monkeypatch.setattr("bloomery.transport.connection_pool._PLACES", 2)
    hostile, honest, target = opened("a"), opened("c"), opened("b")
    with ExitStack() as stack:
        for stream in range(40):
            stack.enter_context(dialled(hostile, target, stream=stream % 8, rank=stream // 8))
        until(lambda: target.pool.size == 8)
        sending, receiving = pair(honest, target, epoch=1, streams=2)
        assert all(are_ends_of_one(s, r) for s, r in zip(sending, receiving, strict=True))


def test_a_relay_forwards_no_more_for_one_member_than_its_part(opened, monkeypatch):
    monkeypatch.setattr("bloomery.transport.relay._OF_MEMBER", 2)
    relay, hostile, honest, other = opened("r", is_relay=True), opened("a"), opened("b"), opened("c")
    with ExitStack() as stack:
        ends = [
            stack.enter_context(dialled(hostile, relay, purpose="relay", circuit=str(n))) for n in range(4)
        ]
        until(lambda: sum(is_ended(end) for end in ends) == 2)
        mine = stack.enter_context(dialled(honest, relay, purpose="relay", circuit="ours"))
        theirs = stack.enter_context(dialled(other, relay, purpose="relay", circuit="ours"))
        mine.sendall(b"through")
        theirs.settimeout(DEADLINE_S)
        assert theirs.recv(7) == b"through"


def dialled(manager, target, **fields):
    """A connection that a member made and authenticated."""
    hello = example.connection_hello(
        peer=manager.identity.peer,
        incarnation=manager.identity.incarnation,
        target=target.identity.peer,
        target_incarnation=target.identity.incarnation,
        **fields,
    )
    connection = dial(target.addresses, TOKEN, deadline_s=DEADLINE_S)
    return handshake_as_dialler(connection, hello, TOKEN, deadline_s=DEADLINE_S).connection


def is_ended(connection):
    connection.settimeout(0.05)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False


def test_a_peer_that_does_not_relay_says_so(opened):
    target = opened("b")
    hello = example.connection_hello(
        run="r", peer="a", incarnation="a1", target="b", target_incarnation="b1", purpose="relay"
    )
    with pytest.raises(PeerRefused, match="does not serve 'relay'"):
        handshake_as_dialler(
            dial(target.addresses, TOKEN, deadline_s=DEADLINE_S), hello, TOKEN, deadline_s=DEADLINE_S
        )


def test_a_neighbour_out_of_reach_is_one_message_that_names_ports_and_vpn(opened):
    a = opened("a")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
    b = opened("b", listen=())
    with pytest.raises(LinkError, match=nowhere) as lost:
        a.pool.gather(
            [hop(b, sends=True, addresses=(nowhere,))],
            epoch=1,
            deadline_s=1.0,
            cancelled=threading.Event(),
        )
    assert lost.value.peer == "b"
    assert "elastic.advertise" in lost.value.remedy and "VPN" in lost.value.remedy


def test_an_attempt_that_is_over_stops_gathering(opened):
    a, b = opened("a"), opened("b")
    cancelled = threading.Event()
    threading.Timer(0.05, lambda: (cancelled.set(), a.pool.check_cancelled())).start()
    with pytest.raises(Cancelled):
        a.pool.gather([hop(b, sends=True)], epoch=1, deadline_s=DEADLINE_S, cancelled=cancelled)
    a.pool.discard(1)
    sending, receiving = pair(a, b, epoch=2)
    assert all(are_ends_of_one(s, r) for s, r in zip(sending, receiving, strict=True))


def test_a_peer_that_left_keeps_no_connections(opened):
    a, b = opened("a"), opened("b")
    sending, receiving = pair(a, b, epoch=1)
    a.pool.keep(())
    assert a.pool.size == 2  # a ring has them
    a.pool.release(1)
    a.pool.keep({("b", "b1")})
    assert a.pool.size == 2
    a.pool.keep({("b", "b2")})
    assert a.pool.size == 0
    assert all(link.connection.fileno() == -1 for link in sending)  # no descriptor is kept either
    b.pool.discard(1)
    assert all(link.connection.fileno() == -1 for link in receiving)


@pytest.fixture
def guarded(opened, tmp_path):
    """A peer with certificates, and the authority that made them."""
    authority = Authority(tmp_path / "authority", "run r")
    return opened("b", authority.trust("b")), authority


def refused(dialler, target):
    with pytest.raises((PeerRefused, OSError)):
        dialler.probe(contact(target), sizes=ProbeSizes(streams=1), deadline_s=DEADLINE_S)
    until(lambda: target.refusals.count > 0)


def is_unharmed(target, friend):
    sending, receiving = pair(friend, target, epoch=9)
    return all(are_ends_of_one(s, r) for s, r in zip(sending, receiving, strict=True))


def test_another_runs_certificate_is_refused(opened, guarded, tmp_path):
    target, authority = guarded
    other = Authority(tmp_path / "other", "run r")
    refused(opened("a", other.trust("a")), target)
    assert is_unharmed(target, opened("a", authority.trust("a")))


def test_a_certificate_of_one_peer_does_not_make_another(opened, guarded):
    target, authority = guarded
    refused(opened("c", authority.trust("a")), target)
    assert is_unharmed(target, opened("a", authority.trust("a")))


def test_no_certificate_is_refused(opened, guarded):
    target, authority = guarded
    refused(opened("a"), target)
    assert is_unharmed(target, opened("a", authority.trust("a")))


def test_another_token_is_refused(opened, caplog):
    target = opened("b")
    refused(opened("a", Trust(token=b"u" * 32)), target)
    until(lambda: "refused a connection from 127.0.0.1" in caplog.text)
    assert "the connection ended within the handshake" in caplog.text
    assert is_unharmed(target, opened("a"))


@pytest.mark.parametrize("wrong", [{"run": "other"}, {"incarnation": "b0"}, {"peer": "c"}])
def test_another_run_life_or_peer_is_refused(opened, wrong):
    target = opened("b")
    run = wrong.pop("run", "r")
    dialler = opened("a", run=run)
    meant = replace(contact(target), **wrong)
    with pytest.raises((PeerRefused, OSError)):
        dialler.probe(meant, sizes=ProbeSizes(streams=1), deadline_s=DEADLINE_S)
    assert is_unharmed(target, opened("a2"))


@pytest.mark.parametrize("has_certificates", [False, True])
def test_garbage_is_refused_and_logged_but_not_forever(opened, guarded, caplog, has_certificates):
    target, authority = guarded if has_certificates else (opened("b"), None)
    with caplog.at_level(logging.WARNING):
        for number in range(40):
            with raw(target) as stranger, suppress(OSError):  # it may be cut at any byte
                stranger.sendall(bytes([number]) * 300)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(1000):
                    pass
        until(lambda: target.refusals.count == 40)
    lines = [record for record in caplog.records if "refused a connection from 127.0.0.1" in record.message]
    assert 0 < len(lines) < 40
    assert is_unharmed(target, opened("a", authority.trust("a") if authority else TOKEN))


def test_one_who_says_nothing_holds_up_nobody(opened):
    target = opened("b")
    with ExitStack() as silent:
        strangers = [silent.enter_context(raw(target)) for _ in range(600)]
        assert is_unharmed(target, opened("a"))
        strangers[0].settimeout(DEADLINE_S)
        with suppress(ConnectionError):
            assert strangers[0].recv(1) == b""  # of too many, the oldest is sent away


def test_without_certificates_no_other_machine_is_dialled(opened):
    a = opened("a")
    target = opened("b")
    elsewhere = contact(target, ("192.0.2.1:9",))
    with pytest.raises(ConnectionError, match="no certificates"):
        a.probe(elsewhere, sizes=ProbeSizes(streams=1), deadline_s=DEADLINE_S)


def test_a_probe_measures_something(two):
    a, b = two
    measured = a.probe(contact(b), sizes=ProbeSizes(streams=2, most=1 << 20), deadline_s=DEADLINE_S)
    assert measured.mbit_s > 0 and measured.rtt_ms > 0


def test_both_ends_of_a_connection_send_at_once_and_notice_a_dead_one(opened):
    (sending,), (receiving,) = pair(opened("a"), opened("b"), epoch=1, streams=1)
    for link in (sending, receiving):
        assert link.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert link.connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
