"""Measures how large the inner tensors of a model are in a step: logits, hidden states and weights by block.

Attention logits that grow drowned runs before their loss showed it (Dehghani et al. 2023, "ViT-22B", and
Wortsman et al. 2023, "Small-scale proxies"). The maxima are taken in the step's own forwards, and stay on the
device until the step's report is read, so that they cost no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from bloomery.model.decoder import Block, Decoder
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.precision import MasterWeights

KINDS = ("logit", "hidden", "weight")
"""The rows of `InnerSizes.collect`: the largest attention logit, the largest absolute value behind the block,
and the root mean square of the block's weights."""
QUERIES = 16
"""The number of queries of each sample whose attention logits are measured, the last query among them."""


class InnerSizes:
    """Measures the inner tensors of this rank's blocks.

    stays_on: maxima are taken in every forward once a step wants them, since compiled code would otherwise be
        compiled twice; the sizes are then those of all steps since the last ones.
    """

    def __init__(
        self, decoder: Decoder, weights: MasterWeights, *, mesh: Mesh, sequence_length: int, stays_on: bool
    ) -> None:
        self._weights, self._mesh, self._stays_on = weights, mesh, stays_on
        self._layers = decoder.model.section.layers
        self._stride = max(1, sequence_length // QUERIES)
        self._blocks = [cast(Block, module) for module in decoder.blocks]
        self._logits = [torch.zeros(block.attention.heads, device=mesh.device) for block in self._blocks]
        self._hidden = [torch.zeros((), device=mesh.device) for _ in self._blocks]
        self._is_on = False

    def begin(self, *, wanted: bool, later: bool = False) -> None:
        """Take maxima in the forwards that follow, or no longer; call it before each step's forwards.

        Where heads are rescaled by their logits (`QueryKeyClip`), that takes the maxima of logits.
        later: whether some later step wants them; what stays on is then on from the first step.
        """
        wanted = wanted or (later and self._stays_on)
        for block, logits, hidden in zip(self._blocks, self._logits, self._hidden, strict=True):
            attention = block.attention
            if wanted and attention.logit_maxima is None:
                attention.logit_maxima, attention.logit_stride = logits, self._stride
            elif not wanted and attention.logit_maxima is logits:
                attention.logit_maxima = None
            block.hidden_maximum = hidden if wanted else None
            # A check may have repeated a step's forwards after its sizes were collected.
            if wanted and not (self._is_on and self._stays_on):
                logits.zero_()
                hidden.zero_()
        self._is_on = wanted

    @torch.no_grad()
    def collect(self) -> Tensor:
        """Return the sizes [kinds, layers], fp32 on the device, and begin anew; 0 for what was not measured.

        Collective over the peer, after the forwards and before the update.
        """
        sizes = torch.zeros((2, self._layers), device=self._mesh.device)
        for block, own, hidden in zip(self._blocks, self._logits, self._hidden, strict=True):
            logits = block.attention.logit_maxima
            sizes[0, block.index] = own.amax() if logits is None else logits.amax()
            sizes[1, block.index] = hidden
            own.zero_()
            hidden.zero_()
        # No rank's NaN is lost among other ranks' numbers, and guards pass over what is not finite.
        sizes.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        for axis in (self._mesh.data, self._mesh.tensor, self._mesh.pipeline):
            axis.all_reduce(sizes, maximum=True)
        return torch.cat([sizes, self._weights.root_mean_squares(self._layers)[None]])


def by_kind(sizes: Sequence[float]) -> dict[str, list[float]]:
    """Return the flattened sizes of `InnerSizes.collect` as lists by block, by kind."""
    layers = len(sizes) // len(KINDS)
    return {kind: list(sizes[row * layers : (row + 1) * layers]) for row, kind in enumerate(KINDS)}
