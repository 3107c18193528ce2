"""Finds out which rank this process is; no other module reads the variables of srun, torchrun and mpirun.

`rank_variables` turns any launcher's variables into torch's (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR, MASTER_PORT), which the rest of bloomery reads. `node_group` does the same for a launcher that
srun starts once on each node.
"""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from bloomery.errors import RankLost, TrainingFailed

FIRST_PORT, PORTS = 15_000, 17_000
"""The rendezvous uses one of these ports, all below those that Linux takes for outgoing connections."""
_STEPS = 8
_SCONTROL_S = 20.0

Environment = Mapping[str, str]
AddressOf = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class RankIdentity:
    """What a launcher's variables say about one process.

    launcher: the program that started it, for messages.
    rank, world: its rank, and the number of ranks.
    local_rank, local_world: its rank and the number of ranks on this machine; None where that is unknown.
    master: the name of the machine of rank 0; "" where that is unknown.
    job: a number that is equal on all ranks and differs between jobs, from which the port is derived.
    """

    launcher: str
    rank: int
    world: int
    local_rank: int | None = None
    local_world: int | None = None
    master: str = ""
    job: int = 0


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """The machines on which srun has started one launcher each.

    nodes: their number.
    rendezvous: the HOST:PORT of the rendezvous, equal on all of them.
    """

    nodes: int
    rendezvous: str


def rank_variables(environment: Environment, *, address_of: AddressOf | None = None) -> dict[str, str]:
    """Return the variables to set so that torch finds its rank, whatever launcher started this process.

    There are none where this process is the only rank. A variable that is set already is kept, such as a
    user's MASTER_ADDR and MASTER_PORT. Raises TrainingFailed where two launchers disagree on the rank, or
    none says on which machine rank 0 is.

    environment: the variables of this process.
    address_of: returns the address of a node by its name; None asks the system, then SLURM.
    """
    started_by = _mpirun(environment) or _srun(environment)
    claim = _torch(environment)
    if claim is None and started_by is None:
        _refuse_tasks_without_srun(environment)
        return {}
    if claim is not None:
        if started_by is not None and not _is_nested(environment):
            _refuse_another_rank(claim, started_by)
        return {}
    assert started_by is not None
    variables = _variables(started_by, environment, address_of or address_of_node)
    return {name: value for name, value in variables.items() if name not in environment}


def node_name(environment: Environment) -> str:
    """Return the name under which the scheduler knows this machine; "" where there is no scheduler."""
    return environment.get("SLURMD_NODENAME", "")


def node_group(environment: Environment, *, address_of: AddressOf | None = None) -> NodeGroup | None:
    """Return the nodes on which srun has started this launcher; None where it is the only one.

    Raises TrainingFailed where srun starts several on a node, or where an allocation has several nodes and
    srun was left out.
    """
    by_mpirun = _mpirun(environment)
    if by_mpirun is not None:
        raise TrainingFailed(
            f"mpirun has started {by_mpirun.world} launchers, each of which would start all ranks.",
            remedy="Under mpirun write `bloomery train` in place of `bloomery launch`.",
        )
    step = _step(environment)
    if step is None:
        count = _number(environment, "SLURM_JOB_NUM_NODES", 1)
        if "SLURM_JOB_ID" in environment and "SLURMD_NODENAME" in environment and count > 1:
            raise TrainingFailed(
                f"This job has {count} nodes, and `bloomery launch` was started only on the first.",
                remedy="Write `srun --ntasks-per-node=1` before it.",
            )
        return None
    tasks, nodes = step.world, _number(environment, "SLURM_STEP_NUM_NODES", 1)
    if tasks == 1:
        return None
    if tasks != nodes:
        raise TrainingFailed(
            f"srun has started {tasks} launchers on {nodes} nodes, each would start its node's ranks.",
            remedy="Write `srun --ntasks-per-node=1 bloomery launch`, or `srun bloomery train` for one task "
            "a rank.",
        )
    address = (address_of or address_of_node)(step.master)
    return NodeGroup(nodes=nodes, rendezvous=f"{address}:{port_of(step.job)}")


def port_of(job: int) -> int:
    """Return the port of a job's rendezvous; jobs that run side by side nearly always get different ports."""
    return FIRST_PORT + job % PORTS


def port_for_ranks(*, is_here: bool) -> int:
    """Return a free port of this machine, or one that is probably free on another. Raises RankLost."""
    if not is_here:
        return FIRST_PORT + random.randrange(PORTS)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for _ in range(64):
            port = FIRST_PORT + random.randrange(PORTS)
            with suppress(OSError):
                probe.bind(("", port))
                return port
    raise RankLost("No port from 15,000 to 31,999 is free here.", remedy="End what uses them.")


def first_node(nodes: str) -> str:
    """Return the first name of SLURM's list of nodes: `iam[01-26,28]-gpu,login` gives `iam01-gpu`."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")


def address_of_node(name: str, *, remedy: str = "Set MASTER_ADDR to an address of it, on all ranks.") -> str:
    """Return an address of a node: its name where the system can resolve it, else what SLURM says.

    Raises TrainingFailed, with `remedy`, where neither knows it.
    """
    try:
        socket.getaddrinfo(name, None)
    except OSError as unknown:
        address = _node_address(name)
        if not address:
            raise TrainingFailed(
                f"The node {name} has no address here: {unknown}.", remedy=remedy
            ) from unknown
        return address
    return name


def _variables(started_by: RankIdentity, environment: Environment, address_of: AddressOf) -> dict[str, str]:
    if started_by.world == 1:
        return {}
    is_one_machine = started_by.local_world == started_by.world
    variables = {"RANK": str(started_by.rank), "WORLD_SIZE": str(started_by.world)}
    if started_by.local_rank is not None:
        variables["LOCAL_RANK"] = str(started_by.local_rank)
    if started_by.local_world is not None:
        variables["LOCAL_WORLD_SIZE"] = str(started_by.local_world)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if cores == os.cpu_count():  # the launcher has not bound this rank to cores of its own
            variables["OMP_NUM_THREADS"] = str(max(1, cores // started_by.local_world))
    if is_one_machine:
        variables |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    elif "MASTER_ADDR" not in environment:
        if not started_by.master:
            raise TrainingFailed(
                f"{started_by.launcher} does not say on which machine rank 0 is.",
                remedy="Tell all ranks: mpirun -x MASTER_ADDR=HOST-OF-RANK-0 …",
            )
        variables["MASTER_ADDR"] = address_of(started_by.master)
    return variables | {"MASTER_PORT": str(port_of(started_by.job))}


def _torch(environment: Environment) -> RankIdentity | None:
    """Return the rank in RANK and WORLD_SIZE, which torchrun, our launcher or a user's script has set."""
    both = ("RANK", "WORLD_SIZE")
    if not any(name in environment for name in both):
        return None
    for name, other in (both, both[::-1]):
        if name not in environment:
            raise TrainingFailed(
                f"{other} is set in the environment and {name} is not, so this rank does not know its place.",
                remedy=f"Set both, unset both, or start with `bloomery launch`: `unset {other}`.",
            )
    rank, world = (_number(environment, name) for name in both)
    if not 0 <= rank < world:
        raise TrainingFailed(
            f"RANK={rank} is no rank of WORLD_SIZE={world}.", remedy="Ranks count from 0 to WORLD_SIZE - 1."
        )
    return RankIdentity(launcher="the environment", rank=rank, world=world)


def _is_nested(environment: Environment) -> bool:
    """Return whether a launcher under srun or mpirun started this rank, so that their ranks may differ."""
    return "TORCHELASTIC_RUN_ID" in environment or "BLOOMERY_LAUNCHER" in environment


def _mpirun(environment: Environment) -> RankIdentity | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    return RankIdentity(
        launcher="mpirun",
        rank=_number(environment, "OMPI_COMM_WORLD_RANK"),
        world=_number(environment, "OMPI_COMM_WORLD_SIZE"),
        local_rank=_number(environment, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world=_number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        # In a job of SLURM mpirun takes the job's nodes, in their order.
        master=first_node(environment.get("SLURM_JOB_NODELIST", "")),
        job=_number(environment, "OMPI_MCA_ess_base_jobid", 0),
    )


def _srun(environment: Environment) -> RankIdentity | None:
    step = _step(environment)
    return step if step is not None and step.world > 1 else None


def _step(environment: Environment) -> RankIdentity | None:
    """Return this task of a job step; None outside of one, as in a batch script without srun."""
    if "SLURM_STEP_NUM_TASKS" not in environment:
        return None
    local_rank = _number(environment, "SLURM_LOCALID", 0)
    tasks = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node, world = _number(environment, "SLURM_NODEID", 0), _number(environment, "SLURM_STEP_NUM_TASKS")
    local_world = tasks[node] if node < len(tasks) else None
    return RankIdentity(
        launcher="srun",
        rank=_number(environment, "SLURM_PROCID"),
        world=world,
        local_rank=0 if _sees_own_gpu_alone(environment, tasks=local_world) else local_rank,
        local_world=local_world,
        master=first_node(environment.get("SLURM_STEP_NODELIST", "")),
        job=_number(environment, "SLURM_JOB_ID", 0) * _STEPS + _number(environment, "SLURM_STEP_ID", 0),
    )


def _sees_own_gpu_alone(environment: Environment, *, tasks: int | None) -> bool:
    """Return whether a task sees one GPU, its own, which then has the number 0.

    That is so with --gpus-per-task=1, which may name the kind too, `a100:1`, and with --gpu-bind=closest or
    single:1 where the step has a GPU for each of its tasks here. With --gpu-bind=none a task sees those of
    all.

    tasks: the step's tasks on this machine; None where that is unknown.
    """
    number = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
    seen = [environment.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")]
    if any("," in devices for devices in seen):
        return False
    return number == "1" or (any(seen) and tasks is not None and _gpus_of_step(environment) >= tasks > 1)


def _gpus_of_step(environment: Environment) -> int:
    """Return the number of GPUs that a job step has on this machine, as far as SLURM says it; else 0."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", environment.get("SLURM_STEP_GPUS", ""))
    if spans:
        return sum(int(last or first) - int(first) + 1 for first, last in spans)
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    return int(on_node) if on_node.isdecimal() else 0


def _tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node from `2(x3),1`, which is how SLURM writes 2, 2, 2, 1."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in counts for _ in range(int(times or 1))]


def _refuse_tasks_without_srun(environment: Environment) -> None:
    tasks = _number(environment, "SLURM_NTASKS", 1)
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_NUM_TASKS" not in environment and tasks > 1:
        raise TrainingFailed(
            f"This job has {tasks} tasks, and the command was started without srun: it would train alone.",
            remedy="Write `srun` before it, or `srun -n 1` for a run of one rank.",
        )


def _refuse_another_rank(claim: RankIdentity, started_by: RankIdentity) -> None:
    if (claim.rank, claim.world) != (started_by.rank, started_by.world):
        raise TrainingFailed(
            f"The environment says RANK={claim.rank} and WORLD_SIZE={claim.world}, but {started_by.launcher} "
            f"has started this process as rank {started_by.rank} of {started_by.world}.",
            remedy=f"Leave RANK and WORLD_SIZE out: bloomery reads what {started_by.launcher} says.",
        )


def _number(environment: Environment, name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise TrainingFailed(
            f"{name}={text!r} in the environment is not a whole number." if text else f"{name} is not set.",
            remedy="Start with srun, mpirun, torchrun or `bloomery launch`, which set it.",
        )
    return int(text)


def _node_address(name: str) -> str:
    """Return the address of a node as SLURM knows it; empty where SLURM does not answer."""
    try:
        shown = subprocess.run(
            ["scontrol", "show", "node", name],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_S,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    address = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
    return address[1] if address else ""
