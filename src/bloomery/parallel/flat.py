"""The flat buffers of one parameter group on this rank: master weights, gradients, working weights.

ZeRO (Rajbhandari et al. 2020) shards them over the data axis: stage 1 shards masters and moments, 2 also
gradients, 3 also working weights. Gradients are summed in fp32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from bloomery.model.decoder import Decoder
from bloomery.optim.groups import GroupLayout
from bloomery.parallel.accumulate import add_gradient
from bloomery.parallel.axis import PendingCollective
from bloomery.parallel.host_copies import HostLink, OffloadedShard
from bloomery.parallel.mesh import Mesh


class ReductionsInFlight:
    """Sums of sharded gradients that run while the backward goes on; each holds a group's whole gradient.

    limit: of how many blocks they may run beside the backward; 0: each is waited for at once. The groups of
        the ends count one by one, since theirs are large.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._under_way: deque[tuple[str, Callable[[], None]]] = deque()

    def add(self, bucket: str, finish: Callable[[], None]) -> None:
        """Take a sum that was begun. finish: waits for it and adds its result; called in order.

        bucket: the block that the group belongs to, or ''.
        """
        self._under_way.append((bucket, finish))
        while self._blocks() > self._limit:
            self._under_way.popleft()[1]()

    def finish(self) -> None:
        """Finish all."""
        while self._under_way:
            self._under_way.popleft()[1]()

    def _blocks(self) -> int:
        buckets = [bucket for bucket, _ in self._under_way]
        return buckets.count("") + len({*buckets} - {""})


@dataclass(frozen=True, kw_only=True)
class WeightStorage:
    """Which weights, gradients and masters a rank keeps, and where.

    zero: the stage of ZeRO, 0 to 3.
    offload: whether masters and moments are in the CPU's memory.
    rounds_by_block: whether a block's working weights are rounded from the masters when it is computed,
        instead of kept.
    """

    zero: int = 0
    offload: bool = False
    rounds_by_block: bool = False


WHOLE_ON_DEVICE = WeightStorage()


class FlatGroup:
    """The buffers of one parameter group. Without sharding, this rank's shard is the whole group.

    master: fp32 values of this rank's shard; with `offload` in the CPU's memory, where they are updated.
    gradient: fp32 gradient of this rank's shard, beside the master.
    reduced_gradient: the same gradient on the device; one buffer with `gradient` unless it is offloaded.
    working: the whole group in the working precision, of which the module's parameters are views. In fp32,
        without sharding or offloading, it is the master itself.
    shards_weights: whether `working` is gathered from the shards of several ranks each time (ZeRO 3).
    reads_masters: whether what computes reads the masters instead, so that `working` gets no memory where it
        is freed between blocks.
    frees_weights: whether `working` has memory only between `all_gather_weights` and `free_weights`: with
        ZeRO 3, and where it is rounded from the masters block by block.
    """

    def __init__(
        self,
        layout: GroupLayout,
        parameters: Mapping[str, nn.Parameter],
        *,
        mesh: Mesh,
        storage: WeightStorage,
        in_flight: ReductionsInFlight,
        link: HostLink,
    ) -> None:
        """in_flight: takes the sums of sharded gradients, of all groups. link: copies what is offloaded."""
        zero = storage.zero
        self.layout = layout
        self._in_flight = in_flight
        self._gathering: PendingCollective | None = None
        self._mesh = mesh
        self._parameters = {place: parameters[place.name] for place in layout.parameters}
        device = next(iter(self._parameters.values())).device
        held_numel, numel = len(layout.held), layout.numel
        self._device = device
        self._offloaded = OffloadedShard(held_numel, link=link) if storage.offload else None
        self.master = self._offloaded.master if self._offloaded else torch.zeros(held_numel, device=device)
        self._shards_gradients = zero >= 2 and mesh.shard.degree > 1
        self.shards_weights = zero >= 3 and mesh.shard.degree > 1 and layout.bucket != ""
        self._rounds_by_block = storage.rounds_by_block and layout.bucket != ""
        # The whole group's gradient before it is reduced. With sharded gradients it exists only while a
        # backward fills it, and is None otherwise.
        self._summed = None if self._shards_gradients else torch.zeros(numel, device=device)
        self.reduced_gradient = (
            torch.zeros(held_numel, device=device)
            if self._summed is None
            else mesh.shard.local_shard(self._summed)
        )
        self.gradient = self._offloaded.gradient if self._offloaded else self.reduced_gradient
        self._placements = {parameter: place for place, parameter in self._parameters.items()}
        self._untouched: set[nn.Parameter] = set()
        self._awaited: set[nn.Parameter] = set()
        self._reduced_once = False
        self._arrived: set[nn.Parameter] = set()
        self.working = self.master
        self.reads_masters = False

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The module's parameters in this group."""
        return tuple(self._placements)

    @property
    def frees_weights(self) -> bool:
        """See the class; false where the working weights are the masters themselves."""
        return self.shards_weights or (self._rounds_by_block and self.working is not self.master)

    def set_working_dtype(self, working: torch.dtype) -> None:
        """Give the parameters memory for weights of another precision; `round_masters` fills it.

        Weights that are freed have no memory until they are gathered, so that no rank ever holds all of them.
        """
        if working == torch.float32 and self._mesh.shard.degree == 1 and not self._offloaded:
            self.working = self.master
        else:
            self.working = torch.empty(self.layout.numel, dtype=working, device=self._device)
        for place, parameter in self._parameters.items():
            parameter.data = self.working[place.start : place.start + place.numel].view(place.shape)
        self.free_weights()

    @property
    def gathers_after_update(self) -> bool:
        """Whether working weights are gathered from shards once after each update, and then kept."""
        return self._mesh.shard.degree > 1 and not self.shards_weights

    @torch.no_grad()
    def round_masters(self) -> None:
        """Round the masters to this rank's shard of the working weights, or free those that are freed."""
        if self.frees_weights:
            self.free_weights()
        elif self._offloaded:
            self._offloaded.finish_up(self._mesh.shard.local_shard(self.working))
        elif self.working is not self.master:
            self._mesh.shard.local_shard(self.working).copy_(self.master)

    @torch.no_grad()
    def parts_to_update(self, *, divides: bool) -> Iterator[range]:
        """Yield the elements of the masters to update, each once its gradient is beside it.

        What is offloaded comes in pieces, and each goes to the device when the next is asked for.
        divides: whether the update may be made piece by piece.
        """
        whole = range(self.master.numel())
        if self._offloaded is None:
            yield whole
            return
        for elements in self._offloaded.pieces if divides else (whole,):
            self._offloaded.wait_for_gradient(elements)
            yield elements
            if not self.frees_weights:
                self._offloaded.begin_up(elements, self._mesh.shard.local_shard(self.working))

    def wait_for_gradient(self) -> None:
        """Wait until `gradient` is there, which may be on its way to the CPU's memory."""
        if self._offloaded:
            self._offloaded.wait_for_gradient()

    def before_masters_change(self) -> None:
        """Wait until no copy of the masters is under way; call it before changing them beside an update."""
        if self._offloaded:
            self._offloaded.forget_up()

    def begin_gathering_range(self, elements: range) -> PendingCollective:
        """Begin to gather these elements of the working weights, where they are gathered after an update.

        Collective over the shard axis; `round_masters` comes first.
        """
        return self._mesh.shard.begin_all_gather(self.working, elements)

    @torch.no_grad()
    def begin_gathering(self) -> None:
        """Begin to gather working weights that are freed, unless they are there.

        Collective over the shard axis; of one rank, it rounds the masters.
        """
        if self.frees_weights and not self.reads_masters:
            storage = self.working.untyped_storage()
            if storage.size() == 0:
                self._arrived.clear()  # a backward that did not reach all parameters may have left some
                storage.resize_(self.working.numel() * self.working.element_size())
                own = self._mesh.shard.local_shard(self.working)
                if self._offloaded:
                    self._offloaded.round_in_order(own)
                else:
                    own.copy_(self.master)
                self._gathering = self._mesh.shard.begin_all_gather(self.working)

    def all_gather_weights(self) -> None:
        """Gather working weights that are freed, unless they are there. Collective over the shard axis."""
        self.begin_gathering()
        self._wait_for_weights()

    def free_weights(self) -> None:
        """Free the memory of working weights that can be gathered again."""
        if self.frees_weights:
            self._wait_for_weights()
            self.working.untyped_storage().resize_(0)

    @property
    def reduces_ranges(self) -> bool:
        """Whether gradients are summed over the data axis once a step, so that ranges may be begun early.

        Those of a 'partial' group are first summed over the tensor axis, after the last backward.
        """
        return self._mesh.data.degree > 1 and not self._shards_gradients and self.layout.share != "partial"

    def begin_reduction(self, elements: range) -> PendingCollective:
        """Begin to sum these elements of the gradient, where all backwards of the step have been added.

        Over the shard axis, or over the replica axis if nothing is sharded. Collective over that axis.
        """
        assert self._summed is not None, "sharded gradients are summed by the last parameter of a backward"
        if self._mesh.shard.degree > 1:
            return self._mesh.shard.begin_reduce_scatter(self._summed, elements)
        return self._mesh.replica.begin_all_reduce(self._summed[elements.start : elements.stop])

    def begin_accumulation(self) -> None:
        """Begin a step: its first backward overwrites the gradients of the last step."""
        self._untouched, self._awaited = set(self._placements), set(self._placements)
        self._reduced_once = False

    def accumulate(self, parameter: nn.Parameter, *, is_last: bool = True) -> None:
        """Add `parameter.grad` to the fp32 gradient and clear it.

        is_last: whether this backward gives the parameter no other gradient.
        Collective over the shard axis if gradients are sharded: the last parameter of the group reduces them.
        """
        assert parameter.grad is not None, "there is a gradient to add"
        place = self._placements[parameter]
        if self._summed is None:
            self._summed = torch.zeros(self.layout.numel, device=self._device)
            self._untouched, self._awaited = set(self._placements), set(self._placements)
        destination = self._summed[place.start : place.start + place.numel].view(place.shape)
        add_gradient(destination, parameter.grad, is_first=parameter in self._untouched)
        self._untouched.discard(parameter)
        parameter.grad = None
        if is_last:
            self._awaited.discard(parameter)
        if self._shards_gradients and not self._awaited:
            self._reduce_to_shards()
        self._free_after_last(parameter)

    def discard(self, parameter: nn.Parameter) -> None:
        """Drop `parameter.grad`; the last parameter of the group frees its weights. Not collective."""
        parameter.grad = None
        self._free_after_last(parameter)

    def end_accumulation(self) -> None:
        """End a step's backwards: clear the gradients of parameters that none of them reached."""
        if self._shards_gradients:
            if self._summed is not None:
                self._reduce_to_shards()
            self._in_flight.finish()
            if not self._reduced_once:
                self.reduced_gradient.zero_()
            return
        assert self._summed is not None, "unsharded gradients keep their memory"
        for parameter in self._untouched:
            place = self._placements[parameter]
            self._summed[place.start : place.start + place.numel].zero_()

    def reduce(self) -> None:
        """Make this rank's gradient that of the global batch. Collective over the peer.

        Where `reduces_ranges`, all ranges have been summed before.
        """
        mesh = self._mesh
        if self.layout.share == "partial":
            mesh.tensor.all_reduce(self.reduced_gradient if self._summed is None else self._summed)
        if not self.reduces_ranges and self._summed is not None:
            mesh.shard.reduce_scatter(self._summed)
        if not self.reduces_ranges or mesh.shard.degree > 1:
            mesh.replica.all_reduce(self.reduced_gradient)
        if self.layout.share in ("echoed", "echo"):
            # Last, so that the first and the last stage add up the same two values and get the same bits.
            mesh.embedding.all_reduce(self.reduced_gradient)
        self.copy_reduced_gradient()

    def copy_reduced_gradient(self) -> None:
        """Begin to copy `reduced_gradient` to `gradient` if that is in the CPU's memory."""
        if self._offloaded:
            self._offloaded.begin_down(self.reduced_gradient)

    def _reduce_to_shards(self) -> None:
        assert self._summed is not None
        summed, self._summed = self._summed, None
        pending = self._mesh.shard.begin_reduce_scatter(summed, range(summed.numel()))

        def finish() -> None:
            pending.wait_for_collective()
            own = self._mesh.shard.local_shard(summed)
            if self._reduced_once:
                self.reduced_gradient.add_(own)
            else:
                self.reduced_gradient.copy_(own)
            self._reduced_once = True

        self._in_flight.add(self.layout.bucket, finish)

    def _free_after_last(self, parameter: nn.Parameter) -> None:
        """Free the weights once a backward has made all gradients of the group, for it needs them no more."""
        self._arrived.add(parameter)
        if len(self._arrived) == len(self._placements):
            self._arrived.clear()
            self.free_weights()

    def _wait_for_weights(self) -> None:
        if self._gathering is not None:
            self._gathering.wait_for_collective()
            self._gathering = None


def weak_hook(method: Callable[[nn.Parameter], None]) -> Callable[[Tensor], None]:
    """Return a hook of a parameter that calls a method, and does not keep the method's object alive.

    Hooks are out of sight of Python's collector: an object that owns the parameter would never be freed.
    """
    weak = WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        alive = weak()
        assert alive is not None, "a backward ran after the gradients were freed"
        alive(cast(nn.Parameter, parameter))

    return hook


def tied_head_of(
    module: nn.Module, mesh: Mesh, accumulate: Callable[[nn.Parameter], None]
) -> TiedHead | None:
    """Return the tied head of a decoder; None where it has none, or has its ends in two stages."""
    if not isinstance(module, Decoder) or mesh.pipeline.degree > 1 or not module.model.section.tied:
        return None
    return TiedHead(module, accumulate)


class TiedHead:
    """Gives the head of a tied embedding a parameter of its own in the same memory.

    A backward then yields the gradient of each use apart, and each is added to the fp32 gradient. Of one
    parameter it would yield their sum, rounded to the dtype of the working weights; in fp32 that is the same.
    """

    def __init__(self, decoder: Decoder, accumulate: Callable[[nn.Parameter], None]) -> None:
        """accumulate: adds `grad` of the embedding to the fp32 gradient, and clears it."""
        assert decoder.embedding is not None, "a tied head is the embedding"
        self._decoder, self._accumulate = decoder, accumulate
        self._embedding = decoder.embedding.weight
        self._head = nn.Parameter(self._embedding.data)
        self._head.register_post_accumulate_grad_hook(weak_hook(self._pass_on))

    def set_working_dtype(self, working: torch.dtype) -> None:
        """Share the memory that the embedding has now."""
        self._head.data = self._embedding.data
        self._decoder.tied_head = () if working == torch.float32 else (self._head,)

    @property
    def with_two_gradients(self) -> Sequence[nn.Parameter]:
        """The embedding, while a backward gives it two gradients."""
        return (self._embedding,) if self._decoder.tied_head else ()

    def _pass_on(self, head: nn.Parameter) -> None:
        assert self._embedding.grad is None, "a backward comes to the head first"
        self._embedding.grad, head.grad = head.grad, None
        self._accumulate(self._embedding)
