"""Digests of the bits of tensors, on their own device, to compare what ranks hold and what they computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from functools import lru_cache

import torch
from torch import Tensor, nn

_ROW = 4093
"""Elements of a row; a prime, so that a fault at a regular stride of bytes does not hit only one column."""
_MIXED, _WORD = 0x9E3779B97F4A7C15, 1 << 64
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def bit_digest(tensor: Tensor, *, salt: int = 0) -> Tensor:
    """Return a digest of a tensor's bits, int64 [] on its device, without waiting for it.

    It is a sum, modulo 2^64, of the elements' bits as integers, each multiplied with an odd number that
    depends on where it is. So a change of one element always changes it, whatever the values are.

    salt: makes digests of equal tensors differ.
    """
    flat = tensor.detach().contiguous().view(-1)
    in_word = 8 // flat.element_size()
    words = flat.numel() // in_word
    # sums of 64-bit integers are far faster than those of narrower ones, which are widened first
    packed = flat[: words * in_word]
    if flat.storage_offset() % in_word:
        packed = packed.clone()
    bits, rest = packed.view(torch.int64), flat[words * in_word :].view(_BITS[flat.element_size()])
    rows = words // _ROW
    columns = bits[: rows * _ROW].view(rows, _ROW).sum(dim=0)
    weights = _odd_numbers(bits.device)
    last = torch.cat([bits[rows * _ROW :], rest.long()])  # at most _ROW + 6 numbers
    total = (columns * weights[:_ROW]).sum() + (last * weights[: last.numel()]).sum()
    mixed = salt * _MIXED % _WORD | 1
    return total * (mixed if mixed < _WORD // 2 else mixed - _WORD)


def digest_of_all(tensors: Iterable[Tensor]) -> int:
    """Return one digest of several tensors in their order. Waits for their device."""
    digests = [bit_digest(tensor, salt=salt) for salt, tensor in enumerate(tensors)]
    return sum(int(digest) for digest in digests) % _WORD


class GradientTap:
    """Adds up digests of the gradients that each parameter gets from one backward.

    parameters: all parameters of the module, whose order salts the digests; one that gets two gradients from
        a backward stands there twice.
    discards: whether the gradients are dropped afterwards, so that a backward leaves nothing behind.
    """

    def __init__(self, parameters: Collection[nn.Parameter], *, discards: bool) -> None:
        self._salts = {parameter: salt for salt, parameter in enumerate(parameters, start=1)}
        self._awaited = Counter(parameters)
        self._digests: list[Tensor] = []
        self.discards = discards

    def take(self, parameter: nn.Parameter) -> None:
        """Add `parameter.grad`, unless the parameter's gradients of one backward were added before."""
        if self._awaited[parameter] and parameter.grad is not None:
            self._awaited[parameter] -= 1
            self._digests.append(bit_digest(parameter.grad, salt=self._salts[parameter]))

    @property
    def digest(self) -> int:
        """Return the digest of all gradients that were taken. Waits for the device."""
        return int(torch.stack(self._digests).sum()) % _WORD if self._digests else 0


@lru_cache(maxsize=8)
def _odd_numbers(device: torch.device) -> Tensor:
    """Return odd numbers that look random, int64 [_ROW + 8]; equal in every process and on every device."""
    index = torch.arange(_ROW + 8, dtype=torch.int64, device=device) + 1
    mixed = index * (_MIXED - _WORD)
    return (mixed ^ (mixed >> 29)) * 0x5851F42D4C957F2D | 1
