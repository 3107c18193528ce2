"""Supervision over several nodes, and the switches of a run, at many moments: what takes minutes."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import statistics
import sys
import time
from pathlib import Path

import pytest
from tests.faults.commands import bloomery, events, steps_told, wait_for
from tests.operate.emulated_nodes import QUICK, Train, beat_of, nodes, told
from tests.operate.slurm_cluster import PACKAGES, can_run, started

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.config.submit import SubmitSection
from bloomery.events.journal import last_step, loss_curve
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.schedulers.interface import JobRequest, JobState, QueuedJob
from bloomery.operate.schedulers.machine import OneMachine
from bloomery.operate.schedulers.slurm import Slurm

MOMENTS = int(os.environ.get("BLOOMERY_SOAK_MOMENTS", "100"))
TRIALS = int(os.environ.get("BLOOMERY_SOAK_TRIALS", "20"))
TASKS = int(os.environ.get("BLOOMERY_SOAK_TASKS", "9"))
SEED = int(os.environ.get("BLOOMERY_SOAK_SEED", "1"))
MINUTES = os.environ.get("BLOOMERY_SOAK_JOB_MINUTES", "1.2")
"""The time limit of a job: its signal comes a minute before, at the start of the training or before it."""


@pytest.mark.slow
def test_the_next_node_leads_when_the_first_is_lost_and_the_spare_takes_its_ranks(
    train_command: Train, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    command = train_command("train.samples=400", *QUICK)
    with nodes("node1 node2 node10", command, spares=1, place=tmp_path) as started:
        beat_of(run, attempt=1, from_step=6)
        started["node1"].signal(signal.SIGKILL)
        for name in ("node2", "node10"):
            assert started[name].process.wait(240) == 0, started[name].log.read_text()
    assert [attempt["hosts"] for attempt in told(run, "attempt")] == [["node1", "node2"], ["node10", "node2"]]
    (lost,) = told(run, "diagnosis")
    assert (lost["cause"], lost["culprit"]["host"], lost["gives_up"]) == ("node lost", "node1", "")
    losses = loss_curve(run)
    assert losses == loss_curve(run, rank=1) and [step for step, _ in losses] == list(
        range(1, len(losses) + 1)
    )


@pytest.mark.slow
def test_a_killed_rank_a_lost_leader_and_a_frozen_node_end_no_run(
    train_command: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "run")
    struck: list[float] = []
    command = train_command("train.samples=2400", *QUICK)
    with nodes("node1 node2 node3 node10", command, spares=2, place=tmp_path) as started:
        killed = beat_of(run, attempt=1, from_step=6)
        struck.append(time.time())
        os.kill(killed.pid, signal.SIGKILL)
        beat_of(run, attempt=2, from_step=12)
        struck.append(time.time())
        started["node1"].signal(signal.SIGKILL)
        second = beat_of(run, attempt=3, from_step=18)
        assert second.host == "node2", "those that go on keep their ranks"
        frozen = started["node2"]
        struck.append(time.time())
        frozen.signal(signal.SIGSTOP)
        beat_of(run, attempt=4, from_step=24)
        frozen.signal(signal.SIGCONT)
        for name in ("node3", "node10", "node2"):
            assert started[name].process.wait(240) == 0, started[name].log.read_text()
    assert [attempt["hosts"] for attempt in told(run, "attempt")] == [
        ["node1", "node2"], ["node1", "node2"], ["node3", "node2"], ["node3", "node10"],
    ]  # fmt: skip
    causes = [(record["cause"], record["culprit"]["host"]) for record in told(run, "diagnosis")]
    ends = [record["time"] for record in told(run, "attempt_end")]
    noticed = [round(end - moment, 1) for end, moment in zip(ends, struck, strict=False)]
    names = ("rank killed", "node lost", "node frozen")
    with capsys.disabled():
        print(
            json.dumps({"name": "nodes lost", "noticed and ended, s": dict(zip(names, noticed, strict=True))})
        )
    assert causes == [("killed", "node2"), ("node lost", "node1"), ("node lost", "node2")]
    losses = loss_curve(run)
    assert losses == loss_curve(run, rank=1) and [step for step, _ in losses] == list(
        range(1, len(losses) + 1)
    )


@pytest.mark.slow
def test_a_hang_is_told_from_the_stacks_of_all_nodes_and_too_few_nodes_end_the_job(
    train_command: Train, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    with nodes(
        "node1 node2", train_command("train.samples=9000", *QUICK), spares=0, place=tmp_path
    ) as started:
        os.kill(beat_of(run, attempt=1, from_step=6).pid, signal.SIGSTOP)
        beat_of(run, attempt=2, from_step=8)
        (hang,) = told(run, "diagnosis")
        started["node2"].signal(signal.SIGKILL)
        assert started["node1"].process.wait(240) == 67, started["node1"].log.read_text()
    assert (hang["cause"], hang["culprit"]["rank"], hang["culprit"]["host"], hang["sure"]) == (
        "hang",
        1,
        "node2",
        True,
    )
    assert "1 of 2 nodes are left" in told(run, "diagnosis")[-1]["gives_up"]


def jobs_of(run: RunDirectory) -> list[QueuedJob]:
    return OneMachine(run.path).jobs(name="tiny", run=run.path)


def submit_command(train_command: Train, *more: str) -> list[str]:
    _, recipe, *rest = train_command(*QUICK, "submit.scheduler=machine", *more)
    return ["submit", recipe, *rest]


@pytest.mark.slow
def test_a_stop_at_random_moments_ends_all_ranks_at_one_step_and_no_queued_task_trains(
    train_command: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, draw, begun = RunDirectory(tmp_path / "run"), random.Random(SEED), time.monotonic()
    submit = submit_command(train_command, "train.samples=4000000", "--nproc", "2", "submit.tasks=2")
    first = bloomery(*submit)
    assert first.status == 0, first
    wait_for(lambda: steps_told(run.path) >= 3)
    start_up_s, before_training = time.monotonic() - begun, 0
    seconds, unequal, lost = [], 0, 0
    for moment in range(MOMENTS):
        if moment:
            assert bloomery("stop", str(run.path), "--disarm").status == 0
            before = last_step(run.journal())
            again = bloomery(*submit)
            assert again.status == 0, again
            time.sleep(draw.uniform(0.0, 1.3 * start_up_s))
            before_training += last_step(run.journal()) == before
        (run.control_dir / "stop").touch()
        pressed = time.monotonic()
        wait_for(lambda: all(job.state.is_over for job in jobs_of(run)))
        seconds.append(time.monotonic() - pressed)
        assert {job.state for job in jobs_of(run)[-2:]} == {JobState.ENDED}, jobs_of(run)[-2:]
        first_rank, second_rank = (last_step(run.journal(rank=rank)) for rank in (0, 1))
        unequal += first_rank != second_rank
        lost += checkpoints(run)[-1].step != first_rank
    curve = loss_curve(run)
    starts = [event["step"] for event in events(run.path, "start")]
    figures = {
        "name": "stop at random moments",
        "seed": SEED,
        "moments": MOMENTS,
        "of them before the first step": before_training,
        "ranks that stopped at different steps": unequal,
        "stops that lost a step": lost,
        "starts that trained": len(starts),
        "longest until both jobs had ended, s": round(max(seconds), 1),
        "start-up, s": round(start_up_s, 1),
        "steps": curve[-1][0],
        "seconds": round(time.monotonic() - begun, 1),
    }
    with capsys.disabled():
        print(json.dumps(figures))
    assert unequal == lost == 0 and len(starts) <= MOMENTS
    assert [step for step, _ in curve] == list(range(1, curve[-1][0] + 1))


@pytest.mark.slow
def test_a_run_that_its_time_limit_cuts_again_and_again_loses_no_step(
    train_command: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, begun = RunDirectory(tmp_path / "run"), time.monotonic()
    limit = (f"submit.minutes={MINUTES}", "submit.signal_before_s=60", f"submit.tasks={TRIALS}")
    submitted = bloomery(*submit_command(train_command, "train.samples=4000000", "--nproc", "1", *limit))
    assert submitted.status == 0, submitted
    while not all(job.state.is_over for job in jobs_of(run)):
        time.sleep(1.0)
    starts = [event["step"] for event in events(run.path, "start")]
    ends = [event["step"] for event in events(run.path, "end")]
    lost = sum(end - start for end, start in zip(ends, starts[1:], strict=False))
    states = [job.state for job in jobs_of(run)]
    figures = {
        "name": "time limit of a job",
        "trials": TRIALS,
        "jobs that trained": len(starts),
        "lost steps": lost,
        "jobs that failed": states.count(JobState.FAILED),
        "seconds of each job": [round((job.ends or 0.0) - (job.started or 0.0), 1) for job in jobs_of(run)],
        "steps": steps_told(run.path),
        "seconds": round(time.monotonic() - begun, 1),
    }
    with capsys.disabled():
        print(json.dumps(figures))
    assert lost == 0 and len(starts) == len(ends) == TRIALS and set(states) == {JobState.ENDED}


@pytest.mark.slow
@pytest.mark.needs(can_run, package=PACKAGES)
def test_the_next_task_of_an_array_begins_soon_after_one_has_failed(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    clock = "import time; open('moments', 'a').write(f'{time.time()}\\n')"
    mark = shlex.join([sys.executable, "-c", clock])
    request = JobRequest(
        name="x",
        run=run.path,
        directory=run.path,
        command=("bash", "-c", f"{mark}; sleep 1; {mark}; exit 1"),
        nodes=1,
        section=SubmitSection(minutes=5.0, memory_per_node="100M"),
        tasks=TASKS,
    )
    with started(tmp_path_factory.mktemp("slurm")) as cluster:
        slurm = Slurm(cluster.environment)
        slurm.submit(request)
        cluster.wait_until(lambda: _moments(run, TASKS))
    moments = _moments(run, TASKS)
    gaps = [moments[2 * task] - moments[2 * task - 1] for task in range(1, TASKS)]
    figures = {
        "name": "array hand-over",
        "tasks": TASKS,
        "seconds": [round(gap, 2) for gap in gaps],
        "median, s": round(statistics.median(gaps), 2),
        "longest, s": round(max(gaps), 2),
    }
    with capsys.disabled():
        print(json.dumps(figures))
    assert all(gap >= 0.0 for gap in gaps), "never two tasks at a time"


def _moments(run: RunDirectory, tasks: int) -> list[float]:
    """Return when each task began and ended, once all have."""
    path = run.path / "moments"
    lines = path.read_text().splitlines() if path.exists() else []
    return [float(line) for line in lines] if len(lines) == 2 * tasks else []
