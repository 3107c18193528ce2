"""Computes the place of each rank in the mesh, and the host it runs on.

Ranks of a tensor-parallel group are adjacent, then those of a data-parallel group, then pipeline stages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from math import gcd
from typing import Literal

from bloomery.config.findings import divisors, nearest_numbers
from bloomery.config.parallel import ParallelSection
from bloomery.errors import BloomeryError, TrainingFailed
from bloomery.frozen import dataclass

AxisName = Literal["pipeline", "data", "tensor"]
OUTERMOST_FIRST: tuple[AxisName, ...] = ("pipeline", "data", "tensor")


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Sizes of the mesh's axes.

    shard: number of neighbours on the data axis that share one copy of what is sharded.
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    shard: int = 1

    @property
    def world(self) -> int:
        """The number of ranks of the whole mesh."""
        return self.pipeline * self.data * self.tensor

    def of(self, axis: AxisName) -> int:
        """Return the size of one axis."""
        sizes: Mapping[AxisName, int] = {"pipeline": self.pipeline, "data": self.data, "tensor": self.tensor}
        return sizes[axis]

    def place(self, rank: int) -> Mapping[AxisName, int]:
        """Return the index of `rank` on each axis."""
        assert 0 <= rank < self.world
        rest, places = rank, dict[AxisName, int]()
        for axis in reversed(OUTERMOST_FIRST):
            rest, places[axis] = divmod(rest, self.of(axis))
        return places

    def rank_at(self, *, pipeline: int, data: int, tensor: int) -> int:
        """Return the rank at these indices."""
        return (pipeline * self.data + data) * self.tensor + tensor

    def along(self, axis: AxisName, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only on this axis, itself included, by their index on
        it.
        """
        place = dict(self.place(rank))
        return tuple(self.rank_at(**(place | {axis: index})) for index in range(self.of(axis)))

    def groups(self, axis: AxisName) -> tuple[tuple[int, ...], ...]:
        """Return every group of ranks along an axis, each once, sorted by first rank."""
        first = (rank for rank in range(self.world) if self.place(rank)[axis] == 0)
        return tuple(self.along(axis, rank) for rank in first)

    def shard_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return every group of ranks that divide one copy among them."""
        return tuple(
            group[first : first + self.shard]
            for group in self.groups("data")
            for first in range(0, self.data, self.shard)
        )

    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return every group of ranks that hold the same part of their copies."""
        return tuple(group[part :: self.shard] for group in self.groups("data") for part in range(self.shard))


def degrees_of(parallel: ParallelSection, *, world: int) -> Degrees | None:
    """Return the degrees of `world` ranks, with 'auto' resolved; None if the recipe's do not multiply to
    it.
    """
    replica = parallel.tensor * parallel.pipeline
    data = world // replica if parallel.data == "auto" else int(parallel.data)
    shard = 1
    if parallel.zero:
        shard = data if parallel.shard_degree == "auto" else parallel.shard_degree
    degrees = Degrees(pipeline=parallel.pipeline, data=data, tensor=parallel.tensor, shard=shard)
    return degrees if data >= 1 and degrees.world == world else None


def wrong_ranks_error(parallel: ParallelSection, *, world: int) -> TrainingFailed:
    """Return the error for `world` ranks to which the recipe's degrees do not multiply."""
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


_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*")
_MOST_HOSTS = 100_000
_RANGE = re.compile(r"([^\[\]]*)\[(\d+)-(\d+)\]([^\[\]]*)")


@dataclass(frozen=True, kw_only=True)
class HostRanks:
    """Consecutive ranks on one host."""

    host: str
    ranks: range


def read_hosts(text: str) -> list[str]:
    """Return the host names of a list such as `a,b,node[01-12]`.

    Raises BloomeryError for text that is no such list, or that names a host twice.
    """
    hosts = [host for part in text.split(",") for host in _expanded(part.strip())]
    wrong = [host for host in hosts if not _HOST.fullmatch(host)]
    if wrong:
        raise BloomeryError(
            f"{wrong[0]!r} is not a host name.",
            remedy="Separate names by commas, node-1,node-2; a range is node[01-12].",
        )
    twice = sorted(host for host, count in Counter(hosts).items() if count > 1)
    if twice:
        raise BloomeryError(f"The host {twice[0]} is given twice.", remedy="Name each node once.")
    return hosts


def hosts_of_ranks(hosts: Sequence[str], *, world: int) -> list[str]:
    """Return the host of each of `world` ranks, equally many on each. Raises BloomeryError if they do not
    fit.
    """
    if world % len(hosts):
        near = nearest_numbers(divisors(world), near=len(hosts))
        raise BloomeryError(
            f"{world} ranks do not divide among {len(hosts)} nodes.",
            remedy=f"Numbers of nodes that do: {near}.",
        )
    per_node = world // len(hosts)
    return [host for host in hosts for _ in range(per_node)]


def ranks_by_host(hosts: Sequence[str]) -> list[HostRanks]:
    """Return the ranks of each host, in order; a host whose ranks are not consecutive comes several times.

    hosts: the host of each rank.
    """
    by_host = []
    for host, run in groupby(range(len(hosts)), key=lambda rank: hosts[rank]):
        ranks = list(run)
        by_host.append(HostRanks(host=host, ranks=range(ranks[0], ranks[-1] + 1)))
    return by_host


def groups_across_hosts(degrees: Degrees, axis: AxisName, hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the process groups along an axis that lie on more than one host."""
    return [group for group in degrees.groups(axis) if len({hosts[rank] for rank in group}) > 1]


def refuse_tensor_groups_across_hosts(degrees: Degrees, hosts: Sequence[str]) -> None:
    """Raise TrainingFailed if tensor-parallel ranks are on several hosts, and name degrees that fit."""
    split = groups_across_hosts(degrees, "tensor", hosts)
    if not split:
        return
    group = split[0]
    names = sorted({hosts[rank] for rank in group})
    common = gcd(*(len(node.ranks) for node in ranks_by_host(hosts)))
    fitting = [degree for degree in divisors(common) if degrees.world % (degree * degrees.pipeline) == 0]
    best = max(degree for degree in fitting if degree <= degrees.tensor)  # 1 always fits
    data = degrees.world // (best * degrees.pipeline)
    raise TrainingFailed(
        f"Tensor-parallel ranks {group[0]}–{group[-1]} are on {' and '.join(names)}: parallel.tensor = "
        f"{degrees.tensor} must stay inside a node, and nodes have {_counts(hosts)} of the ranks.",
        remedy=f"A layout that fits {degrees.world} ranks: parallel.tensor={best} "
        f"parallel.pipeline={degrees.pipeline} parallel.data={data}.",
    )


def indices_on_node(degrees: Degrees, axis: AxisName, node: HostRanks) -> str:
    """Return the indices on an axis of the ranks at `node`, as text: '0', '0–3', or '0, 4'."""
    indices = sorted({degrees.place(rank)[axis] for rank in node.ranks})
    if len(indices) > 2 and indices == list(range(indices[0], indices[-1] + 1)):
        return f"{indices[0]}–{indices[-1]}"
    return ", ".join(map(str, indices))


def reach_words(degrees: Degrees, axis: AxisName, hosts: Sequence[str]) -> str:
    """Return whether an axis' process groups stay inside a node, as text for a person."""
    groups = degrees.groups(axis)
    apart = len(groups_across_hosts(degrees, axis, hosts))
    where = "inside a node" if not apart else f"{apart} of them across nodes"
    return f"{len(groups)} group{'s' if len(groups) > 1 else ''} of {degrees.of(axis)}, {where}"


def axes() -> tuple[AxisName, ...]:
    """Return the axes, innermost last."""
    return OUTERMOST_FIRST


def _counts(hosts: Sequence[str]) -> str:
    counts = sorted({len(node.ranks) for node in ranks_by_host(hosts)})
    return " or ".join(map(str, counts))


def _expanded(part: str) -> list[str]:
    ranged = _RANGE.fullmatch(part)
    if ranged is None:
        return [part]
    before, first, last, after = ranged.groups()
    if not 0 <= int(last) - int(first) < _MOST_HOSTS:
        raise BloomeryError(
            f"[{first}-{last}] is not the range of a list of hosts.",
            remedy=f"Write the first and the last number, at most {_MOST_HOSTS:,} hosts: node[01-12].",
        )
    width = len(first) if first.startswith("0") else 0
    return [f"{before}{number:0{width}d}{after}" for number in range(int(first), int(last) + 1)]
