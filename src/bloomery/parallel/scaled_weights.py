"""The 8-bit copies of a decoder's weights with many scales each, made once after each update.

Like those of one scale (`parallel/fp8_weights.py`) they are functions of the working weights, and no state of
a run. Weights that are gathered from shards are rounded when they have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from bloomery.config.parallel import ParallelSection
from bloomery.model.decoder import Decoder
from bloomery.model.fp8_scaling import (
    FineScaling,
    ScaledFactor,
    ScaledWeight,
    Scaling,
    largest_of_blocks,
    scaled,
)
from bloomery.model.layers import Linear
from bloomery.parallel.axis import Axis
from bloomery.parallel.fp8_weights import Fp8Weights
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.precision import MasterWeights
from bloomery.parallel.recompute import compiled_function


def narrow_weights(
    decoder: Decoder,
    weights: MasterWeights,
    *,
    mesh: Mesh,
    parallel: ParallelSection,
    scaling: Scaling,
    compiled: bool,
) -> NarrowWeights:
    """Return what keeps the weights of the decoder's linear layers in 8 bits, while that is used.

    compiled: whether the model is.
    """
    by_block = parallel.working == "by-block"
    keeps_copies = parallel.fp8_copies and not by_block and not weights.gathers_weights
    if scaling == "tensor":
        return Fp8Weights(decoder, weights, mesh=mesh, keeps_copies=keeps_copies, rounds_by_block=by_block)
    return ScaledWeights(
        decoder,
        weights,
        tensor=mesh.tensor,
        scaling=scaling,
        keeps_copies=keeps_copies,
        compiled=compiled and mesh.device.type == "cuda",
    )


class ScaledWeights:
    """Keeps `ScaledWeight` of each `Linear` in a decoder's blocks equal to the weights.

    Where no copies are kept, each product rounds.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: MasterWeights,
        *,
        tensor: Axis,
        scaling: FineScaling,
        keeps_copies: bool,
        compiled: bool,
    ) -> None:
        """tensor: the tensor axis.

        keeps_copies: whether the copies are in memory between the blocks' passes, as the weights then are.
        compiled: whether rounding is compiled, which then passes over each weight fewer times.
        """
        self._weights, self._tensor, self._scaling = weights, tensor, scaling
        self._keeps_copies = keeps_copies
        positions = weights.updated.positions
        layers = [part for part in decoder.blocks.modules() if isinstance(part, Linear)]
        self._layers = sorted(
            ((positions[layer.weight], layer) for layer in layers), key=lambda layer: layer[0]
        )
        self._unrounded: deque[tuple[int, Linear]] = deque()
        self._is_used = False
        self._largest, self._rounded = _largest_both_ways, _rounded_both_ways
        if compiled:
            self._largest = compiled_function(_largest_both_ways, device=decoder.device)
            self._rounded = compiled_function(_rounded_both_ways, device=decoder.device)
        weights.updated.after_rounding = self.refresh
        weights.updated.on_arrival = self.round_arrived

    def use(self, *, wanted: bool) -> None:
        """Give the layers their `ScaledWeight` from now on, or take them away and free their memory.

        Waits for weights that are being gathered. Collective over the shard and the tensor axis.
        """
        self._weights.updated.finish()
        self._is_used = wanted and self._keeps_copies
        for _, layer in self._layers:
            layer.scaled_weight = None
        self.refresh()
        self._weights.updated.finish()

    def refresh(self) -> None:
        """Have the copies made anew of the weights when they have arrived, if they are used."""
        self._unrounded = deque(self._layers if self._is_used else ())

    @torch.no_grad()
    def round_arrived(self, position: int) -> None:
        """Make the copies of the weights up to `position` those of the weights, which have arrived.

        Collective over the tensor axis: one reduction of a number for each row that its ranks share.
        """
        arrived = list[Linear]()
        while self._unrounded and self._unrounded[0][0] <= position:
            arrived.append(self._unrounded.popleft()[1])
        for layer, largest in zip(arrived, self._maxima(arrived), strict=True):
            rows, columns = self._rounded(layer.weight, *largest, self._scaling)
            if layer.scaled_weight is None:
                layer.scaled_weight = ScaledWeight(rows=rows, columns=columns)
                continue
            for kept, new in ((layer.scaled_weight.rows, rows), (layer.scaled_weight.columns, columns)):
                kept.codes.copy_(new.codes)
                kept.scales.copy_(new.scales)

    def _maxima(self, layers: Sequence[Linear]) -> list[tuple[Tensor, Tensor]]:
        """Return, for each weight, the largest magnitude of each block: first of rows, then of columns.

        Blocks are those of the whole weight, also where tensor-parallel ranks hold parts of one.
        """
        maxima = [self._largest(layer.weight, self._scaling) for layer in layers]
        if self._scaling != "row" or self._tensor.degree == 1 or not maxima:  # the same on all ranks here
            return maxima
        # Rows that run over inputs are split where inputs are, those over outputs where outputs are.
        split = [own[0 if layer.splits_input else 1] for layer, own in zip(layers, maxima, strict=True)]
        joined = torch.cat([part.flatten() for part in split]).float()
        # As integers of their bits, so that NaN is above all numbers on every rank; see `fp8_weights.py`.
        self._tensor.all_reduce(joined.view(torch.int32), maximum=True)
        for part, whole in zip(split, joined.split([part.numel() for part in split]), strict=True):
            part.copy_(whole.view_as(part))
        return maxima


def _largest_both_ways(weight: Tensor, scaling: FineScaling) -> tuple[Tensor, Tensor]:
    return (
        largest_of_blocks(weight, scaling, is_weight=True),
        largest_of_blocks(weight.t(), scaling, is_weight=True),
    )


def _rounded_both_ways(
    weight: Tensor, by_rows: Tensor, by_columns: Tensor, scaling: FineScaling
) -> tuple[ScaledFactor, ScaledFactor]:
    return (
        scaled(weight, scaling, is_weight=True, largest=by_rows),
        scaled(weight.t(), scaling, is_weight=True, largest=by_columns),
    )


NarrowWeights = Fp8Weights | ScaledWeights
"""What keeps weights in 8 bits, with one scale each or with many."""
