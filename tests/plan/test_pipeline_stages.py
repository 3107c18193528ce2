"""Which blocks go to which stage: nothing is lost, and nothing could be dealt better."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from bloomery.config.load import load_recipe
from bloomery.config.model import ModelSection
from bloomery.config.parallel import SCHEDULES, ParallelSection
from bloomery.plan.pipeline_stages import PipelineStage, balanced_counts, stages_of

TINY = {"vocabulary": 96, "sequence_length": 32}


def stages(layers: int, **parallel: object) -> tuple[PipelineStage, ...]:
    model = ModelSection(layers=layers, hidden=64, heads=4)
    return stages_of(model, ParallelSection(**parallel), **TINY)


def test_bloom_counts_its_embeddings_as_blocks() -> None:
    recipe = load_recipe("tr11-176b").recipe
    found = stages_of(recipe.model, recipe.parallel, vocabulary=250_880, sequence_length=2048)
    assert [len(stage.blocks) for stage in found] == [5, *[6] * 10, 5]
    assert [str(stage) for stage in found][:2] == ["[embed|0-4]", "5-10"]
    assert str(found[-1]) == "[65-69|head]"


@given(
    pipeline=st.integers(2, 8),
    chunks=st.integers(1, 3),
    more=st.integers(0, 40),
    schedule=st.sampled_from(SCHEDULES),
    partition=st.sampled_from(("cost", "embeddings")),
)
def test_every_block_is_in_one_stage_and_every_rank_has_as_many_stages(
    pipeline: int, chunks: int, more: int, schedule: str, partition: str
) -> None:
    layers = pipeline * chunks + more
    found = stages(layers, pipeline=pipeline, chunks=chunks, schedule=schedule, partition=partition)
    assert [block for stage in found for block in stage.blocks] == list(range(layers))
    assert all(len(stage.blocks) >= 1 for stage in found)
    assert [stage.index for stage in found if stage.embeds] == [0]
    assert [stage.index for stage in found if stage.finishes] == [len(found) - 1]
    assert sorted(stage.rank for stage in found) == sorted([*range(pipeline)] * chunks)


def test_of_one_pipeline_rank_there_is_one_stage_whatever_a_recipe_says_for_more() -> None:
    for parallel in ({"chunks": 4}, {"blocks_per_stage": (1, 1)}, {"chunks": 2, "schedule": "interleaved"}):
        (stage,) = stages(2, pipeline=1, **parallel)
        assert (stage.blocks, stage.embeds, stage.finishes) == (range(2), True, True), parallel


def test_thirty_layers_on_four_stages_are_thirty_and_may_be_dealt_by_hand() -> None:
    assert sum(len(stage.blocks) for stage in stages(30, pipeline=4)) == 30
    by_hand = stages(30, pipeline=4, blocks_per_stage=(6, 9, 9, 6))
    assert [len(stage.blocks) for stage in by_hand] == [6, 9, 9, 6]


def test_under_zbv_the_first_rank_has_both_ends_and_otherwise_stages_go_round() -> None:
    there_and_back = stages(8, pipeline=3, chunks=2, schedule="zbv")
    assert [stage.rank for stage in there_and_back] == [0, 1, 2, 2, 1, 0]
    round_and_round = stages(8, pipeline=3, chunks=2, schedule="interleaved")
    assert [stage.rank for stage in round_and_round] == [0, 1, 2, 0, 1, 2]


@given(
    layers=st.integers(1, 9),
    number=st.integers(1, 9),
    first=st.fractions(0, 3, max_denominator=4),
    last=st.fractions(0, 3, max_denominator=4),
)
def test_no_other_cut_has_a_cheaper_bottleneck_nor_with_it_a_smaller_spread(
    layers: int, number: int, first: Fraction, last: Fraction
) -> None:
    number = min(number, layers)
    costs = [Fraction(1)] * layers
    costs[0] += first
    costs[-1] += last

    def judged(counts: tuple[int, ...]) -> tuple[Fraction, Fraction]:
        bounds = [sum(counts[:index]) for index in range(len(counts) + 1)]
        sums = [sum(costs[start:stop], Fraction(0)) for start, stop in pairwise(bounds)]
        return max(sums), sum((one * one for one in sums), Fraction(0))

    every = [
        tuple(stop - start for start, stop in pairwise((0, *cuts, layers)))
        for cuts in combinations(range(1, layers), number - 1)
    ]
    best = min(map(judged, every))
    equal = [counts for counts in every if judged(counts) == best]
    # 1F1B's first stages keep the most activations, so of equal cuts they get the fewest blocks.
    assert balanced_counts(layers, number, first=first, last=last) == max(
        equal, key=lambda counts: counts[::-1]
    )
