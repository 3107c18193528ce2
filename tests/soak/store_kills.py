"""Kills at random moments of saving straight to object storage: nothing committed is lost, all is whole."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from tests.checkpoint.object_store import serving
from tests.checkpoint.store_kills import kill_again_and_again

KILLS = 30


@pytest.mark.slow
@pytest.mark.parametrize("place", ["file", "s3"])
def test_kills_lose_nothing_that_was_sent_and_committed(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    seed = int(os.environ.get("BLOOMERY_SOAK_SEED", "1"))
    if place == "file":
        soak = kill_again_and_again(tmp_path, f"file://{tmp_path}/store", kills=KILLS, seed=seed)
    else:
        with serving() as server:
            soak = kill_again_and_again(tmp_path, server.new_bucket(), kills=KILLS, seed=seed)
    figures = {
        "name": f"kill -9 of saving to {place}://",
        "seed": seed,
        "kills": soak.kills,
        "found": soak.found,
        "steps_saved": soak.steps,
        "seconds": round(time.monotonic() - begun, 1),
    }
    with capsys.disabled():
        print(json.dumps(figures))
    assert soak.kills == KILLS
