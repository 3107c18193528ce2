"""The indexed layout by a second writer, that knows only the table of the format."""

from __future__ import annotations

import struct


def independent_pair(documents: list[list[int]], *, code: int) -> tuple[bytes, bytes]:
    """(.idx, .bin), field by field with struct."""
    letter, size = {8: ("H", 2), 4: ("i", 4)}[code]
    tokens = b"".join(struct.pack(f"<{letter}", token) for document in documents for token in document)
    lengths, pointers, indices, place = [], [], [0], 0
    for document in documents:
        if document:
            lengths.append(len(document))
            pointers.append(place)
            place += size * len(document)
        indices.append(len(lengths))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(indices))
    index += b"".join(struct.pack("<i", length) for length in lengths)
    index += b"".join(struct.pack("<q", number) for number in pointers + indices)
    return index, tokens
