"""Ten states of a run, each produced on a real SLURM: what `status` and `watch` say of it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.commands import bloomery
from tests.operate.slurm_cluster import PACKAGES, SlurmCluster, can_run, started
from tests.operate.test_slurm import beating, request

from bloomery.events.heartbeat import read_beat
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.run_state import RunStatus
from bloomery.operate.schedulers.slurm import Slurm
from bloomery.operate.submission import keep_submission, submission_of

SETTLES_S = 100.0
"""`status` and `watch` take a state for what it is within so many seconds: they wait for silence first."""


class StateTable:
    """Produces states and asks both commands. rows: [state, what status said, what watch said, seconds]."""

    def __init__(self, cluster: SlurmCluster, place: Path) -> None:
        self.cluster, self.place, self.slurm = cluster, place, Slurm()
        self.rows: list[tuple[str, str, str, float]] = []

    def run(self, name: str) -> RunDirectory:
        run = RunDirectory(self.place / name).create()
        keep_submission(run, submission_of("demo", ["run.name=x", "submit.scheduler=slurm"], nproc=1))
        return run

    def expect(self, run: RunDirectory, state: RunStatus) -> None:
        """Ask until both commands say it; what they say at the deadline counts."""
        began = time.monotonic()
        while True:
            by_status = status_of(run)
            by_watch = json.loads(bloomery("watch", str(run.path), "--once", "--json").out)
            told = (by_status, str(by_watch["state"]))
            if told == (state, state) or time.monotonic() - began > SETTLES_S:
                break
        self.rows.append((str(state), *told, round(time.monotonic() - began, 1)))

    def alerts(self, run: RunDirectory) -> list[str]:
        path = run.operations
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [f"{event['word']} {event['kind']}" for event in events if event["event"] == "alert"]


def status_of(run: RunDirectory) -> str:
    (view,) = json.loads(bloomery("status", str(run.path), "--json").out)["runs"]
    return str(view["verdict"]["state"])


def _jobs_that_run(table: StateTable) -> dict[str, list[str]]:
    cluster, slurm = table.cluster, table.slurm
    run = table.run("running")
    os.mkfifo(run.path / "go")
    waiting = f"read < {run.path}/go; exec {shlex.join(beating(run, 'moves'))}"
    (job,) = slurm.submit(request(run, "bash", "-c", waiting))
    table.expect(run, RunStatus.STARTING)
    (run.path / "go").write_text("\n")
    table.expect(run, RunStatus.RUNNING)
    beat = read_beat(run.heartbeat())
    assert beat is not None
    cluster.run("scontrol", "suspend", job)
    table.expect(run, RunStatus.SUSPENDED)
    cluster.run("scontrol", "resume", job)
    table.expect(run, RunStatus.RUNNING)
    # SLURM says RUNNING before its SIGCONT has come, which would undo a SIGSTOP that is sent now
    written = run.heartbeat().stat().st_mtime_ns
    cluster.wait_until(lambda: run.heartbeat().stat().st_mtime_ns > written)
    os.kill(beat.pid, signal.SIGSTOP)
    table.expect(run, RunStatus.HUNG)
    os.kill(beat.pid, signal.SIGCONT)
    slurm.cancel([job])
    table.expect(run, RunStatus.GONE)
    deaf = table.run("deaf")
    (job,) = slurm.submit(
        request(deaf, "bash", "-c", "trap '' TERM; touch here; while true; do sleep 1; done")
    )
    cluster.wait_until((deaf.path / "here").exists)
    slurm.cancel([job])
    # SLURM kills it after KillWait (5 s): one look must be in time
    said = status_of(deaf)
    table.rows.append((str(RunStatus.COMPLETING), said, said, 0.0))
    return {"running": table.alerts(run)}


def _jobs_that_wait(table: StateTable) -> None:
    cluster, slurm = table.cluster, table.slurm
    cluster.forget_jobs()
    new = table.run("new")
    table.expect(new, RunStatus.NEW)
    both = slurm.submit(request(new, "sleep", "600", nodes=2, more=("--exclusive",)))
    waiting = table.run("waiting")
    (waits,) = slurm.submit(request(waiting, "true", more=("--exclusive",)))
    table.expect(waiting, RunStatus.PENDING)
    cluster.run("scontrol", "hold", waits)
    table.expect(waiting, RunStatus.HELD)
    slurm.cancel([waits])
    chain = table.run("chain")
    slurm.submit(request(chain, "true", after=both[0], more=(f"--dependency=afterok:{both[0]}",)))
    slurm.cancel(both)
    table.expect(chain, RunStatus.NEVER)


def _runs_that_ended(table: StateTable, train_command: Callable[..., list[str]]) -> None:
    table.cluster.forget_jobs()
    _, recipe, _, run, *_ = train_command()
    small = ("submit.scheduler=slurm", "submit.memory_per_node=1000M", "submit.minutes=10", "--nproc", "1")
    assert bloomery("submit", recipe, "--run", run, *small, "train.samples=24").status == 0
    wrong = str(table.place / "wrong")
    assert bloomery("submit", recipe, "--run", wrong, *small, "data.sources=/nowhere").status == 0
    table.expect(RunDirectory(Path(run)), RunStatus.FINISHED)
    table.expect(RunDirectory(Path(wrong)), RunStatus.FAILED)
    stopped = RunDirectory(Path(train_command(run="stopped")[3]))
    stopping = ("train.samples=4000000", "evaluate.every_steps=0", "train.compile=off")
    assert bloomery("submit", recipe, "--run", str(stopped.path), *small, *stopping).status == 0
    table.expect(stopped, RunStatus.RUNNING)
    assert bloomery("stop", str(stopped.path)).status == 0
    table.expect(stopped, RunStatus.STOPPED)


@pytest.mark.slow
@pytest.mark.needs(can_run, package=PACKAGES)
def test_status_and_watch_name_each_state(
    train_command: Callable[..., list[str]],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with started(tmp_path_factory.mktemp("slurm")) as cluster:
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, cluster.environment[name])
        table = StateTable(cluster, tmp_path)
        alerts = _jobs_that_run(table)
        _jobs_that_wait(table)
        _runs_that_ended(table, train_command)
    wrong = [row for row in table.rows if row[:1] * 2 != row[1:3]]
    figures = {
        "name": "states",
        "asked": len(table.rows),
        "states": len({row[0] for row in table.rows}),
        "right": len(table.rows) - len(wrong),
        "rows": table.rows,
        "alerts of the run that was suspended, hung and lost": alerts["running"],
    }
    with capsys.disabled():
        print(json.dumps(figures))
    assert not wrong and figures["states"] >= 10
