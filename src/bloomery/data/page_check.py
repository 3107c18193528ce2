"""Checks the pages of a local token file when they are read for the first time, against the pair's seal."""

from __future__ import annotations

import ctypes
import mmap
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from bloomery.data import native_kernels
from bloomery.data.native_kernels import DamagedPage
from bloomery.data.pair_files import sums_path
from bloomery.data.seal import COPY_AGAIN, PAGE_BYTES, Seal, page_sums
from bloomery.errors import DataError

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
