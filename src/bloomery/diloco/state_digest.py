"""The digest of a state that all peers share: of arrays, one rank's tensors, one peer. It needs no torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

if TYPE_CHECKING:
    from torch import Tensor


BLOCK_BYTES = 1 << 20


def rank_digest(tensors: Iterable[Tensor]) -> str:
    """Return the hash of one rank's tensors, in order. They are contiguous and in the CPU's memory."""
    return digest(*(tensor.numpy() for tensor in tensors))


def peer_digest(rank_digests: Sequence[str], *, salt: str) -> str:
    """Return the digest of a peer's state, from the digests of its ranks in their order.

    salt: what must be equal on all peers beside the tensors.
    """
    return hashlib.sha256("\n".join((salt, *rank_digests)).encode()).hexdigest()[:32]


def digest(*arrays: npt.NDArray[Any], threads: int | None = None) -> str:
    """Return the hash of the arrays' concatenated bytes, as 64 hexadecimal digits.

    How the bytes are split into arrays does not matter.
    Blocks of one mebibyte are hashed by XXH3 (128 bits) in threads, and their hashes by BLAKE2b. This detects
    accidental differences; it proves nothing if an adversary chose the bytes.

    threads: how many; None: one per core.
    """
    return digest_of_pieces(arrays, nbytes=sum(array.nbytes for array in arrays), threads=threads)


def digest_of_pieces(pieces: Iterable[npt.NDArray[Any]], *, nbytes: int, threads: int | None = None) -> str:
    """Return the `digest` of arrays that are made one after the other, without holding them together.

    nbytes: of all of them. threads: see `digest`; 64 mebibytes for each thread are held at a time.
    """
    total_hash = hashlib.blake2b(digest_size=32)
    workers = len(os.sched_getaffinity(0)) if threads is None else threads
    blocks = _blocks(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in pieces)
    if workers < 2 or nbytes < 4 * BLOCK_BYTES:
        for block in blocks:
            total_hash.update(_hash(block))
    else:
        with ThreadPoolExecutor(workers) as pool:
            while batch := list(islice(blocks, 64 * workers)):
                for hashed in pool.map(_hash, batch, chunksize=8):
                    total_hash.update(hashed)
    total_hash.update(nbytes.to_bytes(8, "little"))
    return total_hash.hexdigest()


def _blocks(arrays: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yield blocks of BLOCK_BYTES, the last one shorter, each as pieces of one or more arrays."""
    block: list[memoryview] = []
    missing = BLOCK_BYTES
    for array in arrays:
        offset = 0
        while offset < len(array):
            piece = array[offset : offset + missing]
            block.append(piece)
            offset += len(piece)
            missing -= len(piece)
            if not missing:
                yield block
                block, missing = [], BLOCK_BYTES
    if block:
        yield block


def _hash(block: list[memoryview]) -> bytes:
    hasher = xxhash.xxh3_128()
    for piece in block:
        hasher.update(piece)
    return hasher.digest()
