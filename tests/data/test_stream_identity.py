"""The identity of a stream tells other tokens and another order apart, at equal numbers of everything."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np

from bloomery.config.data import DataSection
from bloomery.data.dataset_shares import Claim, Demand
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.position import RULE_KEY
from bloomery.data.stream import begin_stream, stream_identity


def pair(path: Path, *, seed: int, documents: int = 40) -> IndexedDataset:
    with IndexedWriter(path, dtype=np.uint16) as writer:
        generator = np.random.default_rng(seed)
        for _ in range(documents):
            writer.add_document(generator.integers(0, 1000, 500, dtype=np.uint16))
    return IndexedDataset(path)


def identity(dataset: IndexedDataset, *, seed: int = 1) -> dict[str, str]:
    section = DataSection(sources=("x",), sequence_length=16)
    demand = Demand(claims=(claim(dataset),), samples=100, slack=8, sequence_length=16)
    stream = begin_stream(section, [dataset], demand, seed=seed, samples=100)
    return stream_identity(stream, {"books": dataset}, text="t")


def claim(dataset: IndexedDataset) -> Claim:
    return Claim(name="books", samples=0, weight=Fraction(1))


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    assert one.keys() == other.keys()
    return {key for key in one if one[key] != other[key]}


def test_equal_pairs_in_different_places_are_one_stream(tmp_path: Path) -> None:
    assert identity(pair(tmp_path / "a", seed=1)) == identity(pair(tmp_path / "b", seed=1))


def test_other_tokens_of_equal_number_and_another_order_are_told_apart(tmp_path: Path) -> None:
    one, other = pair(tmp_path / "a", seed=1), pair(tmp_path / "b", seed=2)
    assert differing(identity(one), identity(other)) == {"the dataset 'books'"}
    assert differing(identity(one), identity(one, seed=2)) == {"the order of the samples"}


def test_peers_whose_mixtures_follow_different_rules_are_told_apart(tmp_path: Path) -> None:
    datasets = {name: pair(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 2))}
    claims = tuple(Claim(name=name, samples=0, weight=Fraction(1)) for name in datasets)
    demand = Demand(claims=claims, samples=100, slack=8, sequence_length=16)
    section = DataSection(sources=("x",), sequence_length=16)
    stream = begin_stream(section, list(datasets.values()), demand, seed=1, samples=100)
    today = stream_identity(stream, datasets, text="t")
    stored = stream.to_json()
    earlier = {**stored, "mixtures": [{**stored["mixtures"][0], "rule": 2}]}
    resumed = stream.following(earlier, at=10, left=90)
    before = stream_identity(resumed, datasets, text="t")
    assert not np.array_equal(stream.order.locate((range(50),))[0], resumed.order.locate((range(50),))[0])
    # What versions with rules 1 and 2 said of themselves, to the letter: no rule.
    assert today == before | {RULE_KEY: "3"} and RULE_KEY not in before
    assert RULE_KEY not in identity(datasets["a"])  # one dataset: every rule gives the same order
