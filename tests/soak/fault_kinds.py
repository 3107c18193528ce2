"""What a planted fault is, and what must be said of faults of each of the twelve kinds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.operate.diagnosis import Cause

CASES = Path(__file__).with_name("planted_faults.jsonl")
WATCHDOG = (
    "[rank{0}]:[E807 02:07:08.408 ProcessGroupNCCL.cpp:607] [Rank {0}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={1}, OpType=ALLREDUCE, NumelIn=544, Timeout(ms)=600000) ran for 600061 ms."
)


@dataclass(frozen=True, kw_only=True)
class PlantedFault:
    """A fault of one rank, and what must be said of it.

    place, code: the function of the program at whose next call the code runs; "": at once, in a thread.
    signal: the signal that the rank gets from outside; 0: none.
    others: what a thread of NCCL prints on every other rank, which then aborts; 'watchdog': WATCHDOG.
    kernel: what the kernel's log says of it. memory_mib: the memory that a cgroup leaves to the rank.
    small_shm: whether the run has a small /dev/shm of its own.
    names_rank: whether the verdict must name the rank; else it must name none.
    at_start: whether the run is ended first and started again with the fault planted, for a place that only
    the start-up calls.
    """

    kind: str
    cause: Cause
    retries: bool
    place: str = ""
    code: str = ""
    signal: int = 0
    others: str = ""
    kernel: str = ""
    memory_mib: int = 0
    small_shm: bool = False
    names_rank: bool = True
    at_start: bool = False


OF_KIND: dict[str, dict[str, Any]] = {
    "kill": {"cause": Cause.KILLED, "retries": True},
    "crash": {"cause": Cause.CRASH, "retries": True},
    "hang": {"cause": Cause.HANG, "retries": True},
    "exception": {"cause": Cause.EXCEPTION, "retries": False},
    "disk": {"cause": Cause.NO_SPACE, "retries": False},
    "shared memory": {"cause": Cause.BUS_ERROR, "retries": False, "small_shm": True},
    "GPU memory": {"cause": Cause.GPU_MEMORY, "retries": False},
    "bad GPU": {"cause": Cause.BAD_GPU, "retries": True},
    "NCCL time-out": {"cause": Cause.NCCL_TIMEOUT, "retries": True},
    "network": {"cause": Cause.NETWORK, "retries": True},
    "storage": {"cause": Cause.STORAGE, "retries": True},
    "out of memory": {"cause": Cause.OOM_KILLER, "retries": True, "memory_mib": 192},
}
"""What is right for the faults of a kind, where a fault does not say otherwise."""


def planted_faults(draw: str) -> dict[str, PlantedFault]:
    """Return the faults of a draw, or the hangs, each under its name, from planted_faults.jsonl.

    A line holds what a fault has besides what OF_KIND says of its kind. Draws were written one after another,
    each before its faults were run once and after the rules had been mended by those before.
    """
    faults: dict[str, PlantedFault] = {}
    for line in CASES.read_text().splitlines():
        fields = json.loads(line)
        if fields.pop("draw") != draw:
            continue
        name = fields.pop("name", f"fault {len(faults) + 1}")
        kind = OF_KIND[fields["kind"]] | fields
        faults[name] = PlantedFault(**kind | {"cause": Cause(kind["cause"])})
    return faults
