"""How a source is reached and whether it is believed, and how what came from it gets to the disk."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.diloco.elastic_peers import DEADLINE_S, until
from tests.diloco.served_states import files_of, make_checkpoint
from tests.disk_calls import recorded
from tests.protocol import example
from urllib3.exceptions import NewConnectionError

from bloomery.checkpoint.format.manifest import INDEX, MANIFEST
from bloomery.coordination.certificates import init_certificates
from bloomery.coordination.credentials import read_bundle, read_certificate
from bloomery.errors import PeerError
from bloomery.state_transfer import averages
from bloomery.state_transfer.averages import STREAMS, AverageFetcher
from bloomery.state_transfer.client import fetch_state
from bloomery.state_transfer.served_states import ServedStates
from bloomery.state_transfer.server import StateServer
from bloomery.state_transfer.source import THROUGH_RELAY, PeerSource, _Way
from bloomery.transport.trust import PeerRefused, Trust, trust_certificates

TRUST = Trust(token=b"a secret of the run")
DIGEST = "ab12"


@pytest.fixture
def serve(tmp_path: Path):
    """Makes servers of one state."""
    with ExitStack() as stack:

        def make(trust: Trust = TRUST, kind: type[StateServer] = StateServer) -> tuple[StateServer, Path]:
            server = stack.enter_context(kind("127.0.0.1:0", trust, ServedStates()))
            checkpoint = make_checkpoint(tmp_path / "served", own=1, size=100_000)
            server.offer(checkpoint, round=3, digest=DIGEST)
            return server, checkpoint

        yield make


def test_a_fetched_checkpoint_lies_on_the_disk_before_its_manifest_does(serve, tmp_path: Path) -> None:
    server, checkpoint = serve()
    source = PeerSource(peer="a", url=server.urls[0])
    with recorded() as calls:
        fetched = fetch_state(lambda: [source], DIGEST, tmp_path / "here", TRUST)
    files = files_of(fetched.directory)
    assert files == files_of(checkpoint)
    written = calls.index("sync", MANIFEST)
    for name in files.keys() - {MANIFEST}:
        assert calls.synced_before(name, at=written), name
    assert INDEX in files and written < calls.index("rename", fetched.directory.name)
    until(lambda: not server._open)  # the fetch has ended its connections


def test_a_fetch_has_one_connection_for_each_stream_and_asks_for_all_over_them(serve, tmp_path: Path) -> None:
    class Counting(StateServer):
        accepted = 0

        def serve(self, connection: socket.socket, address: str) -> None:
            self.accepted += 1
            super().serve(connection, address)

    server, checkpoint = serve(kind=Counting)
    source = PeerSource(peer="a", url=server.urls[0])
    for number in range(3):  # of two files and an index, a manifest and the name
        fetched = fetch_state(lambda: [source], DIGEST, tmp_path / str(number), TRUST, streams=1)
        assert files_of(fetched.directory) == files_of(checkpoint)
    assert server.accepted <= 3 * 2


def test_what_is_fetched_takes_the_place_of_what_was_there(serve, tmp_path: Path) -> None:
    server, checkpoint = serve()
    source = PeerSource(peer="a", url=server.urls[0])
    first = fetch_state(lambda: [source], DIGEST, tmp_path / "here", TRUST).directory
    (first / MANIFEST).write_text("spoiled")
    again = fetch_state(lambda: [source], DIGEST, tmp_path / "here", TRUST).directory
    assert again == first and files_of(again) == files_of(checkpoint)


def test_a_source_whose_certificate_was_revoked_is_not_believed(serve, tmp_path: Path) -> None:
    init_certificates(tmp_path, run="one", peers=["a", "b"])
    theirs, mine = (
        trust_certificates(authority=bundle.authority, certificate=bundle.certificate, key=bundle.key)
        for bundle in (read_bundle(tmp_path / "one" / name) for name in "ab")
    )
    server, _ = serve(theirs)
    source = PeerSource(peer="a", url=server.urls[0])
    fetch_state(lambda: [source], DIGEST, tmp_path / "before", mine)
    mine.revoked.add(read_certificate(tmp_path / "one/a/certificate.pem").serial)
    with pytest.raises(PeerError, match=r"a: its certificate .* was revoked"):
        fetch_state(lambda: [source], DIGEST, tmp_path / "after", mine)


class Reaching:
    """Ways to a peer, which note what is tried; `answers` says which of them answer."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.tried = set(answers), list[str]()

    def dial(self) -> socket.socket:
        self.tried.append("address")
        if "address" not in self.answers:
            raise NewConnectionError(None, "nobody is there")  # type: ignore[arg-type]
        return socket.socket()

    def relay(self) -> socket.socket:
        self.tried.append("relay")
        if "relay" not in self.answers:
            raise PeerRefused("it does not wait here")
        return socket.socket()

    def tries_of(self, way: _Way) -> list[str]:
        """What is tried for one more connection, which may fail."""
        self.tried.clear()
        try:
            way.connect(self.dial).close()
        except (OSError, NewConnectionError):
            self.tried.append("in vain")
        return list(self.tried)


@pytest.mark.parametrize("url", ["http://192.0.2.1:1", THROUGH_RELAY])
def test_the_way_that_worked_is_gone_again_and_after_a_failure_the_address_has_another_try(url: str) -> None:
    reaching = Reaching("relay")
    way = _Way(PeerSource(peer="a", url=url, reach=reaching.relay), "192.0.2.1", TRUST)
    first = [] if url == THROUGH_RELAY else ["address"]
    assert reaching.tries_of(way) == [*first, "relay"]
    assert reaching.tries_of(way) == ["relay"]
    reaching.answers = {"address"}
    assert reaching.tries_of(way) == ["relay", "in vain"]
    assert reaching.tries_of(way) == (["address"] if first else ["relay", "in vain"])


def test_where_no_relay_is_known_the_address_alone_is_tried_each_time() -> None:
    reaching = Reaching()
    way = _Way(PeerSource(peer="a", url="http://192.0.2.1:1"), "192.0.2.1", TRUST)
    for _ in range(2):
        assert reaching.tries_of(way) == ["address", "in vain"]
    reaching.answers = {"address"}
    assert reaching.tries_of(way) == ["address"]
    with pytest.raises(OSError, match="it cannot be dialled"):
        _Way(PeerSource(peer="a", url=THROUGH_RELAY), "", TRUST).connect(reaching.dial)


def test_a_source_sends_a_large_average_over_several_connections_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them gets a byte before all have asked for one."""
    monkeypatch.setattr(averages, "SMALL_BYTES", 1 << 20)
    asking = threading.Barrier(STREAMS)

    class Together(ServedStates):
        asked = 0

        @contextmanager
        def reading(self, digest, file):
            self.asked += 1  # at first for the size, on one connection
            if 1 < self.asked <= 1 + STREAMS:
                asking.wait(DEADLINE_S)
            with super().reading(digest, file) as found:
                yield found

    content = bytes(range(256)) * 8000
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f"{DIGEST}.0").write_bytes(content)
    with StateServer("127.0.0.1:0", TRUST, Together()) as server:
        server.states.serve_averages({DIGEST: tmp_path / "a"})
        source = PeerSource(peer="a", url=server.urls[0])
        fetched = AverageFetcher(tmp_path / "missed", TRUST)(
            example.commit(round=7, digest=DIGEST), lambda: [source], ranks=1, cancelled=lambda: False
        )
        assert (fetched.directory / "average-0").read_bytes() == content
        until(lambda: not server._open)
