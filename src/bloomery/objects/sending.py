"""Sends one object in parts, hashed on the way, and compares the store's own checksum of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_PART_BYTES, _MOST_PARTS = 5 << 20, 9_000
"""S3 takes 10,000 parts of an object, none but the last below 5 MiB."""


@dataclass(frozen=True, kw_only=True)
class SentFile:
    """A file that was sent. xxh3_128: of the bytes that were read from the disk and sent.

    is_proven: whether the store answered with the MD5 of these bytes. Stores that speak S3 do, unless they
    encrypt with keys of their own; nothing is known where they do not.
    """

    xxh3_128: str
    is_proven: bool


def send_file(store: ObjectStore, key: str, path: Path) -> SentFile:
    """Send a file, hashed while it is read."""
    size, whole = path.stat().st_size, xxhash.xxh3_128()

    def pieces() -> Iterator[bytes]:
        with path.open("rb") as file:
            while piece := file.read(part_size(size)):
                whole.update(piece)
                yield piece

    is_proven = send_pieces(store, key, size=size, pieces=pieces())
    return SentFile(xxh3_128=whole.hexdigest(), is_proven=is_proven)


def send_pieces(store: ObjectStore, key: str, *, size: int, pieces: Iterable[bytes | memoryview]) -> bool:
    """Send `size` bytes that come in pieces; say whether the store answered with the checksum of them.

    The ETag of an object that was sent in parts is the MD5 of the parts' MD5s, and their number. See
    docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html. Where the sending fails,
    obstore aborts the upload, and the store keeps no part of it.
    """
    import obstore

    part_bytes, sums = part_size(size), list[bytes]()

    def parts() -> Iterator[bytes]:
        for part in regrouped(pieces, part_bytes):
            sums.append(hashlib.md5(part, usedforsecurity=False).digest())
            yield part

    if size <= part_bytes:
        result = obstore.put(store, key, b"".join(parts()), use_multipart=False)
        expected = sums[0].hex() if sums else ""
    else:
        result = obstore.put(store, key, parts(), chunk_size=part_bytes)
        expected = f"{hashlib.md5(b''.join(sums), usedforsecurity=False).hexdigest()}-{len(sums)}"
    mark = (result["e_tag"] or "").strip('"')
    return bool(expected) and mark == expected


def part_size(size: int) -> int:
    """Return the bytes of each part of an object of `size` bytes."""
    return max(_PART_BYTES, -(-size // _MOST_PARTS))


def regrouped(pieces: Iterable[bytes | memoryview], part_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of the pieces in parts of `part_bytes`; the last may be shorter."""
    held = bytearray()
    for piece in pieces:
        if not held and len(piece) == part_bytes and isinstance(piece, bytes):
            yield piece
            continue
        held += piece
        while len(held) >= part_bytes:
            yield bytes(held[:part_bytes])
            del held[:part_bytes]
    if held:
        yield bytes(held)
