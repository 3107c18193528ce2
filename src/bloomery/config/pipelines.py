"""Whether the pipeline's stages, its schedule and the run's micro-batches fit together."""

from __future__ import annotations

from collections.abc import Iterator

from bloomery.config.batches import batch_mistakes, batch_pairs, ramp_up_mistakes
from bloomery.config.finding import Finding
from bloomery.config.model import ModelSection
from bloomery.config.parallel import SCHEDULES, SPLIT_BACKWARD, ParallelSection
from bloomery.config.train import TrainSection


def pipeline_mistakes(
    parallel: ParallelSection, model: ModelSection, train: TrainSection, *, data_degree: int
) -> Iterator[Finding]:
    """What is wrong with the stages and their schedule; nothing of the latter where the pipeline is 1."""
    yield from _recompute_mistakes(parallel)
    if parallel.pipeline == 1:
        return
    chunks = list(_chunk_mistakes(parallel))
    yield from chunks or _stage_mistakes(parallel, model)
    if train.compile == "on" and parallel.schedule in SPLIT_BACKWARD:
        yield Finding(
            key="train.compile",
            problem=f"a compiled stage has one backward, and '{parallel.schedule}' splits it in two",
            remedy="Set train.compile = 'off', or parallel.schedule = 'interleaved' or '1f1b'.",
        )
    if parallel.zero == 3 and parallel.schedule in SPLIT_BACKWARD:
        yield Finding(
            key="parallel.zero",
            problem=f"lets go of a block's weights after its backward, and '{parallel.schedule}' splits it",
            remedy="Set parallel.zero = 2, or parallel.schedule = 'interleaved' or '1f1b'.",
        )
    if not chunks:
        yield from _round_mistakes(parallel, train, data_degree=data_degree)


def _recompute_mistakes(parallel: ParallelSection) -> Iterator[Finding]:
    said, stages = len(parallel.recompute_per_stage), parallel.pipeline * parallel.chunks
    if said not in (0, stages):
        yield Finding(
            key="parallel.recompute_per_stage",
            problem=f"says it for {said} stages, and there {'are' if stages > 1 else 'is'} {stages}",
            remedy=f"Give {stages}, for instance 'full' for the first, which keep the most, or leave it out.",
        )


def _chunk_mistakes(parallel: ParallelSection) -> Iterator[Finding]:
    wanted = {"1f1b": (1, 1), "gpipe": (1, 1), "interleaved": (2, None), "zbv": (2, 2)}
    least, most = wanted.get(parallel.schedule, (1, None))
    if parallel.chunks >= least and (most is None or parallel.chunks <= most):
        return
    fitting = "parallel.schedule = 'interleaved'" if parallel.chunks > 1 else "parallel.schedule = '1f1b'"
    yield Finding(
        key="parallel.chunks",
        problem=f"the schedule '{parallel.schedule}' has {least}{'' if most else ' or more'} on each rank",
        remedy=f"Set parallel.chunks = {least}, or {fitting}.",
    )


def _stage_mistakes(parallel: ParallelSection, model: ModelSection) -> Iterator[Finding]:
    stages = parallel.pipeline * parallel.chunks
    counts = parallel.blocks_per_stage
    if stages > model.layers:
        key = "parallel.pipeline" if parallel.pipeline > model.layers else "parallel.chunks"
        yield Finding(
            key=key,
            problem=f"there are {stages} stages, more than model.layers = {model.layers}",
            remedy="A stage needs at least one block.",
        )
    elif counts and (len(counts) != stages or sum(counts) != model.layers or min(counts) < 1):
        yield Finding(
            key="parallel.blocks_per_stage",
            problem=f"{stages} stages share {model.layers} blocks, and this gives {len(counts)} stages"
            f" {sum(counts)} blocks, {min(counts)} to the smallest",
            remedy=f"Give {stages} numbers from 1 on that add up to {model.layers}, or leave it out.",
        )


def _round_mistakes(parallel: ParallelSection, train: TrainSection, *, data_degree: int) -> Iterator[Finding]:
    """Interleaved schedules go in rounds of at least `pipeline` micro-batches, all alike."""
    if parallel.schedule not in ("interleaved", "zero-bubble") or any(ramp_up_mistakes(train)):
        return
    if any(batch_mistakes(train, parallel, data_degree=data_degree)):
        return
    for batch, micro in batch_pairs(train):
        count = batch // (micro * data_degree)
        if rounds_fit(count, pipeline=parallel.pipeline):
            continue
        near = [n for n in range(max(1, count - parallel.pipeline), count + parallel.pipeline + 1)]
        fitting = [n for n in near if rounds_fit(n, pipeline=parallel.pipeline)]
        closest = sorted(sorted(fitting, key=lambda n: abs(n - count))[:2])
        batches = " or ".join(str(n * micro * data_degree) for n in closest)
        others = " or ".join(f"'{name}'" for name in SCHEDULES if name in ("1f1b", "zbv"))
        yield Finding(
            key="parallel.schedule",
            problem=f"a batch of {batch} has {count} micro-batches a rank, which do not divide into equal"
            f" rounds over {parallel.pipeline} pipeline ranks",
            remedy=f"Near batches that do: {batches}. Or use {others}.",
        )
        return


def rounds_fit(micro_batches: int, *, pipeline: int) -> bool:
    """Whether micro-batches divide into as many equal rounds as there are whole rounds of `pipeline`."""
    return micro_batches % max(1, micro_batches // pipeline) == 0
