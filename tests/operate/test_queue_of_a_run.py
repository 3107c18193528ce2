"""How many jobs a run has in the queue, what each of them asks for, and after which it starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.operate.test_submission import Queue

from bloomery.cli.submit import run as submit_command
from bloomery.config.load import load_recipe
from bloomery.config.parallel import ParallelSection
from bloomery.config.submit import SubmitSection
from bloomery.errors import BloomeryError, StorageError, TrainingFailed
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate import submission
from bloomery.operate.exclusions import Exclusions, QuarantinedNode
from bloomery.operate.schedulers.interface import (
    JobRequest,
    JobState,
    QueuedJob,
    SchedulerError,
    SchedulerSilent,
)
from bloomery.operate.schedulers.kubernetes import Kubernetes
from bloomery.operate.schedulers.machine import OneMachine
from bloomery.operate.schedulers.slurm import Slurm
from bloomery.operate.submission import (
    PartlyQueued,
    Submission,
    check_submittable,
    is_finished,
    jobs_of_run,
    keep_submission,
    kept_if_queued,
    kept_submission,
    nodes_of,
    note_cancelled,
    recipe_of_run,
    refuse_missing_run,
    request_of,
    scheduler_of,
    submission_of,
    submit,
    top_up,
    was_submitted,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


class Slow:
    """A scheduler that takes some seconds for an answer, or to say nothing."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.asked, self.takes_s, self.is_down = clock, 0, 0.0, True

    def jobs(self, *, name: str, run: Path) -> list[QueuedJob]:
        self.asked += 1
        self.clock[0] += self.takes_s
        if self.is_down:
            raise SchedulerError("it has not answered", remedy="Wait.")
        return []


def test_a_scheduler_that_took_long_to_say_nothing_is_spared_for_a_while(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    slow, recipe = Slow(clock), load_recipe("demo", ["submit.scheduler=slurm"]).recipe
    monkeypatch.setattr(submission, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(submission, "scheduler_of", lambda section, path: slow)
    for takes_s, after_s, asked in ((1.0, 0.0, 1), (60.0, 0.0, 2), (60.0, 44.0, 2), (60.0, 2.0, 3)):
        slow.takes_s, clock[0] = takes_s, clock[0] + after_s
        assert jobs_of_run(run, recipe) == ((), "it has not answered") and slow.asked == asked
    slow.is_down, clock[0] = False, clock[0] + 46.0
    for asked in (4, 5):
        assert jobs_of_run(run, recipe) == ([], "") and slow.asked == asked


@pytest.mark.parametrize(
    ("parallel", "nodes"),
    [
        ({"tensor": 8, "pipeline": 3, "data": 5, "ranks_per_node": 8}, 15),
        ({"tensor": 3, "pipeline": 1, "data": 3, "ranks_per_node": 4}, 3),
        ({"tensor": 2, "pipeline": 2, "data": 1, "ranks_per_node": 8}, 1),
        ({"tensor": 8, "pipeline": 3, "data": "auto", "ranks_per_node": 8}, 1),
        ({"tensor": 8, "pipeline": 3, "data": 5, "ranks_per_node": "auto"}, 1),
    ],
)
def test_a_job_has_nodes_for_all_its_ranks(parallel: dict[str, Any], nodes: int) -> None:
    assert nodes_of(SubmitSection(), ParallelSection(**parallel)) == nodes
    assert nodes_of(SubmitSection(nodes=7), ParallelSection(**parallel)) == 7


def requested(run: RunDirectory, *overrides: str, **more: Any) -> JobRequest:
    given: dict[str, Any] = {"recipe": "demo", "overrides": overrides, "directory": "/home/ann", **more}
    submission = Submission(**given)
    return request_of(submission, submission.load(), run, tasks=4, after="712")


def test_a_job_runs_the_launcher_with_all_that_was_given(run: RunDirectory) -> None:
    plain = requested(run)
    bloomery = (sys.executable, "-m", "bloomery")
    assert plain.command == (*bloomery, "launch", "demo", "--run", str(run.path), "--supervise")
    assert (plain.nodes, plain.tasks, plain.after, plain.top_up, plain.exclude) == (1, 4, "712", (), ())
    assert (plain.name, plain.run, plain.directory) == ("demo", run.path, Path("/home/ann"))
    Exclusions.of(run, plain.section).add(QuarantinedNode(host="n9", cause="x", since=1.0))
    Exclusions.of(run, plain.section).add(QuarantinedNode(host="n3", cause="x", since=1.0))
    settings = ("submit.nodes=3", "submit.spares=2", "submit.keep_queued=2")
    full = requested(run, *settings, nproc=8, more=("--job", "x"))
    words = [*bloomery, "launch", "demo", *settings, "--run", str(run.path), "--job", "x", "--nproc", "8"]
    assert full.command == (*words, "--supervise", "--spares", "2")
    assert (full.nodes, full.exclude) == (5, ("n3", "n9"))
    assert full.top_up == (*bloomery, "submit", "--top-up", str(run.path))


@pytest.mark.parametrize(
    ("queue", "requests"),
    [
        (("submit.queue=array",), [(4, "712")]),
        (("submit.queue=chain",), [(1, "712"), (1, "101"), (1, "102"), (1, "103")]),
        (("submit.queue=array", "submit.keep_queued=4"), [(1, "712"), (1, "101"), (1, "102"), (1, "103")]),
    ],
)
def test_jobs_are_one_array_or_each_waits_for_the_one_before(
    run: RunDirectory, queue: tuple[str, ...], requests: list[tuple[int, str]]
) -> None:
    scheduler = Queue()
    names = submit(scheduler, requested(run, *queue))
    assert [(request.tasks, request.after) for request in scheduler.requests] == requests
    assert names == [str(101 + number) for number in range(len(requests))]


class Refusing(Queue):
    """A queue that takes so many jobs and refuses all others."""

    def __init__(self, takes: int) -> None:
        super().__init__()
        self.takes = takes

    def submit(self, request: JobRequest) -> list[str]:
        if len(self.requests) == self.takes:
            raise SchedulerError("SLURM refused sbatch: no such partition", remedy="Name another.")
        return super().submit(request)


def test_a_chain_of_which_only_a_part_is_queued_says_which_jobs_are(run: RunDirectory) -> None:
    with pytest.raises(PartlyQueued, match=r"^Only 101, 102 of 4 jobs .* no such partition") as partly:
        submit(Refusing(2), requested(run, "submit.queue=chain"))
    assert partly.value.remedy == "Name another."
    with pytest.raises(SchedulerError, match=r"^SLURM refused"):
        submit(Refusing(0), requested(run, "submit.queue=chain"))


def test_what_the_scheduler_refuses_leaves_the_submission_that_queued_jobs_go_on_with(
    run: RunDirectory,
) -> None:
    first, second = (Submission(recipe="demo", overrides=(word,), directory="/") for word in ("a=1", "b=2"))
    with pytest.raises(SchedulerError), kept_if_queued(run, first):
        raise SchedulerError("no such partition")
    with pytest.raises(TrainingFailed, match="was never submitted"):
        kept_submission(run)
    with pytest.raises(SchedulerSilent), kept_if_queued(run, first):
        raise SchedulerSilent("it may have queued the job")
    assert kept_submission(run) == first
    with pytest.raises(SchedulerError), kept_if_queued(run, second):
        assert kept_submission(run) == second, "a job may start at once"
        raise SchedulerError("no such partition")
    assert kept_submission(run) == first
    with pytest.raises(PartlyQueued), kept_if_queued(run, second):
        raise PartlyQueued("only some")
    assert kept_submission(run) == second
    with kept_if_queued(run, first):
        pass
    assert kept_submission(run) == first


def queued(number: str, state: JobState, **more: Any) -> QueuedJob:
    return QueuedJob(job=number, state=state, state_text=str(state), **more)


@pytest.mark.parametrize(
    ("jobs", "submitted", "after"),
    [
        ([], 5, ""),
        ([queued("7", JobState.ENDED), queued("8", JobState.FAILED)], 5, ""),
        ([queued("7", JobState.RUNNING), queued("8_[2-4]", JobState.PENDING, tasks=3)], 1, "8"),
        ([queued("7", JobState.RUNNING, submitted=9.0), queued("6", JobState.HELD, submitted=2.0)], 3, "6"),
        (
            [queued("8", JobState.PENDING, submitted=2.0), queued("9", JobState.PENDING, submitted=1.0)],
            3,
            "8",
        ),
        ([queued("7", JobState.PENDING, tasks=6)], 0, ""),
    ],
)
def test_as_many_jobs_are_submitted_as_are_missing_behind_the_last_one(
    run: RunDirectory, jobs: list[QueuedJob], submitted: int, after: str
) -> None:
    scheduler, submission = Queue(), submission_of("demo", ["submit.keep_queued=5"], nproc=None)
    scheduler.jobs_here = jobs
    assert len(top_up(scheduler, submission, submission.load(), run)) == submitted
    assert len(scheduler.requests) == submitted
    assert submitted == 0 or scheduler.requests[0].after == after


@pytest.mark.parametrize(
    ("events", "finished"),
    [
        ([], False),
        ([{"event": "start"}, {"event": "end", "finished": True}], True),
        ([{"event": "start"}, {"event": "end", "finished": False}], False),
        ([{"event": "end", "finished": True}, {"event": "start"}], False),
        ([{"event": "end", "finished": True}, {"event": "note"}], True),
    ],
)
def test_a_run_that_used_all_its_samples_wants_no_job(
    run: RunDirectory, events: list[dict], finished: bool
) -> None:
    run.journal().write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert is_finished(run) == finished
    scheduler, submission = Queue(), submission_of("demo", ["submit.keep_queued=2"], nproc=None)
    assert len(top_up(scheduler, submission, submission.load(), run)) == (0 if finished else 2)


def test_settings_that_contradict_each_other_are_refused() -> None:
    for seconds, is_refused in ((119, False), (120, True)):
        overrides = [f"submit.signal_before_s={seconds}", "submit.minutes=2"]
        loaded = load_recipe("demo", overrides)
        if is_refused:
            with pytest.raises(SchedulerError, match="signal_before_s"):
                check_submittable(loaded, overrides=overrides)
        else:
            check_submittable(loaded, overrides=overrides)
    both = ["submit.tasks=3", "submit.keep_queued=2"]
    check_submittable(load_recipe("demo", both), overrides=both[1:])
    check_submittable(load_recipe("demo", both[:1]), overrides=both[:1])
    with pytest.raises(SchedulerError, match="keep_queued"):
        check_submittable(load_recipe("demo", both), overrides=both)


def test_a_submission_comes_back_as_it_was_kept(run: RunDirectory) -> None:
    assert not was_submitted(run)
    with pytest.raises(TrainingFailed, match="was never submitted"):
        kept_submission(run)
    given = Submission(
        recipe="/r/é.toml", overrides=("a=1", "b=2"), directory="/home/ann", nproc=4, more=("--job", "x")
    )
    keep_submission(run, given)
    assert was_submitted(run) and kept_submission(run) == given
    record = json.loads((run.path / "submission.json").read_text())
    del record["more"]
    (run.path / "submission.json").write_text(json.dumps(record | {"of_a_later_version": 1}))
    assert kept_submission(run).more == ()
    for damage in ("{", "[]", "{}"):
        (run.path / "submission.json").write_text(damage)
        with pytest.raises(TrainingFailed, match="cannot be read"):
            kept_submission(run)


def test_the_recipe_of_a_run_is_its_own_though_the_file_that_was_submitted_was_moved(
    run: RunDirectory,
) -> None:
    keep_submission(run, Submission(recipe="/moved/mine.toml", overrides=(), directory="/"))
    with pytest.raises(BloomeryError, match=r"mine\.toml"):
        recipe_of_run(run)
    run.recipe.write_text(Path(__file__).parents[2].joinpath("recipes/demo.toml").read_text())
    assert recipe_of_run(run).run.name == "demo"


def test_a_submission_names_its_recipe_wherever_it_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(Path(__file__).parents[2].joinpath("recipes/demo.toml").read_text())
    given = submission_of("mine.toml", ["train.steps=8"], nproc=3)
    assert given == Submission(
        recipe=str(tmp_path / "mine.toml"), overrides=("train.steps=8",), directory=str(tmp_path), nproc=3
    )
    assert submission_of("demo", [], nproc=None).recipe == "demo"


def test_a_run_that_is_submitted_again_may_lie_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in (tmp_path / "a", tmp_path / "demo"):
        (run / "incarnations").mkdir(parents=True)
        (run / "recipe.toml").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert submission_of("~/a", [], nproc=None).recipe == str(tmp_path / "a")
    assert submission_of("a", [], nproc=None).recipe == str(tmp_path / "a")
    assert submission_of("demo", [], nproc=None).recipe == "demo", "a shipped recipe goes before a run"


def test_a_run_whose_jobs_all_ended_before_they_wrote_its_recipe_is_submitted_again_as_it_was(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.path.parent)
    given = ("run.name=mine", "train.steps=800", "submit.scheduler=slurm")
    keep_submission(run, Submission(recipe="demo", overrides=given, directory="/", nproc=3))
    assert submit_command([run.path.name, "train.steps=900", "--dry-run"]) == 0
    script = capsys.readouterr().out
    words = "launch demo run.name=mine train.steps=800 submit.scheduler=slurm train.steps=900"
    assert f"{words} --run {run.path} --nproc 3 --supervise" in script


def test_a_run_is_over_though_much_was_noted_since(run: RunDirectory) -> None:
    events = [{"event": "end", "finished": True}, *({"event": "note", "text": "x" * 500} for _ in range(99))]
    run.journal().write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert is_finished(run)


@pytest.mark.parametrize("has_slurm", [True, False])
def test_the_scheduler_is_the_one_of_the_recipe_or_the_one_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_slurm: bool
) -> None:
    monkeypatch.setattr(Slurm, "is_here", staticmethod(lambda: has_slurm))
    found = {
        name: type(scheduler_of(SubmitSection(scheduler=name), tmp_path))
        for name in ("auto", "slurm", "machine", "kubernetes")
    }
    here = Slurm if has_slurm else OneMachine
    assert found == {"auto": here, "slurm": Slurm, "machine": OneMachine, "kubernetes": Kubernetes}
    kubernetes = scheduler_of(SubmitSection(scheduler="kubernetes", namespace="ours"), tmp_path)
    assert isinstance(kubernetes, Kubernetes) and kubernetes._namespace == ["--namespace", "ours"]


def test_only_a_run_or_a_submission_can_be_looked_at(tmp_path: Path, run: RunDirectory) -> None:
    nothing = RunDirectory(tmp_path / "nothing")
    with pytest.raises(BloomeryError, match="There is no run"):
        refuse_missing_run(nothing)
    nothing.path.mkdir()
    (nothing.path / "submission.json").touch()
    refuse_missing_run(nothing)


def test_a_job_of_this_machine_fills_its_queue_before_it_trains(run: RunDirectory) -> None:
    script = OneMachine(run.path).script(
        requested(run, "submit.keep_queued=2", "submit.setup=['module load x']")
    )
    lines = script.splitlines()
    assert lines[:5] == ["set -euo pipefail", "umask 002", "set +u", "module load x", "set -u"]
    assert lines[5].endswith('|| echo "the queue could not be filled"') and "--top-up" in lines[5]
    assert lines[6] == "trap '' USR1" and lines[7].startswith("exec ") and len(lines) == 8
    with pytest.raises(SchedulerError, match="wants 2 nodes"):
        OneMachine(run.path).submit(requested(run, "submit.nodes=2"))


def test_jobs_that_were_cancelled_before_a_start_are_noted_where_the_run_has_records(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.operations.parent.mkdir(parents=True)
    note_cancelled(run, ["7"])
    assert not run.operations.exists() and not run.exists()
    run.operations.touch()
    note_cancelled(run, ["7", "8"])
    (event,) = read_journal(run.operations)
    assert (event["event"], event["state"], event["jobs"]) == ("job", "cancelled", ["7", "8"])


@pytest.mark.parametrize(("nodes", "spares", "is_refused"), [(1, 0, False), (1, 1, True), (2, 0, True)])
def test_the_job_of_a_peer_has_one_node_and_no_spare(nodes: int, spares: int, is_refused: bool) -> None:
    settings = [f"submit.nodes={nodes}", f"submit.spares={spares}"]
    loaded = load_recipe("diloco-internet", settings)
    if not is_refused:
        check_submittable(loaded, overrides=settings)
        return
    with pytest.raises(SchedulerError, match="A peer runs on one machine"):
        check_submittable(loaded, overrides=settings)


def test_a_record_that_cannot_be_written_hides_no_job_that_was_cancelled(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    note_cancelled(run, ["7"])
    (event,) = read_journal(run.operations)
    assert event["jobs"] == ["7"], "a run that has begun gets its first record"
    run.operations.unlink()
    run.operations.mkdir()
    note_cancelled(run, ["8"])
    assert len(caplog.records) == 1


def test_a_submission_that_a_disk_refuses_is_told_and_hides_nothing_that_the_scheduler_says(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Submission(recipe="demo", overrides=(word,), directory="/") for word in ("a=1", "b=2"))
    keep_submission(run, first)

    def refuse(path: Path, text: str | bytes) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(SchedulerError, match="no such partition"), kept_if_queued(run, second):
        monkeypatch.setattr(submission.durable, "write_whole", refuse)
        raise SchedulerError("no such partition")
    with pytest.raises(StorageError, match="Keeping the submission"):
        keep_submission(run, first)


def test_a_run_that_is_named_from_here_is_the_same_to_its_jobs_and_its_scheduler(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.path.parent)
    here, asked = RunDirectory(Path(run.path.name)), list[Any]()
    scheduler = Queue()
    monkeypatch.setattr(scheduler, "jobs", lambda *, name, run: asked.append((name, run)) or [])
    monkeypatch.setattr(submission, "scheduler_of", lambda section, path: asked.append(path) or scheduler)
    kept = submission_of("demo", ["submit.keep_queued=1"], nproc=None)
    assert jobs_of_run(here, kept.load().recipe) == ([], "")
    assert top_up(scheduler, kept, kept.load(), here) == ["101"]
    assert asked == [run.path, ("demo", run.path), ("demo", run.path)]
    (request,) = scheduler.requests
    assert request.run == run.path and request.top_up[-1] == str(run.path)
    assert request.command[-2:] == (str(run.path), "--supervise")
