"""What this machine can do, and small disks to fill."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


@cache
def may_mount() -> bool:
    """Whether `mounted` works here."""
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as directory:
        return _mount(Path(directory), "size=64k") and _unmount(Path(directory))


@cache
def has_python_headers() -> bool:
    """Whether torch.compile can build for this Python."""
    return (Path(sysconfig.get_path("include")) / "Python.h").exists()


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """A disk of its own at `path`; options are those of mount, for instance "size=1500k" or "ro"."""
    path.mkdir()
    assert _mount(path, options)
    try:
        yield path
    finally:
        assert _unmount(path)


def _mount(path: Path, options: str) -> bool:
    return _done("mount", "-t", "tmpfs", "-o", options, "none", str(path))


def _unmount(path: Path) -> bool:
    return _done("umount", "--lazy", str(path))  # what this process still maps of it goes with the process


def _done(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
