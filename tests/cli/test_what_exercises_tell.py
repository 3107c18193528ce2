"""Every line of simulations, of runs with injected faults and of drills, and what pictures are given."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.test_demo_steps import Recorder
from tests.cli.test_exercises import FORECAST, SCENARIO, outcome

from bloomery.chaos.faults import KINDS, Fault
from bloomery.chaos.scenario import InjectedFault
from bloomery.cli import chaos, drill, simulate
from bloomery.errors import ConfigError
from bloomery.events.heartbeat import RankBeat
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.drill.allocation import DrillNodes
from bloomery.operate.drill.exercise import DrillResult
from bloomery.operate.drill.faults import DrillFault
from bloomery.operate.drill.phases import RecoveryPhases
from bloomery.operate.timeouts import RunTimeout
from bloomery.plan.simulate.scenario import TRAINING, Life, load_scenario

LIFE = Life(
    hours={TRAINING: 200.0, "queue": 40.0, "lost work": 12.0}, events={},
    spans=((0.0, 20.0, TRAINING), (20.0, 30.0, "queue"), (30.0, 78.0, TRAINING), (78.0, 80.0, "queue")),
)  # fmt: skip
DRAWN = replace(FORECAST, first=LIFE)


def test_a_forecast_lists_what_took_time_by_size_and_what_happened() -> None:
    lines = simulate._forecast_text(FORECAST).split("\n")
    assert [line for line in lines if line and "─" not in line and "goodput" not in line][:-1] == [
        "bloom-176b: 10 days, 4 lives",
        "where the time went  hours   share",
        "training             216.0  90.00%",
        "queue                 18.0   7.50%",
        "lost work             12.0   5.00%",
        "saves                  6.0   2.50%",
        "what happened (mean of a life)  times",
        "failures                          5.0",
        "saves                           150.0",
    ]
    free = replace(SCENARIO, checkpoint=None)
    assert simulate._advice(replace(FORECAST, scenario=free)) == []


def test_a_simulation_gets_its_lives_its_seed_and_its_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[Any] = []

    def forecast(scenario: Any, *, lives: int, seed: int, done: Any) -> Any:
        done()
        asked.append((scenario.run.days, scenario.checkpoint.every_minutes, lives, seed))
        return replace(FORECAST, scenario=scenario, goodput=scenario.checkpoint.every_minutes / 100)

    drawn: list[Any] = []
    monkeypatch.setattr(simulate, "forecast", forecast)
    monkeypatch.setattr(simulate, "draw_life", lambda result, path: drawn.append((result.goodput, path)))
    monkeypatch.setattr(
        simulate, "draw_sweep", lambda key, all_of, path: drawn.append((key, len(all_of), path))
    )
    picture = tmp_path / "x.png"
    own = ["bloom-176b", "run.days=12"]
    assert simulate.run([*own, "checkpoint.every_minutes=40", "--lives", "5", "--seed", "9"]) == 0
    assert capsys.readouterr().out.startswith("bloom-176b: 12 days, 4 lives\n\ngoodput 40.00%") and not drawn
    sweep = [*own, "--sweep", "checkpoint.every_minutes=30,60"]
    assert simulate.run([*sweep, "--png", str(picture)]) == 0
    assert asked == [(12.0, 40.0, 5, 9), (12.0, 30.0, 32, 0), (12.0, 60.0, 32, 0)]
    assert capsys.readouterr().out.endswith("best: checkpoint.every_minutes=60\n")
    assert simulate.run([*sweep, "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["sweep"] for one in told] == [{"checkpoint.every_minutes": value} for value in ("30", "60")]
    assert told[0] == {
        "scenario": "bloom-176b", "days": 12.0, "lives": 4, "goodput": 0.3, "goodput_low": 0.875,
        "goodput_high": 0.935, "hours": dict(FORECAST.hours), "events": {"failures": 5.0, "saves": 150.0},
        "sweep": {"checkpoint.every_minutes": "30"},
    }  # fmt: skip
    assert simulate.run([*own, "--png", str(picture), "--json"]) == 0
    assert "sweep" not in json.loads(capsys.readouterr().out)
    every = load_scenario("bloom-176b").checkpoint
    assert every is not None
    assert drawn == [("checkpoint.every_minutes", 2, picture), (every.every_minutes / 100, picture)]


def test_shipped_scenarios_are_listed_with_their_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.run([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert simulate.run(["--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["name"] for one in told] == [line.split()[0] for line in lines]
    notes = next(one["notes"] for one in told if one["name"] == "bloom-176b")
    assert notes == load_scenario("bloom-176b").run.notes
    assert f"bloom-176b          {notes[:80]}" in lines


def test_a_picture_that_cannot_be_written_is_a_mistake_of_its_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(simulate, "draw_life", full)
    options: Any = SimpleNamespace(sweep=None, png=tmp_path / "x.png")
    with pytest.raises(ConfigError, match="cannot be written: No space left") as refused:
        simulate._draw(options, [("", FORECAST)])
    (mistake,) = refused.value.mistakes
    assert (mistake.key, mistake.value) == ("--png", f"{tmp_path}/x.png")


def test_hours_of_a_life_are_divided_among_its_days() -> None:
    assert simulate.daily_hours(LIFE, hours_a_bar=24.0) == [
        {TRAINING: 20.0, "queue": 4.0}, {"queue": 6.0, TRAINING: 18.0}, {TRAINING: 24.0},
        {TRAINING: 6.0, "queue": 2.0},
    ]  # fmt: skip


def pictured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    drawing = Recorder(calls)
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(use=drawing.use, pyplot=drawing))
    return calls


def test_the_picture_of_a_life_stacks_the_causes_of_each_day(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pictured(monkeypatch)

    class Axes(Recorder):
        def get_legend_handles_labels(self) -> tuple[list[str], list[str]]:
            return ["handle"], ["label"]

    axes = Axes(calls)
    sys.modules["matplotlib"].pyplot.subplots = lambda **options: (axes, axes)  # type: ignore[attr-defined]
    simulate.draw_life(DRAWN, Path("life.png"))
    bars = [call for call in calls if call[0] == "bar"]
    training, queue = [100 * part for part in (20 / 24, 18 / 24, 1.0, 6 / 8)], None
    assert [bar[1] for bar in bars] == [[0, 1, 2, 3]] * 2
    assert bars[0][2] == pytest.approx(training)
    queue = bars[1]
    assert queue[2] == pytest.approx([100 - share for share in training])
    assert queue[3]["bottom"] == pytest.approx(training) and bars[0][3]["bottom"] == [0.0] * 4
    shades = list(FORECAST.hours)
    assert [bar[3]["color"] for bar in bars] == [
        simulate.COLOURS[shades.index(cause)] for cause in (TRAINING, "queue")
    ]
    assert [bar[3]["label"] for bar in bars] == [f"{TRAINING} ", "queue "]
    assert {bar[3]["width"] for bar in bars} == {0.92} and {bar[3]["align"] for bar in bars} == {"edge"}
    (settings,) = [call[1] for call in calls if call[0] == "set"]
    assert settings == {
        "xlabel": "day", "ylabel": "% of the time", "ylim": (60.0, 100.0),
        "title": "bloom-176b, first of 4 lives: goodput 79.4% (12 h of the training shown were lost again)",
    }  # fmt: skip
    assert calls[-2] == ("savefig", Path("life.png"), {}) and calls[-1][0] == "close"


def test_the_picture_of_a_long_life_has_a_bar_for_several_days(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pictured(monkeypatch)
    scenario = load_scenario("bloom-176b", ["run.days=360"])
    life = Life(hours={TRAINING: 8_640.0}, events={}, spans=((0.0, 8_640.0, TRAINING),))

    class Axes(Recorder):
        def get_legend_handles_labels(self) -> tuple[list[str], list[str]]:
            return [], []

    sys.modules["matplotlib"].pyplot.subplots = lambda **options: (Axes(calls),) * 2  # type: ignore[attr-defined]
    simulate.draw_life(replace(FORECAST, scenario=scenario, first=life), Path("life.png"))
    (bar,) = [call for call in calls if call[0] == "bar"]
    assert bar[1] == list(range(0, 360, 3)) and bar[3]["width"] == pytest.approx(2.76)
    (settings,) = [call[1] for call in calls if call[0] == "set"]
    assert settings["title"].endswith("goodput 100.0%") and settings["ylim"] == (85.0, 100.0)


def test_the_picture_of_a_sweep_has_the_interval_of_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pictured(monkeypatch)
    single = replace(FORECAST, lives=1, goodput=0.5)
    simulate.draw_sweep("a.b", [("7", FORECAST), ("9", single)], Path("sweep.png"))
    (bars,) = [call for call in calls if call[0] == "errorbar"]
    assert bars[1:3] == ([0, 1], [90.0, 50.0])
    assert bars[3]["yerr"] == [pytest.approx([2.5, 0.0]), pytest.approx([3.5, 0.0])]
    assert ("set_xticks", [0, 1], ["7", "9"], {}) in calls
    assert ("set", {"xlabel": "a.b", "ylabel": "goodput (%)", "title": "bloom-176b: 95% intervals"}) in calls
    assert calls[-2:] == [("savefig", Path("sweep.png"), {}), ("close", {})]


def test_faults_of_an_exercise_are_scheduled_as_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(chaos, "schedule", lambda **given: asked.append(given) or "faults")
    monkeypatch.setattr(chaos, "_run", lambda options, **given: asked.append(given) or 3)
    words = "--peers 2 --faults 7 --seed 5 --kinds cut,slow --gap 1.5 --longest 2.5 --back 0"
    assert chaos.chaos(["demo", *words.split()]) == 3
    assert chaos.chaos([]) == 3
    two, four = chaos.peer_names(2), chaos.peer_names(4)
    assert len(two) == 2 and len(four) == 4
    assert asked == [
        {"seed": 5, "peers": two, "faults": 7, "mean_gap_s": 1.5, "longest_s": 2.5, "kinds": ("cut", "slow")},
        {"faults": "faults", "seed": 5, "back_s": 0.0},
        {"seed": 0, "peers": four, "faults": 20, "mean_gap_s": 5.0, "longest_s": 8.0, "kinds": tuple(KINDS)},
        {"faults": "faults", "seed": 0, "back_s": 3.0},
    ]


def test_the_first_word_is_a_recipe_unless_it_is_a_setting() -> None:
    read = chaos.recipe_and_overrides
    assert read(["mine.toml", "a.b=1"]) == ("mine.toml", ("a.b=1",))
    assert read(["a.b=1", "c.d=2"]) == ("diloco-internet", ("a.b=1", "c.d=2"))
    assert read([]) == ("diloco-internet", ())


def test_each_fault_is_told_once_and_steps_every_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, said = [1_000.0], list[str]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    printer = chaos._ProgressPrinter(tmp_path, ["a", "b"], said.append)
    cut = InjectedFault(fault=Fault(after_s=1.0, kind="cut", peer="b"), at_s=2.5, done=True)
    gone = replace(cut, at_s=3.5, done=False)
    printer.watch(2.5, [cut])
    now[0] += 1.9
    printer.watch(4.4, [cut, gone])
    now[0] += 0.1
    printer.watch(4.5, [cut, gone])
    assert said == [
        f"    2.5 s  {cut.fault}", "    2.5 s  a starts, b starts",
        f"    3.5 s  {cut.fault}: no such process now", "    4.5 s  a starts, b starts",
    ]  # fmt: skip


def test_the_newest_step_is_read_from_the_end_of_a_long_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j.jsonl"
    monkeypatch.setattr(chaos, "_JOURNAL_TAIL_BYTES", 200)
    with Journal(path) as journal:
        for step in range(1, 40):
            journal.write("step", incarnation=1, step=step, loss="NaN" if step == 39 else 2.0)
    assert chaos._newest_step(path) == "step 39 loss nan"


@pytest.mark.parametrize(("words", "stream"), [((), "out"), (("--json",), "err")])
def test_an_exercise_says_at_once_where_its_logs_are(
    words: tuple[str, ...], stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    counted: list[Any] = []

    def audit(commits: Any, journals: dict[str, Any], *, samples: int) -> Any:
        steps = {name: [event["step"] for event in events] for name, events in journals.items()}
        counted.append((steps, samples))
        return SimpleNamespace(mistakes=(), to_json=lambda: {"rounds": 7})

    monkeypatch.setattr("bloomery.chaos.scenario.run_scenario", lambda settings, watch: outcome())
    monkeypatch.setattr("bloomery.chaos.audit.audit", audit)
    monkeypatch.setattr(chaos, "_summary", lambda ended, counts: "the summary")
    first_peer, second_peer = chaos.peer_names(2)
    with Journal(RunDirectory(tmp_path / second_peer).create().journal()) as journal:
        journal.write("step", incarnation=1, step=3)
    given = ["--peers", "2", "--directory", str(tmp_path), "train.tokens=0", "train.samples=6_400"]
    assert chaos.simulate_internet([*given, *words]) == 0
    shown = capsys.readouterr()
    first = f"2 peers, 200 Mbit/s, 50 ms round trip, 0% loss; what each process prints is in {tmp_path}/logs"
    assert getattr(shown, stream).splitlines()[0] == first
    assert shown.out.splitlines()[-1] == ("the summary" if not words else shown.out.strip())
    assert not words or json.loads(shown.out)["rounds"] == 7
    assert counted == [({first_peer: [], second_peer: [3]}, 6_400)]


PHASES = RecoveryPhases(noticed=1.04, ended=2.0, restarted=3.0, started=4.0, loaded=5.0, stepped=6.0)


def test_a_drill_tells_each_phase_and_what_all_faults_cost() -> None:
    results = [
        DrillResult(fault=DrillFault.KILL, survived=True, phases=PHASES, cause="a rank was killed"),
        DrillResult(fault=DrillFault.HANG, survived=False, phases=RecoveryPhases(noticed=7.0)),
    ]
    incidents = [SimpleNamespace(steps_lost=3), SimpleNamespace(steps_lost=4)]
    ledger: Any = SimpleNamespace(
        history=SimpleNamespace(incidents=incidents), effective_time=0.756, begin=100.0, end=400.0
    )
    table, words = drill.drill_text(results, ledger).split("\n\n")
    assert [line.split() for line in table.split("\n") if "─" not in line] == [
        ["fault", "noticed", "ended", "restart", "start-up", "load", "step", "total", "survived", "cause"],
        ["kill", "1.0", "2.0", "3.0", "4.0", "5.0", "6.0", "21.0", "yes", "a", "rank", "was", "killed"],
        ["hang", "7.0", "-", "-", "-", "-", "-", "-", "NO", "-"],
    ]
    lines = table.split("\n")
    assert lines[0].index("survived") == lines[2].index("yes") == lines[3].index("NO")
    assert words == "2 faults, 1 survived; 7 steps made again; effective time 75.6% of 300 s"
    assert "\n\n" not in drill.drill_text(results, None)


DIVIDED = ("train.micro_batch=1", "train.global_batch=12")
"""A batch that 2 and 12 ranks divide."""


def test_the_plan_of_a_drill_has_what_its_options_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans: list[Any] = []
    results = [DrillResult(fault=DrillFault.KILL, survived=True, phases=PHASES, cause="why")]
    monkeypatch.setattr(
        "bloomery.operate.drill.exercise.exercise", lambda plan, *, say: plans.append(plan) or iter(results)
    )
    nodes = DrillNodes(count=3, is_allocation=True)
    monkeypatch.setattr("bloomery.operate.drill.allocation.drill_nodes", lambda: nodes)
    run = tmp_path / "run"
    words = "--nproc 4 --faults kill,hang --rounds 2 --seed 8 --steps 6 --patience 7.5 --json"
    assert drill.run(["demo", *DIVIDED, "--run", str(run), *words.split()]) == 0
    (plan,) = plans
    assert (plan.world, plan.nodes, plan.seed, plan.steps_between) == (12, nodes, 8, 6)
    assert (plan.patience_s, plan.private_shm_mib, plan.rundir.path) == (7.5, 0, run)
    assert plan.faults == [DrillFault.KILL, DrillFault.HANG] * 2
    assert plan.command == drill._launch_words(
        drill._parse(["demo", *DIVIDED, "--nproc", "4"]), plan.rundir, nodes
    )
    told = json.loads(capsys.readouterr().out)
    assert told["survived"] == 1
    (fault,) = told["faults"]
    assert (fault["fault"], fault["cause"], fault["survived"], fault["total_s"]) == (
        "kill",
        "why",
        True,
        21.04,
    )
    assert fault["phases"]["noticed"] == 1.04


@pytest.mark.parametrize(
    ("faults", "disks", "private_shm_mib"), [("kill", [], 0), ("shm", [], 1024), ("disk,kill", [2048], 0)]
)
def test_what_a_drill_fills_is_made_for_it_and_signals_are_as_before_it(
    faults: str, disks: list[int], private_shm_mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, made, handlers = list[Any](), list[int](), list[Any]()

    def exercise(plan: Any, *, say: Any) -> Any:
        plans.append(plan)
        handlers.append(signal.getsignal(signal.SIGTERM))
        return iter([DrillResult(fault=DrillFault.KILL, survived=True, phases=PHASES)])

    monkeypatch.setattr("bloomery.operate.drill.exercise.exercise", exercise)
    monkeypatch.setattr(
        "bloomery.operate.drill.exercise.small_disk", lambda mib: made.append(mib) or nullcontext(tmp_path)
    )
    monkeypatch.setattr("bloomery.operate.drill.allocation.drill_nodes", DrillNodes)
    monkeypatch.setattr(drill.os, "geteuid", lambda: 0)
    before = signal.getsignal(signal.SIGTERM)
    assert drill.run(["demo", *DIVIDED, "--faults", faults, "--json"]) == 0
    assert (made, plans[0].private_shm_mib) == (disks, private_shm_mib)
    assert (plans[0].rundir.path == tmp_path / "run") == bool(disks)
    assert signal.getsignal(signal.SIGTERM) == before != handlers[0]
    with pytest.raises(SystemExit) as ended:
        handlers[0](signal.SIGTERM, None)
    assert ended.value.code == 143


def test_a_drill_tells_the_time_outs_of_the_ranks_of_all_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [DrillResult(fault=DrillFault.KILL, survived=False, phases=PHASES)]
    monkeypatch.setattr("bloomery.operate.drill.exercise.exercise", lambda plan, *, say: iter(results))
    nodes = DrillNodes(count=3, is_allocation=True)
    monkeypatch.setattr("bloomery.operate.drill.allocation.drill_nodes", lambda: nodes)
    monkeypatch.setattr(drill, "timeouts_text", lambda rundir, *, world: f"{rundir.path.name}, {world} ranks")
    assert drill.run(["demo", *DIVIDED, "--run", str(tmp_path / "run"), "--nproc", "4"]) == 1
    assert capsys.readouterr().out == f"{drill.drill_text(results, None)}\n\nrun, 12 ranks\n"


def test_a_batch_that_the_ranks_of_all_nodes_do_not_divide_is_refused_before_the_drill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = DrillNodes(count=3, is_allocation=True)
    monkeypatch.setattr("bloomery.operate.drill.allocation.drill_nodes", lambda: nodes)
    monkeypatch.setattr("bloomery.operate.drill.exercise.exercise", lambda plan, *, say: iter(()))
    words = ["train.micro_batch=1", "train.global_batch=8", "--run", str(tmp_path / "run"), "--nproc", "4"]
    with pytest.raises(ConfigError, match=r"train\.global_batch"):
        drill.run(["demo", *words])


def test_a_strike_hits_the_process_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    struck: list[Any] = []
    monkeypatch.setattr(
        "bloomery.operate.drill.faults.strike", lambda fault, pid: struck.append((fault, pid))
    )
    assert drill.run(["--strike", "hang", "4711"]) == 0
    assert struck == [(DrillFault.HANG, 4711)]


def test_time_outs_of_a_run_are_told_for_all_ranks_that_its_first_one_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir, asked = RunDirectory(tmp_path / "run").create(), list[Any]()

    def read(rundir: RunDirectory, *, ranks: range, attempt: str) -> str:
        asked.append((rundir, ranks))
        return f"beats of {len(ranks)}"

    table = [RunTimeout(name="hang", seconds=1_234.5, derived="3 × longest", then="it is killed")]
    monkeypatch.setattr("bloomery.operate.standstill.read_beats", read)
    monkeypatch.setattr("bloomery.operate.timeouts.run_timeouts", lambda beats: asked.append(beats) or table)
    monkeypatch.setattr("bloomery.operate.timeouts.contradictions", lambda found: ["one is too short"])
    words = ["--timeouts", str(rundir.path)]
    assert drill.run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [asdict(table[0])]
    rundir.heartbeat().parent.mkdir(parents=True, exist_ok=True)
    rundir.heartbeat().write_text(json.dumps(RankBeat(world=12).__dict__))
    assert drill.run([f"--timeouts={rundir.path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if "─" not in line] == [
        ["time-out", "seconds", "from", "then"],
        ["hang", "1234", "3", "×", "longest", "it", "is", "killed"],
        ["note:", "one", "is", "too", "short"],
    ]
    assert asked == [(rundir, range(1)), "beats of 1", (rundir, range(12)), "beats of 12"]
