"""Hashes tensors in parallel, so that peers find out when their weights differ."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

BLOCK_BYTES = 1 << 20


def digest(*arrays: npt.NDArray[Any], threads: int | None = None) -> str:
    """Return the hash of the arrays' concatenated bytes, as 64 hexadecimal digits.

    How the bytes are split into arrays does not matter.
    Blocks of one mebibyte are hashed by XXH3 (128 bits) in threads, and their hashes by BLAKE2b. This detects
    accidental differences; it proves nothing if an adversary chose the bytes. threads: None: one per core.
    """
    whole = hashlib.blake2b(digest_size=32)
    workers = len(os.sched_getaffinity(0)) if threads is None else threads
    blocks = _blocks(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays)
    if workers < 2 or sum(array.nbytes for array in arrays) < 4 * BLOCK_BYTES:
        for block in blocks:
            whole.update(_hash(block))
    else:
        with ThreadPoolExecutor(workers) as pool:
            while batch := list(islice(blocks, 64 * workers)):
                for hashed in pool.map(_hash, batch, chunksize=8):
                    whole.update(hashed)
    whole.update(sum(array.nbytes for array in arrays).to_bytes(8, "little"))
    return whole.hexdigest()


def _blocks(parts: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    block: list[memoryview] = []
    room = BLOCK_BYTES
    for part in parts:
        at = 0
        while at < len(part):
            taken = part[at : at + room]
            block.append(taken)
            at += len(taken)
            room -= len(taken)
            if not room:
                yield block
                block, room = [], BLOCK_BYTES
    if block:
        yield block


def _hash(block: list[memoryview]) -> bytes:
    hasher = xxhash.xxh3_128()
    for piece in block:
        hasher.update(piece)
    return hasher.digest()
