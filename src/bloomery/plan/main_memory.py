"""Tells how much main memory this process may use: what its machine has and its control groups allow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from bloomery.frozen import dataclass

_GIB = 2**30
_MEMORY = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class _ControlGroup:
    """A Linux cgroup and the names of its files and counts, which differ between versions 1 and 2."""

    directory: Path
    limit: str = "memory.max"
    taken: str = "memory.current"
    cached: tuple[str, ...] = ("inactive_file", "active_file")

    def limit_bytes(self) -> int | None:
        """Return the limit; None where the group has none."""
        try:
            return int((self.directory / self.limit).read_text())  # "max" is no number
        except (OSError, ValueError):
            return None

    def free_bytes(self) -> int | None:
        """Return what the group may still take; None where it has no limit.

        Cached files count as its memory, and the kernel drops them before it refuses anything.
        """
        limit = self.limit_bytes()
        if limit is None:
            return None
        try:
            taken = int((self.directory / self.taken).read_text())
            lines = (self.directory / "memory.stat").read_text().splitlines()
            counts = dict(line.split() for line in lines)
            return limit - taken + sum(int(counts[name]) for name in self.cached)
        except (OSError, ValueError, KeyError):
            return None


def main_memory_gib() -> float:
    """Return the RAM in GiB, or what a container or a job may use of it."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [group.limit_bytes() for group in _own_groups()]
    return min((most, *(limit for limit in limits if limit is not None))) / _GIB


def available_memory_bytes() -> int | None:
    """Return the free memory, by /proc/meminfo and the control groups; None where both are unknown."""
    free: list[int | None] = [group.free_bytes() for group in _own_groups()]
    try:
        for line in _MEMORY.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError):  # not Linux
        free.append(None)
    return min((bytes for bytes in free if bytes is not None), default=None)


def _own_groups() -> Iterator[_ControlGroup]:
    """Yield the control groups of this process and those above them: a batch system limits a whole job."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        place = Path(path.lstrip("/"))
        for group in (place, *place.parents):
            if not controllers:
                yield _ControlGroup(directory=_MOUNTED / group)
            elif "memory" in controllers.split(","):
                yield _ControlGroup(
                    directory=_MOUNTED / "memory" / group,
                    limit="memory.limit_in_bytes",
                    taken="memory.usage_in_bytes",
                    cached=("total_inactive_file", "total_active_file"),
                )
