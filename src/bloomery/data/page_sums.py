"""Computes the sums of pages: NH of UMAC, brought to 32 bits by multiply-shift; see native/src/pages.cpp.

Two different pages have one sum with a chance of at most 3 in 2^32. The keys are public: the sums find
damage, and no forgery.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from bloomery.data import native_kernels

PAGE_BYTES = 4096
"""What a memory page is at least: to check a page brings nothing from the disk that is not read anyway."""

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
