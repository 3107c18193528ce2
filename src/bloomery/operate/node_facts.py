"""Gathers facts about this node before a run starts on it: versions, devices, memory, disk and clock."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import bloomery
from bloomery.errors import nearest_existing
from bloomery.events.records import known_values
from bloomery.operate.share_log import free_share

_PACKAGES = (
    "bloomery",
    "torch",
    "numpy",
    "transformers",
    "safetensors",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
_SMI_S = 20.0
_SMI_FIELDS = "index,name,driver_version,memory.used,memory.total,ecc.errors.uncorrected.volatile.total"


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """A GPU as nvidia-smi reports it. uncorrected: uncorrected ECC errors since the driver was loaded."""

    index: str
    name: str
    used_mib: float
    total_mib: float
    uncorrected: int = 0


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What was found on a node.

    versions: of the packages and programs that must be equal on all nodes, by name.
    memory_gib: memory that programs may still take. disk_gb: free on the disk of the run directory.
    inodes: free there; None where the file system does not count them. shm_share: free share of /dev/shm.
    clock_s: how far this clock is ahead of that of the run directory's file system, in seconds.
    teraflops: of a matmul, the slowest rank's. all_reduce_gb_per_s: of the ranks of this node.
    is_exact: whether equal matmuls were equal to the bit. None where they were not measured.
    interfaces: network interfaces that are not down. infiniband_ports: InfiniBand ports that are active; None
        where there is no adapter.
    """

    host: str
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[GpuFacts, ...] = ()
    cores: int = 0
    memory_gib: float = 0.0
    disk_gb: float = 0.0
    inodes: int | None = None
    shm_share: float | None = None
    clock_s: float = 0.0
    teraflops: float | None = None
    all_reduce_gb_per_s: float | None = None
    is_exact: bool | None = None
    interfaces: tuple[str, ...] | None = None
    infiniband_ports: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> NodeFacts:
        """Return the facts that `to_json` described, without unknown fields."""
        values = known_values(cls, record)
        interfaces = values.get("interfaces")
        values["interfaces"] = None if interfaces is None else tuple(map(str, interfaces))
        return cls(**{**values, "gpus": tuple(GpuFacts(**gpu) for gpu in values.get("gpus", ()))})


def gather_facts(run: Path, *, host: str) -> NodeFacts:
    """Return the facts of this node, within about a second.

    run: the run directory. Where it does not exist yet, its nearest parent tells of the disk and the clock.
    """
    place = nearest_existing(run)
    disk = os.statvfs(place)
    gpus, driver = _gpus()
    return NodeFacts(
        host=host,
        versions=_versions() | ({"driver": driver} if driver else {}),
        gpus=gpus,
        cores=os.cpu_count() or 0,
        memory_gib=_memory_gib(),
        disk_gb=disk.f_bavail * disk.f_frsize / 1e9,
        inodes=disk.f_favail if disk.f_files else None,
        shm_share=free_share(Path("/dev/shm")),
        clock_s=_clock_s(place, host),
        interfaces=_interfaces(),
        infiniband_ports=_infiniband_ports(),
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    commit = _commit(Path(bloomery.__file__).parents[2])
    return versions | ({"commit": commit} if commit else {})


def _commit(clone: Path) -> str:
    """Return the commit of the clone that bloomery runs from; "" outside of one."""
    if not (clone / ".git").exists():
        return ""
    command = ["git", "-C", str(clone), "rev-parse", "--short=12", "HEAD"]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=False)
        return done.stdout.strip()
    return ""


def _gpus() -> tuple[tuple[GpuFacts, ...], str]:
    """Return the GPUs and the driver's version; nothing where there is no nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return (), ""
    return parse_smi(done.stdout) if done.returncode == 0 else ((), "")


def parse_smi(text: str) -> tuple[tuple[GpuFacts, ...], str]:
    """Return the GPUs and the driver's version from nvidia-smi's comma-separated lines."""
    gpus, driver = [], ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(_SMI_FIELDS.split(",")):
            index, name, driver, used, total, errors = cells
            gpus.append(
                GpuFacts(
                    index=index,
                    name=name,
                    used_mib=float(used) if used.isdecimal() else 0.0,
                    total_mib=float(total) if total.isdecimal() else 0.0,
                    uncorrected=int(errors) if errors.isdecimal() else 0,  # "[N/A]" without ECC
                )
            )
    return tuple(gpus), driver


def _interfaces(system: Path = Path("/sys")) -> tuple[str, ...] | None:
    """Return the network interfaces that are not down; None where the system does not say."""
    try:
        places = sorted((system / "class/net").iterdir())
    except OSError:
        return None
    return tuple(place.name for place in places if _text(place / "operstate") != "down")


def _infiniband_ports(system: Path = Path("/sys")) -> int | None:
    """Return the number of InfiniBand ports that are active; None where there is no adapter."""
    states = sorted((system / "class/infiniband").glob("*/ports/*/state"))
    return sum("ACTIVE" in _text(state) for state in states) if states else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _memory_gib() -> float:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / 2**20
    return 0.0


def _clock_s(place: Path, host: str) -> float:
    """Return how far this clock is ahead of the file system's, by the time that a new file gets."""
    probe = place / f".clock-{host}-{os.getpid()}"
    try:
        before = time.time()
        probe.write_text("x")
        written = probe.stat().st_mtime
        after = time.time()
    except OSError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)
    # A time between `before` and `after` shows no difference: the file may have been made at any moment.
    return before - written if written < before else after - written if written > after else 0.0
