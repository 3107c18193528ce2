"""Judges the nodes of a job by the facts each reports and by comparing them, as a pure function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bloomery.operate.node_facts import NodeFacts

SLOW = 0.85
"""A node is slow when it reaches less than this share of the median of its peers."""
_MOST_SKEW_S = 5.0
_HELD_SHARE = 0.1
_FEW_INODES = 10_000
_LITTLE_SHM = 0.05
_LEAST_PEERS = 3
_INTERFACES = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"}
"""Variables with names of network interfaces, or with the first letters of such names."""


@dataclass(frozen=True, kw_only=True)
class NodeFinding:
    """Something that is wrong with a node.

    is_bad: whether the node must be left out; else a person should know.
    """

    host: str
    what: str
    remedy: str
    is_bad: bool

    def __str__(self) -> str:
        return f"{self.host}: {self.what}"


def judge_nodes(
    nodes: Mapping[str, NodeFacts],
    *,
    disk_gb: float = 0.0,
    gpus: int = 0,
    environment: Mapping[str, str] | None = None,
) -> list[NodeFinding]:
    """Return what is wrong, node by node.

    disk_gb: what must be free on the disk of the run directory. gpus: what each node must have.
    environment: the variables that the ranks get; what they name must be there.
    """
    findings = [finding for facts in nodes.values() for finding in _alone(facts, disk_gb, gpus)]
    findings += _links(nodes, environment or {})
    findings += _versions(nodes)
    findings += _clocks(nodes)
    findings += _speeds(nodes, "teraflops", "matmuls", "TFLOP/s")
    findings += _speeds(nodes, "all_reduce_gb_per_s", "all-reduce", "GB/s")
    return findings


def bad_hosts(findings: Sequence[NodeFinding]) -> list[str]:
    """Return the hosts to leave out, each once."""
    return list(dict.fromkeys(finding.host for finding in findings if finding.is_bad))


def _alone(facts: NodeFacts, disk_gb: float, gpus: int) -> list[NodeFinding]:
    """Return what is wrong with a node whatever its peers say."""
    findings = []

    def find(what: str, remedy: str, *, is_bad: bool) -> None:
        findings.append(NodeFinding(host=facts.host, what=what, remedy=remedy, is_bad=is_bad))

    for gpu in facts.gpus:
        if gpu.uncorrected:
            find(
                f"GPU {gpu.index} has {gpu.uncorrected} uncorrected ECC errors",
                "Reset the GPU, or have it replaced.",
                is_bad=True,
            )
        if gpu.total_mib and gpu.used_mib > _HELD_SHARE * gpu.total_mib:
            used = f"{gpu.used_mib:.0f} of {gpu.total_mib:.0f} MiB"
            find(
                f"{used} of GPU {gpu.index} are held by something",
                "End what an earlier job left (nvidia-smi names it).",
                is_bad=True,
            )
    if len(facts.gpus) < gpus:
        find(f"{len(facts.gpus)} of {gpus} GPUs are there", "Report the node: a GPU is lost.", is_bad=True)
    if facts.disk_gb < disk_gb:
        need = f"{facts.disk_gb:.1f} GB are free for the run, {disk_gb:.1f} GB are needed"
        find(need, "Free space, or lower checkpoint.keep_last.", is_bad=False)
    if facts.inodes is not None and facts.inodes < _FEW_INODES:
        find(f"{facts.inodes} inodes are free", "Remove files that nobody needs.", is_bad=False)
    if facts.shm_share is not None and facts.shm_share < _LITTLE_SHM:
        find(
            f"/dev/shm is {1 - facts.shm_share:.0%} full", "Remove what earlier jobs left there.", is_bad=True
        )
    if facts.is_exact is False:
        find("equal matmuls differ: it computes wrongly", "Have the node tested.", is_bad=True)
    return findings


def _links(nodes: Mapping[str, NodeFacts], environment: Mapping[str, str]) -> list[NodeFinding]:
    """Return the nodes without the links that the variables name.

    Where all nodes lack one, the recipe names the wrong link, and no node is bad.
    """
    findings = []
    lacking: dict[str, set[str]] = {}
    if environment.get("NCCL_NET") == "IB":
        lacking["an active InfiniBand port"] = {
            host for host, facts in nodes.items() if not facts.infiniband_ports
        }
    for variable in _INTERFACES & environment.keys():
        named = environment[variable]
        if named and not named.startswith("^"):  # such a list tells which ones are not used
            for name in named.removeprefix("=").split(","):
                lacking[f"an interface {name}, which {variable} names,"] = {
                    host
                    for host, facts in nodes.items()
                    if facts.interfaces is not None
                    and not any(up.startswith(name) for up in facts.interfaces)
                }
    for what, hosts in sorted(lacking.items()):
        is_bad = 0 < len(hosts) < len(nodes)
        remedy = (
            "Have its link looked at." if is_bad else "Choose another of environment.profiles, or variables."
        )
        findings += [
            NodeFinding(host=host, what=f"{what} is not there", remedy=remedy, is_bad=is_bad)
            for host in nodes
            if host in hosts
        ]
    return findings


def _versions(nodes: Mapping[str, NodeFacts]) -> list[NodeFinding]:
    """Return the nodes whose versions differ from those that most nodes have."""
    findings = []
    for name in sorted({name for facts in nodes.values() for name in facts.versions}):
        here = {host: facts.versions.get(name, "missing") for host, facts in nodes.items()}
        usual, count = Counter(here.values()).most_common(1)[0]
        is_most = 2 * count > len(here)  # of two nodes nobody can say which one is wrong
        for host, version in here.items():
            if version != usual:
                what = f"{name} is {version}, and {usual} on {'most nodes' if is_most else 'others'}"
                remedy = "Install the same everywhere."
                findings.append(NodeFinding(host=host, what=what, remedy=remedy, is_bad=is_most))
    return findings


def _clocks(nodes: Mapping[str, NodeFacts]) -> list[NodeFinding]:
    middle = median([facts.clock_s for facts in nodes.values()]) if nodes else 0.0
    return [
        NodeFinding(
            host=facts.host,
            what=f"its clock is {facts.clock_s - middle:+.1f} s off that of the others",
            remedy="Let chrony or ntpd set it.",
            is_bad=False,
        )
        for facts in nodes.values()
        if abs(facts.clock_s - middle) > _MOST_SKEW_S
    ]


def _speeds(nodes: Mapping[str, NodeFacts], name: str, what: str, unit: str) -> list[NodeFinding]:
    speeds = {host: getattr(facts, name) for host, facts in nodes.items() if getattr(facts, name) is not None}
    if len(speeds) < _LEAST_PEERS:  # of two, nobody can say which one is slow
        return []
    usual = median(speeds.values())
    return [
        NodeFinding(
            host=host,
            what=f"{what} reach {speed:.3g} {unit}, and {usual:.3g} on the median node",
            remedy="Look at its clocks, temperature and links, or leave it out.",
            is_bad=True,
        )
        for host, speed in speeds.items()
        if speed < SLOW * usual
    ]
