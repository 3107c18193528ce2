"""Measures the space of /dev/shm, through which data loaders and processes of a rank share memory."""

from __future__ import annotations

import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def shared_memory_space(path: Path = SHARED_MEMORY) -> tuple[int, int]:
    """Return the free and the total bytes of /dev/shm, of this container where it has its own.

    (0, 0) where there is none, or where it has no limit.
    """
    try:
        facts = os.statvfs(path)
    except OSError:
        return 0, 0
    return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
