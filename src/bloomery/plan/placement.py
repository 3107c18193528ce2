"""Which host each rank stands on, and whether that suits the mesh. Arithmetic alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd

from bloomery.config.divisors import divisors, some
from bloomery.errors import BloomeryError, TrainingFailed
from bloomery.plan.ranks import OUTERMOST_FIRST, AxisName, Degrees

_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*")
_RANGE = re.compile(r"([^\[\]]*)\[(\d+)-(\d+)\]([^\[\]]*)")


@dataclass(frozen=True, kw_only=True)
class Seats:
    """Consecutive ranks on one host."""

    host: str
    ranks: range


def read_hosts(text: str) -> list[str]:
    """Host names of a list such as `a,b,node[01-12]`. Raises BloomeryError for what is none, or twice."""
    hosts = [host for part in text.split(",") for host in _expanded(part.strip())]
    wrong = [host for host in hosts if not _HOST.fullmatch(host)]
    if wrong:
        raise BloomeryError(
            f"{wrong[0]!r} is not a host name.",
            remedy="Separate names by commas, node-1,node-2; a range is node[01-12].",
        )
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice:
        raise BloomeryError(f"The host {twice[0]} is given twice.", remedy="Name each node once.")
    return hosts


def seat(hosts: Sequence[str], *, world: int) -> list[str]:
    """The host of each of `world` ranks, equally many on each. Raises BloomeryError where they do not fit."""
    if world % len(hosts):
        near = some(divisors(world), near=len(hosts))
        raise BloomeryError(
            f"{world} ranks do not divide among {len(hosts)} nodes.",
            remedy=f"Numbers of nodes that do: {near}.",
        )
    per_node = world // len(hosts)
    return [host for host in hosts for _ in range(per_node)]


def seats_of(hosts: Sequence[str]) -> list[Seats]:
    """Runs of ranks on one host. hosts: by rank."""
    found = []
    for host, run in groupby(range(len(hosts)), key=lambda rank: hosts[rank]):
        ranks = list(run)
        found.append(Seats(host=host, ranks=range(ranks[0], ranks[-1] + 1)))
    return found


def crosses(degrees: Degrees, axis: AxisName, hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """The axis' lines of ranks that lie on more than one host."""
    return [line for line in degrees.lines(axis) if len({hosts[rank] for rank in line}) > 1]


def refuse_split_lines(degrees: Degrees, hosts: Sequence[str]) -> None:
    """Raise TrainingFailed where tensor-parallel ranks are on several hosts, with the degrees that fit."""
    split = crosses(degrees, "tensor", hosts)
    if not split:
        return
    line = split[0]
    names = sorted({hosts[rank] for rank in line})
    common = gcd(*(len(seats.ranks) for seats in seats_of(hosts)))
    fitting = [degree for degree in divisors(common) if degrees.world % (degree * degrees.pipeline) == 0]
    best = max((degree for degree in fitting if degree <= degrees.tensor), default=1)
    data = degrees.world // (best * degrees.pipeline)
    raise TrainingFailed(
        f"Tensor-parallel ranks {line[0]}–{line[-1]} are on {' and '.join(names)}: parallel.tensor = "
        f"{degrees.tensor} must stay inside a node, and nodes have {_counts(hosts)} of the ranks.",
        remedy=f"A layout that fits {degrees.world} ranks: parallel.tensor={best} "
        f"parallel.pipeline={degrees.pipeline} parallel.data={data}.",
    )


def span(degrees: Degrees, axis: AxisName, seats: Seats) -> str:
    """The indices on an axis of the ranks at `seats`: '0', '0–3', or '0, 4'."""
    found = sorted({degrees.place(rank)[axis] for rank in seats.ranks})
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]}–{found[-1]}"
    return ", ".join(map(str, found))


def reach(degrees: Degrees, axis: AxisName, hosts: Sequence[str]) -> str:
    """How far an axis' lines reach, as a person would say it."""
    lines = degrees.lines(axis)
    apart = len(crosses(degrees, axis, hosts))
    where = "inside a node" if not apart else f"{apart} of them across nodes"
    return f"{len(lines)} line{'s' if len(lines) > 1 else ''} of {degrees.of(axis)}, {where}"


def axes() -> tuple[AxisName, ...]:
    """The axes, innermost last."""
    return OUTERMOST_FIRST


def _counts(hosts: Sequence[str]) -> str:
    counts = sorted({len(seats.ranks) for seats in seats_of(hosts)})
    return " or ".join(map(str, counts))


def _expanded(part: str) -> list[str]:
    ranged = _RANGE.fullmatch(part)
    if ranged is None:
        return [part]
    before, first, last, after = ranged.groups()
    width = len(first) if first.startswith("0") else 0
    return [f"{before}{number:0{width}d}{after}" for number in range(int(first), int(last) + 1)]
