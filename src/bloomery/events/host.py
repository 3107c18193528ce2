"""What this machine is called in logs, messages and the names of files."""

from __future__ import annotations

import os


def host_name() -> str:
    """The name that the launcher gave this node (BLOOMERY_HOST), or the system's."""
    return os.environ.get("BLOOMERY_HOST", "") or os.uname().nodename
