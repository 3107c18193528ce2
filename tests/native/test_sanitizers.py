"""The native tests under the sanitizers of addresses, undefined behaviour and threads."""

from __future__ import annotations

import pytest
from tests.native_programs import build, run


@pytest.mark.timeout(1800)  # it compiles: half a minute of processor time, whatever else runs
@pytest.mark.needs("g++", package="g++")
@pytest.mark.needs("make", package="make")
@pytest.mark.parametrize("kind", ["address", "thread"])
def test_native_code_does_nothing_that_a_sanitizer_objects_to(kind, tmp_path):
    build(kind, tmp_path)

    assert run(tmp_path / kind / "ring_tests") == "ring: ok\n"
    assert "kernels held" in run(tmp_path / kind / "kernel_tests")
    if kind == "address":
        assert "not genuine" in run(tmp_path / kind / "frame_mutator", "2", "1")
