"""What a peer says for each purpose of a connection, to whom, and what it does with the connection."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.diloco.elastic_peers import TOKEN
from tests.diloco.recorder import Recorder
from tests.protocol import example

from bloomery.transport import connection_manager
from bloomery.transport.bandwidth_probe import LinkMeasurement, ProbeSizes
from bloomery.transport.connection import ConnectionPlace, Contact
from bloomery.transport.connection_manager import ConnectionManager, _link, _own
from bloomery.transport.connection_pool import DialTiming, Neighbour
from bloomery.transport.handshake import AuthenticatedConnection, OwnIdentity
from bloomery.transport.relay import circuit_of, mark_of
from bloomery.transport.sockets import RateLimiter, TcpTimeouts
from bloomery.transport.trust import PeerRefused

ME = OwnIdentity(run="r", peer="a", incarnation="a1", encrypt=True)
TURNS = DialTiming(turn_s=100.0, answer_s=10.0, retry_s=30.0)
PLACE = ConnectionPlace("b", "b1", 2, 3, True)
HOP = Neighbour(peer="b", incarnation="b1", addresses=("h:1",), sends=True, ranks=(2,), streams=4)


def contact(peer: str) -> Contact:
    return Contact(peer=peer, incarnation=f"{peer}1", addresses=(f"{peer}.example.org:1",))


class Dialling:
    """A manager that dials nobody: `dialled` has the addresses, the hello and the deadline of each try."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *relays: str, listen: tuple[str, ...] = ()) -> None:
        self.manager = ConnectionManager(
            replace(ME), TOKEN, listen=listen, turns=TURNS, patience=TcpTimeouts(), handshake_s=7.0,
            relays=lambda: [contact(peer) for peer in relays],
        )  # fmt: skip
        self.dialled: list[Any] = []
        self.legs: list[Any] = []
        self.manager._dial_authenticated = self.dial  # type: ignore[method-assign]

    def dial(self, addresses: Any, hello: Any, deadline_s: float) -> AuthenticatedConnection:
        self.dialled.append((addresses, hello, deadline_s))
        self.legs.append(Recorder("leg", []))
        return AuthenticatedConnection(hello=hello, connection=self.legs[-1], key=b"key")


@pytest.fixture
def dialling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Dialling] = []

    def make(*relays: str, **options: Any) -> Dialling:
        made.append(Dialling(monkeypatch, *relays, **options))
        return made[-1]

    yield make
    for each in made:
        each.manager.close()


def hello_to(peer: str, **fields: Any) -> Any:
    usual = dict(peer="a", incarnation="a1", target=peer, target_incarnation=f"{peer}1", sends=True, nonce="")
    return example.connection_hello(**usual | fields)


def test_a_ring_is_dialled_with_its_place_and_is_all_that_may_be_encrypted(dialling) -> None:
    peer = dialling()
    for sends in (True, False):
        place = PLACE._replace(sends=sends)
        link = peer.manager._dial_ring(HOP, place, 7, 300.0)
        assert (link.place, link.connection, link.key, link.way) == (place, peer.legs[-1], b"key", "dialled")
        hello = hello_to("b", purpose="ring", rank=2, stream=3, sends=sends, encrypt=True)
        assert peer.dialled[-1] == (("h:1",), hello, 300.0)
    peer.manager._dial_waiting(contact("r"))
    assert peer.dialled[-1] == (("r.example.org:1",), hello_to("r", purpose="serve"), 7.0)


def test_a_probe_dials_each_stream_and_closes_all_also_where_it_fails(
    dialling, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, measured = dialling(), LinkMeasurement(mbit_s=1.0, rtt_ms=2.0)
    given: list[Any] = []
    monkeypatch.setattr(connection_manager, "measure", lambda *a, **more: given.append((a, more)) or measured)
    sizes = ProbeSizes(streams=3)
    assert peer.manager.probe(contact("b"), sizes=sizes, deadline_s=9.0) is measured
    hellos = [hello_to("b", purpose="probe", stream=stream) for stream in range(3)]
    assert peer.dialled == [(("b.example.org:1",), hello, 9.0) for hello in hellos]
    assert given == [((peer.legs, sizes), {"deadline_s": 9.0})]
    assert [leg._calls for leg in peer.legs] == [[("leg", "close")]] * 3

    def fail(*given: Any, **more: Any) -> None:
        raise OSError("slow")

    monkeypatch.setattr(connection_manager, "measure", fail)
    with pytest.raises(OSError, match="slow"):
        peer.manager.probe(contact("b"), sizes=sizes, deadline_s=9.0)
    assert [leg._calls for leg in peer.legs] == [[("leg", "close")]] * 6


def test_reverse_connections_are_kept_at_the_first_two_relays_that_are_not_the_source(dialling) -> None:
    manager = dialling("r", "s", "t", "u").manager
    assert manager.relays_for("b") == [contact("r"), contact("s")]
    assert manager.relays_for("r") == [contact("s"), contact("t")]


def test_a_source_is_reached_through_one_relay_after_the_other(dialling) -> None:
    peer = dialling("r", "s", "t")
    for relay in ("r", "s", "r"):
        assert peer.manager.reach("b") is peer.legs[-1]
        hello = hello_to(relay, purpose="fetch", circuit="b")
        assert peer.dialled[-1] == ((f"{relay}.example.org:1",), hello, 7.0)


@pytest.mark.parametrize("relays", [("a",), ()])
def test_where_this_peer_relays_or_nobody_does_a_source_comes_here(dialling, relays) -> None:
    peer = dialling(*relays, listen=("127.0.0.1:0",))
    asked: list[Any] = []
    waiting = iter(["a connection", None])
    peer.manager._state_relay.take = lambda source, *, deadline_s: (
        asked.append((source, deadline_s)) or next(waiting)
    )
    assert peer.manager.reach("b") == "a connection" and asked == [("b", 7.0)] and peer.dialled == []
    with pytest.raises(TimeoutError, match="'b' has not come here within 7 s"):
        peer.manager.reach("b")


def test_a_ring_meets_at_the_first_relay_that_is_neither_end(dialling, monkeypatch) -> None:
    peer = dialling("a", "b", "r", "s")
    made: list[Any] = []

    def begin(leg: Any, hello: Any, trust: Any, *, deadline_s: float) -> AuthenticatedConnection:
        made.append((leg, hello, trust, deadline_s))
        return AuthenticatedConnection(hello=hello, connection=leg, key=b"own")

    monkeypatch.setattr(connection_manager, "handshake_as_dialler", begin)
    link = peer.manager._dial_through(HOP, PLACE, 7, 300.0)
    circuit = circuit_of("r", ("a", "a1"), PLACE, 7)
    rank, stream = mark_of(circuit, "b")
    hello = hello_to("r", purpose="relay", circuit=circuit, rank=rank, stream=stream)
    assert peer.dialled == [(("r.example.org:1",), hello, 300.0)]
    of_ring = hello_to("b", purpose="ring", rank=2, stream=3, encrypt=True)
    assert made == [(peer.legs[0], of_ring, TOKEN, 300.0)]
    assert (link.place, link.key, link.way) == (PLACE, b"own", "relayed")
    with pytest.raises(PeerRefused, match="there is no peer that relays"):
        dialling("a", "b").manager._dial_through(HOP, PLACE, 7, 300.0)


@pytest.mark.parametrize("wrong", [{}, {"stream": 4}, {"peer": "c"}, {"sends": False}])
def test_a_receiver_takes_from_a_relay_the_connection_that_it_wanted_alone(
    dialling, monkeypatch, wrong
) -> None:
    peer, receives = dialling("r"), PLACE._replace(sends=False)
    said = example.connection_hello(
        **dict(peer="b", incarnation="b1", target="a", target_incarnation="a1", rank=2, stream=3, sends=True)
        | wrong
    )
    leg = Recorder("leg", [])

    def listen(given: Any, identity: Any, trust: Any, *, admit: Any, deadline_s: float) -> Any:
        assert (given, identity, trust, deadline_s) == (peer.legs[0], ME, TOKEN, 300.0) and admit(said) == ""
        return AuthenticatedConnection(hello=said, connection=leg, key=b"own")

    monkeypatch.setattr(connection_manager, "handshake_as_listener", listen)
    if not wrong:
        link = peer.manager._dial_through(HOP, receives, 7, 300.0)
        assert (link.place, link.connection, link.way) == (receives, leg, "relayed")
        return
    with pytest.raises(PeerRefused, match="joined this connection to a wrong one"):
        peer.manager._dial_through(HOP, receives, 7, 300.0)
    assert leg._calls == [("leg", "close")]


def test_the_ends_of_a_connection_are_each_others_mirror() -> None:
    connection = SimpleNamespace()
    hello = example.connection_hello(peer="b", incarnation="b1", rank=2, stream=3, sends=True)
    authenticated = AuthenticatedConnection(hello=hello, connection=connection, key=b"key")  # type: ignore[arg-type]
    listening = _link(authenticated, "accepted")
    assert listening.place == ConnectionPlace("b", "b1", 2, 3, sends=False)
    assert (listening.connection, listening.key, listening.way) == (connection, b"key", "accepted")
    dialling = _own(authenticated, PLACE, "dialled")
    assert (dialling.place, dialling.connection, dialling.way) == (PLACE, connection, "dialled")


def test_of_more_probes_than_one_member_may_make_the_rest_are_closed(dialling, monkeypatch) -> None:
    manager, answered = dialling().manager, list[Any]()
    hello = example.connection_hello(peer="b", purpose="probe")

    def probing(connection: Any) -> AuthenticatedConnection:
        return AuthenticatedConnection(hello=hello, connection=connection, key=b"")

    def answer(authenticated: AuthenticatedConnection) -> None:
        is_first = not answered
        answered.append(authenticated)
        manager._probed(probing(Recorder("probe", closed)))  # another one comes meanwhile
        if is_first:
            raise ZeroDivisionError("a mistake")

    closed: list[Any] = []
    monkeypatch.setattr(connection_manager, "answer_probe", answer)
    with pytest.raises(ZeroDivisionError):
        manager._probed(probing(Recorder("probe", closed)))
    assert (len(answered), closed) == (64, [("probe", "close")])
    assert not manager._probes._held, "each gave its place back"


def test_certificates_that_are_revoked_later_count_too_and_a_closed_peer_listens_no_more(dialling) -> None:
    trust = replace(TOKEN, revoked={"1"})
    manager = ConnectionManager(
        ME, trust, listen=("127.0.0.1:0",), turns=TURNS, patience=TcpTimeouts(),
    )  # fmt: skip
    manager.revoke(["2", "3"])
    assert trust.revoked == {"1", "2", "3"}
    host, _, port = manager.addresses[0].rpartition(":")
    manager.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=60.0)


def test_a_manager_that_is_closed_ends_all_that_it_has(dialling) -> None:
    manager, calls = dialling().manager, list[Any]()
    parts = ("_waiting", "_listener", "_relay", "_state_relay", "pool")
    real = {part: getattr(manager, part) for part in parts}
    for part in parts:
        setattr(manager, part, Recorder(part, calls))
    manager.close()
    assert sorted(calls) == sorted((part, "close") for part in parts)
    for part, own in real.items():
        setattr(manager, part, own)


def test_at_a_relay_the_first_end_waits_for_four_turns_and_both_kinds_share_one_limit() -> None:
    limiter = RateLimiter(1e6)
    manager = ConnectionManager(
        ME, TOKEN, listen=(), turns=TURNS, patience=TcpTimeouts(), rate_limiter=limiter
    )
    assert manager._relay._wait_s == 400.0
    assert manager._relay._rate_limiter is manager._state_relay._rate_limiter is limiter
    manager.close()


def test_connections_are_given_up_as_patiently_whichever_end_dialled(monkeypatch) -> None:
    patience, calls = TcpTimeouts(idle_s=7), list[Any]()
    made = AuthenticatedConnection(hello=hello_to("b"), connection=None, key=b"")  # type: ignore[arg-type]
    for name, answer in (("dial", "socket"), ("prepare", None), ("handshake_as_dialler", made)):
        monkeypatch.setattr(
            connection_manager,
            name,
            lambda *told, name=name, answer=answer, **more: calls.append((name, told, more)) or answer,
        )
    manager = ConnectionManager(ME, TOKEN, listen=(), turns=TURNS, patience=patience, handshake_s=7.0)
    assert manager._dial_authenticated(("h:1",), made.hello, 9.0) is made
    manager.close()
    assert calls == [
        ("dial", (("h:1",), TOKEN), {"deadline_s": 9.0}),
        ("prepare", ("socket", patience), {}),
        ("handshake_as_dialler", ("socket", made.hello, TOKEN), {"deadline_s": 9.0}),
    ]
    assert (manager._listener._patience, manager._listener._deadline_s) == (patience, 7.0)


def test_a_peer_is_known_by_the_addresses_that_it_advertises() -> None:
    manager = ConnectionManager(
        ME, TOKEN, listen=("127.0.0.1:0",), advertise=("b.example.org:7",), turns=TURNS,
        patience=TcpTimeouts(),
    )  # fmt: skip
    manager.close()
    assert manager.addresses == ("b.example.org:7",)
