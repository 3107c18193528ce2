"""The operator of attention within torch.compile, eager within; prints the differences as JSON."""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from bloomery.model.dropout import ElementKeys
from bloomery.model.fused_attention import Visibility, document_ranges, tiled_attention


def results(*, compiles: bool) -> list[Tensor]:
    """Return attention of documents with ALiBi and dropout, and its gradients by query, key and value."""
    random = torch.Generator().manual_seed(1)
    factors = [torch.randn(2, 20, heads, 16, generator=random).requires_grad_() for heads in (4, 2, 2)]
    starts, ends = document_ranges(torch.tensor([[0] * 7 + [1] * 13, [0] * 20]))
    visibility = Visibility(starts=starts, ends=ends, slopes=torch.rand(4, generator=random))

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=random).to(torch.int32)

    keys = ElementKeys(rows=words(2, 4, 20), columns=words(20))

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return tiled_attention(query * 2, key, value, visibility, keys=keys, rate=0.3) + 1

    if compiles:
        attention = torch.compile(attention, backend="aot_eager", fullgraph=True)
    mixed = attention(*factors)
    mixed.square().sum().backward()
    gradients = [factor.grad for factor in factors if factor.grad is not None]
    return [mixed.detach(), *gradients]


if __name__ == "__main__":
    pairs = zip(results(compiles=True), results(compiles=False), strict=True)
    sys.stdout.write(json.dumps([float((own - other).abs().max()) for own, other in pairs]) + "\n")
