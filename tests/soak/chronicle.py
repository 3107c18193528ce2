"""A day of the 13B model's chronicle on a real SLURM, an hour in half a minute: nobody's hand is needed.

Its incidents, in their order: a bus error beside empty shared memory, a spike of the loss, a GPU with an ECC
error whose node is handed out again, jobs that end at their time limit, hours in the queue, and a number of
nodes by which the batch cannot be divided.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.commands import bloomery, events
from tests.operate.slurm_cluster import PACKAGES, SlurmCluster, can_run, started

from bloomery.events.heartbeat import read_beat
from bloomery.events.journal import loss_curve, read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.ledger.figures import percentages
from bloomery.operate.ledger.run_ledger import read_ledger
from bloomery.operate.schedulers.slurm import Slurm

HOUR_S = float(os.environ.get("BLOOMERY_SOAK_HOUR_S", "30"))
DAY_H, JOB_H = 24, 10
PLANTING = Path(__file__).parent / "planting"
BUS_ERROR = "RuntimeError('DataLoader worker (pid 30882) is killed by signal: Bus error. It is possible that "
BUS_ERROR += "dataloader workers are out of shared memory.')"
ECC = "RuntimeError('transform: failed to synchronize: cudaErrorECCUncorrectable: uncorrectable ECC error "
ECC += "encountered')"
AGAIN = "RuntimeError('CUDA error: out of memory')"
SPIKE = "import dataclasses; p = arguments[0]; r = p.learning_rate; "
SPIKE += "arguments[0] = dataclasses.replace(p, learning_rate=lambda state: 300.0 * r(state))"
READ, FORWARD = "bloomery.data_loader.batches:Batches._read", "bloomery.model.decoder:Block.forward"
STEP = "bloomery.train.loop:train_step"
RECIPE = (
    "train.samples=40_000_000", "train.ramp_up=[]", "train.compile=off", "train.micro_batch=2",
    "optim.name=adamw", "optim.learning_rate=3e-3", "evaluate.every_steps=0", "checkpoint.every_steps=20",
    "guard.spike_rewind_steps=20", "guard.spike_skip_steps=20", "submit.scheduler=slurm",
    "submit.memory_per_node=1800M", "submit.cpus_per_node=2", "submit.signal_before_s=60",
    f"submit.minutes={JOB_H * HOUR_S / 60:g}", "--nproc", "2", "--keep-queued", "2",
)  # fmt: skip


class SimulatedDay:
    """The run, its clock in hours, and what is planted in it."""

    def __init__(self, run: RunDirectory, plants: Path) -> None:
        self.run, self.plants, self.began = run, plants, time.time()

    @property
    def hour(self) -> float:
        return (time.time() - self.began) / HOUR_S

    def until(self, hour: float) -> None:
        time.sleep(max(0.0, self.began + hour * HOUR_S - time.time()))

    def step(self) -> int:
        beat = read_beat(self.run.heartbeat())
        return beat.step if beat is not None else 0

    def plant(self, rank: int, place: str, code: str, *, when: str = "True") -> None:
        draft = self.plants / f".rank-{rank}"
        draft.write_text(json.dumps({"place": place, "code": code, "when": when}))
        draft.rename(self.plants / f"rank-{rank}")

    def host(self) -> str:
        beat = read_beat(self.run.heartbeat())
        return beat.host if beat is not None else ""


def _live(day: SimulatedDay, cluster: SlurmCluster, recipe: str) -> str:
    """Let the day's incidents happen; returns the node that had the bad GPU."""
    day.until(2)
    day.plant(1, READ, f"raise {BUS_ERROR}")
    day.until(4)
    at = day.step() + 60  # reached well before the next incident, on a slow machine too
    for rank in range(2):
        day.plant(rank, STEP, SPIKE, when=f"arguments[2].step == {at}")
    day.until(6.5)
    bad = day.host()
    day.plant(1, FORWARD, f"raise {ECC}")
    while day.host() == bad and day.hour < 10:
        time.sleep(0.5)
    refused = bloomery("submit", recipe, "--run", str(day.run.path), *RECIPE[:-4], "parallel.data=3")
    refused.refuses("3")
    day.until(14)
    # others get the node once the present job has ended, and the next one waits for hours
    good = day.host()
    cluster.run("scontrol", "update", f"NodeName={good}", "State=DRAIN", "Reason=others")
    day.until(20)
    cluster.run("scontrol", "update", f"NodeName={good}", "State=RESUME")
    return bad


@pytest.mark.slow
@pytest.mark.needs(can_run, package=PACKAGES)
def test_a_day_of_the_13b_model_needs_nobodys_hand_and_its_chronicle_names_each_cause(
    train_command: Callable[..., list[str]],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, recipe, _, path, *_ = train_command()
    run, plants = RunDirectory(Path(path)), tmp_path / "plants"
    plants.mkdir()
    with started(tmp_path_factory.mktemp("slurm")) as cluster:
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, cluster.environment[name])
        for name, value in {"PYTHONPATH": PLANTING, "PLANTED_FAULTS": plants, "OMP_NUM_THREADS": 1}.items():
            monkeypatch.setenv(name, str(value))
        submitted = bloomery("submit", recipe, "--run", path, *RECIPE)
        assert submitted.status == 0, submitted
        day = SimulatedDay(run, plants)
        waits = ("--interval", "5", "--pending-h", f"{HOUR_S / 3600:g}")
        watcher = subprocess.Popen(
            [sys.executable, "-m", "bloomery", "watch", path, *waits], stdout=subprocess.DEVNULL
        )
        try:
            bad = _live(day, cluster, recipe)
            day.until(DAY_H)
            jobs = Slurm().jobs(name="tiny", run=run.path)
            assert bloomery("stop", path).status == 0
            cluster.wait_until(lambda: not cluster.run("squeue", "--noheader", "--states=R,PD"))
        finally:
            watcher.terminate()
            watcher.wait()
    _judge(run, bad=bad, jobs=[(job.job, str(job.state), job.nodes) for job in jobs], capsys=capsys)


def _judge(run: RunDirectory, *, bad: str, jobs: list[tuple], capsys: pytest.CaptureFixture[str]) -> None:
    ledger = read_ledger(run)
    assert ledger is not None
    incidents = [
        (incident.cause, incident.culprit, incident.summary) for incident in ledger.history.incidents
    ]
    operations = list(read_journal(run.operations))
    alerts = [f"{event['word']} {event['kind']}" for event in operations if event["event"] == "alert"]
    attempts = [event for event in operations if event["event"] == "attempt"]
    struck = next((event["time"] for event in operations if event.get("cause") == "bad GPU"), ledger.begin)
    ends, begins = events(run.path, "end"), events(run.path, "start")
    curve = loss_curve(run)
    figures = {
        "name": "a day of the 13B model",
        "hours": round((ledger.end - ledger.begin) / HOUR_S, 1),
        "incidents": [f"{cause}: {culprit}: {summary[:110]}" for cause, culprit, summary in incidents],
        "starts on the bad node after it": sum(
            bad in (event.get("host"), *event.get("hosts", ()))
            for event in attempts
            if event["time"] > struck
        ),
        "saved at limits": [event.get("reason") for event in ends],
        "alerts": alerts,
        "jobs": jobs,
        "starts": len(begins),
        "steps": curve[-1][0],
        "effective time": round(ledger.effective_time, 3),
        "ledger, percent": round(sum(percentages(list(ledger.seconds.values()))), 6),
        "commands by hand": 0,
    }
    with capsys.disabled():
        print(json.dumps(figures))
    text = run.chronicle.read_text()
    causes = [cause for cause, _, _ in incidents]
    assert causes == ["crash in native code", "rewind", "bad GPU"]
    assert "Bus error" in incidents[0][2] and "so its size is not the cause" in incidents[0][2]
    assert "loss" in incidents[1][2] and bad in incidents[2][1] and "ECC" in incidents[2][2]
    for cause in causes:
        assert re.search(rf"^### .* · {cause}", text, re.M), cause
    assert figures["starts on the bad node after it"] == 0
    assert [step for step, _ in curve] == list(range(1, curve[-1][0] + 1))
    assert alerts.count("new pending too long") == alerts.count("over pending too long") >= 1
