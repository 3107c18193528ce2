"""One axis of the mesh, as a rank sees it, and the collectives over its process group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from bloomery.parallel.rendezvous import raising_rank_lost

# The names since torch 2.13, which warns of the old ones; older versions have only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True)
class PendingCollective:
    """Collectives that were begun and run beside what this rank does meanwhile.

    works: empty where there is nothing to wait for.
    """

    works: tuple[dist.Work, ...] = ()

    def wait_for_collective(self) -> None:
        """Wait until the result may be read: on the host, or with NCCL on the current stream."""
        with raising_rank_lost():
            for work in self.works:
                work.wait()


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of the mesh as this rank sees it: the process group along the axis that this rank belongs to.

    index: this rank's index in the group.
    ranks: the global ranks of the group, by index.
    group: torch's process group; None where the degree is 1, and then every collective returns at once.
    """

    index: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None

    @property
    def degree(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this is the group's first rank, which reports values that all its ranks compute alike."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the group's last rank."""
        return self.index == self.degree - 1

    @property
    def has_fast_reduce_scatter(self) -> bool:
        """Whether reduce_scatter costs less than all_reduce; gloo's takes 2.6 times as long."""
        return dist.get_backend(self.group) != "gloo"

    def local_shard(self, flat: Tensor) -> Tensor:
        """Return a view of the shard of `flat` that belongs to this rank, one of `degree` equal ones."""
        size = flat.numel() // self.degree
        return flat[self.index * size : (self.index + 1) * size]

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> Tensor:
        """Sum `tensor` over the group, or take the maximum, in place; return it. Collective over the axis."""
        if self.degree > 1:
            with raising_rank_lost():
                dist.all_reduce(tensor, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=self.group)
        return tensor

    def reduce_scatter(self, flat: Tensor) -> Tensor:
        """Sum this rank's shard of `flat` over the group, in place, and return that shard.

        The rest of `flat` is undefined afterwards. Collective over the axis.
        """
        own = self.local_shard(flat)
        if self.degree > 1:
            with raising_rank_lost():
                if self.has_fast_reduce_scatter:
                    _reduce_scatter(own, flat, group=self.group)
                else:
                    dist.all_reduce(flat, group=self.group)
        return own

    def begin_all_reduce(self, tensor: Tensor) -> PendingCollective:
        """Begin what `all_reduce` does. The tensor must be left alone until it was waited for."""
        if self.degree == 1:
            return PendingCollective()
        with raising_rank_lost():
            return PendingCollective(works=(dist.all_reduce(tensor, group=self.group, async_op=True),))

    def begin_reduce_scatter(self, flat: Tensor, elements: range) -> PendingCollective:
        """Begin to sum `elements` of `flat` over the group, in place: each on the rank in whose shard it is.

        On the other ranks they are undefined afterwards. They must be left alone until they were waited for.
        """
        if self.degree == 1:
            return PendingCollective()
        with raising_rank_lost():
            if not self.has_fast_reduce_scatter:
                return self.begin_all_reduce(flat[elements.start : elements.stop])
            if len(elements) == flat.numel():
                own = self.local_shard(flat)
                return PendingCollective(works=(_reduce_scatter(own, flat, group=self.group, async_op=True),))
            return PendingCollective(works=tuple(self._reduce_to_owners(flat, elements)))

    def _reduce_to_owners(self, flat: Tensor, elements: range) -> Iterator[dist.Work]:
        for index, part in self._parts_of_shards(flat, elements):
            yield dist.reduce(part, dst=self.ranks[index], group=self.group, async_op=True)

    def _parts_of_shards(self, flat: Tensor, elements: range) -> Iterator[tuple[int, Tensor]]:
        """Divide `elements` of `flat` by the rank in whose shard they are: yield its index and the part."""
        size = flat.numel() // self.degree
        for index in range(elements.start // size, -(-elements.stop // size)):
            yield index, flat[max(elements.start, index * size) : min(elements.stop, (index + 1) * size)]

    def all_gather(self, flat: Tensor) -> None:
        """Fill `flat` with every rank's shard of it, in place. Collective over the axis."""
        if self.degree > 1:
            with raising_rank_lost():
                _all_gather(flat, self.local_shard(flat), group=self.group)

    def begin_all_gather(self, flat: Tensor, elements: range | None = None) -> PendingCollective:
        """Begin what `all_gather` does, for some elements alone: each comes from the rank of its shard.

        elements: None for all. They must be left alone until they were waited for.
        """
        if self.degree == 1:
            return PendingCollective()
        with raising_rank_lost():
            if elements is None or len(elements) == flat.numel():
                own = self.local_shard(flat)
                return PendingCollective(works=(_all_gather(flat, own, group=self.group, async_op=True),))
            return PendingCollective(
                works=tuple(
                    dist.broadcast(part, src=self.ranks[index], group=self.group, async_op=True)
                    for index, part in self._parts_of_shards(flat, elements)
                )
            )


SINGLE_RANK_AXIS = Axis()
"""An axis of one rank."""
