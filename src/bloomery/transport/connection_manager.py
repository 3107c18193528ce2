"""Manages all connections of one peer: listens, dials, keeps the pool, relays, and answers probes.

Peers that cannot dial each other meet at a peer that relays: for a ring each dials it when the ring begins
(`relay.py`), and for a state the peer that serves it keeps reverse connections there (`state_relay.py`).
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from bloomery.protocol.hello import ConnectionHello, Purpose
from bloomery.transport.bandwidth_probe import LinkMeasurement, ProbeSizes, answer_probe, measure
from bloomery.transport.connection import Connection, ConnectionPlace, Contact
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
from bloomery.transport.relay import Relay, circuit_of, mark_of
from bloomery.transport.sockets import RateLimiter, TcpTimeouts, addresses_of, dial, open_listener, prepare
from bloomery.transport.state_relay import ReverseDialer, Serve, StateRelay
from bloomery.transport.trust import PeerRefused, RefusalLog, Trust

_PROBES = 64
"""The most connections that one member may have for probes."""
_RELAYS_OF_PEER = 2
"""The relays to which a peer that serves a state keeps reverse connections."""


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
    rate_limiter: limits what is forwarded for others; None: no limit.
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
        rate_limiter: RateLimiter | None = None,
    ) -> None:
        self.identity, self._trust, self._patience, self._relays = identity, trust, patience, relays
        sockets = [open_listener(address) for address in listen]
        self.addresses = _advertised(sockets, advertise)
        self._probes = MemberQuota(_PROBES)
        self._relay = Relay(wait_s=4 * turns.turn_s, rate_limiter=rate_limiter)
        self._state_relay = StateRelay(rate_limiter=rate_limiter)
        self._waiting = ReverseDialer(self._dial_waiting)
        self._handshake_s, self._turn = handshake_s, itertools.count()
        self.pool = ConnectionPool(
            dial=self._dial_ring,
            relay=self._dial_through,
            is_dialable=bool(self.addresses),
            turns=turns,
        )
        handlers: Mapping[str, Callable[[AuthenticatedConnection], None]] = {
            "ring": self._accepted,
            "probe": self._probed,
            "serve": self._state_relay.wait,
        }
        if is_relay:
            handlers = {**handlers, "relay": self._relay.join, "fetch": self._state_relay.join}
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

    def relays_for(self, source: str) -> Sequence[Contact]:
        """Return the relays to which `source` keeps reverse connections; the same at all peers."""
        return [relay for relay in self._relays() if relay.peer != source][:_RELAYS_OF_PEER]

    def keep_reverse_connections(self, places: Collection[Contact], serve: Serve) -> None:
        """Keep reverse connections to these peers from now on; `serve` gets those that are used."""
        self._waiting.keep_at(places, serve)

    def reach(self, source: str) -> socket.socket:
        """Return a connection that is, or will be, joined to a reverse connection of `source`.

        The reverse connection is at this peer itself, if that relays or no other does; else at one relay
        after the other from call to call. Raises PeerRefused or OSError.
        """
        points = self.relays_for(source)
        if not points and not self.addresses:
            raise PeerRefused(f"no peer relays between this one and '{source}'")
        point = points[next(self._turn) % len(points)] if points else None
        if point is not None and point.peer != self.identity.peer:
            hello = self._hello(point, purpose="fetch", circuit=source)
            return self._dial_authenticated(point.addresses, hello, self._handshake_s).connection
        connection = self._state_relay.take(source, deadline_s=self._handshake_s)
        if connection is None:
            raise TimeoutError(f"'{source}' has not come here within {self._handshake_s:.0f} s")
        return connection

    def revoke(self, serials: Collection[str]) -> None:
        """Trust no certificate with one of these serial numbers from now on."""
        self._trust.revoked.update(serials)

    def close(self) -> None:
        """Stop listening and relaying, and close all connections."""
        self._waiting.close()
        self._listener.close()
        self._relay.close()
        self._state_relay.close()
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
        meeting = self._hello(relay, purpose="relay", circuit=circuit)
        rank, stream = mark_of(circuit, hop.peer)
        meeting = msgspec.structs.replace(meeting, rank=rank, stream=stream)
        leg = self._dial_authenticated(relay.addresses, meeting, deadline_s).connection
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

    def _dial_waiting(self, place: Contact) -> socket.socket:
        hello = self._hello(place, purpose="serve")
        return self._dial_authenticated(place.addresses, hello, self._handshake_s).connection

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
    """Return the addresses to advertise, in which the port that was taken replaces port 0.

    A peer that does not listen has none, whatever it was to advertise.
    """
    if not advertise or not sockets:
        return addresses_of(sockets)
    port = str(sockets[0].getsockname()[1])
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
