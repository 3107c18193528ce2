"""Manages all connections of one peer: listens, dials, keeps the pool, relays, and answers probes.

A relay copies bytes between two peers that cannot dial each other: each dials the relay, which joins both.
It has authenticated both as peers of the run. Through it they make a handshake of their own, so the relay
does not know their key.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from bloomery.protocol.hello import ConnectionHello, Purpose
from bloomery.transport.bandwidth_probe import LinkMeasurement, ProbeSizes, answer_probe, measure
from bloomery.transport.connection import Connection, ConnectionPlace
from bloomery.transport.connection_pool import (
    ACCEPTED,
    DIALLED,
    RELAYED,
    ConnectionPool,
    DialTiming,
    Neighbour,
)
from bloomery.transport.handshake import (
    DEADLINE_S,
    AuthenticatedConnection,
    OwnIdentity,
    handshake_as_dialler,
    handshake_as_listener,
)
from bloomery.transport.listener import Listener, MemberQuota
from bloomery.transport.sockets import TcpTimeouts, addresses_of, dial, open_listener, prepare
from bloomery.transport.trust import PeerRefused, RefusalLog, Trust

log = logging.getLogger(__name__)

_MAX_CIRCUITS = 1024
_OF_MEMBER = _MAX_CIRCUITS // 4
"""So many ends of circuits one member may have at a relay."""
_PROBES = 64
"""So many connections one member may have for probes."""
_PIECE_BYTES = 1 << 18


class Relay:
    """Joins pairs of connections that name the same circuit.

    wait_s: how long the first connection of a circuit waits for the second, seconds.
    """

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._lock, self._refusals = threading.Lock(), RefusalLog()
        self._waiting: dict[str, tuple[float, socket.socket, str]] = {}
        self._open: dict[socket.socket, str] = {}
        """The ends that are joined, each with the member that it belongs to."""

    def join(self, authenticated: AuthenticatedConnection) -> None:
        """Join a connection whose purpose is `relay` to its other end, or keep it until that comes."""
        connection, circuit, peer = (
            authenticated.connection,
            authenticated.hello.circuit,
            authenticated.hello.peer,
        )
        with self._lock:
            self._close_late()
            held = sum(owner == peer for owner in (*self._open.values(), *self._waiting_peers))
            if held >= _OF_MEMBER or len(self._waiting) + len(self._open) // 2 >= _MAX_CIRCUITS:
                self._refusals.write(f"'{peer}'", f"it is not relayed, for {held} of its ends are here")
                connection.close()
                return
            _, other, first = self._waiting.pop(circuit, (0.0, None, ""))
            if other is None:
                self._waiting[circuit] = (time.monotonic(), connection, peer)
                return
            self._open |= {connection: peer, other: first}
        log.info("relaying for '%s'", peer)
        for source, sink in ((connection, other), (other, connection)):
            threading.Thread(target=self._forward, args=(source, sink), name="relay", daemon=True).start()

    def close(self) -> None:
        """End all relayed and waiting connections."""
        with self._lock:
            for connection in (*self._open, *(connection for _, connection, _ in self._waiting.values())):
                _end(connection)
            self._waiting.clear()

    @property
    def _waiting_peers(self) -> Iterator[str]:
        return (peer for _, _, peer in self._waiting.values())

    def _close_late(self) -> None:
        now = time.monotonic()
        for circuit, (since, connection, _) in list(self._waiting.items()):
            if now > since + self._wait_s:
                del self._waiting[circuit]
                connection.close()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        """Copy from source to sink until either ends, then end both. A pipe keeps the bytes in the kernel."""
        pipe: tuple[int, ...] = ()
        try:
            pipe = reading, writing = os.pipe()
            source.settimeout(None)
            sink.settimeout(None)
            while moved := os.splice(source.fileno(), writing, _PIECE_BYTES):
                while moved:
                    moved -= os.splice(reading, sink.fileno(), moved)
        except OSError as error:
            log.info("a relayed connection ended: %s", error.strerror)
        finally:
            for end in pipe:
                os.close(end)
            _end(source)
            _end(sink)
            with self._lock:
                is_last = source not in self._open or sink not in self._open
                self._open.pop(source, None)
            if is_last:
                source.close()
                sink.close()


def circuit_of(run: str, me: tuple[str, str], place: ConnectionPlace, epoch: int) -> str:
    """Return the name of a connection through a relay, which both its ends compute alike.

    me: this peer's name and incarnation.
    epoch: of the attempt that needs the connection.
    """
    other = (place.peer, place.incarnation)
    sender, receiver = (me, other) if place.sends else (other, me)
    words = (run, *sender, *receiver, place.rank, place.stream, epoch)
    return hashlib.sha256(repr(words).encode()).hexdigest()


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, kw_only=True)
class Contact:
    """The addresses at which a peer can be dialled."""

    peer: str
    incarnation: str
    addresses: tuple[str, ...]


class ConnectionManager:
    """Listens for other peers and makes connections to them.

    identity, trust: who this peer is, and how both ends prove that they are of the run.
    listen: addresses to listen on; none: this peer only dials.
    advertise: addresses that other peers dial; none: those of `listen`.
    is_relay: whether this peer relays between others.
    turns: when each way of connecting is tried.
    patience: when the kernel gives up a silent connection.
    handshake_s: the deadline of a handshake, seconds.
    relays: returns the peers that relay now, in an order that is the same at all peers.
    """

    def __init__(
        self,
        identity: OwnIdentity,
        trust: Trust,
        *,
        listen: Sequence[str],
        advertise: Sequence[str] = (),
        is_relay: bool = False,
        turns: DialTiming,
        patience: TcpTimeouts,
        handshake_s: float = DEADLINE_S,
        relays: Callable[[], Sequence[Contact]] = tuple,
    ) -> None:
        self.identity, self._trust, self._patience, self._relays = identity, trust, patience, relays
        sockets = [open_listener(address) for address in listen]
        self.addresses = _advertised(sockets, advertise)
        self._probes = MemberQuota(_PROBES)
        self._relay = Relay(wait_s=4 * turns.turn_s)
        self.pool = ConnectionPool(
            dial=self._dial_ring,
            relay=self._dial_through,
            is_dialable=bool(self.addresses),
            turns=turns,
        )
        handlers: Mapping[str, Callable[[AuthenticatedConnection], None]] = {
            "ring": self._accepted,
            "probe": self._probed,
        }
        if is_relay:
            handlers = {**handlers, "relay": self._relay.join}
        self._listener = Listener(
            sockets, identity, trust, handlers=handlers, patience=patience, deadline_s=handshake_s
        )

    @property
    def refusals(self) -> RefusalLog:
        """The log of refused connections, with their count."""
        return self._listener.refusals

    def probe(self, contact: Contact, *, sizes: ProbeSizes, deadline_s: float) -> LinkMeasurement:
        """Measure bandwidth and round-trip time to a peer. Raises PeerRefused or OSError."""
        connections = []
        try:
            for stream in range(sizes.streams):
                hello = self._hello(contact, purpose="probe", stream=stream)
                connections.append(self._dial_authenticated(contact.addresses, hello, deadline_s).connection)
            return measure(connections, sizes, deadline_s=deadline_s)
        finally:
            for connection in connections:
                connection.close()

    def revoke(self, serials: Collection[str]) -> None:
        """Trust no certificate with one of these serial numbers from now on."""
        self._trust.revoked.update(serials)

    def close(self) -> None:
        """Stop listening and relaying, and close all connections."""
        self._listener.close()
        self._relay.close()
        self.pool.close()

    def _accepted(self, authenticated: AuthenticatedConnection) -> None:
        self.pool.offer(_link(authenticated, ACCEPTED))

    def _probed(self, authenticated: AuthenticatedConnection) -> None:
        peer = authenticated.hello.peer
        if not self._probes.enter(peer):
            authenticated.connection.close()
            return
        try:
            answer_probe(authenticated)
        finally:
            self._probes.leave(peer)

    def _dial_ring(self, hop: Neighbour, place: ConnectionPlace, epoch: int, deadline_s: float) -> Connection:
        contact = Contact(peer=hop.peer, incarnation=hop.incarnation, addresses=hop.addresses)
        hello = self._hello(contact, purpose="ring", place=place)
        return _own(self._dial_authenticated(hop.addresses, hello, deadline_s), place, DIALLED)

    def _dial_through(
        self, hop: Neighbour, place: ConnectionPlace, epoch: int, deadline_s: float
    ) -> Connection:
        """Meet the neighbour at a relay; there the sender begins the handshake, as if it had dialled."""
        me = (self.identity.peer, self.identity.incarnation)
        circuit = circuit_of(self.identity.run, me, place, epoch)
        contact = Contact(peer=hop.peer, incarnation=hop.incarnation, addresses=())
        relays = [relay for relay in self._relays() if relay.peer not in (hop.peer, self.identity.peer)]
        if not relays:
            raise PeerRefused("there is no peer that relays")
        relay = relays[0]
        leg = self._dial_authenticated(
            relay.addresses, self._hello(relay, purpose="relay", circuit=circuit), deadline_s
        ).connection
        if place.sends:
            hello = self._hello(contact, purpose="ring", place=place)
            return _own(handshake_as_dialler(leg, hello, self._trust, deadline_s=deadline_s), place, RELAYED)
        authenticated = handshake_as_listener(
            leg, self.identity, self._trust, admit=lambda hello: "", deadline_s=deadline_s
        )
        link = _link(authenticated, RELAYED)
        if link.place != place:
            link.connection.close()
            raise PeerRefused("the relay joined this connection to a wrong one")
        return link

    def _hello(
        self,
        contact: Contact,
        *,
        purpose: Purpose,
        place: ConnectionPlace | None = None,
        stream: int = 0,
        circuit: str = "",
    ) -> ConnectionHello:
        return ConnectionHello(
            run=self.identity.run,
            peer=self.identity.peer,
            incarnation=self.identity.incarnation,
            target=contact.peer,
            target_incarnation=contact.incarnation,
            purpose=purpose,
            rank=place.rank if place else 0,
            stream=place.stream if place else stream,
            sends=place.sends if place else True,
            encrypt=self.identity.encrypt and purpose == "ring",
            circuit=circuit,
            nonce="",  # the handshake makes one
        )

    def _dial_authenticated(
        self, addresses: Sequence[str], hello: ConnectionHello, deadline_s: float
    ) -> AuthenticatedConnection:
        connection = dial(addresses, self._trust, deadline_s=deadline_s)
        prepare(connection, self._patience)
        return handshake_as_dialler(connection, hello, self._trust, deadline_s=deadline_s)


def _advertised(sockets: Sequence[socket.socket], advertise: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses to advertise, in which the port that was taken replaces port 0."""
    if not advertise:
        return addresses_of(sockets)
    port = str(sockets[0].getsockname()[1]) if sockets else "0"
    return tuple(
        address.removesuffix("0") + port if address.endswith(":0") else address for address in advertise
    )


def _link(authenticated: AuthenticatedConnection, way: str) -> Connection:
    """Return the connection as seen by its listening end, which sends if the other end receives."""
    hello = authenticated.hello
    place = ConnectionPlace(hello.peer, hello.incarnation, hello.rank, hello.stream, not hello.sends)
    return Connection(place=place, connection=authenticated.connection, key=authenticated.key, way=way)


def _own(authenticated: AuthenticatedConnection, place: ConnectionPlace, way: str) -> Connection:
    return Connection(place=place, connection=authenticated.connection, key=authenticated.key, way=way)
