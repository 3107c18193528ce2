"""Keyed permutations of range(n), computed element by element: a shuffle that is never stored."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bloomery.data import kernels

Unsigned = npt.NDArray[np.uint64]
_ROUNDS, _SMALL_ROUNDS, _SMALL_BITS = 6, 16, 12  # small domains need more rounds to forget their structure
_WORD = (1 << 64) - 1


def derive_key(seed: int, *address: int | npt.NDArray[np.int64]) -> Unsigned:
    """A 64-bit key for each address, such as (dataset, epoch); arrays are broadcast. Shape [1] or theirs."""
    state = _mix(np.array([seed & _WORD], dtype=np.uint64))
    for part in address:
        state = _mix(state ^ _mix(np.atleast_1d(np.asarray(part)).astype(np.uint64)))
    return state


def permute(index: npt.NDArray[np.int64], n: int, key: Unsigned) -> npt.NDArray[np.int64]:
    """Where the permutation of range(n) with this key sends each index.

    index: any values of range(n), shape [k]; key: shape [1] or [k] (one permutation for each element).
    A Feistel network on the next power of two; what falls outside range(n) walks on along its cycle
    (Black & Rogaway 2002), which is a permutation of range(n) again.
    """
    if n < 1 or n > 1 << 62:
        raise ValueError(f"a permutation of range({n})")
    sent = np.empty(index.size, dtype=np.int64)
    if kernels.permute(index, n, key, sent):
        return sent
    bits = max(2, (n - 1).bit_length())
    rounds = _SMALL_ROUNDS if bits <= _SMALL_BITS else _ROUNDS
    round_keys = [
        (_mix(key + np.uint64(turn + 1)) >> np.uint64(32)).astype(np.uint32) for turn in range(rounds)
    ]
    values = index.astype(np.uint64)
    values = _feistel(values, bits, round_keys)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        keys = [turn if turn.size == 1 else turn[outside] for turn in round_keys]
        values[outside] = _feistel(values[outside], bits, keys)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64)


def _feistel(values: Unsigned, bits: int, round_keys: list[npt.NDArray[np.uint32]]) -> Unsigned:
    """Permute range(2**bits), in halves of at most 32 bits, unequal ones when `bits` is odd."""
    low_bits = bits // 2
    low_mask, high_mask = np.uint32((1 << low_bits) - 1), np.uint32((1 << (bits - low_bits)) - 1)
    high = (values >> np.uint64(low_bits)).astype(np.uint32)
    low = values.astype(np.uint32) & low_mask
    for turn in range(0, len(round_keys), 2):
        high ^= _scramble(low, round_keys[turn]) & high_mask
        low ^= _scramble(high, round_keys[turn + 1]) & low_mask
    return (high.astype(np.uint64) << np.uint64(low_bits)) | low.astype(np.uint64)


def _scramble(half: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """A 32-bit multiply-xorshift hash of (half, key): wraps at 2**32 on purpose."""
    mixed = (half ^ key) * np.uint32(0x9E3779B1)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x85EBCA77)
    mixed ^= mixed >> np.uint32(13)
    return mixed


def _mix(state: Unsigned) -> Unsigned:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014): wraps at 2**64 on purpose."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
