"""What the answers of a server of states say of themselves, and what becomes of who does not read them."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.diloco.elastic_peers import DEADLINE_S, Authority, until
from tests.diloco.served_states import MIB, files_of, make_checkpoint

from bloomery.checkpoint.format.manifest import INDEX
from bloomery.state_transfer import server as serving
from bloomery.state_transfer.served_states import ServedStates
from bloomery.state_transfer.server import StateServer
from bloomery.transport.trust import Trust

TOKEN = b"a secret of the run"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN.hex()}"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("state"), own=1, size=16 * MIB)


@pytest.fixture
def server(checkpoint: Path) -> Iterator[StateServer]:
    with StateServer("127.0.0.1:0", Trust(token=TOKEN), ServedStates()) as server:
        server.offer(checkpoint, round=5, digest="ab12")
        yield server


def test_an_answer_says_what_it_is_and_how_much_of_it_and_the_connection_goes_on(
    server: StateServer, checkpoint: Path
) -> None:
    name, content = next((name, content) for name, content in files_of(checkpoint).items() if "optim" in name)
    with closing(http.client.HTTPConnection(server.address, timeout=DEADLINE_S)) as connection:
        for path, kind, part, size in (
            ("ab12", "application/json", None, len(b'{"name": "step-000012.i003", "round": 5}')),
            (f"ab12/{name}", "application/octet-stream", None, len(content)),
            (f"ab12/{name}", "application/octet-stream", (10, 99), 90),
        ):
            more = {} if part is None else {"Range": f"bytes={part[0]}-{part[1]}"}
            connection.request("HEAD", f"/state/{path}", headers=AUTHORIZED | more)
            answer = connection.getresponse()
            answer.read()
            assert (answer.getheader("Content-Type"), answer.length) == (kind, 0)
            assert answer.getheader("Content-Length") == str(size) and not answer.will_close
            told = None if part is None else f"bytes 10-99/{len(content)}"
            assert answer.getheader("Content-Range") == told


def test_after_a_refusal_a_client_knows_whether_it_may_ask_again(server: StateServer, tmp_path: Path) -> None:
    server.states.serve_averages({"cd34": tmp_path})
    for path, headers, status, is_last in (
        ("/state/ab12/nothing", AUTHORIZED, 404, False),  # as while a state is going
        ("/state/ef56", AUTHORIZED, 404, False),
        ("/state/cd34/average-0", AUTHORIZED, 503, False),  # which is to be written
        (f"/state/ab12/{INDEX}", AUTHORIZED | {"Range": "bytes=5-4"}, 416, True),
        ("/state/ab12", {}, 401, True),
        ("/elsewhere", AUTHORIZED, 404, True),
    ):
        with closing(http.client.HTTPConnection(server.address, timeout=DEADLINE_S)) as connection:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            answer.read()
            assert (answer.status, answer.will_close) == (status, is_last)


def test_who_does_not_read_what_it_asked_for_is_sent_away(
    server: StateServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "SEND_S", 0.1)
    monkeypatch.setattr(serving, "PROOF_S", 10 * DEADLINE_S)  # it has proved itself at once
    name = next(name for name in files_of(checkpoint) if "optim" in name)
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as slow:
        lines = [f"{key}: {value}" for key, value in AUTHORIZED.items()]
        slow.sendall("\r\n".join([f"GET /state/ab12/{name} HTTP/1.1", *lines, "", ""]).encode())
        assert slow.recv(1) == b"H"
        until(lambda: not server._open)


def test_who_ends_its_connection_within_a_request_leaves_nothing_behind(
    server: StateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PROOF_S", 10 * DEADLINE_S)
    host, port = server.address.split(":")
    for begun in (b"", b"GET /state", b"GET /state/ab12 HTTP/1.1\r\nHost: x\r\n"):
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
            stranger.sendall(begun)
            until(lambda: server._open)
        until(lambda: not server._open)


def test_why_an_end_without_tls_was_refused_is_told(
    tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with StateServer("127.0.0.1:0", Authority(tmp_path / "ca", "run r").trust("a"), ServedStates()) as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            until(lambda: "refused a connection from 127.0.0.1" in caplog.text)
    assert "HTTP_REQUEST" in caplog.text
