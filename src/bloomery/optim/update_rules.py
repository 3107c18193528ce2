"""The update rules on one flat fp32 buffer: fused AdamW, and Muon, which orthogonalises its momentum.

AdamW skips updates on the device whose gradient is not finite. Muon's update is momentum brought near the
closest orthogonal matrix (Jordan et al., 2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bloomery import torch_private
from bloomery.optim.clip import GradientFacts
from bloomery.optim.groups import Placement


class FlatAdamW:
    """Applies AdamW with decoupled weight decay (Loshchilov & Hutter, 2019) to a flat master and its flat
    gradient.

    One tensor instead of hundreds makes the fused kernel a single pass over memory. The kernel is called
    without torch.optim.AdamW, because that imports the compiler, which takes a third of the start of a run
    that is not compiled.
    updates: fp32 scalar on the device, the number of this update for the bias correction. The caller counts,
    because buffers of one rule share it.
    divides: whether `step` may be called for some elements after others.
    """

    divides = True

    def __init__(
        self,
        master: Tensor,
        gradient: Tensor,
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        updates: Tensor,
    ) -> None:
        self._master, self._gradient = master, gradient
        self._betas, self._epsilon, self._weight_decay = betas, epsilon, weight_decay
        self.first_moment = torch.zeros_like(master)
        self.second_moment = torch.zeros_like(master)
        self._updates = updates

    @torch.no_grad()
    def step(self, facts: GradientFacts, *, learning_rate: float, elements: range | None = None) -> None:
        """Make one update with the gradient times `facts.coefficient`; make none if `facts.applies` is
        false.

        elements: those to update; None for all.
        """
        part = slice(None) if elements is None else slice(elements.start, elements.stop)
        # The fused kernel divides by grad_scale and leaves everything as it was where found_inf is 1:
        # GradScaler's contract with it, and the only gate without a host sync.
        usable = torch.where(facts.applies, facts.coefficient, torch.ones_like(facts.coefficient))
        torch_private.fused_adamw(
            self._master[part],
            self._gradient[part],
            (self.first_moment[part], self.second_moment[part]),
            self._updates,
            learning_rate=learning_rate,
            betas=self._betas,
            weight_decay=self._weight_decay,
            epsilon=self._epsilon,
            gradient_divisor=usable.reciprocal(),
            is_refused=(~facts.applies).float(),
        )

    @property
    def moments(self) -> dict[str, Tensor]:
        """The flat state by its name in checkpoints; each tensor is laid out like the master."""
        return {"first_moment": self.first_moment, "second_moment": self.second_moment}


class FlatMuon:
    """Applies Muon to the logical matrices of one flat fp32 buffer.

    Matrices of one shape are orthogonalised together. Updates are scaled by 0.2·sqrt(larger side), so that
    their root mean square is that of AdamW and one learning rate serves both (Liu et al., 2025).
    """

    divides = False  # whole matrices are orthogonalised

    def __init__(
        self,
        master: Tensor,
        gradient: Tensor,
        matrices: Sequence[Placement],
        *,
        momentum: float,
        weight_decay: float,
        iterations: int,
        matmul_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._master, self._gradient = master, gradient
        self.momentum_buffer = torch.zeros_like(master)
        self._by_shape: dict[tuple[int, ...], list[Placement]] = {}
        for matrix in matrices:
            self._by_shape.setdefault(matrix.shape, []).append(matrix)
        self._momentum, self._weight_decay = momentum, weight_decay
        self._iterations, self._matmul_dtype = iterations, matmul_dtype

    @torch.no_grad()
    def step(self, facts: GradientFacts, *, learning_rate: float, elements: range | None = None) -> None:
        """Make one update with the gradient times `facts.coefficient`; make none if `facts.applies` is
        false.

        elements: all of them, as `FlatAdamW` takes some.
        """
        assert elements is None or elements == range(self._master.numel()), "Muon updates whole matrices"
        gradient = torch.where(facts.applies, self._gradient * facts.coefficient, 0.0)
        momentum = torch.where(facts.applies, self._momentum, 1.0)
        self.momentum_buffer.mul_(momentum).add_(gradient)
        ahead = gradient.add_(self.momentum_buffer * momentum)  # Nesterov
        rate = learning_rate * facts.applies.float()
        self._master.mul_(1.0 - rate * self._weight_decay)
        for shape, matrices in self._by_shape.items():
            stacked = torch.stack([_view(ahead, matrix) for matrix in matrices])  # [n, rows, columns]
            updates = orthogonalise(stacked, iterations=self._iterations, matmul_dtype=self._matmul_dtype)
            updates *= -rate * 0.2 * math.sqrt(max(shape))
            for matrix, update in zip(matrices, updates.unbind(), strict=True):
                _view(self._master, matrix).add_(update)

    @property
    def moments(self) -> dict[str, Tensor]:
        """The flat state by its name in checkpoints, laid out like the master."""
        return {"momentum": self.momentum_buffer}


def orthogonalise(matrices: Tensor, *, iterations: int, matmul_dtype: torch.dtype = torch.float32) -> Tensor:
    """Return matrices whose singular values a quintic Newton-Schulz iteration has pushed towards 1.

    matrices: [n, rows, columns].
    The coefficients maximise the slope at 0, so singular values end in about [0.7, 1.2], which is all Muon
    needs (Jordan et al., 2024). So matmuls in bf16 suffice if the device has units for them.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrices.size(-2) <= matrices.size(-1)
    x = matrices if wide else matrices.mT  # [n, small, large]
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    x = x.to(matmul_dtype)
    for _ in range(iterations):
        gram = x @ x.mT  # [n, small, small]
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.to(matrices.dtype)
    return x if wide else x.mT


def _view(flat: Tensor, place: Placement) -> Tensor:
    return flat[place.start : place.start + place.numel].view(place.shape)
