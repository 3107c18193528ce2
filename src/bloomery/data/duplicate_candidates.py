"""Finds pairs of documents with a key in common, by an external sort that needs little memory.

Keys are spread over files by their first bits, and candidates by document; a file with too many records is
divided again. At most _SORTED_AT_ONCE records are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from bloomery.data.storage import as_storage_error
from bloomery.events.records import ProgressCallback

_FILES, _FILE_BITS = 512, 9
_KEY = np.dtype([("key", "<u8"), ("document", "<u8")])
_CANDIDATE = np.dtype([("document", "<u8"), ("earlier", "<u8")])
_SORTED_AT_ONCE, _DIVISION_BITS = 1 << 22, 6  # 512 files are open meanwhile, and systems allow 1,024
_LISTED_AT_ONCE = 1 << 16


class KeyFiles:
    """Takes the keys of documents; documents come in their order.

    directory: where the files are written: 16 bytes for each key, and as much for each pair of candidates.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._stack = directory, ExitStack()
        with as_storage_error(directory):
            paths = [directory / f"keys-{n:03}" for n in range(_FILES)]
            self._files = [self._stack.enter_context(path.open("wb")) for path in paths]

    def add(self, keys: npt.NDArray[np.uint64], documents: npt.NDArray[np.int64]) -> None:
        """Add keys, each of the document beside it."""
        records = np.empty(keys.size, dtype=_KEY)
        records["key"], records["document"] = keys, documents
        with as_storage_error(self._directory):
            _spread(self._files, records, (keys >> np.uint64(64 - _FILE_BITS)).astype(np.int64))

    def candidates(self, documents: int, *, progress: ProgressCallback) -> Iterator[tuple[int, int]]:
        """Yield the numbers (document, earlier document) of pairs that share a key, in ascending order.

        Nothing can be added afterwards. Of n documents that share a key, each later one is paired with the
        first and with the one just before it: fewer than 2n pairs instead of n²/2.

        documents: one more than the largest number of a document.
        """
        self.close()
        with as_storage_error(self._directory), ExitStack() as stack:
            paths = [self._directory / f"pairs-{n:03}" for n in range(_FILES)]
            files = [stack.enter_context(path.open("wb")) for path in paths]
            for number in range(_FILES):
                for pairs in _candidates_in(self._directory / f"keys-{number:03}", bits=_FILE_BITS):
                    _spread(files, pairs, (pairs["document"] * _FILES // max(documents, 1)).astype(np.int64))
                progress("sorting", number + 1, _FILES, "files")
        for number, path in enumerate(paths):
            yield from _candidates_by_document(path)
            progress("removing", number + 1, _FILES, "files")

    def close(self) -> None:
        """Close the files; the directory is the caller's to remove."""
        with as_storage_error(self._directory):
            self._stack.close()


def _spread(files: Sequence[IO[bytes]], records: npt.NDArray[Any], which: npt.NDArray[np.int64]) -> None:
    order = np.argsort(which, kind="stable")
    edges = np.searchsorted(which[order], np.arange(len(files) + 1)).tolist()
    for number, file in enumerate(files):
        if edges[number] < edges[number + 1]:
            file.write(records[order[edges[number] : edges[number + 1]]].tobytes())


def _candidates_in(path: Path, *, bits: int) -> Iterator[npt.NDArray[Any]]:
    """Yield the candidates of a file of keys, and remove it.

    A file that is too large to be sorted in memory is divided by the keys' next bits; one of a single key, as
    that of a text that half of the corpus repeats, is read in order. bits: how many all keys have in common.
    """
    size = path.stat().st_size // _KEY.itemsize
    if size <= _SORTED_AT_ONCE:
        records = np.fromfile(path, dtype=_KEY)
        path.unlink()
        yield from _candidates_among(records[np.lexsort((records["document"], records["key"]))])
    elif len({int(key) for block in _blocks_of(path, size) for key in _ends(block["key"])}) == 1:
        yield from _candidates_of_one_key(_blocks_of(path, size))
        path.unlink()
    else:
        taken = min(_DIVISION_BITS, 64 - bits)

        def bits_of(block: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
            return ((block["key"] << np.uint64(bits)) >> np.uint64(64 - taken)).astype(np.int64)

        for part in _divided(path, size, bits_of, dtype=_KEY):
            yield from _candidates_in(part, bits=bits + taken)


def _divided(
    path: Path,
    size: int,
    which: Callable[[npt.NDArray[Any]], npt.NDArray[np.int64]],
    *,
    dtype: np.dtype[Any],
) -> list[Path]:
    """Distribute the records of a file over 64 new files beside it, in their order, and remove it.

    size: the number of records. which: returns for n records the numbers of the files that they go to, [n].
    """
    parts = [path.with_name(f"{path.name}-{n:03}") for n in range(1 << _DIVISION_BITS)]
    with ExitStack() as stack:
        files = [stack.enter_context(part.open("wb")) for part in parts]
        for block in _blocks_of(path, size, dtype):
            _spread(files, block, which(block))
    path.unlink()
    return parts


def _ends(numbers: npt.NDArray[np.uint64]) -> tuple[np.uint64, np.uint64]:
    return numbers.min(), numbers.max()


def _blocks_of(path: Path, size: int, dtype: np.dtype[Any] = _KEY) -> Iterator[npt.NDArray[Any]]:
    with path.open("rb") as file:
        for start in range(0, size, _SORTED_AT_ONCE):
            yield np.fromfile(file, dtype=dtype, count=min(_SORTED_AT_ONCE, size - start))


def _candidates_among(records: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yield the candidates among records that are sorted by key, then by document."""
    is_new = np.ones(records.size, dtype=bool)
    is_new[1:] = records["key"][1:] != records["key"][:-1]
    first = np.maximum.accumulate(np.where(is_new, np.arange(records.size), 0))
    later = np.flatnonzero(~is_new)
    for earlier in (first[later], later - 1):
        yield _pairs(records["document"][later], records["document"][earlier])


def _candidates_of_one_key(blocks: Iterator[npt.NDArray[Any]]) -> Iterator[npt.NDArray[Any]]:
    """Yield the candidates among records of one key, which come in the order of their documents."""
    first = before = None
    for block in blocks:
        documents = np.unique(block["document"])
        first = documents[0] if first is None else first
        previous = np.concatenate([[documents[0] if before is None else before], documents[:-1]])
        for earlier in (np.full(documents.size, first), previous):
            yield _pairs(documents, earlier)
        before = documents[-1]


def _pairs(documents: npt.NDArray[np.uint64], earlier: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
    pairs = np.empty(documents.size, dtype=_CANDIDATE)
    pairs["document"], pairs["earlier"] = documents, earlier
    return pairs[pairs["document"] > pairs["earlier"]]


def _candidates_by_document(path: Path) -> Iterator[tuple[int, int]]:
    """Yield each candidate of a file once, by document and then by the earlier one, and remove the file.

    A file that is too large to be sorted in memory is divided by document; of one document there are at most
    two candidates for each of its keys.
    """
    size = path.stat().st_size // _CANDIDATE.itemsize
    ends = [_ends(block["document"]) for block in _blocks_of(path, size, _CANDIDATE)]
    low, high = min((low for low, _ in ends), default=0), max((high for _, high in ends), default=0)
    if size <= _SORTED_AT_ONCE or low == high:
        candidates = np.unique(np.fromfile(path, dtype=_CANDIDATE))
        path.unlink()
        for start in range(0, candidates.size, _LISTED_AT_ONCE):
            yield from candidates[start : start + _LISTED_AT_ONCE].tolist()
    else:
        width = np.uint64(-(-(int(high - low) + 1) // (1 << _DIVISION_BITS)))

        def place_of(block: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
            return ((block["document"] - low) // width).astype(np.int64)

        for part in _divided(path, size, place_of, dtype=_CANDIDATE):
            yield from _candidates_by_document(part)
