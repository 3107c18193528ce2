"""Ranks as threads around one store: what each of them raises when something is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.parallel.frozen import relayed_store
from torch._C._distributed_c10d import FileStore

from bloomery.errors import BloomeryError, RankLost, ReportedElsewhere, TrainingFailed
from bloomery.parallel.rendezvous import (
    Introduction,
    refuse_shared_gpus,
    refuse_unequal,
    rendezvous,
    setting_difference,
)

RECIPE = {"optim.learning_rate": "0.001", "parallel.tensor": "2"}


def everyone(directory: Path, ranks: Sequence[Introduction | None], **options: object) -> list[object]:
    """What `rendezvous` did on each rank: None, or what it raised. A rank that is None does not come."""

    def one(rank: int) -> object:
        mine = ranks[rank]
        if mine is None:
            return None
        store = FileStore(str(directory / "store"), len(ranks))
        try:
            rendezvous(
                store, mine, rank=rank, world=len(ranks), **{"check": lambda all_ranks: None, **options}
            )
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
        check=lambda all_ranks: seen.append([one.host for one in all_ranks]),
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
    assert first.remedy == "Give every node the same recipe file and the same overrides."
    assert all(isinstance(one, ReportedElsewhere) and not str(one) for one in others)


def test_a_rank_that_refuses_is_told_by_the_first_with_its_host_and_its_remedy(tmp_path: Path) -> None:
    first, *others = everyone(
        tmp_path, ranks(host="node-2", refusal="There is no GPU of its own.", remedy="Start fewer.")
    )
    assert isinstance(first, TrainingFailed)
    assert str(first) == "rank 2 on node-2: There is no GPU of its own.\n  Start fewer."
    assert all(isinstance(one, ReportedElsewhere) for one in others)


def test_what_the_judge_refuses_ends_all(tmp_path: Path) -> None:
    def refuse(all_ranks: Sequence[Introduction]) -> None:
        raise TrainingFailed("a tensor-parallel group crosses nodes")

    first, *others = everyone(tmp_path, ranks(), check=refuse)
    assert str(first) == "a tensor-parallel group crosses nodes"
    assert all(isinstance(one, ReportedElsewhere) for one in others)


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    first, second, _ = everyone(tmp_path, [*ranks(2), None], timeout_s=5.0)
    assert isinstance(first, TrainingFailed) and "Of 3 ranks, 1 did not join within 5 s: 2." in first.message
    assert (
        first.remedy == "Look at their logs and nodes; start all of them, with the same --nnodes and recipe."
    )
    assert isinstance(second, ReportedElsewhere)


@pytest.mark.parametrize("count", [1, 2])
def test_few_ranks_meet_as_many_do(tmp_path: Path, count: int) -> None:
    assert everyone(tmp_path, ranks(count)) == [None] * count


def test_a_rank_that_makes_something_else_of_auto_ends_all_and_is_named(tmp_path: Path) -> None:
    given = ranks(host="node-2", chosen={"train.precision": "fp32"})
    given[:2] = [replace(one, chosen={"train.precision": "bf16"}) for one in given[:2] if one is not None]
    first, *others = everyone(tmp_path, given)
    assert isinstance(first, TrainingFailed)
    assert "Rank 2 on node-2 resolves 'auto' differently from rank 0 on node-1" in first.message
    assert "train.precision is fp32 there and bf16 here" in first.message
    assert first.remedy == "Write what all machines can do in place of 'auto'."
    assert all(isinstance(one, ReportedElsewhere) for one in others)


def test_a_first_rank_that_never_judges_is_named_by_those_who_wait_for_it(tmp_path: Path) -> None:
    _, second = everyone(tmp_path, [None, *ranks(1)], timeout_s=0.5)
    assert isinstance(second, RankLost) and "Rank 0, which looks at all recipes" in second.message
    assert second.remedy == "Look at its log and its node, and start all ranks again."


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_freezes_is_named_and_holds_nobody_up(rank: int) -> None:
    with relayed_store() as relay:
        store, mine = relay.client(), Introduction(host="node-1", recipe=RECIPE)
        relay.freeze()
        with pytest.raises(RankLost, match="The store where the ranks meet has not answered for 1 s") as lost:
            rendezvous(store, mine, rank=rank, world=2, check=lambda all_ranks: None, store_timeout_s=1.0)
        assert lost.value.remedy.startswith("Look whether its machine is up and can be reached.")
        assert "newest checkpoint" in lost.value.remedy


@pytest.mark.parametrize(
    ("theirs", "ours", "difference"),
    [
        ({"b": "2", "a": "1"}, {"a": "1", "b": "3", "c": "4"}, "b is 2 on node-2 and 3 here"),
        ({"a": "1"}, {"a": "1", "b": "3"}, "b is missing on node-2 and 3 here"),
        ({"a": "1", "b": "3"}, {"a": "1"}, "b is 3 on node-2 and missing here"),
        ({"z": "1", "m": "1", "a": "0"}, {"z": "2", "m": "2", "a": "0"}, "m is 1 on node-2 and 2 here"),
    ],
)
def test_of_settings_that_differ_the_first_by_name_is_told_with_both_values(
    theirs: dict[str, str], ours: dict[str, str], difference: str
) -> None:
    assert setting_difference(theirs, ours, there="on node-2") == difference


def test_a_refusal_is_told_before_a_difference_of_a_rank_with_a_lower_number() -> None:
    other = Introduction(host="node-1", recipe={"parallel.tensor": "4"})
    refusing = Introduction(host="node-2", recipe=RECIPE, refusal="There is no GPU.", remedy="Start fewer.")
    with pytest.raises(TrainingFailed, match="rank 2 on node-2: There is no GPU"):
        refuse_unequal([Introduction(host="node-0", recipe=RECIPE), other, refusing])


def test_two_ranks_with_one_gpu_are_refused_and_ranks_of_cpus_share_nothing(tmp_path: Path) -> None:
    gpus = ["one", "", "two", "", "one"]
    met = [Introduction(host=f"n{n}", recipe=RECIPE, gpu=gpu) for n, gpu in enumerate(gpus)]
    first, *others = everyone(tmp_path, list(met))
    assert isinstance(first, TrainingFailed)
    assert first.message == "Ranks 0 and 4 on n4 were given the same GPU (one)."
    assert all(isinstance(one, ReportedElsewhere) for one in others)
    refuse_shared_gpus(met[:4])


@pytest.mark.parametrize(
    ("missing", "names"),
    [(8, "1, 2, 3, 4, 5, 6, 7, 8."), (9, "1, 2, 3, 4, 5, 6, 7, 8, ….")],
)
def test_eight_of_the_ranks_that_did_not_come_are_named(tmp_path: Path, missing: int, names: str) -> None:
    came = ranks(1)[0]
    assert came is not None
    with pytest.raises(TrainingFailed) as refused:
        rendezvous(
            FileStore(str(tmp_path / "store"), missing + 1),
            came,
            rank=0,
            world=missing + 1,
            check=lambda all_ranks: None,
            timeout_s=0.0,
        )
    assert refused.value.message.endswith(f"{missing} did not join within 0 s: {names}")
