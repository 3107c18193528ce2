"""What a piece of code makes durable, and in which order: its calls of fsync and rename, by path."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock


class DiskCalls:
    """Calls of this process, oldest first: ("sync", name) and ("rename", new name)."""

    def __init__(self) -> None:
        self.paths: list[tuple[str, Path]] = []

    @property
    def names(self) -> list[tuple[str, str]]:
        """The calls by the last part of their path; of a draft, by the name that it will have."""
        return [(call, _without_draft(path.name)) for call, path in self.paths]

    def index(self, call: str, name: str) -> int:
        """When a call was made first."""
        return self.names.index((call, name))

    def synced_before(self, name: str, *, at: int) -> bool:
        """Whether a file was synced before the call of a number."""
        return ("sync", name) in self.names[:at]


@contextmanager
def recorded() -> Iterator[DiskCalls]:
    """Record what this process syncs and renames."""
    calls = DiskCalls()
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def synced(file: int) -> None:
        fsync(file)
        calls.paths.append(("sync", Path(f"/proc/self/fd/{file}").readlink()))

    def renamed(source: object, target: str | Path) -> None:
        rename(source, target)
        calls.paths.append(("rename", Path(target).absolute()))

    def replaced(source: object, target: str | Path) -> None:
        replace(source, target)
        calls.paths.append(("rename", Path(target).absolute()))

    with (
        mock.patch.object(os, "fsync", synced),
        mock.patch.object(os, "rename", renamed),
        mock.patch.object(os, "replace", replaced),
    ):
        yield calls


def _without_draft(name: str) -> str:
    return name.rsplit(".", 2)[0].removeprefix(".") if name.endswith(".draft") else name
