"""A cluster of SLURM for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.faults.conftest import here
from tests.operate.slurm_cluster import SlurmCluster, started

__all__ = ["cluster", "here"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two emulated nodes; tests that use it need its packages (`needs(can_run, package=PACKAGES)`)."""
    with started(tmp_path_factory.mktemp("slurm")) as running:
        yield running
