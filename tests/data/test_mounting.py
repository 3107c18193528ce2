"""Pairs elsewhere get a place here: what is brought, what is brought again, and what is refused."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import xxhash

from bloomery.config.environment import SWITCH, OfflineRefused
from bloomery.data import storage, streaming
from bloomery.data.block_cache import BlockCache
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.pair_files import bin_path, idx_path, seal_path, sums_path
from bloomery.data.remote_files import Remote
from bloomery.data.sealing import seal
from bloomery.data.streaming import CacheLocation, block_cache_of, is_elsewhere, mount
from bloomery.errors import DataError

BLOCK_BYTES, TOKENS = 512, 40 * 256


def pair(prefix: Path, *, tokens: int = TOKENS) -> Path:
    with IndexedWriter(prefix, dtype="<u2") as writer:
        writer.add_documents(np.arange(tokens) % 280, np.full(tokens // 64, 64))
    seal(prefix, vocabulary_size=280, end_of_document_id=0, block_bytes=BLOCK_BYTES)
    return prefix


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A pair of 40 blocks."""
    return pair(tmp_path / "there" / "corpus")


@pytest.fixture
def cache(tmp_path: Path) -> CacheLocation:
    return CacheLocation(directory=tmp_path / "cache", limit_bytes=64 * BLOCK_BYTES)


def mounted(there: Path, cache: CacheLocation) -> Path:
    return mount([there.as_uri()], cache)[there.as_uri()]


def mirror(prefix: Path) -> BlockCache:
    found = block_cache_of(prefix)
    assert found is not None
    return found


def damage(path: Path, place: int = 5) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_pair_has_a_directory_of_its_address_with_its_index_and_the_sums_of_its_blocks(
    there: Path, cache: CacheLocation
) -> None:
    address = there.as_uri()
    key = xxhash.xxh3_64_hexdigest(address.encode())[:8]
    prefix = mounted(there, cache)
    assert prefix == cache.directory / f"corpus-{key}" / "corpus"
    tokens = bin_path(there).read_bytes()
    sums = [xxhash.xxh3_64_intdigest(tokens[at : at + BLOCK_BYTES]) for at in range(0, len(tokens), 512)]
    assert prefix.with_name("corpus.block-sums").read_bytes() == np.array(sums, "<u8").tobytes()
    assert idx_path(prefix).read_bytes() == idx_path(there).read_bytes()
    assert bin_path(prefix).stat().st_size == len(tokens) and bin_path(prefix).stat().st_blocks == 0
    assert json.loads(prefix.with_name("corpus.mirror.json").read_bytes()) == {
        "format": 2,
        "block_bytes": 512,
        "files": {".bin": {"bytes": len(tokens)}, ".idx": {"bytes": idx_path(there).stat().st_size}},
        "address": address,
        "host": os.uname().nodename,
        "capacity": 40,
    }
    found = mirror(prefix)
    assert (found.outline.address, found.capacity) == (f"{address}.bin", 40)
    assert (found.outline.size_bytes, found.outline.block_bytes) == (len(tokens), 512)
    assert np.array_equal(IndexedDataset(prefix).window(0, TOKENS), IndexedDataset(there).flat)
    assert block_cache_of(there) is None


def test_addresses_are_told_from_paths() -> None:
    addresses = ("s3://bucket/a", "file:///a", "a/b", "/a:b", "a:/b")
    assert [is_elsewhere(path) for path in addresses] == [True, True, False, False, False]


def test_a_pair_on_a_disk_needs_no_network_and_one_elsewhere_is_named_with_what_it_lacks(
    there: Path, cache: CacheLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "1")
    prefix = mounted(there, cache)
    assert IndexedDataset(prefix).window(3, 4).tolist() == [3, 4, 5, 6]
    marker = prefix.with_name("corpus.mirror.json")
    elsewhere = json.loads(marker.read_bytes()) | {"address": "s3://bucket/deep/corpus"}
    marker.write_text(json.dumps(elsewhere))
    with pytest.raises(OfflineRefused) as refused:
        IndexedDataset(prefix).window(1000, 1)
    wanted = f"read bytes 1,536 to 2,047 of s3://bucket/deep/corpus.bin, which {prefix.parent} lacks"
    assert wanted in refused.value.message and "`bloomery data fetch`" in refused.value.remedy


@pytest.mark.parametrize(
    ("limit", "capacities"),
    [
        (200, [40, 20]),  # all of both, and no more
        (60, [40, 20]),
        (59, [39, 19]),
        (30, [20, 16]),  # a pair has sixteen blocks at least
        (3, [16, 16]),
    ],
)
def test_the_cache_is_divided_by_the_sizes_of_the_pairs(
    there: Path, tmp_path: Path, limit: int, capacities: list[int]
) -> None:
    half = pair(there.with_name("half"), tokens=TOKENS // 2)
    location = CacheLocation(directory=tmp_path / "cache", limit_bytes=limit * BLOCK_BYTES)
    prefixes = mount([there.as_uri(), half.as_uri()], location)
    assert [mirror(prefixes[one.as_uri()]).capacity for one in (there, half)] == capacities


def test_what_is_mounted_is_not_brought_again_and_another_limit_is_kept(
    there: Path, cache: CacheLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = mounted(there, cache)
    IndexedDataset(prefix).window(0, TOKENS)

    def never(*_: object, **__: object) -> bytes:
        raise AssertionError("it is here")

    monkeypatch.setattr(Remote, "read", never)
    marker = prefix.with_name("corpus.mirror.json")
    before = marker.stat().st_mtime_ns
    assert mounted(there, cache) == prefix and mirror(prefix).held == 40
    assert marker.stat().st_mtime_ns == before
    smaller = CacheLocation(directory=cache.directory, limit_bytes=20 * BLOCK_BYTES)
    assert mirror(mounted(there, smaller)).capacity == 20


def test_an_address_with_a_slash_at_its_end_is_that_pair(there: Path, cache: CacheLocation) -> None:
    address = f"{there.as_uri()}/"
    prefix = mount([address], cache)[address]
    assert prefix.name == "corpus" and idx_path(prefix).read_bytes() == idx_path(there).read_bytes()


@pytest.mark.parametrize(
    "harm",
    [
        lambda prefix: os.truncate(idx_path(prefix), 40),
        lambda prefix: idx_path(prefix).unlink(),
        lambda prefix: prefix.with_name("corpus.mirror.json").write_text("{"),
        lambda prefix: prefix.with_name("corpus.mirror.json").write_text('{"format": 3}'),
        lambda prefix: prefix.with_name("corpus.mirror.json").write_text("[]"),
        lambda prefix: rename_in(prefix, "file:///another/corpus"),
    ],
    ids=["short index", "no index", "torn marker", "later marker", "another marker", "another address"],
)
def test_what_is_not_whole_is_brought_again_without_what_was_left_of_it(
    there: Path, cache: CacheLocation, harm: Callable[[Path], object]
) -> None:
    prefix = mounted(there, cache)
    IndexedDataset(prefix).window(0, 10)
    (prefix.parent / "corpus.bin.partial").write_bytes(b"left")
    (prefix.parent / ".corpus.idx.draft").write_bytes(b"left")
    (prefix.parent / "corpus-notes").write_bytes(b"mine")
    harm(prefix)
    assert mounted(there, cache) == prefix
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        *("corpus-notes", "corpus.bin", "corpus.block-sums", "corpus.idx", "corpus.mirror.json", "lock")
    ]
    assert mirror(prefix).held == 0
    assert np.array_equal(IndexedDataset(prefix).window(0, TOKENS), IndexedDataset(there).flat)


def rename_in(prefix: Path, address: str) -> None:
    marker = prefix.with_name("corpus.mirror.json")
    marker.write_text(json.dumps(json.loads(marker.read_bytes()) | {"address": address}))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (idx_path, r"corpus\.idx is not what its seal says"),
        (sums_path, r"corpus\.seal\.sums is not what corpus\.seal\.json says"),
        (seal_path, r"corpus\.seal\.json is not a seal \("),
    ],
)
def test_an_index_or_a_seal_that_is_damaged_there_is_refused_and_not_mounted(
    there: Path, cache: CacheLocation, path: Callable[[Path], Path], said: str
) -> None:
    damage(path(there), path(there).stat().st_size - 9 if path is sums_path else 40)
    with pytest.raises(DataError, match=said) as refused:
        mounted(there, cache)
    assert refused.value.remedy and not list(cache.directory.rglob("*.mirror.json"))


@pytest.mark.parametrize("path", [bin_path, idx_path])
def test_a_pair_that_is_shorter_there_than_it_was_sealed_is_refused_at_once(
    there: Path, cache: CacheLocation, path: Callable[[Path], Path]
) -> None:
    size = path(there).stat().st_size
    os.truncate(path(there), 700)
    said = rf"{path(there).name} has 700 bytes; {size:,} were sealed(?s:.*)bring the old back"
    with pytest.raises(DataError, match=said):
        mounted(there, cache)


def test_sums_that_are_shorter_there_than_the_seal_says_are_refused_at_once(
    there: Path, cache: CacheLocation
) -> None:
    os.truncate(sums_path(there), 100)
    with pytest.raises(DataError, match=r"corpus.seal.sums ends at byte [0-9]+"):
        mounted(there, cache)


def test_an_index_comes_in_pieces_that_are_checked_one_by_one(
    there: Path, cache: CacheLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_FETCH_BYTES", 2 * BLOCK_BYTES + 5)
    asked, read, size = list[tuple[int, int]](), Remote.read, idx_path(there).stat().st_size

    def counted(remote: Remote, path: str, *, start: int, length: int) -> bytes:
        if path.endswith(".idx"):
            asked.append((start, length))
        return read(remote, path, start=start, length=length)

    monkeypatch.setattr(Remote, "read", counted)
    assert idx_path(mounted(there, cache)).read_bytes() == idx_path(there).read_bytes()
    assert [start for start, _ in asked] == list(range(0, size, 2 * BLOCK_BYTES)) and len(asked) > 2
    assert sum(length for _, length in asked) == size
    damage(idx_path(there), 3 * BLOCK_BYTES)
    elsewhere = CacheLocation(directory=cache.directory / "anew", limit_bytes=cache.limit_bytes)
    with pytest.raises(DataError, match=r"corpus\.idx is not what its seal says"):
        mounted(there, elsewhere)
    assert not [path for path in elsewhere.directory.rglob("*") if "idx" in path.name]


def test_a_pair_without_a_seal_is_refused_with_what_would_seal_it(there: Path, cache: CacheLocation) -> None:
    seal_path(there).unlink()
    with pytest.raises(DataError) as refused:
        mounted(there, cache)
    assert f"Cannot read {there.parent.as_uri()}/corpus.seal.json: " in refused.value.message
    assert refused.value.message.endswith(": a pair is streamed by its seal, with sizes and checksums.")
    assert refused.value.remedy.startswith(
        "Put corpus.seal.json beside it: `bloomery data tokenize` and `data merge` write one. Check"
    )


def test_seals_and_markers_of_the_first_format_are_mounted_still(there: Path, cache: CacheLocation) -> None:
    files = {}
    for path in (bin_path(there), idx_path(there)):
        content = path.read_bytes()
        blocks = [content[at : at + 512] for at in range(0, len(content), 512)]
        sums = [xxhash.xxh3_64_hexdigest(block) for block in blocks]
        files[path.suffix] = {"bytes": len(content), "xxh3_64": sums}
    facts = {"format": 1, "vocabulary_size": 280, "end_of_document_id": 0}
    seal_path(there).write_text(json.dumps({**facts, "block_bytes": 512, "files": files}))
    sums_path(there).unlink()
    prefix = mounted(there, cache)
    wanted = IndexedDataset(there).flat
    assert np.array_equal(IndexedDataset(prefix).window(0, 2000), wanted[:2000])
    prefix.with_name("corpus.block-sums").unlink()  # a marker of format 1 held them itself
    marker = prefix.with_name("corpus.mirror.json")
    marker.write_text(json.dumps(json.loads(marker.read_bytes()) | {"format": 1, "files": files}))
    assert mounted(there, cache) == prefix
    assert np.array_equal(IndexedDataset(prefix).window(0, TOKENS), wanted)


def test_sums_that_are_gone_are_told_with_what_to_do(there: Path, cache: CacheLocation) -> None:
    prefix = mounted(there, cache)
    sums = prefix.with_name("corpus.block-sums")
    sums.unlink()
    with pytest.raises(DataError, match=rf"{sums} cannot be read \(") as refused:
        block_cache_of(prefix)
    assert refused.value.remedy == "Remove its directory: it comes again."


def test_a_pair_without_a_token_is_mounted(tmp_path: Path, cache: CacheLocation) -> None:
    with IndexedWriter(tmp_path / "there" / "empty", dtype="<u2") as writer:
        writer.add_document([])
    seal(tmp_path / "there" / "empty", vocabulary_size=280, end_of_document_id=0, block_bytes=BLOCK_BYTES)
    dataset = IndexedDataset(mounted(tmp_path / "there" / "empty", cache))
    assert (dataset.document_count, dataset.window(0, 0).tolist()) == (1, [])


def test_a_place_that_an_earlier_version_made_is_still_read(there: Path, cache: CacheLocation) -> None:
    prefix = mounted(there, cache)
    sums, path = prefix.with_name("corpus.block-sums"), prefix.with_name("corpus.mirror.json")
    marker = json.loads(path.read_bytes())
    marker["format"] = 1
    marker["files"][".bin"]["xxh3_64"] = [f"{one:016x}" for one in np.fromfile(sums, "<u8").tolist()]
    path.write_text(json.dumps(marker))
    sums.unlink()
    assert mounted(there, cache) == prefix and not sums.exists()
    assert np.array_equal(IndexedDataset(prefix).window(5, 900), IndexedDataset(there).window(5, 900))


def test_a_window_that_is_larger_than_the_cache_is_read_from_any_token_on(
    there: Path, tmp_path: Path
) -> None:
    prefix = mounted(there, CacheLocation(directory=tmp_path / "small", limit_bytes=0))
    dataset, local = IndexedDataset(prefix), IndexedDataset(there)
    assert mirror(prefix).capacity == 16
    for first in (0, 1, 255):
        count = TOKENS - first
        assert np.array_equal(dataset.window(first, count), local.window(first, count))


def test_a_large_index_is_brought_in_pieces(
    there: Path, cache: CacheLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_FETCH_BYTES", 1000)
    asked, whole = [], Remote.read

    def watched(self: Remote, path: str, *, start: int, length: int) -> bytes:
        asked.append((path, start, length))
        return whole(self, path, start=start, length=length)

    monkeypatch.setattr(Remote, "read", watched)
    prefix = mounted(there, cache)
    assert idx_path(prefix).read_bytes() == idx_path(there).read_bytes()
    size = idx_path(there).stat().st_size
    pieces = [(start, length) for path, start, length in asked if path == "corpus.idx"]
    assert pieces == [(at, min(512, size - at)) for at in range(0, size, 512)] and len(pieces) > 2


def test_a_pair_that_nobody_reads_any_more_holds_no_file_open(there: Path, cache: CacheLocation) -> None:
    def open_files() -> set[str]:
        gc.collect()
        held = set[str]()
        for link in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # that by which they are listed
                held.add(str(link.readlink()))
        return {name for name in held if name.startswith(str(cache.directory))}

    prefix = mounted(there, cache)
    dataset = IndexedDataset(prefix)
    assert dataset.window(0, 3).size == 3 and open_files()
    del dataset
    assert open_files() == set()


def test_an_index_that_another_process_brought_while_its_lock_was_waited_for_does_not_come_again(
    there: Path, cache: CacheLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, brought, bring = list[Path](), list[Path](), streaming._bring_index

    @contextmanager
    def waiting(directory: Path, *, name: str) -> Iterator[int]:
        taken.append(directory / name)
        if len(taken) == 1:
            mounted(there, cache)
        with storage.locked_directory(directory, name=name) as file:
            yield file

    monkeypatch.setattr(streaming, "locked_directory", waiting)
    monkeypatch.setattr(
        streaming, "_bring_index", lambda prefix, address: brought.append(prefix) or bring(prefix, address)
    )
    prefix = mounted(there, cache)
    assert brought == [prefix] and taken == [prefix.parent / "lock"] * 2
