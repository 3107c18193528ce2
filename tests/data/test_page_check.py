"""Pages of sealed pairs are checked as they are first read, whatever the limit of the start's own check."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash

from bloomery.data import native_kernels
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.ngrams import tokens_of_document
from bloomery.data.order import Order
from bloomery.data.pair_files import bin_path, idx_path, seal_path, sums_path
from bloomery.data.pairs import merge_pairs, refuse_damaged, verify_pair
from bloomery.data.seal import (
    PAGE_BYTES,
    SealFacts,
    page_sums,
    parse_seal,
    plain_page_sums,
    read_seal,
    verified_pieces,
)
from bloomery.data.sealing import Offsets, PageCheck, seal
from bloomery.data_loader.reading import Samples
from bloomery.errors import DataError

TOKENS, LENGTH = 200_001, 100


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    draw = np.random.default_rng(1)
    facts = SealFacts(vocabulary_size=300, end_of_document_id=0, engine="an engine")
    with IndexedWriter(tmp_path / "pair", dtype="<u2", seal=facts) as writer:
        while writer.token_count < TOKENS:
            size = min(int(draw.integers(1, 2000)), TOKENS - writer.token_count)
            writer.add_document(draw.integers(0, 300, size))
    return tmp_path / "pair"


def damage(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def samples(prefix: Path, order: str) -> Samples:
    dataset = IndexedDataset(prefix)
    chosen: Order | MegatronOrder = Order([dataset.window_count(LENGTH)], [1.0], 3)
    if order == "megatron":
        chosen = MegatronOrder([dataset.sequence_lengths], None, samples=1900, sequence_length=LENGTH, seed=3)
    return Samples(chosen, [dataset], sequence_length=LENGTH, vocabulary_size=300)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 90_001])
def test_all_ways_to_sum_pages_agree(size: int) -> None:
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    plain = np.zeros(-(-size // PAGE_BYTES), dtype=np.uint32)
    plain_page_sums(content, plain)
    assert np.array_equal(page_sums(content), plain)
    for instructions in (0, 1, 2):
        native = np.zeros_like(plain)
        if native_kernels.page_sums(content, native, instructions=instructions):
            assert np.array_equal(native, plain)


def test_pages_are_summed_some_at_a_time_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    content = np.random.default_rng(5).integers(0, 256, 7 * PAGE_BYTES + 9, dtype=np.uint8)
    whole, parts = (np.zeros(8, dtype=np.uint32) for _ in range(2))
    plain_page_sums(content, whole)
    monkeypatch.setattr("bloomery.data.seal._PAGES_AT_ONCE", 3)
    plain_page_sums(content, parts)
    assert np.array_equal(parts, whole) and len(set(whole.tolist())) == 8


def test_every_single_bit_changes_the_sum() -> None:
    pages = np.tile(np.arange(PAGE_BYTES, dtype=np.uint8), (64, 1))
    before = page_sums(pages.ravel())
    draw = np.random.default_rng(0)
    pages[np.arange(64), draw.integers(0, PAGE_BYTES, 64)] ^= (1 << draw.integers(0, 8, 64)).astype(np.uint8)
    assert (page_sums(pages.ravel()) != before).all()


@pytest.mark.parametrize("order", ["bloomery", "megatron"])
@pytest.mark.parametrize("place", [0, TOKENS, 2 * TOKENS - 1], ids=["start", "middle", "end"])
@pytest.mark.parametrize("native", [True, False])
def test_damage_in_a_file_beyond_the_check_of_the_start_is_refused_when_it_is_read(
    prefix: Path, order: str, place: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bloomery.data.pairs._CHECKED_AT_START_BYTES", 1000)
    if not native:
        monkeypatch.setattr(native_kernels, "_functions", dict)
    count = 1900
    samples(prefix, order).read(np.arange(count))
    damage(bin_path(prefix), place)
    refuse_damaged([prefix])  # which looks at sizes alone, as the file is too large
    first = place // PAGE_BYTES * PAGE_BYTES
    last = min(first + PAGE_BYTES, 2 * TOKENS) - 1
    said = f"pair.bin is not what was written, somewhere in bytes {first:,} to {last:,}."
    with pytest.raises(DataError) as refused:
        samples(prefix, order).read(np.arange(2000 if order == "bloomery" else count))
    assert said in refused.value.message and "data verify" in refused.value.remedy
    (finding,) = verify_pair(prefix, vocabulary_size=70_000).findings
    assert finding in refused.value.message


def test_a_page_is_checked_once_however_many_threads_read_it(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    reader = Samples(Order([dataset.window_count(LENGTH)], [1.0], 3), [dataset], sequence_length=LENGTH)
    expected = reader.read(np.arange(2000))[0]
    assert dataset.pages is not None and dataset.pages.checked_pages == -(-2 * TOKENS // PAGE_BYTES)
    again = IndexedDataset(prefix)
    shared = Samples(Order([again.window_count(LENGTH)], [1.0], 3), [again], sequence_length=LENGTH)
    wrong: list[int] = []

    def read(start: int) -> None:
        for first in range(start, 2000, 40):
            if not np.array_equal(shared.read(np.arange(first, first + 20))[0], expected[first : first + 20]):
                wrong.append(first)

    threads = [threading.Thread(target=read, args=(start,)) for start in (0, 20, 0, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == [] and again.pages is not None
    assert again.pages.checked_pages == dataset.pages.checked_pages


def test_a_part_of_a_dataset_and_its_windows_are_checked(prefix: Path) -> None:
    documents = IndexedDataset(prefix).document_count
    damage(bin_path(prefix), 2 * TOKENS - 1)
    part = IndexedDataset(prefix).part(range(documents // 2, documents))
    part.window(0, 10)
    with pytest.raises(DataError, match=r"pair\.bin is not what was written"):
        part.window(part.token_count - 1, 1)


def test_a_damaged_index_is_refused_by_what_reads_all_of_it(prefix: Path) -> None:
    damage(idx_path(prefix), 40)
    with pytest.raises(DataError, match=r"pair\.idx is not what was written, somewhere in bytes 0 to"):
        _ = IndexedDataset(prefix).document_starts


def test_damaged_sums_are_not_told_as_damaged_tokens(prefix: Path) -> None:
    damage(sums_path(prefix), 5)
    with pytest.raises(DataError, match=r"pair\.seal\.sums is not what was written"):
        IndexedDataset(prefix).window(0, TOKENS)
    (finding,) = verify_pair(prefix).findings
    assert "pair.seal.sums" in finding and "the checksums are damaged" in finding


def test_a_damaged_seal_is_refused_at_once(prefix: Path) -> None:
    whole = seal_path(prefix).read_bytes()
    seal_path(prefix).write_bytes(whole.replace(b'"vocabulary_size": 300', b'"vocabulary_size": 301'))
    with pytest.raises(DataError, match=r"pair\.seal\.json is damaged: .*its checksum is another"):
        IndexedDataset(prefix)
    seal_path(prefix).write_bytes(whole)
    sums_path(prefix).write_bytes(sums_path(prefix).read_bytes()[:-1])
    with pytest.raises(DataError, match=r"seal\.sums has [\d,]+ bytes"):
        IndexedDataset(prefix)


def test_sums_of_bytes_that_pass_are_those_of_the_files_and_the_seal_stays_small(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = seal_path(prefix).read_bytes(), sums_path(prefix).read_bytes()
    seal(prefix, vocabulary_size=300, end_of_document_id=0, engine="an engine")
    assert (seal_path(prefix).read_bytes(), sums_path(prefix).read_bytes()) == before
    assert len(before[0]) < 1500
    pages = -(-2 * TOKENS // PAGE_BYTES)
    sealed = read_seal(prefix)
    assert sealed is not None and sealed.files[".bin"].page_sums is not None
    assert sealed.files[".bin"].page_sums.size == pages and isinstance(
        sealed.files[".bin"].page_sums, np.memmap
    )


def with_changes(prefix: Path, **changes: object) -> bytes:
    """A seal's bytes with other values, and a checksum that fits them."""
    content = {**json.loads(seal_path(prefix).read_bytes()), **changes}
    del content["checksum"]
    digest = xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
    return json.dumps({**content, "checksum": digest}).encode()


def test_a_seal_whose_sums_would_lie_elsewhere_is_refused(prefix: Path) -> None:
    assert parse_seal(with_changes(prefix)) == parse_seal(seal_path(prefix).read_bytes())
    with pytest.raises(ValueError, match="pages of 8192 bytes"):
        parse_seal(with_changes(prefix, page_bytes=8192))
    with pytest.raises(ValueError, match=r"its sums of blocks are not as many as \.bin has"):
        parse_seal(with_changes(prefix, block_bytes=4096))
    with pytest.raises(ValueError, match="of format 3, and formats 1 and 2 are known"):
        parse_seal(with_changes(prefix, format=3))
    files = json.loads(seal_path(prefix).read_bytes())["files"]
    files[".idx"]["bytes"] += 1 << 20
    with pytest.raises(ValueError, match=r"its sums of blocks are not as many as \.idx has"):
        parse_seal(with_changes(prefix, files=files))
    with pytest.raises(ValueError, match="it lacks 'checksum'"):
        parse_seal(b'{"format": 2}')
    with pytest.raises(ValueError, match="another form"):
        parse_seal(b"[]")
    plain = {"format": 1, "vocabulary_size": 3, "end_of_document_id": 0, "block_bytes": 0}
    empty = {ending: {"bytes": 0, "xxh3_64": []} for ending in (".bin", ".idx")}
    with pytest.raises(ValueError, match="blocks of 0 bytes"):
        parse_seal(json.dumps({**plain, "files": empty}).encode())


@pytest.mark.parametrize(
    "value", [0, -1, 1.5, float("inf"), float("nan"), True, "x", None, [], {}, 1 << 64, 1 << 40]
)
def test_a_seal_with_a_value_that_is_no_size_is_no_seal(prefix: Path, value: object) -> None:
    """From elsewhere it may come with a checksum that fits; and seals of format 1 have none."""
    with pytest.raises(ValueError, match=r"blocks of|where a number belongs"):
        parse_seal(with_changes(prefix, block_bytes=value))
    if value is not None:
        for name in ("vocabulary_size", "end_of_document_id"):
            if type(value) is not int or not 0 <= value <= 1 << 60:
                with pytest.raises(ValueError, match="where a number belongs"):
                    parse_seal(with_changes(prefix, **{name: value}))
    sums: object = [value] if isinstance(value, str) else ["f" * 17]
    plain = {"format": 1, "vocabulary_size": 3, "end_of_document_id": 0, "block_bytes": 512}
    files = {ending: {"bytes": 512, "xxh3_64": sums} for ending in (".bin", ".idx")}
    seal_path(prefix).write_text(json.dumps({**plain, "files": files}))
    with pytest.raises(DataError, match=r"pair\.seal\.json is damaged"):
        IndexedDataset(prefix)


def test_a_seal_of_the_first_format_with_another_number_of_sums_is_no_seal(prefix: Path) -> None:
    plain = {"format": 1, "vocabulary_size": 3, "end_of_document_id": 0, "block_bytes": 512}
    files = {ending: {"bytes": 1000, "xxh3_64": ["ab"] * 3} for ending in (".bin", ".idx")}
    with pytest.raises(ValueError, match=r"its sums of blocks are not as many as \.bin has"):
        parse_seal(json.dumps({**plain, "files": files}).encode())


def test_damage_within_a_block_that_is_smaller_than_a_page_is_placed_by_its_block(prefix: Path) -> None:
    seal(prefix, vocabulary_size=300, end_of_document_id=0, block_bytes=512)
    damage(bin_path(prefix), 5 * 512 + 6)
    (finding,) = verify_pair(prefix).findings
    assert "somewhere in bytes 2,560 to 3,071" in finding
    with pytest.raises(DataError, match="somewhere in bytes 0 to 4,095"):
        IndexedDataset(prefix).window(0, 10)


def test_a_seal_of_blocks_that_are_larger_than_one_read_is_compared_whole(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_seal(prefix)
    monkeypatch.setattr("bloomery.data.seal._READ_BYTES", 1000)
    assert b"".join(verified_pieces(bin_path(prefix), whole)) == bin_path(prefix).read_bytes()
    assert b"".join(verified_pieces(bin_path(prefix), None)) == bin_path(prefix).read_bytes()


def as_format_1(prefix: Path, *, block_bytes: int = 256 << 10) -> None:
    """Seal a pair as earlier versions did."""
    files = {}
    for path in (bin_path(prefix), idx_path(prefix)):
        content = path.read_bytes()
        blocks = [content[start : start + block_bytes] for start in range(0, len(content), block_bytes)]
        files[path.suffix] = {
            "bytes": len(content),
            "xxh3_64": [xxhash.xxh3_64_hexdigest(block) for block in blocks],
        }
    plain = {"format": 1, "vocabulary_size": 300, "end_of_document_id": 0, "engine": None}
    seal_path(prefix).write_text(json.dumps({**plain, "block_bytes": block_bytes, "files": files}))
    sums_path(prefix).unlink(missing_ok=True)


def test_a_seal_of_format_1_is_still_read_and_verified(prefix: Path) -> None:
    as_format_1(prefix)
    assert IndexedDataset(prefix).pages is None
    assert verify_pair(prefix).findings == ()
    damage(bin_path(prefix), 300_000)
    (finding,) = verify_pair(prefix, vocabulary_size=70_000).findings
    assert "somewhere in bytes 262,144 to 400,001" in finding
    with pytest.raises(DataError, match="somewhere in bytes 262,144 to 400,001"):
        refuse_damaged([prefix])


@pytest.mark.parametrize("format_1", [False, True])
@pytest.mark.parametrize("path", [bin_path, idx_path])
def test_merge_refuses_damage_in_a_source_by_name(prefix: Path, tmp_path: Path, format_1: bool, path) -> None:
    if format_1:
        as_format_1(prefix)
    merged = merge_pairs([prefix, prefix], tmp_path / "twice")
    assert merged.seal is not None and merged.seal.facts.vocabulary_size == 300
    assert verify_pair(tmp_path / "twice").findings == ()
    damage(path(prefix), path(prefix).stat().st_size // 2)
    with pytest.raises(DataError, match=rf"{path(prefix).name} is not what was written, somewhere in bytes"):
        merge_pairs([prefix], tmp_path / "once")
    assert not [left for left in tmp_path.iterdir() if left.name.startswith("once")]


def test_an_index_that_was_found_right_is_not_gone_over_again_for_each_document(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, checked = IndexedDataset(prefix), list[tuple[int, int]]()
    whole = idx_path(prefix).stat().st_size
    check = PageCheck.check

    def counted(self: PageCheck, begins: Offsets, ends: Offsets) -> None:
        checked.append((int(begins.min()), int(ends.max())))
        check(self, begins, ends)

    monkeypatch.setattr(PageCheck, "check", counted)
    for number in range(dataset.document_count):
        tokens_of_document(dataset, number)
        tokens_of_document(dataset.part(range(number, number + 1)), 0)
    assert checked.count((0, whole)) == 1


def test_a_damaged_index_is_refused_each_time_that_it_is_asked_for(prefix: Path) -> None:
    damage(idx_path(prefix), idx_path(prefix).stat().st_size - 9)
    dataset = IndexedDataset(prefix)
    for number in (0, 1):
        with pytest.raises(DataError, match="is not what was written"):
            tokens_of_document(dataset, number)
