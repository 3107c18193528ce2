"""Makes objects of a file:// URL outlive a power cut, and removes what killed uploads left on that disk.

obstore writes an object beside its name, as `NAME#1`, and then renames it, without a sync. Of a process that
is killed the file `NAME#1` stays: no listing shows it, and the next upload takes `NAME#2`.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

from bloomery import durable

_UNFINISHED = re.compile(r".+#\d+")
_ABANDONED_S = 900.0
"""The seconds without a new byte after which an upload is abandoned; so long one part may take."""


class Disk:
    """The directory of a file:// URL, whose objects are files."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._named: set[Path] = set()
        """Directories below the root whose own names are durable."""

    def keep(self, key: str) -> None:
        """Sync an object, and the names that lead to it. Raises OSError."""
        path = self._root / key
        durable.sync_tree(path)
        self._sync_names(path.parent)

    def forget(self, key: str) -> None:
        """Make the removal of an object durable. Raises OSError."""
        durable.sync_directory((self._root / key).parent)

    def remove_unfinished(self, prefix: str) -> None:
        """Remove what killed uploads left under a prefix. Raises no error."""
        for path in (self._root / prefix).rglob("*#*"):
            with suppress(OSError):
                if _UNFINISHED.fullmatch(path.name) and time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()

    def _sync_names(self, directory: Path) -> None:
        """Sync the names in a directory, and once those that lead to it. Raises OSError."""
        durable.sync_directory(directory)
        while directory != self._root and directory not in self._named:
            self._named.add(directory)
            directory = directory.parent
            durable.sync_directory(directory)
