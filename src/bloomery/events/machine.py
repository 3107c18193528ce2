"""Which machine this is: machines may have equal host names, as clones of one image often have."""

from __future__ import annotations

import os
from pathlib import Path


def machine_id() -> str:
    """Return a text that is equal for all processes on this machine: its boot id, else its host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
