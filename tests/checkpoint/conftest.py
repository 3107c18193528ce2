from collections.abc import Iterator
from pathlib import Path

import pytest
from object_store import ObjectStore, serving

from bloomery.events.rundir import RunDir


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    with serving() as store:
        yield store
