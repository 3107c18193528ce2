"""Manages all connections of one peer: listens, dials, keeps the pool, relays, and answers probes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
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
from bloomery.transport.listener import Listener
from bloomery.transport.relay import Relay, circuit_of
from bloomery.transport.sockets import TcpTimeouts, addresses_of, dial, open_listener, prepare
from bloomery.transport.trust import PeerRefused, RefusalLog, Trust


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
        self._relay = Relay(wait_s=4 * turns.turn_s)
        self.pool = ConnectionPool(
            dial=self._dial_ring,
            relay=self._dial_through,
            is_dialable=bool(self.addresses),
            turns=turns,
        )
        handlers: Mapping[str, Callable[[AuthenticatedConnection], None]] = {
            "ring": self._accepted,
            "probe": answer_probe,
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
                greeting = self._greeting(contact, purpose="probe", stream=stream)
                connections.append(self._greet(contact.addresses, greeting, deadline_s).connection)
            return measure(connections, sizes, deadline_s=deadline_s)
        finally:
            for connection in connections:
                connection.close()

    def close(self) -> None:
        """Stop listening and relaying, and close all connections."""
        self._listener.close()
        self._relay.close()
        self.pool.close()

    def _accepted(self, greeted: AuthenticatedConnection) -> None:
        self.pool.offer(_link(greeted, ACCEPTED))

    def _dial_ring(self, hop: Neighbour, place: ConnectionPlace, epoch: int, deadline_s: float) -> Connection:
        contact = Contact(peer=hop.peer, incarnation=hop.incarnation, addresses=hop.addresses)
        greeting = self._greeting(contact, purpose="ring", place=place)
        return _own(self._greet(hop.addresses, greeting, deadline_s), place, DIALLED)

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
        leg = self._greet(
            relay.addresses, self._greeting(relay, purpose="relay", circuit=circuit), deadline_s
        ).connection
        if place.sends:
            greeting = self._greeting(contact, purpose="ring", place=place)
            return _own(
                handshake_as_dialler(leg, greeting, self._trust, deadline_s=deadline_s), place, RELAYED
            )
        greeted = handshake_as_listener(
            leg, self.identity, self._trust, admit=lambda greeting: "", deadline_s=deadline_s
        )
        link = _link(greeted, RELAYED)
        if link.place != place:
            link.connection.close()
            raise PeerRefused("the relay joined this connection to a wrong one")
        return link

    def _greeting(
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
            lane=place.lane if place else 0,
            stream=place.stream if place else stream,
            sends=place.sends if place else True,
            encrypt=self.identity.encrypt and purpose == "ring",
            circuit=circuit,
            nonce="",  # the handshake makes one
        )

    def _greet(
        self, addresses: Sequence[str], greeting: ConnectionHello, deadline_s: float
    ) -> AuthenticatedConnection:
        connection = dial(addresses, self._trust, deadline_s=deadline_s)
        prepare(connection, self._patience)
        return handshake_as_dialler(connection, greeting, self._trust, deadline_s=deadline_s)


def _advertised(sockets: Sequence[socket.socket], advertise: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses to advertise, in which the port that was taken replaces port 0."""
    if not advertise:
        return addresses_of(sockets)
    port = str(sockets[0].getsockname()[1]) if sockets else "0"
    return tuple(
        address.removesuffix("0") + port if address.endswith(":0") else address for address in advertise
    )


def _link(greeted: AuthenticatedConnection, way: str) -> Connection:
    """Return the connection as seen by its listening end, which sends if the other end receives."""
    greeting = greeted.greeting
    place = ConnectionPlace(
        greeting.peer, greeting.incarnation, greeting.lane, greeting.stream, not greeting.sends
    )
    return Connection(place=place, connection=greeted.connection, key=greeted.key, way=way)


def _own(greeted: AuthenticatedConnection, place: ConnectionPlace, way: str) -> Connection:
    return Connection(place=place, connection=greeted.connection, key=greeted.key, way=way)
