"""Cuts append-only files into pieces for upload; each can be read by itself, and is final once full.

A piece ends where a line ends or, in a file of TensorBoard's, where a record ends. The first piece has the
name of the file, and the others have its name and a number: `events.out.tfevents.1.000002`. The pieces of a
file, one after the other, are the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

PIECE_BYTES = 4 << 20
"""The most bytes of a piece, unless one record is longer. The newest piece is sent again as it grows."""
_LONGEST_RECORD = 64 << 20
"""A longer record of TensorBoard's is taken for damage, after which the file is cut anywhere."""
_HEADER, _FOOTER = 12, 4
_NUMBERED = re.compile(r"(?P<file>.+)\.(?P<number>\d{6})\Z")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of a file. number: from 0."""

    number: int
    content: bytes


def piece_key(file: str, number: int) -> str:
    """Return the name of a piece."""
    return file if number == 0 else f"{file}.{number:06d}"


def file_of(key: str) -> str:
    """Return the name of the file to which a piece would belong by its name."""
    match = _NUMBERED.match(key)
    return match["file"] if match else key


def pieces_by_file(sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the sizes of the pieces of each file, in order.

    sizes: the bytes of each piece, by its name. What follows a missing piece is left out.
    """
    numbered: dict[str, dict[int, int]] = {}
    for key, size in sizes.items():
        match = _NUMBERED.match(key)
        if match is not None and match["file"] in sizes:
            numbered.setdefault(match["file"], {})[int(match["number"])] = size
        else:
            numbered.setdefault(key, {})[0] = size
    return {
        file: [known[number] for number in takewhile(known.__contains__, count())]
        for file, known in numbered.items()
    }


def new_pieces(path: Path, sent: Sequence[int]) -> Iterator[Piece]:
    """Yield the pieces of a file that were not sent yet or have grown, one at a time. Raises OSError.

    A file that has become shorter than what was sent was written anew: all its pieces are yielded.

    sent: the sizes of the pieces that were sent.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        known = list(sent) if size >= sum(sent) else []
        number = max(0, len(known) - 1)
        begin = sum(known[:number])
        while begin < size:
            content = _read_piece(file.fileno(), begin, size, is_records="tfevents" in path.name)
            if not content:
                return
            if number >= len(known) or len(content) > known[number]:
                yield Piece(number=number, content=content)
            elif len(content) < known[number]:
                return  # it was written anew meanwhile: the next call finds it shorter
            begin, number = begin + len(content), number + 1


def _read_piece(file: int, begin: int, size: int, *, is_records: bool) -> bytes:
    """Return the whole lines or records from `begin` on that a piece takes; b"" where none is whole yet."""
    most = PIECE_BYTES
    while True:
        data = os.pread(file, min(most, size - begin), begin)
        end = _whole_records(data) if is_records else data.rfind(b"\n") + 1
        if end or begin + len(data) >= size:
            return data[:end]
        if most > _LONGEST_RECORD:
            return data
        most *= 2


def _whole_records(data: bytes) -> int:
    """Return where the last whole record ends. A record: length, its checksum, bytes, their checksum."""
    end = 0
    while end + _HEADER <= len(data):
        length = int.from_bytes(data[end : end + 8], "little")
        following = end + _HEADER + length + _FOOTER
        if length > _LONGEST_RECORD:
            return len(data)
        if following > len(data):
            break
        end = following
    return end
