"""Three processes load together through the mesh's own exchange (gloo)."""

import os
import time
from pathlib import Path

import torch
import torch.multiprocessing as processes

from bloomery.checkpoint import transfers
from bloomery.checkpoint.load import load_checkpoint
from bloomery.checkpoint.manifest import BLOCK_BYTES
from bloomery.checkpoint.save import save_checkpoint
from bloomery.checkpoint.state import Box, StateEntry, whole
from bloomery.checkpoint.together import Ranks
from bloomery.parallel.mesh import join_mesh

WORLD = 3
ROWS, WIDTH = 999, 1536
DEADLINE_S = 240


def load(rank: int, directory: str, results: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "BLOOMERY_MEETING_FILE": f"{results}/meeting",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    transfers.UNIT_BYTES = 1 << 20
    mesh = join_mesh(WORLD)
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
    ranks = Ranks(rank=rank, world=WORLD, gather=mesh.gather, exchange=mesh.exchange)
    load_checkpoint(Path(directory), [part, whole("model.copied", copy)], ranks=ranks, count=read.append)
    torch.save([mine, copy, torch.tensor(sum(read))], f"{results}/{rank}")
    mesh.close()


def test_processes_load_what_they_share_once_and_end_up_bit_for_bit_with_all_of_it(tmp_path: Path):
    split, copied = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH).bfloat16()
    entries = [whole("model.split", split), whole("model.copied", copied)]
    directory = save_checkpoint(tmp_path / "checkpoints", entries, step=1, incarnation=1)
    context = processes.start_processes(
        load, args=(str(directory), str(tmp_path)), nprocs=WORLD, join=False, start_method="spawn"
    )
    end = time.monotonic() + DEADLINE_S
    while not context.join(timeout=1):
        assert time.monotonic() < end, "the ranks have not finished"
    total = 0
    for rank in range(WORLD):
        mine, copy, read = torch.load(tmp_path / str(rank), weights_only=True)
        assert torch.equal(mine, split[:, rank * WIDTH // WORLD : (rank + 1) * WIDTH // WORLD])
        assert torch.equal(copy, copied)
        total += int(read)
    assert total <= split.nbytes + copied.nbytes + 10 * BLOCK_BYTES
