"""Attention by tiles against attention written out in fp64; prints the differences as JSON."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import mmap
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace

import torch
from torch import Tensor

from bloomery.kernels.rules import AttentionTiles, Rules, Tiles, tiles_for
from bloomery.model.dropout import ElementKeys, keeps
from bloomery.model.fused_attention import document_ranges

RATE = 0.3


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes and rules of one comparison."""

    length: int
    heads: int = 2
    kv_heads: int = 2
    width: int = 16
    documents: bool = False
    alibi: bool = False
    drops: bool = False


SMALL = (
    Case(length=19),
    Case(length=27, documents=True),
    Case(length=16, alibi=True, kv_heads=1, width=24),
    Case(length=24, documents=True, alibi=True, drops=True, kv_heads=1),
    Case(length=9, heads=4),
)
SMALL_TILES = AttentionTiles(
    forward=Tiles(queries=16, keys=8, warps=4, stages=2),
    backward_of_keys=Tiles(queries=8, keys=16, warps=4, stages=2),
    backward_of_queries=Tiles(queries=16, keys=8, warps=4, stages=2),
)
LARGE = (
    Case(length=1024, heads=4, kv_heads=4, width=128, alibi=True),
    Case(length=1024, heads=4, kv_heads=4, width=128, alibi=True, drops=True),
    Case(length=1000, heads=4, kv_heads=2, width=128, documents=True),
    Case(length=777, heads=4, kv_heads=1, width=64, documents=True, alibi=True, drops=True),
    Case(length=512, heads=2, kv_heads=2, width=80, documents=True),
)


def differences(
    case: Case,
    *,
    device: str,
    dtype: torch.dtype,
    tiles: AttentionTiles | None,
    lay: Callable[[Tensor], Tensor] | None = None,
) -> list[float]:
    """Return the largest errors of the result and of the gradients by query, key and value, as shares of the
    largest number of each.

    lay: returns a copy of tensors [b, s, heads, d] with the strides to test; None for those side by side.
    """
    lay = lay or fenced
    from bloomery.kernels.triton_attention import forward
    from bloomery.kernels.triton_attention_backward import backward

    tiles = tiles or tiles_for(case.width)
    random = torch.Generator(device).manual_seed(case.length)
    qkv = torch.randn(
        2, case.length, case.heads + 2 * case.kv_heads, case.width, generator=random, device=device
    ).to(dtype)
    query, key, value = lay(qkv).split((case.heads, case.kv_heads, case.kv_heads), dim=2)
    # Values lie by themselves, as they do beside rotated queries and keys: each factor has its own strides.
    value = lay(value.clone(memory_format=torch.contiguous_format))
    slope = lay(torch.randn(query.shape, generator=random, device=device).to(dtype))
    rules = _rules(case, random, device)
    given = {field.name: getattr(rules, field.name) for field in fields(rules)}
    rules = replace(rules, **{name: fenced(it) for name, it in given.items() if isinstance(it, Tensor)})
    mixed = lay(torch.empty(slope.shape, device=device, dtype=dtype))
    log_partition = fenced(torch.empty(2, case.heads, case.length, device=device))
    forward(query, key, value, rules, mixed, log_partition, tiles.forward)
    shapes = (query.shape, key.shape, key.shape)
    by_query, by_key, by_value = (lay(torch.empty(s, device=device, dtype=dtype)) for s in shapes)
    slopes = (by_query, by_key, by_value)
    backward(slope, query, key, value, rules, mixed, log_partition, slopes, tiles=tiles)
    factors = [factor.double().requires_grad_() for factor in (query, key, value)]
    expected = written_out(*factors, rules)
    expected.backward(slope.double())
    pairs = [(mixed, expected.detach())]
    pairs += [
        (own, factor.grad) for own, factor in zip(slopes, factors, strict=True) if factor.grad is not None
    ]
    return [float((own - other).abs().max() / other.abs().max()) for own, other in pairs]


def fenced(tensor: Tensor) -> Tensor:
    """Return a copy that ends at a page which nobody may read or write; on a GPU the tensor itself.

    So a kernel that reads a row or a number too many ends the process, whether or not it uses them.
    """
    if tensor.device.type != "cpu":
        return tensor
    size, page = tensor.numel() * tensor.element_size(), mmap.PAGESIZE
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + page)
    fence = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + room
    no_access = 0
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(fence), page, no_access) == 0
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=room - size)
    return copy.view(tensor.shape).copy_(tensor)


def written_out(query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
    """Return attention with its scores as a tensor, [b, s, heads, d]."""
    group = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[3] ** -0.5
    place = torch.arange(query.shape[1], device=query.device)
    if rules.slopes is not None:
        scores = scores - rules.slopes.double()[:, None, None] * (place[:, None] - place)
    seen = (place <= place[:, None])[None]
    if rules.starts is not None:
        seen = seen & (place >= rules.starts[:, :, None])
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    if rules.row_keys is not None and rules.column_keys is not None:
        kept = keeps(ElementKeys(rules.row_keys, rules.column_keys), rules.rate)
        weights = torch.where(kept, weights / (1 - rules.rate), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


def _rules(case: Case, random: torch.Generator, device: str) -> Rules:
    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=random, device=device).to(torch.int32)

    breaks = torch.rand(2, case.length, generator=random, device=device) < 0.1
    starts, ends = document_ranges(breaks.cumsum(1))
    return Rules(
        starts=starts if case.documents else None,
        ends=ends if case.documents else None,
        slopes=torch.rand(case.heads, generator=random, device=device) if case.alibi else None,
        row_keys=words(2, case.heads, case.length) if case.drops else None,
        column_keys=words(case.length) if case.drops else None,
        rate=RATE if case.drops else 0.0,
    )


if __name__ == "__main__":
    faulthandler.enable()
    found = [
        asdict(case)
        | {"differences": differences(case, device="cpu", dtype=torch.float32, tiles=SMALL_TILES)}
        for case in SMALL
    ]
    sys.stdout.write(json.dumps(found) + "\n")
