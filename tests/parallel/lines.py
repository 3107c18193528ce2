"""Ranks in processes of their own, meeting over a file; and tiny models that are trained on them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.forked import forked

DEADLINE_S = 240.0


def spawn(world: int, task: Callable[..., Any], directory: Path, *arguments: Any) -> list[Any]:
    """`task(rank, *arguments)` on each rank of a gloo group; what they returned, by rank."""
    context = forked()
    meeting = directory / "meeting"
    ends = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=_rank, args=(end, task, rank, world, str(meeting), arguments), daemon=True)
        for rank, (_, end) in enumerate(ends)
    ]
    for process, (_, end) in zip(processes, ends, strict=True):
        process.start()
        end.close()
    try:
        return [_received(receiver, rank) for rank, (receiver, _) in enumerate(ends)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _received(receiver: Any, rank: int) -> Any:
    assert receiver.poll(DEADLINE_S), f"rank {rank} said nothing for {DEADLINE_S} s"
    try:
        outcome, value = receiver.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} died") from None
    assert outcome == "done", f"rank {rank} failed:\n{value}"
    return value


def _rank(end: Any, task: Callable[..., Any], rank: int, world: int, meeting: str, arguments: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=DEADLINE_S),
        )
        end.send(("done", task(rank, *arguments)))
    except BaseException:  # noqa: BLE001 - the edge of a process: the parent raises it
        end.send(("failed", traceback.format_exc()))
