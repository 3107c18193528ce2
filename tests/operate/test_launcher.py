"""Which rank a process is, from the variables of each launcher, and what is refused where they disagree."""

from __future__ import annotations

import os
import random
import socket

import pytest

from bloomery.coordination.etcd_process import free_ports
from bloomery.errors import TrainingFailed
from bloomery.operate.launcher import (
    FIRST_PORT,
    first_node,
    node_group,
    port_for_ranks,
    port_of,
    rank_variables,
)

STEP = {
    "SLURM_JOB_ID": "712",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "iam[07-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURMD_NODENAME": "iam09",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1291124737",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}


def variables(environment: dict[str, str]) -> dict[str, str]:
    return rank_variables(environment, address_of=lambda name: f"{name}.example")


def test_a_task_of_srun_gets_its_rank_from_the_step():
    found = variables(STEP)
    cores = found.pop("OMP_NUM_THREADS", None)
    assert found == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "iam07.example",
        "MASTER_PORT": str(port_of(712 * 8 + 3)),
    }
    if len(os.sched_getaffinity(0)) == os.cpu_count():
        assert cores == str(max(1, os.cpu_count() // 2))


def test_a_rank_of_mpirun_goes_before_the_step_that_started_mpiruns_own_daemons():
    found = variables(STEP | MPI | {"SLURM_JOB_NODELIST": "iam[07-08]"})
    assert [found[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")] == ["1", "4", "iam07.example"]


def test_a_rank_that_was_started_alone_trains_alone():
    assert variables(MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) == {}


def test_ranks_on_one_machine_meet_on_its_loopback():
    found = variables(MPI | {"OMPI_COMM_WORLD_SIZE": "2"})
    assert (found["MASTER_ADDR"], found["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")


def test_mpirun_on_several_machines_must_be_told_where_rank_0_is():
    with pytest.raises(TrainingFailed, match="mpirun does not say") as refused:
        variables(MPI)
    assert "-x MASTER_ADDR" in refused.value.remedy
    found = variables(MPI | {"MASTER_ADDR": "head"})
    assert "MASTER_ADDR" not in found and found["RANK"] == "1"


def test_ranks_share_the_cores_of_a_machine_that_nobody_has_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    one_machine = MPI | {"OMPI_COMM_WORLD_SIZE": "2"}
    assert variables(one_machine)["OMP_NUM_THREADS"] == "4"
    crowded = MPI | {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_SIZE": "16"}
    assert variables(crowded)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert "OMP_NUM_THREADS" not in variables(one_machine), "its launcher has given it cores of its own"


def test_what_a_user_has_set_is_kept():
    found = variables(STEP | {"MASTER_PORT": "29400", "MASTER_ADDR": "head", "OMP_NUM_THREADS": "1"})
    assert not {"MASTER_PORT", "MASTER_ADDR", "OMP_NUM_THREADS"} & set(found)


def test_a_gpu_that_a_task_has_alone_has_the_number_0():
    assert variables(STEP | {"SLURM_GPUS_PER_TASK": "1"})["LOCAL_RANK"] == "0"
    assert variables(STEP | {"SLURM_GPUS_PER_TASK": "2"})["LOCAL_RANK"] == STEP["SLURM_LOCALID"] != "0"


@pytest.mark.parametrize("visible", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_a_task_takes_the_gpu_of_its_own_number_where_it_sees_those_of_the_others(visible: str):
    """As with `--gpus-per-task=1 --gpu-bind=none`, which lets ranks copy from GPU to GPU."""
    alone = STEP | {"SLURM_GPUS_PER_TASK": "1"}
    assert variables(alone | {visible: "0,1,2,3"})["LOCAL_RANK"] == STEP["SLURM_LOCALID"]
    assert variables(alone | {visible: "3"})["LOCAL_RANK"] == "0"


def test_a_gpu_whose_kind_was_named_has_the_number_0_too():
    assert variables(STEP | {"SLURM_GPUS_PER_TASK": "a100:1"})["LOCAL_RANK"] == "0"
    assert variables(STEP | {"SLURM_GPUS_PER_TASK": "a100:2"})["LOCAL_RANK"] == STEP["SLURM_LOCALID"]


@pytest.mark.parametrize("visible", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
@pytest.mark.parametrize(
    ("seen", "gpus", "own"),
    [
        ("0", {"SLURM_STEP_GPUS": "2,3"}, True),
        ("GPU-8f2c", {"SLURM_STEP_GPUS": "4-7"}, True),
        ("1", {"SLURM_GPUS_ON_NODE": "2"}, True),
        ("0", {"SLURM_STEP_GPUS": "0"}, False),  # two tasks and one GPU
        ("0", {"SLURM_GPUS_ON_NODE": "1"}, False),
        ("0", {"SLURM_GPUS_ON_NODE": "gpu"}, False),
        ("0,1", {"SLURM_STEP_GPUS": "0,1"}, False),
        ("", {"SLURM_STEP_GPUS": "0,1"}, False),
        ("0", {}, False),
    ],
)
def test_a_task_that_is_bound_to_one_of_the_steps_gpus_has_it_under_the_number_0(
    visible: str, seen: str, gpus: dict[str, str], own: bool
):
    """As with `--gpus-per-node=2 --gpu-bind=closest`."""
    found = variables(STEP | gpus | {visible: seen})
    assert found["LOCAL_RANK"] == ("0" if own else STEP["SLURM_LOCALID"])


def test_nothing_is_set_without_a_launcher_and_by_a_launcher_that_set_it_all():
    assert variables({}) == variables(TORCHRUN) == variables(STEP | TORCHRUN) == {}
    assert variables(STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == {}
    assert variables({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}) == {}


@pytest.mark.parametrize(
    ("environment", "words", "advice"),
    [
        ({"RANK": "0"}, "RANK is set in the environment and WORLD_SIZE is not", "`unset RANK`"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE is set in the environment and RANK is not", "`unset WORLD_SIZE`"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "RANK=8 is no rank of WORLD_SIZE=8", "from 0 to WORLD_SIZE - 1"),
        ({"RANK": "x", "WORLD_SIZE": "8"}, "RANK='x' in the environment is not a whole number", "torchrun"),
        (
            STEP | {"RANK": "0", "WORLD_SIZE": "1"},
            "srun has started this process as rank 5 of 6",
            "srun says",
        ),
        (
            MPI | {"RANK": "0", "WORLD_SIZE": "4"},
            "mpirun has started this process as rank 1 of 4",
            "mpirun s",
        ),
        (STEP | {"RANK": "5", "WORLD_SIZE": "8"}, "RANK=5 and WORLD_SIZE=8, but srun", "srun says"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, "This job has 8 tasks", "Write `srun` before it"),
    ],
)
def test_variables_that_disagree_are_refused(environment: dict[str, str], words: str, advice: str):
    with pytest.raises(TrainingFailed) as refused:
        variables(environment)
    assert words in refused.value.message and advice in refused.value.remedy


def test_a_launcher_on_each_node_finds_the_rendezvous():
    one_a_node = STEP | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
    group = node_group(one_a_node, address_of=lambda name: name)
    assert (group.nodes, group.rendezvous) == (3, f"iam07:{port_of(712 * 8 + 3)}")
    assert node_group({}) is None
    assert node_group(STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}) is None


@pytest.mark.parametrize(
    ("environment", "words", "advice"),
    [
        (STEP, "6 launchers on 3 nodes", "srun --ntasks-per-node=1 bloomery launch"),
        (MPI, "mpirun has started 4 launchers", "`bloomery train` in place of `bloomery launch`"),
        (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURMD_NODENAME": "a"},
            "This job has 3 nodes",
            "`srun --ntasks-per-node=1` before it",
        ),
    ],
)
def test_a_launcher_that_would_start_ranks_twice_is_refused(
    environment: dict[str, str], words: str, advice: str
):
    with pytest.raises(TrainingFailed, match=words) as refused:
        node_group(environment)
    assert advice in refused.value.remedy


def test_a_job_of_several_nodes_whose_own_nodes_are_not_these_is_none_of_this_launcher():
    assert node_group({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}) is None  # on a login node


def test_the_first_of_slurms_list_of_nodes():
    lists = {
        "node1": "node1",
        "node1,node2": "node1",
        "jean-zay-iam[01-26,28-49]": "jean-zay-iam01",
        "r[3,5]n[007-9]-x,login": "r3n007-x",
        "": "",
    }
    assert {nodes: first_node(nodes) for nodes in lists} == lists


def test_ports_are_below_those_of_outgoing_connections_and_differ_between_neighbouring_jobs():
    ports = [port_of(job) for job in range(100_000, 100_000 + 5_000)]
    assert len(set(ports)) == len(ports) and min(ports) > 1024 and max(ports) < 32_768


def test_the_last_node_may_have_fewer_tasks():
    fewer = STEP | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_STEP_NUM_TASKS": "7"}
    assert [variables(fewer | {"SLURM_NODEID": node})["LOCAL_WORLD_SIZE"] for node in "012"] == [
        "3",
        "3",
        "1",
    ]
    assert "LOCAL_WORLD_SIZE" not in variables(fewer | {"SLURM_NODEID": "3"})


@pytest.mark.parametrize(("bound", "threads"), [(8, "4"), (3, None)])
def test_ranks_share_the_cores_where_nobody_has_bound_them(
    monkeypatch: pytest.MonkeyPatch, bound: int, threads: str | None
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(bound)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert variables(STEP).get("OMP_NUM_THREADS") == threads


def test_a_port_here_is_tried_and_one_elsewhere_is_drawn(monkeypatch: pytest.MonkeyPatch):
    (free,) = free_ports(1)
    with socket.create_server(("", 0)) as server:
        taken = server.getsockname()[1]
        drawn = [taken - FIRST_PORT]
        monkeypatch.setattr(random, "randrange", lambda count: drawn.pop(0))
        assert port_for_ranks(is_here=False) == taken
        drawn += [taken - FIRST_PORT, free - FIRST_PORT]
        assert port_for_ranks(is_here=True) == free


def test_a_job_of_two_nodes_is_not_started_on_the_first_alone():
    job = {"SLURM_JOB_ID": "712", "SLURMD_NODENAME": "iam07", "SLURM_JOB_NUM_NODES": "2"}
    with pytest.raises(TrainingFailed, match="only on the first"):
        node_group(job)
    assert node_group(job | {"SLURM_JOB_NUM_NODES": "1"}) is None
