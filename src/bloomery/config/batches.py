"""Does every batch of the run divide among the ranks? With the degrees, batches and nodes that would."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from bloomery.config.finding import Finding
from bloomery.config.parallel import ParallelSection
from bloomery.config.train import TrainSection


def ramp_up_mistakes(train: TrainSection) -> Iterator[Finding]:
    """What is wrong with the shape of `train.ramp_up`, and with a ramp-up in a run counted in steps."""
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


def batch_mistakes(train: TrainSection, parallel: ParallelSection, *, data_degree: int) -> Iterator[Finding]:
    """Batches of the run that `micro_batch × data_degree` does not divide, as one finding."""
    if any(True for _ in ramp_up_mistakes(train)) or any(micro < 1 for _, micro in train.micro_batch_changes):
        return
    pairs = batch_pairs(train)
    wrong = [(batch, micro) for batch, micro in pairs if batch % (micro * data_degree)]
    if not wrong:
        return
    batch, micro = wrong[0]
    problem = f"a global batch of {batch} is not divisible by micro-batch {micro} × data degree {data_degree}"
    if len(wrong) > 1:
        problem += f" (nor are {len(wrong) - 1} more of the run's batches)"
    ramping = all(batch != train.global_batch for batch, _ in wrong)
    yield Finding(
        key="train.ramp_up" if ramping else "train.global_batch",
        problem=problem,
        remedy=_remedy(pairs, parallel, batch=batch, ranks=micro * data_degree),
    )


def batch_pairs(train: TrainSection) -> list[tuple[int, int]]:
    """Every (global batch, micro-batch) that the run may use at one position, in order."""
    batches = _from_samples(train)
    micros = [(0, train.micro_batch), *train.micro_batch_changes]
    pairs: list[tuple[int, int]] = []
    for at in sorted({at for at, _ in batches + micros}):
        batch = next(value for begin, value in reversed(batches) if begin <= at)
        micro = next(value for begin, value in reversed(micros) if begin <= at)
        if (batch, micro) not in pairs:
            pairs.append((batch, micro))
    return pairs


def _from_samples(train: TrainSection) -> list[tuple[int, int]]:
    """(consumed samples from which it holds, global batch) for each batch of the ramp-up."""
    if not train.ramp_up:
        return [(0, train.global_batch)]
    start, increment, samples = train.ramp_up
    intervals = (train.global_batch - start) // increment
    if not intervals:
        return [(0, train.global_batch)]
    return [(-(-index * samples // intervals), start + index * increment) for index in range(intervals + 1)]


def _remedy(pairs: list[tuple[int, int]], parallel: ParallelSection, *, batch: int, ranks: int) -> str:
    divisible = gcd(*(batch // micro for batch, micro in pairs if batch % micro == 0))
    if not divisible or any(batch % micro for batch, micro in pairs):
        below = batch // ranks * ranks
        nearest = f"{below} or {below + ranks}" if below else f"{ranks}"
        return (
            f"The nearest batch that is divisible: {nearest}; or choose a micro-batch that divides {batch}."
        )
    degrees = [degree for degree in range(1, divisible + 1) if divisible % degree == 0]
    remedy = f"Data degrees that divide every batch of the run: {', '.join(map(str, degrees))}."
    if parallel.ranks_per_node != "auto":
        replica = parallel.tensor * parallel.pipeline
        whole = [degree for degree in degrees if degree * replica % parallel.ranks_per_node == 0]
        nodes = ", ".join(str(degree * replica // parallel.ranks_per_node) for degree in whole)
        remedy += f" That is {nodes or 'no whole number of'} nodes of {parallel.ranks_per_node}."
    below = batch // ranks * ranks
    nearest = f"{below} or {below + ranks}" if below else f"{ranks}"
    return f"{remedy} Or change the batch {batch} to {nearest}."
