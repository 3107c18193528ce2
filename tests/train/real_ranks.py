"""Trains with several real ranks in processes of their own, each with the faults that a test plants there."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forked import forked
from tests.tiny_run import TINY

DEADLINE_S = float(os.environ.get("BLOOMERY_RANKS_DEADLINE_S", "240"))
Plant = Callable[[int], None]


def train_on_ranks(
    world: int,
    path: Path,
    *overrides: str,
    plant: Plant | None = None,
    recipe: str = TINY,
    deadline_s: float = DEADLINE_S,
) -> list[str]:
    """Train a run on so many ranks; what each came to: its outcome's reason, or the message of its error.

    plant: called on each rank with its number before the training; a function of a module.
    """
    context = forked()
    meeting = path.with_name(f"meeting-{len(list(path.parent.iterdir()))}")
    ends = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(
            target=_rank,
            args=(end, rank, world, str(meeting), recipe, overrides, str(path), plant),
            daemon=True,
        )
        for rank, (_, end) in enumerate(ends)
    ]
    for process, (_, end) in zip(processes, ends, strict=True):
        process.start()
        end.close()
    try:
        return [_received(receiver, rank, deadline_s) for rank, (receiver, _) in enumerate(ends)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _received(receiver: Any, rank: int, deadline_s: float) -> str:
    assert receiver.poll(deadline_s), f"rank {rank} said nothing for {deadline_s} s"
    try:
        told: str = receiver.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} died") from None
    return told


def _rank(
    end: Any,
    rank: int,
    world: int,
    meeting: str,
    recipe: str,
    overrides: tuple[str, ...],
    path: str,
    plant: Plant | None,
) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(number) for name, number in ranks.items()}
    os.environ |= {"BLOOMERY_RENDEZVOUS_FILE": meeting, "OMP_NUM_THREADS": "1"}
    import torch

    from bloomery.config.load import parse_recipe
    from bloomery.errors import BloomeryError
    from bloomery.events.run_directory import RunDirectory
    from bloomery.train.loop import train
    from bloomery.train.settings import StartOptions

    torch.set_num_threads(1)
    try:
        if plant is not None:
            plant(rank)
        loaded = parse_recipe(recipe, overrides, label="tiny")
        end.send(train(loaded, RunDirectory(Path(path)), StartOptions(say=lambda line: None)).reason)
    except BloomeryError as error:
        end.send(error.message)
    except BaseException:  # noqa: BLE001 - the edge of a process: the parent shows it
        end.send(traceback.format_exc())
