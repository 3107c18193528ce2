"""Compiles the kernels for a GPU of Hopper without having one; prints what each takes of a multiprocessor."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bloomery.kernels.rules import Tiles, tiles_for

TENSORS = {
    **dict.fromkeys(("starts", "ends", "row_keys", "column_keys"), "*i32"),
    **dict.fromkeys(
        ("slopes", "log_partition", "correction", "cross_entropy", "z", "total", "own", "told"), "*fp32"
    ),
    "targets": "*i64",
    "scale_of_x": "*fp32",
}
NUMBERS = {
    "scale": "fp32",
    "kept": "fp32",
    "z_loss": "fp32",
    "threshold": "i32",
    "count": "i64",
    "tokens": "i32",
    "start": "i32",
}
RULES = ("HAS_DOCUMENTS", "HAS_SLOPES", "DROPS")


def compiled(
    kernel: Any,
    constants: Mapping[str, Any],
    *,
    warps: int,
    stages: int,
    codes: str = "",
    odd: Sequence[str] = (),
    x: str = "bf16",
) -> dict[str, Any]:
    """Return the bytes of shared memory that a kernel takes, whether it uses the units for products, whether
    its threads read and write 16 bytes at once, and whether an instruction rounds to 8 bits.

    codes: Triton's name of the dtype of 8 bits that it writes. x: that of the matrix `x`, if it reads one.
    odd: numbers of which Triton is not told that they are multiples of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {name: _kind(name, constants) for name in kernel.arg_names}
    kinds |= {name: f"*{codes}" for name in ("codes", "transposed") if name in kinds}
    kinds |= {"x": f"*{x}"} if "x" in kinds else {}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if kinds[name].startswith("*")
        or name == "count"
        or (kinds[name] == "i32" and name not in (*NUMBERS, *odd))
    }
    source = ASTSource(fn=kernel, signature=kinds, constexprs=dict(constants), attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    program = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    code = program.asm["ptx"]
    return {
        "shared": program.metadata.shared,
        "uses_units": "wgmma" in code,
        "reads_16_bytes": "ld.global.v4.b32" in code,
        "writes_16_bytes": "st.global.v4.b32" in code,
        "rounds_to_8_bits": "cvt.rn.satfinite.e" in code,
    }


def _kind(name: str, constants: Mapping[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name.endswith(("_batch", "_row", "_head", "_stride")) or name in ("rows", "columns"):
        return "i32"
    return NUMBERS.get(name) or TENSORS.get(name) or "*bf16"


def of_attention(width: int, rules: tuple[bool, bool, bool]) -> dict[str, Any]:
    """Compile the three kernels of attention for heads of `width`."""
    from bloomery.kernels.triton_attention import _forward
    from bloomery.kernels.triton_attention_backward import _backward_of_keys, _backward_of_queries

    sizes = {"LENGTH": 4096, "HEADS": 16, "KV_HEADS": 8, "WIDTH": width, "PADDED": width, "PRECISION": "tf32"}
    tiles = tiles_for(width)

    def with_tiles(kernel: Any, tile: Tiles) -> dict[str, Any]:
        constants = sizes | dict(zip(RULES, rules, strict=True))
        constants |= {"QUERIES": tile.queries, "KEYS": tile.keys}
        return compiled(kernel, constants, warps=tile.warps, stages=tile.stages)

    return {
        "forward": with_tiles(_forward, tiles.forward),
        "by keys": with_tiles(_backward_of_keys, tiles.backward_of_keys),
        "by queries": with_tiles(_backward_of_queries, tiles.backward_of_queries),
    }


if __name__ == "__main__":
    from bloomery.kernels import triton_accumulate, triton_fp8
    from bloomery.kernels.triton_loss import _measure_rows, _write_slopes, _write_split_slopes

    found = {
        f"attention, {width}, {rules}": of_attention(width, rules)
        for width in (64, 128)
        for rules in ((False, True, False), (True, False, False), (True, True, True))
    }
    found["loss"] = {"": compiled(_write_slopes, {"VOCABULARY": 131_072, "BLOCK": 8192}, warps=8, stages=3)}
    split = {"OWN": 16_033, "WIDTH": 16_040, "BLOCK": 8192}
    ranks = {"RANKS": 6, "PADDED": 8}
    found["loss"] |= {
        "measured": compiled(_measure_rows, split, warps=8, stages=3, odd=["row_stride"]),
        "split": compiled(_write_split_slopes, split | ranks, warps=8, stages=3, odd=["row_stride"]),
    }
    found["sums"] = {
        name: compiled(
            triton_accumulate._add_widened,
            {"ADDS": adds, "BLOCK": triton_accumulate.BLOCK},
            warps=triton_accumulate.WARPS,
            stages=3,
        )
        for name, adds in (("first", False), ("further", True))
    }
    found["8 bits"] = {
        f"{codes}, {by_rows}, {by_columns}, {through}": compiled(
            triton_fp8._write_codes,
            {
                "THROUGH_BF16": through,
                "BY_ROWS": by_rows,
                "BY_COLUMNS": by_columns,
                "ROWS": triton_fp8.ROWS,
                "COLUMNS": triton_fp8.COLUMNS,
            },
            warps=triton_fp8.WARPS,
            stages=3,
            codes=codes,
            x="fp32" if through else "bf16",
        )
        for codes in ("fp8e4nv", "fp8e5")
        for by_rows, by_columns, through in ((True, True, False), (False, True, True), (True, False, True))
    }
    sys.stdout.write(json.dumps(found) + "\n")
