"""`bloomery drill` with a real run, whose rank is killed."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.commands import bloomery
from tests.operate.slurm_cluster import PACKAGES, can_run, started

from bloomery.operate.drill.faults import ORDINARY
from bloomery.operate.drill.phases import RecoveryPhases

Train = Callable[..., list[str]]


@pytest.mark.slow
def test_a_killed_rank_is_survived_and_nothing_is_left_behind(
    train_command: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    recipe = train_command()[1]
    done = bloomery("drill", recipe, "train.samples=400000", "--faults", "kill", "--steps", "2", "--json")
    assert done.status == 0, done
    (result,) = json.loads(done.out)["faults"]
    assert (result["fault"], result["survived"], result["cause"]) == ("kill", True, "killed")
    assert all(result["phases"][phase] is not None for phase in RecoveryPhases.__annotations__)
    assert 0 < result["total_s"] == pytest.approx(sum(result["phases"].values()))
    assert not list(scratch.glob("bloomery-drill-*"))


@pytest.mark.slow
def test_more_faults_than_the_supervisor_bears_without_a_save_wait_for_one(train_command: Train) -> None:
    recipe = train_command()[1]
    kills = ("--faults", "kill", "--rounds", "5", "--steps", "2", "--json")
    done = bloomery("drill", recipe, "train.samples=400000", "checkpoint.every_steps=300", *kills)
    assert done.status == 0, done
    assert [fault["survived"] for fault in json.loads(done.out)["faults"]] == [True] * 5


@pytest.mark.slow
@pytest.mark.needs(can_run, package=PACKAGES)
def test_each_ordinary_fault_is_survived_on_all_nodes_of_a_job_of_slurm(
    train_command: Train, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    command = [sys.executable, "-m", "bloomery", "drill", train_command()[1], "train.samples=40000000"]
    command += ["--run", str(tmp_path / "drill"), "--nproc", "1", "--json"]
    batch, out = tmp_path / "batch.sh", tmp_path / "out"
    batch.write_text(f"#!/bin/bash\nset -eo pipefail\n{shlex.join(command)} >{out}\n")
    with started(tmp_path_factory.mktemp("slurm")) as cluster:
        job = cluster.run(
            *("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4", "--time=30"),
            *("--mem=2000M", "--overcommit", f"--output={tmp_path / 'job.log'}", batch),
        ).strip()
        cluster.wait_until(
            lambda: cluster.state(job).split()[0] not in ("PENDING", "RUNNING", "COMPLETING"), within_s=1500.0
        )
        state = cluster.state(job)
    assert state == "COMPLETED 0:0", (tmp_path / "job.log").read_text()[-3000:]
    told = json.loads(out.read_text())["faults"]
    print(json.dumps(told, indent=1))
    assert [(row["fault"], row["survived"]) for row in told] == [(str(kind), True) for kind in ORDINARY]
