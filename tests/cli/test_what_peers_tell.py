"""What `peer`, `peer probe` and `coordinate --status` hand on and print of peers, links and rounds."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.test_demo_steps import Recorder
from tests.cli.test_peer_probe import FAR, to
from tests.protocol import example

from bloomery.cli import coordinate_status, peer, peer_probe
from bloomery.cli.ranks import RankRange
from bloomery.cli.train import PARENT, PREPARED
from bloomery.config.elastic import ElasticSection
from bloomery.coordination.decide import FORGOTTEN
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import Position
from bloomery.errors import ConfigError, StoppedBySwitch, TrainingFailed
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import arm
from bloomery.transport.bandwidth_probe import MAX_LOAD, ProbeSizes

RATES = {"a": {"b": 1_200.4, "c": 90.0}, "b": {"c": 500.0}, "c": {"a": 80.0}}


def rows_of(text: str) -> list[list[str]]:
    """Return the words of each line that is not blank and no rule of a table."""
    return [line.split() for line in text.split("\n") if line and "─" not in line]


def test_links_are_told_from_here_between_the_peers_and_around_the_ring() -> None:
    links: Any = {**to(b=1_234.4), "c": "connection refused"}
    assert rows_of(peer_probe._links_text("a", ["a", "b", "c"], RATES, links, ["a", "b", "c"])) == [
        ["from", "'a',", "now:"],
        ["to", "Mbit/s", "round", "trip,", "ms"],
        ["b", "1,234", "100.0"],
        ["c:", "connection", "refused"],
        ["between", "the", "peers,", "as", "they", "measured", "it,", "Mbit/s:"],
        ["sends", "a", "b", "c"],
        ["a", "-", "1,200", "90"],
        ["b", "-", "-", "500"],
        ["c", "80", "-", "-"],
        ["order", "of", "the", "ring:", "a", "→", "b", "→", "c", "→", "a"],
        ["the", "slowest", "hop", "is", "c", "→", "a:", "80", "Mbit/s"],
    ]
    assert peer_probe._links_text("a", ["a"], {"a": {}}, {}, ["a"]) == (
        "from 'a', now:\nno other peer is in the run"
    )
    unmeasured = peer_probe._links_text("a", ["a", "b"], {}, to(b=1.0), ["a", "b"])
    assert unmeasured.endswith("order of the ring: a → b → a")


def test_numbers_of_connections_are_compared_peer_by_peer() -> None:
    some = [(1, {**FAR[0][1], "c": "timed out"}), *FAR[1:]]
    some = [(streams, {**links, "c": links.get("c", "refused")}) for streams, links in some]
    assert rows_of(peer_probe.comparison_text(some)) == [
        ["Mbit/s", "from", "here,", "by", "the", "number", "of", "connections:"],
        ["to", "1", "2", "4", "8"],
        ["a", "263", "500", "870", "918"],
        ["b", "900", "920", "930", "940"],
        ["c", "-", "-", "-", "-"],
        ["c:", "refused"],
        ["c:", "timed", "out"],
        [
            "elastic.streams=4",
            "is",
            "nearly",
            "as",
            "fast",
            "over",
            "the",
            "slowest",
            "link",
            "as",
            "any",
            "number",
            "here.",
        ],
    ]
    assert peer_probe.comparison_text([(1, {}), (2, {})]) == "No other peer is in the run."
    assert peer_probe._comparison_json(some[:1]) == {
        "streams": {"1": {"a": {"mbit_s": 263, "rtt_ms": 100.0}, "b": {"mbit_s": 900, "rtt_ms": 100.0},
                          "c": {"why": "timed out"}}},
        "worthwhile": 1,
    }  # fmt: skip
    assert peer_probe.fewest_streams([(1, to(a=90)), (2, to(a=100))]) == 1, "nine tenths are enough"
    assert peer_probe.fewest_streams([(1, to(a=89.9)), (2, to(a=100))]) == 2
    assert peer_probe._counts("8,1,4,1") == [1, 4, 8] and peer_probe._counts("64") == [64]


def test_the_picture_of_links_has_each_rate_and_frames_the_hops_of_the_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    drawing = Recorder(calls)
    rectangles: list[Any] = []
    module = SimpleNamespace(use=drawing.use, pyplot=drawing)
    monkeypatch.setitem(sys.modules, "matplotlib", module)
    patches = SimpleNamespace(Rectangle=lambda *given, **style: rectangles.append(given))
    monkeypatch.setitem(sys.modules, "matplotlib.patches", patches)  # type: ignore[arg-type]
    peer_probe.draw_links(["a", "b", "c"], RATES, ["a", "c", "b"], Path("links.svg"))
    texts = {call[1:4] for call in calls if call[0] == "text"}
    assert texts == {(1, 0, "1,200"), (2, 0, "90"), (2, 1, "500"), (0, 2, "80")}
    assert rectangles == [((1.5, -0.5), 1, 1), ((0.5, 1.5), 1, 1), ((-0.5, 0.5), 1, 1)]
    assert ("set_yticks", range(3), ["a", "b", "c"], {}) in calls
    (settings,) = [call[1] for call in calls if call[0] == "set"]
    assert (settings["xlabel"], settings["ylabel"]) == ("receives", "sends")
    assert ("savefig", Path("links.svg"), {}) in calls and calls[-1][0] == "close"


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let peer a of a run of three ask for its links; returns what was measured."""
    asked: list[Any] = []
    members = {name: SimpleNamespace(member=example.member(peer=name)) for name in ("c", "a", "b")}
    rates = {**RATES, "gone": {"a": 1.0}}
    snapshot = SimpleNamespace(members=members, rates=rates)

    @contextmanager
    def opened(value: Any) -> Any:
        yield value

    access = SimpleNamespace(
        run="night", peer="a", etcd=lambda: opened("etcd"), trust=lambda etcd: f"trust in {etcd}"
    )
    monkeypatch.setattr("bloomery.agent.assemble.access_of", lambda recipe, sources, environment: access)
    monkeypatch.setattr(
        "bloomery.coordination.run_view.RunView",
        lambda etcd, keys: opened(SimpleNamespace(snapshot=snapshot)),
    )

    def measure(access: Any, snapshot: Any, trust: Any, sizes: ProbeSizes) -> Any:
        asked.append((trust, sizes))
        return to(b=100.0 * sizes.streams)

    monkeypatch.setattr(peer_probe, "_measure", measure)
    return asked


def test_a_probe_measures_with_the_recipes_connections_or_with_those_to_compare(
    probed: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(peer_probe, "draw_links", lambda *given: drawn.append(given))
    picture = tmp_path / "links.svg"
    words = ["diloco-internet", "elastic.streams=3"]
    assert peer_probe.run([*words, "--json", "--picture", str(picture)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.pop("order")[0] in "abc"
    assert told == {"peer": "a", "now": {"b": {"mbit_s": 300.0, "rtt_ms": 100.0}}, "rates": RATES}
    assert probed == [("trust in etcd", ProbeSizes(streams=3))]
    ((names, rates, order, path),) = drawn
    assert (names, rates, sorted(order), path) == (["a", "b", "c"], RATES, ["a", "b", "c"], picture)
    assert peer_probe.run(words) == 0 and len(drawn) == 1
    assert capsys.readouterr().out.startswith("from 'a', now:\n")
    probed.clear()
    assert peer_probe.run([*words, "--streams", "1,2", "--json"]) == 0
    assert [sizes for _, sizes in probed] == [
        ProbeSizes(streams=count, most=MAX_LOAD, enough_s=2.0)
        for count in (1, 2)
    ]  # fmt: skip
    told = json.loads(capsys.readouterr().out)
    assert told["worthwhile"] == 2 and list(told["streams"]) == ["1", "2"]


def test_the_ring_that_a_probe_tells_is_the_fastest_of_what_the_peers_measured(
    probed: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"a": {"b": 80.0, "c": 900.0}, "b": {"a": 700.0, "c": 60.0}, "c": {"a": 50.0, "b": 800.0}}
    members = {name: SimpleNamespace(member=example.member(peer=name)) for name in "abc"}

    @contextmanager
    def view(etcd: str, keys: Any) -> Any:
        yield SimpleNamespace(snapshot=SimpleNamespace(members=members, rates=rates))

    monkeypatch.setattr("bloomery.coordination.run_view.RunView", view)
    assert peer_probe.run(["diloco-internet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["order"] == ["a", "c", "b"]


class Connections:
    """Connections of which that to c is refused and that to d ends without a word."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self.made, self.probes, self.is_closed = (given, options), list[Any](), False

    def probe(self, contact: Any, *, sizes: Any, deadline_s: float) -> Any:
        self.probes.append((contact.peer, contact.incarnation, contact.addresses, sizes, deadline_s))
        if contact.peer == "c":
            raise OSError("connection refused")
        if contact.peer == "d":
            raise TimeoutError
        return "measured"

    def close(self) -> None:
        self.is_closed = True


def test_each_other_peer_is_probed_and_who_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from bloomery.transport import connection_manager
    from bloomery.transport.trust import Trust

    made: list[Connections] = []
    monkeypatch.setattr(
        connection_manager, "ConnectionManager",
        lambda *given, **options: made.append(Connections(*given, **options)) or made[0],
    )  # fmt: skip
    names = ("d", "b", "a", "c")
    members = {
        name: SimpleNamespace(
            member=example.member(peer=name, incarnation=f"{name}1", addresses=(f"{name}:1",))
        )
        for name in names
    }
    access: Any = SimpleNamespace(run="night", peer="a", timeouts=SimpleNamespace(dialing="turns", tcp="tcp"))
    sizes, trust = ProbeSizes(streams=2), object.__new__(Trust)
    snapshot: Any = SimpleNamespace(members=members)
    links = peer_probe._measure(access, snapshot, trust, sizes)
    assert links == {"b": "measured", "c": "connection refused", "d": "TimeoutError"}
    (connections,) = made
    (identity, given), options = connections.made
    assert (identity.run, identity.peer, len(identity.incarnation), given) == ("night", "a", 16, trust)
    assert options == {"listen": (), "turns": "turns", "patience": "tcp"} and connections.is_closed
    assert connections.probes == [(name, f"{name}1", (f"{name}:1",), sizes, 30.0) for name in "bcd"]


def member(name: str, **changed: Any) -> Any:
    usual = {"round": -1, "digest": "", "addresses": (), "serves": ()}
    return SimpleNamespace(member=example.member(peer=name, **usual | changed))


def test_a_run_is_shown_with_what_each_peer_holds_and_does(capsys: pytest.CaptureFixture[str]) -> None:
    digest = "0123456789abcdef" * 4
    snapshot = RunSnapshot(
        revision=77, epoch=9, forgotten=True, peers_ahead=("oslo", "lyon"),
        commits={
            4: example.commit(round=4, epoch=8, members=("a", "b"), digest=digest,
                              position=Position(consumed=12_345), left_out={"c": "it was late"}),
        },
        members={
            "d": member("d"), "c": member("c", round=3), "b": member("b", addresses=("h:1", "h:2")),
            "a": member("a", round=4, digest=digest, serves=("s:1",)),
        },
        standing=SimpleNamespace(shares=SimpleNamespace(shares={"a": 1, "b": 1, "c": 1})),  # type: ignore[arg-type]
        readies={"a": 1, "b": 1}, dones={"a": 1},  # type: ignore[dict-item]
    )  # fmt: skip
    content = coordinate_status._content("night", snapshot)
    assert (content["known"], content["revision"], content["round"]) == (True, 77, 5)
    assert content["commit"] == {
        "round": 4, "epoch": 8, "members": ["a", "b"], "digest": digest, "consumed": 12_345,
        "left_out": {"c": "it was late"}, "rewind_to": None, "why": "",
    }  # fmt: skip
    assert content["members"][0] == {
        "peer": "a", "round": 4, "digest": digest, "addresses": [], "serves": ["s:1"], "share": True,
        "ready": True, "done": True,
    }  # fmt: skip
    coordinate_status._print(content)
    assert rows_of(capsys.readouterr().out) == [
        ["run", "night:", "round", "5", "is", "under", "way,", "epoch", "9"],
        ["committed:", "round", "4,", "12,345", "samples,", "a,", "b"],
        ["left", "out:", "c:", "it", "was", "late"],
        f"{FORGOTTEN} (told by oslo, lyon).".split(),
        ["peer", "holds", "state", "now", "address"],
        ["a", "round", "4", "0123456789ab", "reduced", "-"],
        ["b", "nothing", "-", "ready", "h:1"],
        ["c", "round", "3", "-", "at", "its", "share", "-"],
        ["d", "nothing", "-", "waits", "-"],
    ]
    nobody = coordinate_status._content("night", RunSnapshot(epoch=2))
    assert nobody["known"] and nobody["commit"] is None and nobody["attempt"] is None
    coordinate_status._print(nobody)
    assert capsys.readouterr().out.endswith("epoch 2\nno peer is listed\n")
    assert not coordinate_status._content("night", RunSnapshot())["known"]


def test_a_run_that_went_back_says_why_and_who_is_in_its_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    commit = example.commit(round=4, members=(), position=Position(consumed=7), rewind_to=2, why="a spike")
    attempt = SimpleNamespace(attempt=example.attempt(members=("b", "a")))
    snapshot = RunSnapshot(commits={4: commit}, tried=attempt, forgotten=True)  # type: ignore[arg-type]
    content = coordinate_status._content("night", snapshot)
    assert (content["commit"]["rewind_to"], content["commit"]["why"]) == (2, "a spike")
    assert content["attempt"] == ["b", "a"] and content["known"] and content["peers_ahead"] == []
    coordinate_status._print(content)
    told = capsys.readouterr().out.splitlines()
    assert told[1:] == ["committed: round 4, 7 samples, a spike", FORGOTTEN, "no peer is listed"]
    nobody = example.commit(round=4, members=())
    coordinate_status._print(coordinate_status._content("night", RunSnapshot(commits={4: nobody})))
    assert "committed: round 4, 0 samples, nobody's part" in capsys.readouterr().out
    assert coordinate_status._content("night", RunSnapshot(members={"a": member("a")}))["known"]


def test_a_peer_starts_its_ranks_with_its_agents_socket_and_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    access = SimpleNamespace(run="night", peer="oslo")
    ending = SimpleNamespace(why="all is done", failed=False)
    monkeypatch.setattr("bloomery.agent.assemble.access_of", lambda recipe, sources, environment: access)
    monkeypatch.setattr(
        "bloomery.agent.assemble.assemble_agent",
        lambda recipe, access, rundir, stack: started.append(rundir) or "agent",
    )
    monkeypatch.setattr("bloomery.transport.listener.raise_descriptor_limit", lambda: started.append("limit"))
    monkeypatch.setattr(peer, "_log_lines", lambda: started.append("log"))
    monkeypatch.setattr(peer, "lead", lambda agent, start: (start("/socket"), ending))
    monkeypatch.setattr(
        peer, "run_ranks",
        lambda command, share, *, environment: started.append((command, share, environment)) or 5,
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    words = ["diloco-internet", "train.global_batch=8", "environment.variables=['A_B=1']"]
    assert peer.run([*words, "--nproc", "2", "--plain", "--fallback"]) == 5
    *first, rundir, (command, share, environment) = started
    assert (first, rundir) == (["log", "limit"], RunDirectory(Path("runs/night-oslo")))
    own = ["--run", "runs/night-oslo", "--plain", "--fallback"]
    assert command[1:] == ["-m", "bloomery", "train", *words, *own]
    assert share == RankRange(count=2, world=2)
    assert (
        environment.items()
        >= {PARENT: "/socket", "BLOOMERY_PEER": "oslo", "A_B": "1", PREPARED: "own"}.items()
    )
    assert "ended: all is done" in capsys.readouterr().out
    started.clear()
    assert peer.run([*words, "run.seed=1", "run.seed=2", "--run", "mine"]) == 5
    assert "note: run.seed is given 2 times on the command line" in capsys.readouterr().err
    assert started[2] == RunDirectory(Path("mine")) and started[3][0][-2:] == ["--run", "mine"]
    assert started[3][1] == RankRange(count=1, world=1)
    started.clear()
    arm(RunDirectory(Path("mine")).create().control("stop"), why="")
    with pytest.raises(StoppedBySwitch, match="Nothing was trained") as stopped:
        peer.run([*words, "--run", "mine"])
    assert stopped.value.remedy == "`bloomery stop mine --disarm` lets the peer go on."
    with pytest.raises(TrainingFailed, match="3 ranks"):
        peer.run([*words, "parallel.tensor=2", "optim.name=adamw", "--nproc", "3"])
    with pytest.raises(ConfigError, match=r"model\.heads"):
        peer.run([*words, "model.heads=7"])
    assert not started


def test_a_peer_logs_what_it_does_to_its_standard_error_and_is_checked_with_its_data_degree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr("logging.basicConfig", lambda **given: made.append(given))
    peer._log_lines()
    assert (made[0]["level"], made[0]["stream"]) == (logging.INFO, sys.stderr)

    def check(recipe: Any, sources: Any, *, data_degree: int | None) -> None:
        made.append(data_degree)
        raise ConfigError([])  # enough is known

    monkeypatch.setattr("bloomery.config.validate.check_recipe", check)
    for count in ("1", "3"):
        with pytest.raises(ConfigError):
            peer.run(["diloco-internet", "--nproc", count])
    assert made[1:] == [1, 3]


def test_timeouts_are_explained_for_a_recipe_or_for_the_default_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    entries = [
        SimpleNamespace(name="lease", seconds=12_345.6, origin="3 × beat", why="A peer is gone."),
        SimpleNamespace(name="beat", seconds=0.5, origin="given", why="It lives."),
    ]
    monkeypatch.setattr("bloomery.agent.timeouts.table", lambda section: asked.append(section) or entries)
    assert peer.run(["explain"]) == 0
    assert capsys.readouterr().out == (
        "lease          1.235e+04 s  = 3 × beat\n      A peer is gone.\n"
        "beat               0.5 s  = given\n      It lives.\n"
    )
    assert peer.run(["explain", "diloco-internet", "elastic.inner_steps=77", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [vars(entry) for entry in entries]
    assert asked[0] == ElasticSection() and asked[1].inner_steps == 77


def test_parts_of_a_peers_command_get_the_words_after_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(peer, "_train", lambda options: asked.append(options.run) or 3)
    assert peer.run(["my.toml", "--run", "explain"]) == 3 and asked.pop() == "explain"
    with pytest.raises(SystemExit):
        peer.run([])
    monkeypatch.setattr(peer_probe, "run", lambda words: asked.append(words) or 4)
    assert peer.run(["probe", "my.toml", "--json"]) == 4 and asked == [["my.toml", "--json"]]
