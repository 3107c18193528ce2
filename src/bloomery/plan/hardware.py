"""Reads hardware files and links between peers for plans, and estimates this machine if none is named.

Hardware files are TOML, shipped or written by `bloomery calibrate`. Rates are of one direction. GB and Gbit
are 10⁹, GiB is 2³⁰.

Of this machine nothing is measured; `bloomery calibrate` does that. Figures of processors are peaks by
instruction sets.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, field, fields
from pathlib import Path
from typing import Any

from bloomery.config.convert import BadValue, BadValues, convert_table
from bloomery.config.find import from_home, nearest, shipped_files
from bloomery.config.setting import setting
from bloomery.errors import ConfigError, Mistake
from bloomery.frozen import dataclass
from bloomery.plan.main_memory import main_memory_gib

GIB = 2**30
PRECISIONS = ("bf16", "fp16", "fp8", "fp32")


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The figures of one GPU or, on a machine without GPUs, of one rank's share of the machine."""

    kind: str = setting(
        "gpu",
        kind="free",
        choices=("gpu", "cpu"),
        help="What it is: compilation, and kernels of attention and loss, differ between the two.",
    )
    memory_gib: float = setting(kind="free", above=0.0, help="Memory that one rank may use.")
    reserved_gib: float = setting(
        0.0, kind="free", minimum=0.0, help="Taken before the model: context, libraries, fragmentation."
    )
    memory_gb_per_s: float = setting(kind="free", above=0.0, help="Peak of the memory.")
    memory_efficiency: float = setting(
        0.8, kind="free", above=0.0, maximum=1.0, help="What elementwise kernels reach of it."
    )
    bf16_teraflops: float = setting(0.0, kind="free", minimum=0.0, help="Peak; 0: not supported.")
    fp16_teraflops: float = setting(0.0, kind="free", minimum=0.0, help="Peak; 0: not supported.")
    fp8_teraflops: float = setting(0.0, kind="free", minimum=0.0, help="Peak; 0: not supported.")
    fp32_teraflops: float = setting(0.0, kind="free", minimum=0.0, help="Peak of fp32 (or TF32) matmuls.")
    matmul_efficiency: float = setting(
        0.7, kind="free", above=0.0, maximum=1.0, help="Share of the peak that large matmuls sustain."
    )
    fp8_efficiency: float = setting(
        0.55, kind="free", above=0.0, maximum=1.0, help="The same of fp8 matmuls, casts included."
    )
    matmul_half_size: float = setting(
        96.0, kind="free", minimum=0.0, help="Length of a side at which a matmul loses half its speed."
    )
    attention_efficiency: float = setting(
        0.4, kind="free", above=0.0, maximum=1.0, help="The same of fused attention, over the causal half."
    )
    attention_pass_ns: float = setting(
        0.0, kind="free", minimum=0.0, help="Beyond matmuls: nanoseconds for each weight of the square."
    )
    exponential_ns: float = setting(
        0.0, kind="free", minimum=0.0, help="Beyond memory: nanoseconds for each logit of the loss."
    )
    kernel_us: float = setting(5.0, kind="free", minimum=0.0, help="Least time of one operation.")
    power_w: float = setting(0.0, kind="free", minimum=0.0, help="While it trains.")


@dataclass(frozen=True, kw_only=True)
class Node:
    """The figures of what the accelerators of one machine share."""

    accelerators: int = setting(kind="free", minimum=1, help="Accelerators of one node.")
    link_gb_per_s: float = setting(
        0.0, kind="free", minimum=0.0, help="Between accelerators of a node, each, one direction."
    )
    link_efficiency: float = setting(0.8, kind="free", above=0.0, maximum=1.0, help="What collectives reach.")
    link_us: float = setting(5.0, kind="free", minimum=0.0, help="Latency of one message.")
    overlap: float = setting(
        0.8,
        kind="free",
        minimum=0.0,
        maximum=1.0,
        help="Share of the computation beside which a collective goes on, as measured by calibrate.",
    )
    overhead_power_w: float = setting(
        0.0, kind="free", minimum=0.0, help="Host, fans, network of one node while it trains."
    )


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network between nodes."""

    gbit_per_s: float = setting(0.0, kind="free", minimum=0.0, help="Of one node, one direction; 0: none.")
    efficiency: float = setting(0.7, kind="free", above=0.0, maximum=1.0, help="What collectives reach.")
    latency_us: float = setting(10.0, kind="free", minimum=0.0, help="Of one message.")


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The storage of checkpoints and data, as one job sees it from all its nodes together."""

    write_gb_per_s: float = setting(1.0, kind="free", above=0.0, help="Writing a checkpoint, all nodes.")
    read_gb_per_s: float = setting(1.0, kind="free", above=0.0, help="Reading data or a checkpoint.")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """The costs of operation, and the rate of failures."""

    price_per_accelerator_hour: float = setting(0.0, kind="free", minimum=0.0, help="0: not known.")
    currency: str = setting("USD", kind="free", help="Of the price.")
    power_usage_effectiveness: float = setting(
        1.2, kind="free", minimum=1.0, help="Energy of the building for each unit of the machines'."
    )
    failures_per_1000_accelerator_days: float = setting(
        0.5, kind="free", minimum=0.0, help="Failures that stop the run."
    )
    detection_s: float = setting(
        60.0, kind="free", minimum=0.0, help="Seconds until a failure is noticed and the ranks are ended."
    )
    restart_s: float = setting(
        300.0, kind="free", minimum=0.0, help="Seconds to start all ranks again, before they load."
    )
    step_jitter: float = setting(
        0.02,
        kind="free",
        minimum=0.0,
        maximum=0.5,
        help="Standard deviation of a node's step time, as share.",
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Hardware:
    """One kind of machine. It is equal only to itself, because it is a key in tables of times.

    sources: for each figure (`table.key`), where it comes from.
    """

    name: str
    notes: str = ""
    accelerator: Accelerator
    node: Node
    network: Network = field(default_factory=Network)
    storage: Storage = field(default_factory=Storage)
    operation: Operation = field(default_factory=Operation)
    sources: Mapping[str, str] = field(default_factory=dict)

    def peak_flops(self, precision: str) -> float:
        """Return the peak FLOP/s in a precision; 0 if the accelerator has no units for it. 'auto' means
        bf16 or fp32.
        """
        if precision == "auto":
            return self.peak_flops("bf16") or self.peak_flops("fp32")
        teraflops: float = getattr(self.accelerator, f"{precision}_teraflops")
        return teraflops * 1e12

    @property
    def memory_bytes_per_s(self) -> float:
        """The bytes/s that elementwise kernels read and write."""
        return self.accelerator.memory_gb_per_s * 1e9 * self.accelerator.memory_efficiency

    @property
    def link_bytes_per_s(self) -> float:
        """The bytes/s that each accelerator reaches in collectives inside a node, in one direction."""
        return self.node.link_gb_per_s * 1e9 * self.node.link_efficiency

    @property
    def network_bytes_per_s(self) -> float:
        """The bytes/s that one node's network reaches, in one direction."""
        return self.network.gbit_per_s * 1e9 / 8 * self.network.efficiency


TABLES: Mapping[str, type] = {
    "accelerator": Accelerator,
    "node": Node,
    "network": Network,
    "storage": Storage,
    "operation": Operation,
}


def load_hardware(path_or_name: str) -> Hardware:
    """Read a shipped hardware file by name, or a file by path. Raises ConfigError with all mistakes in it."""
    path = _find(path_or_name)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as broken:
        remedy = "`bloomery calibrate` writes one; the shipped ones are examples."
        raise _refused(path_or_name, f"cannot be read: {broken}", remedy) from broken
    return parse_hardware(raw, label=path.name)


def parse_hardware(raw: Mapping[str, Any], *, label: str) -> Hardware:
    """Return the hardware that parsed TOML describes. Raises ConfigError with all mistakes in it."""
    mistakes: list[Mistake] = []
    built: dict[str, Any] = {}
    for name, table in TABLES.items():
        try:
            built[name] = table(**convert_table(table, raw.get(name, {}), name))
        except BadValues as unusable:
            mistakes += [
                Mistake(
                    key=wrong.key, value=wrong.value, source=label, problem=wrong.problem, remedy=wrong.remedy
                )
                for wrong in unusable.wrongs
            ]
    for name in raw.keys() - {*TABLES, "name", "notes", "sources"}:
        remedy = f"There are {', '.join(TABLES)} and sources."
        mistakes.append(
            Mistake(key=name, value=None, source=label, problem="there is no such table", remedy=remedy)
        )
    told = raw.get("sources", {})
    if not isinstance(told, dict):
        problem, remedy = "must be a table", "Write [sources] on its own line."
        mistakes.append(Mistake(key="sources", value=told, source=label, problem=problem, remedy=remedy))
    if mistakes:
        raise ConfigError(mistakes, of=f"the hardware file {label}")
    sources = {key: str(text) for key, text in told.items()}
    name, notes = str(raw.get("name", Path(label).stem)), str(raw.get("notes", ""))
    return Hardware(name=name, notes=notes, sources=sources, **built)


def dump_hardware(hardware: Hardware) -> str:
    """Return the hardware as TOML that loads back equal, with the source of each figure as a comment."""
    import json

    lines = [f"name = {json.dumps(hardware.name)}", f"notes = {json.dumps(hardware.notes)}"]
    for name in TABLES:
        lines += ["", f"[{name}]"]
        table = getattr(hardware, name)
        lines += [f"{key} = {json.dumps(value)}" for key, value in asdict(table).items()]
    lines += ["", "[sources]"]
    lines += [f"{json.dumps(key)} = {json.dumps(text)}" for key, text in hardware.sources.items()]
    return "\n".join(lines) + "\n"


def shipped_hardware() -> dict[str, Path]:
    """Return the shipped hardware files of machines, by name, sorted, without those of links."""
    return {
        name: path for name, path in shipped_files("hardware").items() if not name.startswith("internet-")
    }


def settings_of(table: type) -> list[str]:
    """Return the names of the figures in one table."""
    return [figure.name for figure in fields(table)]


def _find(path_or_name: str) -> Path:
    path = from_home(path_or_name)
    if path.is_file():
        return path
    shipped = shipped_hardware()
    stem = path_or_name.removesuffix(".toml")
    if stem in shipped:
        return shipped[stem]
    near = nearest(stem, shipped, cutoff=0.5)
    hint = f"Did you mean '{near[0]}'? " if near else ""
    raise _refused(
        path_or_name,
        "there is no such file, nor a shipped one of this name",
        f"{hint}Shipped: {', '.join(shipped)}. `bloomery calibrate` measures this machine.",
    )


def _refused(path_or_name: str, problem: str, remedy: str) -> ConfigError:
    mistake = Mistake(
        key="--hardware", value=path_or_name, source="command line", problem=problem, remedy=remedy
    )
    return ConfigError([mistake], of="the plan")


PREFIX = "internet-"


@dataclass(frozen=True, kw_only=True)
class SiteLink:
    """The link between one peer and the others."""

    gbit_per_s: float = setting(1.0, kind="free", above=0.0, help="One direction.")
    efficiency: float = setting(0.4, kind="free", above=0.0, maximum=1.0, help="What a ring reaches.")
    latency_ms: float = setting(50.0, kind="free", minimum=0.0, help="One way.")
    outer_step_s: float = setting(7.5, kind="free", minimum=0.0, help="The outer optimizer's own time.")


def load_link(path_or_name: str) -> SiteLink:
    """Read a shipped link by name (`internet-1g`), or a file by path. Raises ConfigError."""
    path, shipped = from_home(path_or_name), shipped_links()
    if not path.is_file():
        shipped_path = shipped.get(path_or_name.removesuffix(".toml"))
        if shipped_path is None:
            raise _refused_link(
                path_or_name, "there is no such file or shipped link", f"Shipped: {', '.join(shipped)}."
            )
        path = shipped_path
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        # A machine's file, or a figure above [link], would otherwise give the usual link without a word.
        problem, remedy = "there is no such table", "There are link and sources."
        if strangers := sorted(raw.keys() - {"link", "name", "notes", "sources"}):
            raise BadValues(
                BadValue(key=key, value=None, problem=problem, remedy=remedy) for key in strangers
            )
        values = convert_table(SiteLink, raw.get("link", {}), "link")
    except BadValues as unusable:
        wrongs = [
            Mistake(
                key=wrong.key, value=wrong.value, source=path.name, problem=wrong.problem, remedy=wrong.remedy
            )
            for wrong in unusable.wrongs
        ]
        raise ConfigError(wrongs, of=f"the link file {path.name}") from None
    except (OSError, ValueError) as broken:
        raise _refused_link(
            path_or_name, f"cannot be read: {broken}", "See hardware/internet-1g.toml."
        ) from broken
    return SiteLink(**values)


def shipped_links() -> dict[str, Path]:
    """Return the links that are shipped with bloomery, by name."""
    return {name: path for name, path in shipped_files("hardware").items() if name.startswith(PREFIX)}


def _refused_link(value: str, problem: str, remedy: str) -> ConfigError:
    mistake = Mistake(key="--link", value=value, source="command line", problem=problem, remedy=remedy)
    return ConfigError([mistake], of="the plan")


_GPUS = Path("/proc/driver/nvidia/gpus")
_PROCESSOR = Path("/proc/cpuinfo")
_BY_MODEL = {r"\bH200": "h200", "H100": "h100-80g", "A100(?!.*40G)": "a100-80g", "V100(?!.*16G)": "v100-32g"}
_USUAL_HZ = 2.5e9
_FLOPS_PER_CYCLE = (("avx512f", 64.0), ("avx2", 32.0), ("avx", 16.0), ("asimd", 16.0))
"""fp32 operations of one core in one cycle, with two FMA units."""
_BF16_GAIN = (("amx_bf16", 8.0), ("avx512_bf16", 2.0), ("avx512bf16", 2.0), ("bf16", 2.0))
_CORE_GB_PER_S, _SOCKET_GB_PER_S = 12.0, 100.0
_PROCESS_GIB = 0.5


def this_machine(
    *, gpus: Path = _GPUS, processor: Path = _PROCESSOR, memory_gib: float | None = None
) -> Hardware | None:
    """Return this machine: the shipped file of its GPU, or an estimate from its processor's description.

    The paths are those of Linux. memory_gib: main memory, where it is known; None asks for it.
    None for GPUs of which no file is shipped.
    """
    models = [_field(file, r"Model:\s*(.+)") for file in sorted(gpus.glob("*/information"))]
    if models:
        name = next((name for pattern, name in _BY_MODEL.items() if re.search(pattern, models[0])), None)
        return None if name is None else load_hardware(name)
    return _of_processor(processor, main_memory_gib() if memory_gib is None else memory_gib)


def _of_processor(processor: Path, memory_gib: float) -> Hardware:
    cores = len(os.sched_getaffinity(0))
    flags = set(_field(processor, r"(?:flags|Features)\s*:\s*(.+)").split())
    megahertz = _field(processor, r"cpu MHz\s*:\s*([\d.]+)")
    clock_hz = float(megahertz or 0) * 1e6 or _USUAL_HZ  # some virtual machines say 0.000
    per_cycle = next((flops for flag, flops in _FLOPS_PER_CYCLE if flag in flags), 8.0)
    fp32 = cores * clock_hz * per_cycle / 1e12
    gain = next((gain for flag, gain in _BF16_GAIN if flag in flags), 0.0)
    bf16 = fp32 * gain
    return Hardware(
        name=f"this machine ({cores} cores, not measured)",
        notes="Estimated from the processor's description; `bloomery calibrate` measures it.",
        accelerator=Accelerator(
            kind="cpu",
            memory_gib=memory_gib,
            reserved_gib=_PROCESS_GIB,
            memory_gb_per_s=min(_SOCKET_GB_PER_S, _CORE_GB_PER_S * cores),
            fp32_teraflops=fp32,
            bf16_teraflops=bf16,
            matmul_efficiency=0.5,
            attention_efficiency=0.1,
        ),
        node=Node(accelerators=1),
        storage=Storage(write_gb_per_s=0.5, read_gb_per_s=0.5),
        operation=Operation(step_jitter=0.0, failures_per_1000_accelerator_days=0.0),
    )


def _field(path: Path, pattern: str) -> str:
    """Return what the first match in a file captures; '' where there is no file, or no match."""
    try:
        text = path.read_text()
    except OSError:
        return ""
    match = re.search(pattern, text)
    return match[1].strip() if match else ""
