"""Puts into one directory what `gpu.py` needs on a machine with torch and transformers and nothing of ours.

    python benchmarks/gpu_bundle.py build/gpu-bundle --python 3.12

    # there, in the root of this tree, with the directory beside it:
    sh build/gpu-bundle/run.sh --within 840 --keep found.jsonl

The directory has a wheel of this tree, whose native library fits any Python 3 of the platform, wheels of the
packages that torch and transformers do not bring, for the Python of that machine, and `run.sh`, which
installs them into a directory of their own: nothing on that machine is changed, and nothing is fetched there.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRESENT = ("torch", "transformers", "triton", "numpy")
"""What the machine has, with all that these need."""
CARRIED = (
    *("fastokens", "msgspec", "psutil", "xxhash"),
    *("pytest", "pluggy", "iniconfig", "pytest-timeout", "hypothesis", "sortedcontainers"),
)
"""What `gpu.py` imports besides: the package's dependencies, and what runs the tests."""
MOST_BYTES = 64 << 20
"""What may be carried to machines that are lent."""
RUN = """\
#!/bin/sh
# Installs the wheels beside this script into a directory of their own, and runs benchmarks/gpu.py with them.
# Call it in the root of the tree. PYTHON: the interpreter that has torch (default: python3).
set -eu
bundle=$(dirname "$0")
site=$(mktemp -d)
"${PYTHON:-python3}" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$bundle"/*.whl
PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" benchmarks/gpu.py "$@"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    directory: Path = options.directory
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip"]
    quiet = ["-q", "--disable-pip-version-check", "--no-deps"]
    environment = os.environ | {"BLOOMERY_NEEDS_NATIVE": "1"}
    subprocess.run([*pip, "wheel", *quiet, "-w", directory, "."], cwd=ROOT, env=environment, check=True)
    fitting = ["--only-binary=:all:", "--implementation", "cp", "--python-version", options.python]
    for name in _platforms(options.machine):
        fitting += ["--platform", name]
    wanted = ["-c", str(ROOT / "constraints.txt"), *CARRIED]
    subprocess.run([*pip, "download", *quiet, *fitting, "-d", directory, *wanted], check=True)
    (directory / "run.sh").write_text(RUN, encoding="utf-8")
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    for name, size in sizes.items():
        print(f"{size / 2**20:8.2f} MiB  {name}")
    if sum(sizes.values()) > MOST_BYTES:
        print(f"{sum(sizes.values()) / 2**20:.1f} MiB are more than {MOST_BYTES >> 20}", file=sys.stderr)
        return 1
    return 0


def _platforms(machine: str) -> list[str]:
    """The tags of wheels that run on Linux there; pip takes each number by itself."""
    return [f"manylinux_2_{minor}_{machine}" for minor in range(17, 40)] + [f"manylinux2014_{machine}"]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path, help="is made anew")
    parser.add_argument("--python", default="3.12", help="of the machine (default 3.12)")
    parser.add_argument("--machine", default=platform.machine(), help="its processor (default: as here)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
