"""Checks that model, batches, pipeline schedule and sharding fit the layout of `[parallel]`.

Each mistake names the degrees, batches or settings that would fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from math import gcd

from bloomery.config.findings import Finding, divisors, nearest_numbers
from bloomery.config.model import ModelSection
from bloomery.config.parallel import SCHEDULES, SPLIT_BACKWARD, WITHIN_ONE_BACKWARD, ParallelSection
from bloomery.config.recipe import Recipe, TrainSection

MOST_INTERVALS = 10_000
"""Intervals of a ramp-up: plans and checks walk through all of them. Published runs have some hundred."""


def layout_mistakes(recipe: Recipe) -> Iterator[Finding]:
    """Yield what of the layout the model, the sequence length or the optimizer does not allow."""
    yield from _tensor_mistakes(recipe)
    yield from _sequence_mistakes(recipe)


def _tensor_mistakes(recipe: Recipe) -> Iterator[Finding]:
    tensor, per_node = recipe.parallel.tensor, recipe.parallel.ranks_per_node
    sizes = split_sizes(recipe.model)
    if any(size % tensor for size in sizes.values()):
        wrong = [f"{size} {what}" for what, size in sizes.items() if size % tensor]
        yield Finding(
            key="parallel.tensor",
            problem=f"does not divide {' and '.join(wrong)}",
            remedy=f"Degrees that divide all that is split: {_fitting(recipe, near=tensor)}.",
        )
    if per_node != "auto" and (tensor > per_node or per_node % tensor):
        yield Finding(
            key="parallel.tensor",
            problem=f"does not divide the {per_node} ranks of a node, and must stay inside one",
            remedy=f"Degrees that do: {_fitting(recipe, near=tensor)}.",
        )
    if tensor > 1 and recipe.optim.name == "muon":
        yield Finding(
            key="optim.name",
            problem=f"Muon needs whole matrices, and parallel.tensor = {tensor} splits them",
            remedy="Set parallel.tensor = 1, or optim.name = 'adamw'.",
        )


def _sequence_mistakes(recipe: Recipe) -> Iterator[Finding]:
    tensor, length = recipe.parallel.tensor, recipe.data.sequence_length
    if not recipe.parallel.sequence:
        return
    if tensor == 1:
        yield Finding(
            key="parallel.sequence",
            problem="splits the sequence over the tensor-parallel ranks, and there is one",
            remedy="Raise parallel.tensor, or leave it out.",
        )
    if length % tensor:
        yield Finding(
            key="data.sequence_length",
            problem=f"is not divisible by parallel.tensor = {tensor}, over which parallel.sequence splits it",
            remedy=f"The nearest that are: {length // tensor * tensor} and {-(-length // tensor) * tensor}.",
        )


def split_sizes(model: ModelSection) -> dict[str, int]:
    """Return the sizes that tensor parallelism divides, by name."""
    return {
        "query heads": model.heads,
        "key/value heads": model.heads if model.kv_heads == "auto" else model.kv_heads,
        "channels of the MLP (model.ffn)": 4 * model.hidden if model.ffn == "auto" else model.ffn,
    }


def _fitting(recipe: Recipe, *, near: int) -> str:
    per_node = recipe.parallel.ranks_per_node
    common = gcd(*split_sizes(recipe.model).values(), 0 if per_node == "auto" else per_node)
    return nearest_numbers(divisors(common), near=near)


def ramp_up_mistakes(train: TrainSection) -> Iterator[Finding]:
    """Yield what is wrong with `train.ramp_up`."""
    if not train.ramp_up:
        return
    if train.steps:
        yield Finding(
            key="train.ramp_up",
            problem="the batch grows by samples, and this run is counted in steps",
            remedy="Count the run in samples or tokens: train.samples=… train.steps=0.",
        )
    if len(train.ramp_up) != 3 or min(train.ramp_up) < 1:
        yield Finding(
            key="train.ramp_up",
            problem="must be three numbers above 0",
            remedy="Write [start, increment, samples], for instance [16, 16, 9_765_625].",
        )
        return
    start, increment, _ = train.ramp_up
    if start > train.global_batch:
        yield Finding(
            key="train.ramp_up",
            problem=f"starts with {start} samples, above train.global_batch = {train.global_batch}",
            remedy="Start below the batch it grows to.",
        )
    elif (train.global_batch - start) % increment:
        below = start + (train.global_batch - start) // increment * increment
        yield Finding(
            key="train.ramp_up",
            problem=f"steps of {increment} from {start} miss train.global_batch = {train.global_batch}",
            remedy=f"They reach {below} and {below + increment}: choose one of them, or another increment.",
        )
    elif (train.global_batch - start) // increment > MOST_INTERVALS:
        growth = train.global_batch - start
        parts = next(parts for parts in range(MOST_INTERVALS, 0, -1) if growth % parts == 0)
        yield Finding(
            key="train.ramp_up",
            problem=f"grows from {start} to train.global_batch = {train.global_batch} in "
            f"{growth // increment:,} intervals, and at most {MOST_INTERVALS:,} are planned",
            remedy=f"Raise the increment, for instance to {growth // parts}.",
        )


def batch_mistakes(
    train: TrainSection, parallel: ParallelSection, *, data_degree: int, consumed: int = 0
) -> Iterator[Finding]:
    """Yield one finding where `micro_batch × data_degree` does not divide every batch of the run.

    consumed: the samples that the run has used already. Batches that lie before them need not fit, so that a
        run may go on with more ranks than its ramp-up allowed.
    """
    if any(True for _ in ramp_up_mistakes(train)) or any(micro < 1 for _, micro in train.micro_batch_changes):
        return
    pairs = batch_pairs(train, consumed=consumed)
    wrong = [(batch, micro) for batch, micro in pairs if batch % (micro * data_degree)]
    if not wrong:
        return
    batch, micro = wrong[0]
    problem = f"a global batch of {batch} is not divisible by micro-batch {micro} × data degree {data_degree}"
    if len(wrong) > 1:
        verb = "is" if len(wrong) == 2 else "are"
        problem += f" (nor {verb} {len(wrong) - 1} more of the run's batches)"
    ramping = all(batch != train.global_batch for batch, _ in wrong)
    later = ""
    if ramping:
        later = (
            f" Or resume the run like this once it has used the {train.ramp_up[2]:,} samples of its ramp-up."
        )
    yield Finding(
        key="train.ramp_up" if ramping else "train.global_batch",
        problem=problem,
        remedy=_remedy(pairs, parallel, batch=batch, ranks=micro * data_degree) + later,
    )


def batch_pairs(train: TrainSection, *, consumed: int = 0) -> list[tuple[int, int]]:
    """Return every (global batch, micro-batch) that the run uses at some position, in order.

    consumed: samples; positions before them are left out.
    """
    batches = _from_samples(train.ramp_up, train.global_batch)
    micros = ((0, train.micro_batch), *train.micro_batch_changes)
    changes = [(at, batch, None) for at, batch in batches] + [(at, None, micro) for at, micro in micros]
    pairs: dict[tuple[int, int], None] = {}  # its keys are in the order in which the run comes to them
    batch, micro = train.global_batch, train.micro_batch
    for at, same in groupby(sorted(changes, key=lambda change: change[0]), key=lambda change: change[0]):
        if at > consumed:
            pairs[batch, micro] = None
        for _, new_batch, new_micro in same:
            batch, micro = new_batch or batch, new_micro or micro
    pairs[batch, micro] = None
    return list(pairs)


@lru_cache(maxsize=8)  # a search of layouts asks for the same ramp-up hundreds of times
def _from_samples(ramp_up: tuple[int, ...], global_batch: int) -> tuple[tuple[int, int], ...]:
    """Return (first sample, global batch) for each batch of the ramp-up."""
    if not ramp_up:
        return ((0, global_batch),)
    start, increment, samples = ramp_up
    intervals = (global_batch - start) // increment
    if not intervals:
        return ((0, global_batch),)
    return tuple(
        (-(-index * samples // intervals), start + index * increment) for index in range(intervals + 1)
    )


def _remedy(pairs: list[tuple[int, int]], parallel: ParallelSection, *, batch: int, ranks: int) -> str:
    divisible = gcd(*(batch // micro for batch, micro in pairs if batch % micro == 0))
    if not divisible or any(batch % micro for batch, micro in pairs):
        below = batch // ranks * ranks
        nearest = f"{below} or {below + ranks}" if below else f"{ranks}"
        return (
            f"The nearest batch that is divisible: {nearest}; or choose a micro-batch that divides {batch}."
        )
    degrees = divisors(divisible)
    remedy = f"Data degrees that divide every batch of the run: {', '.join(map(str, degrees))}."
    if parallel.ranks_per_node != "auto":
        replica = parallel.tensor * parallel.pipeline
        whole = [degree for degree in degrees if degree * replica % parallel.ranks_per_node == 0]
        nodes = ", ".join(str(degree * replica // parallel.ranks_per_node) for degree in whole)
        remedy += f" That is {nodes or 'no whole number of'} nodes of {parallel.ranks_per_node}."
    below = batch // ranks * ranks
    nearest = f"{below} or {below + ranks}" if below else f"{ranks}"
    return f"{remedy} Or change the batch {batch} to {nearest}."


def pipeline_mistakes(
    parallel: ParallelSection,
    model: ModelSection,
    train: TrainSection,
    *,
    data_degree: int,
    consumed: int = 0,
) -> Iterator[Finding]:
    """Yield what is wrong with the stages and the pipeline schedule; a pipeline of 1 has no schedule.

    consumed: see `batch_mistakes`.
    """
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
            problem=f"frees a block's weights after its backward, which '{parallel.schedule}' splits",
            remedy="Set parallel.zero = 2, or parallel.schedule = 'interleaved' or '1f1b'.",
        )
    if parallel.working == "by-block" and parallel.schedule in SPLIT_BACKWARD:
        yield Finding(
            key="parallel.working",
            problem=f"frees a block's weights after its backward, which '{parallel.schedule}' splits",
            remedy="Set parallel.working = 'kept', or parallel.schedule = 'interleaved' or '1f1b'.",
        )
    recomputed = (train.recompute, *parallel.recompute_per_stage)
    within_one = next((mode for mode in recomputed if mode in WITHIN_ONE_BACKWARD), None)
    if within_one and parallel.schedule in SPLIT_BACKWARD:
        yield Finding(
            key="parallel.recompute_per_stage" if parallel.recompute_per_stage else "train.recompute",
            problem=f"'{within_one}' belongs to one backward, and '{parallel.schedule}' splits it in two",
            remedy="Set it to 'selective' or 'full', or parallel.schedule = 'interleaved' or '1f1b'.",
        )
    if not chunks:
        yield from _round_mistakes(parallel, train, data_degree=data_degree, consumed=consumed)


def _recompute_mistakes(parallel: ParallelSection) -> Iterator[Finding]:
    count = len(parallel.recompute_per_stage)
    stages = parallel.pipeline * parallel.chunks if parallel.pipeline > 1 else 1
    if count not in (0, stages):
        yield Finding(
            key="parallel.recompute_per_stage",
            problem=f"has {count} entries, and there {'are' if stages > 1 else 'is'} {stages}"
            f" stage{'s' if stages > 1 else ''}",
            remedy=f"Give {stages}, for instance 'full' for the first, which store most, or leave it out.",
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


def _round_mistakes(
    parallel: ParallelSection, train: TrainSection, *, data_degree: int, consumed: int
) -> Iterator[Finding]:
    """Yield a finding where micro-batches do not divide into equal rounds, as interleaved schedules need."""
    if parallel.schedule not in ("interleaved", "zero-bubble") or any(ramp_up_mistakes(train)):
        return
    if any(batch_mistakes(train, parallel, data_degree=data_degree, consumed=consumed)):
        return
    for batch, micro in batch_pairs(train, consumed=consumed):
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
    """Whether the micro-batches divide into equal rounds of at least `pipeline` each."""
    return micro_batches % max(1, micro_batches // pipeline) == 0


def sharding_mistakes(recipe: Recipe, *, data_degree: int) -> Iterator[Finding]:
    """Yield the settings that do not go together with sharding by ZeRO.

    data_degree: data-parallel ranks; 1 where that is not known yet.
    """
    parallel = recipe.parallel
    if parallel.working == "by-block" and parallel.zero:
        yield Finding(
            key="parallel.working",
            problem="rounds whole blocks from the masters, of which parallel.zero = "
            f"{parallel.zero} leaves a rank a part",
            remedy="Set parallel.working = 'kept'; with parallel.zero = 3 no rank keeps whole weights.",
        )
    if not parallel.zero:
        if parallel.shard_degree != "auto":
            yield Finding(
                key="parallel.shard_degree",
                problem="has no effect, because parallel.zero = 0 shards nothing",
                remedy="Set parallel.zero = 1 (optimizer), 2 (and gradients) or 3 (and weights).",
            )
        return
    if recipe.optim.name == "muon":
        yield Finding(
            key="parallel.zero",
            problem="divides matrices among ranks, and Muon needs whole matrices",
            remedy="Set parallel.zero = 0, or optim.name = 'adamw'.",
        )
    is_degree_known = parallel.data != "auto" or data_degree > 1
    if is_degree_known and parallel.shard_degree != "auto" and data_degree % parallel.shard_degree:
        fitting = [degree for degree in range(1, data_degree + 1) if data_degree % degree == 0]
        yield Finding(
            key="parallel.shard_degree",
            problem=f"does not divide {data_degree} data-parallel ranks",
            remedy=f"Degrees that do: {', '.join(map(str, fitting))}.",
        )
