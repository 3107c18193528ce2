"""Where Triton is, for kernels that run without a GPU: in its interpreter, in a process of their own.

torch's builds for CPUs come without Triton, and with it beside them they would take another way through the
compiler. So `make test` puts it into a directory beside the environment's packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[1]
_TRITON = Path(sys.prefix) / "triton"


def interpreted(module: str, *arguments: str) -> Any:
    """Run a module of the tests with kernels interpreted, and return the JSON that it prints."""
    return _run(module, *arguments, environment={"TRITON_INTERPRET": "1"})


def compiled(module: str, *arguments: str) -> Any:
    """Run a module of the tests in which kernels can be compiled, and return the JSON that it prints."""
    return _run(module, *arguments, environment={}, limit_s=3600)


def _run(module: str, *arguments: str, environment: dict[str, str], limit_s: int = 250) -> Any:
    if not (_TRITON / "triton").is_dir():
        if os.environ.get("BLOOMERY_SKIP_NOTHING"):
            pytest.fail(f"Triton is missing in {_TRITON}: make {_TRITON}/.installed")
        pytest.skip("Triton is missing: `make test` installs it")
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=_ROOT,
        env=os.environ | environment | {"PYTHONPATH": str(_TRITON), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
