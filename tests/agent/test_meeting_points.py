"""Where a peer waits for newcomers that cannot dial it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.protocol import example

from bloomery.agent.state_serving import NEWCOMERS, ReverseConnections
from bloomery.coordination.snapshot import ListedMember, RunSnapshot
from bloomery.protocol.records import Member
from bloomery.transport.connection import Contact


def member(name: str, **fields: object) -> Member:
    return example.member(peer=name, **{"incarnation": f"{name}1", "addresses": (f"{name}:1",)} | fields)


class Peer:
    """Peer 'm', which has this state to serve at these URLs or nowhere; notes where it waits."""

    def __init__(self, *urls: str) -> None:
        self.relays, self.waits = list[Contact](), list[str]()
        self.server = SimpleNamespace(urls=urls, is_serving=True, serve="serves its state")
        connections = SimpleNamespace(relays_for=self._meeting_points, keep_reverse_connections=self._wait_at)
        self.points = ReverseConnections(connections, self.server, self.relays, me="m")  # type: ignore[arg-type]

    def look(self, *members: Member) -> list[str]:
        """Where it waits once these are listed."""
        listed = {
            one.peer: ListedMember(member=one, life=1, modified=1, seen_s=0.0, said_s=0.0) for one in members
        }
        self.points.update(RunSnapshot(members=listed))
        return self.waits

    def _meeting_points(self, source: str) -> list[Contact]:
        return [relay for relay in self.relays if relay.peer != source]

    def _wait_at(self, places: list[Contact], serve: object) -> None:
        assert serve == self.server.serve
        self.waits = [place.peer for place in places]


def test_relays_that_can_be_dialled_are_where_a_peer_waits_as_long_as_it_serves_something() -> None:
    peer = Peer()
    relays = [member("r", relays=True), member("s", relays=True), member("t", relays=True, addresses=())]
    new = member("n", wants="d5")
    assert peer.look(*relays, new) == ["r", "s"] and peer.points.serves == ("relay:",)
    assert peer.relays[0] == Contact(peer="r", incarnation="r1", addresses=("r:1",))
    peer.server.is_serving = False
    assert peer.look(*relays, new) == [] and peer.points.serves == ("relay:",)
    peer.server.is_serving = True
    assert peer.look(relays[1], new) == ["s"] and [relay.peer for relay in peer.relays] == ["s"]


@pytest.mark.parametrize("news", [{"wants": "d5"}, {"overtaken": 2}])
def test_where_nobody_relays_a_peer_that_only_dials_waits_at_newcomers_that_it_can_dial(news: dict) -> None:
    peer = Peer()
    others = [member("a"), member("hidden", addresses=(), **news), member("m", **news)]
    assert peer.look(*others) == [] and peer.points.serves == ()
    assert peer.look(*others, member("n", **news)) == ["n"] and peer.points.serves == ("relay:",)
    many = [member(f"n{number}", **news) for number in range(NEWCOMERS + 2)]
    assert peer.look(*others, *many) == [f"n{number}" for number in range(NEWCOMERS)]


def test_a_peer_that_can_be_dialled_waits_at_relays_for_those_who_cannot_dial_and_at_no_newcomer() -> None:
    peer = Peer("http://m:1")
    assert peer.look(member("n", wants="d5")) == [] and peer.points.serves == ("http://m:1",)
    assert peer.look(member("n", wants="d5"), member("r", relays=True)) == ["r"]
    assert peer.points.serves == ("http://m:1",)
