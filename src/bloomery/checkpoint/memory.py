"""The bytes behind a tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch

PIECE_BYTES = 32 << 20
"""What saving and loading hold at a time of a tensor that cannot be read or written where it lies."""


def element_type(name: str) -> torch.dtype:
    """Return torch's element type of a name in ITEM_BYTES."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in main memory; writing to them writes the tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@torch.no_grad()
def pieces_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in row-major order: views of its memory where it is plain, else copies."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield memory_of(tensor)
        return
    rows = max(1, PIECE_BYTES // (tensor[0].numel() * tensor.element_size()))
    for start in range(0, len(tensor), rows):
        yield memory_of(tensor[start : start + rows].cpu().contiguous())
