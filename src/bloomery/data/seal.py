"""The seal of a token pair: checksums of its blocks and pages, by which damage is found and located.

`PREFIX.seal.json` is small: sizes, vocabulary, what made the tokens, its own checksum, and where in
`PREFIX.seal.sums` which sums lie. That file is mapped and never parsed: for each of both files of the pair
the xxh3-64 of its blocks (u64; one read of a remote pair fetches a block) and the sums of its pages of 4 KiB
(u32). Seals of format 1, which held the blocks' sums as text and no pages, are still read.

The sum of a page is NH of UMAC, brought to 32 bits by multiply-shift; see native/src/pages.cpp. Two different
pages have one sum with a chance of at most 3 in 2^32. The keys are public: the sums find damage, no forgery.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bloomery.data import native_kernels
from bloomery.data.pair_files import bin_path, idx_path, seal_path, sums_path
from bloomery.errors import DataError

PAGE_BYTES = 4096
"""The smallest memory page: checking a page reads nothing from the disk that is not read anyway."""

_ODD = np.uint64(0x9E3779B97F4A7C15)
_PAGES_AT_ONCE = 1024

Sums = npt.NDArray[np.uint32]


def page_sums(content: npt.NDArray[np.uint8]) -> Sums:
    """Return the sum of each page of `content`, [pages]; zeros follow the last byte."""
    sums = np.empty(-(-content.size // PAGE_BYTES), dtype=np.uint32)
    if not native_kernels.page_sums(content, sums):
        plain_page_sums(content, sums)
    return sums


def plain_page_sums(content: npt.NDArray[np.uint8], sums: Sums) -> None:
    """Fill `sums` with the sums of the pages of `content`, by NumPy."""
    keys = _keys()
    for first in range(0, sums.size, _PAGES_AT_ONCE):
        piece = content[first * PAGE_BYTES : (first + _PAGES_AT_ONCE) * PAGE_BYTES]
        pages = -(-piece.size // PAGE_BYTES)
        filled = np.zeros(pages * PAGE_BYTES, dtype=np.uint8)
        filled[: piece.size] = piece
        words = filled.view("<u4").reshape(pages, -1, 2) + keys
        products = words[..., 0].astype(np.uint64) * words[..., 1]
        nh = products.sum(axis=1, dtype=np.uint64)
        sums[first : first + pages] = nh * _ODD >> np.uint64(32)


@functools.cache
def _keys() -> npt.NDArray[Any]:
    """SplitMix64 from 0 on, as pairs of 32-bit words; [words of a page / 2, 2]."""
    state = np.arange(1, PAGE_BYTES // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ mixed >> np.uint64(31)).astype("<u8").view("<u4").reshape(-1, 2)


BLOCK_BYTES = 256 << 10
"""The bytes that one read of a remote pair fetches."""
FORMAT = 2
COPY_AGAIN = "Copy the pair and its seal again from where they are whole, or tokenise again."
_READ_BYTES = 1 << 24
_LARGEST, _LARGEST_BLOCK = 1 << 60, 1 << 30
_DTYPES = {"blocks": "<u8", "pages": "<u4"}

BlockSums = npt.NDArray[np.uint64]
PageSums = npt.NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class SealFacts:
    """What a seal records of the tokens; None: not known. engine: the tokenizer engine that made them."""

    vocabulary_size: int | None = None
    end_of_document_id: int | None = None
    engine: str | None = None


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the sums file: where it begins, its size, and its own xxh3-64."""

    offset: int
    size: int
    xxh3_64: int

    @classmethod
    def of(cls, content: bytes, *, offset: int) -> Section:
        """Return the section that holds `content` from `offset` on."""
        return cls(offset=offset, size=len(content), xxh3_64=xxhash.xxh3_64_intdigest(content))


@dataclass(frozen=True, kw_only=True)
class SealedFile:
    """What a file of a pair was when it was sealed. page_sums: None in a seal of format 1."""

    bytes: int
    block_sums: BlockSums
    page_sums: PageSums | None


@dataclass(frozen=True, kw_only=True)
class Seal:
    """A pair's seal. files: by their ending, '.bin' and '.idx'."""

    facts: SealFacts
    block_bytes: int
    files: Mapping[str, SealedFile]


@dataclass(frozen=True, kw_only=True)
class SealOutline:
    """The content of a seal of format 2: sizes of files by ending, and sections by (ending, kind)."""

    facts: SealFacts
    block_bytes: int
    sizes: Mapping[str, int]
    sections: Mapping[tuple[str, str], Section]

    @property
    def sums_bytes(self) -> int:
        """Size of the sums file."""
        return max(section.offset + section.size for section in self.sections.values())

    def to_bytes(self) -> bytes:
        """Return the seal as it is written, its own checksum included."""
        sections: dict[str, dict[str, Any]] = {}
        for (ending, kind), section in self.sections.items():
            described = {
                "offset": section.offset,
                "bytes": section.size,
                "xxh3_64": f"{section.xxh3_64:016x}",
            }
            sections.setdefault(ending, {})[kind] = described
        content = {
            "format": FORMAT,
            "vocabulary_size": self.facts.vocabulary_size,
            "end_of_document_id": self.facts.end_of_document_id,
            "engine": self.facts.engine,
            "block_bytes": self.block_bytes,
            "page_bytes": PAGE_BYTES,
            "files": {ending: {"bytes": size, **sections[ending]} for ending, size in self.sizes.items()},
            "sums_bytes": self.sums_bytes,
        }
        return json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode()

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> SealOutline:
        """Return what `to_bytes` wrote. Raises ValueError, KeyError or TypeError for anything else."""
        content = {name: value for name, value in plain.items() if name != "checksum"}
        if plain["checksum"] != _checksum(content):
            raise ValueError("its checksum is another")
        if plain["page_bytes"] != PAGE_BYTES:
            raise ValueError(f"pages of {plain['page_bytes']} bytes")
        sections = {
            (ending, kind): Section(
                offset=_number(plain["files"][ending][kind]["offset"]),
                size=_number(plain["files"][ending][kind]["bytes"]),
                xxh3_64=int(plain["files"][ending][kind]["xxh3_64"], 16),
            )
            for ending in (".bin", ".idx")
            for kind in _DTYPES
        }
        sizes = {ending: _number(plain["files"][ending]["bytes"]) for ending in (".bin", ".idx")}
        units = {"blocks": _block_bytes(plain), "pages": PAGE_BYTES}
        for (ending, kind), section in sections.items():
            if section.size != -(-sizes[ending] // units[kind]) * np.dtype(_DTYPES[kind]).itemsize:
                raise ValueError(f"its sums of {kind} are not as many as {ending} has")
        return cls(facts=_facts(plain), block_bytes=units["blocks"], sizes=sizes, sections=sections)


def _checksum(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{value!r:.40} where a number belongs")
    return value


def _block_bytes(plain: Mapping[str, Any]) -> int:
    size = _number(plain["block_bytes"])
    if not 1 <= size <= _LARGEST_BLOCK:
        raise ValueError(f"blocks of {size} bytes")
    return size


def _facts(plain: Mapping[str, Any]) -> SealFacts:
    vocabulary_size, end_of_document_id = (
        None if plain[name] is None else _number(plain[name])
        for name in ("vocabulary_size", "end_of_document_id")
    )
    engine = plain.get("engine")
    return SealFacts(
        vocabulary_size=vocabulary_size,
        end_of_document_id=end_of_document_id,
        engine=None if engine is None else str(engine),
    )


def parse_seal(content: bytes) -> SealOutline | Seal:
    """Return what a `.seal.json` says: of format 2 its outline, of format 1 all of it.

    Raises ValueError where it is no seal, is damaged or of a later format.
    """
    try:
        plain = json.loads(content)
        if plain["format"] == FORMAT:
            return SealOutline.from_plain(plain)
        if plain["format"] != 1:
            raise ValueError(f"it is of format {plain['format']}, and formats 1 and 2 are known")
        block_bytes = _block_bytes(plain)
        files = {
            ending: SealedFile(
                bytes=_number(plain["files"][ending]["bytes"]),
                block_sums=np.array(
                    [int(block_sum, 16) for block_sum in plain["files"][ending]["xxh3_64"]], np.uint64
                ),
                page_sums=None,
            )
            for ending in (".bin", ".idx")
        }
        for ending, file in files.items():
            if file.block_sums.size != -(-file.bytes // block_bytes):
                raise ValueError(f"its sums of blocks are not as many as {ending} has")
        return Seal(facts=_facts(plain), block_bytes=block_bytes, files=files)
    except KeyError as wrong:
        raise ValueError(f"it lacks {wrong}") from wrong
    except (TypeError, AttributeError, OverflowError, RecursionError) as wrong:
        raise ValueError(f"a value has another form: {wrong}") from wrong


def read_seal(prefix: Path) -> Seal | None:
    """Return a pair's seal, its sums mapped; None where the pair has none.

    The seal's own checksum and the size of the sums file are looked at, the sums' checksum is not (see
    `damaged_sums`). Raises DataError for a seal that is damaged.
    """
    try:
        content = seal_path(prefix).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as unreadable:
        raise DataError(
            f"Cannot read {seal_path(prefix)}: {unreadable.strerror}.",
            remedy="Check that it is yours to read.",
        ) from unreadable
    try:
        parsed = parse_seal(content)
    except ValueError as wrong:
        raise DataError(
            f"{seal_path(prefix)} is damaged: it no longer says what was written ({wrong}).",
            remedy=COPY_AGAIN,
        ) from wrong
    return parsed if isinstance(parsed, Seal) else _mapped_seal(prefix, parsed)


def _mapped_seal(prefix: Path, outline: SealOutline) -> Seal:
    path = sums_path(prefix)
    try:
        size = path.stat().st_size
        whole = np.memmap(path, dtype=np.uint8, mode="r") if size else np.empty(0, np.uint8)
    except OSError as missing:
        raise DataError(
            f"Cannot read {path}, the checksums of {seal_path(prefix)}: {missing.strerror}.",
            remedy=COPY_AGAIN,
        ) from missing
    if size != outline.sums_bytes:
        raise DataError(f"{path} has {size:,} bytes; {outline.sums_bytes:,} were written.", remedy=COPY_AGAIN)

    def sums(ending: str, kind: str) -> npt.NDArray[Any]:
        section = outline.sections[ending, kind]
        return whole[section.offset : section.offset + section.size].view(_DTYPES[kind])

    return Seal(
        facts=outline.facts,
        block_bytes=outline.block_bytes,
        files={
            ending: SealedFile(
                bytes=outline.sizes[ending],
                block_sums=sums(ending, "blocks"),
                page_sums=sums(ending, "pages"),
            )
            for ending in (".bin", ".idx")
        },
    )


def damaged_sums(prefix: Path) -> list[str]:
    """Compare the sums of a sealed pair with their own checksums; return a sentence for each that differs."""
    outline = parse_seal(seal_path(prefix).read_bytes())
    if isinstance(outline, Seal):
        return []
    findings = []
    with sums_path(prefix).open("rb") as file:
        for section in outline.sections.values():
            digest, left = xxhash.xxh3_64(), section.size
            file.seek(section.offset)
            while left and (piece := file.read(min(left, 1 << 22))):
                digest.update(piece)
                left -= len(piece)
            if digest.intdigest() != section.xxh3_64:
                last = section.offset + section.size - 1
                findings.append(
                    f"{sums_path(prefix)} is not what was written, somewhere in bytes {section.offset:,} to "
                    f"{last:,}: the checksums are damaged."
                )
    return findings


def refuse_other_sizes(prefix: Path, seal: Seal) -> None:
    """Raise DataError where a file of a pair has another size than its seal says."""
    for path in (bin_path(prefix), idx_path(prefix)):
        size = path.stat().st_size
        if size != seal.files[path.suffix].bytes:
            raise DataError(
                f"{path} has {size:,} bytes; {seal.files[path.suffix].bytes:,} were written.",
                remedy="Copy the pair again from where it is whole, or remove it and tokenise again; "
                "`bloomery data verify` names all that differs.",
            )


def verified_pieces(path: Path, seal: Seal | None) -> Iterator[bytes]:
    """Yield the content of a file of a pair, each block compared with its seal; without one, as it is.

    Raises DataError at the first block that differs, and where the file has another size.
    """
    size = seal.block_bytes if seal else BLOCK_BYTES
    place = 0
    try:
        with path.open("rb") as file:
            while piece := file.read(max(1, _READ_BYTES // size) * size):
                if seal is not None:
                    _refuse_other_blocks(path, piece, seal, place=place)
                place += len(piece)
                yield piece
    except OSError as unreadable:
        raise DataError(
            f"Cannot read {path}: {unreadable.strerror}.", remedy="Check the disk that it is on."
        ) from unreadable
    if seal is not None and place != seal.files[path.suffix].bytes:
        raise DataError(
            f"{path} has {place:,} bytes; {seal.files[path.suffix].bytes:,} were written.", remedy=COPY_AGAIN
        )


def _refuse_other_blocks(path: Path, piece: bytes, seal: Seal, *, place: int) -> None:
    """Raise DataError where a block of the bytes from `place` on differs from its sum."""
    size, sums = seal.block_bytes, seal.files[path.suffix].block_sums
    view = memoryview(piece)
    for start in range(0, len(piece), size):
        block = view[start : start + size]
        number = (place + start) // size
        if number >= sums.size or xxhash.xxh3_64_intdigest(block) != int(sums[number]):
            raise DataError(
                f"{path} is not what was written, somewhere in bytes {place + start:,} to "
                f"{place + start + len(block) - 1:,}.",
                remedy=COPY_AGAIN,
            )
