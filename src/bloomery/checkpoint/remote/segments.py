"""Keeps files that grow as segments in a store: a call sends what is new, and fetching joins the segments.

What is new becomes a segment, together with the last ones where those are not twice as long. So a file has
few short segments, a byte is sent again only when it comes into a longer one, and a full segment is final.

The key of a segment holds the digest of its bytes, so none is ever overwritten. An index names the segments
of a file; it is written after them, as one object. So a fetch gets one state of the file, whether an upload
was interrupted or two machines sent at once.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import BinaryIO

import xxhash

from bloomery.objects import Objects

log = logging.getLogger(__name__)

WHOLE_BYTES = 1 << 20
"""The most bytes of a file that is sent as one object of its own name."""
SEGMENT_BYTES = 16 << 20
"""The bytes of a full segment."""
_PREFIX, _INDEX, _FORMAT = "segments", "index.json", 1
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The bytes of a file after those of the segment before. xxh3_128: their digest."""

    bytes: int
    xxh3_128: str


class SegmentsLost(Exception):
    """A store no longer has a file as it was sent; the message names the object at fault."""


def is_segmented(size: int) -> bool:
    """Whether a file of so many bytes is kept as segments."""
    return size > WHOLE_BYTES


def send_segments(
    remote: Objects, name: str, path: Path, *, has_only_grown: bool, go_on: Callable[[], bool]
) -> tuple[int, bool]:
    """Send what a store lacks of a file; return the bytes that were sent, and whether it now has all of it.

    has_only_grown: the file is the one that the last call sent, and no shorter. Then the end of what that
        call sent is compared, and nothing before it is read. Otherwise all of the file is compared.
    go_on: asked before each segment is sent.
    Raises OSError.
    """
    known = _known(remote, name)
    listed = {entry.key for entry in remote.entries(f"{_PREFIX}/{name}/")}
    sent = 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        held = _held(file, known, only_last=has_only_grown)
        there = takewhile(lambda pair: pair[0] in listed, zip(_keys(name, held), held, strict=True))
        segments = _kept([segment for _, segment in there], size)
        begin = file.seek(_total(segments))
        while content := file.read(max(0, min(SEGMENT_BYTES, size - begin))):
            segment = Segment(bytes=len(content), xxh3_128=xxhash.xxh3_128_hexdigest(content))
            key = _key(name, len(segments), segment)
            if key not in listed:
                if not go_on():
                    return sent, False
                _send(remote, key, content, segment)
                sent += len(content)
            segments.append(segment)
            begin += len(content)
    if segments != known:
        _write_index(remote, name, segments)
    if _has_bytes(remote, name):  # it was sent as one object before, which would count in place of these
        remote.put(name, b"")
    _remove(remote, set(_keys(name, known)) - set(_keys(name, segments)))
    return sent, True


def drop_segments(remote: Objects, name: str) -> None:
    """Forget the segments of a file that is sent as one object again. Raises OSError."""
    known = _known(remote, name)
    if known:
        _write_index(remote, name, [])
        _remove(remote, _keys(name, known))


def segmented_files(remote: Objects) -> list[str]:
    """Return the names of the files that a store may hold in segments. Raises OSError."""
    entries = (entry.key for entry in remote.entries(f"{_PREFIX}/"))
    ends = [key.removesuffix(f"/{_INDEX}") for key in entries if key.endswith(f"/{_INDEX}")]
    return [end.removeprefix(f"{_PREFIX}/") for end in ends]


def fetch_segments(remote: Objects, name: str, file: BinaryIO) -> bool:
    """Join the segments of a file of a store into `file`; return False where the store has none.

    Each segment is compared with its digest. One that is gone because the file was sent again meanwhile is
    looked for in the index that is there now.
    Raises SegmentsLost where a segment is missing or is not what was sent, and OSError.
    """
    segments = _readable_index(remote, name)
    place = 0
    while place < len(segments):
        key = _key(name, place, segments[place])
        try:
            _fetch(remote, key, segments[place], file)
            place += 1
        except FileNotFoundError:
            newer = _readable_index(remote, name)
            if newer == segments:
                raise SegmentsLost(f"{remote.place(key)} is no longer there") from None
            alike = takewhile(lambda pair: pair[0] == pair[1], zip(segments[:place], newer, strict=False))
            place, segments = sum(1 for _ in alike), newer
        file.seek(_total(segments[:place]))
        file.truncate()
    return bool(segments)


def _fetch(remote: Objects, key: str, segment: Segment, file: BinaryIO) -> None:
    hasher, count = xxhash.xxh3_128(), 0
    for piece in remote.pieces(key):
        hasher.update(piece)
        count += file.write(piece)
    if (count, hasher.hexdigest()) != (segment.bytes, segment.xxh3_128):
        raise SegmentsLost(f"{remote.place(key)} is not what was sent: it has been damaged since")


def _has_bytes(remote: Objects, name: str) -> bool:
    try:
        return remote.stat(name).bytes > 0
    except FileNotFoundError:
        return False


def _held(file: BinaryIO, known: Sequence[Segment], *, only_last: bool) -> list[Segment]:
    """Return the known segments, from the first on, that a file holds as it held them before.

    only_last: where the last one is held, so are the others: bytes that were added or removed further in
        front would have moved it.
    """
    begins = list(accumulate((segment.bytes for segment in known), initial=0))
    if only_last and known and _holds(file, begins[-2], known[-1]):
        return list(known)
    alike = takewhile(lambda pair: _holds(file, *pair), zip(begins, known, strict=False))
    return [segment for _, segment in alike]


def _holds(file: BinaryIO, begin: int, segment: Segment) -> bool:
    file.seek(begin)
    is_readable = segment.bytes <= SEGMENT_BYTES
    return is_readable and xxhash.xxh3_128_hexdigest(file.read(segment.bytes)) == segment.xxh3_128


def _kept(held: Sequence[Segment], size: int) -> list[Segment]:
    """Return the segments that stay as they are where a file goes on to `size` bytes.

    The others are short beside what comes after them, and become one segment with it.
    """
    kept = list(held)
    new = size - _total(kept)
    while new > 0 and kept and kept[-1].bytes < min(SEGMENT_BYTES, 2 * new):
        new += kept.pop().bytes
    return kept


def _total(segments: Sequence[Segment]) -> int:
    return sum(segment.bytes for segment in segments)


def _send(remote: Objects, key: str, content: bytes, segment: Segment) -> None:
    is_proven = remote.send_pieces(key, size=len(content), pieces=lambda: [memoryview(content)])
    if not is_proven and remote.digest(key) != segment.xxh3_128:
        raise OSError(errno.EIO, f"{remote.place(key)} is not what was sent: it was changed on its way")


def _remove(remote: Objects, keys: Collection[str]) -> None:
    """Remove segments that are in no index; credentials that may not remove anything leave them there."""
    try:
        remote.delete_all(keys)
    except OSError as refused:
        log.info("%d segments that are no longer needed stay where they are: %s", len(keys), refused)


def _known(remote: Objects, name: str) -> list[Segment]:
    """Return the segments that an index names; [] for none, or for one that an upload writes anew."""
    try:
        return _read_index(remote, name)
    except ValueError:
        return []


def _read_index(remote: Objects, name: str) -> list[Segment]:
    """Return the segments of a file; [] where a store has none. Raises ValueError for a damaged index."""
    try:
        stored = json.loads(remote.content(f"{_PREFIX}/{name}/{_INDEX}"))
    except FileNotFoundError:
        return []
    try:
        segments = [Segment(bytes=int(count), xxh3_128=str(digest)) for count, digest in stored["segments"]]
        is_readable = stored["format"] == _FORMAT
    except (TypeError, KeyError) as error:
        raise ValueError("it is damaged") from error
    if not is_readable or not all(_DIGEST.fullmatch(segment.xxh3_128) for segment in segments):
        raise ValueError("it is damaged, or of a later version")
    return segments


def _readable_index(remote: Objects, name: str) -> list[Segment]:
    try:
        return _read_index(remote, name)
    except ValueError as error:
        place = remote.place(f"{_PREFIX}/{name}/{_INDEX}")
        raise SegmentsLost(f"{place} does not tell the segments: {error}") from error


def _write_index(remote: Objects, name: str, segments: Sequence[Segment]) -> None:
    rows = [[segment.bytes, segment.xxh3_128] for segment in segments]
    content = json.dumps({"format": _FORMAT, "segments": rows}) + "\n"
    remote.put(f"{_PREFIX}/{name}/{_INDEX}", content.encode())


def _keys(name: str, segments: Sequence[Segment]) -> list[str]:
    return [_key(name, number, segment) for number, segment in enumerate(segments)]


def _key(name: str, number: int, segment: Segment) -> str:
    return f"{_PREFIX}/{name}/{number:06d}-{segment.xxh3_128}"
