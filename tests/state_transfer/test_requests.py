"""What is asked of a source of states, request by request, and what its answers are taken for."""

from __future__ import annotations

import ssl
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.diloco.recorder import Recorder
from urllib3.exceptions import NewConnectionError, ProtocolError, ReadTimeoutError

from bloomery.errors import PeerError
from bloomery.state_transfer import source
from bloomery.state_transfer.source import (
    THROUGH_RELAY,
    NotYetServed,
    PeerSource,
    ServedState,
    SourceFailed,
    _place,
    _Way,
)
from bloomery.transport.trust import PeerRefused, Trust

TRUST = Trust(token=b"a secret")
ORIGIN = PeerSource(peer="a", url="http://127.0.0.1:8")


class Answer:
    """An answer of a server; notes in `calls` what becomes of its connection."""

    def __init__(self, status: int, content: bytes = b"", *, length: str | None = None) -> None:
        self.status, self.left = status, content
        self.headers = {"Content-Length": str(len(content)) if length is None else length}
        self.calls, self.asked = list[str](), list[int]()
        self.error: Exception | None = None

    def read1(self, most: int) -> bytes:
        self.asked.append(most)
        if self.error is not None:
            raise self.error
        piece, self.left = self.left[:most], self.left[most:]
        return piece

    def close(self) -> None:
        self.calls.append("close")

    def release_conn(self) -> None:
        self.calls.append("release")


def state_of(
    answer: Answer | Exception, *, trust: Trust = TRUST, **options: Any
) -> tuple[ServedState, list[Any]]:
    calls: list[Any] = []

    def urlopen(*given: Any, **more: Any) -> Answer:
        if isinstance(answer, Exception):
            raise answer
        return answer

    state = ServedState(ORIGIN, "ab12", TRUST, **options)
    state._pool = Recorder("pool", calls, urlopen=urlopen)  # type: ignore[assignment]
    return state, calls


PLAIN = dict(retries=False, redirect=False, preload_content=False, decode_content=False)


def test_each_request_shows_the_token_has_its_time_outs_and_follows_nothing() -> None:
    state, calls = state_of(Answer(200, b'{"name": "step-000012.i003"}'), stall_s=3.0)
    state.read_description()
    assert state.name == "step-000012.i003"
    state._pool.urlopen = lambda *given, **more: calls.append((given, more)) or Answer(206, b"x" * 10)  # type: ignore[method-assign]
    assert state.fetch_range("f", memoryview(bytearray(10)), begin=90, until=time.monotonic() + 60)
    (_, _, *about), (given, named) = calls
    usual = {"timeout": state._timeout, **PLAIN}
    token = {"Authorization": "Bearer 6120736563726574"}
    assert about == ["GET", "/state/ab12", {"headers": token, **usual}]
    assert given == ("GET", "/state/ab12/f")
    assert named == {"headers": token | {"Range": "bytes=90-99"}, **usual}
    assert (state._timeout.connect_timeout, state._timeout.read_timeout) == (3.0, 3.0)
    patient, _ = state_of(Answer(200), stall_s=60.0)
    assert (patient._timeout.connect_timeout, patient._timeout.read_timeout) == (5.0, 60.0)


def test_with_certificates_no_token_is_shown() -> None:
    contexts = Trust(
        token=b"a secret",
        to_listen=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        to_dial=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
    state = ServedState(PeerSource(peer="a", url="https://127.0.0.1:8"), "ab12", contexts)
    assert state._headers == {} and state._pool.scheme == "https"
    with pytest.raises(PeerError, match="is no https://HOST:PORT"):
        ServedState(ORIGIN, "ab12", contexts)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(200, b"x" * 100), None),
        (Answer(200, b"x" * 101), "f would have 101 bytes"),
        (Answer(404, b""), r"it has not this state \(any more\)"),
        (Answer(503, b""), "it has no room now"),
        (Answer(206, b"x"), "it answers 206"),
        (Answer(200, b"x", length=""), "it answers 200"),
        (Answer(200, b"x", length="1" * 19), "it answers 200"),
        (Answer(200, b"x", length="2"), "it ended too early"),
    ],
)
def test_a_whole_file_is_read_if_it_is_no_longer_than_it_may_be(answer: Answer, error: str | None) -> None:
    state, _ = state_of(answer)
    if error is None:
        assert state.content("f", at_most=100) == b"x" * 100 and answer.calls == ["release"]
        return
    with pytest.raises(SourceFailed, match=f"^{error}$"):
        state.content("f", at_most=100)
    assert answer.calls == ["close"], "its connection is not used again"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"[]", "it does not say what it serves"),
        (b"{}", "it does not say what it serves"),
        (b"no json", "it does not say what it serves"),
        (b'{"name": 7}', "7 is no name of a checkpoint"),
        (b'{"name": "model"}', "'model' is no name of a checkpoint"),
        (b'{"name": "' + b"x" * 4086, "it does not say what it serves"),
        (b" " * 4097, "its answer would have 4,097 bytes"),
    ],
)
def test_a_description_that_names_no_checkpoint_is_refused(content: bytes, error: str) -> None:
    state, _ = state_of(Answer(200, content))
    with pytest.raises(SourceFailed, match=f"^{error}$"):
        state.read_description()
    assert state.name == ""


@pytest.mark.parametrize(
    ("answer", "kind", "error"),
    [
        (Answer(404), SourceFailed, r"it has not this file \(any more\)"),
        (Answer(503), NotYetServed, "it has not written this file yet, or has no room"),
        (Answer(206, length="9"), SourceFailed, "it answers 206"),
        (Answer(200, length="-9"), SourceFailed, "it answers 200"),
        (Answer(200, length="9" * 19), SourceFailed, "it answers 200"),
    ],
)
def test_a_size_is_that_of_a_file_that_is_there(answer: Answer, kind: type[Exception], error: str) -> None:
    state, _ = state_of(answer)
    with pytest.raises(SourceFailed, match=f"^{error}$") as failed:
        state.size("f")
    assert type(failed.value) is kind and answer.calls == ["close"]
    there = Answer(200, length="123")
    state, calls = state_of(there)
    assert state.size("f") == 123 and there.calls == ["close"]
    assert calls[0][:4] == ("pool", "urlopen", "HEAD", "/state/ab12/f")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(200, b"x" * 10), "it answers 200 to a range"),
        (Answer(503), "it has no room now"),
        (Answer(206, b"x" * 11), "it answers 206 to a range"),
        (Answer(206, b"x" * 9, length="10"), "it ended too early"),
    ],
)
def test_a_range_comes_whole_or_not_at_all(answer: Answer, error: str) -> None:
    state, _ = state_of(answer)
    with pytest.raises(SourceFailed, match=error):
        state.fetch_range("f", memoryview(bytearray(10)), begin=0, until=time.monotonic() + 60)
    assert answer.calls == ["close"]


def test_a_range_comes_in_pieces_between_which_its_deadline_and_its_use_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = (1 << 19) + 100
    content = bytes(range(256)) * (size // 256 + 1)
    looks = list[int]()
    now = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr(source, "time", SimpleNamespace(monotonic=lambda: next(now)))
    whole, view = Answer(206, content[:size]), memoryview(bytearray(size))
    state, _ = state_of(whole)
    assert state.fetch_range("f", view, begin=0, until=3.0, is_wanted=lambda: not looks.append(1))
    assert view == content[:size] and len(looks) == 3 and whole.asked == [1 << 18, 1 << 18, 100]
    assert whole.calls == ["release"]
    now = iter([1.0, 3.5])
    slow = Answer(206, content[:size])
    state, _ = state_of(slow)
    with pytest.raises(SourceFailed, match="it is too slow"):
        state.fetch_range("f", view, begin=0, until=3.0)
    assert slow.calls == ["close"]
    now, answers = iter([1.0]), iter([True, False])
    unwanted = Answer(206, content[:size])
    state, _ = state_of(unwanted)
    assert not state.fetch_range("f", view, begin=0, until=3.0, is_wanted=lambda: next(answers))
    assert unwanted.asked == [1 << 18] and unwanted.calls[0] == "close"


def test_a_large_index_has_ten_minutes_for_each_gibibyte_and_ten_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = list[float]()
    monkeypatch.setattr(source, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(
        source, "_read_into", lambda response, view, *, until, is_wanted: [given.append(until)]
    )
    state, _ = state_of(Answer(200, length=str(1 << 24)))
    state.content("index.json", at_most=1 << 30)
    assert given == [100.0 + 600.0 + 600.0 / 64]


def test_why_a_connection_failed_is_told_by_its_cause_in_few_words() -> None:
    error = ProtocolError("Connection aborted")
    error.__cause__ = ConnectionResetError(104, "reset " + "x" * 400)
    state, _ = state_of(error)
    with pytest.raises(SourceFailed) as failed:
        state.content("f", at_most=1)
    assert str(failed.value).startswith("[Errno 104] reset xxx") and len(str(failed.value)) == 300
    state, _ = state_of(OSError())
    with pytest.raises(SourceFailed, match=r"^OSError$"):
        state.content("f", at_most=1)
    broken = Answer(206, b"x" * 10)
    broken.error = ReadTimeoutError(None, None, "Read timed out.")  # type: ignore[arg-type]
    state, _ = state_of(broken)
    with pytest.raises(SourceFailed, match="Read timed out"):
        state.fetch_range("f", memoryview(bytearray(10)), begin=0, until=time.monotonic() + 60)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://127.0.0.1:8", ("127.0.0.1", 8)),
        ("http://[::1]:29600/", ("::1", 29600)),
        ("http://a.example.org:1", ("a.example.org", 1)),
        (THROUGH_RELAY, ("through-a-relay.invalid", 443)),
        ("https://127.0.0.1:8", None),
        ("http://127.0.0.1", None),
        ("http://:8", None),
        ("http://127.0.0.1:8/x", None),
        ("http://127.0.0.1:88888", None),
    ],
)
def test_an_address_of_a_source_is_a_host_and_a_port_and_nothing_else(
    url: str, place: tuple[str, int] | None
) -> None:
    origin = PeerSource(peer="a", url=url)
    if place is None:
        with pytest.raises(PeerError, match=f"^a says it serves at '{url}'"):
            _place(origin, "http")
    else:
        assert _place(origin, "http") == place


def test_without_certificates_nothing_is_asked_of_another_machine() -> None:
    calls: list[Any] = []
    elsewhere: Any = Recorder("socket", calls, getpeername=("192.0.2.1", 5))
    origin = PeerSource(peer="a", url=THROUGH_RELAY, reach=lambda: elsewhere)
    with pytest.raises(SourceFailed, match=r"192\.0\.2\.1 is another machine"):
        ServedState(origin, "ab12", TRUST).content("f", at_most=1)
    methods = [method for _, method, *_ in calls]
    assert "close" in methods and "sendall" not in methods
    assert calls[0] == ("socket", "settimeout", source.STALL_S), "who reads from it waits no longer"


def test_why_a_peer_is_reached_neither_way_is_told_of_both() -> None:
    def dial() -> Any:
        raise NewConnectionError(None, "nobody is there")  # type: ignore[arg-type]

    def reach() -> Any:
        raise PeerRefused("it does not wait here")

    way = _Way(PeerSource(peer="a", url="http://127.0.0.1:8", reach=reach), "127.0.0.1", TRUST)
    with pytest.raises(OSError, match=r"nobody is there; it does not wait here$"):
        way.connect(dial)
    elsewhere = replace(TRUST, dials_loopback=False)
    way = _Way(PeerSource(peer="a", url="http://127.0.0.1:8", reach=reach), "127.0.0.1", elsewhere)
    with pytest.raises(OSError, match=r"^it cannot be dialled; it does not wait here$"):
        way.connect(dial)


def test_a_name_that_is_none_is_told_by_its_beginning() -> None:
    state, _ = state_of(Answer(200, b'{"name": "' + b"x" * 2000 + b'"}'))
    with pytest.raises(SourceFailed) as failed:
        state.read_description()
    assert str(failed.value) == "'" + "x" * 199


def test_an_answer_that_is_not_wanted_any_more_ends_the_reading_of_a_whole_file() -> None:
    answer = Answer(200, b"x" * 100)
    state, _ = state_of(answer)
    with pytest.raises(SourceFailed, match=r"^f came too slowly, or is not wanted any more$"):
        state.content("f", at_most=100, is_wanted=lambda: False)
    assert answer.asked == [] and answer.calls == ["close"]
