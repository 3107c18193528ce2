"""Writes the seal (checksums) of a token pair, and verifies the pages of a sealed pair at their first use.

A seal is made from the bytes on their way to the disk, or from existing files.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bloomery import durable
from bloomery.data import native_kernels
from bloomery.data.native_kernels import DamagedPage
from bloomery.data.pair_files import bin_path, idx_path, seal_path, sums_path
from bloomery.data.seal import (
    BLOCK_BYTES,
    COPY_AGAIN,
    PAGE_BYTES,
    Seal,
    SealFacts,
    SealOutline,
    Section,
    page_sums,
)
from bloomery.data.storage import as_storage_error, write_whole
from bloomery.errors import DataError

_READ_BYTES = 4 << 20


class RunningSums:
    """The sums of a file's blocks and pages, from bytes that are given in any pieces, in their order.

    write_pages: takes the sums of pages as they come, 4 bytes each.
    """

    def __init__(self, *, block_bytes: int, write_pages: Callable[[bytes], Any]) -> None:
        self._unit = max(block_bytes, PAGE_BYTES)
        if self._unit % block_bytes or self._unit % PAGE_BYTES:
            raise ValueError(f"blocks of {block_bytes} bytes do not fit to pages of {PAGE_BYTES}")
        self._block_bytes, self._write_pages = block_bytes, write_pages
        self._held = bytearray()  # the beginning of a unit
        self._pages = xxhash.xxh3_64()
        self.blocks, self.bytes, self.page_count = array("Q"), 0, 0

    def update(self, content: bytes | memoryview) -> None:
        """Take the next bytes."""
        view = memoryview(content).cast("B")
        self.bytes += len(view)
        if self._held:
            missing = self._unit - len(self._held)
            self._held += view[:missing]
            view = view[missing:]
            if len(self._held) < self._unit:
                return
            self._sum(memoryview(self._held))
            self._held = bytearray()
        whole = len(view) - len(view) % self._unit
        if whole:
            self._sum(view[:whole])
        self._held += view[whole:]

    def finish(self) -> None:
        """Take the end of the file."""
        if self._held:
            self._sum(memoryview(self._held))
            self._held = bytearray()

    def pages_section(self, *, offset: int) -> Section:
        """Return the section of the sums file that holds the sums of all pages."""
        return Section(offset=offset, size=4 * self.page_count, xxh3_64=self._pages.intdigest())

    def _sum(self, content: memoryview) -> None:
        sums = page_sums(np.frombuffer(content, dtype=np.uint8)).astype("<u4", copy=False).tobytes()
        self._pages.update(sums)
        self._write_pages(sums)
        self.page_count += len(sums) // 4
        for start in range(0, len(content), self._block_bytes):
            self.blocks.append(xxhash.xxh3_64_intdigest(content[start : start + self._block_bytes]))


class SealWriter:
    """Writes the seal of a pair whose bytes are given to `tokens` and `index`; close it, whatever happens.

    The sums of the pages of tokens go to the disk as they come: of 1 TB they take 1 GB.
    """

    def __init__(self, prefix: Path, facts: SealFacts, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._prefix, self._facts, self._block_bytes = prefix, facts, block_bytes
        self._partial = sums_path(prefix).with_name(sums_path(prefix).name + ".partial")
        with as_storage_error(self._partial):
            self._file = self._partial.open("wb")
        self._index_pages = bytearray()
        self.tokens = RunningSums(block_bytes=block_bytes, write_pages=self._file.write)
        self.index = RunningSums(block_bytes=block_bytes, write_pages=self._index_pages.extend)

    def commit(self) -> None:
        """Put the sums and then the seal in place. The pair itself is in its place already."""
        self.tokens.finish()
        self.index.finish()
        sections = {(".bin", "pages"): self.tokens.pages_section(offset=0)}
        end = sections[".bin", "pages"].size
        with as_storage_error(self._partial):
            for ending, kind, content in (
                (".bin", "blocks", _plain(self.tokens.blocks)),
                (".idx", "blocks", _plain(self.index.blocks)),
                (".idx", "pages", bytes(self._index_pages)),
            ):
                self._file.write(bytes(-end % 8))
                end += -end % 8
                self._file.write(content)
                sections[ending, kind] = Section.of(content, offset=end)
                end += len(content)
            self._file.flush()
            durable.sync_file(self._file.fileno())
            durable.replace(self._partial, sums_path(self._prefix))
        outline = SealOutline(
            facts=self._facts,
            block_bytes=self._block_bytes,
            sizes={".bin": self.tokens.bytes, ".idx": self.index.bytes},
            sections=sections,
        )
        write_whole(seal_path(self._prefix), outline.to_bytes())

    def close(self) -> None:
        """Remove what was not committed."""
        with suppress(OSError):  # a full disk was reported already; closing tries to write once more
            self._file.close()
        self._partial.unlink(missing_ok=True)


def _plain(sums: array[int]) -> bytes:
    return np.frombuffer(sums, dtype=np.uint64).astype("<u8", copy=False).tobytes() if sums else b""


def seal(
    prefix: Path,
    *,
    vocabulary_size: int | None,
    end_of_document_id: int | None,
    engine: str | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Seal a pair that is there already by reading it once; `IndexedWriter` seals as it writes."""
    facts = SealFacts(vocabulary_size=vocabulary_size, end_of_document_id=end_of_document_id, engine=engine)
    writer = SealWriter(prefix, facts, block_bytes=block_bytes)
    try:
        for path, sums in ((bin_path(prefix), writer.tokens), (idx_path(prefix), writer.index)):
            with as_storage_error(path), path.open("rb") as file:
                while piece := file.read(_READ_BYTES):
                    sums.update(piece)
        writer.commit()
    finally:
        writer.close()


Offsets = npt.NDArray[np.int64]


class _Pages(ctypes.Structure):
    """`bloomery_pages` of the native library."""

    _fields_ = (
        ("content", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("sums", ctypes.c_void_p),
        ("checked", ctypes.c_void_p),
    )


class PageCheck:
    """Which pages of a mapped file were found to be what was written; threads may share it.

    Two threads that meet a new page at one time both check it, which harms nobody. The bits of pages take 32
    MB for 1 TB, of which only those that were touched are in memory.

    address: of what the native library reads the pages by.
    """

    def __init__(self, prefix: Path, path: Path, content: mmap.mmap | bytes, seal: Seal) -> None:
        sealed = seal.files[path.suffix]
        assert sealed.page_sums is not None, "the seal has sums of pages"
        self._prefix, self._path, self._sealed, self._block_bytes = prefix, path, sealed, seal.block_bytes
        self._content = np.frombuffer(content, dtype=np.uint8)
        self._sums = sealed.page_sums
        self._checked = np.zeros(-(-self._sums.size // 64) + 1, dtype=np.uint64)
        self._lock = threading.Lock()
        self._is_right = False  # all of it
        self._pages = _Pages(
            self._content.ctypes.data,
            self._content.size,
            self._sums.ctypes.data,
            self._checked.ctypes.data,
        )
        self.address = ctypes.addressof(self._pages)

    def check(self, begins: Offsets, ends: Offsets) -> None:
        """Raise DataError where a page of the byte ranges [begin, end) is not what was written."""
        try:
            if not native_kernels.check_pages(self.address, begins, ends):
                for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                    self._check(begin, end)
        except DamagedPage:
            self.refuse(begins, ends)

    def check_all(self) -> None:
        """Raise DataError where any page is not what was written.

        An index is asked at each document that is looked up, so only the first call goes over the pages.
        """
        if not self._is_right:
            self.check(np.array([0]), np.array([self._content.size]))
            self._is_right = True

    @property
    def checked_pages(self) -> int:
        """How many pages were checked so far."""
        return int(np.unpackbits(self._checked.view(np.uint8)).sum())

    def refuse(self, begins: Offsets, ends: Offsets) -> None:
        """Raise the DataError of the first page of these ranges that differs; call it when one did."""
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            self._check(begin, end)
        raise DataError(
            f"{self._path} was not what was written when bytes {int(begins.min()):,} to "
            f"{int(ends.max()) - 1:,} were read first, and is when they are read again.",
            remedy="The memory of this machine or its disk fails: test both before you go on.",
        )

    def _check(self, begin: int, end: int) -> None:
        """The same of one range, by sums that are computed here."""
        pages = np.arange(begin // PAGE_BYTES, -(-end // PAGE_BYTES))
        words, bits = pages // 64, np.uint64(1) << (pages % 64).astype(np.uint64)
        pages, words, bits = (of[self._checked[words] & bits == 0] for of in (pages, words, bits))
        for page, word, bit in zip(pages.tolist(), words.tolist(), bits, strict=True):
            content = self._content[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
            if page_sums(content)[0] != self._sums[page]:
                raise self._damaged(page)
            with self._lock:
                self._checked[word] |= bit

    def _damaged(self, page: int) -> DataError:
        if self._block_is_whole(page):
            return DataError(
                f"{sums_path(self._prefix)} is not what was written: its sum of bytes "
                f"{page * PAGE_BYTES:,} on of {self._path.name} contradicts that of the block around them.",
                remedy=COPY_AGAIN,
            )
        last = min((page + 1) * PAGE_BYTES, self._sealed.bytes) - 1
        return DataError(
            f"{self._path} is not what was written, somewhere in bytes {page * PAGE_BYTES:,} to {last:,}.",
            remedy="Copy the pair again from where it is whole, or remove it and tokenise again; "
            f"`bloomery data verify {self._prefix}` names all that differs.",
        )

    def _block_is_whole(self, page: int) -> bool:
        """Whether the blocks that a page lies in are what their own sums say."""
        size = self._block_bytes
        first = page * PAGE_BYTES // size
        last = (min((page + 1) * PAGE_BYTES, self._sealed.bytes) - 1) // size
        return all(
            xxhash.xxh3_64_intdigest(self._content[block * size : (block + 1) * size].tobytes()) == block_sum
            for block, block_sum in enumerate(self._sealed.block_sums[first : last + 1].tolist(), first)
        )
