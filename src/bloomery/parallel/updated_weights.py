"""Gathers the working weights whose masters were updated in shards, while the next forward begins.

Under ZeRO 1 and 2 a rank updates its shard of the masters, and each rank then needs all working weights. They
are gathered range by range, in the order in which a forward needs them, and each block waits for its own.
What is made of them, as 8-bit copies are, is made when they are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from bloomery.model.decoder import Decoder
from bloomery.parallel.axis import PendingCollective
from bloomery.parallel.flat import FlatGroup

BUCKETS_AT_ONCE = 4
"""How many gradient buckets' elements are gathered at one time. A part of the buffer comes from one rank and
passes all others in turn, so that short ones take as long as the number of ranks says."""


@dataclass(frozen=True, kw_only=True)
class WeightRange:
    """Elements of one group's working weights that are gathered at one time.

    position: of the first parameter that lies there, among all of the module.
    """

    group: FlatGroup
    elements: range
    position: int


class UpdatedWeights:
    """Rounds the masters to the working weights, and gathers these from the shards of several ranks.

    Where it overlaps, `begin` returns before they are there. A forward of the module waits for what it needs,
    and whoever else reads them calls `finish` first.

    positions: of the module's parameters, in the order in which a forward needs them.
    after_rounding: is called when each rank has rounded its shard, and nothing is gathered yet. Collective
        over the peer.
    on_arrival: is called with a position when the weights of all parameters up to there have arrived: again
        and again, in an order that all ranks of a tensor axis share, with all of them after each update.
    """

    def __init__(
        self, groups: Sequence[FlatGroup], module: nn.Module, *, bucket_bytes: int, overlaps: bool
    ) -> None:
        """bucket_bytes: see `GradientBuckets`. overlaps: whether the next forward goes on meanwhile."""
        self._groups, self._overlaps = tuple(groups), overlaps
        self.positions = {parameter: position for position, parameter in enumerate(module.parameters())}
        self.after_rounding: Callable[[], None] = lambda: None
        self.on_arrival: Callable[[int], None] = lambda position: None
        ranges = [
            part
            for group in groups
            if group.gathers_after_update
            for part in _ranges_of(group, self.positions, range_bytes=BUCKETS_AT_ONCE * bucket_bytes)
        ]
        self._ranges = sorted(ranges, key=lambda part: part.position)
        self._gathers: deque[tuple[int, PendingCollective]] = deque()
        self._is_awaited_by_blocks = overlaps and bool(self._ranges)
        if self._is_awaited_by_blocks:
            self._wait_within(module)

    @property
    def under_way(self) -> int:
        """The number of ranges whose gather was begun and not waited for."""
        return len(self._gathers)

    def begin(self) -> None:
        """Round the masters, and begin to gather. Collective over the shard axis.

        The module's forward is then no longer that of the weights before, even while it waits.
        """
        self.finish()
        for group in self._groups:
            group.round_masters()
        self.after_rounding()
        for part in self._ranges:
            gather = part.group.begin_gathering_range(part.elements)
            if self._overlaps:
                self._gathers.append((part.position, gather))
            else:
                gather.wait_for_collective()
        if not self._is_awaited_by_blocks:
            self.finish()

    def finish(self) -> None:
        """Wait until all working weights are there, and what is made of them."""
        self._finish_up_to(len(self.positions))

    def _finish_up_to(self, position: int, *_of_hook: object) -> None:
        while self._gathers and self._gathers[0][0] <= position:
            self._gathers.popleft()[1].wait_for_collective()
        self.on_arrival(position)

    def _wait_within(self, module: nn.Module) -> None:
        """Hook the parts of a decoder, in the order in which a forward calls them; or a module as a whole."""
        first_of_blocks = everything = len(self.positions)
        if isinstance(module, Decoder):
            for block in module.blocks:
                own = [self.positions[parameter] for parameter in block.parameters()]
                first_of_blocks = min(first_of_blocks, *own)
                block.register_forward_pre_hook(partial(self._finish_up_to, max(own)))
            # The head has no forward of its own: its weight is asked for after the final norm.
            module.final_norm.register_forward_pre_hook(partial(self._finish_up_to, everything))
        module.register_forward_pre_hook(partial(self._finish_up_to, first_of_blocks - 1))


def _ranges_of(
    group: FlatGroup, positions: dict[nn.Parameter, int], *, range_bytes: int
) -> Iterator[WeightRange]:
    """Divide a group's elements where parameters begin; the groups of one block stay whole.

    range_bytes: of fp32 values, at which a range is closed; 0: one range.
    """
    starts = [place.start for place in group.layout.parameters]
    divides = range_bytes > 0 and group.layout.bucket == ""
    first = 0  # the number of the range's first parameter
    for number, stop in enumerate([*starts[1:], group.layout.numel], start=1):
        is_full = divides and 4 * (stop - starts[first]) >= range_bytes
        if is_full or number == len(starts):
            yield WeightRange(
                group=group,
                elements=range(starts[first], stop),
                position=min(positions[parameter] for parameter in group.parameters[first:number]),
            )
            first = number
