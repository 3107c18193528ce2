"""The loss where each rank of a tensor-parallel line holds a range of the vocabulary.

Logits are never gathered: a chunk's ranks exchange two numbers a token. Legend: n tokens, h hidden, v/tp this
rank's rows of the head, its padding at their end.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bloomery.model.linear import Products
from bloomery.model.loss import IGNORED, LossSums
from bloomery.parallel.collectives import Enter, Line


class SplitVocabularyLoss(nn.Module):
    """`next_token_loss` over a line of ranks; every rank returns the sums over the whole vocabulary.

    rows: the vocabulary's rows held here; further rows of the head are padding.
    """

    def __init__(self, line: Line, rows: range, *, sequence: bool) -> None:
        super().__init__()
        self.enter = Enter(line, sequence=sequence)
        self.line, self.rows = line, rows

    def forward(
        self,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        *,
        z_loss: float,
        chunk: int,
        products: Products,
    ) -> LossSums:
        """Sums over the tokens of `targets` [b, s]. hidden: [b, s, h], or [b, s/tp, h] of a split sequence.

        Collective over the line. `chunk` tokens' logits exist at a time.
        """
        hidden = self.enter(hidden).flatten(0, -2)
        wanted = torch.is_grad_enabled() and (hidden.requires_grad or head_weight.requires_grad)
        terms = _Terms(self.line, self.rows, z_loss=z_loss, chunk=chunk, products=products)
        if wanted:
            return LossSums(*_SplitLoss.apply(hidden, head_weight, targets.flatten(), terms))
        wide = torch.float32 if products == "fp32" else hidden.dtype
        weight, sums = head_weight.to(wide), torch.zeros(2, device=hidden.device)
        for rows, chunk_targets in zip(hidden.split(chunk), targets.flatten().split(chunk), strict=True):
            sums = sums + terms.of((rows.to(wide) @ weight.t()).to(hidden.dtype), chunk_targets)[0]
        return LossSums(sums.sum(), *sums.unbind())


class _Terms:
    """The terms of a chunk's loss, and their slopes, from this rank's logits."""

    def __init__(self, line: Line, rows: range, *, z_loss: float, chunk: int, products: Products) -> None:
        self.line, self.rows = line, rows
        self.z_loss, self.chunk, self.products = z_loss, chunk, products

    def of(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(summed cross entropy and z term [2], log-partitions [n], fp32 logits [n, v/tp])."""
        wide = logits.float()
        if wide.shape[1] > len(self.rows):
            wide[:, len(self.rows) :] = float("-inf")  # padding has no probability, and so no gradient
        mine = self._is_here(targets)
        found = wide.gather(1, (targets - self.rows.start).clamp(0, len(self.rows) - 1)[:, None])[:, 0]
        both = self.line.gather(torch.stack([wide.logsumexp(1), torch.where(mine, found, 0.0)]))  # [tp, 2, n]
        log_partition, target_logit = both[:, 0].logsumexp(0), both[:, 1].sum(0)
        counts = targets != IGNORED
        cross_entropy = torch.where(counts, log_partition - target_logit, 0.0).sum()
        z = self.z_loss * torch.where(counts, log_partition.square(), 0.0).sum()
        return torch.stack([cross_entropy, z]), log_partition, wide

    def slope(self, logits: Tensor, targets: Tensor, log_partition: Tensor) -> Tensor:
        """Gradient [n, v/tp] of both terms' sum by these logits, which it overwrites."""
        slope = logits.sub_(log_partition[:, None]).exp_()
        slope *= (1.0 + 2.0 * self.z_loss * log_partition)[:, None]
        mine = self._is_here(targets)
        column = (targets - self.rows.start).clamp(0, len(self.rows) - 1)
        slope.scatter_add_(1, column[:, None], -mine.float()[:, None])
        return slope.mul_((targets != IGNORED).float()[:, None])

    def _is_here(self, targets: Tensor) -> Tensor:
        return (targets >= self.rows.start) & (targets < self.rows.stop)


class _SplitLoss(torch.autograd.Function):
    """The sums, with the gradient of their total made on the way; hidden's is this rank's summand."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, hidden: Tensor, head_weight: Tensor, targets: Tensor, terms: _Terms
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = hidden.dtype
        wide = torch.float32 if terms.products == "fp32" else dtype
        weight, sums = head_weight.to(wide), torch.zeros(2, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros(weight.shape, device=weight.device)
        for start in range(0, hidden.shape[0], terms.chunk):
            chunk = slice(start, start + terms.chunk)
            rows = hidden[chunk].to(wide)
            part, log_partition, logits = terms.of((rows @ weight.t()).to(dtype), targets[chunk])
            sums = sums + part
            slope = terms.slope(logits, targets[chunk], log_partition).to(dtype).to(wide)
            hidden_gradient[chunk] = slope @ weight
            weight_gradient.addmm_(slope.t(), rows) if wide == torch.float32 else weight_gradient.add_(
                slope.t() @ rows
            )
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.weight_dtype = head_weight.dtype
        cross_entropy, z = sums[0].clone(), sums[1].clone()
        ctx.mark_non_differentiable(cross_entropy, z)
        return sums.sum(), cross_entropy, z

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        hidden_gradient, weight_gradient = ctx.saved_tensors
        scaled = (hidden_gradient * scale).to(hidden_gradient.dtype)
        return scaled, (weight_gradient * scale).to(ctx.weight_dtype), None, None
