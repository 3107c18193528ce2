"""Plain text and tables that are longer than a limit: told by their size, and never held in memory."""

from __future__ import annotations

import gzip
import io
import tracemalloc
from pathlib import Path
from typing import Any

import psutil
import pytest

from bloomery.data import documents, readers
from bloomery.data.documents import BadDocuments, BadText
from bloomery.data.readers import Reading, SourceFile, read_file
from bloomery.data.text_pieces import split_stream
from bloomery.data.tokenize_worker import cut_corpus
from bloomery.errors import DataError

MIB = 1 << 20


def read(path: Path, bad: BadDocuments | None = None, **reading: Any) -> list[str]:
    file = SourceFile(key=path.name, path=path)
    found = read_file(file, reading=Reading(**reading), bad=bad or BadDocuments())
    return [document.text for document in found]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_file_of_one_document_may_be_as_long_as_the_limit_and_no_longer(tmp_path: Path, name: str) -> None:
    path, bad = tmp_path / name, BadDocuments()
    pack = gzip.compress if name.endswith(".gz") else bytes
    path.write_bytes(pack(b"x" * MIB))
    assert read(path, bad, longest_line_mib=1) == ["x" * MIB] and not bad.count
    path.write_bytes(pack(b"x" * (MIB + 1)))
    assert read(path, bad, longest_line_mib=1) == []
    (told,) = bad.entries
    assert (told.kind, told.line) == ("too long", 0)
    assert told.why.startswith("a file of 1,048,577 bytes without a separator; at most 1,048,576 are read")
    assert "data.separator" in told.why and "data.longest_line_mib" in told.why


def test_of_a_text_that_is_too_long_no_more_than_the_limit_is_held(tmp_path: Path) -> None:
    """40 MB without a separator, whole and in pieces, under a limit of 1 MiB."""
    (tmp_path / "a.txt").write_bytes((b"x" * 99 + b"\n") * 400_000 + b"%%end")
    for separator, rest in (("", []), ("%%", ["end"])):
        bad = BadDocuments()
        tracemalloc.start()
        found = read(tmp_path / "a.txt", bad, separator=separator, longest_line_mib=1)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found == rest and [entry.kind for entry in bad.entries] == ["too long"]
        assert most < 4 * documents.CHUNK_BYTES
    assert "text of 40,000,000 bytes" in bad.entries[0].why and bad.entries[0].line == 1


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("separator", [b"%", b"ab", b"abab"])
def test_pieces_that_are_too_long_are_told_and_the_others_are_those_of_a_split(
    monkeypatch: pytest.MonkeyPatch, chunk: int, separator: bytes
) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", chunk)
    wanted = [b"x", b"y\n" * 9, b"", b"z\n\n", b"\n" * 30, b"a", b"1234567", b"12345678"]
    pieces = list(split_stream(io.BytesIO(separator.join(wanted)), separator, longest_bytes=7))
    for found, content in zip(pieces, wanted, strict=True):
        assert found.newlines == content.count(b"\n")
        if len(content) <= 7:
            assert found.content == content
        else:
            assert isinstance(found.content, BadText) and f"text of {len(content)} bytes" in found.content.why
    assert [piece.is_edge for piece in pieces] == [True, *[False] * 6, True]


def test_lines_are_counted_through_a_text_that_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one%%\n" + b"\n" * MIB + b"%%\n\xff")
    bad = BadDocuments()
    assert read(tmp_path / "a.txt", bad, separator="%%", longest_line_mib=1) == ["one"]
    assert [(entry.kind, entry.line) for entry in bad.entries] == [
        ("too long", 1),
        ("not UTF-8", MIB + 3),
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"text\nshort\n" + b"x" * (MIB + 9),
        b'text\nshort\n"' + b"some words\n" * (MIB // 9) + b'"\n',  # a cell of many lines
    ],
)
def test_a_table_with_an_endless_line_or_cell_is_refused_and_not_held(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.csv is no table at line .*(longer|larger|more) than") as refused:
        read(path, longest_line_mib=1)
    assert "data.longest_line_mib" in refused.value.remedy
    assert read(path, longest_line_mib=3)[0] == "short"


def test_a_huge_line_is_not_read_by_each_part_that_it_is_cut_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 MB in 200 parts, which would read 10 MB each: the first one reads all, the others their own."""
    for module in (documents, readers):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 14)
    path, bad = tmp_path / "a.jsonl", BadDocuments()
    path.write_bytes(b'{"text": "one"}\n' + b"x" * 20_000_000 + b'\n{"text": "two"}\n{"text": "three"}\n')
    (piece, *_), parts = cut_corpus([SourceFile(key="a", path=path)], piece_bytes=1 << 30), 200
    assert piece.size_bytes == path.stat().st_size
    pieces = cut_corpus(piece.files, piece_bytes=-(-piece.size_bytes // parts))
    before = psutil.Process().io_counters().read_chars
    found = [
        document.text
        for some in pieces
        for file in some.files
        for document in read_file(file, reading=Reading(longest_line_mib=1), bad=bad)
    ]
    read_bytes = psutil.Process().io_counters().read_chars - before
    assert found == ["one", "two", "three"] and [entry.kind for entry in bad.entries] == ["too long"]
    assert len(pieces) == parts
    assert read_bytes < 3 * path.stat().st_size
