"""What ends the fetching of an average at once, and what a server of states does not answer."""

from __future__ import annotations

import http.client
import itertools
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.diloco.elastic_peers import DEADLINE_S, until
from tests.protocol import example

from bloomery.errors import PeerError, StorageError
from bloomery.state_transfer import averages
from bloomery.state_transfer.averages import AverageFetcher
from bloomery.state_transfer.partial_checkpoint import BlockRun, MissingBlocks
from bloomery.state_transfer.served_states import ServedStates
from bloomery.state_transfer.server import StateServer
from bloomery.state_transfer.source import PeerSource, SourceLost
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
    (tmp_path / "kept" / f"{COMMIT.digest}.1").write_bytes(b"abc")
    monkeypatch.setattr(averages, "free_bytes", lambda path: 1002)
    place = tmp_path / "missed" / COMMIT.digest[:32]
    with pytest.raises(PeerError) as failed:
        fetch(COMMIT, lambda: sources, ranks=2, cancelled=lambda: False)
    why = f"the average has 1,003 bytes, which are not free at {place}"
    assert failed.value.message == f"nobody gives the average of round 7: p0: {why}"
    assert list(place.iterdir()) == []
    monkeypatch.setattr(averages, "free_bytes", lambda path: 1003)
    fetched = fetch(COMMIT, lambda: sources, ranks=2, cancelled=lambda: False)
    assert (fetched.directory, fetched.bytes, fetched.peers) == (place, 1003, ("p0",))
    assert (place / "average-0").read_bytes() == CONTENT and (place / "average-1").read_bytes() == b"abc"


@pytest.mark.parametrize("digest", ["../out", "{}/out", ".", ""])
def test_nothing_is_written_where_a_commit_that_another_peer_wrote_leads_to(
    tmp_path: Path, digest: str
) -> None:
    asked: list[None] = []
    commit = example.commit(round=7, digest=digest.format(tmp_path))
    with pytest.raises(PeerError, match="is no digest of a state"):
        AverageFetcher(tmp_path / "missed", TRUST)(
            commit, lambda: asked.append(None) or (), ranks=1, cancelled=lambda: False
        )
    assert not [*tmp_path.iterdir()] and not asked


def test_a_connection_that_is_lost_now_and_then_brings_an_average_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averages, "_PAUSE_S", 0.0)
    one = averages._Download(tmp_path, ["f"], {})
    one._sizes, one._files = {"f": 20}, {"f": (tmp_path / "f").open("wb")}
    one._missing = MissingBlocks([BlockRun(file="f", begin=begin, end=begin + 10) for begin in (0, 10)])
    is_lost = iter([True, True, False] * 2)

    def fetch_range(file: str, buffer: memoryview, **more: object) -> bool:
        if next(is_lost):
            raise SourceLost("timed out")
        return True

    state: Any = SimpleNamespace(
        origin=PeerSource(peer="a", url="http://127.0.0.1:1"), fetch_range=fetch_range
    )
    one._stream(state)
    assert one._is_over
    one._files["f"].close()


def test_an_average_that_has_begun_to_come_may_take_longer_than_a_connection_and_its_own_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks, closed = [100.0], [0], list[str]()

    def look() -> float:
        looks[0] += 1
        return now[0]

    def begin(self: averages._Download, state: object) -> None:
        self._missing = MissingBlocks([run])
        now[0], before = 200.0, looks[0]
        until(lambda: looks[0] > before + 2 or self._is_closed)
        self._missing.take({"f"}, timeout_s=0.0)
        self._missing.done(run)

    run = BlockRun(file="f", begin=0, end=10)
    state: Any = SimpleNamespace(close=lambda: closed.append("state"))
    monkeypatch.setattr(averages, "time", SimpleNamespace(monotonic=look))
    monkeypatch.setattr(averages, "_PAUSE_S", 0.001)
    monkeypatch.setattr(averages._Download, "_begin", begin)
    monkeypatch.setattr(averages._Download, "_states_at", lambda self, *given: [state])
    one = averages._Download(tmp_path, ["f"], {})
    sources = [PeerSource(peer="a", url="http://127.0.0.1:1")]
    assert one.fetch(sources, "ab12", TRUST, until=150.0, cancelled=lambda: False)
    assert closed == ["state"]


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


def test_an_average_that_is_given_up_is_waited_for_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments, closed = itertools.count(100.0, 10.0), list[str]()
    state: Any = SimpleNamespace(close=lambda: closed.append("state"))
    monkeypatch.setattr(averages, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    monkeypatch.setattr(averages, "_PAUSE_S", 0.001)
    one = averages._Download(tmp_path, ["f"], {})
    monkeypatch.setattr(averages._Download, "_states_at", lambda self, *given: [state])
    monkeypatch.setattr(averages._Download, "_begin", lambda self, state: until(lambda: self._is_closed))
    sources = [PeerSource(peer="a", url="http://127.0.0.1:1")]
    assert not one.fetch(sources, "ab12", TRUST, until=1e9, cancelled=lambda: True)
    assert next(moments) == 110.0 and closed == ["state"]


def test_each_try_for_an_average_is_for_its_state_and_ends_with_the_patience_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, now = list[Any](), [100.0]

    def fetch(self: averages._Download, *told: Any, **more: Any) -> bool:
        tries.append((self._names, told, more))
        return len(tries) == 2

    def sleep(seconds: float) -> None:
        now[0] += 1.0

    stand_in = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(averages, "time", stand_in)
    monkeypatch.setattr(averages._Download, "fetch", fetch)
    sources, cancelled = [PeerSource(peer="a", url="http://127.0.0.1:1")], lambda: False
    fetcher = AverageFetcher(tmp_path, TRUST, patience_s=7.0)
    fetcher(COMMIT, lambda: sources, ranks=2, cancelled=cancelled)
    once = (sources, COMMIT.digest, TRUST), {"until": 107.0, "cancelled": cancelled}
    assert tries == [(["average-0", "average-1"], *once)] * 2
