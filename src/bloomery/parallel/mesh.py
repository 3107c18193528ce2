"""Who am I among the ranks of this peer, on which axes, and on which device."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from bloomery.config.parallel import ParallelSection
from bloomery.errors import RankLost, TrainingFailed
from bloomery.events.host import host_name
from bloomery.parallel.answers import ANSWER_S, answered
from bloomery.parallel.errands import Tick, do_first, wait_for_first
from bloomery.parallel.failures import tells_of_a_lost_rank
from bloomery.parallel.lanes import Lane, lanes_of
from bloomery.parallel.meeting import JOIN_TIMEOUT_S, Introduction, meet
from bloomery.plan.placement import refuse_split_lines
from bloomery.plan.ranks import OUTERMOST_FIRST, Degrees, degrees_of, other_ranks_wanted

COLLECTIVE_TIMEOUT_S = 600
TIMEOUT = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
MEETING_FILE, MEETING_STORE = "BLOOMERY_MEETING_FILE", "BLOOMERY_MEETING_STORE"
"""What our launcher tells its ranks: a file on this machine, or host:port of its store."""

_Result = TypeVar("_Result")

# torch 2.13's names; older versions have the others, which it warns of.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sums = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of the mesh, as this rank sees it: its line of ranks, and its place in it.

    group is None where nothing is to be exchanged: the degree is 1.
    """

    index: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None

    @property
    def degree(self) -> int:
        """Ranks on it."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the axis' first, which counts what all of its ranks hold alike."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank is the axis' last."""
        return self.index == self.degree - 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the axis, in place. Collective over it."""
        if self.degree > 1:
            with lost_ranks_told():
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def part(self, flat: Tensor) -> Tensor:
        """An equal part of a vector, that of this rank: a view."""
        size = flat.numel() // self.degree
        return flat[self.index * size : (self.index + 1) * size]

    def sum_parts(self, flat: Tensor) -> Tensor:
        """Sum over the axis this rank's part of `flat`, in place; what the rest holds then means nothing.

        Collective over the axis.
        """
        own = self.part(flat)
        if self.degree > 1:
            with lost_ranks_told():
                if dist.get_backend(self.group) == "gloo":  # whose reduce_scatter takes 2.6 times as long
                    dist.all_reduce(flat, group=self.group)
                else:
                    _scatter_sums(own, flat, group=self.group)
        return own

    def gather_parts(self, flat: Tensor) -> None:
        """Fill `flat` with each rank's part of it. Collective over the axis."""
        if self.degree > 1:
            with lost_ranks_told():
                _gather(flat, self.part(flat), group=self.group)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks of one peer: `world` of them, each with an index on the axes pipeline, data and tensor.

    ends: this rank's pipeline's first and last stage, where this rank is one of them and they are two; they
    share the embedding of a tied model. shard: the part of the data axis that divides one copy of what is
    sharded; replica: across it, the ranks that hold the same part, all of the data axis where nothing is.
    lanes: those that this rank sends or receives on, each with a group of its sender and its receiver.
    """

    rank: int = 0
    world: int = 1
    device: torch.device
    pipeline: Axis = Axis()
    data: Axis = Axis()
    tensor: Axis = Axis()
    ends: Axis = Axis()
    shard: Axis = Axis()
    replica: Axis = Axis()
    lanes: Mapping[Lane, Axis] = field(default_factory=dict)
    store: Store | None = None
    """Where the ranks met; what takes longer than a collective may is waited for there."""
    errands: Iterator[int] = field(default_factory=count)
    """Numbers for what is waited for there."""

    @property
    def is_first(self) -> bool:
        """The rank that prints and writes what only one may write."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place. Collective over the peer."""
        if self.world > 1:
            with lost_ranks_told():
                dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:  # Any: JSON
        """Every rank's `value` by rank, on every rank. Collective over the peer. JSON crosses, no pickle."""
        if self.world == 1:
            return [value]
        with lost_ranks_told():
            return self._gathered(json.dumps(value).encode())

    def _gathered(self, text: bytes) -> list[Any]:
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(text)], device=self.device))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        received = [torch.zeros_like(padded) for _ in sizes]
        dist.all_gather(received, padded)
        return [
            json.loads(content[: int(size)].cpu().numpy().tobytes())
            for content, size in zip(received, sizes, strict=True)
        ]

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send flat byte tensors of main memory to ranks, and fill others with what they send here.

        Collective over the peer: every rank calls, with mappings that agree; empty ones where it has no part.
        """
        if not (sends or receives):
            return
        arriving = {rank: tensor.to(self.device) for rank, tensor in receives.items()}
        operations = [
            dist.P2POp(dist.isend, tensor.to(self.device), rank) for rank, tensor in sorted(sends.items())
        ]
        operations += [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in sorted(arriving.items())]
        with lost_ranks_told():
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for rank, tensor in receives.items():
            if arriving[rank] is not tensor:
                tensor.copy_(arriving[rank])

    def first(self, task: Callable[[Tick], _Result], *, doing: str) -> _Result | None:
        """What `task` returns on the first rank; None on the others, which wait for as long as it gets on.

        Collective over the peer. doing: what it does, to say whom one waited for. The task may call what it
        is given to show that it gets on. Where it fails the others raise ToldElsewhere.
        """
        if self.world == 1:
            return task(lambda: None)
        assert self.store is not None, "ranks that met have a store"
        key = f"errand/{next(self.errands)}"
        if self.is_first:
            return do_first(self.store, key, task)
        wait_for_first(self.store, key, doing=doing)
        return None

    def spread(self, tensor: Tensor) -> Tensor:
        """Make `tensor` what it is on the first rank, in place. Collective over the peer."""
        if self.world > 1:
            with lost_ranks_told():
                dist.broadcast(tensor, src=0)
        return tensor

    def barrier(self) -> None:
        """Wait for every rank. Collective over the peer."""
        if self.world > 1:
            with lost_ranks_told():
                dist.barrier()

    def close(self) -> None:
        """Leave the process group, if one was joined."""
        if dist.is_initialized():
            dist.destroy_process_group()


def join_mesh(
    parallel: ParallelSection,
    *,
    recipe: Mapping[str, str] | None = None,
    choices: Callable[[torch.device], Mapping[str, str]] = lambda device: {},
) -> Mesh:
    """Join the ranks that the launcher's environment describes; alone without one. Collective over the peer.

    recipe: all settings by key, which must be equal on all ranks; choices: what this device makes of those
    that say 'auto', where it matters that all choose alike. Raises TrainingFailed, on every rank within
    seconds, where the degrees do not multiply to the ranks started, a rank lacks a device, has another recipe
    or chooses otherwise, or a tensor-parallel line would cross nodes.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    degrees, device, refusal, store = degrees_of(parallel, world=world), torch.device("cpu"), None, None
    try:
        if degrees is None:
            raise other_ranks_wanted(parallel, world=world)
        if degrees.data % degrees.shard:
            raise TrainingFailed(
                f"parallel.shard_degree = {degrees.shard} does not divide the data degree {degrees.data}.",
                remedy="Choose a divisor of them, the ranks of one node for instance, or 'auto'.",
            )
        device = _device()
    except TrainingFailed as refused:
        if world == 1:
            raise
        refusal = refused
    if world > 1:
        with lost_ranks_told():
            store = answered(_store, by="the store where the ranks meet", within_s=JOIN_TIMEOUT_S + ANSWER_S)
            mine = Introduction(
                host=host_name(),
                recipe=recipe or {},
                chosen={} if refusal else choices(device),
                refusal=refusal.message if refusal else "",
                remedy=refusal.remedy if refusal else "",
            )
            meet(store, mine, rank=rank, world=world, judge=lambda all_: _judge(degrees, all_))
            dist.init_process_group(
                backend="nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("group", store),
                rank=rank,
                world_size=world,
                timeout=TIMEOUT,
                device_id=device if device.type == "cuda" else None,
            )
    assert degrees is not None, "a rank without degrees has refused"
    mesh = mesh_of(degrees, rank=rank, device=device, chunks=parallel.chunks, schedule=parallel.schedule)
    return replace(mesh, store=store)


def _judge(degrees: Degrees | None, ranks: Sequence[Introduction]) -> None:
    """Refuse what only all ranks together show: a tensor-parallel line that crosses nodes."""
    assert degrees is not None, "a rank without degrees has refused"
    refuse_split_lines(degrees, [one.host for one in ranks])


def _store() -> Store:
    """Where ranks find each other: a file, our launcher's own store, or what torchrun or SLURM describe."""
    world, timeout = int(os.environ["WORLD_SIZE"]), datetime.timedelta(seconds=JOIN_TIMEOUT_S)
    meeting = os.environ.get(MEETING_FILE)
    if meeting:
        return FileStore(meeting, world)
    address = os.environ.get(MEETING_STORE)
    if address:
        host, _, port = address.rpartition(":")
        served = TCPStore(host, int(port), is_master=False, timeout=timeout)
        return PrefixStore("ranks", served)
    store, _, _ = next(iter(rendezvous("env://", timeout=timeout)))
    return store


def mesh_of(
    degrees: Degrees, *, rank: int, device: torch.device, chunks: int = 1, schedule: str = "1f1b"
) -> Mesh:
    """The mesh around `rank`, in a process group that was joined. Collective: groups are made here.

    chunks: stages on each pipeline rank; schedule: which of them are neighbours.
    """
    axes = {axis: _axis(degrees.lines(axis), rank) for axis in OUTERMOST_FIRST}
    shard, replica = Axis(ranks=(rank,)), axes["data"]
    if degrees.shard == degrees.data:
        shard, replica = replica, shard
    elif degrees.shard > 1:
        shard = _axis(degrees.shard_lines(), rank)
        replica = _axis(degrees.replica_lines(), rank)
    lines = degrees.lines("pipeline") if degrees.pipeline > 1 else ()
    ends = [(line[0], line[-1]) for line in lines]
    return Mesh(
        rank=rank,
        world=degrees.world,
        device=device,
        ends=_axis(ends, rank),
        shard=shard,
        replica=replica,
        lanes=_lanes(lines, rank, device, chunks=chunks, schedule=schedule),
        pipeline=axes["pipeline"],
        data=axes["data"],
        tensor=axes["tensor"],
    )


def _lanes(
    lines: Sequence[tuple[int, ...]], rank: int, device: torch.device, *, chunks: int, schedule: str
) -> Mapping[Lane, Axis]:
    """The lanes of this rank's pipeline that it is an end of, opened. Collective over the peer."""
    if not lines:
        return {}
    found = {
        lane: _axis([(line[lane.sender], line[lane.receiver]) for line in lines], rank)
        for lane in lanes_of(pipeline=len(lines[0]), chunks=chunks, schedule=schedule)
    }
    own = {lane: axis for lane, axis in found.items() if axis.group is not None}
    if device.type != "meta":
        with lost_ranks_told():
            _open(own, device)
    return own


def _open(lanes: Mapping[Lane, Axis], device: torch.device) -> None:
    """Send one number on each lane. NCCL connects two ranks at their first message, and both wait in it: here
    all ranks do so in one order, not in that of a timetable, in which they may wait in a circle.
    """
    number = torch.zeros(1, device=device)
    for axis in lanes.values():
        if axis.is_first:
            dist.send(number, dst=axis.ranks[1], group=axis.group)
        else:
            dist.recv(number, src=axis.ranks[0], group=axis.group)


def _axis(lines: Sequence[tuple[int, ...]], rank: int) -> Axis:
    """The line that `rank` is in. Every rank makes every group, in one order, as torch asks."""
    mine = Axis(ranks=(rank,))
    for line in lines:
        # A group has the backend's own time-out, not that of the whole peer, unless it is told.
        group = dist.new_group(list(line), timeout=TIMEOUT) if len(line) > 1 else None
        if rank in line:
            mine = Axis(index=line.index(rank), ranks=line, group=group)
    return mine


@contextmanager
def lost_ranks_told() -> Iterator[None]:
    """Turn what a collective raises when a rank is gone into what a person can act on."""
    try:
        yield
    except RuntimeError as error:
        if not tells_of_a_lost_rank(error):
            raise
        raise RankLost(
            "Another rank of this run is gone.",
            remedy="Its message, if any, says why. The same command goes on from the newest checkpoint.",
        ) from error


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= devices:
        raise TrainingFailed(
            f"Rank {local} of this machine has no GPU of its own: there are {devices}.",
            remedy=f"Start at most --nproc {devices} here, or set CUDA_VISIBLE_DEVICES= to train on the CPU.",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
