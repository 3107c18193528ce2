"""Where this peer waits for newcomers that want its state and cannot dial it, or that it can dial alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bloomery.agent.agent_context import ServesState
from bloomery.coordination.snapshot import ListedMember, RunSnapshot
from bloomery.protocol.records import Member
from bloomery.state_transfer.source import THROUGH_RELAY
from bloomery.transport.connection import Contact
from bloomery.transport.connection_manager import ConnectionManager

NEWCOMERS = 8
"""A peer waits at so many newcomers at most at a time."""


class MeetingPoints:
    """Waits at peers that relay as long as this peer serves something.

    Where no peer relays, one that only dials waits at those newcomers that can be dialled.

    serves: where this peer serves, for its entry in the list of members.

    Args:
        connections: makes the connections that wait.
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
        """Note who relays and who is new, and wait where newcomers come."""
        if snapshot.members != self._members:
            self._members = snapshot.members
            members = [listed.member for _, listed in sorted(snapshot.members.items())]
            self._relays[:] = [_contact(member) for member in members if member.relays and member.addresses]
            self._points = self._connections.meeting_points(self._me)
            if not self._points and not self._urls:
                self._points = [_contact(member) for member in members if self._is_newcomer(member)][
                    :NEWCOMERS
                ]
            self.serves = self._urls or ((THROUGH_RELAY,) if self._points else ())
        self._connections.wait_at(self._points if self._server.is_serving else (), self._server.serve)

    def _is_newcomer(self, member: Member) -> bool:
        """Whether this member fetches a state or an average, and can be dialled."""
        return bool((member.wants or member.overtaken) and member.addresses and member.peer != self._me)


def _contact(member: Member) -> Contact:
    return Contact(peer=member.peer, incarnation=member.incarnation, addresses=member.addresses)
