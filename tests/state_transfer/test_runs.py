"""How a file is cut into runs of blocks, and how much and how long a request may be."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from bloomery.checkpoint.format.manifest import BLOCK_BYTES
from bloomery.state_transfer.averages import _has_failed, _OfAnotherSize, _runs
from bloomery.state_transfer.client import _bytes_of
from bloomery.state_transfer.partial_checkpoint import BlockRun, MissingBlocks, runs_of, write_at
from bloomery.state_transfer.served_states import (
    REQUEST_BYTES_AT_MOST,
    BoundedReader,
    StateRequest,
    average_file,
    is_digest,
    parse_path,
    parse_range,
)
from bloomery.state_transfer.source import NotYetServed, PeerSource, ReceivedMetadata, SourceFailed

B = BLOCK_BYTES


def test_neighbouring_blocks_are_fetched_together_four_at_a_time_and_the_last_one_ends_with_its_file() -> (
    None
):
    size = 9 * B + 17
    assert runs_of("f", [0, 1, 2, 3, 4, 6, 8, 9], size) == [
        BlockRun(file="f", begin=0, end=4 * B),
        BlockRun(file="f", begin=4 * B, end=5 * B),
        BlockRun(file="f", begin=6 * B, end=7 * B),
        BlockRun(file="f", begin=8 * B, end=size),
    ]
    assert runs_of("f", [], size) == []
    assert _runs({"a": 5 * B + 1, "b": 0}) == [
        BlockRun(file="a", begin=0, end=4 * B),
        BlockRun(file="a", begin=4 * B, end=5 * B + 1),
    ]


def test_each_thread_takes_half_of_its_part_of_what_waits_and_what_is_given_back_waits_again() -> None:
    missing = MissingBlocks([BlockRun(file="f", begin=0, end=64)], unit=2, streams=1)
    first = missing.take(["f"], timeout_s=0.0)
    assert first == BlockRun(file="f", begin=0, end=32)  # half of what waits
    assert missing.take(["f"], timeout_s=0.0) == BlockRun(file="f", begin=32, end=40)
    missing.give_back(first)
    assert missing.take(["f"], timeout_s=0.0) == BlockRun(file="f", begin=0, end=14)
    assert missing.take(["f"], timeout_s=0.0) == BlockRun(file="f", begin=14, end=20)


def test_all_of_the_data_is_written_to_its_place_however_little_the_kernel_takes_at_once(
    tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
    write_at(descriptor, memoryview(b"0123456789"), 5)
    os.close(descriptor)
    assert path.read_bytes() == bytes(5) + b"0123456789"


def test_the_bytes_of_a_download_that_was_begun_are_those_on_the_disk(tmp_path: Path) -> None:
    assert _bytes_of(tmp_path / "nothing") == 0
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 24)
        file.write(b"x" * 5000)
    (tmp_path / "directory").mkdir()
    assert 4096 <= _bytes_of(tmp_path) <= 1 << 16


def test_a_source_that_has_not_written_its_average_yet_is_asked_again_and_one_that_failed_is_not() -> None:
    assert not _has_failed(None)
    assert not _has_failed(NotYetServed("later")) and not _has_failed(_OfAnotherSize("larger"))
    assert _has_failed(SourceFailed("gone"))


class Connection:
    """Gives what it was told piece by piece, and keeps the time-outs that were set before each."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces, self.timeouts_s = list(pieces), list[float]()

    def settimeout(self, seconds: float) -> None:
        self.timeouts_s.append(seconds)

    def recv(self, most: int) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""


def reader(connection: Any, *, first_s: float = 7.0) -> BoundedReader:
    return BoundedReader(connection, first_until=time.monotonic() + first_s, idle_s=600.0, request_s=50.0)


def test_the_first_request_has_its_deadline_and_later_ones_that_of_a_request_once_they_began() -> None:
    connection = Connection(b"one\ntw", b"o\n", b"thr", b"ee\n")
    bounded = reader(connection)
    assert [bounded.readline(), bounded.readline()] == [b"one\n", b"two\n"]
    assert all(0 < seconds <= 7.0 for seconds in connection.timeouts_s)
    bounded.begin()
    assert bounded.readline() == b"three\n"
    idle_s, rest_s = connection.timeouts_s[2:]
    assert idle_s == 600.0 and 40.0 < rest_s <= 50.0
    assert bounded.readline() == b""
    with pytest.raises(TimeoutError):
        reader(Connection(b"one\n"), first_s=-1.0).readline()


def test_a_request_has_so_many_bytes_and_the_next_one_as_many_again() -> None:
    line = b"x" * (REQUEST_BYTES_AT_MOST - 1) + b"\n"
    bounded = reader(Connection(line, line, b"y\n"))
    assert bounded.readline() == line
    bounded.begin()
    assert bounded.readline() == line
    with pytest.raises(ConnectionError):
        bounded.readline()
    with pytest.raises(ConnectionError):
        reader(Connection(b"x" * REQUEST_BYTES_AT_MOST, b"\n")).readline()
    endless = Connection(*[b"x" * (REQUEST_BYTES_AT_MOST // 2)] * 5)
    with pytest.raises(ConnectionError):
        reader(endless).readline()
    assert len(endless.pieces) == 3  # nothing is read beyond the limit


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/state/ab12", StateRequest(digest="ab12")),
        ("/state/ab12/model-r0.safetensors", StateRequest(digest="ab12", file="model-r0.safetensors")),
        ("/state/" + "a" * 128, StateRequest(digest="a" * 128)),
        ("/state/" + "a" * 129, None),
        ("/state/ab12/" + "f" * 255, StateRequest(digest="ab12", file="f" * 255)),
        ("/state/ab12/" + "f" * 256, None),
        ("/state/ab12/.hidden", None),
        ("/state/ab-12", None),
        ("/states/ab12", None),
        ("ab12", None),
    ],
)
def test_a_request_names_a_state_and_perhaps_a_file(path: str, asked: StateRequest | None) -> None:
    assert parse_path(path) == asked


@pytest.mark.parametrize(
    ("header", "part"),
    [
        (None, range(100)),
        ("bytes=0-99", range(100)),
        (" bytes=99-99 ", range(99, 100)),
        ("bytes=0-100", None),
        ("bytes=100-100", None),
        ("bytes=5-4", None),
        ("bytes=0-9,20-29", None),
        ("bytes=-5", None),
        ("bytes=0-" + "9" * 19, None),
    ],
)
def test_a_range_lies_within_its_file(header: str | None, part: range | None) -> None:
    assert parse_range(header, 100) == part


def test_a_digest_is_a_word_of_letters_and_digits() -> None:
    assert is_digest("aB3") and not is_digest("") and not is_digest("ab12\n") and not is_digest("a/b")
    assert average_file(3) == "average-3"


def test_what_was_received_is_read_as_far_as_is_asked() -> None:
    source = PeerSource(peer="a", url="http://h:1")
    received = ReceivedMetadata(source, "step-000001.i001", {"index.json": b"0123456789"})
    assert received.content("index.json", at_most=4) == b"0123"
    assert received.content("index.json", at_most=99) == b"0123456789" and received.size("index.json") == 10
    assert received.place("index.json") == "http://h:1/step-000001.i001/index.json"
    assert received.place() == "http://h:1/step-000001.i001"
    with pytest.raises(FileNotFoundError):
        received.open("index.json")
    assert source == PeerSource(peer="a", url="http://h:1", reach=lambda: None)  # type: ignore[arg-type,return-value]
