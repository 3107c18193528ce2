"""The cross entropy of logits that are split along the vocabulary over a tensor-parallel group.

Legend: b batch, s sequence, h hidden, n tokens, v vocabulary, tp degree of the group, v/tp this rank's rows
of the head, padding included.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bloomery.kernels.available import has_triton
from bloomery.model.layers import MatmulMode
from bloomery.model.loss import IGNORED, LossSums, supports_fused_loss
from bloomery.model.products import rounded_product
from bloomery.parallel.fused_vocabulary_loss import split_loss_and_gradients
from bloomery.parallel.tensor_collectives import EnterTensorParallelRegion, TensorGroup


class VocabularyParallelLoss(nn.Module):
    """`next_token_loss` over a tensor-parallel group whose ranks each hold some rows of the head.

    Every rank returns the sums over the whole vocabulary. Logits are never gathered: for each token the ranks
    exchange their log-partition and, where it is theirs, the target's logit. The log-partition of the whole
    vocabulary is the logsumexp of the ranks'. (Megatron-LM's vocab_parallel_cross_entropy exchanges the
    maximum, the target's logit and the sum of exponentials instead.) On GPUs the gradient of a chunk's logits
    replaces them (`fused_vocabulary_loss.py`).

    group: the tensor-parallel group.
    rows: the rows of the vocabulary that this rank holds; the head's further rows are padding.
    sequence: whether the hidden states are split along the sequence.
    """

    def __init__(self, group: TensorGroup, rows: range, *, sequence: bool) -> None:
        super().__init__()
        self.enter = EnterTensorParallelRegion(group, sequence=sequence)
        self.group, self.rows = group, rows
        self.has_triton = has_triton()  # asked here, as compiled code cannot

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
        """Sums over the tokens of `targets` [b, s]. Collective over the group.

        hidden: [b, s, h], or [b, s/tp, h] under sequence parallelism. head_weight: [v/tp, h].
        z_loss: weight of the z term. chunk: tokens whose logits exist at one time.
        matmul_mode: the precision in which matrices are multiplied.
        """
        hidden = self.enter(hidden).flatten(0, -2)
        has_gradient = torch.is_grad_enabled() and (hidden.requires_grad or head_weight.requires_grad)
        fused = self.has_triton and matmul_mode == "native" and supports_fused_loss(hidden)
        terms = _LossTerms(
            self.group, self.rows, z_loss=z_loss, chunk=chunk, matmul_mode=matmul_mode, fused=fused
        )
        if has_gradient:
            return LossSums(*_LossWithGradient.apply(hidden, head_weight, targets.flatten(), terms))
        wide = torch.float32 if matmul_mode == "fp32" else hidden.dtype
        weight, sums = head_weight.to(wide), torch.zeros(2, device=hidden.device)
        for rows, chunk_targets in zip(hidden.split(chunk), targets.flatten().split(chunk), strict=True):
            sums = sums + terms.of((rows.to(wide) @ weight.t()).to(hidden.dtype), chunk_targets)[0]
        return LossSums(sums.sum(), *sums.unbind())


class _LossTerms:
    """The loss of a chunk of tokens, and its gradient by the logits, from this rank's logits [n, v/tp].

    fused: whether a GPU's kernels compute both, and replace the logits by the gradient.
    """

    def __init__(
        self,
        group: TensorGroup,
        rows: range,
        *,
        z_loss: float,
        chunk: int,
        matmul_mode: MatmulMode,
        fused: bool,
    ) -> None:
        self.group, self.rows = group, rows
        self.z_loss, self.chunk, self.matmul_mode = z_loss, chunk, matmul_mode
        self.fused = fused

    def of(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(summed cross entropy and z term [2], log-partitions [n], fp32 logits [n, v/tp])."""
        wide = logits.float()
        if wide.shape[1] > len(self.rows):
            wide[:, len(self.rows) :] = float("-inf")  # padding has no probability, and so no gradient
        own_target_logit = wide.gather(1, self._column(targets))[:, 0]
        own_target_logit = torch.where(self._is_own(targets), own_target_logit, 0.0)
        both = self.group.all_gather(torch.stack([wide.logsumexp(1), own_target_logit]))  # [tp, 2, n]
        log_partition, target_logit = both[:, 0].logsumexp(0), both[:, 1].sum(0)
        counts = targets != IGNORED
        cross_entropy = torch.where(counts, log_partition - target_logit, 0.0).sum()
        z = self.z_loss * torch.where(counts, log_partition.square(), 0.0).sum()
        return torch.stack([cross_entropy, z]), log_partition, wide

    def gradient(self, logits: Tensor, targets: Tensor, log_partition: Tensor) -> Tensor:
        """Return the gradient of cross entropy plus z-loss with respect to `logits`, which it overwrites.

        logits, result: [n, v/tp], this rank's part of the vocabulary. targets, log_partition: [n].

        With log-partition Z and probabilities p = exp(logits - Z), cross entropy has the gradient p - onehot,
        and the z term w·Z² has 2·w·Z·p, since dZ/dlogits = p. Together: p·(1 + 2·w·Z) - onehot.
        """
        gradient = logits.sub_(log_partition[:, None]).exp_()
        gradient *= (1.0 + 2.0 * self.z_loss * log_partition)[:, None]
        is_own = self._is_own(targets)
        gradient.scatter_add_(1, self._column(targets), -is_own.float()[:, None])
        return gradient.mul_((targets != IGNORED).float()[:, None])

    def _is_own(self, targets: Tensor) -> Tensor:
        return (targets >= self.rows.start) & (targets < self.rows.stop)

    def _column(self, targets: Tensor) -> Tensor:
        """The column [n, 1] of each target in this rank's logits; any column for another rank's target."""
        return (targets - self.rows.start).clamp(0, len(self.rows) - 1)[:, None]


class _LossWithGradient(torch.autograd.Function):
    """The loss, with the gradients computed in the forward, chunk by chunk, so that no logits are kept.

    The gradient of the hidden states is this rank's summand; `EnterTensorParallelRegion` sums it.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, hidden: Tensor, head_weight: Tensor, targets: Tensor, terms: _LossTerms
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = hidden.dtype
        ctx.weight_dtype = head_weight.dtype
        if terms.fused:
            by_hidden, by_weight, cross_entropy, z = split_loss_and_gradients(
                hidden,
                head_weight,
                targets,
                z_loss=terms.z_loss,
                chunk=terms.chunk,
                rows=terms.rows,
                group=terms.group.group,
                degree=terms.group.degree,
            )
            ctx.save_for_backward(by_hidden, by_weight)
            ctx.mark_non_differentiable(cross_entropy, z)
            return cross_entropy + z, cross_entropy, z
        wide = torch.float32 if terms.matmul_mode == "fp32" else dtype
        weight, sums = head_weight.to(wide), torch.zeros(2, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros(weight.shape, device=weight.device)
        for start in range(0, hidden.shape[0], terms.chunk):
            chunk = slice(start, start + terms.chunk)
            rows = hidden[chunk].to(wide)
            part, log_partition, logits = terms.of((rows @ weight.t()).to(dtype), targets[chunk])
            sums = sums + part
            gradient = terms.gradient(logits, targets[chunk], log_partition).to(dtype).to(wide)
            hidden_gradient[chunk] = gradient @ weight
            if wide == torch.float32:
                weight_gradient.addmm_(gradient.t(), rows)
            else:
                weight_gradient.add_(gradient.t() @ rows)
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        cross_entropy, z = sums[0].clone(), sums[1].clone()
        ctx.mark_non_differentiable(cross_entropy, z)
        return sums.sum(), cross_entropy, z

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        hidden_gradient, weight_gradient = ctx.saved_tensors
        scaled = (hidden_gradient * scale).to(hidden_gradient.dtype)
        return scaled, rounded_product(weight_gradient, scale, ctx.weight_dtype), None, None
