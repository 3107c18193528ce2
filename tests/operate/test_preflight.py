"""What preflight finds on nodes, alone and beside their peers, and what it measures here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.faults.commands import bloomery

from bloomery.cli.supervised import _is_unfit
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.exclusions import Exclusions, QuarantinedNode
from bloomery.operate.node_checks import bad_hosts, judge_nodes
from bloomery.operate.node_facts import GpuFacts, NodeFacts, gather_facts, parse_smi
from bloomery.operate.start_check import StartCheck
from bloomery.operate.storage_probe import StorageTimes, forecast, measure_storage
from bloomery.operate.supervise import JobReactions

GPU = GpuFacts(index="0", name="A100", used_mib=3.0, total_mib=81920.0)


def nodes(**changed: dict) -> dict[str, NodeFacts]:
    usual = {"versions": {"torch": "2.11"}, "gpus": (GPU,), "disk_gb": 500.0, "teraflops": 200.0}
    hosts = {host: changed.get(host, {}) for host in ("a", "b", "c", "d")}
    return {host: NodeFacts(host=host, **{**usual, **more}) for host, more in hosts.items()}


@pytest.mark.parametrize(
    ("more", "words", "is_bad"),
    [
        ({"versions": {"torch": "2.12"}}, "torch is 2.12, and 2.11 on most nodes", True),
        ({"versions": {}}, "torch is missing", True),
        (
            {"gpus": (GpuFacts(index="0", name="A", used_mib=3, total_mib=80, uncorrected=2),)},
            "2 uncorrected",
            True,
        ),
        ({"gpus": (GpuFacts(index="0", name="A", used_mib=40_000, total_mib=81_920),)}, "are held", True),
        ({"gpus": ()}, "0 of 1 GPUs are there", True),
        ({"teraflops": 165.0}, "matmuls reach 165 TFLOP/s, and 200 on the median", True),
        ({"is_exact": False}, "it computes wrongly", True),
        ({"shm_share": 0.01}, "/dev/shm is 99% full", True),
        ({"disk_gb": 3.0}, "3.0 GB are free for the run, 10.0 GB are needed", False),
        ({"inodes": 12}, "12 inodes are free", False),
        ({"clock_s": -40.0}, "-40.0 s off", False),
    ],
)
def test_each_fault_names_its_node(more: dict, words: str, is_bad: bool) -> None:
    assert judge_nodes(nodes(), disk_gb=10.0, gpus=1) == []
    (finding,) = judge_nodes(nodes(b=more), disk_gb=10.0, gpus=1)
    assert finding.host == "b" and words in str(finding) and finding.remedy
    assert bad_hosts([finding]) == (["b"] if is_bad else [])


def test_links_that_an_environment_names_must_be_there() -> None:
    wants = {"NCCL_NET": "IB", "NCCL_SOCKET_IFNAME": "eth0,ib", "GLOO_SOCKET_IFNAME": "^docker"}
    usual = {"infiniband_ports": 8, "interfaces": ("lo", "eth0", "ib3")}
    good = nodes(**dict.fromkeys("abcd", usual))
    assert judge_nodes(good, environment=wants) == [] == judge_nodes(nodes(), environment={})
    down = {"infiniband_ports": 0, "interfaces": ("lo", "eth0")}
    found = judge_nodes(nodes(**dict.fromkeys("acd", usual), b=down), environment=wants)
    assert bad_hosts(found) == ["b"] and len(found) == 2
    assert "InfiniBand" in found[0].what and "NCCL_SOCKET_IFNAME" in found[1].what
    everywhere = judge_nodes(nodes(**dict.fromkeys("abcd", down)), environment=wants)
    assert len(everywhere) == 8 and bad_hosts(everywhere) == [], "the recipe is wrong, no node is"
    assert "environment.profiles" in everywhere[0].remedy


def test_no_node_lacks_an_interface_that_is_not_to_be_used() -> None:
    usual = {"interfaces": ("lo", "eth0", "virbr0")}
    some = nodes(**dict.fromkeys("acd", usual), b={"interfaces": ("lo", "eth0")})
    for excluded in ("^docker,virbr0", "^=virbr0,docker0"):
        assert judge_nodes(some, environment={"NCCL_SOCKET_IFNAME": excluded}) == []


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        ({"gpus": (replace(GPU, uncorrected=1),)}, "Reset the GPU, or have it replaced."),
        ({"gpus": (replace(GPU, used_mib=8193.0),)}, "End what an earlier job left (nvidia-smi names it)."),
        ({"gpus": ()}, "Report the node: a GPU is lost."),
        ({"is_exact": False}, "Have the node tested."),
        ({"shm_share": 0.01}, "Remove what earlier jobs left there."),
        ({"disk_gb": 3.0}, "Free space, or lower checkpoint.keep_last."),
        ({"inodes": 12}, "Remove files that nobody needs."),
        ({"clock_s": -40.0}, "Let chrony or ntpd set it."),
    ],
)
def test_each_fault_is_told_with_what_to_do(more: dict, remedy: str) -> None:
    (finding,) = judge_nodes(nodes(b=more), disk_gb=10.0, gpus=1)
    assert finding.remedy == remedy


def test_missing_links_are_told_in_one_order_on_every_start() -> None:
    without = nodes(**{host: {"interfaces": ("lo",)} for host in "abcd"})
    found = judge_nodes(without, environment={"NCCL_SOCKET_IFNAME": "ib1,eth1,ib0"})
    assert [finding.what.split()[2] for finding in found[::4]] == ["eth1,", "ib0,", "ib1,"]


def test_of_two_nodes_nobody_can_say_which_has_the_wrong_version() -> None:
    two = {host: NodeFacts(host=host, versions={"torch": host}) for host in ("2.11", "2.12")}
    (finding,) = judge_nodes(two)
    assert "on others" in finding.what and bad_hosts([finding]) == []


def test_of_two_nodes_nobody_can_say_which_is_slow() -> None:
    two = dict(list(nodes(b={"teraflops": 100.0}).items())[:2])
    assert judge_nodes(two) == []


def test_gpus_are_read_from_nvidia_smi() -> None:
    text = "0, NVIDIA A100-SXM4-80GB, 535.1, 4, 81920, 0\n1, NVIDIA A100-SXM4-80GB, 535.1, 4, 81920, [N/A]\n"
    gpus, driver = parse_smi(text)
    assert driver == "535.1" and [(gpu.index, gpu.total_mib, gpu.uncorrected) for gpu in gpus] == [
        ("0", 81920.0, 0),
        ("1", 81920.0, 0),
    ]


def test_this_machine_says_what_it_is_and_comes_back_from_json(tmp_path: Path) -> None:
    facts = gather_facts(tmp_path, host="here")
    assert facts.versions["torch"] and facts.memory_gib > 0 and facts.disk_gb > 0 and abs(facts.clock_s) < 5
    assert NodeFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_is_read_again_and_removed(tmp_path: Path) -> None:
    times = measure_storage(tmp_path / "probe", total=9_000_001, writers=3)
    assert times.bytes_written == 9_000_003 and times.is_equal and min(times.save_s, times.load_s) > 0
    assert list(tmp_path.iterdir()) == []


def test_few_nodes_leave_two_forecasts_and_all_nodes_one() -> None:
    one = StorageTimes(bytes_written=10 * 10**9, save_s=5.0, load_s=2.0, is_equal=True)
    few = forecast([one, one], total=400 * 10**9, nodes=40)
    assert few.save_s == (5.0, 100.0) and few.load_s == (2.0, 40.0)
    assert forecast([one] * 40, total=400 * 10**9, nodes=40).save_s == (5.0, 5.0)
    more = StorageTimes(bytes_written=30 * 10**9, save_s=6.0, load_s=6.0, is_equal=True)
    less = StorageTimes(bytes_written=10 * 10**9, save_s=4.0, load_s=1.0, is_equal=True)
    unequal = forecast([more, less], total=40 * 10**9, nodes=2)  # 20 GB for each
    assert unequal.save_s == pytest.approx((8.0, 8.0)) and unequal.load_s == pytest.approx((4.0, 4.0))
    two_of_three = forecast([more, less], total=60 * 10**9, nodes=3)
    assert two_of_three.save_s == pytest.approx((8.0, 9.0)) and two_of_three.measured_nodes == 2


def test_the_command_measures_this_machine_and_lets_nodes_back(tmp_path: Path) -> None:
    run = tmp_path / "runs/run"
    said = bloomery("preflight", "demo", "--run", run, "--json", "--storage", "--gigabytes", "0.001")
    assert said.status in (0, 1), said
    told = json.loads(said.out)
    (facts,) = told["nodes"].values()
    assert facts["teraflops"] > 0 and facts["all_reduce_gb_per_s"] > 0 and facts["is_exact"]
    assert "a checkpoint of" in said.err
    assert list(tmp_path.iterdir()) == [], "it only checks"
    RunDirectory(run).create()
    exclusions = Exclusions(run / "exclusions.json")
    exclusions.add(QuarantinedNode(host="node7", cause="bad GPU", since=time.time()))
    assert "is let back" in bloomery("preflight", "demo", "--run", run, "--release", "node7").out
    assert exclusions.nodes() == {}


def test_the_slowest_and_the_wrong_rank_tell_of_their_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two real ranks, of which the second measures less and computes something else."""
    target, meeting = tmp_path / "probe.json", str(tmp_path / "meeting")
    environment = {"WORLD_SIZE": "2", "BLOOMERY_RENDEZVOUS_FILE": meeting, "GLOO_SOCKET_IFNAME": "lo"}
    code = """
import sys
from pathlib import Path
from bloomery.calibrate import node_probe
node_probe._products = lambda device, seconds: (1.0, False, 3)
node_probe.probe_as_rank(Path(sys.argv[1]), seconds=0.0)
"""
    command = [sys.executable, "-c", code, str(target)]
    other = subprocess.Popen(command, env=os.environ | environment | {"RANK": "1"})
    try:
        from bloomery.calibrate import node_probe

        for name, value in (environment | {"RANK": "0"}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(node_probe, "_products", lambda device, seconds: (2.0, True, 3))
        node_probe.probe_as_rank(target, seconds=0.0)
        assert other.wait(60.0) == 0
    finally:
        other.kill()
        other.wait()
    found = json.loads(target.read_text())
    assert (found["teraflops"], found["is_exact"], found["products"]) == (1.0, False, 3)
    assert found["all_reduce_gb_per_s"] > 0.0


def test_one_wrong_product_among_right_ones_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from bloomery.calibrate import node_probe

    equal, compared = torch.equal, list[bool]()

    def wrong_once(one: torch.Tensor, other: torch.Tensor) -> bool:
        compared.append(len(compared) != 1 and equal(one, other))
        return compared[-1]

    ticks = iter(range(100))
    monkeypatch.setattr(torch, "equal", wrong_once)
    clock = SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=time.perf_counter)
    monkeypatch.setattr(node_probe, "time", clock)
    _, is_exact, count = node_probe._products(torch.device("cpu"), seconds=4.0)
    assert count == 3 and compared == [True, False], "after a wrong one nothing is compared any more"
    assert not is_exact


def test_a_machine_that_is_not_fit_ends_the_start_of_a_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bloomery.operate.start_check._AGAIN_S", 0.0)
    said: list[str] = []
    check, rundir, told = StartCheck(gpus=10_000, disk_gb=0.0, environment={}), RunDirectory(tmp_path), []
    assert not _is_unfit(check, rundir, None, said.append)
    assert "GPUs" in said[0]
    reactions = JobReactions(on_bad_node=told.append, on_repeating=told.append)
    assert _is_unfit(check, rundir, reactions, said.append)
    assert len(told) == 1


@pytest.mark.parametrize(
    ("at_the_limit", "beyond_it"),
    [
        ({"gpus": (replace(GPU, used_mib=8192.0),)}, {"gpus": (replace(GPU, used_mib=8193.0),)}),
        ({"clock_s": 5.0}, {"clock_s": 5.1}),
        ({"clock_s": -5.0}, {"clock_s": -5.1}),
        ({"teraflops": 170.0}, {"teraflops": 169.9}),
    ],
)
def test_a_node_has_no_fault_at_a_limit_and_one_beyond_it(at_the_limit: dict, beyond_it: dict) -> None:
    assert judge_nodes(nodes(b=at_the_limit), gpus=1) == []
    assert [finding.host for finding in judge_nodes(nodes(b=beyond_it), gpus=1)] == ["b"]


def test_of_three_nodes_one_may_be_slow() -> None:
    three = {host: facts for host, facts in nodes(b={"teraflops": 100.0}).items() if host != "d"}
    assert bad_hosts(judge_nodes(three)) == ["b"]
    del three["c"]
    assert judge_nodes(three) == []
