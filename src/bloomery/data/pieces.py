"""Source files cut into pieces of work of about the same size, each tokenised on its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bloomery.data.readers import LINES, PARQUET, SourceFile
from bloomery.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some files, or a part of one, that one worker turns into one pair of indexed files."""

    number: int
    files: tuple[SourceFile, ...]
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As plain data, for the plan on disk and for a worker."""
        files = [[file.key, str(file.path), file.start, file.stop] for file in self.files]
        return {"number": self.number, "size_bytes": self.size_bytes, "files": files}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Piece:
        """The piece that `to_json` described."""
        files = tuple(
            SourceFile(key=key, path=Path(path), start=start, stop=stop)
            for key, path, start, stop in plain["files"]
        )
        return cls(number=plain["number"], files=files, size_bytes=plain["size_bytes"])


def cut(files: Sequence[SourceFile], *, piece_bytes: int) -> list[Piece]:
    """Pieces of about `piece_bytes`, in reading order: large files in parts, small ones together."""
    pieces: list[Piece] = []
    held: list[SourceFile] = []
    held_bytes = 0
    for file in files:
        for part, size in _parts(file, piece_bytes):
            if held and held_bytes + size > piece_bytes:
                pieces.append(Piece(number=len(pieces), files=tuple(held), size_bytes=held_bytes))
                held, held_bytes = [], 0
            held.append(part)
            held_bytes += size
    if held:
        pieces.append(Piece(number=len(pieces), files=tuple(held), size_bytes=held_bytes))
    return pieces


def total_bytes(files: Iterable[SourceFile]) -> int:
    """Bytes of some files on the disk."""
    return sum(_size(file) for file in files)


def _parts(file: SourceFile, piece_bytes: int) -> Iterator[tuple[SourceFile, int]]:
    size = _size(file)
    if size <= piece_bytes or not file.path.name.endswith((*LINES, *PARQUET)):
        yield file, size
        return
    if file.path.name.endswith(PARQUET):
        yield from _row_groups(file, piece_bytes)
        return
    count = -(-size // piece_bytes)
    bounds = [size * number // count for number in range(count + 1)]
    for start, stop in pairwise(bounds):
        yield SourceFile(key=file.key, path=file.path, start=start, stop=stop), stop - start


def _row_groups(file: SourceFile, piece_bytes: int) -> Iterator[tuple[SourceFile, int]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(file.path)
    except (OSError, pa.ArrowException) as damaged:
        raise DataError(
            f"{file.path} is no whole Parquet file: {damaged}.",
            remedy="Copy it again from where it is whole.",
        ) from damaged
    start, held = 0, 0
    for group in range(metadata.num_row_groups):
        size = sum(
            metadata.row_group(group).column(column).total_compressed_size
            for column in range(metadata.num_columns)
        )
        if group > start and held + size > piece_bytes:
            yield SourceFile(key=file.key, path=file.path, start=start, stop=group), held
            start, held = group, 0
        held += size
    yield SourceFile(key=file.key, path=file.path, start=start, stop=metadata.num_row_groups), held


def _size(file: SourceFile) -> int:
    try:
        return file.path.stat().st_size
    except OSError as missing:
        raise DataError(
            f"Cannot read {file.path}: {missing.strerror}.",
            remedy="Check that it is there and yours to read.",
        ) from missing
