"""Whom a dashboard answers, what it says and when, and what an action leaves behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.operate.dashboard.written_run import WrittenRun

from bloomery.config.load import dump_recipe, load_recipe
from bloomery.errors import BloomeryError, StorageError
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.dashboard import actions, viewed_run
from bloomery.operate.dashboard import server as server_module
from bloomery.operate.dashboard.access import POLICY, AccessGate, AccessRules, new_token, read_token
from bloomery.operate.dashboard.actions import ActionRequest, carry_out
from bloomery.operate.dashboard.server import DashboardServer, RunPoller
from bloomery.operate.dashboard.viewed_run import ViewedRun
from bloomery.operate.exclusions import Exclusions
from bloomery.operate.submission import keep_submission, submission_of

TOKEN = "0123456789abcdef"


def test_a_gate_passes_what_is_no_request_and_refuses_in_json() -> None:
    passed: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        passed.append((scope["type"], send))

    async def send(message: Any) -> None:
        passed.append(message)

    gate = AccessGate(application, AccessRules(token=TOKEN, is_private=True))
    asyncio.run(gate({"type": "lifespan"}, None, send))  # type: ignore[arg-type]
    assert passed == [("lifespan", send)]
    scope = {"type": "http", "path": "/api/runs", "headers": [(b"host", b"localhost")]}
    asyncio.run(gate(scope, None, send))  # type: ignore[arg-type]
    start, body = passed[1:]
    assert (start["type"], start["status"]) == ("http.response.start", 401)
    assert body == {"type": "http.response.body", "body": b'{"told": "a token is wanted"}'}
    assert start["headers"] == [
        (b"content-type", b"application/json"),
        (b"content-security-policy", POLICY.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cross-origin-resource-policy", b"same-origin"),
    ]
    for part in ("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "script-src 'self';"):
        assert part in POLICY


def test_a_token_that_is_not_there_is_told_and_a_new_one_is_another_each_time(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Reading the token"):
        read_token(tmp_path / "none")
    assert len({new_token() for _ in range(5)}) == 5 and len(new_token()) == 32


class Asked(SimpleNamespace):
    """A request with a JSON body."""

    def __init__(
        self, body: bytes = b"", headers: dict[str, str] | None = None, scheme: str = "http"
    ) -> None:
        own = {"content-type": "application/json", **(headers or {})}
        raw = [(name.encode(), value.encode()) for name, value in own.items()]
        super().__init__(
            body=body, headers=own, scope={"headers": raw}, client=SimpleNamespace(host="10.0.0.9"),
            url=SimpleNamespace(scheme=scheme),
        )  # fmt: skip

    async def stream(self) -> Any:
        yield self.body


def test_a_browser_gets_its_cookie_for_the_token_and_waits_for_a_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []

    async def sleep(seconds: float) -> None:
        paused.append(seconds)

    monkeypatch.setattr(server_module.asyncio, "sleep", sleep)
    server = DashboardServer([tmp_path], AccessRules(token=TOKEN))

    def session(body: Any, scheme: str = "http") -> Any:
        asked: Any = Asked(json.dumps(body).encode(), scheme=scheme)
        return asyncio.run(server._session(asked))

    for wrong in ({"token": "x"}, {"token": 5}, {}, [TOKEN], None):
        answer = session(wrong)
        assert (answer.status_code, json.loads(answer.body)) == (403, {"told": "this is not the token"})
        assert "set-cookie" not in answer.headers
    assert paused == [0.2] * 5
    for scheme in ("http", "https"):
        answer = session({"token": TOKEN}, scheme)
        cookie = f"bloomery-dashboard={TOKEN}; HttpOnly; Path=/; SameSite=strict"
        secure = "; Secure" if scheme == "https" else ""
        assert answer.headers["set-cookie"] == cookie + secure
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    assert len(paused) == 5


def test_an_action_is_told_with_who_asked_and_a_refusal_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    def carry(rundir: RunDirectory, request: ActionRequest, *, by: str) -> str:
        done.append((rundir.path, request, by))
        if request.what:
            raise BloomeryError("no", remedy="yes")
        return "done"

    paused: list[float] = []

    async def sleep(seconds: float) -> None:
        paused.append(seconds)

    monkeypatch.setattr(server_module, "carry_out", carry)
    monkeypatch.setattr(server_module.asyncio, "sleep", sleep)
    server = DashboardServer([tmp_path / "a", tmp_path / "b"], AccessRules(token=TOKEN, has_actions=True))

    def act(body: Any, token: str = TOKEN) -> tuple[int, str]:
        asked: Any = Asked(json.dumps(body).encode(), {"authorization": f"Bearer {token}"})
        answer = asyncio.run(server._action(asked))
        return answer.status_code, json.loads(answer.body)["told"]

    save = ActionRequest(run=1, action="save", why="w")
    assert act({"run": 1, "action": "save", "why": "w"}) == (200, "done")
    assert done == [(tmp_path / "b", save, "dashboard, from 10.0.0.9")]
    assert act({"run": 1, "action": "save", "what": "x"})[0] == 400 and len(done) == 2
    assert act({"run": 2, "action": "save"}) == (404, "there is no such run") and paused == []
    assert act({"run": 1, "action": "save", "wy": ""})[1].startswith("not an action: ")
    assert act({"run": 1, "action": "save"}, "x") == (403, "the token is missing or wrong; nothing was done")
    assert act({"nonsense": 1}, "x")[0] == 403, "who has no token learns nothing of actions"
    assert paused == [0.2] * 2 and len(done) == 2
    nobody: Any = Asked(b'{"run": 0, "action": "save"}', {"authorization": f"Bearer {TOKEN}"})
    nobody.client = None
    assert asyncio.run(server._action(nobody)).status_code == 200
    assert done[2:] == [(tmp_path / "a", ActionRequest(run=0, action="save"), "dashboard, from somewhere")]
    off = DashboardServer([tmp_path], AccessRules(token=TOKEN))
    assert asyncio.run(off._action(nobody)).status_code == 403 and len(done) == 3


def test_a_stream_tells_of_a_change_once_an_interval_and_of_a_death_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = DashboardServer([tmp_path], AccessRules(), interval_s=8.0)
    (run,), clock, told = server.runs, [100.0], list[float]()

    async def sleep(seconds: float) -> None:
        assert seconds == 2.0
        clock[0] += seconds
        if clock[0] in (102.0, 104.0, 112.0):
            run.reader.version += 1
        if clock[0] == 114.0:
            run.died = (3,)
            run.reader.version += 1
        server.is_closing = lambda: clock[0] >= 150.0

    monkeypatch.setattr(server_module.asyncio, "sleep", sleep)
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def look() -> None:
        async for chunk in server._change_stream():
            assert chunk == (b"retry: 1000\n\n" if not told else b"event: change\ndata: {}\n\n")
            told.append(clock[0])

    asyncio.run(look())
    # The change at 112 is told with the death; after 15 s of silence a page is told that it is older.
    assert told == [100.0, 108.0, 114.0, 130.0, 146.0] and server._viewers == 0


def test_the_runs_are_answered_with_their_versions_and_whether_there_are_actions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = DashboardServer([tmp_path, tmp_path], AccessRules(token=TOKEN, has_actions=True))
    server.runs[1].reader.version = 5
    for number, run in enumerate(server.runs):
        monkeypatch.setattr(run, "summary", lambda number=number: f"s{number}")
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=lambda: 0.0, time=lambda: 77.5))
    asked: Any = SimpleNamespace(url=SimpleNamespace(path="/api/runs", query=""))
    answer = asyncio.run(server._runs(asked))
    told = {"runs": ["s0", "s1"], "versions": [0, 5], "time": 77.5, "actions": True}
    assert json.loads(answer.body) == told
    assert (answer.media_type, answer.headers["cache-control"]) == ("application/json", "no-store")


def test_a_poller_reads_all_runs_though_one_fails_and_rests_where_none_is_behind() -> None:
    done: list[str] = []

    def run_of(name: str, *, fails: bool = False) -> Any:
        def poll() -> None:
            done.append(name)
            if fails:
                raise ValueError(name)

        reader = SimpleNamespace(poll=poll, is_behind=False, rundir=SimpleNamespace(path=name))
        return SimpleNamespace(reader=reader, check_ranks=lambda: done.append(f"{name} ranks"))

    runs = [run_of("a", fails=True), run_of("b")]
    poller = RunPoller(runs, poll_s=1.5)
    rests: list[float] = []

    def wait(seconds: float) -> None:
        rests.append(seconds)
        runs[1].reader.is_behind = len(rests) == 1
        if len(rests) == 2:
            poller._closed.set()
        runs[1].check_ranks = lambda: setattr(runs[1].reader, "is_behind", False)

    poller._closed.wait = wait  # type: ignore[assignment,method-assign]
    poller._run()
    assert rests == [1.5, 1.5] and done == ["a", "b", "b ranks", "a", "b"]


def test_the_answers_of_a_run_are_bounded_and_the_last_asked_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewed, asked = ViewedRun(tmp_path), list[Any]()

    def drawn(reader: Any, names: Any, **more: Any) -> list[Any]:
        asked.append((names, more))
        return ["x" * 96]

    monkeypatch.setattr(viewed_run, "curves", drawn)
    query: dict[str, Any] = {"axis": "time", "begin": 1.0, "end": 2.0, "points": 3}
    answer = viewed.curves(["a"], **query)
    assert asked == [(["a"], query)] and answer == msgspec.json.encode(["x" * 96])
    for change in ({"axis": "step"}, {"begin": 0.0}, {"end": 9.0}, {"points": 4}):
        viewed.curves(["a"], **{**query, **change})
    viewed.curves(["b"], **query)
    assert len(asked) == 6 and viewed.curves(["a"], **query) is answer
    monkeypatch.setattr(viewed_run, "_MOST_ANSWER_BYTES", 300)
    viewed.curves(["c"], **query)
    assert [names for names, *_ in viewed._answers] == [("a",), ("b",), ("c",)]


def test_what_an_action_did_is_told_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = WrittenRun(tmp_path / "run")
    stop = carry_out(run.rundir, ActionRequest(run=0, action="stop", what="x ", why="w"), by="ann")
    assert stop.startswith("The run saves and stops after its present step.")
    assert "w" in run.rundir.control("stop").read_text() and not run.rundir.control("save").exists()
    save = carry_out(run.rundir, ActionRequest(run=0, action="save"), by="ann")
    assert save == "The run saves after its present step." and run.rundir.control("save").exists()
    first, second = read_journal(run.rundir.operations)
    kept = ("event", "incarnation", "step", "action", "what", "why", "by")
    assert [first[name] for name in kept] == ["request", 0, 0, "stop", "x", "w", "ann"]
    assert second["action"] == "save"
    most = actions.LARGEST_COUNT
    skip = ActionRequest(run=0, action="skip", what=f"0:{most}")
    assert "0 to " in carry_out(run.rundir, skip, by="ann")
    with pytest.raises(BloomeryError, match=f"{most + 1} is too much"):
        carry_out(run.rundir, ActionRequest(run=0, action="skip", what=f"0:{most + 1}"), by="ann")

    def refuse(path: Path, *, why: str) -> None:
        raise PermissionError(13, "denied")

    monkeypatch.setattr(actions, "arm", refuse)
    with pytest.raises(StorageError, match="Arming the switch"):
        carry_out(run.rundir, ActionRequest(run=0, action="save"), by="ann")
    assert len(list(read_journal(run.rundir.operations))) == 3, "what was not done is not recorded"


def test_an_excluded_node_is_kept_with_the_others_and_told_to_the_jobs_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WrittenRun(tmp_path / "run")
    recipe = load_recipe("demo", ["run.name=named"]).recipe
    run.rundir.recipe.write_text(dump_recipe(recipe))
    asked: list[Any] = []

    def tell(scheduler: Any, rundir: RunDirectory, **more: Any) -> list[str]:
        asked.append((scheduler, rundir.path, more["name"], more["nodes"]))
        return ["7", "8"]

    monkeypatch.setattr(actions, "scheduler_of", lambda section, path: ("queue", path))
    monkeypatch.setattr(actions, "exclude_in_queue", tell)
    monkeypatch.chdir(tmp_path)
    rundir = RunDirectory(Path("run"))
    first = ActionRequest(run=0, action="exclude", what=" n1", why="it\nis slow")
    assert carry_out(rundir, first, by="ann") == "n1 takes no further job of this run." and asked == []
    keep_submission(rundir, submission_of("demo", [], nproc=None))
    second = ActionRequest(run=0, action="exclude", what="n2" + "x" * 400)
    name = "n2" + "x" * 298
    told = carry_out(rundir, second, by="ann")
    assert told == f"{name} takes no further job of this run; 2 waiting jobs were told."
    assert asked == [(("queue", tmp_path / "run"), Path("run"), "named", ["n1", name])]
    node = Exclusions.of(rundir, recipe.submit).nodes()["n1"]
    assert (node.cause, node.run, node.evidence) == ("excluded by a person", "named", "it is slow")


def test_a_body_is_read_to_four_thousand_bytes_and_files_are_asked_for_anew(tmp_path: Path) -> None:
    def read(count: int) -> Any:
        asked: Any = Asked(b'"' + b"x" * (count - 2) + b'"')
        return asyncio.run(server_module._body(asked))

    assert read(4096) == "x" * 4094 and read(4097) is None
    server = DashboardServer([tmp_path], AccessRules())
    request: Any = SimpleNamespace(path_params={"name": "charts.js"})
    page, script = asyncio.run(server._page(request)), asyncio.run(server._static(request))
    told = [
        (one.status_code, one.headers["content-type"], one.headers["cache-control"]) for one in (page, script)
    ]
    assert told == [
        (200, "text/html; charset=utf-8", "no-cache"),
        (200, "text/javascript; charset=utf-8", "no-cache"),
    ]
    assert b"<html" in page.body and page.body != script.body
    request.path_params["name"] = "../access.py"
    assert asyncio.run(server._static(request)).status_code == 404
    stream = asyncio.run(server._changes(request))
    assert (stream.media_type, stream.headers["cache-control"]) == ("text/event-stream", "no-store")
    server._viewers = 256
    assert asyncio.run(server._changes(request)).status_code == 503


def test_a_viewer_is_told_once_an_interval_and_at_once_of_each_death(monkeypatch: pytest.MonkeyPatch) -> None:
    server = DashboardServer([], AccessRules(), interval_s=4.0)
    now, deaths, told = [0.0], [3.0], list[float]()

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(server_module.asyncio, "sleep", sleep)
    monkeypatch.setattr(server_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(server, "_versions", lambda: (now[0],))  # each look finds a change
    monkeypatch.setattr(server, "_died", lambda: sum(now[0] >= death for death in deaths))
    monkeypatch.setattr(server, "is_closing", lambda: now[0] > 12.0)

    async def view() -> None:
        told.extend([now[0] async for event in server._change_stream() if event.startswith(b"event")])

    asyncio.run(view())
    assert told == [3.0, 7.0, 11.0]


def test_the_tables_are_made_again_where_the_run_changed_while_they_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewed, made = ViewedRun(tmp_path, interval_s=3600.0), list[int]()

    def changing(reader: Any) -> dict[str, int]:
        made.append(reader.version)
        if len(made) == 1:
            reader.version += 1
        return {"rounds": len(made)}

    monkeypatch.setattr(viewed_run, "rounds", changing)
    told = [json.loads(viewed.tables())["rounds"]["rounds"] for _ in range(3)]
    assert told == [1, 2, 2] and made == [0, 1]


def test_curves_that_were_drawn_while_the_run_changed_are_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewed, drawn = ViewedRun(tmp_path), list[int]()

    def changing(reader: Any, names: Any, **more: Any) -> list[int]:
        drawn.append(reader.version)
        reader.version += len(drawn) == 1
        return [len(drawn)]

    monkeypatch.setattr(viewed_run, "curves", changing)
    query: dict[str, Any] = {"axis": "step", "begin": None, "end": None, "points": 10}
    assert [viewed.curves(["loss"], **query) for _ in range(3)] == [b"[1]", b"[2]", b"[2]"]


def test_the_answer_that_was_made_anew_is_forgotten_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewed = ViewedRun(tmp_path)
    monkeypatch.setattr(viewed_run, "curves", lambda reader, names, **more: ["x" * 96])
    monkeypatch.setattr(viewed_run, "_MOST_ANSWER_BYTES", 250)
    query: dict[str, Any] = {"axis": "step", "begin": None, "end": None, "points": 10}
    viewed.curves(["a"], **query)
    viewed.curves(["b"], **query)
    viewed.reader.version += 1
    for name in "ac":
        viewed.curves([name], **query)
    assert [names for names, *_ in viewed._answers] == [("a",), ("c",)]


def test_the_versions_that_are_answered_are_as_new_as_the_summaries_or_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A viewer whose summary is older than the version asks once more."""
    server = DashboardServer([tmp_path], AccessRules())
    (run,) = server.runs

    def summary() -> dict[str, int]:
        made = {"version": run.reader.version}
        run.reader.version += 1
        return made

    monkeypatch.setattr(run, "summary", summary)
    asked: Any = SimpleNamespace(url=SimpleNamespace(path="/api/runs", query=""))
    told = json.loads(asyncio.run(server._runs(asked)).body)
    assert (told["runs"], told["versions"], told["actions"]) == ([{"version": 0}], [1], False)
