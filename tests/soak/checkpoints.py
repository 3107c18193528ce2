"""A hundred kills at random moments of load, save and prune: nothing committed is lost, all is whole."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from tests.checkpoint.kills import kill_again_and_again

KILLS = 100


@pytest.mark.slow
def test_a_hundred_kills_lose_nothing_that_was_committed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    seed = int(os.environ.get("BLOOMERY_SOAK_SEED", "1"))
    soak = kill_again_and_again(tmp_path / "run", kills=KILLS, seed=seed)
    figures = {
        "name": "kill -9 of load, save and prune",
        "seed": seed,
        "kills": soak.kills,
        "found": soak.found,
        "steps_saved": soak.steps,
        "seconds": round(time.monotonic() - begun, 1),
    }
    with capsys.disabled():
        print(json.dumps(figures))
    assert soak.kills == KILLS
