"""How text is cut into pieces that workers tokenise."""

from __future__ import annotations

from pathlib import Path

from bloomery.data.readers import SourceFile
from bloomery.data.tokenize_worker import cut


def written(directory: Path, name: str, size: int) -> SourceFile:
    (directory / name).write_bytes(b"x" * size)
    return SourceFile(key=name, path=directory / name)


def test_small_files_fill_a_piece_to_its_last_byte_and_a_large_one_is_cut_into_parts(tmp_path: Path) -> None:
    small = [written(tmp_path, name, 50) for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    pieces = cut(small, piece_bytes=100)
    assert [[file.key for file in piece.files] for piece in pieces] == [["a.jsonl", "b.jsonl"], ["c.jsonl"]]
    assert [(piece.number, piece.size_bytes) for piece in pieces] == [(0, 100), (1, 50)]
    large = cut([written(tmp_path, "d.jsonl", 250)], piece_bytes=100)
    bounds = [(file.start, file.stop) for piece in large for file in piece.files]
    assert bounds == [(0, 83), (83, 166), (166, 250)]
    assert cut([], piece_bytes=100) == []


def test_a_file_that_has_no_lines_is_one_piece_however_large(tmp_path: Path) -> None:
    (piece,) = cut([written(tmp_path, "book.txt", 250)], piece_bytes=100)
    assert piece.size_bytes == 250 and len(piece.files) == 1
