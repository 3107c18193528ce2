"""Fetching the average of a round from those who were in it."""

from __future__ import annotations

import errno
import socket
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.protocol import example

from bloomery.errors import PeerError, StorageError
from bloomery.state_transfer import averages
from bloomery.state_transfer.averages import AverageFetcher
from bloomery.state_transfer.served_states import ServedStates
from bloomery.state_transfer.server import StateServer
from bloomery.state_transfer.source import STALL_S, PeerSource
from bloomery.transport.trust import Trust

TRUST = Trust(token=b"a secret of the run")
COMMIT = example.commit(round=7, digest="cd34", members=("a", "b"))
CONTENT = bytes(range(256)) * 40_000  # of several pieces


@pytest.fixture
def sources(tmp_path: Path):
    """Peer 'a' keeps the average of no rank but the first, 'b' that of both; each sends 40 MB/s."""
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(StateServer("127.0.0.1:0", TRUST, ServedStates(), limit_bytes_s=4e7))
            for name in "ab"
        }
        for name, server in servers.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "cd34.0").write_bytes(CONTENT)
            server.states.serve_averages({"cd34": tmp_path / name})
        (tmp_path / "b" / "cd34.1").write_bytes(CONTENT[::-1])
        yield [PeerSource(peer=name, url=server.urls[0]) for name, server in servers.items()]


def test_the_files_of_an_average_come_from_peers_that_have_them_all_and_those_of_other_rounds_go(
    sources, tmp_path
):
    fetch = AverageFetcher(tmp_path / "missed", TRUST)
    (tmp_path / "missed" / "of another round").mkdir(parents=True)
    fetched = fetch(COMMIT, lambda: sources, ranks=2, at_once=2, cancelled=lambda: False)
    assert fetched.peers == ("b",) and fetched.bytes == 2 * len(CONTENT)
    assert (fetched.directory / "average-0").read_bytes() == CONTENT
    assert (fetched.directory / "average-1").read_bytes() == CONTENT[::-1]
    assert [path.name for path in (tmp_path / "missed").iterdir()] == ["cd34"]


def test_an_average_comes_from_several_peers_at_once_or_from_one_where_that_is_asked(sources, tmp_path):
    fetch = AverageFetcher(tmp_path / "missed", TRUST)
    for at_once, peers in ((4, ("a", "b")), (1, ("a",))):
        fetched = fetch(COMMIT, lambda: sources, ranks=1, at_once=at_once, cancelled=lambda: False)
        assert fetched.peers == peers
        assert (fetched.directory / "average-0").read_bytes() == CONTENT


def test_a_small_average_comes_from_one_peer_over_one_connection(sources, tmp_path, monkeypatch):
    began: list[str] = []
    start = averages._Download._start
    monkeypatch.setattr(averages, "ALONE_S", 60.0)
    monkeypatch.setattr(
        averages._Download,
        "_start",
        lambda self, target, state: (began.append(state.origin.peer), start(self, target, state))[1],
    )
    fetch = AverageFetcher(tmp_path / "missed", TRUST)
    small = CONTENT[: averages.SMALL_BYTES]
    for content, connections in ((small, ["a"]), (small + b"x", ["a", "a", "b", "b"])):
        began.clear()
        for name in "ab":
            (tmp_path / name / "cd34.0").write_bytes(content)
        fetched = fetch(COMMIT, lambda: sources, ranks=1, cancelled=lambda: False)
        assert sorted(began) == connections
        assert (fetched.directory / "average-0").read_bytes() == content


def test_a_peer_whose_address_is_none_keeps_nobody_from_the_others(sources, tmp_path):
    fetch = AverageFetcher(tmp_path / "missed", TRUST)
    nowhere = PeerSource(peer="a", url="http://127.0.0.1:65536")
    fetched = fetch(COMMIT, lambda: [nowhere, sources[1]], ranks=1, cancelled=lambda: False)
    assert fetched.peers == ("b",)
    with pytest.raises(PeerError, match="a: a says it serves at"):
        fetch(COMMIT, lambda: [nowhere], ranks=1, cancelled=lambda: False)


def test_a_peer_that_fails_while_it_sends_an_average_leaves_its_pieces_to_the_others(sources, tmp_path):
    """Peer 'a' serves a file that is shorter than what it told, so that it breaks off within a piece."""

    class ShorterThanTold(ServedStates):
        @contextmanager
        def reading(self, digest, file):
            with super().reading(digest, file) as found:
                yield replace(found, bytes=len(CONTENT))

    (tmp_path / "a" / "cd34.0").write_bytes(CONTENT[:100_000])
    with StateServer("127.0.0.1:0", TRUST, ShorterThanTold()) as server:
        server.states.serve_averages({"cd34": tmp_path / "a"})
        broken = PeerSource(peer="a", url=server.urls[0])
        fetch = AverageFetcher(tmp_path / "missed", TRUST)
        for at_once in (2, 1):
            fetched = fetch(
                COMMIT, lambda: [broken, sources[1]], ranks=1, at_once=at_once, cancelled=lambda: False
            )
            assert (fetched.directory / "average-0").read_bytes() == CONTENT
        assert fetched.peers == ("b",)


def test_a_full_disk_is_told_by_its_place_and_no_peer_is_blamed(sources, tmp_path, monkeypatch):
    def full(descriptor: int, data: memoryview, begin: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(averages, "write_at", full)
    fetch = AverageFetcher(tmp_path / "missed", TRUST)
    with pytest.raises(StorageError, match=f"{tmp_path / 'missed'}.*No space left"):
        fetch(COMMIT, lambda: sources, ranks=1, at_once=2, cancelled=lambda: False)


def test_peers_that_tell_different_sizes_are_not_mixed(sources, tmp_path):
    (tmp_path / "b" / "cd34.0").write_bytes(CONTENT * 2)
    fetch = AverageFetcher(tmp_path / "missed", TRUST)
    fetched = fetch(COMMIT, lambda: sources, ranks=1, at_once=2, cancelled=lambda: False)
    assert (fetched.peers, fetched.bytes) in [(("a",), len(CONTENT)), (("b",), 2 * len(CONTENT))]


def test_a_peer_that_tells_a_wrong_size_and_sends_nothing_keeps_no_other_from_sending(sources, tmp_path):
    class Empty(ServedStates):
        @contextmanager
        def reading(self, digest, file):
            with super().reading(digest, file) as found:
                yield replace(found, bytes=2 * len(CONTENT))

    (tmp_path / "liar").mkdir()
    (tmp_path / "liar" / "cd34.0").write_bytes(b"")
    with StateServer("127.0.0.1:0", TRUST, Empty()) as server:
        server.states.serve_averages({"cd34": tmp_path / "liar"})
        liar = PeerSource(peer="c", url=server.urls[0])
        fetch = AverageFetcher(tmp_path / "missed", TRUST)
        for order in ([liar, *sources], [*sources, liar]):
            fetched = fetch(COMMIT, lambda order=order: order, ranks=1, at_once=3, cancelled=lambda: False)
            assert set(fetched.peers) <= {"a", "b"} and fetched.bytes == len(CONTENT)
            assert (fetched.directory / "average-0").read_bytes() == CONTENT


def test_who_says_that_an_average_is_empty_is_to_blame_for_it(sources, tmp_path):
    (tmp_path / "a" / "cd34.0").write_bytes(b"")
    fetch = AverageFetcher(tmp_path / "missed", TRUST)
    fetched = fetch(COMMIT, lambda: sources[:1], ranks=1, at_once=2, cancelled=lambda: False)
    assert (fetched.peers, fetched.bytes) == (("a",), 0)


def test_a_peer_that_does_not_answer_does_not_delay_an_average(sources, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = PeerSource(peer="m", url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        fetch = AverageFetcher(tmp_path / "missed", TRUST)
        fetched = fetch(COMMIT, lambda: [mute, *sources], ranks=1, at_once=3, cancelled=lambda: False)
        silent.settimeout(0.0)
        silent.accept()[0].close()  # it was asked
    assert fetched.peers == ("a", "b")


def test_an_average_that_is_written_while_another_peer_is_silent_is_not_waited_for_twice(sources, tmp_path):
    """Peer 'a' has not written rank 1's file when it is asked, and the other never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = PeerSource(peer="m", url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        fetch = AverageFetcher(tmp_path / "missed", TRUST, patience_s=0.8 * STALL_S)
        writing = threading.Timer(0.5, (tmp_path / "a" / "cd34.1").write_bytes, [CONTENT])
        writing.start()
        fetched = fetch(COMMIT, lambda: [mute, sources[0]], ranks=2, at_once=2, cancelled=lambda: False)
    assert fetched.peers == ("a",)


def test_an_average_that_nobody_keeps_is_not_waited_for_and_one_that_is_to_come_for_a_while(
    sources, tmp_path
):
    fetch = AverageFetcher(tmp_path / "missed", TRUST, patience_s=0.3)
    with pytest.raises(PeerError, match=r"round 7: a: it has not written.*; b: it has not written"):
        fetch(COMMIT, lambda: sources, ranks=3, at_once=2, cancelled=lambda: False)
    never = AverageFetcher(tmp_path / "missed", TRUST, patience_s=1e9)
    with pytest.raises(PeerError, match=r"average of round 8: a: it has not this file"):
        never(
            example.commit(round=8, digest="ef56"),
            lambda: sources,
            ranks=1,
            at_once=2,
            cancelled=lambda: False,
        )
    with pytest.raises(PeerError, match="there is no source"):
        fetch(COMMIT, list, ranks=1, at_once=2, cancelled=lambda: False)
    with pytest.raises(PeerError):
        fetch(COMMIT, lambda: sources, ranks=3, at_once=2, cancelled=lambda: True)
