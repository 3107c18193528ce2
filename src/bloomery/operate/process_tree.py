"""Lists all processes that a process has started, from Linux's /proc; and the names of what ends them."""

from __future__ import annotations

import signal
from pathlib import Path

_FIRST_NAMESPACE = 0xEFFFFFFC
"""PROC_PID_INIT_INO of include/linux/proc_ns.h: the namespace whose numbers the kernel's log gives."""


def descendants(pid: int) -> list[int]:
    """Return the process numbers of a process's children, of their children, and so on; [] where it is gone.

    Those that have ended and were not waited for count.
    """
    found: list[int] = []
    to_ask = [pid]
    while to_ask:
        children = _children(to_ask.pop())
        found += children
        to_ask += children
    return found


def sees_kernel_pids() -> bool:
    """Return whether this process sees process numbers as the kernel's log has them: not in a container."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _FIRST_NAMESPACE
    except OSError:
        return False


def signal_name(number: int) -> str:
    """Return the name of a signal; `signal 37` for one of those that have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _children(pid: int) -> list[int]:
    """Return the children of each thread of a process. The kernel lists them by the thread that made them."""
    numbers: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            numbers += map(int, path.read_text().split())
        except OSError:
            continue  # the thread has ended meanwhile
    return numbers
