"""The device mesh of one peer: which ranks it has, their process groups, and the collectives over them.

`join_mesh` performs the rendezvous, makes the process groups and returns the `Mesh`.
"""

from __future__ import annotations

import datetime
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bloomery.config.parallel import ParallelSection
from bloomery.errors import TrainingFailed
from bloomery.events.machine import machine_id
from bloomery.events.run_lock import host_name
from bloomery.events.timeouts import (
    COLLECTIVE_TIMEOUT_S,
    JOIN_TIMEOUT_S,
    STORE_TIMEOUT_S,
    WATCHDOG_MARGIN_S,
)
from bloomery.parallel.axis import SINGLE_RANK_AXIS, Axis
from bloomery.parallel.device_wait import wait_for_device
from bloomery.parallel.pipeline_schedule import P2PChannel, p2p_channels
from bloomery.parallel.rank_zero_task import ReportProgress, run_as_rank_zero, wait_for_rank_zero
from bloomery.parallel.rendezvous import (
    Introduction,
    ask_store,
    open_rendezvous_store,
    raising_rank_lost,
    rendezvous,
)
from bloomery.plan.pipeline_stages import rank_of_stage
from bloomery.plan.ranks import (
    OUTERMOST_FIRST,
    Degrees,
    degrees_of,
    refuse_tensor_groups_across_hosts,
    wrong_ranks_error,
)
from bloomery.torch_private import PrefixStore, Store

TIMEOUT = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks of one peer, this rank's place among them, and its process group on each axis.

    rank, world: this rank, and the number of ranks of the peer.
    pipeline, data, tensor: the three axes, outermost first.
    embedding: the ranks of the first and the last pipeline stage, which share a tied embedding; degree 1 on
        the ranks between them, where one rank has both ends, and where the embedding is not tied.
    shard: the part of the data axis that divides one copy of what ZeRO shards; degree 1 without sharding.
    replica: the ranks of the data axis that hold the same shard; the whole data axis without sharding.
    channels: the point-to-point channels of the pipeline that this rank sends or receives on, each with a
        group of its sender and its receiver.
    store: the store of the rendezvous, for waits that may outlast a collective; None with one rank.
    task_numbers: counts the tasks of `run_on_rank_zero`, so that each has a key of its own in the store.
    """

    rank: int = 0
    world: int = 1
    device: torch.device
    pipeline: Axis = SINGLE_RANK_AXIS
    data: Axis = SINGLE_RANK_AXIS
    tensor: Axis = SINGLE_RANK_AXIS
    embedding: Axis = SINGLE_RANK_AXIS
    shard: Axis = SINGLE_RANK_AXIS
    replica: Axis = SINGLE_RANK_AXIS
    channels: Mapping[P2PChannel, Axis] = field(default_factory=dict)
    store: Store | None = None
    task_numbers: Iterator[int] = field(default_factory=count)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints, and writes what only one rank may write."""
        return self.rank == 0

    def wait_for_device(self) -> None:
        """Return once this rank's device has done what was queued; call it before the host reads from it.

        Raises RankLost where the device waits for another rank for too long. Not collective.
        """
        if self.world > 1:
            wait_for_device(self.device)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, in place, and return it. Collective over the peer."""
        if self.world > 1:
            with raising_rank_lost():
                dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Copy rank 0's `tensor` to all ranks, in place, and return it. Collective over the peer."""
        if self.world > 1:
            with raising_rank_lost():
                dist.broadcast(tensor, src=0)
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:  # Any: JSON
        """Return every rank's `value`, by rank, on every rank. Collective over the peer.

        The value travels as JSON: unlike torch's function of this name, no pickle is read from another rank.
        """
        if self.world == 1:
            return [value]
        with raising_rank_lost():
            return self._all_gather_json(json.dumps(value).encode())

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send flat byte tensors from main memory to other ranks, and receive theirs in place.

        sends: what to send, by receiving rank. receives: where to put what arrives, by sending rank.
        Collective over the peer: every rank calls, with mappings that match; empty ones if it has no part.
        """
        if not (sends or receives):
            return
        self.wait_for_device()
        arriving = {rank: tensor.to(self.device) for rank, tensor in receives.items()}
        operations = [
            dist.P2POp(dist.isend, tensor.to(self.device), rank) for rank, tensor in sorted(sends.items())
        ]
        operations += [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in sorted(arriving.items())]
        with raising_rank_lost():
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        self.wait_for_device()
        for rank, tensor in receives.items():
            if arriving[rank] is not tensor:
                tensor.copy_(arriving[rank])

    def run_on_rank_zero(self, task: Callable[[ReportProgress], _Result], *, doing: str) -> _Result | None:
        """Run `task` on rank 0 and return its result there; the other ranks wait for it and return None.

        task: is called with a function that it may call whenever it has made progress; the others wait for as
            long as it makes some.
        doing: what the task does, for the message that names whom a rank waited for.
        Where the task raises, the other ranks raise ReportedElsewhere. Collective over the peer.
        """
        if self.world == 1:
            return task(lambda: None)
        assert self.store is not None, "ranks that met have a store"
        key = f"rank_zero_task/{next(self.task_numbers)}"
        if self.is_first:
            return run_as_rank_zero(self.store, key, task)
        wait_for_rank_zero(self.store, key, doing=doing)
        return None

    def barrier(self) -> None:
        """Wait for every rank. Collective over the peer."""
        if self.world > 1 and self.device.type == "cuda":
            # NCCL's barrier makes the host wait without a deadline.
            self.all_reduce(torch.zeros(1, device=self.device))
            self.wait_for_device()
        elif self.world > 1:
            with raising_rank_lost():
                dist.barrier()

    def close(self) -> None:
        """Leave the process groups, if there are any."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _all_gather_json(self, text: bytes) -> list[Any]:
        self.wait_for_device()
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(text)], device=self.device))
        self.wait_for_device()
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        received = [torch.zeros_like(padded) for _ in sizes]
        dist.all_gather(received, padded)
        self.wait_for_device()
        return [
            json.loads(content[: int(size)].cpu().numpy().tobytes())
            for content, size in zip(received, sizes, strict=True)
        ]


def join_mesh(
    parallel: ParallelSection,
    *,
    recipe: Mapping[str, str] | None = None,
    choices: Callable[[torch.device], Mapping[str, str]] = lambda device: {},
    ties_embedding: bool = True,
) -> Mesh:
    """Return the mesh of the ranks that the launcher's environment describes; one rank without a launcher.

    recipe: all settings by key, which must be equal on all ranks.
    choices: what a device makes of the settings that say 'auto' and must be resolved alike on all ranks.
    ties_embedding: see `mesh_of`.
    Raises TrainingFailed, on every rank within seconds, if the degrees do not multiply to the number of
    ranks, a rank lacks a device, has another recipe or resolves 'auto' differently, or a tensor-parallel
    group crosses nodes. Collective over the peer.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    degrees, device = degrees_of(parallel, world=world), torch.device("cpu")
    own, store = Introduction(host=host_name(), machine=machine_id(), recipe=recipe or {}), None
    try:
        _refuse_other_degrees(parallel, degrees, world=world)
        device = _device()
        if world > 1:
            own = replace(own, chosen=choices(device), gpu=_gpu_id(device))
    except TrainingFailed as refused:
        if world == 1:
            raise
        # Told at the rendezvous, so that every rank ends at once, and rank 0 says why.
        own = replace(own, refusal=refused.message, remedy=refused.remedy)
    if world > 1:
        with raising_rank_lost():
            store = ask_store(
                open_rendezvous_store,
                by="the store where the ranks meet",
                within_s=JOIN_TIMEOUT_S + STORE_TIMEOUT_S,
            )
            rendezvous(store, own, rank=rank, world=world, check=lambda all_: _check_hosts(degrees, all_))
            _init_process_group(store, rank=rank, world=world, device=device)
    assert degrees is not None, "a rank without degrees has refused"
    mesh = mesh_of(
        degrees,
        rank=rank,
        device=device,
        chunks=parallel.chunks,
        schedule=parallel.schedule,
        ties_embedding=ties_embedding,
    )
    return replace(mesh, store=store)


def mesh_of(
    degrees: Degrees,
    *,
    rank: int,
    device: torch.device,
    chunks: int = 1,
    schedule: str = "1f1b",
    ties_embedding: bool = True,
) -> Mesh:
    """Make the axes' process groups inside the default one and return the mesh around `rank`.

    chunks: stages on each pipeline rank. schedule: the pipeline schedule, which says where each stage is.
    ties_embedding: whether the model's head is its embedding; otherwise nothing is sent between the ends of a
        pipeline, and they get no group.
    Collective over the peer: every rank makes every group, in the same order.
    """
    axes = {axis: _axis(degrees.groups(axis), rank, device) for axis in OUTERMOST_FIRST}
    shard, replica = Axis(ranks=(rank,)), axes["data"]
    if degrees.shard == degrees.data:
        shard, replica = replica, shard
    elif degrees.shard > 1:
        shard = _axis(degrees.shard_groups(), rank, device)
        replica = _axis(degrees.replica_groups(), rank, device)
    pipelines = degrees.groups("pipeline") if degrees.pipeline > 1 else ()
    last = rank_of_stage(degrees.pipeline * chunks - 1, pipeline=degrees.pipeline, schedule=schedule)
    ends = [(ranks[0], ranks[last]) for ranks in pipelines] if ties_embedding and last else []
    return Mesh(
        rank=rank,
        world=degrees.world,
        device=device,
        embedding=_axis(ends, rank, device),
        shard=shard,
        replica=replica,
        channels=_open_channels(pipelines, rank, device, chunks=chunks, schedule=schedule),
        pipeline=axes["pipeline"],
        data=axes["data"],
        tensor=axes["tensor"],
    )


def _refuse_other_degrees(parallel: ParallelSection, degrees: Degrees | None, *, world: int) -> None:
    """Raise TrainingFailed where the degrees do not multiply to `world`, or shards do not divide the data."""
    if degrees is None:
        raise wrong_ranks_error(parallel, world=world)
    if degrees.data % degrees.shard:
        raise TrainingFailed(
            f"parallel.shard_degree = {degrees.shard} does not divide the data degree {degrees.data}.",
            remedy="Choose a divisor of them, the ranks of one node for instance, or 'auto'.",
        )


def _check_hosts(degrees: Degrees | None, ranks: Sequence[Introduction]) -> None:
    """Refuse a tensor-parallel group that crosses nodes, which only all introductions together show."""
    assert degrees is not None, "a rank without degrees has refused"
    machines = {(rank.host, rank.machine) for rank in ranks}
    shared_names = {host for host, count in Counter(host for host, _ in machines).items() if count > 1}
    refuse_tensor_groups_across_hosts(
        degrees,
        [f"{rank.host} ({rank.machine})" if rank.host in shared_names else rank.host for rank in ranks],
    )


def _init_process_group(store: Store, *, rank: int, world: int, device: torch.device) -> None:
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("group", store),
        rank=rank,
        world_size=world,
        timeout=_timeout(device),
        device_id=device if device.type == "cuda" else None,
    )


def _timeout(device: torch.device) -> datetime.timedelta:
    """How long torch lets a collective wait: with NCCL longer than `wait_for_device`, which says why."""
    margin_s = WATCHDOG_MARGIN_S if device.type == "cuda" else 0
    return TIMEOUT + datetime.timedelta(seconds=margin_s)


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


def _gpu_id(device: torch.device) -> str:
    """Return the UUID of a rank's GPU; "" on a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _axis(groups: Sequence[tuple[int, ...]], rank: int, device: torch.device) -> Axis:
    """Make process groups that share no rank, and return the axis of the group that `rank` is in.

    Collective over the peer: every rank makes every group, in one order, as torch requires. On GPUs all are
    made in one split of the default group's communicator. One after another they would be a split each, in
    which all ranks take part: 912 for the layout of BLOOM-176B.
    """
    wide = [list(ranks) for ranks in groups if len(ranks) > 1]
    own_ranks = next((ranks for ranks in groups if rank in ranks), (rank,))
    own: dist.ProcessGroup | None = None
    # Without a time-out of its own a group has the backend's default, not that of the default group.
    if device.type == "cuda" and wide:
        own = dist.split_group(split_ranks=wide, timeout=_timeout(device))
    else:
        for ranks in wide:
            group = dist.new_group(ranks, timeout=TIMEOUT)
            own = group if rank in ranks else own
    return Axis(index=own_ranks.index(rank), ranks=own_ranks, group=own if len(own_ranks) > 1 else None)


def _open_channels(
    pipelines: Sequence[tuple[int, ...]], rank: int, device: torch.device, *, chunks: int, schedule: str
) -> Mapping[P2PChannel, Axis]:
    """Make the groups of all pipelines' channels; return and connect those that this rank is an end of.

    pipelines: the ranks of each pipeline, by stage. Collective over the peer.
    """
    if not pipelines:
        return {}
    channels = {
        channel: _axis(
            [(ranks[channel.sender], ranks[channel.receiver]) for ranks in pipelines], rank, device
        )
        for channel in p2p_channels(pipeline=len(pipelines[0]), chunks=chunks, schedule=schedule)
    }
    own = {channel: axis for channel, axis in channels.items() if axis.group is not None}
    if device.type != "meta":
        with raising_rank_lost():
            _connect(own, device)
    return own


def _connect(channels: Mapping[P2PChannel, Axis], device: torch.device) -> None:
    """Send one number on each channel.

    NCCL connects two ranks at their first message, and both block until they are connected. Here all ranks do
    so in one order; in the order of a pipeline schedule they could wait for each other in a circle.
    """
    number = torch.zeros(1, device=device)
    for axis in channels.values():
        if axis.is_first:
            dist.send(number, dst=axis.ranks[1], group=axis.group)
        else:
            dist.recv(number, src=axis.ranks[0], group=axis.group)
