"""Jobs of a real SLURM that reach their time limit, many times: no step is lost, and none has failed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.commands import bloomery, events, steps_told
from tests.operate.slurm_cluster import PACKAGES, can_run, started

from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.schedulers.interface import JobState
from bloomery.operate.schedulers.slurm import Slurm

TRIALS = int(os.environ.get("BLOOMERY_SOAK_TRIALS", "20"))
BESIDE = int(os.environ.get("BLOOMERY_SOAK_RUNS", "4"))
"""Runs beside each other, each of which makes its part of the trials."""
MINUTES = os.environ.get("BLOOMERY_SOAK_JOB_MINUTES", "3")
SMALL = ("submit.scheduler=slurm", "submit.memory_per_node=900M", "submit.cpus_per_node=2", "--nproc", "1")
LONG = ("train.samples=40_000_000", "optim.name=adamw", "evaluate.every_steps=0", "train.compile=off")


@pytest.mark.slow
@pytest.mark.needs(can_run, package=PACKAGES)
def test_no_time_limit_of_slurm_costs_a_step(
    train_command: Callable[..., list[str]],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    began, tasks = time.monotonic(), -(-TRIALS // BESIDE)
    limit = (f"submit.minutes={MINUTES}", "submit.signal_before_s=60", f"submit.tasks={tasks}")
    runs = [RunDirectory(Path(train_command(run=f"run{number}")[3])) for number in range(BESIDE)]
    lost, trained, failed, seconds = 0, 0, 0, []
    with started(tmp_path_factory.mktemp("slurm")) as cluster:
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, cluster.environment[name])
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        slurm = Slurm()
        for number, run in enumerate(runs):
            _, recipe, *_ = train_command(run=run.path.name)
            named = ("--run", str(run.path), f"run.name=limit{number}")
            said = bloomery("submit", recipe, *named, *SMALL, *LONG, *limit)
            assert said.status == 0, said
        jobs = {run: slurm.jobs(name=f"limit{number}", run=run.path) for number, run in enumerate(runs)}
        while not all(job.state.is_over for of_run in jobs.values() for job in of_run):
            time.sleep(2.0)
            jobs = {run: slurm.jobs(name=f"limit{number}", run=run.path) for number, run in enumerate(runs)}
    for run in runs:
        begins = [event["step"] for event in events(run.path, "start")]
        ends = [event["step"] for event in events(run.path, "end")]
        trained += len(begins)
        lost += sum(end - begin for end, begin in zip(ends, begins[1:], strict=False))
        lost += sum(1 for begin in begins[len(ends) :] if begin >= 0)  # a start without an end
        failed += sum(job.state == JobState.FAILED for job in jobs[run])
        seconds += [round((job.ends or 0.0) - (job.started or 0.0), 1) for job in jobs[run]]
        assert [step for step, _ in loss_curve(run)] == list(range(1, steps_told(run.path) + 1))
    figures = {
        "name": "time limit of SLURM",
        "trials": tasks * BESIDE,
        "jobs that trained": trained,
        "lost steps": lost,
        "jobs that failed": failed,
        "seconds of each job": seconds,
        "seconds": round(time.monotonic() - began, 1),
    }
    with capsys.disabled():
        print(json.dumps(figures))
    assert lost == 0 and failed == 0 and trained == tasks * BESIDE
