"""One group's flat buffers on this rank: masters, gradients and working weights, whole or sharded.

ZeRO 1 shards masters and moments, 2 also gradients, 3 also working weights. Everything is summed in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bloomery.optim.groups import GroupLayout
from bloomery.parallel.mesh import Mesh


class FlatGroup:
    """The buffers of one group. Where nothing is sharded, this rank holds all of it.

    master and gradient (fp32): of what this rank holds; with `offload` in the CPU's memory, for an update
    there. reduced: the held gradient on the device. working: all of the group, in the working precision;
    the module's parameters are views of it. In fp32, unsharded, it is the master. shards_weights: whether it
    is there only between `gather` and `release`.
    """

    def __init__(
        self,
        layout: GroupLayout,
        parameters: Mapping[str, nn.Parameter],
        *,
        mesh: Mesh,
        zero: int,
        offload: bool,
    ) -> None:
        self.layout = layout
        self._mesh = mesh
        self._parameters = {place: parameters[place.name] for place in layout.parameters}
        device = next(iter(self._parameters.values())).device
        held, numel = len(layout.held), layout.numel
        self._device, self._offload = device, offload
        self.master = torch.zeros(held, device="cpu" if offload else device)
        self._shards_gradients = zero >= 2 and mesh.shard.degree > 1
        self.shards_weights = zero >= 3 and mesh.shard.degree > 1 and layout.bucket != ""
        # All of the group's gradient; where gradients are sharded, for as long as a backward fills it.
        self._summed = None if self._shards_gradients else torch.zeros(numel, device=device)
        self.reduced = (
            torch.zeros(held, device=device) if self._summed is None else mesh.shard.part(self._summed)
        )
        self.gradient = torch.zeros_like(self.master) if offload else self.reduced
        self._places = {parameter: place for place, parameter in self._parameters.items()}
        self._untouched: set[nn.Parameter] = set()
        self._reduced_once = False
        self.working = self.master

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters that lie here."""
        return tuple(self._places)

    def recast(self, working: torch.dtype) -> None:
        """Give the parameters weights of another precision, which `publish` has to fill.

        Those that are gathered for use have room for nothing until then, so that no rank holds the whole.
        """
        if working == torch.float32 and self._mesh.shard.degree == 1 and not self._offload:
            self.working = self.master
        else:
            self.working = torch.empty(self.layout.numel, dtype=working, device=self._device)
        for place, parameter in self._parameters.items():
            parameter.data = self.working[place.start : place.start + place.numel].view(place.shape)
        self.release()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters to the working weights. Collective over the shards."""
        if self.working is self.master:
            return
        if self.shards_weights:
            self.release()
            return
        self._fill()

    @torch.no_grad()
    def gather(self) -> None:
        """Have the working weights, where they are sharded. Collective over the shards."""
        if self.shards_weights:
            storage = self.working.untyped_storage()
            if storage.size() == 0:
                storage.resize_(self.working.numel() * self.working.element_size())
                self._fill()

    def release(self) -> None:
        """Let go of working weights that can be gathered again."""
        if self.shards_weights:
            self.working.untyped_storage().resize_(0)

    def begin_accumulation(self) -> None:
        """The next backward is the first of a step: it overwrites what the last step left."""
        self._untouched = set(self._places)
        self._reduced_once = False

    def add(self, parameter: nn.Parameter) -> None:
        """Take over what a backward left in `parameter.grad`. Collective over the shards of gradients."""
        # Fires with no gradient where backward returned none.
        if parameter.grad is None:
            return
        place = self._places[parameter]
        if self._summed is None:
            self._summed = torch.zeros(self.layout.numel, device=self._device)
            self._untouched = set(self._places)
        destination = self._summed[place.start : place.start + place.numel].view(place.shape)
        if parameter in self._untouched:
            # Copying saves a pass over memory that zeroing and adding would take.
            destination.copy_(parameter.grad)
            self._untouched.discard(parameter)
        else:
            destination.add_(parameter.grad)
        parameter.grad = None
        if self._shards_gradients and not self._untouched:
            self._reduce_to_shards()

    def end_accumulation(self) -> None:
        """Clear the gradients of parameters that no backward of this step reached."""
        if self._shards_gradients:
            if self._summed is not None:
                self._reduce_to_shards()
            if not self._reduced_once:
                self.reduced.zero_()
            return
        assert self._summed is not None, "only sharded gradients come and go"
        for parameter in self._untouched:
            place = self._places[parameter]
            self._summed[place.start : place.start + place.numel].zero_()

    def reduce(self) -> None:
        """Make the held gradient that of the global batch. Collective over the peer."""
        mesh = self._mesh
        if self.layout.share == "partial":
            mesh.tensor.sum(self.reduced if self._summed is None else self._summed)
        if self._summed is not None:
            mesh.shard.sum_parts(self._summed)
        mesh.replica.sum(self.reduced)
        if self.layout.share in ("echoed", "echo"):
            # Last, so that both ends of the pipeline get the same bits.
            mesh.ends.sum(self.reduced)
        self.follow_reduced()

    def follow_reduced(self) -> None:
        """Make `gradient` what `reduced` is, where it is another's memory."""
        if self._offload:
            self.gradient.copy_(self.reduced)

    def _reduce_to_shards(self) -> None:
        assert self._summed is not None
        own = self._mesh.shard.sum_parts(self._summed)
        if self._reduced_once:
            self.reduced.add_(own)
        else:
            self.reduced.copy_(own)
        self._reduced_once, self._summed = True, None
        # All of its gradients are made: backward is done with these weights.
        self.release()

    def _fill(self) -> None:
        self._mesh.shard.part(self.working).copy_(self.master)
        self._mesh.shard.gather_parts(self.working)


def gather_around(block: nn.Module, groups: list[FlatGroup]) -> None:
    """Have the block's weights gathered for its forward and for its backward. Let go of after each."""

    def before(module: nn.Module, inputs: object) -> None:
        for group in groups:
            group.gather()

    def again(gradient: Tensor) -> None:
        for group in groups:
            group.gather()

    def after(module: nn.Module, inputs: object, output: Tensor) -> None:
        for group in groups:
            group.release()
        if output.requires_grad:
            output.register_hook(again)

    block.register_forward_pre_hook(before)
    block.register_forward_hook(after)
