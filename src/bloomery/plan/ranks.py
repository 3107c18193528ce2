"""Where each rank stands in the mesh: tensor innermost, then data, then pipeline. Arithmetic alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bloomery.config.parallel import ParallelSection
from bloomery.errors import TrainingFailed

AxisName = Literal["pipeline", "data", "tensor"]
OUTERMOST_FIRST: tuple[AxisName, ...] = ("pipeline", "data", "tensor")


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Sizes of the mesh's axes. shard: neighbours on the data axis that share one copy of what is sharded."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    shard: int = 1

    @property
    def world(self) -> int:
        """Ranks of the whole mesh."""
        return self.pipeline * self.data * self.tensor

    def of(self, axis: AxisName) -> int:
        """Size of one axis."""
        sizes: Mapping[AxisName, int] = {"pipeline": self.pipeline, "data": self.data, "tensor": self.tensor}
        return sizes[axis]

    def place(self, rank: int) -> Mapping[AxisName, int]:
        """The index of `rank` on each axis."""
        assert 0 <= rank < self.world
        rest, places = rank, dict[AxisName, int]()
        for axis in reversed(OUTERMOST_FIRST):
            rest, places[axis] = divmod(rest, self.of(axis))
        return places

    def rank_at(self, *, pipeline: int, data: int, tensor: int) -> int:
        """The rank that stands at these indices."""
        return (pipeline * self.data + data) * self.tensor + tensor

    def along(self, axis: AxisName, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` on this axis alone, itself included, by their index on it."""
        place = dict(self.place(rank))
        return tuple(self.rank_at(**(place | {axis: index})) for index in range(self.of(axis)))

    def lines(self, axis: AxisName) -> tuple[tuple[int, ...], ...]:
        """Every group of ranks along an axis, each once, sorted by its first rank."""
        return tuple(sorted({self.along(axis, rank) for rank in range(self.world)}))

    def shard_lines(self) -> tuple[tuple[int, ...], ...]:
        """Every group of ranks that divide one copy among them."""
        return tuple(
            line[first : first + self.shard]
            for line in self.lines("data")
            for first in range(0, self.data, self.shard)
        )

    def replica_lines(self) -> tuple[tuple[int, ...], ...]:
        """Every group of ranks that hold the same part of their copies."""
        return tuple(line[part :: self.shard] for line in self.lines("data") for part in range(self.shard))


def degrees_of(parallel: ParallelSection, *, world: int) -> Degrees | None:
    """The degrees of `world` ranks, 'auto' resolved; None where the recipe's do not multiply to it."""
    replica = parallel.tensor * parallel.pipeline
    data = world // replica if parallel.data == "auto" else int(parallel.data)
    shard = 1
    if parallel.zero:
        shard = data if parallel.shard_degree == "auto" else parallel.shard_degree
    degrees = Degrees(pipeline=parallel.pipeline, data=data, tensor=parallel.tensor, shard=shard)
    return degrees if data >= 1 and degrees.world == world else None


def other_ranks_wanted(parallel: ParallelSection, *, world: int) -> TrainingFailed:
    """The refusal of `world` ranks, which the recipe's degrees do not multiply to."""
    replica = parallel.tensor * parallel.pipeline
    asked = [("data", parallel.data), ("tensor", parallel.tensor), ("pipeline", parallel.pipeline)]
    shown = [f"parallel.{name} = {degree}" for name, degree in asked if degree not in ("auto", 1)]
    wanted = f"a multiple of {replica}" if parallel.data == "auto" else f"{int(parallel.data) * replica}"
    number = replica if parallel.data == "auto" else int(parallel.data) * replica
    return TrainingFailed(
        f"{' and '.join(shown) or 'parallel.data = 1'} needs {wanted} ranks, "
        f"but {world} rank{'s were' if world > 1 else ' was'} started.",
        remedy=f"Start with --nproc {number} or change the degrees; parallel.data=auto takes what is there.",
    )
