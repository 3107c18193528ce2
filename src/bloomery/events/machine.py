"""Which machine this is, and how much of it a rank may use.

Machines may have equal host names, as clones of one image often have.
"""

from __future__ import annotations

import os
from pathlib import Path


def machine_id() -> str:
    """Return a text that is equal for all processes on this machine: its boot id, else its host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def processors_of_a_rank() -> float:
    """Return how many of this machine's processors each of its ranks has."""
    return len(os.sched_getaffinity(0)) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
