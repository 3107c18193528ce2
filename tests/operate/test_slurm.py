"""`bloomery submit`, `status` and `cancel` on a real SLURM: each state is produced, and none is made up."""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.commands import bloomery
from tests.operate.slurm_cluster import PACKAGES, SlurmCluster, can_run

from bloomery.config.load import load_recipe
from bloomery.config.submit import SubmitSection
from bloomery.events.heartbeat import read_beat
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.blame import diagnose
from bloomery.operate.exclusions import Exclusions
from bloomery.operate.failure_evidence import FailureEvidence
from bloomery.operate.job_context import NodeInQuarantine, reactions_of, refuse_quarantined
from bloomery.operate.maintenance import notices_of_slurm
from bloomery.operate.run_state import RunStatus, judge_state, observe_run
from bloomery.operate.schedulers.interface import JobRequest, JobState
from bloomery.operate.schedulers.slurm import Slurm
from bloomery.operate.standstill import StandstillLimits

pytestmark = pytest.mark.needs(can_run, package=PACKAGES)
QUICK = StandstillLimits(least_s=1.0, unmeasured_s=4.0, silence_s=3.0)
BEATING = """
import sys, threading
from pathlib import Path
from bloomery.events.heartbeat import Heartbeat, RankActivity
with Heartbeat(Path(sys.argv[1]), interval_s=0.1).start() as beat:
    beat.enter(RankActivity.COMPUTING)
    while True:
        beat.tick(); threading.Event().wait(0.1)
        if "moves" in sys.argv: beat.enter(RankActivity.COMPUTING)
"""


@pytest.fixture
def slurm(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """The cluster, for commands of this test too; no job of an earlier test is left."""
    cluster.forget_jobs()
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])
    return Slurm()


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def request(
    rundir: RunDirectory,
    *command: str,
    nodes: int = 1,
    tasks: int = 1,
    after: str = "",
    exclude: tuple[str, ...] = (),
    **section,
) -> JobRequest:
    return JobRequest(
        name="x",
        run=rundir.path,
        directory=rundir.path,
        command=command,
        nodes=nodes,
        section=SubmitSection(**({"minutes": 5.0, "memory_per_node": "100M"} | section)),
        tasks=tasks,
        after=after,
        exclude=exclude,
    )


def beating(rundir: RunDirectory, *more: str) -> tuple[str, ...]:
    return (sys.executable, "-c", BEATING, str(rundir.heartbeat()), *more)


def state_of(slurm: Slurm, rundir: RunDirectory, limits: StandstillLimits | None = None) -> RunStatus:
    return judge_state(observe_run(rundir, slurm.jobs(name="x", run=rundir.path)), limits=limits).state


def comes_to(cluster: SlurmCluster, slurm: Slurm, rundir: RunDirectory, state: RunStatus) -> None:
    limits = QUICK if state == RunStatus.HUNG else None
    cluster.wait_until(lambda: state_of(slurm, rundir, limits) == state)


def test_states_of_jobs_that_run(slurm: Slurm, cluster: SlurmCluster, rundir: RunDirectory) -> None:
    assert state_of(slurm, rundir) == RunStatus.NEW
    os.mkfifo(rundir.path / "go")
    waiting = f"read < {rundir.path}/go; exec {shlex.join(beating(rundir, 'moves'))}"
    (job,) = slurm.submit(request(rundir, "bash", "-c", waiting))
    comes_to(cluster, slurm, rundir, RunStatus.STARTING)
    (rundir.path / "go").write_text("\n")
    comes_to(cluster, slurm, rundir, RunStatus.RUNNING)
    beat = read_beat(rundir.heartbeat())
    assert beat is not None
    cluster.run("scontrol", "suspend", job)
    comes_to(cluster, slurm, rundir, RunStatus.SUSPENDED)
    cluster.run("scontrol", "resume", job)
    resumed = time.time()
    cluster.wait_until(lambda: (read_beat(rundir.heartbeat()) or beat).time > resumed + 0.2)
    os.kill(beat.pid, signal.SIGSTOP)
    comes_to(cluster, slurm, rundir, RunStatus.HUNG)
    os.kill(beat.pid, signal.SIGCONT)
    slurm.cancel([job])
    comes_to(cluster, slurm, rundir, RunStatus.GONE)


def test_a_job_that_will_not_end_is_completing_and_one_that_stands_still_is_hung(
    slurm: Slurm, cluster: SlurmCluster, rundir: RunDirectory
) -> None:
    (job,) = slurm.submit(request(rundir, *beating(rundir)))
    comes_to(cluster, slurm, rundir, RunStatus.HUNG)
    slurm.cancel([job])
    comes_to(cluster, slurm, rundir, RunStatus.GONE)
    deaf = "trap '' TERM; touch here; while true; do sleep 1; done"
    (job,) = slurm.submit(request(rundir, "bash", "-c", deaf))
    cluster.wait_until((rundir.path / "here").exists)
    slurm.cancel([job])
    comes_to(cluster, slurm, rundir, RunStatus.COMPLETING)


def test_states_of_jobs_that_wait(slurm: Slurm, cluster: SlurmCluster, rundir: RunDirectory) -> None:
    both = slurm.submit(request(rundir, "sleep", "600", nodes=2, more=("--exclusive",)))
    other = RunDirectory(rundir.path.with_name("other")).create()
    (waits,) = slurm.submit(request(other, "true", more=("--exclusive",)))
    comes_to(cluster, slurm, other, RunStatus.PENDING)
    cluster.wait_until(lambda: slurm.jobs(name="x", run=other.path)[0].expected_start)
    (job,) = slurm.jobs(name="x", run=other.path)
    assert abs(job.expected_start - (time.time() + 300)) < 60, "when the first job's five minutes are over"
    cluster.run("scontrol", "hold", waits)
    comes_to(cluster, slurm, other, RunStatus.HELD)
    slurm.cancel([waits])
    third = RunDirectory(rundir.path.with_name("third")).create()
    chain = request(third, "true", after=both[0], more=(f"--dependency=afterok:{both[0]}",))
    slurm.submit(chain)
    slurm.cancel(both)
    comes_to(cluster, slurm, third, RunStatus.NEVER)
    assert {job.user for job in slurm.jobs(name="x", run=third.path)} != {""}


def test_the_bad_node_is_in_the_exclusions_of_all_that_wait(
    slurm: Slurm, cluster: SlurmCluster, rundir: RunDirectory
) -> None:
    task = "echo ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID $SLURMD_NODENAME >> nodes; exit 67"
    slurm.submit(request(rundir, "bash", "-c", task, tasks=4))
    alone = "echo $SLURM_JOB_ID $SLURMD_NODENAME >> nodes"
    (more,) = slurm.submit(request(rundir, "bash", "-c", alone, more=("--hold",)))
    exclusions = Exclusions(rundir.path / "exclusions.json")
    loaded = load_recipe("demo", ["run.name=x"])
    failed = FailureEvidence(kernel={"node1": ["NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus"]})
    said: list[str] = []
    reactions_of(rundir, loaded, say=said.append).on_bad_node(diagnose(failed))
    cluster.run("scontrol", "release", more)
    ended = lambda: all(job.state.is_over for job in slurm.jobs(name="x", run=rundir.path))  # noqa: E731
    cluster.wait_until(ended)
    assert len(said) == 2 and said[1].startswith("node1 excluded from ")
    waited = {job for jobs in said[1].split(" from ")[1].split(", ") for job in slurm.expanded(jobs)}
    hosts = dict(line.split() for line in (rundir.path / "nodes").read_text().splitlines())
    assert more in waited and {hosts[job] for job in waited} == {"node2"} and len(hosts) == 5
    assert "fallen off the bus" in str(exclusions.nodes()["node1"])
    with pytest.raises(NodeInQuarantine, match="node1 since"):
        refuse_quarantined("node1", rundir, loaded)
    (waits,) = slurm.submit(request(rundir, "true", exclude=("node1",), more=("--hold",)))
    assert "ExcNodeList=node1" in cluster.run("scontrol", "show", "job", waits)
    freed = bloomery("preflight", "demo", "run.name=x", "--run", rundir.path, "--release", "node1")
    assert freed.status == 0 and f"{waits} may start there" in freed.out, freed
    assert exclusions.nodes() == {}
    assert "ExcNodeList=(null)" in cluster.run("scontrol", "show", "job", waits)


def test_the_end_of_a_job_and_reservations_for_maintenance_are_asked_of_slurm(
    slurm: Slurm, cluster: SlurmCluster, rundir: RunDirectory
) -> None:
    (job,) = slurm.submit(request(rundir, "sleep", "600"))
    cluster.wait_until(lambda: slurm.jobs(name="x", run=rundir.path)[0].state == JobState.RUNNING)
    assert slurm.end_of_job(job) == pytest.approx(time.time() + 300, abs=30)
    begin = ("starttime=now+20minutes", "duration=10", "nodes=node2", f"users={getpass.getuser()}")
    cluster.run("scontrol", "create", "reservation", "reservationname=repair", "flags=maint", *begin)
    assert notices_of_slurm(slurm, ["node1"]) == []
    (notice,) = notices_of_slurm(slurm, slurm.expanded("node[1-2]"))
    cluster.run("scontrol", "delete", "reservationname=repair")
    assert notice.at == pytest.approx(time.time() + 1200, abs=60) and "repair of node2" in notice.what
    assert {node.name for node in slurm.nodes()} == {"node1", "node2"}


def test_a_run_is_finished_by_its_job_and_a_failure_is_a_failure_for_slurm(
    slurm: Slurm, cluster: SlurmCluster, train_command: Callable[..., list[str]], tmp_path: Path
) -> None:
    _, recipe, _, run, *_ = train_command()
    recipe_path = recipe
    small = ("submit.memory_per_node=1000M", "submit.minutes=10", "--nproc", "1", "train.samples=24")
    said = bloomery("submit", recipe_path, "--run", run, "submit.tasks=1", *small, "--json")
    assert said.status == 0, said
    array = json.loads(said.out)["jobs"][0]
    wrong = bloomery(
        "submit", recipe_path, "--run", f"{tmp_path}/wrong", *small, "--json", "data.sources=/nowhere",
    )  # fmt: skip
    bad = json.loads(wrong.out)["jobs"][0]
    jobs = lambda path: slurm.jobs(name="tiny", run=Path(path).absolute())  # noqa: E731
    cluster.wait_until(lambda: all(job.state.is_over for job in jobs(run)) and jobs(run))
    cluster.wait_until(lambda: all(job.state.is_over for job in jobs(f"{tmp_path}/wrong")))
    assert {job.state for job in jobs(run)} == {JobState.ENDED}, (tmp_path / "run" / "logs").iterdir()
    assert [job.state for job in jobs(f"{tmp_path}/wrong")] == [JobState.FAILED]
    assert cluster.state(bad).startswith("FAILED ") and not cluster.state(bad).endswith(" 0:0")
    shown = bloomery("status", run)
    assert shown.status == 0 and "tiny: finished (the samples are done)" in shown.out, shown
    assert re.search(r"done\s+step \d+, 100.0% of the samples", shown.out) and array in shown.out
    failed = bloomery("status", f"{tmp_path}/wrong")
    assert failed.status == 1 and "tiny: failed" in failed.out, failed
