"""The interface of an outer update (a rank's part in a round, how the average is applied), and digests.

`PseudoGradient` (DiLoCo) and `GradientAverage` in `pseudo_gradient.py` implement `OuterUpdate`. Peers compare
digests to notice that their weights differ.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from bloomery.checkpoint.format.state import StateEntry
from bloomery.diloco.stored_average import StoredAverage


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The result of an all_reduce.

    average: the average of the parts.
    residual: what this peer's quantisation lost of the average, and what it did not send of earlier errors;
        None if that is not kept.
    """

    average: StoredAverage
    residual: Tensor | None


Measure = Callable[[], tuple[float, float]]
"""Returns the sum of a part's squares, not finite where an element is not, and that of the quantisation
errors that are sent with it, in the unit of the average. Any thread may call it, before `values`."""


class OuterUpdate(Protocol):
    """The interface of a rank's part in each round: what it contributes, and how it applies the average.

    A *part* is the contribution of a peer or rank: a pseudo-gradient or a gradient, as fp32 vectors in the
    CPU's memory. *Feedback* is error feedback: the quantisation error that the next part makes up for.

    Every rank of the peer calls each method; methods that write weights or gradients are collective over it.
    A round calls `offer`, then `values` and `prepare` for each attempt, then `adopt` or `drop_offer`.
    """

    @property
    def digest_is_of_state(self) -> bool:
        """Whether a round's digest is `digest` of the state after it, so that loading can check it."""

    @property
    def has_feedback(self) -> bool:
        """Whether it keeps error feedback: a round's quantisation error, added to the next round's part."""

    def forget_feedback(self) -> None:
        """Set the quantisation error that was kept to zero."""

    def begin(self) -> None:
        """Begin a run with the weights as they are."""

    def reset(self) -> None:
        """Go back to the committed weights, and drop all training since then."""

    def swap_in_committed(self) -> None:
        """Put the committed weights in place of the present ones until `swap_back`."""

    def swap_back(self) -> None:
        """Restore, to the bit, the weights that `swap_in_committed` has replaced."""

    def follow_loaded(self) -> None:
        """Continue from another peer's state, which was just loaded, without what is only that peer's own."""

    def offer_nothing(self) -> None:
        """Make the next part finite without a step. Its values do not matter, because it has weight 0."""

    def offer(self, round: int) -> Measure:
        """Fix this round's part, and return what measures it.

        With overlapped steps the part is copied while the device goes on.
        """

    def keep_offer(self) -> None:
        """Have the device change the weights only after the part is copied. Called before each update."""

    def pieces(self) -> Sequence[range]:
        """Return the ranges of elements in which the part is reduced, equal on all peers.

        An attempt holds one piece as fp32 at a time.
        """

    def values(self, weight: float, piece: range) -> tuple[Tensor, Tensor | None]:
        """Return a copy of a piece of the part for one attempt, and a vector for its quantisation error.

        The next call takes the memory of that copy. The ring adds its error to the vector. The thread of the
        ring calls this, while nothing else writes weights or gradients that the part is made of.

        weight: this peer's weight in the attempt. None in place of the vector: the error is not kept.
        """

    def prepare(self, reduced: Reduced, *, check: Callable[[], None] = lambda: None) -> str:
        """Compute the state that follows from an average, beside the present one, and return its digest.

        The thread of the ring calls this too.

        check: called between parts of the work. What it raises ends that, and nothing is prepared then.
        """

    def average(self) -> StoredAverage | None:
        """Return the average that `prepare` used, before `adopt`; None if a peer cannot use it later."""

    def prepare_missed(self, round: int, average: StoredAverage) -> str:
        """Prepare the state after a round that this peer was not in, from what `average` gave another peer.

        Returns its digest. Raises ValueError if the average has another length than this rank's part, or
        values that no peer sends.
        """

    def adopt(self) -> None:
        """Make the prepared state the present one, because the round is committed with it.

        After `prepare_missed`, this peer's own steps since the state before are dropped.
        """

    def rebase(self) -> None:
        """Make the state that `prepare_missed` prepared the present one, and keep this peer's own steps.

        The weights move as far as the committed ones do, so that the next part has all steps since this
        peer's last one that was averaged.
        """

    def drop_offer(self) -> None:
        """Drop the part that was offered, because the round is committed without it."""

    def digest(self) -> str:
        """Return the `rank_digest` of the present shared state."""

    def state_entries(self) -> Iterable[StateEntry]:
        """Describe the tensors that a checkpoint keeps."""


FEEDBACK_OF = "average"
"""The unit in which a checkpoint keeps the quantisation error; earlier versions kept it in that of a part."""

PIECE = 1 << 27
"""Elements that a ring reduces at a time: half a gibibyte as fp32, for which a link takes seconds."""


_SQUARED = 1 << 18
"""Elements that are squared at a time: torch writes them out as fp64, into memory that stays in the cache."""


def pieces_of(numel: int, piece: int) -> list[range]:
    """Return ranges of at most `piece` elements that cover `numel` elements; one empty range for 0."""
    return [range(start, min(start + piece, numel)) for start in range(0, max(1, numel), piece)]


def squared_norm(values: Tensor) -> float:
    """Return the squared L2 norm of a vector, in float64; not finite where an element is not."""
    parts = values.reshape(-1).split(_SQUARED)
    return sum(float(torch.linalg.vector_norm(part, dtype=torch.float64).square()) for part in parts)


def rank_digest(tensors: Iterable[Tensor]) -> str:
    """Return the hash of one rank's tensors, in order. They are contiguous and in the CPU's memory."""
    return digest(*(tensor.numpy() for tensor in tensors))


def peer_digest(rank_digests: Sequence[str], *, salt: str) -> str:
    """Return the digest of a peer's state, from the digests of its ranks in their order.

    salt: what must be equal on all peers beside the tensors.
    """
    return hashlib.sha256("\n".join((salt, *rank_digests)).encode()).hexdigest()[:32]


BLOCK_BYTES = 1 << 20
_THREADS = 8
"""The most threads that hash: they are faster than what makes the arrays."""
_BLOCKS_AT_A_TIME = 4
"""Blocks that a thread hashes for one request."""


def digest(*arrays: npt.NDArray[Any], threads: int | None = None) -> str:
    """Return the hash of the arrays' concatenated bytes, as 64 hexadecimal digits.

    How the bytes are split into arrays does not matter.
    Blocks of one mebibyte are hashed by XXH3 (128 bits) in threads, and their hashes by BLAKE2b. This detects
    accidental differences; it proves nothing if an adversary chose the bytes.

    threads: how many; None: one per core, at most _THREADS.
    """
    return digest_of_pieces(arrays, nbytes=sum(array.nbytes for array in arrays), threads=threads)


def digest_of_pieces(
    pieces: Iterable[npt.NDArray[Any]],
    *,
    nbytes: int,
    threads: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> str:
    """Return the `digest` of arrays that are made one after the other, without holding them together.

    The memory of a piece may be taken again for the next but one, because a piece is hashed while the next
    one is made.

    nbytes: of all of them. threads: see `digest`. check: called before each piece is hashed; it may raise.
    """
    with _StreamDigest(nbytes=nbytes, threads=threads) as stream:
        for array in pieces:
            check()
            stream.add(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return stream.end()


class _StreamDigest:
    """Hashes blocks in threads while the bytes that follow are made."""

    def __init__(self, *, nbytes: int, threads: int | None) -> None:
        workers = min(_THREADS, len(os.sched_getaffinity(0))) if threads is None else threads
        is_threaded = workers > 1 and nbytes >= 4 * BLOCK_BYTES
        self._pool = ThreadPoolExecutor(workers) if is_threaded else None
        self._nbytes, self._hash = nbytes, hashlib.blake2b(digest_size=32)
        self._begun = deque[list[Future[bytes]]]()
        self._partial = bytearray()
        """The bytes of the block that is not full, copied."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def add(self, array: memoryview) -> None:
        """Begin to hash the next bytes. They may change once the next call that has any has returned."""
        if not len(array):
            return
        begun: list[Future[bytes]] = []
        missing = BLOCK_BYTES - len(self._partial) if self._partial else 0
        self._partial += array[:missing]
        if len(self._partial) == BLOCK_BYTES:
            self._hash_all([memoryview(bytes(self._partial))], begun)
            self._partial.clear()
        stop = len(array) if self._partial else missing + (len(array) - missing) // BLOCK_BYTES * BLOCK_BYTES
        blocks = [array[at : at + BLOCK_BYTES] for at in range(missing, stop, BLOCK_BYTES)]
        for first in range(0, len(blocks), _BLOCKS_AT_A_TIME):
            self._hash_all(blocks[first : first + _BLOCKS_AT_A_TIME], begun)
        self._partial += array[stop:]
        self._begun.append(begun)
        while len(self._begun) > 1:
            self._take()

    def end(self) -> str:
        """Return the digest of all bytes."""
        while self._begun:
            self._take()
        if self._partial:
            self._hash.update(_hash(memoryview(self._partial)))
        self._hash.update(self._nbytes.to_bytes(8, "little"))
        return self._hash.hexdigest()

    def _hash_all(self, blocks: list[memoryview], begun: list[Future[bytes]]) -> None:
        if self._pool is not None:
            begun.append(self._pool.submit(_hash_each, blocks))
        else:
            self._hash.update(_hash_each(blocks))

    def _take(self) -> None:
        for hashed in self._begun.popleft():
            self._hash.update(hashed.result())


def _hash_each(blocks: list[memoryview]) -> bytes:
    return b"".join(map(_hash, blocks))


def _hash(block: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(block)
