"""The programs of native/tests, built with a sanitizer and run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build(kind: str, directory: Path) -> None:
    """Build what native/tests/Makefile makes of a kind (address, thread) under `directory`."""
    made = subprocess.run(
        ["make", "-s", "-j2", "-C", ROOT / "native/tests", f"BUILD={directory}", kind],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert made.returncode == 0, made.stderr


def run(program: Path, *arguments: str, timeout_s: float = 600) -> str:
    """What it prints; it must end well, and a sanitizer must find nothing."""
    command = [str(program), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if "unexpected memory mapping" in ended.stderr and shutil.which("setarch"):
        # The thread sanitizer of older compilers does not know how far newer kernels spread addresses.
        ended = subprocess.run(["setarch", "-R", *command], capture_output=True, text=True, timeout=timeout_s)
    assert ended.returncode == 0, ended.stderr[-8000:]
    return ended.stdout
