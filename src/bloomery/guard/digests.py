"""Finds the rank whose bits differ, from digests of what ranks hold and of what they computed.

Three things are compared: weights and reduced gradients, which are equal on all replicas; the gradients of a
micro-batch that a rank computed several times; and those of a micro-batch that several ranks computed. Ranks
are only compared with ranks of their kind (`RankDigests.kind`), for other hardware rounds differently.
Weights that are not finite are wrong on any rank, since no update makes them: it is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bloomery.events.records import Json

_HELD = ("weights", "working weights", "gradients")


@dataclass(frozen=True, kw_only=True)
class RankDigests:
    """The digests of one rank at one check.

    kind: what decides over the bits of a result: device, its instructions, libraries, threads.
    data: the index on the data axis.
    place: the indices on the pipeline and the tensor axis: only ranks of one place hold and compute the same.
    shard: which part of what ZeRO shards it holds; masters and reduced gradients of one part are equal.
    held: by a name of _HELD, the digest of what ranks of one place hold alike.
    computed: by data index, the digests of gradients of that index's first micro-batch, in the order of
        computation: its own rank's first digest is of the gradients that were trained on.
    not_finite: the names of the tensors whose master weights hold NaN or infinities on this rank.
    """

    rank: int
    host: str
    device: str
    kind: str
    data: int
    place: tuple[int, int]
    shard: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    computed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return what `digests_from_json` reads."""
        record = asdict(self)
        record["computed"] = {str(data): list(digests) for data, digests in self.computed.items()}
        return record

    @property
    def name(self) -> str:
        """Return the rank as people know it."""
        return f"rank {self.rank} ({self.device} of {self.host})"


def digests_from_json(values: Mapping[str, Any]) -> RankDigests:  # Any: written by `to_json`
    """Return the digests that another rank sent."""
    computed = {int(data): tuple(digests) for data, digests in values["computed"].items()}
    tuples = {name: tuple(values[name]) for name in ("place", "not_finite")}
    return RankDigests(**{**values, **tuples, "computed": computed})


@dataclass(frozen=True, kw_only=True)
class BitFault:
    """A difference between bits that have to be equal.

    what: 'weights', 'gradients' or 'computation'.
    ranks: whose bits are wrong; where nobody can tell, all whose bits differ from each other's.
    is_certain: whether it is one of `ranks` for sure, or any of them.
    reason: a sentence with the names of ranks, devices and hosts.
    """

    what: str
    ranks: tuple[int, ...]
    is_certain: bool
    reason: str


def disputed_micro_batches(ranks: Sequence[RankDigests]) -> tuple[int, ...]:
    """Return the data-parallel indices whose micro-batch gave other gradients in some computation, ascending.

    A micro-batch is computed several times, by one rank or by several; their digests are compared.
    """
    disputes = set()
    for results in _results(ranks).values():
        for data, digests in results.items():
            if len({digest for by_rank in digests.values() for digest in by_rank}) > 1:
                disputes.add(data)
    return tuple(sorted(disputes))


def computation_faults(ranks: Sequence[RankDigests]) -> list[BitFault]:
    """Return whose computations were wrong. Call it after those of disputed micro-batches were repeated.

    Each rank has one vote on a micro-batch: the result that it got more than half of the times. The result
    with more than half of the votes is right, and every rank that ever had another is named.
    """
    wrong: set[int] = set()
    undecided: set[int] = set()
    for results in _results(ranks).values():
        for digests in results.values():
            differing = {rank for rank, own in digests.items() if len(set(own)) > 1}
            if not differing and len({own[0] for own in digests.values()}) == 1:
                continue
            right = _most(vote for vote in (_most(own) for own in digests.values()) if vote is not None)
            if right is None:
                undecided |= set(digests)
            else:
                wrong |= {rank for rank, own in digests.items() if set(own) != {right}}
    faults = []
    if wrong:
        names = _names(ranks, wrong)
        reason = f"{names} computed a micro-batch with other bits than its repetition and other ranks"
        faults.append(
            BitFault(what="computation", ranks=tuple(sorted(wrong)), is_certain=True, reason=reason)
        )
    if undecided - wrong:
        names = _names(ranks, undecided)
        reason = f"a micro-batch has other bits on each of {names}, and none has a majority"
        faults.append(
            BitFault(what="computation", ranks=tuple(sorted(undecided)), is_certain=False, reason=reason)
        )
    return faults


def held_faults(ranks: Sequence[RankDigests]) -> list[BitFault]:
    """Return which replicas hold other bits than the majority; all of them where there is no majority.

    Of ranks whose masters differ, or are not finite, nothing else is said, for all else follows from that.
    """
    faults = _not_finite_faults(ranks)
    for what in _HELD:
        groups: dict[tuple[tuple[int, int], str, int], list[RankDigests]] = {}
        for rank in ranks:
            if what in rank.held and not rank.not_finite:
                shard = rank.shard if what in ("weights", "gradients") else 0
                groups.setdefault((rank.place, rank.kind, shard), []).append(rank)
        named_ranks = {rank for fault in faults for rank in fault.ranks}
        new = [fault for group in groups.values() for fault in _odd_ones(group, what)]
        faults += [fault for fault in new if not set(fault.ranks) <= named_ranks]
    return faults


def is_not_deterministic(ranks: Sequence[RankDigests]) -> bool:
    """Whether the kernels themselves give other bits each time, so that nothing follows from a difference.

    It is so where more than half of the replicas differ from themselves; where there is one replica, where
    three computations gave three results.
    """
    replicas = {rank.data for rank in ranks}
    if len(replicas) == 1:
        return any(len(set(own)) == len(own) >= 3 for rank in ranks for own in rank.computed.values())
    unsteady = {rank.data for rank in ranks if any(len(set(own)) > 1 for own in rank.computed.values())}
    return 2 * len(unsteady) > len(replicas)


def settled_by_repetition(
    before: Mapping[int, Mapping[str, int]], ranks: Sequence[RankDigests]
) -> tuple[int, ...]:
    """Return the ranks that held other bits before than all hold now, after the same steps were made again.

    before: what each rank held. The result is () where the ranks do not agree now either, or none held the
    bits of now.
    """
    wrong = set()
    held_now: dict[tuple[tuple[int, int], str, int], dict[str, int]] = {}
    for rank in ranks:
        held = dict(rank.held)
        if held_now.setdefault((rank.place, rank.kind, rank.shard), held) != held:
            return ()
        if before.get(rank.rank) != held:
            wrong.add(rank.rank)
    return tuple(sorted(wrong)) if len(wrong) < len(ranks) else ()


_Results = dict[int, dict[int, tuple[int, ...]]]


def _results(ranks: Sequence[RankDigests]) -> dict[tuple[tuple[int, int], str], _Results]:
    """Return {data index: {rank: digests}} of the ranks of each place and kind, whose results compare."""
    results: dict[tuple[tuple[int, int], str], _Results] = {}
    for rank in ranks:
        of_kind = results.setdefault((rank.place, rank.kind), {})
        for data, digests in rank.computed.items():
            of_kind.setdefault(data, {})[rank.rank] = digests
    return results


def _not_finite_faults(ranks: Sequence[RankDigests]) -> list[BitFault]:
    """Return who holds weights that are not finite: certain where a replica of them holds finite ones."""
    groups: dict[tuple[tuple[int, int], int], list[RankDigests]] = {}
    for rank in ranks:
        groups.setdefault((rank.place, rank.shard), []).append(rank)
    faults = []
    for group in groups.values():
        spoilt = [rank for rank in group if rank.not_finite]
        if spoilt:
            numbers = tuple(rank.rank for rank in spoilt)
            tensors = ", ".join(sorted({name for rank in spoilt for name in rank.not_finite})[:4])
            holders = f"{_names(spoilt, set(numbers))} {'holds' if len(spoilt) == 1 else 'hold'}"
            reason = f"{holders} weights that are not finite, in {tensors}"
            is_certain = len(spoilt) < len(group)
            faults.append(BitFault(what="weights", ranks=numbers, is_certain=is_certain, reason=reason))
    return faults


def _odd_ones(group: Sequence[RankDigests], what: str) -> list[BitFault]:
    if len({rank.held[what] for rank in group}) == 1:
        return []
    right = _most(rank.held[what] for rank in group)
    kind = "gradients" if what == "gradients" else "weights"
    if right is None:
        names = _names(group, {rank.rank for rank in group})
        reason = f"the {what} of {names} have to be equal and are not, and none has a majority"
        return [
            BitFault(what=kind, ranks=tuple(rank.rank for rank in group), is_certain=False, reason=reason)
        ]
    odd = tuple(rank.rank for rank in group if rank.held[what] != right)
    agreeing = len(group) - len(odd)
    reason = f"{_names(group, set(odd))} holds other {what} than the {agreeing} replicas that agree"
    return [BitFault(what=kind, ranks=odd, is_certain=True, reason=reason)]


def _names(ranks: Sequence[RankDigests], numbers: set[int]) -> str:
    """Return the names of ranks, of many the first ones."""
    named = [rank.name for rank in ranks if rank.rank in numbers]
    more = f" and {len(named) - 4} more" if len(named) > 4 else ""
    return ", ".join(named[:4]) + more


def _most(values: Iterable[int]) -> int | None:
    """Return the value that is more than half of all; None where there is none."""
    counts = Counter(values)
    return next((value for value, count in counts.items() if 2 * count > counts.total()), None)
