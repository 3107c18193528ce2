"""fp32 masters under weights of the working precision, and gradients that accumulate in fp32."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from bloomery.checkpoint.state import Box, Json, Scope, StateEntry
from bloomery.model.linear import products_for
from bloomery.optim.clip import Counted, GradientFacts, examine
from bloomery.optim.groups import GroupLayout
from bloomery.parallel.flat import FlatGroup, gather_around
from bloomery.parallel.mesh import Mesh

PEAK_PROBE_S = 0.15
DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""Of the working weights. 'fp8' narrows them, and what they are multiplied with, at each product."""


def resolve_precision(precision: str, device: torch.device) -> str:
    """'auto' is bf16 where the device multiplies it natively, else fp32."""
    if precision != "auto":
        return precision
    return "bf16" if multiplies_bf16(device) else "fp32"


def multiplies_bf16(device: torch.device) -> bool:
    """Whether bf16 products run on units made for them."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def measure_peak_flops(device: torch.device, precision: str) -> float:
    """FLOP/s of one large square matrix product here, the reference of MFU. Takes about 0.2 s.

    In the run's precision; in fp32 where that is what the device multiplies with (see `linear`).
    """
    dtype = DTYPES[resolve_precision(precision, device)]
    if products_for(device, dtype) == "fp32":
        dtype = torch.float32
    size = 8192 if device.type == "cuda" else 1024
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    best, deadline = math.inf, time.perf_counter() + PEAK_PROBE_S
    while time.perf_counter() < deadline or best == math.inf:
        started = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


class MasterWeights:
    """Every parameter of a module, as views into flat buffers, one set of buffers for each group.

    master (fp32) is what is stored, exported and updated; the module computes with `working` (the same
    memory in fp32), refreshed by `publish`. After each backward, gradients are added up in fp32; after
    `reduce`, `gradient` is that of the global batch. zero: what of it ranks share (see `FlatGroup`).
    """

    def __init__(
        self,
        module: nn.Module,
        layouts: Sequence[GroupLayout],
        working: torch.dtype,
        *,
        mesh: Mesh,
        zero: int = 0,
        offload: bool = False,
    ) -> None:
        self._mesh = mesh
        parameters = dict(module.named_parameters())
        self._groups = [
            FlatGroup(layout, parameters, mesh=mesh, zero=zero, offload=offload) for layout in layouts
        ]
        self._group_of = {parameter: group for group in self._groups for parameter in group.parameters}
        self.layouts = tuple(layouts)
        self.scope: Scope = "shared"
        """Of the masters, between peers."""
        self.master = [group.master for group in self._groups]
        self.gradient = [group.gradient for group in self._groups]
        for parameter in self._group_of:
            parameter.register_post_accumulate_grad_hook(self._accumulate)
        if zero == 3:
            for name, part in module.named_modules():
                groups = [group for group in self._groups if group.layout.bucket == name != ""]
                if groups:
                    gather_around(part, groups)
        self.recast(working)

    def recast(self, working: torch.dtype) -> None:
        """Give the module weights of another precision, from the masters. Collective over the peer."""
        self.dtype = working
        for group in self._groups:
            group.recast(working)
        self.publish()

    @property
    def working(self) -> list[Tensor]:
        """The flat buffers that the module's parameters are views of."""
        return [group.working for group in self._groups]

    @property
    def reduced(self) -> list[Tensor]:
        """The gradients as this rank holds them after `reduce`, on the device."""
        return [group.reduced for group in self._groups]

    def follow_reduced(self) -> None:
        """Take over what was written to `reduced`, where the update is made from a copy of it."""
        for group in self._groups:
            group.follow_reduced()

    @property
    def are_gathered(self) -> bool:
        """Whether a block's weights are gathered for each of its passes: then a pass is collective."""
        return any(group.shards_weights for group in self._groups)

    def begin_accumulation(self) -> None:
        """The next backward is the first of a step: it overwrites what the last step left."""
        for group in self._groups:
            group.begin_accumulation()

    def sweep(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up what a backward without hooks left in `grad`: one micro-batch's gradients at a time."""
        for parameter in parameters:
            self._accumulate(parameter)

    def end_accumulation(self) -> None:
        """Clear the gradients of parameters that no backward of this step reached."""
        for group in self._groups:
            group.end_accumulation()

    def publish(self) -> None:
        """Round the masters to the working precision. Collective over the peer."""
        for group in self._groups:
            group.publish()

    def reduce(self) -> None:
        """Make every gradient that of the global batch. Collective over the peer, once a step."""
        for group in self._groups:
            group.reduce()

    def examine(self, *, limit: float, unscale: Tensor | float) -> GradientFacts:
        """Norm, finiteness and clipping coefficient of the reduced gradients. Collective over the peer."""
        mesh = self._mesh
        counted = [
            Counted(
                gradient=flat.reduced,
                padding=group.padding,
                counts=mesh.replica.is_first
                and group.share != "echo"
                and (group.share in ("split", "echoed") or mesh.tensor.is_first),
            )
            for group, flat in zip(self.layouts, self._groups, strict=True)
        ]
        return examine(counted, limit=limit, unscale=unscale, total=mesh.sum)

    def state_entries(self) -> Iterable[StateEntry]:
        """The masters, by logical name."""
        for group, master in zip(self.layouts, self.master, strict=True):
            yield from entries_of(group, master, prefix="model", suffix="", scope=self.scope)

    def gradient_entries(self) -> Iterable[StateEntry]:
        """The gradients as this rank holds them after `reduce`, by logical name."""
        for group, gradient in zip(self.layouts, self.gradient, strict=True):
            yield from entries_of(group, gradient, prefix="gradient", suffix="")

    def state_values(self) -> dict[str, Json]:
        """Nothing but tensors."""
        return {}

    def load_state_values(self, values: Mapping[str, Json]) -> None:
        """Masters were filled in place: the working weights follow."""
        self.publish()

    def _accumulate(self, parameter: nn.Parameter) -> None:
        self._group_of[parameter].add(parameter)


def entries_of(
    group: GroupLayout, flat: Tensor, *, prefix: str, suffix: str, scope: Scope = "peer"
) -> Iterable[StateEntry]:
    """Describe a flat buffer of what `group` holds as boxes of logical tensors `prefix.NAME[.suffix]`."""
    for place in group.held_logical():
        name = f"{prefix}.{place.name}.{suffix}" if suffix else f"{prefix}.{place.name}"
        view = flat[place.start : place.start + place.numel].view(place.shape)
        yield StateEntry(
            name=name,
            global_shape=place.global_shape,
            dtype="float32",
            box=Box(offset=place.offset, shape=place.shape),
            tensor=view,
            scope=scope,
        )


class LossScale:
    """Dynamic loss scaling for fp16: doubled after so many good steps, halved at an overflow.

    All on the device, so that no step waits for the host. With other precisions the scale is 1 and stays.
    """

    GROWTH_INTERVAL = 1000
    SMALLEST = 1.0

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(2.0**16, device=device)
        self.good_steps = torch.tensor(0.0, device=device)

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Adapt to whether this step's gradients were finite."""
        counted = torch.where(finite, self.good_steps + 1, 0.0)
        grow = counted >= self.GROWTH_INTERVAL
        factor = torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5)
        self.scale.copy_(torch.clamp(self.scale * factor, min=self.SMALLEST))
        self.good_steps.copy_(torch.where(grow, 0.0, counted))

    def state_entries(self) -> Iterable[StateEntry]:
        """Scale and counter, so that a resume does not start to search again."""
        for name, tensor in (("scale", self.scale), ("good_steps", self.good_steps)):
            yield StateEntry(
                name=f"loss_scale.{name}",
                global_shape=(),
                dtype="float32",
                box=Box(offset=(), shape=()),
                tensor=tensor,
                scope="peer",
            )

    def state_values(self) -> dict[str, Json]:
        """Nothing but tensors."""
        return {}

    def load_state_values(self, values: Mapping[str, Json]) -> None:
        """Nothing but tensors."""
