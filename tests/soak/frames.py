"""A minute of frames that no member would send, mutated by seed, under the sanitizer of addresses."""

from __future__ import annotations

import os

import pytest
from tests.native_programs import build, run

SECONDS = 60


@pytest.mark.slow
@pytest.mark.needs("g++", package="g++")
def test_whatever_frames_come_a_member_refuses_or_computes_a_sound_sum(tmp_path, capsys):
    seed = os.environ.get("BLOOMERY_SOAK_SEED", "1")
    build("address", tmp_path)

    told = run(tmp_path / "address/frame_mutator", str(SECONDS), seed, timeout_s=20 * SECONDS)

    with capsys.disabled():
        print(told, end="")
