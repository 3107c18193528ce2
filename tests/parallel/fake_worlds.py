"""Worlds of many ranks of which one exists: their process groups have all ranks, and exchange nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bloomery.config.load import load_recipe
from bloomery.config.parallel import ParallelSection
from bloomery.parallel.mesh import Mesh, mesh_of
from bloomery.plan.ranks import Degrees, degrees_of


def degrees_at(name: str, world: int) -> Degrees:
    """The degrees of a published recipe on so many ranks."""
    degrees = degrees_of(load_recipe(name).recipe.parallel, world=world)
    assert degrees is not None
    return degrees


@contextmanager
def fake_world(degrees: Degrees, *, rank: int, parallel: ParallelSection) -> Iterator[Mesh]:
    """The mesh of a rank, on the device 'meta'."""
    dist.init_process_group("fake", rank=rank, world_size=degrees.world, store=FakeStore())
    try:
        yield mesh_of(
            degrees,
            rank=rank,
            device=torch.device("meta"),
            chunks=parallel.chunks,
            schedule=parallel.schedule,
        )
    finally:
        dist.destroy_process_group()
