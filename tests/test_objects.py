"""Lines that are slow, silent or gone, and stores that refuse: by progress, with patience, told once."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.range_server import Served, serving

from bloomery import objects
from bloomery.errors import StorageError
from bloomery.objects import AccessDenied, Objects, StoreUnreachable, storage_failure

CONTENT = random.Random(3).randbytes(4000)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "one").write_bytes(CONTENT)
    with serving(tmp_path) as served:
        yield served


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(objects, "_LONGEST_PAUSE_S", 0.001)


def test_a_line_that_gives_a_little_at_a_time_gives_all_and_no_byte_twice(server: Served) -> None:
    server.most_bytes = 100
    pieces = Objects(server.url, patience_s=60).pieces("one", end=len(CONTENT), piece_bytes=50)
    assert b"".join(pieces) == CONTENT
    assert sum(given for _, given in server.ranges) >= len(CONTENT)
    assert sorted({begin for begin, _ in server.ranges})[-1] >= len(CONTENT) - 100
    assert len(server.ranges) >= len(CONTENT) // 100, "many more than a count of tries would allow"


def test_a_line_that_falls_silent_is_left_and_what_came_is_kept(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_SILENCE_S", 1.0)
    server.silences = 2
    pieces = Objects(server.url, patience_s=600).pieces("one", begin=1000, piece_bytes=50)
    assert b"".join(pieces) == CONTENT[1000:]
    assert server.silences == 0 and len(server.ranges) >= 3
    assert any(begin > 1000 for begin, _ in server.ranges), "it goes on where it ended"


def test_ranges_are_what_was_asked_for(server: Served) -> None:
    store = Objects(server.url, patience_s=60)
    assert store.content("one", begin=10, end=30) == CONTENT[10:30]
    assert store.content("one", begin=3990, end=5000) == CONTENT[3990:]
    assert store.content("one", begin=7, end=7) == b""
    assert b"".join(store.pieces("one", piece_bytes=64)) == CONTENT
    assert store.stat("one").bytes == len(CONTENT)


def test_what_is_not_there_is_told_from_what_is_not_reached(server: Served, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Objects(server.url).stat("other")
    with serving(tmp_path) as gone:
        url = gone.url
    with pytest.raises(StoreUnreachable) as refused:
        Objects(url, patience_s=0.05).content("one")
    assert not isinstance(refused.value, AccessDenied)
    assert "reachable" in storage_failure(refused.value, doing="It").remedy


def test_an_address_of_no_kind_is_refused() -> None:
    with pytest.raises(StorageError, match="cannot be used"):
        Objects("ftp://host/path")
