"""Where Triton is, for kernels that run without a GPU: in its interpreter, in a process of their own.

torch's builds for CPUs come without Triton, and with it beside them they would take another way through the
compiler. So `make test` puts it into a directory beside the environment's packages.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[1]
_TRITON = Path(sys.prefix) / "triton"
LIMIT_S = 250


def interpreted(module: str) -> Any:
    """Run a module of the tests with kernels interpreted, and return the JSON that it prints.

    Modules run in forks of one process, which the first call starts and which ends with this one.
    """
    server = _interpreter()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(f"{module}\n")
    server.stdin.flush()
    is_ready, _, _ = select.select([server.stdout], [], [], LIMIT_S)
    if not is_ready:
        server.kill()
        _interpreter.cache_clear()
        pytest.fail(f"{module} did not end within {LIMIT_S} s")
    ended = json.loads(server.stdout.readline())
    assert ended["status"] == 0, ended["error"][-3000:]
    return json.loads(ended["out"].splitlines()[-1])


def compiled(module: str) -> Any:
    """Run a module of the tests in which kernels can be compiled, and return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=_ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@cache
def _interpreter() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forking_programs"],
        cwd=_ROOT,
        env=_environment() | {"TRITON_INTERPRET": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.kill)  # it would end when its input does, but for a module that hangs
    return server


def _environment() -> dict[str, str]:
    if not (_TRITON / "triton").is_dir():
        if os.environ.get("BLOOMERY_SKIP_NOTHING"):
            pytest.fail(f"Triton is missing in {_TRITON}: make {_TRITON}/.installed")
        pytest.skip("Triton is missing: `make test` installs it")
    return os.environ | {"PYTHONPATH": str(_TRITON), "OMP_NUM_THREADS": "1"}
