"""The average of a round in few bytes: to the bit, in memory and in a file, and what a forged file does."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest

from bloomery.diloco import stored_average
from bloomery.diloco.stored_average import BLOCK, StoredAverage
from bloomery.transport.gradient_codec import decode, encode

MAGIC = b"bloomery average\n"


def block(codec: bytes, count: int, data: bytes, *, size: int | None = None) -> bytes:
    """A block of a file, as `StoredAverage.save` writes it."""
    return struct.pack("<8sIQ", codec, count, len(data) if size is None else size) + data


def sparse(places: list[int], values: list[float]) -> bytes:
    return np.array(places, "<i4").tobytes() + np.array(values, "<f4").tobytes()


def assert_comes_back(stored: StoredAverage, directory: Path, *, at_most: float) -> None:
    """Assert that another peer reads what this one writes, which takes few bytes."""
    file = directory / "average"
    stored.save(file)
    assert file.stat().st_size <= at_most + len(MAGIC) + 20 * len(list(stored.blocks()))
    assert [path.name for path in directory.iterdir()] == ["average"]
    loaded = StoredAverage.load(file)
    assert loaded.numel == stored.numel and loaded.nbytes == stored.nbytes
    assert np.array_equal(loaded.whole().view(np.uint32), stored.whole().view(np.uint32))


@pytest.mark.parametrize("codec", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("members", [1, 2, 3, 7])
def test_an_average_is_kept_to_the_bit_in_the_bytes_of_the_ring(
    codec: str, members: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_average, "BLOCK", 1024)
    count = 10_007
    drawn = np.random.default_rng(members).normal(size=count).astype(np.float32)
    values = np.empty_like(drawn)
    for segment in range(members):  # as the ring rounds what it sends round: native/src/frame.h, begin_of
        begin, end = (
            count // members * edge + count % members * edge // members for edge in (segment, segment + 1)
        )
        part = np.ascontiguousarray(drawn[begin:end])
        decode(encode(part, codec), codec, values[begin:end])
    stored = StoredAverage(codec, members=members)
    for piece in (values, values):
        stored.append(piece)
    twice = np.concatenate((values, values))
    assert np.array_equal(stored.whole().view(np.uint32), twice.view(np.uint32))
    assert stored.nbytes <= 2.2 * 2 * count and stored.numel == 2 * count
    assert stored.squares == pytest.approx(float(np.dot(twice.astype(np.float64), twice)))
    assert_comes_back(stored, tmp_path, at_most=2.2 * 2 * count)
    for start, stop in ((0, 5), (1000, 9000), (10_000, 10_020), (2 * count - 3, 2 * count)):
        pieces = list(stored.pieces(start, stop))
        assert pieces[0][0] == start
        assert np.array_equal(np.concatenate([values for _, values in pieces]), twice[start:stop])


@pytest.mark.parametrize("zeros", [0.0, 0.4, 0.95, 1.0])
def test_a_sparse_average_is_kept_to_the_bit_in_at_most_the_bytes_of_fp32(
    zeros: float, tmp_path: Path
) -> None:
    random = np.random.default_rng(3)
    values = random.normal(size=5_000).astype(np.float32) * (random.random(5_000) >= zeros)
    values[:2] = 0.0, -0.0
    stored = StoredAverage("sparse", members=3)
    stored.append(values)
    assert np.array_equal(stored.whole().view(np.uint32), values.view(np.uint32))
    assert stored.nbytes <= min(4 * values.size, 8 * np.count_nonzero(values.view(np.uint32)))
    assert_comes_back(stored, tmp_path, at_most=4 * values.size)


def test_an_average_that_no_ring_rounded_is_kept_as_it_is() -> None:
    values = np.random.default_rng(1).normal(size=3_000).astype(np.float32)
    stored = StoredAverage("int8", members=2)
    stored.append(values)
    assert np.array_equal(stored.whole(), values)


def test_an_average_of_nothing_is_a_file_too(tmp_path: Path) -> None:
    assert_comes_back(StoredAverage("int8", members=2), tmp_path, at_most=0)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "average").mkdir()
    stored = StoredAverage.of(np.ones(3, np.float32))
    with pytest.raises(IsADirectoryError):
        stored.save(tmp_path / "average")
    assert [path.name for path in tmp_path.iterdir()] == ["average"]


FORGED = {
    "nothing": (b"", "not the average"),
    "raw values": (bytes(64), "not the average"),
    "half a header": (MAGIC + b"int8", "within a block"),
    "half a block": (MAGIC + block(b"fp32", 2, bytes(4), size=8), "within a block"),
    "a size beyond the file": (MAGIC + block(b"fp32", 1 << 20, b"", size=4 << 20), "within a block"),
    "another codec": (MAGIC + block(b"pickle", 1, b"x"), "unknown codec: 'pickle'"),
    "no text": (MAGIC + block(b"\xff\xfe", 1, b"x"), "unknown codec"),
    "no values": (MAGIC + block(b"fp32", 0, b""), "0 values"),
    "too many values": (MAGIC + block(b"sparse", 0xFFFF_FFFF, b""), "4294967295 values"),
    "too few bytes": (MAGIC + block(b"int8", 600, bytes(600)), "600 bytes"),
    "too many bytes": (MAGIC + block(b"fp32", 1, bytes(8)), "8 bytes"),
    "half a place": (MAGIC + block(b"sparse", 9, bytes(12)), "12 bytes"),
    "more places than values": (MAGIC + block(b"sparse", 1, sparse([0, 1], [1, 1])), "16 bytes"),
    "more bytes than of fp32": (MAGIC + block(b"sparse", 3, sparse([0, 2], [1, 1])), "16 bytes"),
    "a place before the first": (MAGIC + block(b"sparse", 9, sparse([-1], [1])), "not in order"),
    "a place behind the last": (MAGIC + block(b"sparse", 9, sparse([9], [1])), "not in order"),
    "a place twice": (MAGIC + block(b"sparse", 9, sparse([3, 3], [1, 1])), "not in order"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_file_is_refused(name: str, tmp_path: Path) -> None:
    content, told = FORGED[name]
    file = tmp_path / "average"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=told):
        StoredAverage.load(file)


def test_a_block_of_a_file_has_at_most_as_many_values_as_are_decoded_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "average"
    file.write_bytes(MAGIC + block(b"sparse", BLOCK, b""))
    assert StoredAverage.load(file).numel == BLOCK
    file.write_bytes(MAGIC + block(b"sparse", BLOCK + 1, b""))
    with pytest.raises(ValueError, match=f"a block of {BLOCK + 1} values"):
        StoredAverage.load(file)


def test_a_file_of_tiny_blocks_does_not_take_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_average, "_MOST_BLOCKS", 3)
    file = tmp_path / "average"
    file.write_bytes(MAGIC + 3 * block(b"fp32", 1, bytes(4)))
    assert StoredAverage.load(file).numel == 3
    file.write_bytes(MAGIC + 4 * block(b"fp32", 1, bytes(4)))
    with pytest.raises(ValueError, match="more than 3 blocks"):
        StoredAverage.load(file)


def test_codes_that_are_no_values_are_found_when_they_are_read(tmp_path: Path) -> None:
    file = tmp_path / "average"
    file.write_bytes(MAGIC + block(b"int8", 1, np.float32(np.inf).tobytes() + b"\x01"))
    stored = StoredAverage.load(file)
    with pytest.raises(ValueError, match="finite"):
        stored.whole()


@pytest.mark.parametrize("codec", ["fp32", "int8", "sparse"])
def test_an_average_stays_as_it_was_when_the_memory_of_the_ring_is_used_again(codec: str) -> None:
    values = np.array([0.1, 0.2, 0.3, 0.7], np.float32)
    stored = StoredAverage(codec, members=1)
    stored.append(values)
    expected = stored.whole()
    values[:] = 9.0
    assert np.array_equal(stored.whole(), expected) and 9.0 not in expected


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4", "bf16", "sparse"])
@pytest.mark.parametrize("odd", [-0.0, math.nan, -math.inf, 1e20], ids=str)
def test_zeros_with_a_sign_and_values_that_are_not_finite_are_kept_to_the_bit(codec: str, odd: float) -> None:
    values = np.array([0.5, odd, 0.0, 0.5], np.float32)
    stored = StoredAverage(codec, members=1)
    stored.append(values)
    assert np.array_equal(stored.whole().view(np.uint32), values.view(np.uint32))
    if odd == 1e20:
        assert stored.squares == pytest.approx(1e40), "which fp32 cannot hold"
