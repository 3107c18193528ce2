"""What is submitted: the script, its words and settings, the rehearsal; and what the queue's records mean."""

from __future__ import annotations

import json
import os
import pwd
import stat
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.faults.commands import Said

from bloomery.cli import submit
from bloomery.config.find import shipped_recipes
from bloomery.config.load import load_recipe
from bloomery.config.submit import SubmitSection
from bloomery.config.trial import WITHIN_ITS_DIRECTORY
from bloomery.config.validate import check_recipe
from bloomery.errors import RunBusy
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import lock_run
from bloomery.operate import group_access
from bloomery.operate.blame import diagnose
from bloomery.operate.diagnosis import Cause
from bloomery.operate.exclusions import exclude_in_queue
from bloomery.operate.failure_evidence import FailureEvidence, RankEnd
from bloomery.operate.group_access import AccessRepair, share_with_group
from bloomery.operate.job_context import reactions_of
from bloomery.operate.rehearsal import rehearsal_of
from bloomery.operate.schedulers.interface import JobRequest, JobState, QueuedJob, SchedulerError
from bloomery.operate.schedulers.slurm import batch_script, parse_job, state_of
from bloomery.operate.submission import keep_submission, nodes_of, request_of, submission_of, top_up
from bloomery.plan.ranks import degrees_of

Here = Callable[..., Said]


def test_the_script_asks_for_what_the_recipe_says_and_hands_the_status_on(here: Here, tmp_path: Path) -> None:
    section = (
        "submit.tasks=3", "submit.nodes=4", "submit.spares=1", "submit.account=abc", "submit.nice=100",
        "submit.exclude=['bad1','bad2']", "submit.minutes=5990", "submit.gpus_per_node=8",
    )  # fmt: skip
    said = here("submit", "demo", "submit.scheduler=slurm", *section, "--run", tmp_path, "--dry-run")
    assert said.status == 0, said
    lines = said.out.splitlines()
    wanted = {
        "nodes=5", "array=1-3%1", "account=abc", "nice=100", "exclude=bad1,bad2", "time=4-03:50:00",
        "gpus-per-node=8", "signal=USR1@300", "no-requeue", "no-kill", f"comment=bloomery:{tmp_path}",
    }  # fmt: skip
    assert {f"#SBATCH --{option}" for option in wanted} <= set(lines)
    assert lines[-1] == 'exit "$status"' and "set -euo pipefail" in lines
    (srun,) = (line for line in lines if line.startswith("srun"))
    assert srun.endswith("|| status=$?") and "--no-kill" in srun and "%N-%t" in srun
    assert not (tmp_path / "logs").exists(), "a dry run writes nothing"


def test_lines_of_the_set_up_may_read_variables_that_nobody_set(here: Here, tmp_path: Path) -> None:
    setup = "submit.setup=['echo $NOBODY_SET_THIS']"
    said = here("submit", "demo", "submit.scheduler=slurm", setup, "--run", tmp_path, "--dry-run")
    lines = said.out.splitlines()
    before_srun = lines[: next(number for number, line in enumerate(lines) if line.startswith("srun"))]
    script = "\n".join(before_srun)
    environment = os.environ | {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"}
    ended = subprocess.run(
        ["bash", "-c", f"{script}\necho $-"], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "u" in ended.stdout.splitlines()[-1], "after them an unset variable is a mistake again"


@pytest.mark.parametrize(
    ("word", "reason", "state"),
    [
        ("PENDING", "Resources", JobState.PENDING),
        ("PENDING", "JobHeldUser", JobState.HELD),
        ("PENDING", "DependencyNeverSatisfied", JobState.NEVER),
        ("RUNNING", "None", JobState.RUNNING),
        ("COMPLETING", "None", JobState.COMPLETING),
        ("SUSPENDED", "None", JobState.SUSPENDED),
        ("NODE_FAIL", "None", JobState.FAILED),
        ("TIMEOUT", "TimeLimit", JobState.FAILED),
        ("CANCELLED", "None", JobState.ENDED),
    ],
)
def test_what_slurms_states_mean(word: str, reason: str, state: JobState) -> None:
    assert state_of(word, reason) == state


def test_the_tasks_of_an_array_that_wait_are_one_record() -> None:
    line = "\x1f".join(
        ("71", "71", "2-5,8%1", "PENDING", "Resources", "ada", "", "2026-01-02T03:04:05", "N/A",
         "2026-01-01T00:00:00", "bloomery:/r")
    )  # fmt: skip
    job, comment = parse_job(line)
    assert (job.job, job.tasks, comment, job.user) == ("71_[2-5,8]", 5, "bloomery:/r", "ada")
    assert job.expected_start is not None and job.started is None and job.ends is None
    running = (
        line.replace("2-5,8%1", "3").replace("PENDING", "RUNNING").replace("\x1f\x1f", "\x1fa[08-10],b\x1f")
    )
    job, _ = parse_job(running)
    assert (job.job, job.nodes, job.tasks) == ("71_3", ("a08", "a09", "a10", "b"), 1)


PLACES = [
    "sync.place=hf:people/run",
    "sync.checkpoints=true",
    'log.trackers=["wandb"]',
    "backup.url=s3://b/x",
]
PLACES += ["second_backup.url=file:///y", "checkpoint.url=s3://b/z"]


def test_trials_of_a_recipe_leave_the_places_of_its_run_alone() -> None:
    kept = load_recipe("demo", PLACES).recipe
    assert kept.backup.url and kept.second_backup.url and kept.checkpoint.url and kept.sync.place
    trial = load_recipe("demo", [*PLACES, *WITHIN_ITS_DIRECTORY]).recipe
    places = (trial.checkpoint.url, trial.backup.url, trial.second_backup.url, trial.sync.place)
    assert places == ("",) * 4 and not trial.sync.checkpoints and not trial.log.trackers
    rehearsal = load_recipe("demo", [*PLACES, *rehearsal_of(kept)]).recipe
    assert (rehearsal.sync.place, rehearsal.sync.checkpoints, rehearsal.log.trackers) == ("", False, ())
    assert rehearsal.backup.url and rehearsal.run.name != kept.run.name, "it saves under its own name"


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_rehearsal_keeps_what_two_nodes_hold_and_is_a_recipe_without_mistakes(name: str) -> None:
    recipe = load_recipe(name).recipe
    small = load_recipe(name, rehearsal_of(recipe))
    parallel = small.recipe.parallel
    check_recipe(
        small.recipe, small.sources, data_degree=None if parallel.data == "auto" else int(parallel.data)
    )
    kept = ("tensor", "zero", "sequence", "offload", "ranks_per_node")
    assert all(getattr(parallel, key) == getattr(recipe.parallel, key) for key in kept)
    assert (small.recipe.train.precision, small.recipe.optim.name) == (
        recipe.train.precision,
        recipe.optim.name,
    )
    assert small.recipe.model.layers <= 8 and small.recipe.model.hidden <= 512
    if parallel.ranks_per_node != "auto":
        degrees = degrees_of(parallel, world=2 * int(parallel.ranks_per_node))
        assert degrees is not None and nodes_of(small.recipe.submit, parallel) == 2


@pytest.mark.parametrize(("minutes", "asked"), [(600.0, 20.0), (7.0, 7.0)])
def test_a_rehearsal_asks_for_no_more_time_than_it_needs_or_the_run_may_have(
    minutes: float, asked: float
) -> None:
    recipe = load_recipe("demo", [f"submit.minutes={minutes}"]).recipe
    assert load_recipe("demo", rehearsal_of(recipe)).recipe.submit.minutes == asked


def test_nodes_follow_from_the_degrees() -> None:
    recipe = load_recipe("tr11-176b").recipe
    assert nodes_of(recipe.submit, recipe.parallel) == 48
    assert nodes_of(SubmitSection(nodes=3), recipe.parallel) == 3


class Queue:
    """Counts what is submitted; jobs: what waits or runs."""

    name = "counting"

    def __init__(self) -> None:
        self.requests, self.jobs_here = [], []

    def submit(self, request):
        self.requests.append(request)
        return [str(100 + len(self.requests))]

    def jobs(self, *, name, run):
        return self.jobs_here


def test_the_queue_is_filled_up_as_a_chain_until_the_run_is_stopped(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rundir, queue = RunDirectory(tmp_path / "run").create(), Queue()
    submission = submission_of("demo", ["submit.keep_queued=3"], nproc=2)
    loaded = submission.load()
    assert top_up(queue, submission, loaded, rundir) == ["101", "102", "103"]
    assert [request.after for request in queue.requests] == ["", "101", "102"]
    first = request_of(submission, loaded, rundir, tasks=1)
    assert first.top_up[-2:] == ("--top-up", str(rundir.path)) and first.command[-3:] == (
        "--nproc",
        "2",
        "--supervise",
    )
    queue.requests.clear()
    queue.jobs_here = [QueuedJob(job="7", tasks=3, state=JobState.PENDING, state_text="PENDING")]
    assert top_up(queue, submission, loaded, rundir) == [] == queue.requests, "it is full"
    queue.jobs_here = []
    none_kept = submission_of("demo", ["submit.keep_queued=0"], nproc=2)
    assert top_up(queue, none_kept, none_kept.load(), rundir) == [] == queue.requests
    rundir.control("stop").touch()
    assert top_up(queue, submission, loaded, rundir) == []


def test_a_switch_in_the_directory_of_the_recipe_keeps_the_queue_from_filling_up(
    here: Here, tmp_path: Path
) -> None:
    rundir, queue, elsewhere = RunDirectory(tmp_path / "run").create(), Queue(), tmp_path / "switches"
    submission = submission_of(
        "demo", ["submit.keep_queued=3", f"control.directory={json.dumps(str(elsewhere))}"], nproc=2
    )
    elsewhere.mkdir()
    (elsewhere / "stop").touch()
    assert top_up(queue, submission, submission.load(), rundir) == [] == queue.requests
    words = ["demo", f"control.directory={json.dumps(str(elsewhere))}", "--run", str(rundir.path)]
    refused = here("submit", *words)
    assert refused.status == 1 and f"bloomery stop --at {elsewhere} --disarm" in refused.err


def test_files_that_the_group_cannot_write_are_repaired(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    run.control_dir.chmod(0o700)
    run.operations.write_text("x")
    run.operations.chmod(0o600)
    assert share_with_group(run.path).repaired >= 2
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (run.control_dir, run.operations)]
    assert [mode & 0o070 for mode in modes] == [0o070, 0o060] and modes[0] & stat.S_ISGID
    again = share_with_group(run.path)
    assert (again.repaired, again.refused) == (0, {})


@pytest.mark.needs(lambda: os.geteuid() == 0, rights="root, to give a directory away")
def test_an_owner_whom_the_machine_has_no_name_for_is_told_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {entry.pw_uid for entry in pwd.getpwall()}
    owner, other = sorted({*range(50_000, 60_000)} - named)[:2]
    monkeypatch.chdir(tmp_path)  # the directories above it are root's alone
    tmp_path.chmod(0o755)
    run = Path("run")
    run.mkdir(mode=0o700)
    os.chown(run, owner, -1)
    os.seteuid(other)
    try:
        repair = share_with_group(run)
    finally:
        os.seteuid(0)
    assert repair == AccessRepair(repaired=0, refused={str(owner): (run,)})


def test_files_of_others_that_the_group_may_not_write_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {"mary": (Path("a"), Path("b"), Path("c")), "tom": (Path("d"),)}
    monkeypatch.setattr(
        group_access, "share_with_group", lambda run, *, group: AccessRepair(repaired=0, refused=refused)
    )
    submit._prepare(RunDirectory(tmp_path / "run"), load_recipe("demo"))
    assert [line.removeprefix("bloomery submit: ") for line in capsys.readouterr().err.splitlines()] == [
        "mary owns a and 2 more, which the group may not write",
        "tom owns d, which the group may not write",
    ]


def test_what_cannot_be_submitted_is_refused(here: Here, tmp_path: Path) -> None:
    machine = ("submit.scheduler=machine", "--run", tmp_path / "r")
    here("submit", "demo", *machine, "submit.nodes=2").refuses("wants 2 nodes", "only on this machine")
    here("submit", "demo", *machine, "submit.minutes=1").refuses("signal_before_s", "1 minutes")
    here("submit", "demo", *machine, "submit.group=nosuchgroup").refuses("no group 'nosuchgroup'")
    here("submit", "diloco-internet", *machine).refuses("peer")
    here("stop", tmp_path / "r")
    here("submit", "demo", *machine).refuses("is armed", "--disarm")
    here("status", tmp_path / "none").refuses("There is no run")


def test_a_chain_goes_on_after_its_last_job_and_after_whole_arrays(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rundir, queue = RunDirectory(tmp_path / "run").create(), Queue()
    submission = submission_of("demo", ["submit.keep_queued=9"], nproc=None)
    loaded = submission.load()
    waits = {"state": JobState.PENDING, "state_text": "PENDING", "submitted": 5.0}  # in the same second
    queue.jobs_here = [QueuedJob(job=job, **waits) for job in ("999", "1000")]
    top_up(queue, submission, loaded, rundir)
    assert queue.requests[0].after == "1000"
    queue.jobs_here = [QueuedJob(job="712_[2-5]", tasks=4, **waits)]
    top_up(queue, submission, loaded, rundir)
    assert queue.requests[7].after == "712", "sbatch takes no range of tasks in a dependency"


@pytest.mark.parametrize("node", ["n1\ntouch here", 'n1 "n2'])
def test_no_value_becomes_a_line_of_the_batch_script(node: str, tmp_path: Path) -> None:
    request = JobRequest(
        name="x",
        run=tmp_path,
        directory=tmp_path,
        command=("true",),
        nodes=1,
        section=SubmitSection(),
        exclude=(node,),
    )
    with pytest.raises(SchedulerError, match="cannot stand in a batch script"):
        batch_script(request)


def test_a_scheduler_that_does_not_answer_has_cancelled_nothing(here: Here, tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path / "run").create()
    keep_submission(rundir, submission_of("demo", ["submit.scheduler=slurm"], nproc=None))
    here("cancel", rundir.path).refuses("squeue")


def test_a_run_in_use_is_not_stopped_by_the_job_that_found_it_so(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path / "run").create()
    with lock_run(rundir), pytest.raises(RunBusy) as busy:
        lock_run(rundir)
    told = {"error": f"RunBusy: {busy.value}", "log": f"bloomery train: {busy.value}\n"}
    for name, words in told.items():
        end = replace(RankEnd(rank=0, status=1), **{name: words})
        diagnosis = diagnose(FailureEvidence(ranks=[end]))
        assert diagnosis.cause == Cause.RUN_BUSY and not diagnosis.retries
        reactions_of(rundir, load_recipe("demo"), say=print).on_repeating(diagnosis)
        assert not rundir.control("stop").exists(), "the switch would stop the training that holds the run"


def test_a_run_given_as_the_recipe_is_the_run_that_goes_on(here: Here, tmp_path: Path) -> None:
    """At night a person has the run's directory, which need not lie in runs/ nor have the recipe's name."""
    run = RunDirectory(tmp_path / "scratch" / "seven").create()
    run.recipe.write_text(shipped_recipes()["demo-small"].read_text())
    run.incarnation(1).write_text('{"base": null}')
    said = here("submit", run.path, "submit.scheduler=slurm", "--dry-run")
    assert f"launch {run.path} " in said.out and f"--run {run.path} " in said.out, said
    rehearsal = here("submit", run.path, "submit.scheduler=slurm", "--dry-run", "--rehearse")
    assert "/runs/demo-small-rehearsal " in rehearsal.out, rehearsal
    run.control("stop").write_text("")
    assert f"{run.control('stop')} is armed" in here("launch", run.path, "--supervise").err


def test_a_node_that_is_excluded_later_joins_those_of_the_recipe(tmp_path: Path) -> None:
    told: list[tuple[list[str], list[str]]] = []
    states = {"1": JobState.RUNNING, "2": JobState.PENDING, "3": JobState.HELD, "4": JobState.ENDED}
    queue = SimpleNamespace(
        jobs=lambda *, name, run: [SimpleNamespace(job=job, state=state) for job, state in states.items()],
        exclude=lambda jobs, nodes: told.append((list(jobs), list(nodes))),
    )
    section = SubmitSection(exclude=("node7", "node9"))
    rundir = RunDirectory(tmp_path)
    assert exclude_in_queue(queue, rundir, name="x", section=section, nodes=["node3"]) == ["2", "3"]
    assert told == [(["2", "3"], ["node3", "node7", "node9"])]
