"""One rank, on a node of its own, of a run whose state is in boxes of rows and in replicas."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bloomery.checkpoint.format.state import Box, StateEntry, whole
from bloomery.config.checkpoint import CheckpointSection
from bloomery.events.run_directory import RunDirectory
from bloomery.parallel.mesh import mesh_of
from bloomery.plan.ranks import Degrees
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave

WORLD = 4
ROWS, WIDTH = 64, 96


class Shards:
    """A quarter of the rows of one tensor, the whole of another, and a count."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.rows = torch.zeros(ROWS // WORLD, WIDTH)
        self.replica = torch.zeros(WIDTH)
        self.count = 0

    def fill(self, number: int) -> None:
        everything = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        self.rows.copy_(everything.chunk(WORLD)[self.rank])
        self.replica.copy_(everything.sum(0))
        self.count = number

    def equals(self, number: int) -> bool:
        other = Shards(self.rank)
        other.fill(number)
        return (
            torch.equal(self.rows, other.rows)
            and torch.equal(self.replica, other.replica)
            and self.count == number
        )

    def state_entries(self) -> Iterable[StateEntry]:
        offset = (self.rank * ROWS // WORLD, 0)
        yield StateEntry(
            name="model.rows",
            global_shape=(ROWS, WIDTH),
            dtype="float32",
            box=Box(offset, tuple(self.rows.shape)),
            tensor=self.rows,
        )
        yield whole("model.replica", self.replica)

    def state_values(self) -> Mapping[str, Any]:
        return {"count": self.count}

    def load_state_values(self, values: Mapping[str, Any]) -> None:
        self.count = values["count"]


def store_of(run: Path, nodes: Path, rank: int, *, meeting: Path) -> Store:
    """The store of a rank of its own node, which has met the others."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    mesh = mesh_of(Degrees(data=WORLD), rank=rank, device=torch.device("cpu"))
    section = CheckpointSection(background="on", partner_copies=True, memory_directory=str(nodes / str(rank)))
    return Store(
        RunDirectory(run),
        section,
        rank=rank,
        world=WORLD,
        gather=mesh.all_gather_object,
        exchange=mesh.exchange,
    )


def save_and_wait(rank: int, run: str, nodes: str, meeting: str) -> None:
    """Save twice, say so, and go on until the end."""
    state = Shards(rank)
    store = store_of(Path(run), Path(nodes), rank, meeting=Path(meeting))
    store.restore({"model": state})
    for step in (1, 2):
        state.fill(step)
        assert store.begin_save(RunStateToSave({"model": state}, step=step))
        store.wait_staged()
        assert store.wait_for_saves() == step
    Path(nodes, f"saved-{rank}").write_text(str(os.getpid()))
    time.sleep(600)


def restore(rank: int, run: str, nodes: str, meeting: str) -> None:
    """Restore, say what came back, save once more, and end well."""
    state = Shards(rank)
    with store_of(Path(run), Path(nodes), rank, meeting=Path(meeting)) as store:
        restored = store.restore({"model": state})
        told = "nothing" if restored is None else f"{restored.step} {state.equals(restored.step)}"
        state.fill(3)
        store.save(RunStateToSave({"model": state}, step=3))
        Path(nodes, f"restored-{rank}").write_text(told)
    dist.destroy_process_group()
