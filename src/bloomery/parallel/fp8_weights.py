"""The scales of a decoder's weights in 8 bits, and the 8-bit copies of those that are kept between updates.

They are functions of the master weights, and are made again after each change of those. They are no state of
a run. Scales come from the shards of the masters, as these are rounded; a weight that is gathered from shards
is rounded to 8 bits when it has arrived, which a forward waits for block by block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bloomery.model.decoder import Decoder
from bloomery.model.fp8 import (
    FP8_FORWARD,
    Fp8Weight,
    fp8_scale,
    has_fp8_units,
    largest_magnitude,
    write_fp8,
)
from bloomery.model.layers import Linear
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.precision import MasterWeights


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A linear layer, and where its weight is in the masters: the group's index, and elements of its buffer.

    position: of the weight in `UpdatedWeights.positions`.
    held: those that this rank holds, counted within the master; empty where it holds none.
    """

    module: Linear
    position: int
    group: int
    held: range


class Fp8Weights:
    """Keeps `Fp8Weight` of each `Linear` in a decoder's blocks equal to the weights.

    Where working weights are kept, so are their 8-bit copies, which all micro-batches of a step use. Where
    working weights are freed around each block, only the scales are kept, and each product rounds. It then
    reads the masters, if they are whole and on the device, and such weights take no memory in 16 bits at all.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: MasterWeights,
        *,
        mesh: Mesh,
        keeps_copies: bool,
        rounds_by_block: bool,
    ) -> None:
        """keeps_copies: whether 8-bit copies are kept, which needs working weights that are kept too.

        rounds_by_block: whether working weights are rounded from the masters for each block, and freed.
        """
        self._weights, self._mesh, self._keeps_copies = weights, mesh, keeps_copies
        modules = {
            f"{name}.weight": part
            for name, part in decoder.named_modules()
            if isinstance(part, Linear) and name.startswith("blocks.")
        }
        layers = [
            _Layer(
                module=modules[place.name],
                position=weights.updated.positions[modules[place.name].weight],
                group=index,
                held=_within(place.start, place.numel, layout.held),
            )
            for index, layout in enumerate(weights.layouts)
            for place in layout.parameters
            if place.name in modules
        ]
        self._layers = sorted(layers, key=lambda layer: layer.position)
        self._unrounded: deque[_Layer] = deque()
        # With whole masters on the device nothing is gathered, and no product needs the working weights.
        is_here = weights.master[0].device.type == mesh.device.type
        self._reads_masters = rounds_by_block and is_here and not weights.gathers_weights
        self._is_used = False
        weights.updated.after_rounding = self.refresh
        weights.updated.on_arrival = self.round_arrived

    def use(self, *, wanted: bool) -> None:
        """Give the layers their `Fp8Weight` from now on, or take them away and free their memory.

        Waits for weights that are being gathered. Collective over the tensor and the shard axis if `wanted`.
        """
        self._weights.updated.finish()
        self._is_used = wanted
        read = {layer.group for layer in self._layers} if wanted and self._reads_masters else set()
        assert all(self._is_of_layers(index) for index in read), "matrices have groups of their own"
        self._weights.read_masters(read)
        for layer in self._layers:
            layer.module.fp8_weight = self._room(layer) if wanted else None
        self.refresh()
        self._weights.updated.finish()

    @torch.no_grad()
    def refresh(self) -> None:
        """Make scales those of the masters as they are now, if they are used; copies follow on arrival.

        Collective over the same axes as `use`: one reduction over each, of one number for each layer.
        """
        if not self._is_used or not self._layers:
            return
        scales = fp8_scale(self._largest(), FP8_FORWARD)
        for layer, scale in zip(self._layers, scales.unbind(), strict=True):
            fp8_weight = layer.module.fp8_weight
            assert fp8_weight is not None, "layers have theirs while it is used"
            fp8_weight.scale.copy_(scale)
        self._unrounded = deque(self._layers if self._keeps_copies else ())

    @torch.no_grad()
    def round_arrived(self, position: int) -> None:
        """Make the copies of the weights up to `position` those of the weights, which have arrived."""
        while self._unrounded and self._unrounded[0].position <= position:
            module = self._unrounded.popleft().module
            fp8_weight = module.fp8_weight
            assert fp8_weight is not None, "layers have theirs while it is used"
            write_fp8(module.weight, fp8_weight.scale, fp8_weight.codes, fp8_weight.transposed)

    def _is_of_layers(self, group: int) -> bool:
        count = sum(layer.group == group for layer in self._layers)
        return len(self._weights.layouts[group].parameters) == count

    def _room(self, layer: _Layer) -> Fp8Weight:
        weight = layer.module.weight
        # A tensor of its own for each scale: the units for 8 bits and compiled code read aligned addresses.
        scale = torch.empty((), device=weight.device)
        if self._reads_masters:
            master = self._weights.master[layer.group][layer.held.start : layer.held.stop]
            return Fp8Weight(scale=scale, master=master.view(weight.shape))
        if not self._keeps_copies:
            return Fp8Weight(scale=scale)
        codes = torch.empty(weight.shape, dtype=FP8_FORWARD, device=weight.device)
        has_units = has_fp8_units(weight.device)
        transposed = codes.new_empty(weight.shape[::-1]) if has_units else None
        return Fp8Weight(scale=scale, codes=codes, transposed=transposed)

    def _largest(self) -> Tensor:
        """Return the largest magnitude of each layer's whole weight, fp32 [layers]."""
        largest = torch.stack([*self._own_largest()]).to(self._mesh.device)
        # As integers of their bits: these have the order of the magnitudes, and NaN is above all numbers on
        # every rank, while a reduction of floats may lose it.
        bits = largest.view(torch.int32)
        self._mesh.tensor.all_reduce(bits, maximum=True)
        self._mesh.shard.all_reduce(bits, maximum=True)
        return largest

    def _own_largest(self) -> Iterator[Tensor]:
        """Yield the largest magnitude of what this rank has of each layer's weight, an fp32 scalar."""
        for layer in self._layers:
            own = (
                self._weights.rounded_shard(layer.group)
                if self._keeps_copies
                else self._weights.master[layer.group]
            )
            if not layer.held:
                yield own.new_zeros((), dtype=torch.float32)
                continue
            # Rounding keeps the order, so the largest master gives the largest working weight.
            largest = largest_magnitude(own[layer.held.start : layer.held.stop])
            yield largest.to(self._weights.dtype).float()


def _within(start: int, numel: int, held: range) -> range:
    """Return the elements [start, start + numel) that are in `held`, counted from the start of that."""
    return range(max(start, held.start) - held.start, min(start + numel, held.stop) - held.start)
