"""The corpus that every machine has: the source code of the running interpreter's standard library."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

STANDARD_LIBRARY = "python:stdlib"

_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def standard_library() -> list[tuple[str, Path]]:
    """(path below the standard library with slashes, file) of each of its `*.py`, sorted by that path.

    Without tests, and without what was installed into it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for directory, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        paths = [Path(directory, name) for name in names if name.endswith(".py")]
        found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(found)
