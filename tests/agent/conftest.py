"""A coordinator for a module of tests, and a crew of peers for each test."""

from __future__ import annotations

import itertools

import pytest
from tests.agent.crew import Crew

from bloomery.coordination.etcd_process import start_single

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    server = start_single(tmp_path_factory.mktemp("etcd"))
    yield server
    server.stop()


@pytest.fixture
def crew_of(tmp_path, coordinator):
    crews = []

    def make(**elastic):
        crew = Crew(tmp_path, coordinator.endpoint, f"run-{next(_numbers)}", **elastic)
        crews.append(crew)
        return crew

    yield make
    for crew in crews:
        crew.__exit__()


@pytest.fixture
def coordinator_of_one(tmp_path):
    """One of a test's own: its runs may be called as they like."""
    server = start_single(tmp_path / "etcd")
    yield server
    server.stop()
