"""Pairs of tokens to the byte: what their seals say, which pages are checked, what is said of harm."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash

from bloomery.data import native_kernels
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.pair_files import bin_path, idx_path, seal_path, sums_path
from bloomery.data.pairs import _joined, agreed_facts, differences, refuse_damaged, verify_pair
from bloomery.data.seal import (
    PAGE_BYTES,
    SealFacts,
    damaged_sums,
    page_sums,
    parse_seal,
    read_seal,
    refuse_other_sizes,
    verified_pieces,
)
from bloomery.data.sealing import PageCheck, RunningSums, SealWriter, seal
from bloomery.errors import DataError, StorageError

FACTS = SealFacts(vocabulary_size=300, end_of_document_id=7, engine="an engine")
TOKENS = 5 * 2048 + 100  # six pages, the last of 200 bytes


def written(prefix: Path, *, tokens: int = TOKENS, facts: SealFacts | None = FACTS) -> IndexedDataset:
    with IndexedWriter(prefix, dtype="<u2", seal=facts, block_bytes=8192) as writer:
        writer.add_documents(np.arange(tokens) % 300, np.array([tokens]))
    return IndexedDataset(prefix)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return written(tmp_path / "pair").prefix


@pytest.fixture(params=["native", "numpy"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(native_kernels, "_functions", dict)
    elif not native_kernels._functions():
        pytest.skip("the native library is not built")


def damage(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("block_bytes", [512, 4096, 8192])
@pytest.mark.parametrize("cuts", [[], [1], [4096], [8191, 8192, 8193], [100, 5000, 20_000], [8192, 16_384]])
def test_sums_are_those_of_blocks_and_pages_however_the_bytes_come(block_bytes: int, cuts: list[int]) -> None:
    content = np.random.default_rng(2).integers(0, 256, 20_580, dtype=np.uint8).tobytes()
    pages = bytearray()
    sums = RunningSums(block_bytes=block_bytes, write_pages=pages.extend)
    for low, high in pairwise([0, *cuts, len(content)]):
        sums.update(content[low:high])
    sums.finish()
    sums.finish()  # nothing is held any more
    blocks = [content[at : at + block_bytes] for at in range(0, len(content), block_bytes)]
    assert sums.blocks.tolist() == [xxhash.xxh3_64_intdigest(block) for block in blocks]
    expected = page_sums(np.frombuffer(content, np.uint8)).astype("<u4").tobytes()
    assert bytes(pages) == expected and (sums.bytes, sums.page_count) == (20_580, 6)
    section = sums.pages_section(offset=9)
    assert (section.offset, section.size, section.xxh3_64) == (9, 24, xxhash.xxh3_64_intdigest(expected))


@pytest.mark.parametrize("block_bytes", [1000, 4097, 6144])
def test_blocks_that_do_not_fit_to_pages_are_refused(block_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"blocks of {block_bytes} bytes do not fit to pages of 4096"):
        RunningSums(block_bytes=block_bytes, write_pages=lambda sums: None)


def test_a_seal_says_what_the_pair_is_and_where_its_sums_lie(prefix: Path) -> None:
    plain = json.loads(seal_path(prefix).read_bytes())
    checksum, sizes = plain.pop("checksum"), {one: one(prefix).stat().st_size for one in (bin_path, idx_path)}
    sums, contents = sums_path(prefix).read_bytes(), {one: one(prefix).read_bytes() for one in sizes}
    tokens, index = contents[bin_path], contents[idx_path]

    def blocks(content: bytes) -> bytes:
        cut = [content[at : at + 8192] for at in range(0, len(content), 8192)]
        return np.array([xxhash.xxh3_64_intdigest(one) for one in cut], "<u8").tobytes()

    def pages(content: bytes) -> bytes:
        return page_sums(np.frombuffer(content, np.uint8)).astype("<u4").tobytes()

    # tokens' pages (24 bytes), tokens' blocks (24), the index's blocks (8) and pages (4): each from 8·n on
    assert sums == pages(tokens) + blocks(tokens) + blocks(index) + pages(index)
    places = {
        (".bin", "pages"): (0, 24),
        (".bin", "blocks"): (24, 24),
        (".idx", "blocks"): (48, 8),
        (".idx", "pages"): (56, 4),
    }
    described = {
        key: {
            "offset": at,
            "bytes": size,
            "xxh3_64": f"{xxhash.xxh3_64_intdigest(sums[at : at + size]):016x}",
        }
        for key, (at, size) in places.items()
    }
    assert plain == {
        "format": 2,
        "vocabulary_size": 300,
        "end_of_document_id": 7,
        "engine": "an engine",
        "block_bytes": 8192,
        "page_bytes": 4096,
        "files": {
            ending: {
                "bytes": size,
                "pages": described[ending, "pages"],
                "blocks": described[ending, "blocks"],
            }
            for ending, size in ((".bin", sizes[bin_path]), (".idx", sizes[idx_path]))
        },
        "sums_bytes": 60,
    }
    assert checksum == xxhash.xxh3_64_hexdigest(json.dumps(plain, sort_keys=True).encode())
    found = read_seal(prefix)
    assert found is not None and found.facts == FACTS and found.block_bytes == 8192
    for ending, content in ((".bin", tokens), (".idx", index)):
        file = found.files[ending]
        assert file.bytes == len(content) and file.page_sums is not None
        assert (file.block_sums.tobytes(), file.page_sums.tobytes()) == (blocks(content), pages(content))


@pytest.mark.parametrize(
    ("place", "first", "last"), [(0, 0, 23), (23, 0, 23), (24, 24, 47), (48, 48, 55), (59, 56, 59)]
)
def test_damaged_sums_are_placed(prefix: Path, place: int, first: int, last: int) -> None:
    assert damaged_sums(prefix) == []
    damage(sums_path(prefix), place)
    assert damaged_sums(prefix) == [
        f"{sums_path(prefix)} is not what was written, somewhere in bytes {first} to {last}: the checksums "
        "are damaged."
    ]


def test_of_damaged_sums_the_first_is_told_and_no_token_is_blamed(prefix: Path) -> None:
    sealed = read_seal(prefix)
    assert sealed is not None
    for place in (0, 30, 50):
        damage(sums_path(prefix), place)
    (finding,) = differences(prefix, sealed)
    assert finding.endswith(": the checksums are damaged.")


def test_more_blocks_than_were_sealed_are_damage(tmp_path: Path) -> None:
    prefix = written(tmp_path / "pair", tokens=8192).prefix  # two whole blocks
    sealed = read_seal(prefix)
    with bin_path(prefix).open("ab") as file:
        file.write(bytes(100))
    with pytest.raises(DataError, match=r"pair\.bin is not what was written, somewhere in bytes"):
        list(verified_pieces(bin_path(prefix), sealed))


def test_a_seal_that_no_room_was_left_for_is_let_go_without_another_word(tmp_path: Path) -> None:
    partial = tmp_path / "pair.seal.sums.partial"
    partial.symlink_to("/dev/full")
    writer = SealWriter(tmp_path / "pair", FACTS)
    writer.tokens.update(bytes(8192))
    with pytest.raises(StorageError):
        writer.commit()
    writer.close()
    assert not partial.is_symlink()


def test_sums_that_are_gone_are_told_with_the_seal_that_they_belong_to(prefix: Path) -> None:
    sums_path(prefix).unlink()
    with pytest.raises(DataError) as refused:
        read_seal(prefix)
    said = (
        f"Cannot read {sums_path(prefix)}, the checksums of {seal_path(prefix)}: No such file or directory."
    )
    assert refused.value.message == said
    seal_path(prefix).unlink()
    seal_path(prefix).mkdir()
    with pytest.raises(DataError, match=rf"Cannot read {seal_path(prefix)}: Is a directory\."):
        read_seal(prefix)


def test_facts_that_a_seal_does_not_say_are_none() -> None:
    plain = {"format": 1, "vocabulary_size": None, "end_of_document_id": 3, "block_bytes": 1}
    files = {ending: {"bytes": 1, "xxh3_64": ["0a"]} for ending in (".bin", ".idx")}
    found = parse_seal(json.dumps({**plain, "files": files}).encode())
    assert found.facts == SealFacts(vocabulary_size=None, end_of_document_id=3, engine=None)
    assert found.files[".bin"].block_sums.tolist() == [10]  # type: ignore[union-attr]


@pytest.mark.parametrize("path", [bin_path, idx_path])
def test_a_file_of_another_size_than_was_sealed_is_refused(
    prefix: Path, path: Callable[[Path], Path]
) -> None:
    sealed = read_seal(prefix)
    assert sealed is not None
    refuse_other_sizes(prefix, sealed)
    size = path(prefix).stat().st_size
    path(prefix).write_bytes(path(prefix).read_bytes() + b"x")
    with pytest.raises(DataError) as refused:
        refuse_other_sizes(prefix, sealed)
    assert refused.value.message == f"{path(prefix)} has {size + 1:,} bytes; {size:,} were written."
    with pytest.raises(DataError, match=r"is not what was written|bytes; .* were written"):
        list(verified_pieces(path(prefix), sealed))


def test_a_block_that_differs_is_named_by_its_bytes_and_one_that_was_never_sealed_too(prefix: Path) -> None:
    sealed = read_seal(prefix)
    content = bin_path(prefix).read_bytes()
    for more, first, last in ((b"", 16_384, 20_679), (b"x" * 8192, 16_384, 24_575)):
        changed = bytearray(content + more)
        changed[20_000] ^= 1
        bin_path(prefix).write_bytes(changed)
        with pytest.raises(DataError) as refused:
            list(verified_pieces(bin_path(prefix), sealed))
        assert refused.value.message.endswith(f"somewhere in bytes {first:,} to {last:,}.")
    with pytest.raises(DataError, match=r"Cannot read .*none: No such file"):
        list(verified_pieces(prefix.with_name("none"), None))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(
    ("begin", "end", "pages"),
    [
        (0, 1, 1),
        (4095, 4096, 1),
        (4096, 8192, 1),
        (4095, 4097, 2),
        (0, 2 * TOKENS, 6),
        (20_480, 20_680, 1),
        (0, 12_289, 4),
    ],
)
def test_the_pages_that_are_read_are_checked_and_no_others(
    prefix: Path, begin: int, end: int, pages: int
) -> None:
    dataset = IndexedDataset(prefix)
    assert dataset.pages is not None and dataset.pages.checked_pages == 0
    for _ in range(2):
        dataset.pages.check(np.array([begin]), np.array([end]))
        assert dataset.pages.checked_pages == pages


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("place", [0, 4095, 4096, 8191, 20_479, 20_480, 20_679])
def test_a_page_is_refused_only_by_who_reads_it(prefix: Path, place: int) -> None:
    damage(bin_path(prefix), place)
    page = place // PAGE_BYTES
    for other in range(6):
        pages = IndexedDataset(prefix).pages
        assert pages is not None
        begin, end = other * PAGE_BYTES, min((other + 1) * PAGE_BYTES, 2 * TOKENS)
        if other != page:
            pages.check(np.array([begin]), np.array([end]))
            continue
        with pytest.raises(DataError) as refused:
            pages.check(np.array([begin]), np.array([end]))
        assert refused.value.message == (
            f"{bin_path(prefix)} is not what was written, somewhere in bytes {begin:,} to {end - 1:,}."
        )
        assert f"`bloomery data verify {prefix}` names all that differs." in refused.value.remedy


def test_bits_of_many_pages_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_kernels, "_functions", dict)
    dataset = written(tmp_path / "many", tokens=200 * 2048)
    assert dataset.pages is not None
    for page, count in ((0, 1), (63, 2), (64, 3), (127, 4), (128, 5), (199, 6), (64, 6)):
        dataset.pages.check(np.array([page * PAGE_BYTES]), np.array([page * PAGE_BYTES + 1]))
        assert dataset.pages.checked_pages == count
    damage(bin_path(tmp_path / "many"), 65 * PAGE_BYTES)
    with pytest.raises(DataError, match="266,240 to 270,335"):
        dataset.pages.check(np.array([0]), np.array([200 * PAGE_BYTES]))


def test_a_page_that_differed_and_is_whole_when_it_is_read_again_tells_of_the_memory(prefix: Path) -> None:
    pages = IndexedDataset(prefix).pages
    assert isinstance(pages, PageCheck)
    with pytest.raises(DataError) as refused:
        pages.refuse(np.array([5000, 100]), np.array([6000, 9000]))
    assert refused.value.message == (
        f"{bin_path(prefix)} was not what was written when bytes 100 to 8,999 were read first, and is when "
        "they are read again."
    )
    assert refused.value.remedy.startswith("The memory of this machine or its disk fails")


@pytest.mark.parametrize("page", [1, 2])  # of the first block, and of the second
def test_a_sum_of_a_page_that_contradicts_that_of_its_block_is_told_as_the_damage(
    prefix: Path, page: int
) -> None:
    damage(sums_path(prefix), 4 * page)
    pages, first = IndexedDataset(prefix).pages, page * PAGE_BYTES
    assert pages is not None
    pages.check(np.array([0]), np.array([first]))
    with pytest.raises(DataError) as refused:
        pages.check(np.array([first]), np.array([first + 1]))
    assert refused.value.message == (
        f"{sums_path(prefix)} is not what was written: its sum of bytes {first:,} on of pair.bin contradicts "
        "that of the block around them."
    )


def test_pairs_are_compared_with_their_seals_up_to_a_number_of_bytes_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = [written(tmp_path / name).prefix for name in "ab"]
    unsealed = written(tmp_path / "c", facts=None).prefix
    size = sum(path(prefixes[0]).stat().st_size for path in (bin_path, idx_path))
    both = idx_path(unsealed).stat().st_size + 2 * size
    damage(bin_path(prefixes[1]), 100)
    monkeypatch.setattr("bloomery.data.pairs._CHECKED_AT_START_BYTES", both - 1)
    refuse_damaged([unsealed, *prefixes])
    monkeypatch.setattr("bloomery.data.pairs._CHECKED_AT_START_BYTES", both)
    with pytest.raises(DataError, match=r"b\.bin is not what was written, somewhere in bytes 0 to 4,095\."):
        refuse_damaged([unsealed, *prefixes])
    monkeypatch.setattr("bloomery.data.pairs._CHECKED_AT_START_BYTES", 0)
    refuse_damaged(prefixes)
    with idx_path(prefixes[1]).open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"b\.idx has .* bytes; .* were written\."):
        refuse_damaged(prefixes)


@pytest.mark.parametrize(
    ("ranges", "joined"),
    [
        ([], []),
        ([(0, 5)], [(0, 5)]),
        ([(0, 5), (5, 9), (9, 11)], [(0, 11)]),
        ([(0, 5), (6, 9), (9, 11), (20, 21)], [(0, 5), (6, 11), (20, 21)]),
    ],
)
def test_neighbouring_damage_is_told_as_one(
    ranges: list[tuple[int, int]], joined: list[tuple[int, int]]
) -> None:
    assert list(_joined(ranges)) == joined


def test_damage_in_several_places_is_told_place_by_place(prefix: Path) -> None:
    for place in (0, 4097, 8191, 12_288, 20_679):
        damage(bin_path(prefix), place)
    said = f"{bin_path(prefix)} is not what was written, somewhere in bytes"
    found = verify_pair(prefix, vocabulary_size=70_000)
    assert found.findings == tuple(
        f"{said} {place}." for place in ("0 to 8,191", "12,288 to 16,383", "20,480 to 20,679")
    )
    assert (found.documents, found.tokens, found.vocabulary_size, found.skipped) == (1, TOKENS, 70_000, ())


def test_what_all_seals_agree_on_is_what_a_joined_pair_says(tmp_path: Path) -> None:
    facts = [FACTS, SealFacts(vocabulary_size=300, end_of_document_id=8, engine="an engine"), None]
    pairs = [written(tmp_path / str(number), facts=one) for number, one in enumerate(facts)]
    assert agreed_facts(pairs[:1]) == FACTS
    assert agreed_facts(pairs[:2]) == SealFacts(vocabulary_size=300, engine="an engine")
    assert agreed_facts(pairs) == SealFacts()


def test_a_pair_that_is_there_is_sealed_as_its_writer_would_have(prefix: Path) -> None:
    before = seal_path(prefix).read_bytes(), sums_path(prefix).read_bytes()
    seal(prefix, vocabulary_size=300, end_of_document_id=7, engine="an engine", block_bytes=8192)
    assert (seal_path(prefix).read_bytes(), sums_path(prefix).read_bytes()) == before
    with IndexedWriter(prefix, dtype="<u2") as writer:
        writer.add_document([1])
    assert not seal_path(prefix).exists(), "the seal of older tokens is gone"


def test_documents_that_no_pair_can_hold_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokens cannot be stored as float32"):
        IndexedWriter(tmp_path / "a", dtype=np.float32)
    with pytest.raises(DataError) as refused, IndexedWriter(tmp_path / "a", dtype="<i2") as writer:
        writer.add_documents(np.array([1, 2]), np.array([2]))
        writer.add_documents(np.array([3, 4, 5, 40_000, -40_000]), np.array([2, 0, 1, 2]))
    assert refused.value.message == (
        f"Document 4 of {tmp_path / 'a'} has token ids from -40000 to 40000, which int16 cannot hold."
    )
    long = np.array([5, (1 << 31) - 1, 1 << 31])
    with pytest.raises(DataError) as refused, IndexedWriter(tmp_path / "a", dtype="<u2") as writer:
        writer.add_document([7])
        writer.add_documents(np.array([1]), long)
    assert refused.value.message == (
        f"Document 3 of {tmp_path / 'a'} has 2,147,483,648 tokens; the layout allows 2,147,483,647."
    )


def test_tokens_and_documents_beyond_a_pair_are_refused(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    assert dataset.window(TOKENS - 1, 1).tolist() == [(TOKENS - 1) % 300]
    assert dataset.window(TOKENS, 0).size == 0
    for start, count in ((-1, 1), (0, TOKENS + 1), (TOKENS, 1), (3, -1)):
        with pytest.raises(IndexError, match=f"tokens {start} to {start + count} of {TOKENS}"):
            dataset.window(start, count)
    assert dataset.part(range(0, 1)).token_count == TOKENS and dataset.part(range(1, 1)).token_count == 0
    for documents in (range(-1, 1), range(0, 2), range(1, 0)):
        with pytest.raises(IndexError, match=f"documents {documents.start} to {documents.stop} of 1"):
            dataset.part(documents)


def test_a_document_of_a_prompt_and_an_answer_has_two_sequences(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", dtype="<u2") as writer:
        writer.add_documents(np.arange(9), np.array([4, 2, 3]), prompts=np.array([1, 2, 0]))
        assert (writer.document_count, writer.token_count) == (3, 9)
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.sequence_lengths.tolist() == [1, 3, 2, 3]
    assert dataset.document_indices.tolist() == [0, 2, 3, 4]
    assert [dataset.document(number).tolist() for number in range(3)] == [[0, 1, 2, 3], [4, 5], [6, 7, 8]]
    part = dataset.part(range(1, 3))
    assert (part.first_byte, part.sequence_lengths.tolist()) == (8, [2, 3])
    assert part.document_indices.tolist() == [0, 1, 2] and part.pointers.tolist() == [8, 12]
    assert dataset.document_starts.tolist() == [0, 4, 6, 9]
    assert dataset.part(range(1, 3)).document_starts.tolist() == [0, 2, 5]
