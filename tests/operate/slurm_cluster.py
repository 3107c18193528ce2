"""A real SLURM on this machine: munge, slurmctld and emulated nodes on loopback, for one test module.

It installs nothing. `SlurmCluster` starts the daemons from configuration files of its own, in a temporary
directory and on free ports, so that several clusters can run side by side.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

DEADLINE_S = 60.0
PACKAGES = "slurmctld slurmd slurm-client munge"
SBIN = "/usr/sbin"

CONFIGURATION = """\
ClusterName=tests
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0,batch_sched_delay=0,defer_batch=no
PriorityType=priority/basic
ReturnToService=1
SlurmdTimeout=10
KillWait=5
MinJobAge=300
CompleteWait=0
MessageTimeout=10
OverTimeLimit=0
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs=8 RealMemory=4000 State=UNKNOWN
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}]
PartitionName=main Nodes=node[1-{nodes}] Default=YES DefaultTime=10 MaxTime=1-0 DefMemPerNode=400 State=UP
"""


def can_run() -> bool:
    """Whether the programs of Debian's packages are here."""
    return all(
        shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}") for name in ("munged", "slurmctld", "slurmd")
    )


class SlurmCluster:
    """A cluster that runs. environment: that of every command which speaks to it."""

    def __init__(self, place: Path, environment: dict[str, str]) -> None:
        self.place, self.environment = place, environment

    def run(self, *command: str | Path, check: bool = True, **more: str) -> str:
        """Run a command of SLURM's and return what it printed."""
        done = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S * 4,
            check=False,
            env=self.environment | more,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
        return done.stdout + (done.stderr if not check else "")

    def state(self, job: str) -> str:
        """Return the state and the exit code of a job that SLURM still knows, as `COMPLETED 0:0`."""
        shown = self.run("scontrol", "show", "job", job)
        fields = dict(word.partition("=")[::2] for word in shown.split())
        return f"{fields['JobState']} {fields['ExitCode']}"

    def wait_until(self, seen: Callable[[], object], *, within_s: float = DEADLINE_S * 4) -> None:
        """Wait for something to be seen."""
        deadline = time.monotonic() + within_s
        while not seen():
            assert time.monotonic() < deadline, f"waited in vain: {self.run('squeue', '--all')}"
            time.sleep(0.05)

    def forget_jobs(self) -> None:
        """Cancel all jobs and wait until their processes are gone."""
        self.run("scancel", "--user", getpass.getuser(), check=False)
        self.wait_until(lambda: not self.run("squeue", "--noheader"))


@contextmanager
def started(place: Path, *, nodes: int = 2) -> Iterator[SlurmCluster]:
    """Start a cluster, and stop its daemons by their process numbers at the end."""
    place.chmod(0o755)
    with ExitStack() as held:
        ports = _ports(held, nodes + 1)
    assert ports == list(range(ports[0], ports[0] + nodes + 1))
    host = socket.gethostname().partition(".")[0]
    (place / "slurm.conf").write_text(
        CONFIGURATION.format(
            place=place,
            host=host,
            user=getpass.getuser(),
            nodes=nodes,
            controller_port=ports[0],
            first_job=100
            * ports[0],  # ranks meet at a port that follows from it, and clusters run side by side
            ports=f"{ports[1]}-{ports[-1]}",
        )
    )
    (place / "state").mkdir()
    path = f"{os.environ['PATH']}:{SBIN}"
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    cluster = SlurmCluster(place, own | {"SLURM_CONF": str(place / "slurm.conf"), "PATH": path})
    try:
        _start_daemons(cluster, nodes)
        yield cluster
        cluster.forget_jobs()
    finally:
        _stop([int(file.read_text()) for file in place.glob("*.pid")])


def _start_daemons(cluster: SlurmCluster, nodes: int) -> None:
    place = cluster.place
    key = place / "munge.key"
    key.write_bytes(secrets.token_bytes(256))
    key.chmod(0o600)
    files = {
        "key": key,
        "socket": place / "munge.socket",
        "pid": place / "munged.pid",
        "log": place / "munged.log",
    }
    cluster.run(
        "munged",
        "--force",
        f"--key-file={files['key']}",
        f"--socket={files['socket']}",
        f"--pid-file={files['pid']}",
        f"--log-file={files['log']}",
        f"--seed-file={place / 'munge.seed'}",
    )
    cluster.wait_until(files["socket"].exists)
    cluster.run("slurmctld", "-c")
    cluster.wait_until(lambda: "is UP" in cluster.run("scontrol", "ping", check=False))
    for number in range(1, nodes + 1):
        (place / f"spool-node{number}").mkdir()
        cluster.run("slurmd", "-N", f"node{number}")
    cluster.wait_until(lambda: cluster.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * nodes)


def _ports(held: ExitStack, count: int) -> list[int]:
    """Return neighbouring free ports, below those that Linux gives to outgoing connections."""
    first = 10_000 + (os.getpid() * 16) % 4_000
    while True:
        taken = [held.enter_context(socket.socket()) for _ in range(count)]
        try:
            for number, probe in enumerate(taken):
                probe.bind(("127.0.0.1", first + number))
        except OSError:
            first += count
            continue
        return [probe.getsockname()[1] for probe in taken]


def _stop(processes: list[int]) -> None:
    living = [psutil.Process(number) for number in processes if psutil.pid_exists(number)]
    for process in living:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    deadline = time.monotonic() + 10.0
    while living and time.monotonic() < deadline:
        living = [process for process in living if _runs(process)]
        time.sleep(0.05)
    for process in living:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _runs(process: psutil.Process) -> bool:
    """Whether it runs; one that nobody has waited for yet does not."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
