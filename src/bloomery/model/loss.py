"""The loss: cross entropy of the next token and z-loss, in chunks so that few logits exist at a time.

On GPUs, logits in the working dtype are replaced by their gradient, so that they exist once.

Legend: n tokens, h hidden, v vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bloomery.kernels.available import has_triton
from bloomery.model.layers import MatmulMode, linear
from bloomery.model.native_kernels import entropy_gradient, has_amx
from bloomery.model.products import add_product, rounded_product

IGNORED = -100


class LossSums(NamedTuple):
    """Sums over the tokens that are not ignored, fp32 scalars.

    total: the sum of both terms, to differentiate (after dividing by the tokens of the global batch).
    cross_entropy, z: the two terms, detached, for reports.
    """

    total: Tensor
    cross_entropy: Tensor
    z: Tensor


def next_token_loss(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    z_loss: float = 0.0,
    chunk: int = 1024,
    matmul_mode: MatmulMode = "native",
    on_units: bool = False,
    fused: bool = False,
) -> LossSums:
    """Return the summed −ln p(target) + `z_loss` × log-partition², which keeps the log-partition near 0
    (PaLM, §5).

    hidden: [..., h] in the working dtype.
    head_weight: [v, h].
    targets: int64 [...]; −100 is ignored.
    chunk: number of tokens whose logits exist at one time; their softmax is taken in fp32.
    matmul_mode: how matmuls are computed.
    on_units: whether the processor `has_amx`; the native library then computes the gradient of bf16 logits.
    fused: whether the machine `has_triton`; on GPUs the logits are then replaced by their gradient.
    Gradients are computed in the forward pass, where the logits exist anyway; the backward pass only scales
    them.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or head_weight.requires_grad)
    if wants_gradient:
        on_units = on_units and hidden.dtype == torch.bfloat16 and hidden.device.type == "cpu"
        fused = fused and matmul_mode == "native" and supports_fused_loss(hidden)
        total, cross_entropy, z = _Loss.apply(
            hidden, head_weight, targets, z_loss, chunk, matmul_mode, on_units, fused
        )
        return LossSums(total, cross_entropy, z)
    cross_entropy = z = torch.zeros((), device=hidden.device)
    for rows, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        logits = linear(rows, head_weight, matmul_mode=matmul_mode).float()
        chunk_entropy, chunk_z, _ = _terms(logits, wanted, z_loss)
        cross_entropy, z = cross_entropy + chunk_entropy, z + chunk_z
    return LossSums(cross_entropy + z, cross_entropy, z)


class NextTokenLoss(nn.Module):
    """`next_token_loss` as a part of a decoder; a layout that splits the vocabulary replaces it by its
    own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_units, self.has_triton = has_amx(), has_triton()  # asked here, as compiled code cannot

    def forward(
        self,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        *,
        z_loss: float,
        chunk: int,
        matmul_mode: MatmulMode,
    ) -> LossSums:
        """Return sums over the tokens of `targets` [b, s]; hidden [b, s, h], head_weight [v, h]."""
        return next_token_loss(
            hidden,
            head_weight,
            targets,
            z_loss=z_loss,
            chunk=chunk,
            matmul_mode=matmul_mode,
            on_units=self.has_units,
            fused=self.has_triton,
        )


class _Loss(torch.autograd.Function):
    """Computes the sums, and on the way the gradient of their total."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        z_loss: float,
        chunk: int,
        matmul_mode: MatmulMode,
        on_units: bool,  # noqa: FBT001  — autograd's functions have positional arguments only
        fused: bool,  # noqa: FBT001
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.weight_dtype = head_weight.dtype
        if fused:
            by_hidden, by_weight, cross_entropy, z = loss_and_gradients(
                hidden, head_weight, targets, z_loss=z_loss, chunk=chunk
            )
            ctx.save_for_backward(by_hidden, by_weight)
            ctx.mark_non_differentiable(cross_entropy, z)
            return cross_entropy + z, cross_entropy, z
        wide = torch.float32 if matmul_mode == "fp32" else hidden.dtype
        rows_of_chunks, weight = hidden.to(wide), head_weight.to(wide)
        cross_entropy = z = torch.zeros((), device=hidden.device)
        hidden_gradients = []
        weight_gradient: Tensor | None = None
        for rows, wanted in zip(rows_of_chunks.split(chunk), targets.split(chunk), strict=True):
            logits = (rows @ weight.t()).to(hidden.dtype)  # [n, v]
            if on_units:
                slope, entropies, zs = entropy_gradient(logits, wanted, z_loss)
                chunk_entropy, chunk_z = entropies.sum(), zs.sum()
            else:
                logits = logits.float()
                chunk_entropy, chunk_z, log_partition = _terms(logits, wanted, z_loss)
                slope = _slope(logits, wanted, log_partition, z_loss).to(hidden.dtype)  # [n, v]
            cross_entropy, z, slope = cross_entropy + chunk_entropy, z + chunk_z, slope.to(wide)
            hidden_gradients.append(slope @ weight)
            part = (slope.t() @ rows).float()
            weight_gradient = part if weight_gradient is None else weight_gradient + part
        assert weight_gradient is not None, "a batch has at least one token"
        ctx.save_for_backward(torch.cat(hidden_gradients).to(hidden.dtype), weight_gradient)
        ctx.mark_non_differentiable(cross_entropy, z)
        return cross_entropy + z, cross_entropy, z

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        hidden_gradient, weight_gradient = ctx.saved_tensors
        scaled_hidden = (hidden_gradient * scale).to(hidden_gradient.dtype)
        return (
            scaled_hidden,
            rounded_product(weight_gradient, scale, ctx.weight_dtype),
            None,
            None,
            None,
            None,
            None,
            None,
        )


def _terms(logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return summed cross entropy, summed z term, and each token's log-partition [n], of fp32 logits [n,
    v].
    """
    counts = targets != IGNORED
    log_partition = logits.logsumexp(-1)
    target_logit = logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    cross_entropy = torch.where(counts, log_partition - target_logit, 0.0).sum()
    z = z_loss * torch.where(counts, log_partition.square(), 0.0).sum()
    return cross_entropy, z, log_partition


def _slope(logits: Tensor, targets: Tensor, log_partition: Tensor, z_loss: float) -> Tensor:
    """Return the fp32 gradient [n, v] of both terms' sum by the logits."""
    vocabulary = torch.arange(logits.shape[-1], device=logits.device)
    probability = torch.exp(logits - log_partition[:, None])
    pull = 1.0 + 2.0 * z_loss * log_partition
    slope = probability * pull[:, None] - (vocabulary == targets[:, None]).float()
    return torch.where((targets != IGNORED)[:, None], slope, 0.0)


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
    from bloomery.kernels.triton_loss import write_loss_gradient  # only where Triton is

    assert hidden.shape[0], "a batch has at least one token"
    by_hidden, by_weight, *_ = _room(hidden, weight)
    terms = torch.empty(2, hidden.shape[0], device=hidden.device)
    for first in range(0, hidden.shape[0], chunk):
        at = slice(first, first + chunk)
        logits = hidden[at] @ weight.t()  # [chunk, v], from the next line on their gradient
        write_loss_gradient(logits, targets[at], z_loss, terms[0, at], terms[1, at])
        torch.mm(logits, weight, out=by_hidden[at])
        add_product(by_weight, logits.t(), hidden[at], is_first=first == 0)
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
