"""Who may ask the dashboard, and how often: tokens, names of this machine, bodies and viewers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.operate.dashboard.written_run import WrittenRun

from bloomery.errors import BloomeryError
from bloomery.operate.dashboard.access import AccessGate, AccessRules, bearer, read_token
from bloomery.operate.dashboard.server import _MOST_BODY, DashboardServer, _body

TOKEN = "0123456789abcdef"


def asked(rules: AccessRules, path: str, headers: dict[bytes, bytes]) -> tuple[int, dict[bytes, bytes]]:
    """Return status and headers of what a gate before an application that answers 200 says."""
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": list({b"host": b"localhost:9", **headers}.items())}
    asyncio.run(AccessGate(application, rules)(scope, None, send))  # type: ignore[arg-type]
    return sent[0]["status"], dict(sent[0]["headers"])


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {}, 200),
        ("/static/dashboard.js", {}, 200),
        ("/api/session", {}, 200),
        ("/api/sessions", {}, 401),
        ("/api/runs", {}, 401),
        ("/metrics", {}, 401),
        ("/statics", {}, 401),
        ("/api/runs", {b"authorization": b"bearer  0123456789abcdef "}, 200),
        ("/api/runs", {b"authorization": b"Basic 0123456789abcdef"}, 401),
        ("/api/runs", {b"cookie": b"a=b; bloomery-dashboard=0123456789abcdef"}, 200),
        ("/api/runs", {b"cookie": b"bloomery-dashboard=0123456789abcdeF"}, 401),
        ("/", {b"host": b"evil.example"}, 421),
    ],
)
def test_a_private_server_shows_the_page_and_nothing_of_a_run_without_its_token(
    path: str, headers: dict[bytes, bytes], status: int
) -> None:
    answered, sent = asked(AccessRules(token=TOKEN, is_private=True), path, headers)
    assert answered == status and b"default-src 'none'" in sent[b"content-security-policy"]
    assert sent[b"x-content-type-options"] == b"nosniff" and sent[b"referrer-policy"] == b"no-referrer"
    assert (b"x-own" in sent) == (status == 200)


@pytest.mark.parametrize(
    ("host", "knows"),
    [
        (b"localhost", True), (b"localhost:8000", True), (b"127.0.0.1:80", True), (b"[::1]", True),
        (b"[::1]:8000", True), (b"localhost.evil.example", False), (b"evil.example:80", False), (b"", False),
    ],
)  # fmt: skip
def test_a_server_of_this_machine_answers_to_its_own_names(host: bytes, knows: bool) -> None:
    assert AccessRules().knows_host({b"host": host}) == knows
    assert AccessRules(hosts=()).knows_host({b"host": host})


def test_no_token_lets_nobody_in_and_none_is_wanted_of_a_public_reader() -> None:
    assert not AccessRules(is_private=True).may_read({b"authorization": b"Bearer "})
    assert AccessRules(token=TOKEN).may_read({}) and not AccessRules(token=TOKEN).is_token("0")
    assert bearer({b"authorization": b"0123456789abcdef"}) == "" == bearer({})
    assert not AccessRules(token=TOKEN, is_private=True).may_read({b"cookie": b"\xff=;;=[]"})


@pytest.mark.parametrize(
    ("text", "is_good"), [("x" * 16, True), ("x" * 15, False), ("é" * 20, False), ("a b" * 9, False)]
)
def test_a_token_is_one_long_word(tmp_path: Path, text: str, is_good: bool) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(f"{text}\n")
    if is_good:
        assert read_token(path) == text
    else:
        with pytest.raises(BloomeryError, match="one word of at least 16") as refused:
            read_token(path)
        assert f"openssl rand -hex 24 > {path}" in refused.value.remedy


def body_of(*chunks: bytes, kind: str = "application/json; charset=utf-8") -> Any:
    async def stream() -> Any:
        for chunk in chunks:
            yield chunk

    return asyncio.run(_body(SimpleNamespace(headers={"content-type": kind}, stream=stream)))  # type: ignore[arg-type]


def test_the_body_of_a_request_is_short_json_and_nothing_else() -> None:
    assert body_of(b'{"a":', b" 1}") == {"a": 1}
    assert body_of(b'"' + b"x" * (_MOST_BODY - 2) + b'"') == "x" * (_MOST_BODY - 2)
    assert body_of(b'"' + b"x" * (_MOST_BODY - 1), b'"') is None
    assert body_of(b"{}", kind="text/plain") is None and body_of(b"{") is None


def test_viewers_are_counted_and_too_many_are_refused(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.operate.dashboard import server as server_module

    monkeypatch.setattr(server_module, "_MOST_VIEWERS", 2)
    server = DashboardServer([run.rundir.path], AccessRules(), interval_s=0.02)

    async def look() -> list[int]:
        streams = []
        for _ in range(2):
            answer = await server._changes(None)  # type: ignore[arg-type]
            streams.append(answer.body_iterator)  # type: ignore[attr-defined]
            assert await anext(streams[-1]) == b"retry: 1000\n\n"
        counts = [(await server._changes(None)).status_code]  # type: ignore[arg-type]
        change = asyncio.ensure_future(anext(streams[0]))
        await asyncio.sleep(0.0)  # until it has seen the run as it was
        server.runs[0].reader.version += 1
        assert b"event: change" in await change
        await streams[0].aclose()
        counts.append((await server._changes(None)).status_code)  # type: ignore[arg-type]
        server.is_closing = lambda: True
        assert [chunk async for chunk in streams[1]] == []
        return [*counts, server._viewers]

    assert asyncio.run(look()) == [503, 200, 0]
