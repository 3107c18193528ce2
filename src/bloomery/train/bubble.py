"""How long pipeline ranks wait for each other, told before the run where it is much."""

from __future__ import annotations

from bloomery.config.batches import batch_pairs
from bloomery.config.parallel import ParallelSection
from bloomery.config.train import TrainSection
from bloomery.parallel.timetable import idle_share, timetable

WORTH_TELLING = 0.2
"""The part of a step from which on waiting is told."""


def bubble_warning(train: TrainSection, parallel: ParallelSection, *, data_degree: int) -> str:
    """What to tell of the batch whose micro-batches fill the pipeline least; empty where that is little.

    The batches were checked: each divides among the ranks.
    """
    if parallel.pipeline == 1:
        return ""
    count, batch = min((batch // (micro * data_degree), batch) for batch, micro in batch_pairs(train))
    table = timetable(
        parallel.schedule, pipeline=parallel.pipeline, chunks=parallel.chunks, micro_batches=count
    )
    share = idle_share(table)
    if share < WORTH_TELLING:
        return ""
    return (
        f"warning: a batch of {batch} has {count} micro-batch{'es' if count > 1 else ''} on each of "
        f"{data_degree} data-parallel ranks, and {parallel.pipeline} pipeline ranks wait {share:.0%} of a "
        f"step ({parallel.schedule}); a larger batch, a smaller micro-batch or fewer stages wait less"
    )
