"""The head of a run's page, its metrics, and the tables of ranks and peers, as whole values."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.operate.dashboard.written_run import WrittenRun, healed_run

from bloomery.cli import main
from bloomery.config.load import dump_recipe, load_recipe, override
from bloomery.errors import BloomeryError
from bloomery.events.heartbeat import RankBeat
from bloomery.operate import submission
from bloomery.operate.dashboard import mesh_panel as mesh_module
from bloomery.operate.dashboard import panels, run_summary
from bloomery.operate.dashboard.mesh_panel import MeshPanel, RankRow, StageMemoryInUse, _mark_slow, mesh_panel
from bloomery.operate.dashboard.peer_panel import rounds
from bloomery.operate.dashboard.prometheus import metrics_text
from bloomery.operate.dashboard.run_reader import RunReader
from bloomery.operate.dashboard.run_summary import (
    RunSummarizer,
    RunSummary,
    _advice,
    _health,
    left_words,
    night_words,
    silent_ranks,
)
from bloomery.operate.dashboard.viewed_run import ViewedRun
from bloomery.operate.ledger.figures import PlannedRun
from bloomery.operate.run_state import RunStatus, RunVerdict
from bloomery.operate.submission import keep_submission, submission_of


def summary_of(**fields: Any) -> RunSummary:
    told = {"name": "run", "path": "/r", "health": "good", "state": "running", "why": "", "problems": []}
    return RunSummary(**{**told, **fields})


def advice(
    tmp_path: Path, verdict: RunVerdict, silent: list[int], *, is_refusing: bool = False, failed: str = "",
    is_behind: bool = False, **fields: Any
) -> list[str]:  # fmt: skip
    news = SimpleNamespace(failed_save=failed, is_refusing=is_refusing)
    reader: Any = SimpleNamespace(news=news, is_behind=is_behind)
    shown = summary_of(**fields)
    shown.advice = _advice(shown, verdict, reader, silent)
    return [_health(shown, verdict), *shown.advice]


RUNS, GONE = RunVerdict(state=RunStatus.RUNNING), RunVerdict(state=RunStatus.GONE, remedy="start it")
NOTHING = "Nothing: no person is needed."
LOOK = "no heartbeat for some seconds, or the process is gone."


@pytest.mark.parametrize(
    ("verdict", "silent", "fields", "expected"),
    [
        (RUNS, [], {}, ["good", NOTHING]),
        (GONE, [3], {}, ["bad", "It is gone: start it"]),
        (RunVerdict(state=RunStatus.GONE), [], {}, ["bad", NOTHING]),
        (RUNS, [3], {}, ["attention", f"Look at rank 3: {LOOK}"]),
        (RUNS, list(range(9)), {}, ["attention", f"Look at ranks 0, 1, 2, 3, 4, 5, 6, 7: {LOOK}"]),
        (RUNS, [], {"failed": "no checkpoint at step 7: full"},
         ["attention", "Free space or inodes: no checkpoint at step 7: full"]),
        (RUNS, [], {"failed": "x" * 500}, ["attention", "Free space or inodes: " + "x" * 378]),
        (RUNS, [], {"is_refusing": True},
         ["attention", "The newest updates were refused: read the guards' events below."]),
        (RUNS, [], {"step": 7, "loss": None},
         ["bad", "The newest loss is not finite: the guards go back, or `bloomery rewind` does."]),
        (RUNS, [], {"step": 7, "loss": 2.0}, ["good", NOTHING]),
        (RUNS, [], {"step": 7, "loss": 0.0}, ["good", NOTHING]),
        (RUNS, [], {"step": None, "loss": None}, ["good", NOTHING]),
        (RunVerdict(state=RunStatus.STOPPED, remedy="go"), [], {}, ["attention", "It is stopped: go"]),
        (RunVerdict(state=RunStatus.PENDING, remedy="wait"), [], {}, ["good", NOTHING]),
        (RUNS, [], {"problems": ["x"]}, ["attention", "Read what is wrong with its files, above."]),
        (RUNS, [], {"problems": ["x"], "is_behind": True}, ["attention", NOTHING]),
    ],
)  # fmt: skip
def test_a_person_is_told_what_to_do_and_how_the_run_is(
    tmp_path: Path, verdict: RunVerdict, silent: list[int], fields: dict[str, Any], expected: list[str]
) -> None:
    assert advice(tmp_path, verdict, silent, **fields) == expected


def test_the_time_that_is_left_is_told_in_words() -> None:
    assert left_words(summary_of(left_s=90.0)) == "90.0 s left"
    assert left_words(summary_of(left_s=0.0)) == "0.0 s left" and left_words(summary_of()) == ""


def test_a_night_of_starts_and_warnings_tells_the_six_most_frequent(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start()
    run.start(base=None, reason="start")
    for count, name in enumerate(
        ("rewind", "guard", "skip", "restraint", "alert", "corruption", "evicted"), 1
    ):
        for _ in range(count):
            run.event(name)
    run.event("ring_failed")
    run.event("journal_gap")
    reader = RunReader(run.rundir.path).read_all()
    assert night_words(reader, now=time.time()) == (
        "In the last 12 hours: 2 starts, 7 × evicted, 6 × corruption, 5 × alert, 4 × restraint, 2 × guard, "
        "1 × rewind."
    )


def test_the_head_of_a_run_that_has_not_stepped_has_its_facts(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(ranks=8, device="d" * 50)
    run.event("checkpoint", path="step-000000.i001", time=5.0)
    reader = RunReader(run.rundir.path).read_all()
    shown = RunSummarizer(reader).summary(now=time.time())
    assert (shown.ranks, shown.device, shown.saved_step, shown.saved) == (8, "d" * 40, 0, 5.0)
    assert (shown.step, shown.steps, shown.done, shown.loss, shown.rows) == (None, None, None, None, 0)
    assert (shown.name, shown.version, shown.path) == ("run", reader.version, str(run.rundir.path))
    run.start(ranks="many")
    assert RunSummarizer(reader.read_all()).summary().ranks is None


def test_a_switch_elsewhere_stops_a_run_and_only_a_submitted_one_has_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WrittenRun(tmp_path / "run")
    asked: list[Any] = []

    def observed(rundir: Any, jobs: Any, *, switches: Any, silent: str, last: Any) -> Any:
        asked.append((rundir.path, list(jobs), list(switches), last))
        assert silent in ("", "squeue does not answer")
        return None

    verdicts = [RunVerdict(state=RunStatus.RUNNING)]
    monkeypatch.setattr(run_summary, "observe_run", observed)
    limits_s: set[float] = set()
    monkeypatch.setattr(
        run_summary,
        "judge_state",
        lambda observation, *, limits: limits_s.add(limits.silence_s) or verdicts[0],
    )
    recipe = override(load_recipe("demo").recipe, ["control.directory=~/controls"])
    monkeypatch.setenv("HOME", str(tmp_path))
    run.rundir.recipe.write_text(dump_recipe(recipe))
    run.start()
    reader = RunReader(run.rundir.path).read_all()
    summarizer = RunSummarizer(reader)
    assert summarizer.summary().state == "running"
    first = (run.rundir.path, [], [tmp_path / "controls"], reader.news.last)
    assert asked == [first] and reader.news.last["event"] == "start"
    verdicts[0] = GONE
    summarizer.summary()
    assert asked[1:] == [first, (*first[:3], None)], "it may have ended since its journal was read"

    def silent(section: Any, path: Path) -> Any:
        assert (section, path) == (recipe.submit, run.rundir.path)
        raise BloomeryError("squeue does not answer", remedy="wait")

    monkeypatch.setattr(submission, "scheduler_of", silent)
    keep_submission(run.rundir, submission_of("demo", [], nproc=None))
    assert "squeue does not answer" in summarizer.summary().problems
    queue = SimpleNamespace(jobs=lambda *, name, run: [(name, run)])
    monkeypatch.setattr(submission, "scheduler_of", lambda section, path: queue)
    monkeypatch.setattr(run_summary, "time", SimpleNamespace(monotonic=lambda: 1e9, time=time.time))
    assert summarizer.summary().problems == [] and asked[-1][1] == [("demo", run.rundir.path)]
    verdicts[0] = RUNS
    summarizer.summary()
    assert asked[-1][3] == reader.news.last
    monkeypatch.setattr(RunReader, "is_behind", property(lambda reader: True))
    summarizer.summary()
    assert asked[-1][3] is None, "what was read of the journal is not yet its end"
    assert limits_s == {15.0}, "who looks from elsewhere sees heartbeats late"


def test_the_metrics_of_a_run_are_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = healed_run(tmp_path / "a\nb")
    viewed = ViewedRun(run.rundir.path)
    viewed.reader.read_all()
    shown = summary_of(name="a\nb", path="/r", state="hung", health="attention", step=91, left_s=1 / 3)
    shown.loss, shown.held_out = float("nan"), 2.75
    monkeypatch.setattr(viewed, "summary", lambda: shown)
    labels = 'run="a\\nb",path="/r"'
    figures = {
        "up": ("whether the run is as it should be", "1"),
        "step": ("the last step of the run", "91"),
        "left_s": ("seconds of training that are left", "0.33333333333333331"),
        "loss": ("the newest training loss", "NaN"),
        "held_out": ("the newest held-out loss", "2.75"),
        "gradient_norm": ("the newest gradient norm", "0.5"),
        "learning_rate": ("the newest learning rate", "0.0010000000474974513"),
        "global_batch": ("the samples of the newest step", "8"),
        "tokens_per_s": ("tokens per second of the newest step", "2560"),
        "model_tflops": ("TFLOPs of a rank in the newest step", "0.10000000149011612"),
        "refused_updates": ("updates that were refused so far", "0"),
    }
    told = metrics_text([viewed]).splitlines()
    expected = []
    for name, (text, value) in figures.items():
        expected += [f"# HELP bloomery_{name} {text}", f"# TYPE bloomery_{name} gauge"]
        expected += [f"bloomery_{name}{{{labels}}} {value}"]
    expected += ["# HELP bloomery_state 1 for the state that the run is in", "# TYPE bloomery_state gauge"]
    expected += [f'bloomery_state{{{labels},state="{state}"}} {int(state == "hung")}' for state in RunStatus]
    others = [line for line in told if line not in expected]
    assert all("memory_bytes" in line or "data_" in line for line in others)
    assert [line for line in told if line in expected] == expected and metrics_text([viewed])[-1] == "\n"


def test_a_rank_is_shown_with_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = WrittenRun(tmp_path / "run")
    told = {"world": 3, "activity": "a" * 90, "step": 7, "host": "h" * 90, "memory_bytes": 5e9}
    run.rundir.heartbeat().write_text(json.dumps({"rank": 0, **told, "time": 1000.0}))
    old = {"rank": 2, "world": 3, "time": 990.0, "activity": "ended", "memory_bytes": 7e9}
    run.rundir.heartbeat(rank=2).write_text(json.dumps(old))
    monkeypatch.setattr(mesh_module, "has_died_here", lambda beat, *, now: beat.rank == 0 and now == 1001.0)
    with (run.rundir.journal()).open("w") as file:
        for number in range(30):
            spent = {"forward and backward": float(number), "evaluating": 2.0, "waiting for samples": 1.0,
                     "updating the weights": 4.0, "reducing gradients": 64.0}  # fmt: skip
            event = {"event": "step", "time": 1.0, "step": number, "incarnation": 1, "spent": spent}
            file.write(json.dumps(event) + "\n" + json.dumps({**event, "event": "phase"}) + "\n")
    mean_s = {"waiting for samples": 1.0, "forward and backward": 19.5, "reducing gradients": 64.0,
              "updating the weights": 4.0, "evaluating": 2.0}  # fmt: skip
    rows = [
        RankRow(rank=0, host="h" * 80, activity="a" * 80, step=7, silent_s=1.0, died=True, seconds=mean_s,
                own_s=24.5, place={}, memory_bytes=5e9),
        RankRow(rank=2, host="", activity="ended", step=0, silent_s=None, died=False, seconds={}, own_s=0.0,
                place={}, memory_bytes=7e9),
    ]  # fmt: skip
    stage = StageMemoryInUse(stage=0, ranks=2, mean_bytes=6e9, most_bytes=7e9, fullest=2)
    panel = mesh_panel(RunReader(run.rundir.path), None, now=1001.0)
    assert panel == MeshPanel(rows=rows, degrees={}, stages=[stage], told="")


def test_the_four_slowest_ranks_are_named_and_the_others_counted() -> None:
    def told(*own_s: float) -> tuple[str, list[int]]:
        rows = [
            RankRow(rank=rank, host=f"n{rank}", activity="", step=0, silent_s=None, died=False, seconds={},
                    own_s=seconds, place={}, memory_bytes=None)
            for rank, seconds in enumerate(own_s)
        ]  # fmt: skip
        return _mark_slow(rows), [row.rank for row in rows if row.is_slow]

    words, slow = told(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 2.0, 5.0, 4.0, 6.0)
    assert slow == [6, 7, 8, 9, 10]
    assert words == (
        "The others wait for rank 10 on n10 (6.00 ×), rank 8 on n8 (5.00 ×), rank 9 on n9 (4.00 ×), "
        "rank 6 on n6 (3.00 ×) and 1 more; usual are 1.000 s a step."
    )
    assert told(1.0, 1.0, 1.0, 1.1) == ("All ranks work alike: 1.000 s a step by themselves.", [])
    assert told(1.0, 1.2) == ("The others wait for rank 1 on n1 (1.20 ×); usual are 1.000 s a step.", [1])
    assert told(1.0, 0.0) == ("", [])


def test_the_rounds_of_a_peer_are_shown_with_who_took_part(tmp_path: Path) -> None:
    reader = RunReader(tmp_path)
    told: list[dict[str, Any]] = [
        {"event": "left_out", "round": 1, "whom": "c", "why": "old"},
        {"event": "round", "round": 1, "time": 10.0, "peer": "a", "ring_s": 0.5, "members": ["b", "a", "c"],
         "included": True, "ring": ["a", "b", "c"], "ring_mbit_s": [80.0, -1.0]},
        {"event": "round", "round": "x", "time": 11.0, "members": ["z"]},
        {"event": "round", "round": 2, "time": None, "members": ["z"]},
        {"event": "round", "round": 2, "time": 14.0, "peer": "m" * 50, "ring_s": 1e12, "members": ["a", "b"],
         "ring": []},
        {"event": "left_out", "round": 2, "whom": "c", "why": "w" * 300},
        {"event": "parity", "round": 2, "whom": "d", "why": "it differs"},
        {"event": "ring_failed", "round": 2, "whom": "e", "why": "no"},
    ]  # fmt: skip
    for event in told:
        reader._take_other(json.dumps(event).encode())
    assert rounds(reader) == {
        "rounds": [
            {"round": 1, "begin": 10.0, "end": 10.0, "ring_s": 0.5, "members": ["b", "a", "c"],
             "included": True},
            {"round": 2, "begin": 10.0, "end": 14.0, "ring_s": None, "members": ["a", "b"],
             "included": False},
        ],
        "peers": [
            {"name": "a", "rounds": 2, "in_newest": True, "left_out": ""},
            {"name": "b", "rounds": 2, "in_newest": True, "left_out": ""},
            {"name": "c", "rounds": 1, "in_newest": False, "left_out": "w" * 200},
            {"name": "d", "rounds": 0, "in_newest": False, "left_out": "it differs"},
        ],
        "me": "m" * 40,
        "ring": [["a", 80.0], ["b", None], ["c", None]],
    }  # fmt: skip
    assert rounds(RunReader(tmp_path)) == {}
    for number in range(130):
        event = {"event": "round", "round": number, "time": 20.0 + number, "members": []}
        reader._take_other(json.dumps(event).encode())
    assert [row["round"] for row in rounds(reader)["rounds"]] == list(range(10, 130))


def test_where_the_time_went_is_told_with_each_class_that_took_some(tmp_path: Path) -> None:
    run = healed_run(tmp_path / "run")
    plan = PlannedRun(tokens_per_s=5120.0, tokens=10**6, days=2.0, goodput=0.9)
    told = panels.goodput(RunReader(run.rundir.path), plan)
    assert set(told) == {
        "seconds", "shares", "effective_time", "ettr", "token_goodput", "causes", "elapsed_s", "plan",
        "meanings", "incidents",
    }  # fmt: skip
    assert set(told["meanings"]) == set(told["seconds"])
    (incident,) = told["incidents"]
    assert incident == {
        "time": incident["time"], "cause": "rewind", "culprit": "", "remedy": "", "steps_lost": 10,
        "action": "went back to step 50 or the checkpoint before it without samples 400–480",
        "seconds": incident["seconds"],
    }  # fmt: skip
    nothing = panels.goodput(RunReader(tmp_path / "none"))
    assert nothing == {"problem": "Nothing has trained here yet."}


def test_the_newest_saves_and_incidents_are_shown_and_a_step_that_is_no_number_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = RunReader(tmp_path)
    for number in range(70):
        name = f"step-{number:06d}.i001"
        step = "x" if number == 69 else number
        reader._take_other(json.dumps({"event": "checkpoint", "path": name, "step": step}).encode())
    rows = panels.saves(reader, None)
    assert [row.step for row in rows] == [0, *range(68, 9, -1)]
    kept = {"step-000003.i001": (3, "newest"), "step-000100.i001": (100, "")}
    monkeypatch.setattr(panels, "_kept_checkpoints", lambda reader, recipe: kept)
    rows = panels.saves(reader, None)
    assert [(row.step, row.durable) for row in rows] == [
        (100, True), (0, True), *((step, True) for step in range(68, 10, -1)),
    ]  # fmt: skip
    reader = RunReader(tmp_path)
    reader._take_other(json.dumps({"event": "checkpoint", "path": "y" * 90}).encode())
    assert panels.saves(reader, None)[-1].name == "y" * 80
    names = ("time", "cause", "culprit", "action", "remedy", "steps_lost", "seconds")
    incidents = [dict.fromkeys(names, number) for number in range(110)]
    wanted = ("shares", "effective_time", "ettr", "token_goodput", "causes", "elapsed_s")
    figures = {**dict.fromkeys(wanted, 0.0), "seconds": {}, "incidents": incidents}
    monkeypatch.setattr(panels, "read_ledger", lambda rundir, *, ranks: ranks)
    monkeypatch.setattr(panels, "ledger_figures", lambda ledger, plan: figures if ledger == "first" else {})
    assert [one["time"] for one in panels.goodput(reader)["incidents"]] == list(range(10, 110))


def test_of_a_large_run_the_first_sixty_four_ranks_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, read = RunReader(tmp_path), list[str]()

    def silent(path: Path) -> RankBeat:
        read.append(path.name)
        return RankBeat(rank=len(read) - 2, world=600, activity="x", time=0.0)

    monkeypatch.setattr(run_summary, "read_beat", silent)
    assert silent_ranks(reader, now=1e9) == list(range(64)) and len(read) == 65


def test_a_damaged_record_leaves_the_events_and_saves_of_a_page(tmp_path: Path) -> None:
    run = healed_run(tmp_path / "run")
    run.rundir.incarnation(2).write_text("{torn")
    viewed = ViewedRun(run.rundir.path)
    viewed.reader.read_all()
    tables = json.loads(viewed.tables())
    assert [event["kind"] for event in tables["events"]] == ["start", "guard", "rewind", "start"]
    assert (
        "It cannot be counted: " in (told := tables["goodput"]["problem"])
        and "000002.json is damaged" in told
    )


@pytest.mark.parametrize("moment", [1e15, -1e15, 1e300])
def test_a_time_that_no_calendar_has_ends_no_command(
    moment: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = healed_run(tmp_path / "run")
    odd = {"time": moment, "incarnation": 2, "step": 92, "loss": 2.0, "text": "odd", "by": "a"}
    for path, name in ((run.rundir.operations, "note"), (run.rundir.journal(), "step")):
        with path.open("a") as journal:
            journal.write(json.dumps({"event": name, **odd}) + "\n")
    for words, status in ((["top", "--once"], 1), (["report"], 0), (["note"], 0), (["follow", "--once"], 0)):
        assert main([words[0], str(run.rundir.path), *words[1:]]) == status
    assert "last sign --:--:--" in capsys.readouterr().out


def test_the_time_of_a_step_is_that_of_the_steps_since_the_newest_start(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start()
    run.steps(60, seconds=7.0)
    run.start(base=(60, 1), reason="start")
    run.steps(3, seconds=2.0)
    shown = RunSummarizer(RunReader(run.rundir.path).read_all()).summary(now=time.time())
    assert (shown.step, shown.rows, shown.step_s) == (63, 63, 2.0)
