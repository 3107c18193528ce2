from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoint.object_store import ObjectStore, serving

from bloomery.events.run_directory import RunDirectory


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    with serving() as store:
        yield store
