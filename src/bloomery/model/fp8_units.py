"""Products of scaled 8-bit factors by the units of a GPU: which GPU has which, and in what layout they read.

The layouts are those that torch's `_scaled_mm` asks for, which passes them on to cuBLAS: both factors by
rows along the summed dimension, scales of blocks of 128 by columns, scales of blocks of 32 (E8M0) in tiles
of 128 × 4 (cuBLAS 13, "1D block scaling factors layout").

Legend: r rows of the left factor, c rows of the right one, k summed elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from bloomery import torch_private
from bloomery.model.fp8 import FP8_CAPABILITY, FP8_MULTIPLE

_BLOCK, _MX_BLOCK = 128, 32
_SQUARE_MULTIPLE = 4 * _BLOCK
"""cuBLAS reads scales of 128 × 128 blocks in groups of four along the summed dimension. With whole groups
each version of torch accepts the same layout; without, they ask for different ones.
"""
_TILE = (128, 4)
"""The rows and columns of a tile of scales of 32 elements."""
_BLOCK_CUDA, _MX_CUDA = (12, 9), (12, 8)
"""The first CUDA versions whose cuBLAS has these scales."""


def lacking_units(scaling: str, device: torch.device) -> str:
    """Return what `device` lacks to multiply 8-bit factors with such scales, as a phrase; '' if nothing.

    scaling: of the setting `train.fp8_scaling`. Devices other than GPUs compute the same numbers in fp32.
    """
    if device.type != "cuda" or scaling == "tensor":
        return ""
    has = torch.cuda.get_device_capability(device)
    wanted, is_there, cuda = {
        "row": (f"{_dotted(FP8_CAPABILITY)} or higher", has >= FP8_CAPABILITY, (0, 0)),
        "block": ("9.x (Hopper)", has[0] == 9, _BLOCK_CUDA),
        "mx": ("10.0 or higher (Blackwell)", has >= (10, 0), _MX_CUDA),
    }[scaling]
    if not is_there:
        name = torch.cuda.get_device_name(device)
        return f"'{scaling}' needs a GPU of compute capability {wanted}, and {name} has {_dotted(has)}"
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if version < cuda:
        needs = f"'{scaling}' needs a torch built for CUDA {_dotted(cuda)} or later"
        return f"{needs}, and this one is built for {_dotted(version)}"
    return ""


def units_product(
    left: Tensor,
    right: Tensor,
    scales: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    *,
    scaling: str,
    is_square: bool = False,
    is_fast: bool = False,
) -> Tensor:
    """Return left · rightᵀ times the scales, computed by the units for 8 bits. [r, k], [c, k] → [r, c].

    scales: fp32, one for each row or block, by rows.
    scaling: 'row', 'block' or 'mx'. is_square: whether the right factor's blocks are 128 × 128.
    is_fast: whether the units may add up with fewer bits than fp32 has. Only with 'row' can they.
    """
    rows, columns = left.shape[0], right.shape[0]
    inner = {"row": FP8_MULTIPLE, "block": _SQUARE_MULTIPLE if is_square else _BLOCK, "mx": _MX_BLOCK}[
        scaling
    ]
    left = _padded(left, FP8_MULTIPLE, inner)
    right = _padded(right, _BLOCK if is_square else FP8_MULTIPLE, inner)
    count = left.shape[1] // _BLOCK
    if scaling == "row":
        left_scales = _extended(scales[0], left.shape[0], 1)  # [r, 1]
        right_scales = _extended(scales[1], right.shape[0], 1).t()  # [1, c]
    elif scaling == "mx":
        left_scales, right_scales = _in_tiles(scales[0]), _in_tiles(scales[1])
    else:
        left_scales = _extended(scales[0], left.shape[0], count).t().contiguous().t()  # [r, k/128]
        if is_square:
            right_scales = _extended(scales[1], right.shape[0] // _BLOCK, count).t()  # [k/128, c/128]
        else:
            right_scales = _extended(scales[1], right.shape[0], count).t().contiguous()  # [k/128, c]
    product = torch.ops.bloomery.scaled_matmul(
        left, right.t(), left_scales, right_scales, dtype, is_fast=is_fast
    )
    return product[:rows, :columns]


def _in_tiles(scales: Tensor) -> Tensor:
    """Return powers of two, fp32 [r, k/32], as cuBLAS reads them: bytes, flat, tile after tile by rows.

    Byte 16 · (row mod 32) + 4 · (row div 32) + column of a tile belongs to its `row` and `column`.
    """
    codes = (scales.view(torch.int32) >> 23).to(torch.uint8)  # E8M0 is the exponent of an fp32
    high, wide = _TILE
    missing = (0, -codes.shape[1] % wide, 0, -codes.shape[0] % high)
    tiles = F.pad(codes, missing).unflatten(1, (-1, wide)).unflatten(0, (-1, 4, 32))  # [·, 4, 32, ·, 4]
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def _padded(codes: Tensor, rows: int, columns: int) -> Tensor:
    """Return an E4M3 matrix with zeros added up to multiples of `rows` and `columns`."""
    missing = (0, -codes.shape[1] % columns, 0, -codes.shape[0] % rows)
    if not any(missing):
        return codes
    # As bytes, which can be padded: a code of 0 is the number 0.
    return F.pad(codes.view(torch.uint8), missing).view(codes.dtype)


def _extended(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Return scales with zeros, which belong to rows and columns that were added, up to [rows, columns]."""
    missing = (0, columns - scales.shape[1], 0, rows - scales.shape[0])
    return F.pad(scales, missing) if any(missing) else scales.contiguous()


def _dotted(version: Sequence[int]) -> str:
    return ".".join(str(part) for part in version)


# An operator, so that compiled code passes factors and scales in the very layout that was made for them.
torch.library.define(
    "bloomery::scaled_matmul",
    "(Tensor left, Tensor right, Tensor left_scales, Tensor right_scales, ScalarType dtype, *, bool is_fast)"
    " -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)


@torch.library.impl("bloomery::scaled_matmul", "default")
def _scaled_matmul(
    left: Tensor,
    right: Tensor,
    left_scales: Tensor,
    right_scales: Tensor,
    dtype: torch.dtype,
    *,
    is_fast: bool,
) -> Tensor:
    scales = (left_scales, right_scales)
    if left_scales.dtype == torch.uint8:
        scales = (left_scales.view(torch.float8_e8m0fnu), right_scales.view(torch.float8_e8m0fnu))
    return torch_private.scaled_matmul(left, right, scales, dtype, is_fast=is_fast)


@torch.library.register_fake("bloomery::scaled_matmul")  # type: ignore[untyped-decorator]
def _(
    left: Tensor,
    right: Tensor,
    left_scales: Tensor,
    right_scales: Tensor,
    dtype: torch.dtype,
    *,
    is_fast: bool,
) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1], dtype=dtype)
