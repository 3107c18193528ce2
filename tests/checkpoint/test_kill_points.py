"""Three kills of an upload, a restore and a download in the suite; `make soak PART=kill` does many more."""

from pathlib import Path

import pytest
from tests.checkpoint.kill_points import kill_at_points
from tests.checkpoint.object_store import ObjectStore


@pytest.mark.parametrize("seed", [1])
def test_an_upload_a_restore_and_a_download_that_are_killed_go_on_and_nothing_half_counts(
    tmp_path: Path, object_store: ObjectStore, seed: int
):
    told = kill_at_points(tmp_path, object_store.new_bucket, kills=3, seed=seed)
    assert sum(told.kills.values()) >= 3, told
    assert all(points > 10 for points in told.points.values()), told
