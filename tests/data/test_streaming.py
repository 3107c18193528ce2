"""A tokenised corpus elsewhere: read as it is needed, checked, within a bound, and without a network too."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from tests.checkpoint.object_store import ObjectStore
from tests.checkpoint.object_store import serving as serving_objects
from tests.range_server import Served, serving

from bloomery.config.data import DataSection, DatasetSection
from bloomery.config.environment import SWITCH, OfflineRefused
from bloomery.data import block_cache
from bloomery.data.block_cache import BlockCache, RemoteFileInfo
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.order import Order
from bloomery.data.pair_files import bin_path
from bloomery.data.pairs import merge_pairs, verify_pair
from bloomery.data.prepare import Prepared, prepare
from bloomery.data.sealing import seal
from bloomery.data.streaming import CacheLocation, mount
from bloomery.data.tokenizer import train_tokenizer
from bloomery.data_loader.reading import Samples
from bloomery.errors import DataError

LENGTH, BLOCK_BYTES, BLOCKS = 16, 512, 200


@pytest.fixture(scope="module")
def objects() -> Iterator[ObjectStore]:
    with serving_objects() as store:
        yield store


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two hundred blocks of tokens, sealed."""
    draw = np.random.default_rng(4)
    prefix = tmp_path / "there" / "corpus"
    left = BLOCKS * BLOCK_BYTES // 2
    with IndexedWriter(prefix, dtype="<u2") as writer:
        while left:
            size = min(left, int(draw.integers(1, 300)))
            writer.add_document(draw.integers(0, 280, size))
            left -= size
    seal(prefix, vocabulary_size=280, end_of_document_id=0, block_bytes=BLOCK_BYTES)
    return prefix


@pytest.fixture
def server(pair: Path) -> Iterator[Served]:
    with serving(pair.parent) as served:
        yield served


def opened(address: str, place: Path, *, blocks: int = 40) -> IndexedDataset:
    cache = CacheLocation(directory=place, limit_bytes=blocks * BLOCK_BYTES)
    return IndexedDataset(mount([address], cache)[address])


def order_of(kind: str, dataset: IndexedDataset) -> Order | MegatronOrder:
    if kind == "bloomery":
        return Order([dataset.window_count(LENGTH)], [1.0], 7)
    lengths = [dataset.sequence_lengths]
    return MegatronOrder(lengths, None, samples=2000, sequence_length=LENGTH, seed=7)


def samples_of(kind: str, dataset: IndexedDataset, count: int = 300) -> np.ndarray:
    return Samples(order_of(kind, dataset), [dataset], sequence_length=LENGTH).read(np.arange(count))[0]


@pytest.mark.parametrize("kind", ["bloomery", "megatron"])
def test_samples_from_a_bucket_are_those_of_the_file_and_the_cache_stays_within_its_bound(
    pair: Path, objects: ObjectStore, tmp_path: Path, kind: str
) -> None:
    import obstore
    from obstore.store import from_url

    bucket = objects.new_bucket()
    store = from_url(bucket, client_options={"allow_http": True})
    for path in pair.parent.iterdir():
        obstore.put(store, f"deep/{path.name}", path.read_bytes())
    dataset = opened(f"{bucket}/deep/corpus", tmp_path / "cache")
    assert np.array_equal(samples_of(kind, dataset), samples_of(kind, IndexedDataset(pair)))
    assert dataset.mirror is not None and 20 <= dataset.mirror.held <= 40
    part = range(40, 90)
    local = IndexedDataset(pair).part(part)
    assert np.array_equal(samples_of(kind, dataset.part(part), 100), samples_of(kind, local, 100))
    assert np.array_equal(dataset.document(11), IndexedDataset(pair).document(11))
    assert np.array_equal(dataset.window(0, dataset.token_count), IndexedDataset(pair).flat)


def test_what_is_let_go_is_given_back_to_the_disk(pair: Path, tmp_path: Path) -> None:
    os.truncate(bin_path(pair), 0)
    with IndexedWriter(pair, dtype="<u2") as writer:
        writer.add_document(np.arange(1 << 20) % 60_000)
    content = bin_path(pair).read_bytes()
    cut = [content[start : start + (1 << 16)] for start in range(0, len(content), 1 << 16)]
    sums = np.array([xxhash.xxh3_64_intdigest(one) for one in cut], dtype=np.uint64)
    outline = RemoteFileInfo(address="there", size_bytes=len(content), block_bytes=1 << 16, sums=sums)
    here = tmp_path / "here.bin"
    mirror = BlockCache(
        here, outline, capacity=8, fetch=lambda start, length: content[start : start + length]
    )
    for block in range(32):
        start, stop = np.array([block << 16]), np.array([(block + 1) << 16])
        read = mirror.read(start, stop, lambda at=block: here.read_bytes()[at << 16 : (at + 1) << 16])
        assert read == cut[block]
        assert mirror.held <= 8
    assert here.stat().st_size == len(content)
    assert here.stat().st_blocks * 512 <= 9 << 16


def test_a_block_that_another_process_left_is_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = np.arange(1 << 14, dtype=np.uint32).tobytes()
    size = 1 << 13
    cut = [content[start : start + size] for start in range(0, len(content), size)]
    sums = np.array([xxhash.xxh3_64_intdigest(block) for block in cut], dtype=np.uint64)
    outline = RemoteFileInfo(address="there", size_bytes=len(content), block_bytes=size, sums=sums)
    here = tmp_path / "here.bin"
    starts, stops = np.arange(len(cut)) * size, (np.arange(len(cut)) + 1) * size

    def all_of(mirror: BlockCache) -> bytes:
        return mirror.read(starts, stops, here.read_bytes)

    first = BlockCache(
        here, outline, capacity=len(cut), fetch=lambda start, length: content[start : start + length]
    )
    assert all_of(first) == content
    hashed: list[bytes] = []
    hash_of = block_cache._sum
    monkeypatch.setattr(block_cache, "_sum", lambda block: hashed.append(block) or hash_of(block))
    later = BlockCache(here, outline, capacity=len(cut), fetch=lambda *_: pytest.fail("every block is here"))
    assert [all_of(later) == content for _ in range(3)] == [True] * 3
    assert len(hashed) == len(cut)


def test_a_network_that_hangs_up_is_asked_again(pair: Path, server: Served, tmp_path: Path) -> None:
    dataset = opened(f"{server.url}/corpus", tmp_path / "cache")
    server.hang_ups = 3
    assert np.array_equal(
        samples_of("bloomery", dataset, 60), samples_of("bloomery", IndexedDataset(pair), 60)
    )
    assert server.hang_ups == 0


def test_without_a_network_what_is_here_is_read_and_what_is_not_is_named(
    pair: Path, server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, place = f"{server.url}/corpus", tmp_path / "cache"
    expected = samples_of("bloomery", IndexedDataset(pair), 400)
    assert np.array_equal(samples_of("bloomery", opened(address, place, blocks=300), 400), expected)
    asked = len(server.requests)
    monkeypatch.setenv(SWITCH, "1")
    again = opened(address, place, blocks=300)
    assert np.array_equal(samples_of("bloomery", again, 400), expected)
    with pytest.raises(OfflineRefused, match=r"read bytes [\d,]+ to [\d,]+ of .*corpus\.bin, which"):
        samples_of("bloomery", again, 1500)
    with pytest.raises(OfflineRefused, match="network is needed to read"):
        opened(address, tmp_path / "another")
    assert len(server.requests) == asked


def test_a_block_that_is_not_what_was_sealed_is_never_read(
    pair: Path, server: Served, tmp_path: Path
) -> None:
    dataset = opened(f"{server.url}/corpus", tmp_path / "cache", blocks=300)
    whole = bin_path(pair).read_bytes()
    hurt = bytearray(whole)
    hurt[5 * BLOCK_BYTES + 9] ^= 1
    bin_path(pair).write_bytes(hurt)
    with pytest.raises(DataError, match=r"Bytes 2,560 to 3,071 of .*corpus\.bin are not what its seal said"):
        dataset.window(0, 2000)
    bin_path(pair).write_bytes(whole)
    assert np.array_equal(dataset.window(0, 2000), IndexedDataset(pair).window(0, 2000))
    mirrored = bin_path(dataset.prefix)
    with mirrored.open("r+b") as file:  # what a power cut may leave of a block
        file.seek(3 * BLOCK_BYTES)
        file.write(b"\0" * BLOCK_BYTES)
    again = IndexedDataset(dataset.prefix)
    assert np.array_equal(again.window(0, 2000), IndexedDataset(pair).window(0, 2000))


def test_threads_and_processes_that_share_a_small_cache_never_read_a_hole(tmp_path: Path) -> None:
    draw, size, count = np.random.default_rng(3), 64, 120
    content = draw.integers(1, 255, size * count, dtype=np.uint8).tobytes()
    cut = [content[start : start + size] for start in range(0, len(content), size)]
    sums = np.array([xxhash.xxh3_64_intdigest(one) for one in cut], dtype=np.uint64)
    outline = RemoteFileInfo(address="there", size_bytes=len(content), block_bytes=size, sums=sums)
    path, wrong = tmp_path / "here.bin", list[int]()

    def fetch(start: int, length: int) -> bytes:
        return content[start : start + length]

    mirrors = [BlockCache(path, outline, capacity=24, fetch=fetch) for _ in range(2)]  # as of two processes

    def work(number: int) -> None:
        mirror, own = mirrors[number % 2], np.random.default_rng(number)
        with path.open("rb") as file:
            for _ in range(150):
                blocks = own.choice(count, 3, replace=False)

                def copy(blocks: np.ndarray = blocks) -> list[bytes]:
                    return [os.pread(file.fileno(), size, int(block) * size) for block in blocks]

                read = mirror.read(blocks * size, (blocks + 1) * size, copy)
                wrong.extend(block for block, got in zip(blocks, read, strict=True) if got != cut[block])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == [] and mirrors[0].held <= 24


READER = """
import sys
from pathlib import Path
import numpy as np
from bloomery.data.indexed import IndexedDataset
from bloomery.data.order import Order
from bloomery.data_loader.reading import Samples

dataset = IndexedDataset(Path(sys.argv[1]))
samples = Samples(Order([dataset.window_count(16)], [1.0], 7), [dataset], sequence_length=16)
while True:
    samples.read(np.random.default_rng().integers(0, 3000, 8))
"""


def test_processes_that_are_killed_leave_a_cache_that_is_right(
    pair: Path, server: Served, tmp_path: Path
) -> None:
    dataset = opened(f"{server.url}/corpus", tmp_path / "cache")
    command = [sys.executable, "-c", READER, str(dataset.prefix)]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    readers = [subprocess.Popen(command, env=paths, stderr=subprocess.PIPE) for _ in range(2)]
    deadline_s = time.monotonic() + 120
    while len(server.requests) < 250 and time.monotonic() < deadline_s:
        ended = [reader for reader in readers if reader.poll() is not None]
        assert not ended, ended[0].communicate()
        time.sleep(0.02)
    for reader in readers:
        reader.kill()
        reader.communicate()
    assert len(server.requests) >= 250
    again = IndexedDataset(dataset.prefix)
    assert again.mirror is not None and again.mirror.held > 0
    assert np.array_equal(samples_of("bloomery", again), samples_of("bloomery", IndexedDataset(pair)))
    assert again.mirror.held <= 40


def test_a_cache_too_small_for_one_sample_is_refused(pair: Path, server: Served, tmp_path: Path) -> None:
    dataset = opened(f"{server.url}/corpus", tmp_path / "cache", blocks=1)
    with pytest.raises(DataError, match=r"One read takes .* blocks") as refused:
        samples = Samples(Order([1], [1.0], 7), [dataset], sequence_length=dataset.token_count - 1)
        samples.read(np.arange(1))
    assert "data.cache_gb" in refused.value.remedy


def test_what_is_not_sealed_or_read_whole_is_refused(pair: Path, server: Served, tmp_path: Path) -> None:
    dataset = opened(f"{server.url}/corpus", tmp_path / "cache")
    for whole in (lambda: verify_pair(dataset.prefix), lambda: merge_pairs([dataset.prefix], tmp_path / "m")):
        with pytest.raises(DataError, match=r"is a window on http.*corpus\.bin, and not all of it is here"):
            whole()
    pair.with_name("corpus.seal.json").unlink()
    with pytest.raises(DataError, match="a pair is streamed by its seal") as refused:
        opened(f"{server.url}/corpus", tmp_path / "another")
    assert "data tokenize" in refused.value.remedy


def test_pairs_share_one_cache_by_their_sizes(pair: Path, server: Served, tmp_path: Path) -> None:
    part = pair.with_name("part")
    with IndexedWriter(part, dtype="<u2") as writer:
        writer.add_document(np.ones(BLOCKS // 2 * BLOCK_BYTES // 2, dtype=np.int64))
    seal(part, vocabulary_size=280, end_of_document_id=0, block_bytes=BLOCK_BYTES)
    addresses = [f"{server.url}/corpus", f"{server.url}/part"]
    prefixes = mount(addresses, CacheLocation(directory=tmp_path / "cache", limit_bytes=90 * BLOCK_BYTES))
    mirrors = [IndexedDataset(prefixes[address]).mirror for address in addresses]
    assert [mirror and mirror.capacity for mirror in mirrors] == [60, 30]


def test_a_recipe_names_addresses_beside_paths(pair: Path, server: Served, tmp_path: Path) -> None:
    texts = ["some words to learn from " * 9]
    train_tokenizer(texts, vocabulary=280, end_of_document="<|endoftext|>").save(tmp_path / "tokenizer.json")

    def prepared(cache_gb: float) -> Prepared:
        data = DataSection(
            sequence_length=LENGTH,
            tokenizer=str(tmp_path / "tokenizer.json"),
            datasets=(
                DatasetSection(name="near", path=str(pair)),
                DatasetSection(name="far", path=f"{server.url}/corpus"),
            ),
            cache_gb=cache_gb,
        )
        return prepare(data, tmp_path / "data")

    def capacity(done: Prepared) -> int:
        mirror = IndexedDataset(done.train[1].prefix).mirror
        assert mirror is not None
        return mirror.capacity

    first = prepared(50 * BLOCK_BYTES / 1e9)
    assert first.train[1].prefix.is_relative_to(tmp_path / "data" / "cache")
    assert first.train[0].tokens == first.train[1].tokens and capacity(first) == 50
    assert capacity(prepared(70 * BLOCK_BYTES / 1e9)) == 70
