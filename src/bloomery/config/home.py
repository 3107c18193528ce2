"""Paths that begin with `~`."""

from __future__ import annotations

import os
from pathlib import Path


def from_home(path: str | Path) -> Path:
    """Return a path with `~` or `~USER` replaced by that home directory.

    Where it is not known, as in a container without that user, the path stays as it is: whoever opens it says
    that there is no such file. `Path.expanduser` raises RuntimeError.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111
