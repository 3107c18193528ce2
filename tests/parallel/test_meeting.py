"""Ranks as threads around one store: what each of them raises when something is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore

from bloomery.errors import BloomeryError, ToldElsewhere, TrainingFailed
from bloomery.parallel.meeting import Introduction, meet

RECIPE = {"optim.learning_rate": "0.001", "parallel.tensor": "2"}


def everyone(directory: Path, ranks: Sequence[Introduction | None], **options: object) -> list[object]:
    """What `meet` did on each rank: None, or what it raised. A rank that is None does not come."""

    def one(rank: int) -> object:
        mine = ranks[rank]
        if mine is None:
            return None
        store = FileStore(str(directory / "store"), len(ranks))
        try:
            meet(store, mine, rank=rank, world=len(ranks), **{"judge": lambda found: None, **options})
        except (BloomeryError, RuntimeError) as error:
            return error
        return None

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


def ranks(count: int = 3, **third: object) -> list[Introduction | None]:
    usual = {"host": "node-1", "recipe": RECIPE}
    return [Introduction(**(usual | (third if rank == 2 else {}))) for rank in range(count)]


def test_ranks_that_agree_go_on_and_the_judge_sees_all_of_them_in_order(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    found = everyone(
        tmp_path,
        ranks(host="node-2"),
        judge=lambda all_ranks: seen.append([one.host for one in all_ranks]),
    )
    assert found == [None, None, None]
    assert seen == [["node-1", "node-1", "node-2"]]


def test_a_rank_with_another_recipe_ends_all_with_one_message_that_names_host_and_setting(
    tmp_path: Path,
) -> None:
    first, *others = everyone(
        tmp_path, ranks(host="node-2", recipe=RECIPE | {"optim.learning_rate": "0.002"})
    )
    assert isinstance(first, TrainingFailed)
    assert "Rank 2 on node-2" in first.message
    assert "optim.learning_rate is 0.002 there and 0.001 here" in first.message
    assert first.remedy
    assert all(isinstance(one, ToldElsewhere) and not str(one) for one in others)


def test_a_rank_that_refuses_is_told_by_the_first_with_its_host_and_its_remedy(tmp_path: Path) -> None:
    first, *others = everyone(
        tmp_path, ranks(host="node-2", refusal="There is no GPU of its own.", remedy="Start fewer.")
    )
    assert isinstance(first, TrainingFailed)
    assert str(first) == "rank 2 on node-2: There is no GPU of its own.\n  Start fewer."
    assert all(isinstance(one, ToldElsewhere) for one in others)


def test_what_the_judge_refuses_ends_all(tmp_path: Path) -> None:
    def judge(found: Sequence[Introduction]) -> None:
        raise TrainingFailed("a line crosses nodes")

    first, *others = everyone(tmp_path, ranks(), judge=judge)
    assert str(first) == "a line crosses nodes"
    assert all(isinstance(one, ToldElsewhere) for one in others)


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    first, second, _ = everyone(tmp_path, [*ranks(2), None], timeout_s=1.0)
    assert isinstance(first, TrainingFailed) and "Of 3 ranks, 1 did not join within 1 s: 2." in first.message
    assert isinstance(second, ToldElsewhere)


@pytest.mark.parametrize("count", [1, 2])
def test_few_ranks_meet_as_many_do(tmp_path: Path, count: int) -> None:
    assert everyone(tmp_path, ranks(count)) == [None] * count
