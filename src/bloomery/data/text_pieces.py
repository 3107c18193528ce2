"""Reads plain text whole or in pieces between separators, and holds none that is longer than a limit."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import IO, NamedTuple

from bloomery.data import documents
from bloomery.data.documents import BadText


class TextBetween(NamedTuple):
    """What lies between two separators.

    content: its bytes, or why they were not held. newlines: number of line ends in it. is_edge: whether it is
    the first or the last of its file.
    """

    content: bytes | BadText
    newlines: int
    is_edge: bool


def whole_text(stream: IO[bytes], *, longest_bytes: int) -> bytes | BadText:
    """Return all bytes of a stream after a byte order mark, or BadText where they are too many.

    A stream that is too long is read to its end, where a damaged one raises its error.
    """
    content = stream.read(longest_bytes + 1)
    if len(content) <= longest_bytes:
        return content.removeprefix(codecs.BOM_UTF8)
    size = len(content)
    del content
    while chunk := stream.read(documents.CHUNK_BYTES):
        size += len(chunk)
    return _too_long("a file", size, longest_bytes)


def split_stream(stream: IO[bytes], separator: bytes, *, longest_bytes: int) -> Iterator[TextBetween]:
    """Yield each piece of a stream between separators. Of one that is longer than `longest_bytes` no more
    than that and a chunk is held.
    """
    chunk = stream.read(documents.CHUNK_BYTES)
    buffer, is_first = bytearray(chunk.removeprefix(codecs.BOM_UTF8)), True
    begin = size = newlines = 0  # size, newlines: of the beginning of a piece, which was let go

    def piece(rest: bytearray, *, is_edge: bool) -> TextBetween:
        whole, lines = size + len(rest), newlines + rest.count(b"\n")
        too_long = whole > longest_bytes
        content = _too_long("text", whole, longest_bytes) if too_long else bytes(rest)
        return TextBetween(content, lines, is_edge)

    while chunk:
        start = 0
        while (at := buffer.find(separator, begin)) >= 0:
            yield piece(buffer[start:at], is_edge=is_first)
            is_first, size, newlines = False, 0, 0
            start = begin = at + len(separator)
        kept = len(separator) - 1  # where a separator may have begun
        if size + len(buffer) - start > longest_bytes + kept:
            end = len(buffer) - kept
            size, newlines, start = size + end - start, newlines + buffer.count(b"\n", start, end), end
        del buffer[:start]
        begin = max(0, len(buffer) - kept)  # before it there is none: nothing is searched twice
        chunk = stream.read(documents.CHUNK_BYTES)
        buffer += chunk
    yield piece(buffer, is_edge=True)


def _too_long(what: str, size: int, longest_bytes: int) -> BadText:
    why = f"{what} of {size:,} bytes without a separator; at most {longest_bytes:,} are read"
    return BadText(kind="too long", why=f"{why} (data.separator, data.longest_line_mib)")
