"""Sums of gradients by the kernel against torch's; prints whether their bits are equal as JSON."""

from __future__ import annotations

import faulthandler
import json
import sys

import torch
from tests.kernels.attention_cases import fenced

SIZES = (1, 7, 4096, 4097, 8168)  # a program of the kernel treats 4096
SPECIAL = (float("inf"), -float("inf"), float("nan"), -0.0, 0.0, 6.2e-5, -6.2e-5)
"""Beside them no subnormal numbers of 16 bits, which Triton's interpreter widens wrongly."""


def has_equal_bits(count: int, *, dtype: torch.dtype, is_first: bool, offset: int, device: str) -> bool:
    """Return whether sums have the bits of fp32 sums of the widened values.

    offset: at which element of their memory both tensors begin; nothing before it may change.
    """
    from bloomery.kernels.triton_accumulate import add_widened

    random = torch.Generator(device).manual_seed(count)
    values = torch.randn(offset + count, generator=random, device=device) * 3
    total = torch.randn(offset + count, generator=random, device=device)
    number = min(count, len(SPECIAL))
    values[offset : offset + number] = torch.tensor(SPECIAL[:number], device=device)
    values, total = fenced(values.to(dtype)), fenced(total)
    expected = total.clone()
    wide = values[offset:].float()
    expected[offset:] = wide if is_first else expected[offset:] + wide
    add_widened(total[offset:], values[offset:], is_first=is_first)
    total, expected = (sums.masked_fill(sums.isnan(), 1.0e30) for sums in (total, expected))
    return bool(torch.equal(total.view(torch.int32), expected.view(torch.int32)))


def all_cases(device: str, sizes: tuple[int, ...]) -> list[bool]:
    """Return it for each size, dtype, offset, with a sum and without one."""
    return [
        has_equal_bits(count, dtype=dtype, is_first=is_first, offset=offset, device=device)
        for count in sizes
        for dtype in (torch.bfloat16, torch.float16)
        for is_first in (True, False)
        for offset in (0, 3)
    ]


if __name__ == "__main__":
    faulthandler.enable()
    sys.stdout.write(json.dumps(all_cases("cpu", SIZES)) + "\n")
