"""What each pipeline stage and rank holds, in elements, for a small model by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from bloomery.config.model import ModelSection
from bloomery.config.parallel import ParallelSection
from bloomery.plan.pipeline_stages import balanced_counts, contents_of, padded_rows, stages_of

MODEL = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96}
SPLIT, NORMS = 30_720, 128  # of a block: its matrices, and two norms


def contents(parallel: dict[str, object], *, data: int = 1, **model: object):
    return contents_of(
        ModelSection(**MODEL | model),
        ParallelSection(**parallel),
        vocabulary=101,
        sequence_length=16,
        data=data,
    )


def test_the_ends_hold_tables_and_norms_and_each_rank_its_part_of_the_rows() -> None:
    first, last = contents({"pipeline": 2, "tensor": 2, "blocks_per_stage": (3, 1)})
    assert first.parameters == 3 * (SPLIT + NORMS) + 101 * 64
    assert last.parameters == SPLIT + NORMS + 64 + 101 * 64
    rows = 56  # 51 of 101 rows, padded to a multiple of 8
    assert first.weights == 3 * (SPLIT // 2 + NORMS) + rows * 64
    assert last.weights == SPLIT // 2 + NORMS + 64 + rows * 64
    assert (first.masters, last.masters) == (first.weights, last.weights)


def test_biases_of_split_columns_and_positions_are_whole_on_each_rank() -> None:
    (whole,) = contents(
        {"tensor": 2}, norm="layernorm", position="learned", bias=True, activation="gelu", embedding_norm=True
    )
    matrices = 2 * 64 * 64 + 2 * 64 * 32 + 2 * 64 * 96
    biases_split, biases_whole, norms = 64 + 2 * 32 + 96, 64 + 64, 4 * 64
    block = (matrices + biases_split) // 2 + biases_whole + norms
    few = 16 * 64 + 2 * 64 + 2 * 64
    assert whole.weights == 4 * block + few + 2 * 56 * 64
    assert whole.parameters == 4 * (matrices + biases_split + biases_whole + norms) + few + 2 * 101 * 64


@pytest.mark.parametrize(
    ("parallel", "tables"),
    [
        ({"pipeline": 2}, [1, 1]),  # a copy on the last stage
        ({}, [1]),
        ({"pipeline": 2, "chunks": 2, "schedule": "zbv"}, [1, 0, 0, 0]),  # one rank has both ends
    ],
)
def test_a_tied_embedding_is_stored_once_for_each_rank_with_an_end(
    parallel: dict[str, object], tables: list[int]
) -> None:
    stages = contents(parallel, tied=True)
    norm = [0] * (len(stages) - 1) + [64]
    blocks = [len(stage.stage.blocks) for stage in stages]
    assert [stage.weights for stage in stages] == [
        count * (SPLIT + NORMS) + table * 101 * 64 + few
        for count, table, few in zip(blocks, tables, norm, strict=True)
    ]
    assert sum(stage.parameters for stage in stages) == 4 * (SPLIT + NORMS) + 101 * 64 + 64


@pytest.mark.parametrize(
    ("zero", "shard_degree", "shards"), [(0, "auto", 1), (1, "auto", 6), (1, 4, 4), (0, 4, 1)]
)
def test_masters_are_divided_among_those_that_share_a_copy_and_rounded_up(
    zero: int, shard_degree: int | str, shards: int
) -> None:
    (whole,) = contents({"zero": zero, "shard_degree": shard_degree}, data=6, tied=True)
    assert whole.weights == 4 * (SPLIT + NORMS) + 101 * 64 + 64 == 129_920
    assert whole.masters == {1: 129_920, 4: 32_480, 6: 21_654}[shards]


@pytest.mark.parametrize(
    ("vocabulary", "degree", "rows"), [(101, 1, 101), (101, 2, 56), (96, 2, 48), (97, 2, 56)]
)
def test_rows_of_a_split_vocabulary_are_padded_to_eight(vocabulary: int, degree: int, rows: int) -> None:
    assert padded_rows(vocabulary, degree=degree) == rows


@pytest.mark.parametrize(
    ("first", "last", "counts"),
    [
        (0, 0, (3, 3, 4)),
        (2, 0, (2, 4, 4)),
        (0, Fraction(5, 2), (4, 4, 2)),
        (3, 3, (2, 5, 3)),  # of equal cuts, that whose last stages are the largest
        (0, Fraction(1, 2), (3, 4, 3)),
    ],
)
def test_the_costliest_stage_is_as_cheap_as_it_can_be(
    first: int, last: int | Fraction, counts: tuple[int, ...]
) -> None:
    assert balanced_counts(10, 3, first=first, last=last) == counts


def test_operations_of_the_head_count_as_blocks_and_a_lookup_costs_nothing() -> None:
    model = ModelSection(**MODEL | {"layers": 12})
    # A head of 2·v·64 operations beside blocks of 2·30,720 + 4·16·64: three blocks where v is 1,536.
    by_cost = ParallelSection(pipeline=3, partition="cost")
    cut = [len(one.blocks) for one in stages_of(model, by_cost, vocabulary=1_536, sequence_length=16)]
    assert cut == [5, 5, 2]
    embeddings = ParallelSection(pipeline=3, partition="embeddings")
    cut = [len(one.blocks) for one in stages_of(model, embeddings, vocabulary=1_536, sequence_length=16)]
    assert cut == [3, 5, 4]
