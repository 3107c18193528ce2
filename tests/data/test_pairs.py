"""Verifying finds damage and says where; merging adds nothing and loses nothing."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tests.independent_indexed import independent_pair

from bloomery.data import pairs, storage
from bloomery.data.indexed import IndexedWriter
from bloomery.data.pair_files import bin_path, idx_path, seal_path
from bloomery.data.pairs import merge_pairs, verify_pair
from bloomery.data.seal import SealFacts, read_seal, verified_pieces
from bloomery.data.sealing import seal
from bloomery.errors import DataError, StorageError

DOCUMENTS = [[1, 2, 3], [], [4, 299], [5]]


def write(prefix: Path, documents: list[list[int]], *, code: int = 8) -> None:
    index, tokens = independent_pair(documents, code=code)
    idx_path(prefix).write_bytes(index)
    bin_path(prefix).write_bytes(tokens)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write(tmp_path / "pair", DOCUMENTS)
    seal(tmp_path / "pair", vocabulary_size=300, end_of_document_id=0)
    return tmp_path / "pair"


def patch(path: Path, place: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[place : place + len(content)] = content
    path.write_bytes(whole)


def test_a_whole_pair_is_whole_and_says_what_was_not_looked_at(prefix: Path) -> None:
    found = verify_pair(prefix)
    assert (found.findings, found.skipped, found.tokens, found.vocabulary_size) == ((), (), 6, 300)
    seal_path(prefix).unlink()
    assert [what.split(":")[0] for what in verify_pair(prefix).skipped] == ["checksums", "ids"]


def test_a_whole_pair_is_whole_however_few_sequences_are_looked_at_at_once(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at_once in (1, 2, 3):
        monkeypatch.setattr(pairs, "_CHUNK_ENTRIES", at_once)
        assert verify_pair(prefix).findings == ()


def test_progress_of_a_verification_goes_up_to_all_tokens_and_no_further(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "_CHUNK_TOKENS", 4)
    told: list[tuple[int, int]] = []
    verify_pair(prefix, progress=lambda what, done, total, unit: told.append((done, total)))
    assert told == [(4, 6), (6, 6)]


def test_an_id_beyond_the_vocabulary_is_placed(prefix: Path) -> None:
    (finding,) = verify_pair(prefix, vocabulary_size=299).findings
    assert "pair.bin: token 4 (byte 8, document 2) has id 299; the vocabulary has 299" in finding
    write(prefix.with_name("wide"), [[3], [-1, 70_000]], code=4)
    (finding,) = verify_pair(prefix.with_name("wide"), vocabulary_size=80_000).findings
    assert "token 1 (byte 4, document 1) has id -1" in finding


def test_a_changed_byte_is_found_in_either_file_and_placed(prefix: Path) -> None:
    patch(bin_path(prefix), 4, b"\x07")
    patch(idx_path(prefix), 34 + 12 * 3 + 8, struct.pack("<q", 0))  # a document index, still in order
    said = verify_pair(prefix).findings
    assert [one.split(" is not what was written")[0] for one in said] == [
        str(bin_path(prefix)),
        str(idx_path(prefix)),
    ]
    assert "bytes 0 to 11" in said[0]


def test_blocks_of_a_large_file_are_told_apart(tmp_path: Path) -> None:
    prefix = tmp_path / "large"
    with IndexedWriter(prefix, dtype="<u2") as writer:
        writer.add_document(np.ones(10 << 20, dtype=np.uint16))
    seal(prefix, vocabulary_size=None, end_of_document_id=None)
    patch(bin_path(prefix), 17 << 20, b"\x02")
    (finding,) = verify_pair(prefix).findings
    assert "bytes 17,825,792 to 17,829,887" in finding


def test_an_index_that_contradicts_itself_is_told(prefix: Path) -> None:
    patch(idx_path(prefix), 34 + 4 * 3 + 8, struct.pack("<q", 4))  # the second sequence's pointer
    patch(idx_path(prefix), 34 + 12 * 3 + 8, struct.pack("<q", 3))  # a document index that goes back
    said = " ".join(verify_pair(prefix).findings)
    assert "sequence 1 begins at byte 4 and not where the one before it ends, byte 6" in said
    assert "document 2 begins before the one before it" in said


def test_the_first_of_all_sequences_without_tokens_is_told(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "_CHUNK_ENTRIES", 1)
    patch(idx_path(prefix), 34, struct.pack("<2i", 0, 0))  # the lengths of the first two
    told = [finding for finding in verify_pair(prefix).findings if "has 0 tokens" in finding]
    assert told == [f"{idx_path(prefix)}: sequence 0 has 0 tokens."]
    apart = [finding for finding in verify_pair(prefix).findings if "begins at byte" in finding]
    assert [finding.partition("begins")[0] for finding in apart] == [f"{idx_path(prefix)}: sequence 1 "]


def test_a_pair_that_cannot_be_read_is_refused(prefix: Path) -> None:
    bin_path(prefix).write_bytes(b"12")
    with pytest.raises(DataError, match="cut short"):
        verify_pair(prefix)


@pytest.mark.parametrize("at_once", [1 << 20, 2])
@pytest.mark.parametrize("code", [8, 4])
def test_a_merged_pair_is_what_one_writer_would_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, at_once: int
) -> None:
    monkeypatch.setattr("bloomery.data.indexed._CHECKED_AT_ONCE", at_once)
    parts = [DOCUMENTS, [], [[]], [[7, 8], []], [[9]]]
    prefixes = [tmp_path / f"part{number}" for number in range(len(parts))]
    for prefix, documents in zip(prefixes, parts, strict=True):
        write(prefix, documents, code=code)
    merged = merge_pairs(prefixes, tmp_path / "all")
    flat = [document for documents in parts for document in documents]
    index, tokens = independent_pair(flat, code=code)
    assert idx_path(tmp_path / "all").read_bytes() == index
    assert bin_path(tmp_path / "all").read_bytes() == tokens
    assert (merged.document_count, merged.token_count) == (8, 9)
    assert verify_pair(tmp_path / "all", vocabulary_size=300).findings == ()


def test_a_merge_tells_of_all_bytes_that_it_copies(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, [[1, 2, 3]], code=4)
    told: list[tuple[int, int, str]] = []

    def progress(what: str, done: int, total: int, unit: str, note: str = "") -> None:
        told.append((done, total, unit))

    merge_pairs([tmp_path / "one", tmp_path / "two"], tmp_path / "all", progress=progress)
    assert told == [(12, 24, "bytes"), (24, 24, "bytes")]


def test_pairs_that_do_not_fit_together_are_refused_and_nothing_is_left(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, apart, out = (prefix.with_name(name) for name in ("wide", "apart", "out"))
    write(wide, [[1]], code=4)
    write(apart, DOCUMENTS)
    patch(idx_path(apart), 34 + 4 * 3 + 16, struct.pack("<q", 12))
    bin_path(apart).write_bytes(bin_path(apart).read_bytes() + b"12")
    for prefixes, said in (
        ([prefix, wide], r"wide holds int32 tokens, and .*out is uint16"),
        ([prefix, apart], r"apart\.idx .* do not adjoin"),
        ([prefix, prefix.with_name("none")], r"none\.idx"),
        ([prefix, out], r"out is one of the pairs"),
    ):
        with pytest.raises(DataError, match=said) as refused:
            merge_pairs(prefixes, out)
        assert refused.value.remedy
    assert not [path for path in prefix.parent.iterdir() if path.name.startswith("out")]
    monkeypatch.chdir(prefix.parent)
    (prefix.parent / "below").mkdir()
    (prefix.parent / "linked").symlink_to(prefix.parent)
    for read_from, to in (
        (prefix, Path(prefix.name)),
        (Path(prefix.name), prefix),
        (prefix, Path("below", "..", prefix.name)),
        (prefix.parent / "linked" / prefix.name, prefix),
    ):
        with pytest.raises(DataError, match="is one of the pairs"):
            merge_pairs([read_from], to)


def test_verifying_holds_some_documents_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million documents: their lengths, beginnings and pointers as whole arrays are 8 MB each."""
    monkeypatch.setattr(pairs, "_CHUNK_ENTRIES", 1 << 14)
    monkeypatch.setattr(pairs, "_CHUNK_TOKENS", 1 << 16)
    count = 1_000_000
    prefix = tmp_path / "many"
    with IndexedWriter(prefix, dtype="<u2", seal=SealFacts(vocabulary_size=10)) as writer:
        writer.add_documents(np.arange(2 * count) % 10, np.full(count, 2, dtype=np.int64))
    tracemalloc.start()
    assert verify_pair(prefix).findings == ()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 6_000_000
    with idx_path(prefix).open("r+b") as file:
        file.seek(34 + 4 * (count - 5))
        file.write((3).to_bytes(4, "little"))
    findings = verify_pair(prefix).findings
    assert any("sequence 999,996 begins" in finding for finding in findings)
    assert any("somewhere in bytes" in finding for finding in findings)
    (strange,) = [finding for finding in verify_pair(prefix, vocabulary_size=9).findings if "id 9" in finding]
    assert "token 9 " in strange and "document 4)" in strange


def test_a_pair_that_lies_under_the_seal_of_another_is_told_and_still_read(
    prefix: Path, tmp_path: Path
) -> None:
    write(tmp_path / "other", [*DOCUMENTS, [1, 2, 3]])
    for path in (bin_path, idx_path):
        path(prefix).write_bytes(path(tmp_path / "other").read_bytes())
    found = verify_pair(prefix)
    assert found.tokens == 9
    for path in (bin_path, idx_path):
        assert any(finding.startswith(f"{path(prefix)} has") for finding in found.findings)


def test_a_pair_that_loses_whole_blocks_while_it_is_copied_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "pair", [list(range(1, 280))] * 4)
    seal(tmp_path / "pair", vocabulary_size=300, end_of_document_id=0, block_bytes=512)
    path, whole = bin_path(tmp_path / "pair"), read_seal(tmp_path / "pair")
    content = path.read_bytes()
    assert b"".join(verified_pieces(path, whole)) == content and len(content) > 1024
    path.write_bytes(content[:1024])
    with pytest.raises(DataError, match=r"has 1,024 bytes; .* were written"):
        list(verified_pieces(path, whole))


def test_two_merges_into_one_pair_never_write_at_a_time(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "other", [[7, 7], [8]])
    monkeypatch.setattr(storage, "_LOCK_TIMEOUT_S", 0.0)
    refused = list[str]()

    def merge_again(*told: object) -> None:
        with pytest.raises(StorageError) as busy:
            merge_pairs([tmp_path / "other"], tmp_path / "out")
        refused.append(busy.value.message)

    merge_pairs([prefix, prefix], tmp_path / "out", progress=merge_again)
    assert refused and f"which works in {tmp_path / 'out.merging'}" in refused[0]
    assert verify_pair(tmp_path / "out").findings == () and not (tmp_path / "out.merging").exists()
    assert merge_pairs([tmp_path / "other"], tmp_path / "out").token_count == 3
