"""Checks whether Triton's kernels can run here, and finds the header that compiling needs."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


@functools.cache
def has_triton() -> bool:
    """Return whether Triton's kernels can run here. Compiled code cannot ask.

    Triton comes with torch's builds for CUDA, not with those for CPUs. It compiles a launcher in C for each
    kernel, and so needs a C compiler and Python's headers.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return (
        importlib.util.find_spec("triton") is not None and compiler is not None and python_header().exists()
    )


def python_header() -> Path:
    """Return where the header lies that compiled extensions include; it may be missing."""
    return Path(sysconfig.get_path("include")) / "Python.h"
