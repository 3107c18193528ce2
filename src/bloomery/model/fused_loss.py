"""The loss on GPUs: logits in the working dtype are replaced by their gradient, so that they exist once.

Legend: n tokens, h hidden, v vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def supports_fused_loss(hidden: Tensor) -> bool:
    """Return whether `loss_and_gradients` can compute this dtype on this device, where Triton is."""
    return hidden.device.type == "cuda" and hidden.dtype in (torch.bfloat16, torch.float16)


def loss_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, z_loss: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the summed loss by hidden states and weight, and its two terms, fp32 scalars.

    hidden: [n, h]; weight: [v, h], whose gradient is fp32; targets: int64 [n], where a negative one counts
    nothing. chunk: number of tokens whose logits exist at one time.
    """
    by_hidden, by_weight, cross_entropy, z = torch.ops.bloomery.loss_and_gradients(
        hidden, weight, targets, z_loss, chunk
    )
    return by_hidden, by_weight, cross_entropy, z


# An operator, so that torch.compile leaves it whole; see `layers.py` for why it is made like this.
torch.library.define(
    "bloomery::loss_and_gradients",
    "(Tensor hidden, Tensor weight, Tensor targets, float z_loss, int chunk)"
    " -> (Tensor by_hidden, Tensor by_weight, Tensor cross_entropy, Tensor z)",
)


@torch.library.impl("bloomery::loss_and_gradients", "default")
def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from bloomery.kernels.triton_loss import write_slopes  # only where Triton is

    by_hidden, by_weight, *_ = _room(hidden, weight)
    by_weight.zero_()
    terms = torch.empty(2, hidden.shape[0], device=hidden.device)
    for first in range(0, hidden.shape[0], chunk):
        at = slice(first, first + chunk)
        logits = hidden[at] @ weight.t()  # [chunk, v], from the next line on their gradient
        write_slopes(logits, targets[at], z_loss, terms[0, at], terms[1, at])
        torch.mm(logits, weight, out=by_hidden[at])
        by_weight.add_(logits.t() @ hidden[at])
    return by_hidden, by_weight, terms[0].sum(), terms[1].sum()


@torch.library.register_fake("bloomery::loss_and_gradients")  # type: ignore[untyped-decorator]
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _room(hidden, weight)


def _room(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scalar = hidden.new_empty((), dtype=torch.float32)
    by_weight = weight.new_empty(weight.shape, dtype=torch.float32)
    return hidden.new_empty(hidden.shape), by_weight, scalar, torch.empty_like(scalar)
