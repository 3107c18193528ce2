"""One rank of a load over gloo: what the test of it starts in processes of their own."""

import os
from pathlib import Path

import torch

from bloomery.checkpoint.format.state import Box, StateEntry, whole
from bloomery.checkpoint.load import load_plan
from bloomery.checkpoint.load.loader import load_checkpoint
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.config.parallel import ParallelSection
from bloomery.parallel.mesh import join_mesh

WORLD = 3
ROWS, WIDTH = 999, 1536


def load(rank: int, directory: str, results: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "BLOOMERY_RENDEZVOUS_FILE": f"{results}/meeting",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    load_plan.UNIT_BYTES = 1 << 20
    mesh = join_mesh(ParallelSection())
    width = WIDTH // WORLD
    mine = torch.zeros(ROWS, width)
    part = StateEntry(
        name="model.split",
        global_shape=(ROWS, WIDTH),
        dtype="float32",
        box=Box((0, rank * width), (ROWS, width)),
        tensor=mine,
    )
    copy = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
    read: list[int] = []
    ranks = Ranks(rank=rank, world=WORLD, gather=mesh.all_gather_object, exchange=mesh.exchange)
    load_checkpoint(Path(directory), [part, whole("model.copied", copy)], ranks=ranks, count=read.append)
    torch.save([mine, copy, torch.tensor(sum(read))], f"{results}/{rank}")
    mesh.close()
