"""The indexed layout, against a second writer that knows only the table of the format."""

from __future__ import annotations

import mmap
import os
import resource
import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.independent_indexed import independent_pair

from bloomery.data import pair_files
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.pair_files import bin_path, idx_path, mapped, token_dtype
from bloomery.data.seal import SealFacts
from bloomery.errors import DataError, StorageError


def write(prefix: Path, documents: list[list[int]], *, vocabulary: int = 300) -> None:
    with IndexedWriter(prefix, dtype=token_dtype(vocabulary)) as writer:
        for document in documents:
            writer.add_document(document)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=st.lists(st.lists(st.integers(0, 65_499), max_size=9), max_size=8), wide=st.booleans())
def test_the_bytes_equal_an_independent_writers(
    tmp_path: Path, documents: list[list[int]], wide: bool
) -> None:
    prefix = tmp_path / "pair"
    write(prefix, documents, vocabulary=65_500 if wide else 65_499)
    index, tokens = independent_pair(documents, code=4 if wide else 8)
    assert idx_path(prefix).read_bytes() == index and bin_path(prefix).read_bytes() == tokens
    dataset = IndexedDataset(prefix)
    assert dataset.document_count == len(documents)
    assert dataset.token_count == sum(map(len, documents))
    assert [dataset.document(i).tolist() for i in range(len(documents))] == documents
    flat = [token for document in documents for token in document]
    assert dataset.window(0, len(flat)).tolist() == flat
    assert np.diff(dataset.document_starts).tolist() == list(map(len, documents))


def test_windows_overlap_by_the_one_token_that_is_only_a_target() -> None:
    for tokens, length, expected in ((0, 4, 0), (1, 4, 0), (4, 4, 0), (5, 4, 1), (8, 4, 1), (9, 4, 2)):
        dataset = IndexedDataset.__new__(IndexedDataset)
        dataset.token_count = tokens
        assert dataset.window_count(length) == expected


def test_offsets_past_2_31_bytes_are_read(tmp_path: Path) -> None:
    prefix, size = tmp_path / "sparse", 2**30 + 2
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2, 3)
    arrays = struct.pack("<iiqqqqq", size - 2, 2, 0, 4 * (size - 2), 0, 1, 2)
    idx_path(prefix).write_bytes(header + arrays)
    with bin_path(prefix).open("wb") as file:
        file.truncate(4 * size)
        file.seek(4 * (size - 2))
        file.write(struct.pack("<ii", 70_001, 70_002))
    dataset = IndexedDataset(prefix)
    assert dataset.document(1).tolist() == [70_001, 70_002]
    assert dataset.document_starts.tolist() == [0, size - 2, size]


def damage(prefix: Path, how: str) -> None:
    index, tokens = idx_path(prefix), bin_path(prefix)
    content = bytearray(index.read_bytes())
    if how == "short bin":
        os.truncate(tokens, 4)
    elif how == "long bin":
        tokens.write_bytes(tokens.read_bytes() + b"ab")
    elif how == "no bin":
        tokens.unlink()
    elif how == "no idx":
        index.unlink()
    elif how == "short idx":
        os.truncate(index, len(content) - 3)
    elif how == "cut header":
        os.truncate(index, 20)
    elif how == "empty idx":
        os.truncate(index, 0)
    elif how == "documents":
        index.write_bytes(content[:-8] + struct.pack("<q", 7))
    elif how == "first document":
        index.write_bytes(content[:-24] + struct.pack("<q", 1) + content[-16:])
    elif how == "no entry":
        index.write_bytes(content[:18] + struct.pack("<QQ", 0, 0))
    else:
        place, value = {
            "magic": (0, 65),
            "version": (9, 2),
            "float": (17, 7),
            "fork": (17, 6),
            "type": (17, 9),
        }[how]
        content[place] = value
        index.write_bytes(content)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("short bin", r"pair\.bin is cut short: it ends at byte 4, .* byte 6"),
        ("long bin", r"pair\.bin is longer"),
        ("no bin", r"Cannot read .*pair\.bin: No such file"),
        ("no idx", r"Cannot read .*pair\.idx: No such file"),
        ("short idx", r"pair\.idx is damaged: .* take 70 bytes, and it has 67"),
        ("cut header", r"pair\.idx is not an index of tokens"),
        ("empty idx", r"pair\.idx is not an index of tokens"),
        ("documents", r"document indices .* from 0 to 7, not from 0 to 1"),
        ("first document", r"document indices .* from 1 to 1, not from 0 to 1"),
        ("no entry", r"pair\.idx is damaged: .* tells of 0 sequences and -1 documents"),
        ("magic", r"byte 0"),
        ("version", r"version 2 \(byte 9\)"),
        ("float", r"token type 7 \(byte 17\)"),
        ("fork", r"token type 6 \(byte 17\)"),
        ("type", r"token type 9 \(byte 17\): unknown"),
    ],
)
def test_a_damaged_pair_is_refused_with_file_place_and_remedy(tmp_path: Path, how: str, said: str) -> None:
    write(tmp_path / "pair", [[1, 2, 3], []])
    damage(tmp_path / "pair", how)
    with pytest.raises(DataError, match=said) as refused:
        IndexedDataset(tmp_path / "pair")
    assert refused.value.remedy


def test_a_writer_that_fails_leaves_the_old_pair_whole(tmp_path: Path) -> None:
    prefix = tmp_path / "pair"
    write(prefix, [[1, 2, 3]])
    with pytest.raises(ZeroDivisionError), IndexedWriter(prefix, dtype="<u2") as writer:
        writer.add_document([4])
        _ = 1 // 0
    assert IndexedDataset(prefix).document(0).tolist() == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair.bin", "pair.idx"]


@pytest.mark.parametrize("documents", [[[7] * 100_000], [[7] * 10] * 10_000, [[7] * 2500], [[7]] * 1500])
def test_a_full_disk_names_the_file_and_keeps_what_was_there(
    tmp_path: Path, documents: list[list[int]]
) -> None:
    prefix = tmp_path / "pair"
    write(prefix, [[1, 2, 3]])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(StorageError, match=r"Writing data failed at .*pair") as refused:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            write(prefix, documents)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "ulimit" in refused.value.remedy  # the limit that stands for a full disk
    assert IndexedDataset(prefix).document(0).tolist() == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair.bin", "pair.idx"]


def held_below(directory: Path) -> list[Path]:
    """The files of a directory that this process has open, with or without a name."""
    held: list[Path] = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed, as that of the listing itself
            held.append(descriptor.readlink())
    return [path for path in held if str(path).startswith(f"{directory}/")]


@pytest.mark.parametrize("fails", [False, True])
def test_a_writer_holds_no_file_afterwards(tmp_path: Path, fails: bool) -> None:
    with (
        suppress(ZeroDivisionError),
        IndexedWriter(tmp_path / "pair", dtype="<u2", seal=SealFacts()) as writer,
    ):
        writer.add_document([1, 2])
        assert len(held_below(tmp_path)) == 4
        _ = 1 // (not fails)
    assert writer.document_count == 1 and held_below(tmp_path) == []


def test_tokens_are_read_at_random_and_an_index_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[int] = []

    class Watched(mmap.mmap):
        def madvise(self, option: int, *part: int) -> None:
            advised.append(option)
            super().madvise(option, *part)

    write(tmp_path / "pair", [[1, 2, 3]])
    monkeypatch.setattr(mmap, "mmap", Watched)
    assert len(mapped(idx_path(tmp_path / "pair"), at_random=False)) > 6 and advised == []
    assert len(mapped(bin_path(tmp_path / "pair"), at_random=True)) == 6
    assert advised == [mmap.MADV_RANDOM]


@pytest.mark.parametrize(("tokens", "is_asked_for"), [(2_000, False), (32_768, False), (600_000, True)])
def test_the_pages_of_a_large_window_are_asked_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, is_asked_for: bool
) -> None:
    """Of what is mapped for random access the system reads 4 KiB at a time: 32,768 waits for 128 MB."""
    with IndexedWriter(tmp_path / "pair", dtype="<u2") as writer:
        writer.add_document(np.arange(1_000_000) % 50_000)
    asked: list[range] = []

    class Watched(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            if option == mmap.MADV_WILLNEED:
                asked.append(range(start, start + length))
                super().madvise(option, start, length)

    monkeypatch.setattr(mmap, "mmap", Watched)
    part = IndexedDataset(tmp_path / "pair").window(3_000, tokens)
    assert part.tolist() == (np.arange(3_000, 3_000 + tokens) % 50_000).tolist()
    assert bool(asked) is is_asked_for
    if asked:
        begin = 6_000 - 6_000 % mmap.PAGESIZE
        assert [some.start for some in asked] == list(range(begin, 6_000 + 2 * tokens, 128 << 10))
        assert asked[-1].stop == 6_000 + 2 * tokens and max(map(len, asked)) == 128 << 10


def test_ids_that_do_not_fit_are_refused_instead_of_wrapped(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="uint16 cannot hold"),
        IndexedWriter(tmp_path / "pair", dtype="<u2") as writer,
    ):
        writer.add_document([1, 70_000])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("lengths", "pointers"),
    [([2, 2, 2], [0, 99_999, 8]), ([2, 2, 2], [0, -4, 8]), ([2, -2, 2], [0, 4, 8]), ([2, 9, 2], [0, 4, 8])],
)
def test_a_sequence_outside_of_the_tokens_is_named_before_a_pointer_is_followed(
    lengths: list[int], pointers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4)
    idx_path(tmp_path / "odd").write_bytes(header + struct.pack("<3i3q4q", *lengths, *pointers, 0, 1, 2, 3))
    bin_path(tmp_path / "odd").write_bytes(struct.pack("<6H", *range(6)))
    for at_once in (1 << 20, 1):
        monkeypatch.setattr("bloomery.data.indexed._CHECKED_AT_ONCE", at_once)
        with pytest.raises(DataError, match=f"sequence 1 has {lengths[1]} tokens from byte {pointers[1]:,}"):
            IndexedDataset(tmp_path / "odd").refuse_stray_sequences()


def test_a_writer_holds_no_number_for_each_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """400,000 documents, whose index takes 8 MB: 36 bytes a document would be 14 MB."""
    monkeypatch.setattr(pair_files, "_READ_AT_ONCE", 10_000)
    lengths = np.tile(np.array([1, 0, 3, 2], dtype=np.int64), 1_000)
    tokens = np.arange(lengths.sum(), dtype=np.uint16)
    tracemalloc.start()
    with IndexedWriter(tmp_path / "many", dtype=np.dtype("<u2")) as writer:
        for _ in range(100):
            writer.add_documents(tokens, lengths)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2_000_000
    dataset = IndexedDataset(tmp_path / "many")
    assert dataset.document_count == 400_000 and dataset.token_count == 100 * tokens.size
    assert np.diff(dataset.document_starts).tolist() == 100 * lengths.tolist()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many.bin", "many.idx"]


def test_where_some_documents_begin_is_told_without_a_copy_of_the_index(tmp_path: Path) -> None:
    count = 1_000_000
    with IndexedWriter(tmp_path / "many", dtype="<u2") as writer:
        writer.add_documents(np.zeros(2 * count, dtype=np.uint16), np.full(count, 2, dtype=np.int64))
    dataset = IndexedDataset(tmp_path / "many")
    tracemalloc.start()
    starts = dataset.starts_between(count - 3, count)
    part = dataset.part(range(count - 2, count))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert starts.tolist() == [2 * count - 6, 2 * count - 4, 2 * count - 2, 2 * count]
    assert part.document_starts.tolist() == [0, 2, 4]
    assert peak_bytes < 100_000
