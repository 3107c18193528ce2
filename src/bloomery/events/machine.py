"""Which machine this is: machines may have equal host names, as clones of one image often have."""

from __future__ import annotations

import os
from pathlib import Path


def machine_id() -> str:
    """Return what all processes on this machine have in common: the id of its boot, or else its host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
