"""Digests of bits: one changed bit anywhere changes them, and they depend on nothing but the bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bloomery.parallel.bit_digest import GradientTap, bit_digest, digest_of_all
from bloomery.parallel.inner_sizes import by_kind

LENGTH = 4093 + 4093 // 2  # words of one whole row and of a part of one


def numbers(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(1, count + 1, dtype=torch.float32).mul_(0.37).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        (torch.float32, 2 * LENGTH + 1),
        (torch.bfloat16, 4 * LENGTH + 3),
        (torch.float64, LENGTH),
        (torch.int8, 77),
    ],
)
def test_a_bit_that_flips_anywhere_changes_the_digest(dtype: torch.dtype, count: int) -> None:
    whole = numbers(count, dtype)
    before = int(bit_digest(whole))
    assert int(bit_digest(whole.clone())) == before
    raw = whole.view(torch.uint8)
    for byte in (0, 1, len(raw) // 3, len(raw) // 2 + 1, len(raw) - 9, len(raw) - 1):
        for bit in (1, 128):
            raw[byte] ^= bit
            assert int(bit_digest(whole)) != before, (byte, bit)
            raw[byte] ^= bit
    assert int(bit_digest(whole)) == before


def test_elements_that_change_places_change_the_digest() -> None:
    whole = numbers(2 * LENGTH)
    for first, second in ((0, 1), (0, 2), (5, 2 * 4093 - 2), (2 * LENGTH - 2, 2 * LENGTH - 1)):
        changed = whole.clone()
        changed[[first, second]] = whole[[second, first]]
        assert int(bit_digest(changed)) != int(bit_digest(whole)), (first, second)


def test_a_digest_is_of_the_elements_whatever_their_shape_and_place_in_memory() -> None:
    whole = numbers(1200)
    before = int(bit_digest(whole))
    assert int(bit_digest(whole.view(30, 40))) == before
    assert int(bit_digest(torch.cat([torch.zeros(1), whole])[1:])) == before  # no whole word begins there
    assert int(bit_digest(whole.view(30, 40).t().contiguous().t())) == before
    assert int(bit_digest(torch.empty(0))) == int(bit_digest(torch.empty(0), salt=3)) == 0


def test_salts_tell_equal_tensors_apart_and_the_order_of_several_counts() -> None:
    one, two = numbers(20), numbers(20) * 2
    assert len({int(bit_digest(one, salt=salt)) for salt in range(5)}) >= 4
    assert digest_of_all([one, two]) != digest_of_all([two, one])
    assert digest_of_all([one, two]) == digest_of_all([one.clone(), two.clone()])
    assert 0 <= digest_of_all([one, two]) < 1 << 64


def test_a_tap_takes_the_gradients_of_one_backward_alone() -> None:
    first, second, tied = (nn.Parameter(numbers(count)) for count in (4, 6, 8))
    for parameter in (first, second, tied):
        parameter.grad = parameter.detach() * 3
    tap = GradientTap([first, second, tied, tied], discards=False)
    assert tap.digest == 0 and not tap.discards and GradientTap([first], discards=True).discards
    tap.take(first)
    once = tap.digest
    tap.take(first)  # of the next micro-batch
    assert tap.digest == once != 0
    tap.take(tied)
    with_tied = tap.digest
    tap.take(tied)
    assert len({once, with_tied, tap.digest}) == 3
    second.grad = None
    tap.take(second)
    last = tap.digest
    second.grad = torch.ones(6)
    tap.take(second)
    assert tap.digest != last  # what had no gradient is still awaited
    swapped = GradientTap([second, first], discards=False)
    straight = GradientTap([first, second], discards=False)
    for made in (swapped, straight):
        made.take(first)
    assert swapped.digest != straight.digest


def test_sizes_are_told_by_their_kind() -> None:
    assert by_kind([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == {
        "logit": [1.0, 2.0],
        "hidden": [3.0, 4.0],
        "weight": [5.0, 6.0],
    }
