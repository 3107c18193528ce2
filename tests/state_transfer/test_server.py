"""A state server and what may be asked of it, by friends and strangers, over real sockets."""

import http.client
import logging
import shutil
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.diloco.served_states import files_of, make_checkpoint

from bloomery.checkpoint.format.manifest import INDEX, MANIFEST
from bloomery.coordination.certificates import init_certificates
from bloomery.coordination.credentials import read_bundle, read_certificate
from bloomery.errors import PeerError
from bloomery.state_transfer.served_states import READ_S, ServedStates, parse_path, parse_range
from bloomery.state_transfer.server import StateServer
from bloomery.transport.sockets import RateLimiter, open_listener
from bloomery.transport.trust import Trust, trust_certificates

WITHIN_S = 60.0
TOKEN = b"a secret of the run"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN.hex()}"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("state"), own=1)


@pytest.fixture
def server(checkpoint):
    with StateServer("127.0.0.1:0", Trust(token=TOKEN), ServedStates()) as server:
        server.offer(checkpoint, round=5, digest="ab12")
        yield server


def ask(server, path, *, method="GET", headers=AUTHORIZED, **more):
    connection = http.client.HTTPConnection(server.address, timeout=WITHIN_S)
    connection.request(method, path, headers={**headers, **more})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def raw(server, content):
    """Send bytes, and return what comes until the server ends the connection."""
    host, port = server.address.split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=WITHIN_S) as connection:
        with suppress(OSError):  # it may have ended the connection already
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while piece := connection.recv(65536):
                received += piece
    return received


def test_every_file_of_the_manifest_is_served_whole_and_in_ranges(server, checkpoint):
    for name, content in files_of(checkpoint).items():
        assert ask(server, f"/state/ab12/{name}") == (200, content)
        assert ask(server, f"/state/ab12/{name}", Range="bytes=10-99") == (206, content[10:100])
        assert ask(server, f"/state/ab12/{name}", method="HEAD") == (200, b"")
    assert ask(server, "/state/ab12") == (200, b'{"name": "step-000012.i003", "round": 5}')


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/state/",
        "/state/ab12/",
        "/state/ab12/../../etc/passwd",
        "/state/ab12/..%2f..%2fetc/passwd",
        "/state/ab12/%2e%2e/secret",
        "/state/ab12//etc/passwd",
        "/state/ab12/secret",
        "/state/ab12/sub/secret",
        "/state/../secret",
        "//etc/passwd",
        "/state/ab12/secret\x00",
        "/state/other",
        "http://elsewhere/state/ab12",
    ],
)
def test_nothing_but_names_of_the_manifest_is_served(tmp_path, path):
    directory = make_checkpoint(tmp_path, own=1, size=1000)
    (directory / "secret").write_text("s3cret")
    (tmp_path / "secret").write_text("s3cret")
    with StateServer("127.0.0.1:0", Trust(token=TOKEN), ServedStates()) as server:
        server.offer(directory, round=5, digest="ab12")
        lines = [f"GET {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKEN.hex()}", "", ""]
        answer = raw(server, "\r\n".join(lines).encode())
        assert answer.split(b" ")[1:2] in ([b"404"], [b"400"]) and b"s3cret" not in answer


def test_a_link_in_a_checkpoint_is_not_followed(tmp_path):
    directory = make_checkpoint(tmp_path, own=1, size=1000)
    name = "model-r00000-of-00001-000.safetensors"
    (tmp_path / "elsewhere").write_bytes((directory / name).read_bytes())
    (directory / name).unlink()
    (directory / name).symlink_to(tmp_path / "elsewhere")
    shelf = ServedStates()
    with pytest.raises(Exception, match="cannot be served"):
        shelf.put("ab12", directory, round=1)


@pytest.mark.parametrize("token", [None, "", "Bearer", "Bearer 00", f"Bearer {TOKEN.hex()}0", "Basic x", "é"])
def test_who_does_not_know_the_runs_token_gets_nothing(server, token, caplog):
    headers = {} if token is None else {"Authorization": token.encode("utf-8").decode("latin-1")}
    assert ask(server, f"/state/ab12/{MANIFEST}", headers=headers) == (401, b"")
    assert "does not show the run's token" in caplog.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(server, method):
    assert ask(server, f"/state/ab12/{MANIFEST}", method=method)[0] == 501


@pytest.mark.parametrize(
    "content",
    [
        b"GET /state/ab12 HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 100_000,
        b"GET /state/ab12 HTTP/1.1\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
        b"\x00" * 50_000,
        b"\xff\xfe garbage\r\n\r\n",
        b"GET /state/ab12 HTTP/9.9\r\n\r\n",
    ],
    ids=["long line", "long path", "many headers", "zeros", "garbage", "version"],
)
def test_a_request_out_of_bounds_ends_its_connection_and_nothing_else(server, content):
    assert b"200 OK" not in raw(server, content)
    assert ask(server, "/state/ab12")[0] == 200


def test_a_request_with_content_is_refused(server):
    lines = [
        "GET /state/ab12 HTTP/1.1",
        *(f"{k}: {v}" for k, v in AUTHORIZED.items()),
        "Content-Length: 9",
        "",
        "",
    ]
    assert b"413" in raw(server, "\r\n".join(lines).encode() + b"x" * 9)


@pytest.mark.parametrize(
    "text", ["bytes=5-4", "bytes=0-", "bytes=-5", "0-1", "bytes=0-1,3-4", "bytes=0-99", "x"]
)
def test_a_range_that_is_not_there_is_none(text):
    assert parse_range(text, 99) is None


def test_ranges_and_paths_as_they_should_be():
    assert parse_range("bytes=0-98", 99) == range(99)
    assert parse_range(None, 99) == range(99)
    assert parse_path("/state/ab/index.json").file == INDEX
    assert parse_path(f"/state/{'a' * 129}") is None


def test_the_newest_two_states_are_served_and_an_older_one_as_long_as_it_is_fetched(checkpoint, tmp_path):
    now = 0.0
    shelf = ServedStates(clock=lambda: now)
    copies = [shutil.copytree(checkpoint, tmp_path / str(number)) for number in range(6)]

    def put(number):
        shelf.put(f"d{number}", copies[number], round=number)
        if number:
            shutil.rmtree(copies[number - 1])

    def served():
        moment, shown = now, []
        for number in range(6):
            with shelf.reading(f"d{number}", "no such file"):  # which is no sign of a fetch
                shown += [number] * (f"d{number}" in shelf._states)
        assert moment == now
        return shown

    put(0)
    with shelf.reading("d0", INDEX) as old:
        for number in (1, 2, 3):
            put(number)
        assert served() == [0, 2, 3]  # newcomers that began with d1 begin again: one older state is kept
        assert Path(f"/proc/self/fd/{old.descriptor}").exists()
    now += READ_S - 1.0
    put(4)
    assert served() == [0, 3, 4]  # the next request of that fetch may come
    with shelf.reading("d3", INDEX) as file:  # removed on the disk, and readable
        assert file.bytes == (checkpoint / INDEX).stat().st_size
    now += 2.0
    put(5)
    assert served() == [3, 4, 5]
    assert not Path(f"/proc/self/fd/{old.descriptor}").exists()
    shelf.clear()


def test_the_average_of_a_round_is_served_once_it_is_written_and_nothing_beside_it(server, tmp_path):
    averages, secret = tmp_path / "averages", tmp_path / "secret"
    averages.mkdir()
    secret.write_text("x")
    server.states.serve_averages({"cd34": averages})
    assert ask(server, "/state/cd34/average-0")[0] == 503  # it is not written yet
    (averages / "cd34.0").write_bytes(b"12345678")
    (averages / "cd34.1").symlink_to(secret)
    (averages / "ef56.0").write_bytes(b"of another round")
    assert ask(server, "/state/cd34/average-0") == (200, b"12345678")
    assert ask(server, "/state/cd34/average-0", Range="bytes=2-5") == (206, b"3456")
    for path in (
        "cd34/average-2",
        "cd34/average-0.draft",
        "cd34/average-",
        "ef56/average-0",
        "cd34/../secret",
    ):
        assert ask(server, f"/state/{path}")[0] in (404, 503)
    with suppress(http.client.HTTPException, OSError):
        assert ask(server, "/state/cd34/average-1")[0] != 200
    server.states.serve_averages({})
    assert ask(server, "/state/cd34/average-0")[0] == 404


def test_more_connections_than_there_is_room_for_are_sent_away(checkpoint):
    with StateServer("127.0.0.1:0", Trust(token=TOKEN), ServedStates(), connections=2) as server:
        server.offer(checkpoint, round=5, digest="ab12")
        host, port = server.address.split(":")
        kept = [socket.create_connection((host, int(port)), timeout=WITHIN_S) for _ in range(2)]
        for connection in kept:  # both are being served: each gets an answer, and stays
            connection.sendall(f"HEAD /state/ab12 HTTP/1.1\r\n{_header()}\r\n\r\n".encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert ask(server, "/state/ab12") == (503, b"")
        for connection in kept:
            connection.close()


def test_without_certificates_nothing_is_served_beyond_this_machine(monkeypatch):
    opened = []
    monkeypatch.setattr(
        "bloomery.state_transfer.server.open_listener",
        lambda at: opened.append(open_listener(at)) or opened[0],
    )
    with pytest.raises(PeerError, match="anybody could take it") as refused:
        StateServer("0.0.0.0:0", Trust(token=TOKEN), ServedStates())
    assert "127.0.0.1" in refused.value.remedy and "elastic.certificates" in refused.value.remedy
    assert opened[0].fileno() == -1


def test_only_who_has_a_certificate_of_the_run_is_served(tmp_path, checkpoint, caplog):
    caplog.set_level(logging.WARNING)
    init_certificates(tmp_path, run="one", peers=["a", "b"])
    init_certificates(tmp_path, run="two", peers=["a"])
    trusts = {
        name: trust_certificates(authority=bundle.authority, certificate=bundle.certificate, key=bundle.key)
        for name in ("one/a", "one/b", "two/a")
        for bundle in [read_bundle(tmp_path / name)]
    }
    with StateServer("127.0.0.1:0", trusts["one/a"], ServedStates()) as server:
        server.offer(checkpoint, round=5, digest="ab12")
        assert _status_over_tls(server, trusts["one/b"].to_dial) == 200
        for stranger in (trusts["two/a"].to_dial, _without_certificate()):
            with pytest.raises((OSError, http.client.HTTPException)):
                _status_over_tls(server, stranger)
        assert b"200 OK" not in raw(server, b"GET /state/ab12 HTTP/1.1\r\n\r\n")
        assert _status_over_tls(server, trusts["one/b"].to_dial) == 200
        trusts["one/a"].revoked.add(read_certificate(tmp_path / "one/b/certificate.pem").serial)
        assert _status_over_tls(server, trusts["one/b"].to_dial) == 401
    until = time.monotonic() + WITHIN_S
    while caplog.text.count("refused a connection from 127.0.0.1") < 3:
        assert time.monotonic() < until, caplog.text
        time.sleep(0.01)


def test_one_member_takes_no_room_from_the_others(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr("bloomery.state_transfer.server.OF_MEMBER", 2)
    init_certificates(tmp_path, run="one", peers=["a", "b", "c"])
    bundles = {name: read_bundle(tmp_path / "one" / name) for name in "abc"}
    trusts = {
        name: trust_certificates(authority=bundle.authority, certificate=bundle.certificate, key=bundle.key)
        for name, bundle in bundles.items()
    }
    with StateServer("127.0.0.1:0", trusts["a"], ServedStates(), connections=3) as server:
        server.offer(checkpoint, round=5, digest="ab12")
        greedy = []
        for _ in range(3):
            greedy.append(
                http.client.HTTPSConnection(server.address, timeout=WITHIN_S, context=trusts["b"].to_dial)
            )
            greedy[-1].request("HEAD", "/state/ab12")
        assert sorted(connection.getresponse().status for connection in greedy) == [200, 200, 503]
        assert _status_over_tls(server, trusts["c"].to_dial) == 200
        for connection in greedy:
            connection.close()
        until = time.monotonic() + WITHIN_S
        while _status_over_tls(server, trusts["b"].to_dial) != 200:
            assert time.monotonic() < until, "its places are free once its connections have ended"


def _header():
    return "\r\n".join(f"{name}: {value}" for name, value in AUTHORIZED.items())


def _without_certificate():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _status_over_tls(server, context):
    connection = http.client.HTTPSConnection(server.address, timeout=WITHIN_S, context=context)
    try:
        connection.request("GET", f"/state/ab12/{MANIFEST}")
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def test_who_has_a_connection_and_no_token_takes_no_room_of_members(checkpoint):
    with StateServer("127.0.0.1:0", Trust(token=TOKEN), ServedStates(), connections=1) as server:
        server.offer(checkpoint, round=5, digest="ab12")
        host, port = server.address.split(":")
        for content in (b"", b"GET /state/ab12 HTT", b"GET /state/ab12 HTTP/1.1\r\nX: y\r\n"):
            with socket.create_connection((host, int(port)), timeout=WITHIN_S) as stranger:
                stranger.sendall(content)
                # The room of the member's connection before this one is free once its thread has ended.
                until = time.monotonic() + 5
                while (status := ask(server, "/state/ab12")[0]) == 503 and time.monotonic() < until:
                    time.sleep(0.01)
                assert status == 200


def test_a_stranger_that_says_nothing_is_sent_away_and_a_member_that_is_idle_is_not(checkpoint, monkeypatch):
    monkeypatch.setattr("bloomery.state_transfer.server.PROOF_S", 0.2)
    with StateServer("127.0.0.1:0", Trust(token=TOKEN), ServedStates()) as server:
        server.offer(checkpoint, round=5, digest="ab12")
        member = http.client.HTTPConnection(server.address, timeout=WITHIN_S)
        for _ in range(2):
            member.request("HEAD", "/state/ab12", headers=AUTHORIZED)
            response = member.getresponse()
            response.read()
            assert response.status == 200
            host, port = server.address.split(":")
            with socket.create_connection((host, int(port)), timeout=WITHIN_S) as stranger:
                assert stranger.recv(1) == b""  # sent away, after the member was silent for longer
        member.close()


def test_a_member_whose_file_became_shorter_is_no_refused_stranger(checkpoint, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    state = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    name = next(name for name in files_of(state) if name.endswith(".safetensors"))
    with StateServer("127.0.0.1:0", Trust(token=TOKEN), ServedStates()) as server:
        server.offer(state, round=5, digest="ab12")
        (state / name).write_bytes(b"")
        with suppress(http.client.IncompleteRead):
            ask(server, f"/state/ab12/{name}")
        until = time.monotonic() + WITHIN_S
        while "ended: a served file has become shorter" not in caplog.text and time.monotonic() < until:
            time.sleep(0.01)
    assert "ended: a served file has become shorter" in caplog.text and "refused" not in caplog.text


def test_all_that_is_sent_counts_towards_the_limit_that_servers_share(checkpoint):
    taken = []
    limiter = RateLimiter(0.0)
    limiter.take = taken.append
    with StateServer("127.0.0.1:0", Trust(token=TOKEN), ServedStates(), rate_limiter=limiter) as server:
        server.offer(checkpoint, round=5, digest="ab12")
        assert ask(server, f"/state/ab12/{INDEX}", method="HEAD")[0] == 200 and taken == []
        content = ask(server, f"/state/ab12/{INDEX}")[1]
    assert sum(taken) == len(content) > 0


def strangers_of(server):
    return server._strangers._count


def until_no_stranger_is_left(server):
    until = time.monotonic() + WITHIN_S
    while strangers_of(server) and time.monotonic() < until:
        time.sleep(0.01)
    return strangers_of(server) == 0


def test_a_stranger_has_a_place_until_its_connection_ends_and_a_member_has_none(server):
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=WITHIN_S) as stranger:
        stranger.sendall(b"GET /state/ab12 HTTP/1.1\r\n\r\n")
        assert stranger.recv(1000).startswith(b"HTTP/1.1 401")
    assert until_no_stranger_is_left(server)
    with socket.create_connection((host, int(port)), timeout=WITHIN_S) as member:
        member.sendall(f"HEAD /state/ab12 HTTP/1.1\r\n{_header()}\r\n\r\n".encode())
        assert member.recv(1000).startswith(b"HTTP/1.1 200")
        assert strangers_of(server) == 0


def test_a_stranger_for_which_there_is_no_thread_has_no_place(server, monkeypatch):
    class Thread:
        def __init__(self, **named):
            pass

        def start(self):
            raise RuntimeError("can't start new thread")

    one, other = socket.socketpair()
    with one, other:
        with monkeypatch.context() as full:
            full.setattr("bloomery.state_transfer.server.threading.Thread", Thread)
            with pytest.raises(RuntimeError, match="start new thread"):
                server.serve(one, "127.0.0.1")
        assert strangers_of(server) == 0
