"""Serves a peer's state to joining peers: its URLs, reverse connections through NAT, copies on demand.

A copy takes as much memory as the state, and a peer that makes one pauses for it. So none is made before a
listed peer wants a state; then a few peers make one, and remove it when nobody wants it any more.
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.agent.agent_context import ServesState
from bloomery.agent.rank_server import RankServer
from bloomery.agent.rank_state import LocalRanks
from bloomery.coordination.snapshot import ListedMember, RunSnapshot
from bloomery.errors import BloomeryError
from bloomery.protocol.rank_messages import CopyState, StateCopied
from bloomery.protocol.records import Member
from bloomery.state_transfer.served_states import ServedStates
from bloomery.state_transfer.server import StateServer
from bloomery.state_transfer.source import THROUGH_RELAY
from bloomery.transport.connection import Contact
from bloomery.transport.connection_manager import ConnectionManager
from bloomery.transport.sockets import RateLimiter, join_address, split_address
from bloomery.transport.trust import Trust

if TYPE_CHECKING:
    from bloomery.agent.assemble import PeerAccess


log = logging.getLogger(__name__)


class PeerStateServer:
    """Serves the peer's state beside each listening port, on the next port or, if that is 0, on a free one.

    A peer that only dials serves its reverse connections.
    """

    def __init__(
        self, access: PeerAccess, trust: Trust, states: ServedStates, *, rate_limiter: RateLimiter
    ) -> None:
        self._servers = [
            StateServer(address, trust, states, rate_limiter=rate_limiter)
            for address in [*map(_beside, access.listen)] or [""]
        ]
        dialled = tuple(self._dialled(address) for address in access.advertise if access.listen)
        self._states = states
        self.urls: Sequence[str] = dialled or [url for server in self._servers for url in server.urls]
        self.serve = self._servers[0].serve

    @property
    def is_serving(self) -> bool:
        """Whether this server has a state or an average that other peers may fetch."""
        return not self._states.is_empty

    def offer(self, directory: Path, *, round: int, digest: str) -> None:
        """Serve this checkpoint from now on."""
        self._states.put(digest, directory, round=round)

    def keep(self, digests: Collection[str]) -> None:
        """Serve no other states than these any more."""
        self._states.keep(digests)

    def close(self) -> None:
        """Stop serving."""
        for server in self._servers:
            server.close()

    def _dialled(self, address: str) -> str:
        """Return the URL from which peers that dial `address` for the ring fetch the state."""
        host, port = split_address(address)
        server = self._servers[0]
        _, own = split_address(server.address)
        return f"{server.scheme}://{join_address(host, port + 1 if port else own)}"


def _beside(address: str) -> str:
    """Return the state server's address for a ring's address: the next port, or a free one for port 0."""
    host, port = split_address(address)
    return join_address(host, port + 1 if port else 0)


NEWCOMERS = 8
"""The most joining peers to which a peer that cannot be dialled keeps reverse connections."""


class ReverseConnections:
    """Keeps reverse connections to relays while this peer serves something, for peers that cannot dial it.

    Where no peer relays, a peer that only dials keeps them to those joining peers that can be dialled.

    serves: where this peer serves, for its entry in the list of members.

    Args:
        connections: makes the reverse connections.
        server: serves them.
        relays: a list that is kept filled with the members that relay.
        me: the name of this peer.
    """

    def __init__(
        self, connections: ConnectionManager, server: ServesState, relays: list[Contact], *, me: str
    ) -> None:
        self._connections, self._server, self._relays, self._me = connections, server, relays, me
        self._urls = tuple(server.urls)
        self.serves = self._urls
        self._members: Mapping[str, ListedMember] = {}
        self._points: Sequence[Contact] = ()

    def update(self, snapshot: RunSnapshot) -> None:
        """Note which members relay or join, and keep reverse connections to those where they are needed."""
        if snapshot.members != self._members:
            self._members = snapshot.members
            members = [listed.member for _, listed in sorted(snapshot.members.items())]
            self._relays[:] = [_contact(member) for member in members if member.relays and member.addresses]
            self._points = self._connections.relays_for(self._me)
            if not self._points and not self._urls:
                self._points = [_contact(member) for member in members if self._is_newcomer(member)][
                    :NEWCOMERS
                ]
            self.serves = self._urls or ((THROUGH_RELAY,) if self._points else ())
        self._connections.keep_reverse_connections(
            self._points if self._server.is_serving else (), self._server.serve
        )

    def _is_newcomer(self, member: Member) -> bool:
        """Whether this member fetches a state or an average, and can be dialled."""
        return bool((member.wants or member.overtaken) and member.addresses and member.peer != self._me)


def _contact(member: Member) -> Contact:
    return Contact(peer=member.peer, incarnation=member.incarnation, addresses=member.addresses)


SOURCES = 4
"""The peers that make a copy for one joining peer. They double with each round that is committed without it,
since a peer that makes none, or a wrong one, must not keep it out."""
_DOUBLINGS = 10
"""The most doublings of SOURCES."""
_KEPT = 2
"""The most copies that a peer keeps: one that is being fetched, and one of a later state."""


class CopyKeeper:
    """Has this peer's ranks make and remove copies, and serves those that they made.

    made: the digests of the copies that are served, the oldest first.

    Args:
        server: serves the copies.
        ranks: sends commands to the ranks.
        local: what the ranks have reported.
        me: the name of this peer.
    """

    def __init__(self, server: ServesState, ranks: RankServer, local: LocalRanks, *, me: str) -> None:
        self._server, self._ranks, self._local, self._me = server, ranks, local, me
        self.made: tuple[str, ...] = ()
        self._told = CopyState(keep=(), makes="")

    def update(self, snapshot: RunSnapshot) -> None:
        """Serve the copies of states that ranks have made, and tell the ranks which copies to make next."""
        for copy in self._local.take_copies():
            if copy.digest not in self.made and self._serve(copy):
                self.made = (*self.made, copy.digest)
        wanted = copies_wanted(snapshot, me=self._me, made=self.made)
        # The ranks may have been told before: a copy may come when nobody wants it any more.
        if set(wanted.keep) < set(self.made):
            self.made = wanted.keep
            self._server.keep(self.made)
        if wanted == self._told:
            return
        self._told = wanted
        self._ranks.send(wanted)

    def _serve(self, copy: StateCopied) -> bool:
        """Serve a copy that the ranks made, and return whether it is served."""
        if copy.directory is None:
            return False
        try:
            self._server.offer(copy.directory, round=copy.round, digest=copy.digest)
        except (BloomeryError, OSError) as error:
            log.warning("round %d is not served: %s", copy.round, error)
            return False
        return True


def copies_wanted(snapshot: RunSnapshot, *, me: str, made: Sequence[str]) -> CopyState:
    """Return which copies this peer keeps, and whether its ranks make one of the state that they hold.

    made: the digests of the copies that it has, the oldest first.
    """
    newcomers = {
        name: listed
        for name, listed in sorted(snapshot.members.items())
        if listed.member.wants and name != me
    }
    wanted = {listed.member.wants for listed in newcomers.values()}
    keep = tuple(digest for digest in made if digest in wanted or (wanted and digest == made[-1]))
    commit = snapshot.commit
    newest = commit.digest if commit is not None else ""
    serving = snapshot.holders(newest).items()
    holders = {
        name: THROUGH_RELAY in listed.member.serves for name, listed in serving if listed.member.serves
    }
    makes = newest in wanted and newest not in made and me in holders and len(keep) < _KEPT
    is_source = any(
        me in _sources(name, listed, holders)
        for name, listed in newcomers.items()
        if makes and listed.member.wants == newest
    )
    return CopyState(keep=keep, makes=newest if is_source else "")


def _sources(newcomer: str, listed: ListedMember, holders: Mapping[str, bool]) -> Sequence[str]:
    """Return the names of the peers that copy the state for a newcomer: SOURCES holders of it, or more.

    The number doubles with each round that has overtaken the newcomer. Holders are taken in the cyclic order
    of names, beginning after the newcomer's name; those that can be dialled come before those that need a
    relay, to spare the peers that relay.

    holders: the peers that hold the state and can serve a copy of it, and whether only through a relay.
    """
    count = SOURCES << min(listed.member.overtaken, _DOUBLINGS)
    return sorted(following(newcomer, list(holders)), key=lambda name: holders[name])[:count]


def following(name: str, names: Sequence[str]) -> list[str]:
    """Return the names in order from the one after `name` on, and then those up to it.

    names: in order.
    """
    first = bisect(names, name)
    return [*names[first:], *names[:first]]
