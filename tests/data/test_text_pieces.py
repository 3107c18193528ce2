"""How text is cut into pieces that workers tokenise."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from bloomery.data.documents import BadDocuments
from bloomery.data.readers import Reading, SourceFile, read_file
from bloomery.data.tokenize_worker import cut_corpus
from bloomery.errors import DataError


def written(directory: Path, name: str, size: int) -> SourceFile:
    (directory / name).write_bytes(b"x" * size)
    return SourceFile(key=name, path=directory / name)


def test_small_files_fill_a_piece_to_its_last_byte_and_a_large_one_is_cut_into_parts(tmp_path: Path) -> None:
    small = [written(tmp_path, name, 50) for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    pieces = cut_corpus(small, piece_bytes=100)
    assert [[file.key for file in piece.files] for piece in pieces] == [["a.jsonl", "b.jsonl"], ["c.jsonl"]]
    assert [(piece.number, piece.size_bytes) for piece in pieces] == [(0, 100), (1, 50)]
    large = cut_corpus([written(tmp_path, "d.jsonl", 250)], piece_bytes=100)
    bounds = [(file.start, file.stop) for piece in large for file in piece.files]
    assert bounds == [(0, 83), (83, 166), (166, 250)]
    assert cut_corpus([], piece_bytes=100) == []


def test_a_file_that_has_no_lines_is_one_piece_however_large(tmp_path: Path) -> None:
    (piece,) = cut_corpus([written(tmp_path, "book.txt", 250)], piece_bytes=100)
    assert piece.size_bytes == 250 and len(piece.files) == 1


def test_a_large_parquet_file_is_cut_between_its_row_groups(tmp_path: Path) -> None:
    path, texts = tmp_path / "table.parquet", [f"{number:04} " + "x" * number for number in range(100)]
    parquet.write_table(pa.table({"text": texts}), path, row_group_size=10, compression="none")
    file = SourceFile(key="table.parquet", path=path)
    metadata = parquet.read_metadata(path)
    sizes = [metadata.row_group(group).column(0).total_compressed_size for group in range(10)]
    pieces = cut_corpus([file], piece_bytes=1500)
    parts = [part for piece in pieces for part in piece.files]
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert (parts[0].start, parts[-1].stop) == (0, 10) and len(parts) > 4
    for piece, (part,) in zip(pieces, (piece.files for piece in pieces), strict=True):
        assert piece.size_bytes == sum(sizes[part.start : part.stop])
        assert piece.size_bytes <= 1500 or part.stop == part.start + 1  # a group is never divided
        assert part.stop == 10 or piece.size_bytes + sizes[part.stop] > 1500
    read = [
        document.text for part in parts for document in read_file(part, reading=Reading(), bad=BadDocuments())
    ]
    assert read == texts


def test_a_large_parquet_file_that_is_not_whole_is_refused_before_it_is_cut(tmp_path: Path) -> None:
    file = written(tmp_path, "table.parquet", 250)
    with pytest.raises(DataError, match=rf"{file.path} is no whole Parquet file: ") as refused:
        cut_corpus([file], piece_bytes=100)
    assert refused.value.remedy == "Copy it again from where it is whole."
