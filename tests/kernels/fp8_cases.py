"""The kernel that rounds to 8 bits against torch's rounding; prints the number of unequal codes as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from bloomery.model.fp8 import FP8_BACKWARD, FP8_FORWARD, fp8_scale, largest_magnitude, rounded_to_fp8

BESIDE = 3
"""The rows of memory before and after what a kernel may write."""
UNWRITTEN = 0x55


def matrices(random: torch.Generator) -> dict[str, Tensor]:
    """Return what is rounded: sizes that are whole tiles and others, far apart magnitudes, views, NaN."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    spread = normal(70, 300) * torch.logspace(-9, 3, 300)
    with_nan = normal(20, 17)
    with_nan[3, 4] = torch.nan
    infinite = normal(20, 17)
    infinite[3, 4], infinite[5, 6] = torch.inf, -torch.inf
    return {
        "a tile": normal(128, 128).bfloat16(),
        "no whole tiles": normal(130, 257).bfloat16(),
        "half": normal(16, 40).half(),
        "fp32": normal(33, 65),
        "spread": spread,
        "one row": normal(1, 200).bfloat16(),
        "one column": normal(200, 1).bfloat16(),
        "zeros": torch.zeros(18, 21).bfloat16(),
        "negative zeros": -torch.zeros(18, 21).bfloat16(),
        "transposed": normal(150, 40).bfloat16().t(),
        "columns of a wider matrix": normal(40, 200).bfloat16()[:, 30:60],
        "every other column": normal(40, 200).bfloat16()[:, ::2],
        "a row for all": normal(1, 200).bfloat16().expand(40, 200),
        "NaN": with_nan,
        "infinite": infinite,
    }


def unequal_codes(x: Tensor, dtype: torch.dtype, through: torch.dtype | None = None) -> int:
    """Return how many codes are not torch's, or not where they belong, or written beside the results.

    through: the dtype to which `x` is rounded first; None: its own.
    """
    from bloomery.kernels.triton_fp8 import write_codes  # only where Triton is

    first_rounded = x.to(through or x.dtype)
    scale = fp8_scale(largest_magnitude(first_rounded), dtype)
    expected = rounded_to_fp8(first_rounded, scale, dtype)
    unequal = 0
    for wanted in ((True, False), (False, True), (True, True)):
        room = [_room(shape, dtype, x.device) for shape in (x.shape, x.shape[::-1])]
        codes, transposed = (
            inner if is_wanted else None for (_, inner), is_wanted in zip(room, wanted, strict=True)
        )
        write_codes(x, scale, codes, transposed, through=through)
        for (whole, inner), told, is_wanted in zip(room, (expected, expected.t()), wanted, strict=True):
            beside = torch.cat([whole[:BESIDE], whole[-BESIDE:]]) if is_wanted else whole
            unequal += int((beside != UNWRITTEN).sum())
            if is_wanted:
                # Of NaN there are two codes, for either sign, and hardware differs in which it takes.
                both_nan = inner.float().isnan() & told.float().isnan()
                same = inner.view(torch.uint8) == told.contiguous().view(torch.uint8)
                unequal += int((~(same | both_nan)).sum())
    return unequal


def _room(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory as bytes, and the matrix within it."""
    whole = torch.full((shape[0] + 2 * BESIDE, shape[1]), UNWRITTEN, dtype=torch.uint8, device=device)
    return whole, whole[BESIDE:-BESIDE].view(dtype)


def round_as_a_gpu_does() -> None:
    """Have the interpreter round to 8 bits as a GPU's instruction does: to nearest, ties to even, saturating.

    Its own conversion rounds ties up, and neither carries into the exponent nor rounds small numbers. To bf16
    it drops bits.
    """
    from triton.runtime import interpreter

    kinds = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}

    def rounded(_builder: Any, source: Any, target: Any, _mode: Any) -> Any:
        dtype = kinds[str(target.scalar)]
        most = torch.finfo(dtype).max
        codes = torch.from_numpy(source.data).clamp(-most, most).to(dtype)
        return interpreter.TensorHandle(codes.view(torch.uint8).numpy(), target.scalar)

    def to_bf16(builder: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar.name == "fp32" and target.scalar.name == "bf16":
            bits = torch.from_numpy(source.data).bfloat16().view(torch.uint16).numpy()
            return interpreter.TensorHandle(bits, target.scalar)
        return cast(builder, source, target)

    cast = interpreter.InterpreterBuilder.cast_impl
    interpreter.InterpreterBuilder.create_fp_to_fp = rounded
    interpreter.InterpreterBuilder.cast_impl = to_bf16


if __name__ == "__main__":
    round_as_a_gpu_does()
    seed = int(torch.randint(2**31, ()))
    found = {
        f"{name}, {dtype}, seed {seed}": unequal_codes(x, dtype)
        for dtype in (FP8_FORWARD, FP8_BACKWARD)
        for name, x in matrices(torch.Generator().manual_seed(seed)).items()
    }
    wide = torch.randn(140, 150)
    found |= {
        f"fp32 through {through}": unequal_codes(wide, FP8_FORWARD, through)
        for through in (torch.bfloat16, torch.float16, torch.float32)
    }
    sys.stdout.write(json.dumps(found) + "\n")
