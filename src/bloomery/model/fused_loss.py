"""The loss on GPUs: logits in the working dtype are replaced by their gradient, so that they exist once.

Legend: n tokens, h hidden, v vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bloomery.kernels.available import HAS_TRITON


def replaces_logits(hidden: Tensor) -> bool:
    """Whether `summed_terms` is quicker for this input than the loss in separate operations."""
    return HAS_TRITON and hidden.device.type == "cuda" and hidden.dtype in (torch.bfloat16, torch.float16)


def summed_terms(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, z_loss: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of both terms, to differentiate, and the summed cross entropy and z term, fp32 scalars.

    hidden: [n, h]; weight: [v, h]; targets: int64 [n], where a negative one counts nothing.
    chunk: number of tokens whose logits exist at one time.
    """
    total, cross_entropy, z = _Terms.apply(hidden, weight, targets, z_loss, chunk)
    return total, cross_entropy, z


class _Terms(torch.autograd.Function):
    """Computes the sums, and on the way the gradient of their total."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        by_hidden, by_weight, cross_entropy, z = torch.ops.bloomery.loss_and_gradients(
            hidden, weight, targets, z_loss, chunk
        )
        ctx.save_for_backward(by_hidden, by_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(cross_entropy, z)
        return cross_entropy + z, cross_entropy, z

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        by_hidden, by_weight = ctx.saved_tensors
        scaled = (by_hidden * scale).to(by_hidden.dtype)
        return scaled, (by_weight * scale).to(ctx.weight_dtype), None, None, None


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
