"""What `parallel.zero` cannot go together with, and what would do instead."""

from __future__ import annotations

from collections.abc import Iterator

from bloomery.config.finding import Finding
from bloomery.config.recipe import Recipe


def sharding_mistakes(recipe: Recipe, *, data_degree: int) -> Iterator[Finding]:
    """Settings that sharded state, gradients or weights do not allow.

    data_degree: data-parallel ranks, 1 where that is not known yet.
    """
    parallel = recipe.parallel
    if parallel.offload == "nvme":
        yield Finding(
            key="parallel.offload",
            problem="a disk is no place for optimizer states: each step would read and write all of them",
            remedy="Use 'cpu', or shard them over more ranks (parallel.zero = 1, a larger parallel.data).",
        )
    if not parallel.zero:
        if parallel.shard_degree != "auto":
            yield Finding(
                key="parallel.shard_degree",
                problem="says how many ranks share one copy, and parallel.zero = 0 shards nothing",
                remedy="Set parallel.zero = 1 (optimizer), 2 (and gradients) or 3 (and weights).",
            )
        return
    if recipe.optim.name == "muon":
        yield Finding(
            key="parallel.zero",
            problem="deals the elements of matrices out to ranks, and Muon needs whole matrices",
            remedy="Set parallel.zero = 0, or optim.name = 'adamw'.",
        )
    if parallel.zero == 3 and recipe.train.compile == "on":
        yield Finding(
            key="train.compile",
            problem="compiles the model as a whole, and parallel.zero = 3 gathers its weights block by block",
            remedy="Set train.compile = 'auto' to train eagerly, or parallel.zero = 2.",
        )
    known = parallel.data != "auto" or data_degree > 1
    if known and parallel.shard_degree != "auto" and data_degree % parallel.shard_degree:
        fitting = [degree for degree in range(1, data_degree + 1) if data_degree % degree == 0]
        yield Finding(
            key="parallel.shard_degree",
            problem=f"does not divide {data_degree} data-parallel ranks",
            remedy=f"Degrees that do: {', '.join(map(str, fitting))}.",
        )
