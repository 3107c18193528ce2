"""What ends the fetching of an average at once, and what a server of states does not answer."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from tests.diloco.elastic_peers import DEADLINE_S, until
from tests.protocol import example

from bloomery.errors import PeerError, StorageError
from bloomery.state_transfer import averages
from bloomery.state_transfer.averages import AverageFetcher
from bloomery.state_transfer.served_states import ServedStates
from bloomery.state_transfer.server import StateServer
from bloomery.state_transfer.source import PeerSource
from bloomery.transport.trust import Trust

TRUST = Trust(token=b"a secret")
COMMIT = example.commit(round=7, digest="cd34" * 10)
CONTENT = b"0123456789" * 100


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[list[StateServer]]:
    """Six servers of the average of one rank."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / f"{COMMIT.digest}.0").write_bytes(CONTENT)
    with ExitStack() as stack:
        servers = [stack.enter_context(StateServer("127.0.0.1:0", TRUST, ServedStates())) for _ in range(6)]
        for server in servers:
            server.states.serve_averages({COMMIT.digest: tmp_path / "kept"})
        yield servers
        for server in servers:
            until(lambda server=server: not server._open)  # every fetch has ended its connections


def sources_of(servers: list[StateServer]) -> list[PeerSource]:
    return [PeerSource(peer=f"p{n}", url=server.urls[0]) for n, server in enumerate(servers)]


def test_an_average_for_which_there_is_no_room_is_not_begun(
    serving: list[StateServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, sources = AverageFetcher(tmp_path / "missed", TRUST), sources_of(serving[:1])
    monkeypatch.setattr(averages, "free_bytes", lambda path: 999)
    place = tmp_path / "missed" / COMMIT.digest[:32]
    with pytest.raises(PeerError) as failed:
        fetch(COMMIT, lambda: sources, ranks=1, cancelled=lambda: False)
    why = f"the average has 1,000 bytes, which are not free at {place}"
    assert failed.value.message == f"nobody gives the average of round 7: p0: {why}"
    assert list(place.iterdir()) == []
    monkeypatch.setattr(averages, "free_bytes", lambda path: 1000)
    fetched = fetch(COMMIT, lambda: sources, ranks=1, cancelled=lambda: False)
    assert (fetched.directory, fetched.bytes, fetched.peers) == (place, 1000, ("p0",))
    assert (place / "average-0").read_bytes() == CONTENT


def test_at_most_four_peers_are_asked_at_once(
    serving: list[StateServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[list[str]]()
    fetch_once = averages._Download.fetch

    def noted(self: averages._Download, sources: list[PeerSource], *given: object, **more: object) -> bool:
        asked.append([source.peer for source in sources])
        return len(asked) > 1 and fetch_once(self, sources, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(averages._Download, "fetch", noted)
    sources = sources_of(serving)
    fetched = AverageFetcher(tmp_path / "missed", TRUST)(
        COMMIT, lambda: sources, ranks=1, cancelled=lambda: False
    )
    assert asked == [["p0", "p1", "p2", "p3"], ["p4", "p5"]] and set(fetched.peers) <= {"p4", "p5"}


def test_a_place_that_cannot_be_made_is_told_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "missed").write_text("a file")
    place = tmp_path / "missed" / COMMIT.digest[:32]
    with pytest.raises(StorageError, match=f"Fetching the average of a round failed at {place}"):
        AverageFetcher(tmp_path / "missed", TRUST)(COMMIT, list, ranks=1, cancelled=lambda: False)


@pytest.mark.parametrize("header", [("Transfer-Encoding", "chunked"), ("Content-Length", "1")])
def test_a_request_that_announces_content_is_refused_before_anything_else(
    serving: list[StateServer], header: tuple[str, str]
) -> None:
    with closing(http.client.HTTPConnection(serving[0].address, timeout=DEADLINE_S)) as connection:
        connection.putrequest("GET", "/state/ab12")
        connection.putheader(*header)
        connection.endheaders()
        answer = connection.getresponse()
        assert (answer.status, answer.will_close) == (413, True)


def test_a_connection_that_is_given_to_a_server_is_served_as_one_that_it_accepted(
    serving: list[StateServer],
) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(DEADLINE_S)
        serving[0].serve(theirs, "192.0.2.1")
        token = f"Authorization: Bearer {TRUST.token.hex()}"
        path = f"/state/{COMMIT.digest}/average-0"
        ours.sendall(f"GET {path} HTTP/1.1\r\n{token}\r\nRange: bytes=995-999\r\n\r\n".encode())
        received = b""
        while not received.endswith(b"\r\n\r\n56789"):
            received += ours.recv(4096)
        assert received.startswith(b"HTTP/1.1 206") and b"Content-Range: bytes 995-999/1000" in received
