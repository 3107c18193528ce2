"""Hundreds of faults by a seed on peers that train: the run ends, each sample counts once, nothing is left.

BLOOMERY_SOAK_FAULTS and BLOOMERY_SOAK_SEED choose how many, and which. On two cores 500 take half an hour.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = int(os.environ.get("BLOOMERY_SOAK_FAULTS", "500"))
SEED = os.environ.get("BLOOMERY_SOAK_SEED", "1")
DRAWN = FAULTS * 5 // 4
"""Some are drawn for a peer that is just gone, and strike nobody."""
TOKENS_A_FAULT, GAP_S = 7_200, 2.0
"""More than four peers on two cores train meanwhile, so that all faults come before the end."""
LOSS_SPREAD = 0.1
"""How far, in nats, above the undisturbed run's held-out loss: seeds alone are as far apart (`diloco.py`). It
may be lower: with fewer peers in a round, the same tokens make more rounds."""


@pytest.mark.slow
def test_a_run_outlives_whatever_happens_to_its_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = max(1_000_000, FAULTS * TOKENS_A_FAULT)
    told = {
        name: _run(tmp_path / name, tokens, *more)
        for name, more in (
            ("chaos", ("--faults", str(DRAWN), "--seed", SEED, "--gap", str(GAP_S))),
            ("simulate-internet", ()),
        )
    }
    with capsys.disabled():
        print(json.dumps(told))
    assert sum(fault["done"] for fault in told["chaos"]["faults"]) >= FAULTS
    assert told["chaos"]["loss"] <= told["simulate-internet"]["loss"] + LOSS_SPREAD


def _run(directory: Path, tokens: int, *more: str) -> dict[str, object]:
    command = [sys.executable, "-m", "bloomery", directory.name, "diloco-internet", "--peers", "4", "--json"]
    command += ["--directory", str(directory), "--minutes", "115", f"train.tokens={tokens}", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    told: dict[str, object] = json.loads(done.stdout)
    return told
