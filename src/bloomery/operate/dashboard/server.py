"""The HTTP server of `bloomery dashboard`: the page, its JSON data, server-sent events, and actions."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from bloomery.errors import BloomeryError
from bloomery.operate.dashboard.access import COOKIE, AccessGate, AccessRules, bearer
from bloomery.operate.dashboard.actions import ActionRequest, carry_out
from bloomery.operate.dashboard.curves import MOST_NAMES, MOST_POINTS, Axis
from bloomery.operate.dashboard.prometheus import CONTENT_TYPE, metrics_text
from bloomery.operate.dashboard.viewed_run import INTERVAL_S, ViewedRun
from bloomery.operate.ledger.figures import PlannedRun

log = logging.getLogger(__name__)

STATIC = {
    "dashboard.css": "text/css; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "tables.js": "text/javascript; charset=utf-8",
    "pictures.js": "text/javascript; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "uplot/uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "uplot/uPlot.min.css": "text/css; charset=utf-8",
    "uplot/LICENSE": "text/plain; charset=utf-8",
}
KEEPALIVE_S, GUESS_PAUSE_S = 15.0, 0.2
CHECKS_PER_INTERVAL = 4
"""The checks for changes per interval of a stream; after a silence, or a death, it sends them at once."""
_MOST_VIEWERS, _MOST_BODY = 256, 4096


class RunPoller:
    """Reads what is new of each run, from a thread, until it is closed."""

    def __init__(self, runs: Sequence[ViewedRun], *, poll_s: float) -> None:
        self._runs, self._poll_s = runs, poll_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dashboard poller", daemon=True)

    def start(self) -> RunPoller:
        """Begin to read; returns self."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()
        self._thread.join(5 * self._poll_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            for run in self._runs:
                try:
                    run.reader.poll()
                    run.check_ranks()
                except Exception:
                    # The edge of a thread: one run that cannot be read must not hide the others.
                    log.exception("%s could not be read", run.reader.rundir.path)
            if not any(run.reader.is_behind for run in self._runs):
                self._closed.wait(self._poll_s)


class SharedAnswer(NamedTuple):
    """An answer for several viewers, perhaps still being computed. versions: of the runs at the request."""

    versions: tuple[int, ...]
    asked: float
    answer: asyncio.Future[bytes]


class DashboardServer:
    """Answers the requests about some runs. `application` is what an ASGI server runs.

    plan: the forecast of a run, which is shown beside it.
    is_closing: says whether the server ends, so that the streams to its viewers end too.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        rules: AccessRules,
        *,
        interval_s: float = INTERVAL_S,
        plan: PlannedRun | None = None,
    ) -> None:
        self.runs = [ViewedRun(path, interval_s=interval_s, plan=plan) for path in paths]
        self._rules, self._interval_s = rules, interval_s
        self._viewers = 0
        self._answers: dict[str, SharedAnswer] = {}
        self.is_closing: Callable[[], bool] = lambda: False
        self._files = {name: _static_file(name) for name in STATIC}
        self._index = _static_file("index.html")
        routes = [
            Route("/", self._page),
            Route("/static/{name:path}", self._static),
            Route("/api/runs", self._runs),
            Route("/api/curves", self._curves),
            Route("/api/panels", self._panels),
            Route("/api/changes", self._changes),
            Route("/api/session", self._session, methods=["POST"]),
            Route("/api/action", self._action, methods=["POST"]),
            Route("/metrics", self._metrics),
        ]
        self.application = AccessGate(Starlette(routes=routes), rules)

    async def _page(self, request: Request) -> Response:
        return Response(
            self._index, media_type="text/html; charset=utf-8", headers={"Cache-Control": "no-cache"}
        )

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files:
            return _told("there is no such file", 404)
        return Response(self._files[name], media_type=STATIC[name], headers={"Cache-Control": "no-cache"})

    async def _runs(self, request: Request) -> Response:
        def answer() -> bytes:
            summaries = [run.summary() for run in self.runs]
            # a viewer whose summary is older than what was read asks once more
            content = {
                "runs": summaries,
                "versions": self._versions(),
                "time": time.time(),
                "actions": self._rules.has_actions,
            }
            return msgspec.json.encode(content)

        return await self._shared(request, answer)

    async def _curves(self, request: Request) -> Response:
        query = request.query_params
        run, axis = self._run_of(query.get("run", "")), query.get("axis", "step")
        names = query.getlist("name")[:MOST_NAMES]
        try:
            begin, end = (_finite(query[key]) if key in query else None for key in ("begin", "end"))
            points = max(10, min(MOST_POINTS, int(query.get("points", "1000"))))
        except ValueError:
            return _told("begin, end and points are numbers", 400)
        if run is None or axis not in get_args(Axis):
            return _told("there is no such run or axis", 404)
        wanted = cast(Axis, axis)
        return await self._shared(
            request, lambda: run.curves(names, axis=wanted, begin=begin, end=end, points=points)
        )

    async def _panels(self, request: Request) -> Response:
        run = self._run_of(request.query_params.get("run", ""))
        if run is None:
            return _told("there is no such run", 404)
        return await self._shared(request, run.tables)

    async def _shared(self, request: Request, make: Callable[[], bytes]) -> Response:
        """Answer with what `make` returns in a thread. All who ask the same at once get one answer.

        Viewers are told of a change together, so they ask together: each would take a thread otherwise.
        """
        question, versions, now = (
            f"{request.url.path}?{request.url.query}",
            self._versions(),
            time.monotonic(),
        )
        known = self._answers.get(question)
        if (
            known is None
            or known.versions != versions
            or now - known.asked > self._interval_s / CHECKS_PER_INTERVAL
        ):
            is_new = now - self._interval_s / CHECKS_PER_INTERVAL
            self._answers = {key: kept for key, kept in self._answers.items() if kept.asked > is_new}
            known = SharedAnswer(versions, now, asyncio.ensure_future(run_in_threadpool(make)))
            self._answers[question] = known
        return _json(await asyncio.shield(known.answer))

    async def _metrics(self, request: Request) -> Response:
        return Response(await run_in_threadpool(metrics_text, self.runs), media_type=CONTENT_TYPE)

    async def _changes(self, request: Request) -> Response:
        if self._viewers >= _MOST_VIEWERS:
            return _told("too many viewers", 503)
        return StreamingResponse(
            self._change_stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    async def _change_stream(self) -> AsyncIterator[bytes]:
        """Yield an event when a run has changed, at most once an interval, and a comment to keep it open."""
        self._viewers += 1
        try:
            yield b"retry: 1000\n\n"
            seen, sent = self._versions(), time.monotonic()
            known = self._died()
            while not self.is_closing():
                await asyncio.sleep(self._interval_s / CHECKS_PER_INTERVAL)
                versions, now, died = self._versions(), time.monotonic(), self._died()
                if versions != seen and (now - sent >= self._interval_s or died != known):
                    seen, sent, known = versions, now, died
                    yield b"event: change\ndata: {}\n\n"
                elif now - sent > KEEPALIVE_S:
                    sent = now
                    yield b"event: change\ndata: {}\n\n"  # a run that is silent has changed too: it is older
        finally:
            self._viewers -= 1

    async def _session(self, request: Request) -> Response:
        """Give a browser the cookie with which it may read, for the token."""
        body = await _body(request)
        token = body.get("token") if isinstance(body, dict) else None
        if not isinstance(token, str) or not self._rules.is_token(token):
            await asyncio.sleep(GUESS_PAUSE_S)
            return _told("this is not the token", 403)
        answer = _told("welcome", 200)
        answer.set_cookie(
            COOKIE, token, httponly=True, samesite="strict", secure=request.url.scheme == "https"
        )
        return answer

    async def _action(self, request: Request) -> Response:
        """Carry out one action; the token must come in the header, so that no foreign page can send it."""
        if not self._rules.has_actions:
            return _told("actions are off; start the dashboard with --actions", 403)
        if not self._rules.is_token(bearer(dict(request.scope["headers"]))):
            await asyncio.sleep(GUESS_PAUSE_S)
            return _told("the token is missing or wrong; nothing was done", 403)
        try:
            wanted = msgspec.convert(await _body(request), ActionRequest)
        except msgspec.ValidationError as wrong:
            return _told(f"not an action: {wrong}", 400)
        run = self._run_of(str(wanted.run))
        if run is None:
            return _told("there is no such run", 404)
        by = f"dashboard, from {request.client.host if request.client else 'somewhere'}"
        try:
            return _told(await run_in_threadpool(carry_out, run.reader.rundir, wanted, by=by), 200)
        except BloomeryError as refused:
            return _told(str(refused), 400)

    def _run_of(self, number: str) -> ViewedRun | None:
        numbered = {str(place): run for place, run in enumerate(self.runs)}
        return numbered.get(number)

    def _died(self) -> tuple[tuple[int, ...], ...]:
        return tuple(run.died for run in self.runs)

    def _versions(self) -> tuple[int, ...]:
        return tuple(run.reader.version for run in self.runs)


def _finite(text: str) -> float:
    """Return a number of an address. Raises ValueError for what is none, nan or infinite."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _static_file(name: str) -> bytes:
    return resources.files("bloomery.operate.dashboard").joinpath("static", name).read_bytes()


async def _body(request: Request) -> Any:  # Any: parsed JSON; None for anything else
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        return None
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_BODY:
            return None
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})


def _told(text: str, status: int) -> Response:
    return JSONResponse({"told": text}, status_code=status, headers={"Cache-Control": "no-store"})
