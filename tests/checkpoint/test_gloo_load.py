"""Three processes load together through the mesh's own exchange (gloo)."""

import time
from pathlib import Path

import torch
import torch.multiprocessing as processes
from tests.checkpoint.gloo_load import ROWS, WIDTH, WORLD, load
from tests.forked import forked

from bloomery.checkpoint.format.manifest import BLOCK_BYTES
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save.direct import save_checkpoint

DEADLINE_S = 240


def test_processes_load_what_they_share_once_and_end_up_bit_for_bit_with_all_of_it(tmp_path: Path):
    split, copied = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH).bfloat16()
    entries = [whole("model.split", split), whole("model.copied", copied)]
    directory = save_checkpoint(tmp_path / "checkpoints", entries, step=1, incarnation=1)
    context = processes.start_processes(
        load,
        args=(str(directory), str(tmp_path)),
        nprocs=WORLD,
        join=False,
        start_method=forked().get_start_method(),
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
