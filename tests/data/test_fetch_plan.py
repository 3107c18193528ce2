"""A share is arithmetic: the shares are disjoint, together everything, and in the ratio that was asked."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.data.remote_files import FetchRequest, RemoteFile, plan_share, shard_numbers
from bloomery.errors import DataError


def files(names: list[str], *, size: int = 100) -> list[RemoteFile]:
    return [RemoteFile(path=name, size_bytes=size, sha256="", version="") for name in sorted(names)]


def parquet(count: int, *, size: int = 100) -> list[RemoteFile]:
    return files([f"{number:05}.parquet" for number in range(count)], size=size)


@settings(max_examples=60)
@given(count=st.integers(1, 60), shares=st.integers(1, 12), seed=st.integers(0, 5))
def test_shares_are_disjoint_and_together_everything(count: int, shares: int, seed: int) -> None:
    dataset, seen = parquet(count), []
    for share in range(min(shares, count)):
        wanted = FetchRequest(shares=shares, share=share, seed=seed, ratios={})
        names = [one.name for one in plan_share({"a": dataset}, wanted)]
        numbers = shard_numbers(share=share, shares=shares, count=count, seed=seed, dataset=0)
        assert names == [f"{number:05}.parquet" for number in numbers]
        assert len(names) in (count // shares, count // shares + 1)
        seen += names
    assert sorted(seen) == [file.path for file in dataset]


def test_the_order_does_not_depend_on_the_number_of_ranks_but_on_the_seed() -> None:
    def names(seed: int) -> list[str]:
        return [one.name for one in plan_share({"a": parquet(50)}, FetchRequest(seed=seed, ratios={}))]

    assert names(1) == names(1) != names(2)
    assert sorted(names(1)) == sorted(names(2))


def test_a_pair_and_its_seal_stay_together() -> None:
    names = [f"{stem}{end}" for stem in ("x", "y") for end in (".bin", ".idx", ".seal.json")]
    shards = plan_share({"a": files([*names, "z.bin", "readme.md"])}, FetchRequest(ratios={}))
    assert sorted(tuple(file.path for file in shard.files) for shard in shards) == [
        ("readme.md",),
        ("x.bin", "x.idx", "x.seal.json"),
        ("y.bin", "y.idx", "y.seal.json"),
        ("z.bin",),
    ]


def test_ratios_bound_each_dataset_by_the_scarcest_one() -> None:
    datasets = {"code": parquet(50, size=10), "en": parquet(100, size=100)}
    shards = plan_share(datasets, FetchRequest(ratios={"en": 0.9, "code": 0.1}))
    sizes = {name: sum(one.size_bytes for one in shards if one.dataset == name) for name in ("code", "en")}
    assert sizes["code"] == 500  # all of it
    assert 4500 <= sizes["en"] < 4600  # 9 times as much, to the file
    limited = plan_share(datasets, FetchRequest(ratios={}, limit=3, exclude=("0000*",)))
    assert [one.dataset for one in limited] == ["code"] * 3 + ["en"] * 3
    assert not [one for one in limited if one.name.startswith("0000")]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (FetchRequest(shares=4, share=4, ratios={}), "no share 4 of 4"),
        (FetchRequest(shares=4, share=-1, ratios={}), "no share -1"),
        (FetchRequest(shares=9, share=8, ratios={}), "Share 8 of 9 of the dataset 'a' holds no file"),
        (FetchRequest(include=("*.txt",), ratios={}), "that the filters leave"),
        (FetchRequest(ratios={"b": 1.0}), "Ratios and datasets differ: a, b"),
        (FetchRequest(ratios={"a": 0.0}), "not all above 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(wanted: FetchRequest, said: str) -> None:
    with pytest.raises(DataError, match=said) as refused:
        plan_share({"a": parquet(3)}, wanted)
    assert refused.value.remedy


def test_a_share_is_the_same_in_whatever_order_the_datasets_are_named() -> None:
    datasets = {"en": parquet(40), "code": parquet(40)}
    wanted = FetchRequest(shares=4, share=1, ratios={})
    assert plan_share(datasets, wanted) == plan_share(dict(reversed(datasets.items())), wanted)
