"""The benchmark of weight gradients, small: on a GPU it is run by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "gpu_gradients.py"


def test_it_measures_sums_products_and_the_head_by_chunk() -> None:
    command = [sys.executable, BENCHMARK, "--tiny", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert all(line["value"] > 0 for line in lines)
    assert [line["name"] for line in lines] == [
        "sums, first",
        "sums, further",
        *[f"product that adds to the sum, {name}" for name in ("qkv", "output", "expand", "down")],
        "products that add to the sum, a block",
        *[f"head, {chunk} tokens at a time" for chunk in (1024, 2048, 4096)],
    ]
