"""One etcd for each module of tests, and a run of its own for each test."""

from __future__ import annotations

import itertools

import pytest

from bloomery.coordination.etcd import Etcd
from bloomery.coordination.etcd_process import start_single
from bloomery.protocol.keys import Keys

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = start_single(tmp_path_factory.mktemp("etcd"))
    yield server
    server.stop()


@pytest.fixture
def etcd(server):
    with Etcd([server.endpoint], deadline_s=60.0) as client:
        yield client


@pytest.fixture
def keys():
    return Keys(f"run-{next(_numbers)}")
