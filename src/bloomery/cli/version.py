"""`bloomery --version`: the version, and the commit that it was built from."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

COMMIT_FILE = "commit.txt"
"""Written beside the package when a wheel is built (setup.py); a clone asks git."""
_GIT_TIMEOUT_S = 5.0


def version_line() -> str:
    """Return for instance `bloomery 0.1.0 (51d1de1a2b3c)`; without the commit where nothing tells it."""
    commit = commit_of(Path(__file__).parents[1])
    return f"bloomery {metadata.version('bloomery')}" + (f" ({commit})" if commit else "")


def commit_of(package: Path) -> str:
    """Return the commit of a package directory: as it was built, or as its clone is; '' if unknown.

    `-dirty` is added where files of the clone were changed.
    """
    built = package / COMMIT_FILE
    if built.is_file():
        return built.read_text(encoding="utf-8").strip()
    clone = package.parents[1]
    if not (clone / ".git").exists():
        return ""
    command = ["git", "-C", str(clone), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
