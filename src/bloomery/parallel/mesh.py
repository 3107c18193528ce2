"""Who am I among the ranks of this peer, and on which device."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bloomery.errors import RankLost, TrainingFailed

COLLECTIVE_TIMEOUT_S = 600
LOST = ("Connection", "Broken pipe", "peer", "imed out", "Socket")
"""What torch's backends say, among other things, when a rank does not answer: they raise RuntimeErrors."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks of one peer. One axis so far: data."""

    rank: int
    data_degree: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """The rank that prints and writes what only one may write."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place. Collective over the peer."""
        if self.data_degree > 1:
            with _lost_ranks_told():
                dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:  # Any: JSON
        """Every rank's `value` by rank, on every rank. Collective over the peer. JSON crosses, no pickle."""
        if self.data_degree == 1:
            return [value]
        with _lost_ranks_told():
            return self._gathered(json.dumps(value).encode())

    def _gathered(self, text: bytes) -> list[Any]:
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.data_degree)]
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

    def barrier(self) -> None:
        """Wait for every rank. Collective over the peer."""
        if self.data_degree > 1:
            with _lost_ranks_told():
                dist.barrier()

    def close(self) -> None:
        """Leave the process group, if one was joined."""
        if dist.is_initialized():
            dist.destroy_process_group()


def join_mesh(degree: int | str) -> Mesh:
    """Join the process group that the launcher's environment describes; alone without one.

    Collective over the peer. A recipe that asks for another data-parallel degree is refused.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if degree not in ("auto", world):
        raise TrainingFailed(
            f"parallel.data = {degree}, but {world} rank{'s were' if world > 1 else ' was'} started.",
            remedy=f"Start with --nproc {degree}, or set parallel.data=auto.",
        )
    device = _device()
    if world > 1:
        meeting = os.environ.get("BLOOMERY_MEETING_FILE")
        with _lost_ranks_told():
            dist.init_process_group(
                backend="nccl" if device.type == "cuda" else "gloo",
                init_method=f"file://{meeting}" if meeting else "env://",
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
                device_id=device if device.type == "cuda" else None,
            )
    return Mesh(rank=rank, data_degree=world, device=device)


@contextmanager
def _lost_ranks_told() -> Iterator[None]:
    """Turn what a collective raises when a rank is gone into what a person can act on."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in LOST):
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
