"""How endpoints are asked in turn, how long, with which token; and what a refusal means; without a server."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import urllib3
from urllib3.exceptions import NewConnectionError, ProtocolError, ReadTimeoutError, SSLError

from bloomery.coordination import gateway as gateway_module
from bloomery.coordination.etcd_answers import EtcdRefused, NotSent, cause_of
from bloomery.coordination.gateway import Access, Gateway, OutcomeUnknown
from bloomery.errors import CoordinatorAway, CoordinatorError

NOT_THERE = NewConnectionError(None, "refused")  # type: ignore[arg-type]
SILENT = ReadTimeoutError(None, "", "timed out")  # type: ignore[arg-type]
CUT = ProtocolError("the connection was closed")


class Answer:
    def __init__(self, status: int, content: Any) -> None:
        self.status = status
        self._left = [content if isinstance(content, bytes) else json.dumps(content).encode(), b""]

    def read1(self, size: int) -> bytes:
        return self._left.pop(0)

    def release_conn(self) -> None:
        pass


class Endpoints:
    """Endpoints a, b and so on, which answer as they are told to; and a clock that only they move.

    told: for each request to come, what happens: an answer, a refusal (status, message, code) or an error;
        and the seconds that it takes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.told = 100.0, list[Any]()
        self.asked: list[tuple[str, str]] = []
        self.requests: list[dict[str, Any]] = []
        self.slept: list[float] = []
        self.takes_s = 0.0
        monkeypatch.setattr(gateway_module, "_pool", lambda endpoint, context: self._pool(endpoint))
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(gateway_module, "time", clock)
        self.closed: list[str] = []

    def gateway(self, count: int, access: Access | None = None) -> Gateway:
        return Gateway(["abc"[number] for number in range(count)], access)

    def timeouts(self) -> list[tuple[float, float]]:
        return [
            (round(request["timeout"].connect_timeout, 3), round(request["timeout"].read_timeout, 3))
            for request in self.requests
        ]

    def _pool(self, endpoint: str) -> Any:
        def urlopen(method: str, path: str, **request: Any) -> Any:
            assert (method, request["retries"], request["redirect"]) == ("POST", False, False)
            assert request["preload_content"] is False
            self.asked.append((endpoint, path.removeprefix("/v3/")))
            self.requests.append(request)
            self.now += self.takes_s
            told = self.told.pop(0)
            if isinstance(told, Exception):
                raise told
            if isinstance(told, tuple):
                status, message, code = told
                return Answer(status, {"message": message, "code": code})
            return Answer(200, told)

        return SimpleNamespace(urlopen=urlopen, close=lambda: self.closed.append(endpoint))

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def endpoints(monkeypatch) -> Endpoints:
    return Endpoints(monkeypatch)


def names(endpoints: Endpoints) -> str:
    return "".join(endpoint for endpoint, _ in endpoints.asked)


def test_the_next_endpoint_is_asked_where_one_fails_and_the_one_that_answered_is_asked_again(
    endpoints: Endpoints,
) -> None:
    gateway = endpoints.gateway(3)
    endpoints.told = [NOT_THERE, SILENT, {"x": 1}, {"x": 2}]
    assert gateway.call("kv/range", {"key": "k"}, deadline_s=5.0) == {"x": 1}
    assert gateway.call("kv/range", {}, deadline_s=5.0) == {"x": 2}
    assert names(endpoints) == "abcc" and endpoints.slept == []
    first = endpoints.requests[0]
    assert json.loads(first["body"]) == {"key": "k"}
    assert first["headers"] == {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}
    gateway.close()
    assert endpoints.closed == ["a", "b", "c"]


def test_endpoints_have_ever_longer_to_answer_and_one_alone_has_all_of_the_time(endpoints: Endpoints) -> None:
    gateway = endpoints.gateway(2)
    endpoints.told = [NOT_THERE] * 5 + [{}]
    gateway.call("x", {}, deadline_s=10.0)
    assert endpoints.timeouts() == [(0.75, 0.8)] * 2 + [(1.5, 1.6)] * 2 + [(3.0, 3.2)] * 2
    assert endpoints.slept == [0.05, 0.05]
    endpoints.requests.clear()
    endpoints.told = [{}]
    endpoints.gateway(1).call("x", {}, deadline_s=10.0)
    assert endpoints.timeouts() == [(0.75, 10.0)]
    endpoints.requests.clear()
    endpoints.told = [{}, {}]
    endpoints.gateway(1).call("x", {}, deadline_s=0.3)
    endpoints.gateway(2).call("x", {}, deadline_s=0.01)
    assert endpoints.timeouts() == [(0.3, 0.3), (0.01, 0.05)]


@pytest.mark.parametrize("asks", ["call", "stream"])
def test_an_endpoint_that_failed_in_all_of_the_time_is_not_the_first_to_be_asked_again(
    endpoints: Endpoints, asks: str
) -> None:
    gateway, limits = endpoints.gateway(2), {"idle_s": 1.0} if asks == "stream" else {}
    endpoints.takes_s, endpoints.told = 0.6, [NOT_THERE, {}]
    with pytest.raises(CoordinatorAway):
        getattr(gateway, asks)("x", {}, deadline_s=0.5, **limits)
    getattr(gateway, asks)("x", {}, deadline_s=5.0, **limits)
    assert names(endpoints) == "ab"


def test_nobody_is_asked_after_the_deadline_and_the_last_failure_is_told(endpoints: Endpoints) -> None:
    endpoints.takes_s, endpoints.told = 0.4, [NOT_THERE, SILENT, CUT]
    with pytest.raises(CoordinatorAway) as told:
        endpoints.gateway(2).call("x", {}, deadline_s=1.0)
    assert names(endpoints) == "aba" and endpoints.slept == [0.05]
    assert told.value.message == ("no coordinator answered at a, b within 1.0 s (last: a: None: refused)")
    with pytest.raises(CoordinatorAway, match="last: no endpoint was asked in time"):
        endpoints.gateway(2).call("x", {}, deadline_s=0.0)
    with pytest.raises(CoordinatorAway, match="last: no endpoint was asked in time"):
        endpoints.gateway(2).stream("x", {}, deadline_s=0.0, idle_s=1.0)


@pytest.mark.parametrize(
    ("failure", "is_lost"),
    [
        (SILENT, True),
        (CUT, True),
        (OSError("broken"), True),
        ((503, "etcdserver: server stopped", 14), True),
        ((504, "context deadline exceeded", 4), True),
        ((499, "canceled", 1), True),
        ((409, "aborted", 10), True),
        ((400, "etcdserver: not leader", 9), True),
        ((500, "no gRPC", "x"), True),
        (b"no JSON", True),
        (NOT_THERE, False),
        (SSLError("wrong certificate"), False),
        ((503, "etcdserver: no leader", 14), False),
        ((429, "etcdserver: too many requests", 8), False),
        ((500, "raft proposal dropped", 2), False),
        ((429, "etcdserver: mvcc: database space exceeded", 8), False),
        ((400, "etcdserver: authentication is not enabled", 9), False),
        ((500, "stream terminated", 13), True),
        ((500, "something else", 2), True),
    ],
)
def test_what_must_not_be_sent_twice_is_not_where_it_may_have_been_carried_out(
    endpoints: Endpoints, failure: Any, is_lost: bool
) -> None:
    endpoints.told = [failure, {"x": 1}]
    gateway = endpoints.gateway(2)
    if not is_lost:
        assert gateway.call("kv/txn", {}, deadline_s=5.0, repeatable=False) == {"x": 1}
    else:
        with pytest.raises(OutcomeUnknown, match=r"^a: "):
            gateway.call("kv/txn", {}, deadline_s=5.0, repeatable=False)
        assert names(endpoints) == "a"
    endpoints.told = [failure, {"x": 2}]
    assert endpoints.gateway(2).call("kv/range", {}, deadline_s=5.0) == {"x": 2}


@pytest.mark.parametrize(
    ("message", "code", "told"),
    [
        ("etcdserver: key is too large", 3, "the coordinator refuses: etcdserver: key is too large"),
        ("permission denied", 7, "the coordinator refuses the user 'u': permission denied"),
        ("who are you", 16, "the coordinator refuses the user 'u': who are you"),
        (
            "authentication failed, wrong",
            3,
            "the coordinator refuses the user 'u': authentication failed, wrong",
        ),
        ("user name not found", 9, "the coordinator refuses the user 'u': user name not found"),
    ],
)
def test_a_refusal_is_told_with_its_code_and_one_of_rights_with_whom_it_concerns(
    endpoints: Endpoints, message: str, code: int, told: str
) -> None:
    endpoints.told = [{"token": "t1"}, (400, message, code)]
    with pytest.raises(EtcdRefused) as refused:
        endpoints.gateway(2, Access(user="u", password="p")).call("x", {}, deadline_s=5.0)
    assert (refused.value.message, refused.value.code) == (told, code)
    assert ("elastic.certificates" in refused.value.remedy) is ("the user" in told)
    endpoints.told = [(403, "permission denied", 7)]
    with pytest.raises(EtcdRefused, match="refuses a peer without certificates"):
        endpoints.gateway(1).call("x", {}, deadline_s=5.0)


def headers(endpoints: Endpoints) -> list[str | None]:
    return [request["headers"].get("Authorization") for request in endpoints.requests]


@pytest.mark.parametrize(
    ("status", "refusal", "code"),
    [
        (401, "etcdserver: invalid auth token", 16),
        (400, "etcdserver: revision of auth store is old", 3),
        (400, "etcdserver: user name is empty", 3),
    ],
)
def test_a_token_is_asked_for_once_and_anew_after_etcd_has_refused_it(
    endpoints: Endpoints, status: int, refusal: str, code: int
) -> None:
    gateway = endpoints.gateway(1, Access(user="u", password="p"))
    endpoints.told = [
        {"token": "t1"},
        {},
        {},
        (status, refusal, code),
        {"token": "t2"},
        {},
    ]
    for _ in range(3):
        gateway.call("kv/range", {}, deadline_s=5.0)
    assert [path for _, path in endpoints.asked] == [
        "auth/authenticate",
        "kv/range",
        "kv/range",
        "kv/range",
        "auth/authenticate",
        "kv/range",
    ]
    assert headers(endpoints) == [None, "t1", "t1", "t1", None, "t2"]
    assert json.loads(endpoints.requests[0]["body"]) == {"name": "u", "password": "p"}
    assert endpoints.requests[0]["timeout"].connect_timeout == 1.5


@pytest.mark.parametrize("failure", [SILENT, CUT])
def test_a_token_with_which_a_request_was_lost_is_asked_for_anew(endpoints: Endpoints, failure: Any) -> None:
    gateway = endpoints.gateway(1, Access(user="u", password="p"))
    for ask in (gateway.call, lambda *asked, **how: gateway.stream(*asked, idle_s=1.0, **how)):
        gateway._token = "of an etcd that has lost its data"
        endpoints.told = [failure, {"token": "new"}, {}]
        ask("x", {}, deadline_s=5.0)
        assert headers(endpoints)[-3:] == ["of an etcd that has lost its data", None, "new"]
        endpoints.now += 100.0


def test_an_etcd_that_is_slow_is_asked_for_tokens_ever_more_rarely(endpoints: Endpoints) -> None:
    class Slow(list[Any]):
        def pop(self, place: Any = 0) -> Any:
            return {"token": "t"} if endpoints.asked[-1][1] == "auth/authenticate" else SILENT

    def ask_until(end_s: float) -> int:
        endpoints.told, endpoints.takes_s = Slow(), 1.0
        endpoints.asked.clear()
        while endpoints.now < end_s:
            with pytest.raises(CoordinatorAway):
                gateway.call("kv/range", {}, deadline_s=5.0)
        return sum(path == "auth/authenticate" for _, path in endpoints.asked)

    gateway = endpoints.gateway(1, Access(user="u", password="p"))
    assert ask_until(1_100.0) == 6  # at once, and after 30, 60, 120, 240 and 480 s more
    endpoints.told = [{}]
    gateway.call("kv/range", {}, deadline_s=5.0)
    assert ask_until(endpoints.now + 80.0) == 2, "an answer ends the long pauses"
    gateway._token, gateway._token_s, gateway._trusted_s = "t", endpoints.now - 960.0, 960.0
    assert ask_until(endpoints.now + 5.0) == 1
    assert gateway._trusted_s == 960.0, "the pauses grow no longer"


def test_a_token_gets_more_time_than_the_request_that_needs_it_and_none_is_asked_for_too_late(
    endpoints: Endpoints,
) -> None:
    gateway = endpoints.gateway(1, Access(user="u", password="p"))
    endpoints.told = [{"token": "t"}, {}]
    gateway.call("kv/range", {}, deadline_s=0.5)
    assert endpoints.timeouts()[0] == (1.5, 5.0)
    gateway._token = None
    with pytest.raises(NotSent):
        gateway._known_token(0, endpoints.now)
    assert len(endpoints.asked) == 2


def test_what_fills_the_database_is_told_with_how_to_make_room(endpoints: Endpoints) -> None:
    endpoints.takes_s, endpoints.told = 2.0, [(429, "etcdserver: mvcc: database space exceeded", 8)] * 2
    with pytest.raises(CoordinatorAway, match="space exceeded") as told:
        endpoints.gateway(1).call("kv/put", {}, deadline_s=4.1)
    assert "etcdctl defrag" in told.value.remedy


@pytest.mark.parametrize(
    ("failure", "helps"),
    [
        (SSLError("certificate verify failed"), "copy the bundle again"),
        ((400, "etcdserver: authentication is not enabled", 9), "--grant"),
        (NOT_THERE, "elastic.coordinator"),
    ],
)
def test_what_helps_is_told_by_the_last_failure(endpoints: Endpoints, failure: Any, helps: str) -> None:
    for asks, limits in (("call", {}), ("stream", {"idle_s": 1.0})):
        endpoints.takes_s, endpoints.told = 2.0, [failure] * 2
        with pytest.raises(CoordinatorAway) as told:
            getattr(endpoints.gateway(1), asks)("x", {}, deadline_s=4.1, **limits)
        assert helps in told.value.remedy


@pytest.mark.parametrize("newer", [None, "t2"])
def test_a_token_that_another_thread_has_dropped_already_is_no_refusal(
    endpoints: Endpoints, newer: str | None
) -> None:
    gateway = endpoints.gateway(1, Access(user="u", password="p"))
    gateway._token = "t1"
    send_it = gateway._send

    def send(*request: Any, **how: Any) -> Any:
        if how["token"] == "t1":  # another thread's request is refused while this one is on its way
            gateway._token = newer
        return send_it(*request, **how)

    gateway._send = send  # type: ignore[method-assign]
    endpoints.told = [(401, "etcdserver: invalid auth token", 16)]
    endpoints.told += [{"x": 1}] if newer else [{"token": "t2"}, {"x": 1}]
    assert gateway.call("kv/range", {}, deadline_s=5.0) == {"x": 1}
    assert headers(endpoints)[-1] == "t2" and gateway._token == "t2"


@pytest.mark.parametrize("failure", [SILENT, {"no": "token"}, {"token": 5}])
def test_a_request_whose_token_did_not_come_was_not_sent(endpoints: Endpoints, failure: Any) -> None:
    endpoints.told = [failure, {"token": "t"}, {"x": 1}]
    gateway = endpoints.gateway(2, Access(user="u", password="p"))
    assert gateway.call("kv/txn", {}, deadline_s=5.0, repeatable=False) == {"x": 1}
    assert names(endpoints) == "abb"


def test_a_token_that_is_refused_though_none_was_sent_is_a_refusal(endpoints: Endpoints) -> None:
    endpoints.told = [(401, "user name is empty", 3)]
    with pytest.raises(EtcdRefused):
        endpoints.gateway(1).call("x", {}, deadline_s=5.0)


def test_a_stream_is_opened_at_the_next_endpoint_and_ends_after_its_own_silence(endpoints: Endpoints) -> None:
    gateway = endpoints.gateway(2)
    endpoints.told = [NOT_THERE, (503, "no leader", 14), {}]
    stream = gateway.stream("watch", {"w": 1}, deadline_s=5.0, idle_s=9.0)
    assert stream is not None and names(endpoints) == "aba" and endpoints.slept == [0.05]
    assert endpoints.timeouts() == [(1.5, 9.0)] * 3
    assert json.loads(endpoints.requests[2]["body"]) == {"w": 1}
    endpoints.told = [{}]
    gateway.stream("watch", {}, deadline_s=0.5, idle_s=0.0)
    assert names(endpoints)[3:] == "a" and endpoints.timeouts()[3] == (0.5, 0.1)
    endpoints.told = [(403, "permission denied", 7)]
    with pytest.raises(EtcdRefused):
        gateway.stream("watch", {}, deadline_s=5.0, idle_s=9.0)
    endpoints.takes_s, endpoints.told = 3.0, [SILENT, CUT]
    with pytest.raises(CoordinatorAway, match=r"within 5\.0 s \(last: b: the connection was closed\)"):
        gateway.stream("watch", {}, deadline_s=5.0, idle_s=9.0)


def test_a_stream_may_be_denied_once_in_ten_seconds_and_each_time_its_token_is_dropped(
    endpoints: Endpoints,
) -> None:
    gateway = endpoints.gateway(1, Access(user="u", password="p"))
    gateway._token = "t1"
    gateway.stream_refused("the server is stopping")
    assert gateway._token == "t1"
    gateway.stream_refused("etcdserver: Permission denied")
    assert gateway._token is None
    for later_s, is_refused in ((10.0, False), (9.9, True), (0.0, True), (10.1, False)):
        endpoints.now += later_s
        gateway._token = "t2"
        if is_refused:
            with pytest.raises(EtcdRefused) as told:
                gateway.stream_refused("permission denied")
            assert told.value.code == 7 and "'u'" in told.value.message
        else:
            gateway.stream_refused("permission denied")
        assert gateway._token is None
    gateway._token = "t3"
    for _ in range(2):
        gateway.stream_refused("etcdserver: invalid auth token")
    assert gateway._token is None


def test_a_certificate_is_loaded_where_connections_have_tls_and_a_password_is_shown_to_nobody() -> None:
    loaded: list[Any] = []
    context: Any = SimpleNamespace(load_cert_chain=lambda *files: loaded.append(files))
    access = Access(context=context, user="u", password="secret")
    Gateway(["https://a:1"], access).load_certificate(Path("c"), Path("k"))
    Gateway(["http://a:1"]).load_certificate(Path("c"), Path("k"))
    assert loaded == [(Path("c"), Path("k"))] and repr(access) == "Access(user='u')"


def test_an_endpoint_is_a_pool_of_connections_that_the_kernel_probes() -> None:
    gateway = Gateway(["http://a", "http://b:7/"])
    assert [(pool.host, pool.port) for pool in gateway._pools] == [("a", 2379), ("b", 7)]
    options = gateway._pools[0].conn_kw["socket_options"]
    for option in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    ):
        assert option in options
    assert not isinstance(gateway._pools[0], urllib3.HTTPSConnectionPool)
    context: Any = SimpleNamespace()
    secure = Gateway(["https://a:9"], Access(context=context))._pools[0]
    assert isinstance(secure, urllib3.HTTPSConnectionPool) and secure.conn_kw["ssl_context"] is context
    assert (secure.port, secure.conn_kw["socket_options"]) == (9, options)
    with pytest.raises(CoordinatorError, match="https://a:9 requires certificates"):
        Gateway(["https://a:9"])
    with pytest.raises(CoordinatorError, match="no coordinator is named"):
        Gateway([])
    for odd in ("http://a:1/x", "http://", "tcp://a:1", "http://a:x"):
        with pytest.raises(CoordinatorError, match=f"'{odd}' is not the endpoint of a coordinator"):
            Gateway(["http://a:1", odd])


def test_a_failure_is_told_by_its_cause() -> None:
    assert cause_of(SILENT) == "it did not answer in time"
    assert cause_of(urllib3.exceptions.ConnectTimeoutError()) == "no connection in time"
    refused = NewConnectionError(None, "it failed")  # type: ignore[arg-type]
    refused.__cause__ = ConnectionRefusedError(111, "Connection refused")
    assert cause_of(refused) == "[Errno 111] Connection refused"
    caused = ProtocolError("outer")
    caused.__cause__ = OSError("inner")
    assert cause_of(caused) == "inner" and cause_of(OSError()) == "OSError"
