"""What `status`, `submit`, `fork`, `skip` and `rewind` tell of a run, line by line and figure by figure."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.in_process import status_of
from tests.cli.test_facts_of_control import past_of

from bloomery.cli import control, fork, status, submit
from bloomery.errors import BloomeryError, CheckpointError, StorageError
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import arm
from bloomery.operate.overview import RunOverview
from bloomery.operate.run_state import RunStatus, RunVerdict
from bloomery.operate.schedulers.interface import JobState, QueuedJob

NOON = time.mktime((2026, 3, 4, 12, 0, 0, 0, 0, -1))


@pytest.fixture
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it be noon."""
    stopped = SimpleNamespace(
        time=lambda: NOON, strftime=time.strftime,
        localtime=lambda moment=None: time.localtime(NOON if moment is None else moment),
    )  # fmt: skip
    monkeypatch.setattr(status, "time", stopped)


BAD, GOOD = RunStatus.NEVER, RunStatus.RUNNING
VIEW = RunOverview(
    run="runs/a-long-name-of-a-run", name="a-long-name-of-a-run-x", done=0.123, step=1_234, step_s=2.344,
    left_s=7_300.0, loss=2.34567, held_out_loss=2.5, saved=NOON - 300, saved_step=1_200,
    verdict=RunVerdict(state=BAD, why="nobody trains", remedy="Start it again."),
    warnings=("the disk fills up", "a rank is slow"), excluded=("n7: a bad GPU",),
    jobs=(
        QueuedJob(job="712", state=JobState.RUNNING, state_text="R", user="eva", nodes=("n1", "n2", "n3"),
                  expected_start=NOON + 1, ends=NOON + 3_600, reason="runs"),
        QueuedJob(job="713", state=JobState.PENDING, state_text="PD", user="bob", nodes=("n1", "n2"), tasks=4,
                  expected_start=NOON + 86_400, ends=NOON + 5, reason="Priority"),
    ),
)  # fmt: skip


def test_a_run_is_shown_with_its_progress_its_warnings_and_its_jobs(noon: None) -> None:
    shown = status._page(VIEW)
    assert shown[:-1] == [
        "a-long-name-of-a-run-x: dependency never satisfied (nobody trains)",
        "  what helps: Start it again.",
        "  done       step 1234, 12.3% of the samples",
        "  speed      2.34 s/step",
        "  time left  2.0 h",
        "  loss       2.3457, held-out 2.5000",
        "  last save  step 1200, 5 min ago",
        "  warning    the disk fills up",
        "  warning    a rank is slow",
        "  quarantine n7: a bad GPU",
        "",
    ]
    assert [line.split() for line in shown[-1].split("\n") if "─" not in line] == [
        ["job", "state", "by", "on", "starts", "or", "ends", "why"],
        ["712", "running", "eva", "n1,n2…", "13:00:00", "runs"],
        ["713", "pending", "bob", "n1,n2", "03-05", "12:00", "4", "tasks:", "Priority"],
    ]


def test_a_run_of_which_little_is_known_shows_that_little() -> None:
    verdict = RunVerdict(state=GOOD, remedy="Do nothing.")
    assert status._page(RunOverview(run="r", name="new", verdict=verdict)) == [
        f"new: {GOOD}", "  done       step 0", "  last save  none",
    ]  # fmt: skip
    held_out = RunOverview(run="r", name="new", verdict=verdict, loss=2.0)
    assert "  loss       2.0000, held-out -" in status._page(held_out)
    waiting = RunOverview(run="r", name="new", verdict=verdict, jobs=VIEW.jobs[1:])
    assert status._page(waiting)[-1].split()[-2:] == ["tasks:", "Priority"]
    helpless = RunOverview(run="r", name="new", verdict=RunVerdict(state=BAD))
    assert status._page(helpless)[1] == "  done       step 0"


@pytest.mark.parametrize(
    ("days", "shown"),
    [(0, "12:00:00"), (1, "03-05 12:00"), (-1, "03-03 12:00"), (31, "04-04 12:00"), (365, "03-04 12:00")],
)
def test_a_moment_of_another_day_is_told_with_its_day(days: int, shown: str, noon: None) -> None:
    moment = time.mktime((2026, 3, 4 + days, 12, 0, 0, 0, 0, -1))
    assert status._moment(moment) == shown


def test_what_a_clock_that_is_ahead_wrote_was_just_now(noon: None) -> None:
    assert [status._ago(NOON - seconds) for seconds in (42.0, 0.0, -300.0)] == [
        "42 s ago",
        "0 s ago",
        "0 s ago",
    ]


def test_runs_are_a_table_with_what_is_bad_among_the_warnings(noon: None) -> None:
    short = replace(VIEW, name="short", loss=None, warnings=("slow",))
    new = RunOverview(run="r", name="a-long-name-of-a-run-y", verdict=RunVerdict(state=GOOD, why="is so"))
    lines = [line.split() for line in status._table([short]).split("\n") if "─" not in line]
    assert lines[0] == ["run", "state", "done", "s/step", "left", "loss", "held", "out", "saved", "warnings"]
    told = "short never satisfied 12.3% 2.34 2.0 h - 2.5000 5 min ago slow; nobody trains"
    assert [word for line in lines[1:] for word in line] == told.split()
    lines = status._table([new, replace(new, warnings=("x",)), replace(new, warnings=("x y z",))]).split("\n")
    assert [line.index("x") for line in lines[-2:]] == [lines[0].index("warnings")] * 2
    assert status._table([new]).split("\n")[-1].split() == ["a-long-name-of-a-run", "running", *["-"] * 6]


def test_runs_are_those_given_or_those_under_a_directory_and_nodes_come_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = replace(VIEW, verdict=RunVerdict(state=GOOD), jobs=(), saved=None)
    views = {"a": good, "b": good}
    monkeypatch.setattr("bloomery.operate.overview.overview", lambda rundir: views[rundir.path.name])
    monkeypatch.setattr(
        "bloomery.operate.overview.runs_under", lambda path: [RunDirectory(path / name) for name in views]
    )
    monkeypatch.setattr("bloomery.operate.submission.refuse_missing_run", lambda rundir: None)
    monkeypatch.setattr(status, "_nodes", lambda views: [["n1", "idle", "none"]])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert status.run([str(tmp_path / "a"), "--nodes"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("a-long-name-of-a-run-x: ") and shown.split()[-3:] == ["n1", "idle", "none"]
    assert status.run(["--json"]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == [good.name] * 2
    views["b"] = VIEW
    assert status.run(["--json", "--nodes", "--under", str(tmp_path / "runs")]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told.keys() == {"runs", "nodes"} and told["nodes"] == [["n1", "idle", "none"]]
    assert status.run([str(tmp_path / "a"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"runs"}
    views.clear()
    assert status.run([]) == 0 and capsys.readouterr().out == "no runs under runs\n"
    with pytest.raises(BloomeryError, match="There is no directory none"):
        status.run(["--under", "none"])


@pytest.mark.parametrize(
    ("words", "groups", "told"),
    [
        ([], [["2", "4"], ["1"]], "cancelled 2, 4, 1\n"),
        (["--queued"], [["2", "4"], []], "cancelled 2, 4\n"),
        (["--json"], [["2", "4"], ["1"]], '{"run": "RUN", "cancelled": ["2", "4", "1"]}\n'),
    ],
)
@pytest.mark.parametrize("has_recipe", [True, False])
def test_jobs_that_wait_are_cancelled_before_the_one_that_runs_and_none_that_ended(
    words: list[str], groups: list[list[str]], told: str, has_recipe: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run, asked = RunDirectory(tmp_path / "run").create(), list[Any]()
    if has_recipe:
        run.recipe.write_text("")
    states = (JobState.RUNNING, JobState.PENDING, JobState.ENDED, JobState.HELD)
    jobs = [QueuedJob(job=str(job), state=state, state_text="") for job, state in enumerate(states, 1)]
    loaded = {name: SimpleNamespace(recipe=SimpleNamespace(submit=name, run=SimpleNamespace(name=name)))
              for name in ("kept", "own")}  # fmt: skip
    scheduler = SimpleNamespace(
        jobs=lambda *, name, run: asked.append((name, run)) or jobs, cancel=lambda group: asked.append(group)
    )
    place = "bloomery.operate.submission"
    monkeypatch.setattr(f"{place}.kept_submission", lambda run: SimpleNamespace(load=lambda: loaded["kept"]))
    monkeypatch.setattr(f"{place}.load_recipe", lambda path: loaded["own"])
    monkeypatch.setattr(
        f"{place}.scheduler_of", lambda submit, path: asked.append((submit, path)) or scheduler
    )
    assert status.cancel([str(run.path), *words]) == 0
    named = "own" if has_recipe else "kept"
    assert asked == [(named, run.path), (named, run.path), *groups]
    assert capsys.readouterr().out == told.replace("RUN", str(run.path))
    notes = [(event["event"], event["state"], event["jobs"]) for event in read_journal(run.operations)]
    assert notes == [("job", "cancelled", [*groups[0], *groups[1]])]


def test_nodes_are_asked_of_the_scheduler_of_the_first_run_that_was_submitted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bloomery.operate import submission

    asked: list[Any] = []
    nodes = [SimpleNamespace(name="n1", state="down", reason="a fan")]
    recipe = SimpleNamespace(recipe=SimpleNamespace(submit="section"))
    monkeypatch.setattr(submission, "was_submitted", lambda rundir: rundir.path.name != "a")
    monkeypatch.setattr(submission, "kept_submission", lambda rundir: SimpleNamespace(load=lambda: recipe))
    monkeypatch.setattr(
        submission, "scheduler_of",
        lambda section, path: asked.append((section, path)) or SimpleNamespace(nodes=lambda: nodes),
    )  # fmt: skip
    views = [replace(VIEW, run=f"runs/{name}") for name in "abc"]
    assert status._nodes(views) == [["n1", "down", "a fan"]]
    assert asked == [("section", Path("runs/b").absolute())]
    assert status._nodes(views[:1]) == []
    assert "no run was submitted" in capsys.readouterr().err


class Submitted:
    """Stands for what submits jobs, and keeps what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from bloomery.operate import submission

        self.asked: list[Any] = []
        self.jobs = ["71", "72"]
        self.schedulers: list[Any] = []
        self.checked: list[Any] = []
        scheduler = SimpleNamespace(name="slurm", script=lambda request: f"script for {request.tasks}\n")
        monkeypatch.setattr(
            submission, "scheduler_of", lambda *given: self.schedulers.append(given) or scheduler
        )
        monkeypatch.setattr(submission, "submit", self.note("submit"))
        monkeypatch.setattr(submission, "top_up", self.note("top_up"))
        monkeypatch.setattr(
            submission, "check_submittable", lambda loaded, overrides: self.checked.append(overrides)
        )

    def note(self, name: str) -> Any:
        def call(scheduler: Any, *given: Any) -> list[str]:
            self.asked.append((name, *given))
            return self.jobs

        return call


def test_jobs_are_submitted_at_once_or_kept_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, run = Submitted(monkeypatch), tmp_path / "run"
    words = ["demo", "submit.tasks=5", "--run", str(run), "--nproc", "3"]
    assert submit.run([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out == "script for 5\n" and not run.exists() and not seen.asked
    assert submit.run([*words, "--dry-run", "--keep-queued", "2"]) == 0
    assert capsys.readouterr().out == "script for 1\n", "each job submits the next one"
    assert submit.run(words) == 0
    assert capsys.readouterr().out == f"submitted 71, 72 to slurm: bloomery status {run}\n"
    (name, request), kept = seen.asked.pop(), json.loads((run / "submission.json").read_text())
    assert (name, request.tasks) == ("submit", 5)
    assert (kept["recipe"], kept["overrides"], kept["nproc"]) == ("demo", ["submit.tasks=5"], 3)
    assert submit.run([*words, "--keep-queued", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"jobs": ["71", "72"], "scheduler": "slurm", "run": str(run)}
    name, submission, loaded, rundir = seen.asked.pop()
    assert (name, rundir, loaded.recipe.submit.keep_queued) == ("top_up", RunDirectory(run), 2)
    assert submission.overrides == ("submit.tasks=5", "submit.keep_queued=2") == seen.checked[-1]
    assert submit.run([*words, "submit.keep_queued=2", "--json"]) == 0 and seen.asked.pop()[0] == "top_up"
    capsys.readouterr()
    seen.jobs = []
    assert submit.run([*words, "--keep-queued", "2"]) == 0
    lacking = f"nothing is missing in the queue of {run}: bloomery status {run}\n"
    assert capsys.readouterr().out == lacking
    assert submit.run(["--top-up", str(run)]) == 0
    assert capsys.readouterr().out == "nothing is missing in the queue\n"
    seen.jobs = ["73"]
    assert submit.run(["--top-up", str(run)]) == 0 and capsys.readouterr().out == "submitted 73\n"


def test_a_stopped_run_is_not_submitted_and_the_switch_is_named(tmp_path: Path) -> None:
    from bloomery.config.load import load_recipe

    rundir, group = RunDirectory(tmp_path / "run").create(), tmp_path / "group"
    loaded = load_recipe("demo", [f"control.directory={group}"])
    submit._refuse_stopped(rundir, loaded)
    arm(group / "stop")
    with pytest.raises(BloomeryError, match=f"{group}/stop is armed") as refused:
        submit._refuse_stopped(rundir, loaded)
    assert refused.value.remedy == f"`bloomery stop --at {group} --disarm` lets jobs train."
    arm(rundir.control("stop"))
    with pytest.raises(BloomeryError, match="control/stop is armed") as refused:
        submit._refuse_stopped(rundir, loaded)
    assert refused.value.remedy == f"`bloomery stop {rundir.path} --disarm` lets jobs train."


def test_a_run_directory_that_cannot_be_shared_is_told_with_where_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.config.load import load_recipe

    def refused(path: Path, group: str) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("bloomery.operate.group_access.share_with_group", refused)
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(StorageError) as told:
        submit._prepare(run, load_recipe("demo"))
    assert told.value.message == f"Sharing the run directory failed at {run.path}: Read-only file system"


def test_files_that_the_group_may_not_write_are_told_by_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bloomery.config.load import load_recipe

    asked: list[Any] = []
    access = SimpleNamespace(refused={"eva": [Path("a"), Path("b"), Path("c")], "bob": [Path("d")]})
    monkeypatch.setattr(
        "bloomery.operate.group_access.share_with_group",
        lambda path, group: asked.append((path, group)) or access,
    )
    submit._prepare(RunDirectory(tmp_path / "run"), load_recipe("demo", ["submit.group=people"]))
    assert asked == [(tmp_path / "run", "people")] and (tmp_path / "run").is_dir()
    assert capsys.readouterr().err.splitlines() == [
        "bloomery submit: eva owns a and 2 more, which the group may not write",
        "bloomery submit: bob owns d, which the group may not write",
    ]


def test_a_rehearsal_adds_its_settings_and_is_no_start_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = Submitted(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "bloomery.operate.rehearsal.rehearsal_of",
        lambda recipe, **_: (f"run.name={recipe.run.name}-rehearsed",),
    )
    assert submit.run(["demo", "--rehearse"]) == 0
    assert capsys.readouterr().out.endswith("bloomery status runs/demo-rehearsed\n")
    assert json.loads(Path("runs/demo-rehearsed/submission.json").read_text())["overrides"] == [
        "run.name=demo-rehearsed"
    ]
    assert len(seen.asked) == 1
    ((section, place),) = seen.schedulers
    assert section.tasks == 1 and place == tmp_path / "runs/demo-rehearsed"


def listed(*steps: int) -> list[Any]:
    names = {step: f"step-{step:06d}.i001" for step in steps}
    return [SimpleNamespace(step=step, name=name, directory=Path(name)) for step, name in names.items()]


def test_a_fork_begins_at_the_newest_checkpoint_before_the_step_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.checkpoint.format import catalogue, suspects

    found = listed(3, 6, 1_009)
    monkeypatch.setattr(catalogue, "checkpoints", lambda rundir: found)
    monkeypatch.setattr(suspects, "newest_trusted", lambda early: early[-1] if early else None)
    rundir = RunDirectory(tmp_path)
    chosen = [fork._chosen(rundir, step).step for step in (3, 5, 6, 7, None)]
    assert chosen == [3, 3, 6, 6, 1_009]
    with pytest.raises(CheckpointError, match=r"at or before step 2 \(there are: 3, 6, 1,009\)"):
        fork._chosen(rundir, 2)
    found.clear()
    with pytest.raises(CheckpointError, match=r"has no checkpoint \(there are: none\)"):
        fork._chosen(rundir, None)


def test_a_fork_is_noted_in_both_runs_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = listed(1_200)
    notes: list[Any] = []
    rundir, new = RunDirectory(tmp_path / "run").create(), tmp_path / "new one"
    monkeypatch.setattr(fork, "_chosen", lambda rundir, step: one if step == 1_300 else None)
    monkeypatch.setattr(fork, "_fork", lambda rundir, checkpoint, target: "the name")
    monkeypatch.setattr(
        "bloomery.operate.ledger.chronicle.add_note", lambda rundir, text: notes.append((rundir.path, text))
    )
    words = [str(rundir.path), str(new), "--to-step", "1300"]
    assert fork.run(words) == 0
    assert capsys.readouterr().out == (
        f"{new} begins at step 1,200 of {rundir.path} (step-001200.i001).\n"
        f"Go on with other settings: bloomery train '{new}' optim.learning_rate=…\n"
    )
    assert notes == [
        (new, f"This run is a fork of {rundir.path.resolve()}: it begins at its step-001200.i001."),
        (rundir.path, f"A fork of this run begins at step-001200.i001: {new.resolve()}."),
    ]
    assert fork.run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "run": str(rundir.path), "new": str(new), "name": "the name", "step": 1_200,
        "checkpoint": "step-001200.i001",
    }  # fmt: skip


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let a run have made steps 1,001 to 1,008, with checkpoints at 1,003 and 1,006; returns its requests."""
    requests: list[Any] = []
    past_of(RunDirectory(tmp_path / "run"), range(1_001, 1_009))
    monkeypatch.setattr(
        "bloomery.checkpoint.format.catalogue.checkpoints", lambda rundir: listed(1_003, 1_006)
    )
    monkeypatch.setattr(
        "bloomery.events.switches.write_request",
        lambda rundir, name, text, *, keep: requests.append((rundir.path, name, text, keep)),
    )
    return requests


def test_a_rewind_says_what_is_undone_and_asks_for_the_step_and_the_samples(
    asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = [str(run), "--to-step", "1007", "--samples", "10_020:10_080"]
    assert control.rewind(words) == 0
    hours = (251.75 + 252.0) / 3_600
    assert capsys.readouterr().out.splitlines() == [
        f"From step-001006.i001: 2 steps, 20 samples and {hours:.2f} hours of training are undone (steps "
        "1,007 to 1,008), and those that the run makes until it takes the request.",
        "Samples 10,020 to 10,079 of the stream: 15 are left out, 1.5 steps' worth. 45 lie behind the run "
        "and stay used: `bloomery rewind` goes back.",
        "The run is not training: its next start takes this after its first step, and says so at its "
        f"beginning. Remove {run}/control/rewind to take it back.",
    ]
    assert asked == [(run, "rewind", "1007 10020:10080", False)]
    assert control.rewind([str(run), "--to-step", "1003", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "asked": True, "checkpoint": "step-001003.i001", "to_step": 1_003, "last_step": 1_008, "steps": 5,
        "samples": 50, "seconds": 251.0 + 251.25 + 251.5 + 251.75 + 252.0,
    }  # fmt: skip
    assert asked.pop() == (run, "rewind", "1003", False)
    assert control.rewind([*words, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["asked"] is False and told["skip"]["left_out"] == 15 and len(asked) == 1
    for step in ("1008", "1009"):
        assert status_of("rewind", str(run), "--to-step", step, "--dry-run") == int(step == "1009")
    assert "is at step 1,008, and cannot go back to step 1,009" in capsys.readouterr().err
    assert status_of("rewind", str(run), "--to-step", "1002") == 1
    assert "no checkpoint at or before step 1,002 (there are: 1,003, 1,006)" in capsys.readouterr().err


def test_a_skip_asks_for_its_samples_unless_it_is_a_dry_run(
    asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert control.skip([str(run), "--samples", "10_100:10_200"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Samples 10,100 to 10,199 of the stream: 100 are left out, 10.0 steps' worth.",
        "The run is not training: its next start takes this after its first step, and says so at its "
        f"beginning. Remove {run}/control/skip to take it back.",
    ]
    assert asked == [(run, "skip", "10100:10200", True)]
    assert control.skip([str(run), "--steps", "1010:1012", "--json", "--dry-run"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "asked": False, "samples": [10_095, 10_115], "left_out": 20, "used_already": 0, "steps_worth": 2.0,
    }  # fmt: skip
    assert len(asked) == 1
