"""Dequantises stored weights of two schemes, fp8 (block scales) and int8 (bitsandbytes); refuses others.

'fp8' is transformers' FineGrainedFP8Config: float8_e4m3 times a scale for each block of a matrix, or one for
the whole. 'int8' is bitsandbytes' LLM.int8 (Dettmers et al. 2022): whole numbers times a row's largest
magnitude / 127. Every other scheme is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from bloomery.errors import CheckpointError
from bloomery.interchange.families.family import PLAIN_WEIGHTS, QUANTISATION

_INT8_LARGEST = 127.0
_NO_EFFECT = frozenset(
    (
        *("modules_to_convert", "dequantize", "fmt", "llm_int8_threshold", "_load_in_4bit"),
        *("llm_int8_enable_fp32_cpu_offload", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type"),
        *("bnb_4bit_use_double_quant", "bnb_4bit_quant_storage"),
    )
)
"""Keys that say how a model computes, or what is not used."""
_SKIPPED = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")
_ALLOWED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "fp8": {"activation_scheme": ("dynamic",), "scale_fmt": (None, "float"), "expert_dtype": (None, "fp8")},
    "bitsandbytes": {
        "load_in_8bit": (True,),
        "_load_in_8bit": (True,),
        "load_in_4bit": (None, False),
        "llm_int8_has_fp16_weight": (None, False),
    },
}


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A quantisation scheme: how stored codes become weights.

    dtype: the type of codes, as safetensors names it.
    block: rows and columns that share a scale; None for one scale (fp8) or one for each row (int8).
    skipped: parts of the names of matrices that are stored plainly.
    """

    kind: Literal["fp8", "int8"]
    dtype: str
    block: tuple[int, int] | None = None
    skipped: tuple[str, ...] = ()

    def scale_of(self, weight: str) -> str:
        """Return the name of the tensor that holds the scales of a weight."""
        return f"{weight}_scale_inv" if self.kind == "fp8" else f"{weight.removesuffix('.weight')}.SCB"

    def claims(self, weight: str) -> tuple[str, ...]:
        """Return the names of the tensors stored beside a quantised weight: its scales and its format."""
        format_name = f"{weight.removesuffix('.weight')}.weight_format"
        return (self.scale_of(weight),) if self.kind == "fp8" else (self.scale_of(weight), format_name)

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the scales of a weight may have; none unless it is a matrix."""
        if len(shape) != 2:
            return ()
        if self.kind == "int8":
            return ((shape[0],),)
        if self.block is None:
            return ((), (1,))
        return ((-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])),)

    def read(self, weight: str, read: Callable[[str], Tensor]) -> Tensor:
        """Return the fp32 weights that the codes of `weight` stand for. read: returns a stored tensor."""
        codes, scale = read(weight).float(), read(self.scale_of(weight)).float()
        if self.kind == "int8":
            return codes * (scale / _INT8_LARGEST)[:, None]
        if self.block is None:
            return codes * scale
        rows, columns = codes.shape
        high, wide = min(self.block[0], rows), min(self.block[1], columns)  # a file may claim any block
        by_row = scale.repeat_interleave(high, 0)[:rows]
        return codes * by_row.repeat_interleave(wide, 1)[:, :columns]


def scheme_of(content: Mapping[str, Any], *, transposes: bool) -> Scheme | None:
    """Return the quantisation scheme that `content` (config.json) names; None for plain weights.

    transposes: whether the family stores matrices as [in, out], for which these schemes are not defined.
    Raises CheckpointError naming what is not understood.
    """
    section = content.get(QUANTISATION)
    if section is None:
        return None
    method = section.get("quant_method") if isinstance(section, dict) else None
    if isinstance(section, dict) and method is None and section.get("load_in_8bit") is True:
        method = "bitsandbytes"  # the first versions did not name it
    if not isinstance(method, str) or method not in _ALLOWED or transposes:
        _refuse(f"{QUANTISATION}.quant_method", method)
    for key, value in section.items():
        if key in ("quant_method", *_NO_EFFECT, *_SKIPPED) or (key, method) == ("weight_block_size", "fp8"):
            continue
        if key not in _ALLOWED[method] or value not in _ALLOWED[method][key]:
            _refuse(f"{QUANTISATION}.{key}", value)
    skipped = _skipped(section)
    if method == "bitsandbytes":
        if section.get("load_in_8bit") is not True:
            _refuse(f"{QUANTISATION}.load_in_8bit", section.get("load_in_8bit"))
        return Scheme(kind="int8", dtype="I8", skipped=skipped)
    if section.get("fmt", "e4m3") != "e4m3":
        _refuse(f"{QUANTISATION}.fmt", section["fmt"])
    block = section.get("weight_block_size", [128, 128])
    if block is None:
        return Scheme(kind="fp8", dtype="F8_E4M3", skipped=skipped)
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(isinstance(side, int) and side >= 1 for side in block):
        _refuse(f"{QUANTISATION}.weight_block_size", block)
    return Scheme(kind="fp8", dtype="F8_E4M3", block=(block[0], block[1]), skipped=skipped)


def _skipped(section: Mapping[str, Any]) -> tuple[str, ...]:
    skipped: list[str] = []
    for key in _SKIPPED:
        names = section.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            _refuse(f"{QUANTISATION}.{key}", names)
        skipped += names
    return tuple(skipped)


def is_row_format(stored: Tensor) -> bool:
    """Whether bitsandbytes' weight_format says that codes lie row by row."""
    return stored.numel() == 1 and int(stored.to(torch.int64)) == 0


def _refuse(key: str, value: object) -> NoReturn:
    raise CheckpointError(
        f"config.json has {key} = {value!r}: weights stored as codes in a way that is not read here.",
        remedy=PLAIN_WEIGHTS,
    )
