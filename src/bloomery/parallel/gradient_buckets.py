"""Sums gradients over the data axis in buckets, each while the backward still makes those of other buckets.

After Li et al. 2020, "PyTorch Distributed", section 3.2.3: all ranks begin the buckets in one order, which is
that in which a backward fills them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from bloomery.parallel.axis import PendingCollective
from bloomery.parallel.flat import FlatGroup

TIED = "embedding.weight"
"""A parameter that may get two gradients from a micro-batch: its bucket is begun after the last backward."""


@dataclass(kw_only=True, eq=False)
class GradientBucket:
    """Elements of one group's gradient that are summed by one collective.

    parameters: those that lie there. position: of the first of them, among all of the module.
    missing: gradients that the backwards of this step have still to add to it.
    reduction: the sum under way; None before it was begun.
    """

    group: FlatGroup
    elements: range
    parameters: tuple[nn.Parameter, ...]
    position: int
    is_tied: bool
    missing: int = 0
    reduction: PendingCollective | None = field(default=None)


class GradientBuckets:
    """The buckets of all groups whose gradients are summed after the last backward of a step.

    They are summed with the same collectives, over the same elements, whether they overlap the backward or
    follow it: the bits are equal.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        parameters: Sequence[nn.Parameter],
        *,
        bucket_bytes: int,
        overlaps: bool,
    ) -> None:
        """parameters: all of the module, in the order in which a forward reaches them.

        bucket_bytes: size of its fp32 gradients at which a bucket is closed; 0: one bucket per group.
        overlaps: whether a bucket is begun as soon as its last gradient is there.
        """
        positions = {parameter: position for position, parameter in enumerate(parameters)}
        buckets = [
            bucket
            for group in groups
            if group.reduces_ranges
            for bucket in _buckets_of(group, positions, bucket_bytes=bucket_bytes)
        ]
        self._order = sorted(buckets, key=lambda bucket: bucket.position, reverse=True)
        self._of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self._overlaps = overlaps
        self._begun = 0

    def __len__(self) -> int:
        return len(self._order)

    @property
    def begun(self) -> int:
        """The number of buckets of this step whose sum was begun."""
        return self._begun

    def begin_step(self, *, backwards: int) -> None:
        """Begin a step. backwards: how many gradients each parameter gets from it, one per micro-batch."""
        self._wait()
        self._begun = 0
        for bucket in self._order:
            bucket.missing = backwards * len(bucket.parameters)

    def add(self, parameter: nn.Parameter) -> None:
        """Note that a gradient was added to its group; begins buckets that are complete.

        Collective over the data axis: its ranks begin the same buckets in the same order, at their own time.
        """
        bucket = self._of.get(parameter)
        if bucket is None:
            return
        assert bucket.reduction is None, "a gradient came after the sum of its bucket had been begun"
        bucket.missing -= 1
        while self._overlaps and self._begun < len(self._order):
            following = self._order[self._begun]
            if following.missing > 0 or following.is_tied:
                break
            self._begin(following)

    def finish(self) -> None:
        """Begin what was not begun, and wait for all sums. Collective over the data axis."""
        for bucket in self._order[self._begun :]:
            self._begin(bucket)
            if not self._overlaps:
                self._wait()
        self._wait()

    def _begin(self, bucket: GradientBucket) -> None:
        bucket.reduction = bucket.group.begin_reduction(bucket.elements)
        self._begun += 1

    def _wait(self) -> None:
        for bucket in self._order[: self._begun]:
            if bucket.reduction is not None:
                bucket.reduction.wait_for_collective()
                bucket.reduction = None


def _buckets_of(
    group: FlatGroup, positions: dict[nn.Parameter, int], *, bucket_bytes: int
) -> list[GradientBucket]:
    """Divide a group's elements into buckets, from the end, which the backward fills first."""
    places = list(zip(group.layout.parameters, group.parameters, strict=True))
    buckets, stop, taken = [], group.layout.numel, list[nn.Parameter]()
    for number, (place, parameter) in reversed(list(enumerate(places))):
        taken.append(parameter)
        is_full = bucket_bytes > 0 and 4 * (stop - place.start) >= bucket_bytes
        if is_full or number == 0:
            start = place.start if number else 0
            buckets.append(
                GradientBucket(
                    group=group,
                    elements=range(start, stop),
                    parameters=tuple(taken),
                    position=min(positions[parameter] for parameter in taken),
                    is_tied=any(place.name == TIED for place, parameter in places if parameter in set(taken)),
                )
            )
            stop, taken = start, []
    return buckets
