"""What simulations, exercises with faults, preflights and syncs say, do with their options, and end with."""

from __future__ import annotations

import json
import os
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.in_process import status_of
from tests.cli.test_ckpt_command import RECIPE

from bloomery.chaos.audit import RunAudit
from bloomery.chaos.faults import Fault
from bloomery.chaos.scenario import InjectedFault, ScenarioOutcome, ScenarioSettings
from bloomery.cli import chaos, dashboard, drill, preflight, simulate, sync, top
from bloomery.config.trial import WITHIN_ITS_DIRECTORY
from bloomery.errors import StorageError, TrainingFailed
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.drill.allocation import DrillNodes
from bloomery.operate.drill.exercise import DrillResult
from bloomery.operate.drill.faults import DrillFault
from bloomery.operate.drill.phases import RecoveryPhases
from bloomery.operate.node_checks import NodeFinding
from bloomery.plan.simulate import GoodputForecast
from bloomery.plan.simulate.scenario import TRAINING, load_scenario

SCENARIO = load_scenario("bloom-176b", ["run.days=10", "checkpoint.every_minutes=90"])
FORECAST = GoodputForecast(
    scenario=SCENARIO,
    lives=4,
    goodput=0.9,
    low=0.875,
    high=0.935,
    hours={TRAINING: 216.0, "queue": 18.0, "saves": 6.0, "repair": 0.0, "lost work": 12.0},
    events={"failures": 5.0, "saves": 150.0},
    first=SimpleNamespace(),  # type: ignore[arg-type]
)


def test_a_forecast_has_its_interval_its_causes_by_size_and_the_best_time_between_saves() -> None:
    text = simulate._forecast_text(FORECAST)
    assert text.startswith(
        "bloom-176b: 10 days, 4 lives\n\ngoodput 90.00%, 95% sure between 87.50% and 93.50%"
    )
    places = [text.index(words) for words in (TRAINING, "queue", "lost work", "saves  ")]
    assert places == sorted(places) and "repair" not in text
    assert "216.0  90.00%" in text and "18.0   7.50%" in text and "150.0" in text
    assert SCENARIO.checkpoint is not None
    save_s = SCENARIO.checkpoint.blocking_s
    best = (2.0 * save_s * 48.0 * 3600.0) ** 0.5 / 60.0
    assert f"A failure each 48.0 h and {save_s:g} s a save" in text
    assert f"save each {best:.0f} minutes (Young), here 90." in text
    assert simulate._advice(replace(FORECAST, events={})) == []
    assert "no interval" in simulate._goodput_text(replace(FORECAST, lives=1))


def test_a_sweep_names_the_best_value_and_the_three_largest_causes() -> None:
    other = replace(FORECAST, goodput=0.95, lives=1, hours={**FORECAST.hours, "queue": 0.0, "repair": 3.0})
    text = simulate._sweep_text("a.b", [("7", FORECAST), ("9", other)])
    lines = text.splitlines()
    assert lines[0].split() == ["a.b", "goodput", "±", "(95%)", "lost", "work", "queue", "saves"]
    assert lines[2].split() == ["7", "90.00%", "3.00%", "5.00%", "7.50%", "2.50%"]
    assert lines[3].split()[:3] == ["9", "95.00%", "–"] and lines[-1] == "best: a.b=9"
    told = simulate._as_json(other, "a.b", "9")
    assert told["sweep"] == {"a.b": "9"} and told["goodput_low"] is None is told["goodput_high"]
    told = simulate._as_json(FORECAST, "", "")
    assert (told["goodput_low"], told["goodput_high"], told["days"], told["lives"]) == (0.875, 0.935, 10.0, 4)
    assert "sweep" not in told


def refused(parse: Callable[[str], object], *texts: str) -> None:
    for text in texts:
        with pytest.raises(ArgumentTypeError, match=text.replace("+", r"\+") or "''"):
            parse(text)


def test_numbers_of_exercises_are_taken_within_their_bounds() -> None:
    assert simulate._lives("100000") == 100_000 and simulate._sweep("a.b = 1, 2,") == ("a.b", ("1", "2"))
    refused(simulate._lives, "0", "100001", "x")
    refused(simulate._sweep, "a=1", "a.b=", "a.b")
    assert top._seconds("0.1") == 0.1 and dashboard._seconds("3600") == 3600.0
    for seconds in (top._seconds, dashboard._seconds):
        refused(seconds, "0.09", "3601", "x", "nan")
    assert dashboard._port("65535") == 65_535 and dashboard._port("0") == 0
    refused(dashboard._port, "65536", "-1", "x")
    assert sync._minutes("0.5") == 0.5
    refused(sync._minutes, "0", "-1", "1e6", "nan", "x")
    assert chaos._kinds("slow, cut") == ("slow", "cut")
    refused(chaos._kinds, "meteor")


def outcome(**changed: Any) -> ScenarioOutcome:
    faults = [
        InjectedFault(fault=Fault(after_s=1.0, kind="cut", peer="b"), at_s=2.5, done=done)
        for done in (True, True, False)
    ]
    given = {"statuses": {"a": 0, "b": 0}, "injected": faults, "leftover": (), **changed}
    return ScenarioOutcome(seconds=12.5, commits=(), bytes_between={"a": (3_000_000, 500_000)}, **given)


COUNTS = RunAudit(rounds=7, attempts=9, peers=2.5, consumed=600, computed=800, loss=2.3456, mistakes=())


def test_the_summary_of_an_exercise_tells_what_was_lost_left_behind_and_wrong() -> None:
    text = chaos._summary(outcome(leftover=["process 9"]), replace(COUNTS, mistakes=("a sample twice",)))
    assert text.splitlines() == [
        "ended after 12.5 s: 7 rounds in 9 attempts, 2.5 peers a round",
        "600 samples committed of 800 computed: 25.0% lost; loss 2.346",
        "2 faults injected, 1 found no process",
        "  a: exit status 0, 3.5 MB over its link",
        "LEFT BEHIND: process 9",
        "WRONG: a sample twice",
    ]
    assert "no faults" in chaos._summary(outcome(injected=[]), replace(COUNTS, loss=None))
    told = chaos._as_json(outcome(), COUNTS)
    assert told["faults"] == [
        {"at_s": 2.5, "kind": "cut", "peer": "b", "done": it} for it in (True, True, False)
    ]
    assert told["bytes_between"] == {"a": [3_000_000, 500_000]} and told["lost_share"] == 0.25


@pytest.mark.parametrize(
    ("ended", "counts", "status"),
    [
        ({}, COUNTS, 0),
        ({"statuses": {"a": 0, "b": 3}}, COUNTS, 1),
        ({"leftover": ["process 9"]}, COUNTS, 1),
        ({}, replace(COUNTS, mistakes=("a sample twice",)), 1),
    ],
)
def test_an_exercise_gets_its_options_and_ends_well_only_where_nothing_is_wrong(
    ended: dict[str, Any], counts: RunAudit, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[ScenarioSettings] = []
    monkeypatch.setattr(
        "bloomery.chaos.scenario.run_scenario",
        lambda settings, watch: got.append(settings) or outcome(**ended),
    )
    monkeypatch.setattr("bloomery.chaos.audit.audit", lambda commits, journals, *, samples: counts)
    words = (
        "--peers 3 --nproc 2 --rate 80mbit --rtt 30ms --loss 2% --minutes 5 --seed 9 --faults 6 --back 1.5"
    )
    given = ["diloco-internet", "run.name=mine", *words.split(), "--kinds", "slow"]
    given += ["--directory", str(tmp_path), "--json"]
    assert chaos.chaos(given) == status
    (settings,) = got
    assert (settings.recipe, settings.peers, settings.ranks, settings.deadline_s) == (
        "diloco-internet",
        3,
        2,
        300,
    )
    assert settings.overrides == ("run.name=mine", "elastic.peers=3") and settings.directory == tmp_path
    assert settings.run == "mine"
    assert settings.shape.rate == 10_000_000 and settings.shape.delay == pytest.approx(0.015)
    assert settings.shape.loss == pytest.approx(0.02)
    assert len(settings.faults) == 6 and {fault.kind for fault in settings.faults} == {"slow"}
    assert settings.seed == 9 and settings.back_s == 1.5
    assert chaos.simulate_internet([*given[:1], "--directory", str(tmp_path)]) == status
    assert got[1].faults == () and got[1].deadline_s == 3600 and got[1].peers == 4


def test_an_exercise_has_a_directory_of_its_own_where_none_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    got: list[ScenarioSettings] = []
    monkeypatch.setattr("tempfile.mkdtemp", lambda *, prefix: str(tmp_path / f"{prefix}1"))
    monkeypatch.setattr(
        "bloomery.chaos.scenario.run_scenario", lambda settings, watch: got.append(settings) or outcome()
    )
    monkeypatch.setattr("bloomery.chaos.audit.audit", lambda commits, journals, *, samples: COUNTS)
    assert chaos.simulate_internet([]) == 0
    own = tmp_path / "bloomery-scenario-1"
    assert got[0].directory == own and f"prints is in {own}/logs\n" in capsys.readouterr().out


def test_links_are_told_by_both_directions_and_journals_by_their_newest_step(tmp_path: Path) -> None:
    options = Namespace(rate=25_000_000.0, rtt=0.05, loss=0.001)
    assert chaos._link_text(options) == "200 Mbit/s, 50 ms round trip, 0.1% loss"
    assert chaos._link_text(Namespace(rate=0.0, rtt=0.0, loss=0.0)).startswith("no limit of rate")
    path = tmp_path / "j.jsonl"
    assert chaos._newest_step(path) == "starts"
    with Journal(path) as journal:
        for step in (3, 4):
            journal.write("step", incarnation=1, step=step, loss=2.0 + step)
        journal.write("save", incarnation=1, step=9)
    with path.open("a") as file:
        file.write('{"event": "st')
    assert chaos._newest_step(path) == "step 4 loss 6.000"
    said: list[str] = []
    printer = chaos._ProgressPrinter(tmp_path, ["a"], said.append)
    printer.watch(1.0, outcome().injected[:1])
    printer.watch(2.0, outcome().injected)
    assert len([line for line in said if "cut" in line]) == 3 and said[-1].endswith("no such process now")
    assert len([line for line in said if "starts" in line]) == 1, "every few seconds"


def drilled(*words: str) -> Namespace:
    return drill._parse(["demo", *words])


def test_faults_of_a_drill_come_in_rounds_or_by_the_seed() -> None:
    kill, hang = DrillFault("kill"), DrillFault("hang")
    kinds = ("--faults", "kill,hang")
    assert [*drill._faults(drilled(*kinds, "--rounds", "2"))] == [kill, hang, kill, hang]
    drawn = [*drill._faults(drilled(*kinds, "--random", "9", "--seed", "3"))]
    assert len(drawn) == 9 and {*drawn} == {kill, hang}
    assert drawn == [*drill._faults(drilled(*kinds, "--random", "9", "--seed", "3"))]
    assert drawn != [*drill._faults(drilled(*kinds, "--random", "9", "--seed", "4"))]


def test_a_drill_keeps_its_exclusions_to_itself_and_refuses_what_it_cannot_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, job = RunDirectory(Path("runs/x")), DrillNodes(count=2, is_allocation=True)
    words = drill._launch_words(drilled("a.b=1", "--nproc", "3"), run, DrillNodes())
    own = ["--run", "runs/x", "--nproc", "3", "--supervise", "--fallback"]
    assert words == ["demo", "a.b=1", *WITHIN_ITS_DIRECTORY, *own]
    assert "submit.exclusions=" in drill._launch_words(drilled(), run, job)
    disk, cut = [DrillFault.DISK], [DrillFault.CUT]
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(TrainingFailed, match="only root may mount"):
        drill._refuse_what_needs_root(disk)
    drill._refuse_what_needs_root(cut)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    drill._refuse_what_needs_root(disk)
    check = drill._refuse_what_is_of_one_machine
    for faults, options, nodes, told in (
        ([], drilled(), job, "2 nodes, and a scratch directory"),
        (disk, drilled("--run", "runs/x"), job, "on one machine"),
        (cut, drilled("--nproc", "1"), DrillNodes(), "A single rank has no connections"),
    ):
        with pytest.raises(TrainingFailed, match=told):
            check(faults, options, nodes)
    check(cut, drilled("--run", "runs/x", "--nproc", "1"), job)
    check([*disk, *cut], drilled("--nproc", "2"), DrillNodes())
    drill._refuse_existing(RunDirectory(tmp_path))
    with pytest.raises(TrainingFailed, match="holds a run already"):
        drill._refuse_existing(RunDirectory(tmp_path).create())
    assert (drill._seconds(None), drill._seconds(2.345)) == ("-", "2.3")


@pytest.mark.parametrize(
    ("survived", "status"), [([True, True], 0), ([True, False], 1), ([False, True], 1), ([], 1)]
)
def test_a_drill_ends_well_only_where_each_fault_was_survived(
    survived: list[bool],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = [
        DrillResult(fault=DrillFault.KILL, survived=it, phases=RecoveryPhases(noticed=2.0)) for it in survived
    ]
    words = ["demo", "train.micro_batch=2", "--faults", "kill"]
    monkeypatch.setattr("bloomery.operate.drill.exercise.exercise", lambda plan, *, say: iter(results))
    assert drill.run([*words, "--run", str(tmp_path / "run"), "--json"]) == status
    assert json.loads(capsys.readouterr().out)["survived"] == sum(survived)


def finding(host: str, *, is_bad: bool) -> NodeFinding:
    return NodeFinding(host=host, what="is slow", remedy="Look at it.", is_bad=is_bad)


@pytest.mark.parametrize(
    ("findings", "words", "status", "released"),
    [
        ([], (), 0, []),
        ([finding("n2", is_bad=True)], (), 0, []),
        ([finding("n1", is_bad=False), finding("n2", is_bad=True)], (), 1, []),
        ([finding("n1", is_bad=True), finding("n1", is_bad=False)], ("--long",), 67, []),
        ([finding("n1", is_bad=False)], ("--long",), 1, ["n1"]),
        ([], ("--long",), 0, ["n1"]),
        ([], ("--release", "n7"), 0, ["n7"]),
        ([], ("--release", "other"), 1, ["other"]),
    ],
)
def test_a_preflight_ends_with_what_is_wrong_with_this_node_and_lets_back_what_passed(
    findings: list[NodeFinding],
    words: tuple[str, ...],
    status: int,
    released: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []
    queue: list[str] = []

    def release(host: str) -> str | None:
        asked.append(host)
        return None if host == "other" else host

    held = SimpleNamespace(release=release, nodes=lambda: ["n9"])
    monkeypatch.setattr("bloomery.operate.exclusions.Exclusions.of", lambda rundir, section: held)
    monkeypatch.setattr(preflight, "_tell_queue", lambda *given: queue.append("told"))
    facts = SimpleNamespace(host="n1")
    monkeypatch.setattr(preflight, "_measured", lambda *given: facts)
    monkeypatch.setattr(preflight, "_of_all_nodes", lambda rundir, own: {"n1": own, "n2": None})
    monkeypatch.setattr(preflight, "_findings", lambda nodes, loaded: findings)
    shown: list[int] = []
    monkeypatch.setattr(preflight, "_show", lambda nodes, found, *, as_json: shown.append(len(found)))
    assert preflight.run(["demo", "--run", str(tmp_path), *words]) == status
    assert asked == released and len(queue) == len([host for host in released if host != "other"])
    assert shown == ([] if "--release" in words else [len(findings)])
    assert ("held are: n9" in capsys.readouterr().out) == (released == ["other"])


def test_the_first_node_of_a_job_alone_shows_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    held = SimpleNamespace(release=lambda host: None, nodes=list)
    monkeypatch.setattr("bloomery.operate.exclusions.Exclusions.of", lambda rundir, section: held)
    monkeypatch.setattr(preflight, "_measured", lambda *given: SimpleNamespace(host="n2"))
    monkeypatch.setattr(preflight, "_findings", lambda nodes, loaded: [finding("n1", is_bad=True)])
    monkeypatch.setattr(preflight, "_show", lambda nodes, found, *, as_json: shown.append(list(nodes)))
    for first, lists in (("n1", []), ("n2", [["n2", "n3"]])):
        nodes = dict.fromkeys([first, "n2", "n3"])
        monkeypatch.setattr(preflight, "_of_all_nodes", lambda rundir, own, nodes=nodes: nodes)
        assert preflight.run(["demo", "--run", str(tmp_path)]) == 0, "another node is bad"
        assert shown == lists


def test_a_preflight_takes_the_name_of_its_node_from_the_launcher_unless_it_was_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = SimpleNamespace(release=lambda host: None, nodes=list)
    monkeypatch.setattr("bloomery.operate.exclusions.Exclusions.of", lambda rundir, section: held)
    monkeypatch.setattr("bloomery.operate.launcher.node_name", lambda environment: "n7")
    for given, name in (("", "n7"), ("mine", "mine")):
        monkeypatch.setenv("BLOOMERY_HOST", given)
        if not given:
            monkeypatch.delenv("BLOOMERY_HOST")
        preflight.run(["demo", "--run", str(tmp_path), "--release", "other"])
        assert os.environ["BLOOMERY_HOST"] == name


def test_what_is_sent_is_told_where_there_is_something_or_it_was_asked_for_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(count: int, branches: list[str], **options: Any) -> str:
        sent: Any = SimpleNamespace(send_new=lambda: SimpleNamespace(count=count, bytes=1500 * count))
        publisher: Any = SimpleNamespace(hold=lambda: None, publish_held=lambda: branches)
        given = {"json": False, "once": False, "place": "s3://b/x", **options}
        sync._look(sent, publisher if branches else None, Namespace(**given))
        return capsys.readouterr().out

    assert told(0, []) == "" and "0 B in 0 files" in told(0, [], once=True)
    assert "s3://b/x: 3.0 kB in 2 files\n" in told(2, [])
    assert told(0, ["step-5"]).endswith("0 B in 0 files; published step-5\n")
    facts = json.loads(told(2, ["step-5"], json=True))
    assert facts == {"files": 2, "bytes": 3000, "published": ["step-5"]}
    own = tmp_path / "own"
    (own / "checkpoints").mkdir(parents=True)
    sync._refuse_run_of_its_own(tmp_path)
    with pytest.raises(StorageError, match="holds a run of its own"):
        sync._refuse_run_of_its_own(own)


def test_the_place_of_a_sync_is_the_one_given_or_the_recipes(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path).create()
    with pytest.raises(StorageError, match="Nobody says where"):
        sync._parse([str(rundir.path)])
    rundir.recipe.write_text(f'{RECIPE}[sync]\nplace = "hf:me/x"\ncheckpoints = true\n')
    chosen = sync._parse([str(rundir.path)])
    assert chosen.place == "hf:me/x" and chosen.checkpoints and chosen.every == 60.0
    chosen = sync._parse([str(rundir.path), "s3://b/y"])
    assert chosen.place == "s3://b/y" and not chosen.checkpoints and chosen.every == 60.0
    assert status_of("sync", str(rundir.path), "s3://b/y", "--checkpoints", "--once") == 2


def test_a_line_of_top_has_a_bar_of_twenty_and_what_was_saved() -> None:
    given = {
        "step": 1200,
        "steps": 5000,
        "done": 0.24,
        "step_s": 0.5,
        "left_s": None,
        "loss": 2.5,
        "held_out": 2.75,
    }
    summary: Any = SimpleNamespace(**given, saved_step=900, ranks=4, device="H200", written=0.0)
    assert top._progress(summary, 80) == f"[{'#' * 5}{'.' * 15}] 24.0%, step 1,200/5,000, 0.5 s/step"
    assert top._saved(summary) == "loss 2.5000, held out 2.7500, saved at step 900, 4 × H200"
    bare = SimpleNamespace(
        **{**vars(summary), "loss": None, "held_out": None, "saved_step": None, "ranks": 0}
    )
    assert top._saved(bare) == "loss not finite, never saved"
    unknown = SimpleNamespace(**{**vars(summary), "done": None, "steps": 0, "step_s": None})
    assert top._progress(unknown, 80) == "step 1,200"
