from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoint.object_store import ENVIRONMENT, ObjectStore, serving

from bloomery.events.run_directory import RunDirectory


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectStore]:
    with serving() as store:
        yield store


@pytest.fixture
def object_store(object_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The server; its address and credentials are in the environment of this test."""
    for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": object_server.endpoint}).items():
        monkeypatch.setenv(name, value)
    return object_server
