"""What the server answers, to whom, and what an action leaves behind."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from starlette.requests import Request
from tests.operate.dashboard.served import Served, served
from tests.operate.dashboard.written_run import WrittenRun, healed_run, wait_until

from bloomery.cli import main
from bloomery.cli.dashboard import _parse, _rules
from bloomery.config.convert import dump_recipe
from bloomery.config.load import load_recipe
from bloomery.coordination.certificates import AUTHORITY, init_certificates, server_certificates
from bloomery.errors import BloomeryError
from bloomery.events.journal import read_journal
from bloomery.operate.dashboard import actions, prometheus
from bloomery.operate.dashboard.access import AccessRules, read_token
from bloomery.operate.dashboard.server import DashboardServer
from bloomery.operate.dashboard.viewed_run import ViewedRun
from bloomery.operate.schedulers.interface import JobState

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> WrittenRun:
    return healed_run(tmp_path_factory.mktemp("served") / "healed")


@pytest.fixture(scope="module")
def dashboard(run: WrittenRun) -> Iterator[Served]:
    with served([run.rundir.path, run.rundir.path.parent / "missing"], "--actions") as running:
        wait_until(lambda: running.json("api/runs")["runs"][0]["rows"] == 101)
        yield running


def test_the_page_loads_nothing_from_elsewhere_and_says_so_in_its_policy(dashboard: Served) -> None:
    status, page, headers = dashboard.get("")
    assert status == 200 and "://" not in page
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for name in (
        "dashboard.js",
        "charts.js",
        "tables.js",
        "dashboard.css",
        "uplot/uPlot.iife.min.js",
        "uplot/LICENSE",
    ):
        status, body, _ = dashboard.get(f"static/{name}")
        assert status == 200 and body
        assert "innerHTML" not in body or name.startswith("uplot")
    assert dashboard.get("static/../access.py")[0] == 404


def test_the_charts_are_the_published_ones() -> None:
    command = [sys.executable, str(ROOT / "tools" / "vendor_uplot.py"), "--check"]
    assert "uplot@" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_run_and_a_missing_one_are_told_beside_each_other(dashboard: Served) -> None:
    healed, missing = dashboard.json("api/runs")["runs"]
    assert (healed["step"], healed["loss"]) == (91, pytest.approx(2.0 + 4.0 / 91**0.5))
    assert "1 × rewind" in healed["night"] and "10 steps discarded" in healed["night"]
    assert missing["health"] == "bad" and "does not exist" in missing["problems"][0]
    tables = dashboard.json("api/panels?run=0")
    assert [save["step"] for save in tables["saves"]] == [50]
    assert tables["goodput"]["causes"]["rewind"]["steps_lost"] == 10


def test_odd_questions_are_refused_in_words(dashboard: Served) -> None:
    for path, status in (
        ("api/curves?run=7&name=loss", 404),
        ("api/curves?run=-1", 404),
        (f"api/curves?run={'9' * 5000}", 404),
        ("api/curves?run=0&axis=loss", 404),
        ("api/curves?run=0&points=many", 400),
        ("api/curves?run=0&name=loss&begin=nan", 400),
        ("api/panels?run=x", 404),
        ("nothing", 404),
    ):
        assert dashboard.get(path)[0] == status, path
    assert dashboard.json("api/curves?run=0&name=nothing") == []


def test_a_foreign_name_for_this_machine_is_refused(dashboard: Served) -> None:
    assert dashboard.get("api/runs", Host="evil.example:80")[0] == 421
    assert dashboard.get("api/runs", Host=f"localhost:{dashboard.port}")[0] == 200


def test_an_action_needs_the_token_and_leaves_a_control_file_and_a_record(
    dashboard: Served, run: WrittenRun
) -> None:
    save = {"run": 0, "action": "save", "why": "before\nthe move"}
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Cookie": f"bloomery-dashboard={dashboard.token}"},
    ):
        status, told, _ = dashboard.post("api/action", save, **headers)
        assert status == 403 and "nothing was done" in told
    assert not run.rundir.control("save").exists() and not run.rundir.operations.exists()
    owner = {"Authorization": f"Bearer {dashboard.token}"}
    assert dashboard.post("api/action", save, **owner)[0] == 200
    assert "before the move" in run.rundir.control("save").read_text()
    status, told, _ = dashboard.post("api/action", {"run": 0, "action": "skip", "what": "90:40"}, **owner)
    assert status == 400 and "FIRST below END" in told
    far = {"run": 0, "action": "skip", "what": f"0:{10**19}"}
    status, told, _ = dashboard.post("api/action", far, **owner)
    assert status == 400 and "is too much" in told
    assert (
        dashboard.post("api/action", {"run": 0, "action": "skip", "what": "1_000:2_000"}, **owner)[0] == 200
    )
    assert run.rundir.control("skip").read_text() == "1000:2000\n"
    for wrong in ({"run": 0, "action": "rm"}, {"run": 9, "action": "save"}, {"run": 0}, ["save"], "x" * 5000):
        assert dashboard.post("api/action", wrong, **owner)[0] in (400, 404)
    assert dashboard.post("api/action", save, **owner, **{"Content-Type": "text/plain"})[0] == 400
    records = [event for event in read_journal(run.rundir.operations) if event["event"] == "request"]
    assert [(record["action"], record["what"]) for record in records] == [
        ("save", ""),
        ("skip", "1_000:2_000"),
    ]
    wait_until(lambda: any(e["kind"] == "request" for e in dashboard.json("api/panels?run=0")["events"]))


def test_a_node_that_is_excluded_on_the_page_lets_no_earlier_one_back_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[str]] = []
    queue = SimpleNamespace(
        jobs=lambda *, name, run: [SimpleNamespace(job="7", state=JobState.PENDING)],
        exclude=lambda jobs, nodes: told.append(list(nodes)),
    )
    monkeypatch.setattr(actions, "was_submitted", lambda rundir: True)
    monkeypatch.setattr(actions, "scheduler_of", lambda section, path: queue)
    run = healed_run(tmp_path / "healed")
    run.rundir.recipe.write_text(dump_recipe(load_recipe("demo").recipe))
    for node in ("bad-1", "bad-2"):
        request = actions.ActionRequest(run=0, action="exclude", what=node, why="an ECC error")
        actions.carry_out(run.rundir, request, by="engineer")
    assert told == [["bad-1"], ["bad-1", "bad-2"]]


def test_stopping_arms_the_switch_and_excluding_quarantines_the_node(tmp_path: Path) -> None:
    run = healed_run(tmp_path / "healed")
    run.rundir.recipe.write_text(dump_recipe(load_recipe("demo").recipe))
    with served([run.rundir.path], "--actions") as dashboard:
        owner = {"Authorization": f"Bearer {dashboard.token}"}
        stop = {"run": 0, "action": "stop", "why": "maintenance"}
        assert dashboard.post("api/action", stop)[0] == 403 and not run.rundir.control("stop").exists()
        assert dashboard.post("api/action", stop, **owner)[0] == 200
        assert "maintenance" in run.rundir.control("stop").read_text()
        exclude = {"run": 0, "action": "exclude", "what": "node-17", "why": "two ECC errors"}
        status, told, _ = dashboard.post("api/action", exclude, **owner)
        assert status == 200 and "node-17 takes no further job" in told
        assert dashboard.post("api/action", {**exclude, "what": "a b;c"}, **owner)[0] == 400
    (node,) = json.loads((run.rundir.path / "exclusions.json").read_text()).items()
    assert node[0] == "node-17" and node[1]["evidence"] == "two ECC errors"
    records = [
        event["action"] for event in read_journal(run.rundir.operations) if event["event"] == "request"
    ]
    assert records == ["stop", "exclude"]


def test_others_are_served_with_tls_alone(run: WrittenRun, tmp_path: Path) -> None:
    certificates = tmp_path / "certificates"
    init_certificates(certificates, run="any", peers=(), hosts=("127.0.0.1",))
    paper = server_certificates(certificates)
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("0123456789abcdef")
    options = ("--token-file", str(token), "--tls-cert", str(paper.certificate), "--tls-key", str(paper.key))
    trusted = ssl.create_default_context(cafile=str(certificates / "coordinator" / AUTHORITY))
    with served([run.rundir.path], *options, trusted=trusted) as running:
        assert running.url.startswith("https://")
        assert running.get("api/runs")[0] == 401
        status, _, headers = running.post("api/session", {"token": "0123456789abcdef"})
        assert status == 200 and "Secure" in headers["set-cookie"]
        cookie = headers["set-cookie"].partition(";")[0]
        assert running.get("api/runs", Cookie=cookie)[0] == 200
        with pytest.raises(URLError):  # who does not know the authority is told so
            urlopen(running.url, timeout=20)
        with pytest.raises((URLError, OSError)):  # nothing is said in the clear
            urlopen(running.url.replace("https", "http"), timeout=20)


def test_metrics_are_gauges_with_the_run_as_a_label(dashboard: Served) -> None:
    status, text, headers = dashboard.get("metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = next(name for name in samples if name.startswith("bloomery_step{"))[len("bloomery_step") :]
    assert float(samples[f"bloomery_step{labels}"]) == 91
    assert float(samples[f"bloomery_learning_rate{labels}"]) == pytest.approx(1e-3)
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {name.partition("{")[0] for name in samples} <= names
    board = json.loads((ROOT / "docs" / "guides" / "grafana-dashboard.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            name = target["expr"].partition("{")[0].removeprefix("bloomery_")
            assert name in {*prometheus._OF_SUMMARY, *prometheus._OF_COLUMNS, "up", "state"}


def test_an_unchanged_run_is_answered_with_the_same_bytes(run: WrittenRun) -> None:
    viewed = ViewedRun(run.rundir.path)
    viewed.reader.read_all()
    first = viewed.curves(["loss"], axis="step", begin=None, end=None, points=50)
    assert viewed.curves(["loss"], axis="step", begin=None, end=None, points=50) is first
    for begin in range(100):
        viewed.curves(["loss"], axis="step", begin=begin, end=None, points=50)
    assert len(viewed._answers) <= 32


def test_an_address_for_others_wants_a_token_and_tls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "needs a token and TLS" in capsys.readouterr().err
    token, paper = tmp_path / "token", tmp_path / "paper.pem"
    token.write_text("0123456789abcdef")
    paper.touch()
    options = ["run", "--host", "0.0.0.0", "--token-file", str(token)]
    for readable in (0o644, 0o640, 0o604):
        token.chmod(readable)
        with pytest.raises(BloomeryError, match="Others can read") as refused:
            read_token(token)
        assert refused.value.remedy == f"chmod 600 {token}"
    token.chmod(0o600)
    rules, shown = _rules(_parse([*options, "--tls-cert", str(paper), "--tls-key", str(paper)]))
    assert rules.is_private and not rules.has_actions and shown == ""
    assert not rules.may_read({}) and not rules.may_read({b"cookie": b"bloomery-dashboard=wrong"})
    assert rules.may_read({b"authorization": b"Bearer 0123456789abcdef"})
    assert rules.may_read({b"cookie": b"bloomery-dashboard=0123456789abcdef"})
    others = b'theme={"a":1}; x=b c; bloomery-dashboard=0123456789abcdef; y=1'  # of other servers
    assert rules.may_read({b"cookie": others})


def test_a_server_with_a_token_shows_nothing_without_it(run: WrittenRun, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("0123456789abcdef")
    with served([run.rundir.path], "--token-file", str(token)) as running:
        for path in ("api/runs", "api/curves?run=0", "api/panels?run=0", "api/changes", "metrics"):
            assert running.get(path)[0] == 401, path
        assert running.get("")[0] == 200
        assert running.post("api/session", {"token": "guess"})[0] == 403
        status, _, headers = running.post("api/session", {"token": "0123456789abcdef"})
        cookie = headers["set-cookie"]
        assert status == 200 and "HttpOnly" in cookie and "SameSite=strict" in cookie
        assert running.get("api/runs", Cookie=cookie.partition(";")[0])[0] == 200
        assert (
            running.post("api/action", {"run": 0, "action": "save"}, Authorization="Bearer 0123456789abcdef")[
                0
            ]
            == 403
        )


def test_a_token_compares_as_a_whole() -> None:
    rules = AccessRules(token="0123456789abcdef", is_private=True)
    assert (
        rules.is_token("0123456789abcdef")
        and not rules.is_token("0123456789abcdeg")
        and not rules.is_token("")
    )
    assert not AccessRules().is_token("")


def test_a_port_that_is_taken_is_told(
    dashboard: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", str(tmp_path), "--port", str(dashboard.port)]) == 1
    assert "cannot be served" in capsys.readouterr().err


def test_all_who_ask_the_same_at_once_get_one_answer_until_a_run_changes(run: WrittenRun) -> None:
    server, made = DashboardServer([run.rundir.path], AccessRules(), interval_s=3600.0), []

    def make() -> bytes:
        made.append(1)
        return str(len(made)).encode()

    async def ask(query: bytes = b"run=0") -> bytes:
        scope = {"type": "http", "path": "/api/panels", "query_string": query, "headers": []}
        return bytes((await server._shared(Request(scope), make)).body)

    async def crowd() -> None:
        assert await asyncio.gather(*(ask() for _ in range(20))) == [b"1"] * 20
        assert await ask(b"run=1") == b"2" and await ask() == b"1"
        server.runs[0].reader.version += 1
        assert await ask() == b"3"

    asyncio.run(crowd())
