"""Ranged reads, verified by the block: nothing else than the file's bytes, none beyond its end."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.checkpoint.format.manifest import BLOCK_BYTES, DamagedCheckpoint, FileRecord
from bloomery.checkpoint.format.source import LocalCheckpoint
from bloomery.checkpoint.format.verified_reader import VerifiedReader, read_back

SIZES = (1, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 77)


def record_of(name: str, content: bytes) -> FileRecord:
    blocks = [content[start : start + BLOCK_BYTES] for start in range(0, len(content), BLOCK_BYTES)]
    return FileRecord(
        name=name,
        bytes=len(content),
        xxh3_128=xxhash.xxh3_128_hexdigest(content),
        blocks="".join(xxhash.xxh3_64_hexdigest(block) for block in blocks),
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, bytes]]:
    directory = tmp_path_factory.mktemp("files")
    contents = {size: os.urandom(size) for size in SIZES}
    for size, content in contents.items():
        (directory / f"{size}.bin").write_bytes(content)
    return directory, contents


def test_what_is_read_back_is_dropped_from_the_page_cache(
    files: tuple[Path, dict[int, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, contents = files
    dropped, read, size = list[tuple[int, int, int]](), list[int](), 3 * BLOCK_BYTES + 77

    def advise(file: int, begin: int, length: int, advice: int) -> None:
        dropped.append((begin, length, advice))

    monkeypatch.setattr("bloomery.checkpoint.format.verified_reader.os.posix_fadvise", advise)
    monkeypatch.setattr("bloomery.checkpoint.format.verified_reader._CHUNK_BYTES", 2 * BLOCK_BYTES)
    records = [record_of(f"{size}.bin", contents[size])]
    assert read_back(directory, records, read=read.append) == ""
    assert read == [2 * BLOCK_BYTES, BLOCK_BYTES + 77]
    assert dropped == [(0, until, os.POSIX_FADV_DONTNEED) for until in (2 * BLOCK_BYTES, size)]


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EINVAL, ""),
        (errno.EOPNOTSUPP, ""),
        (errno.EACCES, "a.bin cannot be read back: refused"),
    ],
)
def test_where_direct_reads_are_refused_files_are_read_back_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, told: str
) -> None:
    content, opened = os.urandom(5000), os.open
    (tmp_path / "a.bin").write_bytes(content)

    def refusing(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith("a.bin") and flags & os.O_DIRECT:
            raise OSError(number, "refused")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    assert read_back(tmp_path, [record_of("a.bin", content)]) == told


@pytest.mark.parametrize("refused_from", [0, 5000])
def test_where_a_file_opens_for_direct_reads_and_then_refuses_them_it_is_read_back_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_from: int
) -> None:
    content, read = os.urandom(5000), os.preadv
    (tmp_path / "a.bin").write_bytes(content)

    def refusing(file: int, views: list[memoryview], offset: int) -> int:
        if offset >= refused_from and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return read(file, views, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    assert read_back(tmp_path, [record_of("a.bin", content)]) == ""


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A file's size, and sorted ranges of it that do not overlap; ends and blocks' ends are drawn often."""
    size = draw(st.sampled_from(SIZES))
    ends = [end for base in range(0, size + 1, BLOCK_BYTES) for end in (base - 1, base, base + 1)]
    place = st.one_of(st.sampled_from([*ends, size - 1, size]), st.integers(0, size))
    cuts = sorted(min(max(cut, 0), size) for cut in draw(st.lists(place, min_size=2, max_size=8)))
    return size, list(zip(cuts[::2], cuts[1::2], strict=False))


@given(ranges())
def test_ranges_are_the_files_bytes_and_whole_blocks_are_read_at_most_once(files, asked):
    directory, contents = files
    size, wanted = asked
    read: list[int] = []
    record = record_of(f"{size}.bin", contents[size])
    buffers = [bytearray(end - begin) for begin, end in wanted]
    with VerifiedReader(LocalCheckpoint(directory), record, count=read.append) as reader:
        pieces = [(begin, memoryview(it)) for (begin, _), it in zip(wanted, buffers, strict=True)]
        reader.read(pieces)
    for (begin, end), buffer in zip(wanted, buffers, strict=True):
        assert buffer == contents[size][begin:end]
    blocks = {block for begin, end in wanted if end > begin
              for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))}  # fmt: skip
    assert sum(read) == sum(min(BLOCK_BYTES, size - block * BLOCK_BYTES) for block in blocks)


@settings(max_examples=50)
@given(ranges(), st.data())
def test_a_flipped_bit_is_found_exactly_where_its_block_is_touched(files, tmp_path_factory, asked, data):
    _, contents = files
    size, wanted = asked
    near = [end + by for end in range(0, size + 1, BLOCK_BYTES) for by in (-1, 0) if 0 <= end + by < size]
    place = data.draw(st.one_of(st.sampled_from(near), st.integers(0, size - 1)), label="place")
    block = place // BLOCK_BYTES
    spoiled = tmp_path_factory.mktemp("spoiled")
    content = bytearray(contents[size])
    content[place] ^= 1
    (spoiled / f"{size}.bin").write_bytes(content)
    touched = any(
        begin // BLOCK_BYTES <= block < -(-end // BLOCK_BYTES) for begin, end in wanted if end > begin
    )
    with VerifiedReader(LocalCheckpoint(spoiled), record_of(f"{size}.bin", contents[size])) as reader:
        blocks_at_once = data.draw(st.sampled_from([1, 2, 8]), label="blocks read at once")
        reader._file.window_bytes = blocks_at_once * BLOCK_BYTES  # a remote file has larger windows
        pieces = [(begin, memoryview(bytearray(end - begin))) for begin, end in wanted]
        if touched:
            with pytest.raises(DamagedCheckpoint, match=f"byte {block * BLOCK_BYTES:,} does not have"):
                reader.read(pieces)
        else:
            reader.read(pieces)
    (spoiled / f"{size}.bin").unlink()


@pytest.mark.parametrize("size", SIZES)
def test_a_range_beyond_the_end_is_refused_and_nothing_is_read(files, size: int):
    directory, contents = files
    read: list[int] = []
    with VerifiedReader(
        LocalCheckpoint(directory), record_of(f"{size}.bin", contents[size]), count=read.append
    ) as reader:
        for begin in (size - 1, size, size + 5):
            with pytest.raises(ValueError, match="beyond"):
                reader.read([(begin, memoryview(bytearray(2)))])
    assert read == []


@pytest.mark.parametrize("block", range(4))
def test_a_flipped_bit_is_found_whichever_part_of_its_block_was_wanted(tmp_path: Path, block: int):
    content = os.urandom(SIZES[-1])
    record = record_of("a.bin", content)
    damaged = bytearray(content)
    damaged[block * BLOCK_BYTES + 30] ^= 8
    (tmp_path / "a.bin").write_bytes(damaged)
    with VerifiedReader(LocalCheckpoint(tmp_path), record) as reader:
        with pytest.raises(DamagedCheckpoint, match=f"byte {block * BLOCK_BYTES:,} does not have"):
            reader.read([(block * BLOCK_BYTES + 60, memoryview(bytearray(9)))])
        other = bytearray(5)
        begin = (block + 1) % 4 * BLOCK_BYTES
        reader.read([(begin, memoryview(other))])
        assert other == content[begin : begin + 5]


@pytest.mark.parametrize("block", range(4))
def test_a_view_over_several_blocks_that_begins_within_one_is_verified_to_its_end(tmp_path: Path, block: int):
    """As a read from a store is: its windows hold several blocks."""
    content = os.urandom(SIZES[-1])
    place, wanted = block * BLOCK_BYTES + 30, bytearray(2 * BLOCK_BYTES + 60)
    damaged = bytearray(content)
    damaged[place] ^= 8
    for stored, right in ((content, True), (damaged, False)):
        (tmp_path / "a.bin").write_bytes(stored)
        with VerifiedReader(LocalCheckpoint(tmp_path), record_of("a.bin", content)) as reader:
            reader._file.window_bytes = 8 * BLOCK_BYTES
            pieces = [(BLOCK_BYTES - 1, memoryview(wanted))]  # it touches all four blocks
            if right:
                reader.read(pieces)
                assert wanted == content[BLOCK_BYTES - 1 :][: len(wanted)]
            else:
                with pytest.raises(DamagedCheckpoint, match=f"byte {block * BLOCK_BYTES:,} does not have"):
                    reader.read(pieces)


def test_a_file_that_has_grown_shorter_is_told_from_one_that_is_gone(tmp_path: Path):
    content = os.urandom(2 * BLOCK_BYTES)
    record = record_of("a.bin", content)
    with pytest.raises(DamagedCheckpoint, match="is missing"):
        VerifiedReader(LocalCheckpoint(tmp_path), record)
    (tmp_path / "a.bin").write_bytes(content[: BLOCK_BYTES + 9])
    with (
        VerifiedReader(LocalCheckpoint(tmp_path), record) as reader,
        pytest.raises(DamagedCheckpoint, match="byte 1,048,576 ends too early"),
    ):
        reader.read([(0, memoryview(bytearray(len(content))))])


def test_a_thousand_pieces_are_read_in_one_go(tmp_path: Path):
    content = os.urandom(BLOCK_BYTES)
    (tmp_path / "a.bin").write_bytes(content)
    buffers = [bytearray(7) for _ in range(3000)]
    with VerifiedReader(LocalCheckpoint(tmp_path), record_of("a.bin", content)) as reader:
        reader.read([(11 * number, memoryview(buffer)) for number, buffer in enumerate(buffers)])
    assert all(buffer == content[11 * n : 11 * n + 7] for n, buffer in enumerate(buffers))
