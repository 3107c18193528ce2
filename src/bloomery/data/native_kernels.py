"""Calls the native library's functions that order and read samples, with NumPy arrays as arguments.

Each function returns False if the library is missing or cannot handle the arguments; the caller then computes
the same result with NumPy.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from bloomery.native import library

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]

_POINTER, _INT32, _INT64, _UINT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
_WORD = (1 << 64) - 1
_OUTSIDE, _DAMAGED, _NO_MEMORY = -2, -3, -4
_BEST = 2  # instructions: the best that the processor has
_ARGUMENTS = {
    "permute": (_POINTER, _INT64, _INT64, _POINTER, _INT64, _POINTER),
    "walk_quotas": (_INT64, _POINTER, _INT64, _INT64, _POINTER, _POINTER, _POINTER),
    "mix_block": (_INT64, _POINTER, _POINTER, _INT64, _UINT64, _POINTER, _POINTER),
    "fair_counts": (_INT64, _POINTER, _INT64, _INT64, _INT64, _INT64, _POINTER),
    "fair_block": (_INT64, _POINTER, _INT64, _INT64, _INT64, _POINTER, _POINTER, _POINTER, _POINTER),
    "windows": (_INT64, _POINTER, _UINT64, _UINT64, _POINTER, _POINTER, _INT64, _POINTER),
    "shuffle": (_POINTER, _POINTER, _POINTER, _INT64),
    "cumulate": (_POINTER, _POINTER, _INT64, _POINTER),
    "blend": (_INT64, _POINTER, _INT64, _INT64, _POINTER, _POINTER),
    "page_sums": (_POINTER, _INT64, _INT32, _POINTER),
    "check_pages": (_POINTER, _INT64, _POINTER, _POINTER),
    "gather": (
        *(_POINTER, _INT32, _INT64, _INT64, _POINTER, _POINTER, _INT64, _INT64),
        *(_POINTER, _POINTER, _POINTER),
    ),
    "gather_documents": (
        *(_POINTER, _INT32, _INT64, _POINTER, _POINTER, _INT64, _INT64, _POINTER),
        *(_POINTER, _POINTER, _POINTER, _INT64, _POINTER, _POINTER),
    ),
}


class DamagedPage(Exception):
    """The checksum of a page that was to be read differs from the seal."""


def permute(index: Int64, size: int, keys: npt.NDArray[np.uint64], out: Int64) -> bool:
    """Fill `out` with the values to which the keyed permutations of range(size) send `index`."""
    index = np.ascontiguousarray(index)
    return _call("permute", index, index.size, size, np.ascontiguousarray(keys), keys.size, out)


def walk_quotas(steps: Int64, chairs: int, blocks: int, whole: Int64, residue: Int64, ahead: Int64) -> bool:
    """Advance the state of the quotas by some blocks, in place.

    steps: what rounding down leaves of each dataset's share of a block, in units of 2**-46 samples.
    chairs: number of spare places in each block.
    """
    return _call("walk_quotas", steps.size, steps, chairs, blocks, whole, residue, ahead)


def mix_block(
    quotas: Int64, first_turns: Int64, size: int, key: int, datasets: npt.NDArray[np.int32], turns: Int64
) -> bool:
    """Fill `datasets` and `turns`, each [size], with a block of a mixture."""
    return _call("mix_block", quotas.size, quotas, first_turns, size, key, datasets, turns)


def fair_counts(shares: Int64, share_sum: int, *, begin: int, size: int, blocks: int, counts: Int64) -> bool:
    """Move the datasets' counts at stream index `begin` on by some blocks of `size` samples, in place."""
    return _call("fair_counts", shares.size, shares, share_sum, begin, size, blocks, counts)


def fair_block(
    shares: Int64,
    share_sum: int,
    *,
    begin: int,
    counts: Int64,
    counts_after: Int64,
    datasets: npt.NDArray[np.int32],
    turns: Int64,
) -> bool:
    """Fill `datasets` and `turns`, each [size], with the samples from stream index `begin` on."""
    size = datasets.size
    return _call(
        "fair_block", shares.size, shares, share_sum, begin, size, counts, counts_after, datasets, turns
    )


def windows(sizes: Int64, seed: int, purpose: int, datasets: Int64, turns: Int64, out: Int64) -> bool:
    """Fill `out` with the window that each dataset gives in each turn."""
    return _call("windows", sizes.size, sizes, seed & _WORD, purpose, datasets, turns, turns.size, out)


def shuffle(words: npt.NDArray[np.uint32], place: npt.NDArray[np.int32], values: npt.NDArray[Any]) -> bool:
    """Shuffle 32-bit values as RandomState with this state would, and advance the state."""
    if values.dtype.itemsize != 4 or values.size > 1 << 32:
        return False
    return _call("shuffle", words, place, values, values.size)


def cumulate(lengths: npt.NDArray[np.int32], order: npt.NDArray[Any], ends: Int64) -> bool:
    """Fill `ends` with the running sum of `lengths[order]`; `order` holds 32-bit indices into `lengths`."""
    if order.dtype.itemsize != 4:
        return False
    return _call("cumulate", lengths, order, order.size, ends)


def blend(
    weights: npt.NDArray[np.float64], first: int, counts: Int64, datasets: npt.NDArray[np.uint16]
) -> bool:
    """Fill `datasets` from sample `first` on, and advance `counts`, as Megatron's blend does."""
    return _call("blend", weights.size, weights, first, datasets.size, counts, datasets)


def page_sums(
    content: npt.NDArray[np.uint8], sums: npt.NDArray[np.uint32], *, instructions: int = _BEST
) -> bool:
    """Fill `sums` with the sums of the pages of `content`; instructions: AVX2 at most (1), no vectors (0)."""
    content = np.ascontiguousarray(content)
    return _call("page_sums", content, content.size, instructions, sums)


def check_pages(pages: int, begins: Int64, ends: Int64) -> bool:
    """Check pages of byte ranges, `pages` as PageCheck.address. DamagedPage: one is not what was written."""
    begins, ends = np.ascontiguousarray(begins), np.ascontiguousarray(ends)
    return _call("check_pages", pages, begins.size, begins, ends)


def gather(
    tokens: npt.NDArray[Any],
    type_code: int,
    starts: Int64,
    rows: Int64,
    ahead: int,
    pages: int | None,
    out: Int32,
    largest: npt.NDArray[np.uint64],
) -> bool:
    """Fill rows of `out` with samples of a file; see reading.read_rows.

    pages: the file's PageCheck.address; None checks no page. IndexError: a sample leaves the file.
    DamagedPage: a page is not what was written.
    """
    return _call(
        "gather",
        *(tokens, type_code, tokens.size, rows.size, starts, rows, out.shape[1], ahead),
        *(pages, out, largest),
    )


def gather_documents(
    tokens: npt.NDArray[Any],
    pointers: npt.NDArray[np.int64],
    type_code: int,
    starts: Int64,
    rows: Int64,
    ahead: int,
    pages: int | None,
    *,
    order: npt.NDArray[Any],
    ends: Int64,
    out: Int32,
    largest: npt.NDArray[np.uint64],
) -> bool:
    """Fill rows of `out` with samples of documents in another order; document numbers have 32 bits."""
    if order.dtype.itemsize != 4:
        return False
    return _call(
        "gather_documents",
        *(tokens, type_code, rows.size, starts, rows, out.shape[1], ahead, pages),
        *(pointers, order, ends, ends.size, out, largest),
    )


def _call(name: str, *arguments: Any) -> bool:
    function = _functions().get(name)
    if function is None:
        return False
    plain = [_address(argument) if isinstance(argument, np.ndarray) else argument for argument in arguments]
    status = function(*plain)
    if status == _OUTSIDE:
        raise IndexError(f"bloomery_{name} was asked for what lies outside of its data")
    if status == _DAMAGED:
        raise DamagedPage
    if status == _NO_MEMORY:
        raise MemoryError(f"bloomery_{name} found no memory")
    if status:
        raise AssertionError(f"bloomery_{name} returned {status}")
    return True


def _address(array: Any) -> int:  # types do not know an array as a buffer before Python 3.12
    """Return the address of an array's values. `ndarray.ctypes` takes three times as long, in calls of
    microseconds.
    """
    flags = array.flags
    if flags.writeable and flags.c_contiguous and array.size:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    return int(array.ctypes.data)


@functools.cache
def _functions() -> dict[str, Any]:
    loaded = library()
    functions = {}
    for name, types in _ARGUMENTS.items() if loaded else ():
        function = getattr(loaded, f"bloomery_{name}", None)
        if function is None:  # a library that was built before it had the function
            continue
        function.argtypes, function.restype = types, ctypes.c_int32
        functions[name] = function
    return functions
