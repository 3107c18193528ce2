"""Mixed precision: fp32 master weights and fp32 gradient accumulation.

After Micikevicius et al. 2018, "Mixed Precision Training": the model computes with working weights that are
rounded from the masters after each update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from bloomery import torch_private
from bloomery.checkpoint.format.state import Box, Json, Scope, StateEntry
from bloomery.model.layers import matmul_mode_for
from bloomery.optim.clip import CountedGradient, GradientFacts, examine, squared_norms
from bloomery.optim.groups import GroupLayout, Placement
from bloomery.parallel.bit_digest import GradientTap
from bloomery.parallel.block_weights import gather_around_blocks
from bloomery.parallel.flat import (
    WHOLE_ON_DEVICE,
    FlatGroup,
    ReductionsInFlight,
    WeightStorage,
    tied_head_of,
    weak_hook,
)
from bloomery.parallel.gradient_buckets import GradientBuckets
from bloomery.parallel.host_copies import link_to
from bloomery.parallel.host_numbers import to_device
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.updated_weights import UpdatedWeights

PEAK_PROBE_S = 0.15  # for which matmuls are repeated
DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""Precision → dtype of the working weights. With 'fp8' each matmul rounds its factors to 8 bits."""


def resolve_precision(precision: str, device: torch.device) -> str:
    """The precision that a setting means: 'auto' is bf16 if `device` has units for it, else fp32."""
    if precision != "auto":
        return precision
    return "bf16" if multiplies_bf16(device) else "fp32"


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the device has units for bf16 matmuls."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch_private.has_bf16_matmul()


def measure_peak_flops(device: torch.device, precision: str) -> float:
    """Measure the FLOP/s of one large square matmul, the reference of MFU. Takes about 0.2 s.

    precision: the run's. The product is in fp32 if that is what the device multiplies with (`layers.linear`).
    """
    dtype = DTYPES[resolve_precision(precision, device)]
    if matmul_mode_for(device, dtype) == "fp32":
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
    """The fp32 master weights of a module, its working weights, and their gradients, in flat buffers.

    Each parameter group has its own buffers (`FlatGroup`). A hook adds each gradient to the fp32 accumulator
    as soon as backward has made it.

    master: the fp32 values, which are updated, saved and exported; one buffer for each group.
    gradient: the fp32 gradients; those of the global batch after `reduce`, and `wait_for_gradients` where
        they are in the CPU's memory.
    layouts: what lies where in each group's buffers.
    names: of the logical tensors of the whole model, in an order that all ranks share.
    dtype: of the working weights.
    updated: gathers working weights after an update.
    scope: whether the masters are equal on all peers of an elastic run ('shared'), or this peer's own
        ('peer').
    """

    def __init__(
        self,
        module: nn.Module,
        layouts: Sequence[GroupLayout],
        working: torch.dtype,
        *,
        mesh: Mesh,
        storage: WeightStorage = WHOLE_ON_DEVICE,
        names: Sequence[str] | None = None,
        bucket_bytes: int = 0,
        overlaps: bool = True,
        prefetch_blocks: int = 1,
    ) -> None:
        """working: dtype of the working weights. bucket_bytes, overlaps: see `GradientBuckets`.

        prefetch_blocks: how many blocks ahead sharded weights are gathered, where it overlaps.

        names: of the logical tensors of the whole model, on all ranks in one order; None where this rank has
            them all.
        """
        self._mesh = mesh
        own_names = dict.fromkeys(place.name for layout in layouts for place in layout.logical)
        self.names = tuple(own_names if names is None else names)
        parameters = dict(module.named_parameters())
        in_flight = ReductionsInFlight(1 if overlaps else 0)
        link = link_to(mesh.device)
        make = partial(FlatGroup, mesh=mesh, storage=storage, in_flight=in_flight, link=link)
        self._groups = [make(layout, parameters) for layout in layouts]
        self._group_of = {parameter: group for group in self._groups for parameter in group.parameters}
        self.buckets = GradientBuckets(
            self._groups, tuple(parameters.values()), bucket_bytes=bucket_bytes, overlaps=overlaps
        )
        self._tap: GradientTap | None = None
        self.layouts = tuple(layouts)
        self.scope: Scope = "shared"
        self.master = [group.master for group in self._groups]
        self.gradient = [group.gradient for group in self._groups]
        for parameter in self._group_of:
            parameter.register_post_accumulate_grad_hook(weak_hook(self._accumulate))
        self._tied_head = tied_head_of(module, mesh, partial(self._accumulate, is_last=False))
        if storage.zero == 3 or storage.rounds_by_block:
            # Rounding takes the device as much time ahead of a block as before it, and holds more blocks.
            ahead = prefetch_blocks if overlaps and self.gathers_weights else 0
            gather_around_blocks(module, self._groups, ahead=ahead)
        self.updated = UpdatedWeights(self._groups, module, bucket_bytes=bucket_bytes, overlaps=overlaps)
        self.set_working_dtype(working)

    def set_working_dtype(self, working: torch.dtype) -> None:
        """Round the masters to working weights of another dtype. Collective over the peer."""
        self.updated.finish()
        self.dtype = working
        for group in self._groups:
            group.set_working_dtype(working)
        if self._tied_head is not None:
            self._tied_head.set_working_dtype(working)
        self.copy_masters_to_working()

    @property
    def working(self) -> list[Tensor]:
        """The flat buffers of which the module's parameters are views, one for each group.

        Waits for weights that are being gathered.
        """
        self.updated.finish()
        return [group.working for group in self._groups]

    def rounded_shard(self, group: int) -> Tensor:
        """Return what this rank's masters of a group were rounded to, within the working weights.

        It is valid where these are kept, after the masters were rounded and before others arrive.
        """
        return self._mesh.shard.local_shard(self._groups[group].working)

    @property
    def reduced_gradient(self) -> list[Tensor]:
        """The gradients of this rank's shards after `reduce`, on the device, one for each group."""
        return [group.reduced_gradient for group in self._groups]

    def parts_to_update(self, group: int, *, divides: bool) -> Iterator[range]:
        """Yield the elements of a group's masters to update, as `FlatGroup.parts_to_update` does."""
        return self._groups[group].parts_to_update(divides=divides)

    def wait_for_gradients(self) -> None:
        """Wait until `gradient` holds what was reduced; on its way to the CPU's memory it may come later."""
        for group in self._groups:
            group.wait_for_gradient()

    def before_masters_change(self) -> None:
        """Wait until no copy of the masters is under way; call it before changing them beside an update."""
        for group in self._groups:
            group.before_masters_change()

    def copy_reduced_gradient(self) -> None:
        """Begin to copy what was written to `reduced_gradient` to gradients in the CPU's memory."""
        for group in self._groups:
            group.copy_reduced_gradient()

    def spoil_gradients(self) -> None:
        """Make the reduced gradients NaN, so that no update is made with them.

        The padding of the buffers stays 0, since no later step would overwrite it.
        """
        for group in self._groups:
            for place in group.layout.held_logical():
                group.reduced_gradient[place.start : place.start + place.numel] = torch.nan
        self.copy_reduced_gradient()

    @property
    def gathers_weights(self) -> bool:
        """Whether forward and backward gather weights (ZeRO 3), and so are collective."""
        return any(group.shards_weights for group in self._groups)

    def read_masters(self, groups: Set[int]) -> None:
        """Give the working weights of these groups no memory where they are freed between blocks.

        groups: indices in `layouts`. What computes then reads the masters, which must be whole.
        """
        for index, group in enumerate(self._groups):
            group.reads_masters = index in groups

    def begin_accumulation(self, *, backwards: int) -> None:
        """Begin a step: its first backward overwrites the gradients of the last step.

        backwards: the number of this rank's micro-batches. After the last, gradients may be summed at once.
        """
        self.buckets.begin_step(backwards=backwards)
        for group in self._groups:
            group.begin_accumulation()

    @contextmanager
    def tapped(self, *, discards: bool) -> Iterator[GradientTap]:
        """Digest the gradients that each parameter gets from the first backward in the block.

        discards: whether gradients are dropped instead of added up, so that a backward changes nothing.
        """
        twice = () if self._tied_head is None else self._tied_head.with_two_gradients
        self._tap = GradientTap([*self._group_of, *twice], discards=discards)
        try:
            yield self._tap
        finally:
            self._tap = None

    def accumulate_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add `grad` of parameters to the fp32 gradients, after each backward that ran no hooks."""
        for parameter in parameters:
            self._accumulate(parameter)

    def end_accumulation(self) -> None:
        """End a step's backwards: clear the gradients of parameters that none of them reached."""
        for group in self._groups:
            group.end_accumulation()

    def copy_masters_to_working(self) -> None:
        """Round the masters to the working weights. Collective over the peer.

        Where it overlaps, weights that are sharded until now are gathered while the next forward begins.
        """
        self.updated.begin()

    def reduce(self) -> None:
        """Make every gradient that of the global batch. Collective over the peer, once a step."""
        self.buckets.finish()
        for group in self._groups:
            group.reduce()

    def examine(self, *, limit: float, unscale: Tensor | float) -> GradientFacts:
        """Return norm, finiteness and clipping coefficient of the gradients. Collective over the peer.

        limit: the norm that clipping leaves. unscale: what gradients are to be multiplied with, to undo the
        loss scale.
        """
        counted = [
            CountedGradient(gradient=flat.reduced_gradient, padding=group.padding, counts=self._counts(group))
            for group, flat in zip(self.layouts, self._groups, strict=True)
        ]
        return examine(counted, limit=limit, unscale=unscale, total=self._mesh.all_reduce)

    @torch.no_grad()
    def norms_by_tensor(self) -> Tensor:
        """Return the norm of each logical tensor's gradient, [n] in the order of `names`.

        Collective over the peer; valid after `reduce`.
        """
        squares = torch.zeros(len(self.names), dtype=torch.float64, device=self.device)
        index = self._index_of_name
        self.wait_for_gradients()
        for group, gradient in zip(self.layouts, self.gradient, strict=True):
            places = list(group.held_logical()) if self._counts(group) else []
            if places:
                each = squared_norms([_view(gradient, place) for place in places])
                rows = [index[place.name] for place in places]
                at = to_device(rows, dtype=torch.int64, device=self.device)
                squares.index_add_(0, at, each.to(self.device))
        return self._mesh.all_reduce(squares).sqrt().float()

    @torch.no_grad()
    def root_mean_squares(self, layers: int) -> Tensor:
        """Return the root mean square of each block's masters, fp32 [layers]. Collective over the peer."""
        squares = torch.zeros((2, layers), dtype=torch.float64, device=self.device)
        for group, master in zip(self.layouts, self.master, strict=True):
            held = [
                (int(place.name.split(".")[1]), place)
                for place in group.held_logical()
                if self._counts(group) and place.name.startswith("blocks.")
            ]
            if held:
                each = squared_norms([_view(master, place) for _, place in held])
                counts = to_device([place.numel for _, place in held], dtype=each.dtype, device=each.device)
                both = torch.stack([each, counts])
                at = to_device([block for block, _ in held], dtype=torch.int64, device=self.device)
                squares.index_add_(1, at, both.to(self.device))
        self._mesh.all_reduce(squares)
        return (squares[0] / squares[1].clamp(min=1.0)).sqrt().float()

    @torch.no_grad()
    def scale_gradients(self, factors: Tensor) -> None:
        """Multiply each logical tensor's gradient with its factor, [n] in the order of `names`, in place."""
        index = self._index_of_name
        self.wait_for_gradients()
        for group, gradient in zip(self.layouts, self.gradient, strict=True):
            places = list(group.held_logical())
            each = factors.to(gradient.device).unbind()
            if places:
                torch_private.scale_tensors(
                    [_view(gradient, place) for place in places],
                    [each[index[place.name]] for place in places],
                )

    @property
    def device(self) -> torch.device:
        """The device that computes, which is not that of masters in the CPU's memory."""
        return self._mesh.device

    def state_entries(self) -> Iterable[StateEntry]:
        """The masters as boxes of logical tensors."""
        for group, master in zip(self.layouts, self.master, strict=True):
            yield from entries_of(group, master, prefix="model", suffix="", scope=self.scope)

    def gradient_entries(self) -> Iterable[StateEntry]:
        """The gradients of this rank's shards as boxes of logical tensors; valid after `reduce`."""
        self.wait_for_gradients()
        for group, gradient in zip(self.layouts, self.gradient, strict=True):
            yield from entries_of(group, gradient, prefix="gradient", suffix="")

    def state_values(self) -> dict[str, Json]:
        """Return no values: the whole state is in tensors."""
        return {}

    def load_state_values(self, values: Mapping[str, Json]) -> None:
        """Round the masters, which were loaded in place, to the working weights."""
        self.copy_masters_to_working()

    @property
    def _index_of_name(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}

    def _counts(self, group: GroupLayout) -> bool:
        """Whether this rank counts a group's elements: of several ranks with copies only one does."""
        mesh = self._mesh
        is_own = group.share in ("split", "echoed") or (group.share != "echo" and mesh.tensor.is_first)
        return mesh.replica.is_first and is_own

    def _accumulate(self, parameter: nn.Parameter, *, is_last: bool = True) -> None:
        if self._tap is not None:
            self._tap.take(parameter)
            if self._tap.discards:
                self._group_of[parameter].discard(parameter)
                return
        if parameter.grad is not None:  # a hook also runs where backward returned no gradient
            self._group_of[parameter].accumulate(parameter, is_last=is_last)
            self.buckets.add(parameter)


def entries_of(
    group: GroupLayout, flat: Tensor, *, prefix: str, suffix: str, scope: Scope = "peer"
) -> Iterable[StateEntry]:
    """Describe a flat buffer of this rank's shard of `group` as boxes of logical tensors.

    Their names are `prefix.NAME`, or `prefix.NAME.suffix` where the suffix is not empty.
    """
    for place in group.held_logical():
        name = f"{prefix}.{place.name}.{suffix}" if suffix else f"{prefix}.{place.name}"
        yield StateEntry(
            name=name,
            global_shape=place.global_shape,
            dtype="float32",
            box=Box(offset=place.offset, shape=place.shape),
            tensor=_view(flat, place),
            scope=scope,
        )


def _view(flat: Tensor, place: Placement) -> Tensor:
    return flat[place.start : place.start + place.numel].view(place.shape)
