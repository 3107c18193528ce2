"""What sharding leaves on a rank: a part of the state, and the weights of one block or two."""

from __future__ import annotations

import pytest
from tests.layouts.comparison import Matrix
from tests.layouts.holding import gathered_blocks, held, started

# Two jobs of ranks, however slow the machine: they have deadlines of their own.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [((), 3), (("parallel.prefetch_blocks=1",), 2), (("parallel.overlap=false",), 1)],
)
def test_each_stage_of_zero_leaves_half_of_what_it_shards_and_the_third_few_blocks_at_a_time(
    matrix: Matrix, settings: tuple[str, ...], blocks: int
) -> None:
    figures = {
        zero: matrix.ranks.run(held, ("parallel.data=2", f"parallel.zero={zero}", *settings), ranks=2)
        for zero in (0, 1, 2, 3)
    }
    assert all(first == second for first, second in figures.values())
    (masters, gradients, _, _), *sharded = (ranks[0] for ranks in figures.values())
    assert masters == gradients
    slack = 64 * 2 * 30  # each group is padded to a multiple of 64 on each rank
    for zero, (own_masters, own_gradients, weights, most) in enumerate(sharded, start=1):
        assert 0 <= 2 * own_masters - masters <= slack
        assert abs((2 * own_gradients if zero >= 2 else own_gradients) - gradients) <= slack
        if zero == 3:
            assert weights == 0
            one_block = masters // 4  # 4 blocks, and embedding and head beside them
            assert 0 < most <= blocks * one_block + slack
            assert most > (blocks - 1) * one_block


def test_a_model_whose_weights_are_sharded_is_never_whole_on_a_rank_not_at_its_start_nor_evaluated(
    matrix: Matrix,
) -> None:
    whole, first = (matrix.ranks.run(started, zero, ranks=2)[0] for zero in (0, 3))
    one_block = 1.3 * first.block  # its weights, and what fills them a tensor at a time
    assert whole.most > 16 * whole.block
    assert first.most - first.held <= one_block
    assert 1.0 < first.most_blocks <= 3.3  # the next two blocks are gathered meanwhile
    assert (first.nats, first.tokens) == (pytest.approx(whole.nats, rel=1e-6), whole.tokens)
    assert whole.tokens == 3 * 2 * 32


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_blocks_are_gathered_in_one_order_on_all_ranks_and_few_at_a_time(
    matrix: Matrix, ahead: int, recompute: str
) -> None:
    settings = (f"parallel.prefetch_blocks={ahead}", f"train.recompute={recompute}")
    first, second = matrix.ranks.run(gathered_blocks, settings, ranks=2)
    assert first == second
    up, down = [f"blocks.{index}" for index in range(6)], [f"blocks.{index}" for index in reversed(range(6))]
    # two micro-batches forward and backward, then an evaluation
    assert first.order == [*up, *down, *up, *down, *up]
    assert first.most_blocks == ahead + 1
