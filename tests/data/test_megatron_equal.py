"""Weights, sizes and splits are those of Megatron-LM's formulas, written down here step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.independent_indexed import independent_pair

from bloomery.config.data import DataSection, DatasetSection
from bloomery.data.dataset_shares import Claim, Demand, split_documents
from bloomery.data.indexed import IndexedDataset
from bloomery.data.megatron_order import Blend, MegatronOrder, with_surplus
from bloomery.data.pair_files import idx_path
from bloomery.data.prepare import PreparedDataset
from bloomery.data.stream import begin_stream
from bloomery.errors import DataError
from bloomery.train.data_stream import training_documents

STEPS = 64  # samples of each blend that are compared


def normalize(weights: list[float]) -> list[float]:
    array = np.array(weights, dtype=np.float64)
    total = np.sum(array)
    return [float(one / total) for one in array]


def sizes_per_dataset(weights: list[float], samples: int, *, surplus: float) -> list[int]:
    return [math.ceil(math.ceil(samples * weight) * (1 + surplus)) for weight in normalize(weights)]


def blends(weights: np.ndarray, samples: int) -> Iterator[np.ndarray]:
    """At each sample, the dataset that each blend chooses; weights: [blends, datasets], normalised."""
    counts = np.zeros_like(weights)
    rows = np.arange(len(weights))
    for sample in range(samples):
        at = max(float(sample), 1.0)
        best = np.zeros(len(weights), dtype=np.int64)
        error = weights[:, 0] * at - counts[:, 0]
        for dataset in range(1, weights.shape[1]):
            other = weights[:, dataset] * at - counts[:, dataset]
            is_more = other > error
            best[is_more], error[is_more] = dataset, other[is_more]
        counts[rows, best] += 1.0
        yield best


def split_matrix(parts: list[float]) -> list[tuple[float, float] | None]:
    expansion = [0.0]
    for part in normalize([*parts, *[0.0] * (3 - len(parts))]):
        expansion.append(expansion[-1] + part)
    return [(begin, end) if end > begin else None for begin, end in pairwise(expansion)]


def drawn_weights(random: np.random.Generator, datasets: int) -> list[float]:
    """As people write them: tenths, percents, token counts, and numbers of any kind."""
    kind = int(random.integers(5))
    if kind == 0:
        return [float(one) / 10 for one in random.integers(1, 10, datasets)]
    if kind == 1:
        return [float(one) / 100 for one in random.integers(1, 100, datasets)]
    if kind == 2:
        return [float(one) for one in random.integers(1, 10**12, datasets)]
    if kind == 3:
        return random.dirichlet(np.ones(datasets)).tolist()
    return (10.0 ** random.uniform(-6, 3, datasets)).tolist()


@pytest.mark.parametrize("vectors", [8_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_random_weights_sizes_and_splits_are_megatrons(vectors: int) -> None:
    random = np.random.default_rng(23)
    differ = {"choices": 0, "sizes": 0, "splits": 0}
    for datasets in range(1, 17):
        drawn = [drawn_weights(random, datasets) for _ in range(vectors // 16)]
        twice = np.array([normalize(normalize(weights)) for weights in drawn])
        theirs = np.stack(list(blends(twice, STEPS)), axis=1)
        for weights, chosen in zip(drawn, theirs, strict=True):
            ours = Blend(weights, STEPS)
            differ["choices"] += not np.array_equal(ours.datasets, chosen)
            samples = int(10 ** random.uniform(0, 11))
            provided = [with_surplus(samples, share) for share in ours.shares.tolist()]
            differ["sizes"] += provided != sizes_per_dataset(weights, samples, surplus=0.005)
    for _ in range(vectors):
        parts = [int(one) for one in random.integers(0, random.choice([4, 11, 101, 1001]), 3)]
        parts[0] = max(1, parts[0])
        count = int(random.integers(0, random.choice([100, 10_000, 10**9])))
        ours = split_documents(count, parts)
        for ranged, ends in zip(ours, split_matrix([float(part) for part in parts]), strict=True):
            expected = ends and (round(ends[0] * float(count)), round(ends[1] * float(count)))
            differ["splits"] += (ranged.start, ranged.stop) != expected if expected else len(ranged) != 0
        assert ours[0].start == 0 and ours[-1].stop == count
    assert differ == {"choices": 0, "sizes": 0, "splits": 0}


def test_blends_of_fifteen_hundred_random_weights_stay_megatrons_for_three_thousand_samples() -> None:
    random = np.random.default_rng(5)
    for datasets in (2, 3, 5, 8, 17):
        drawn = [drawn_weights(random, datasets) for _ in range(300)]
        twice = np.array([normalize(normalize(weights)) for weights in drawn])
        theirs = np.stack(list(blends(twice, 3000)), axis=1)
        assert [Blend(weights, 3000).datasets.tolist() for weights in drawn] == theirs.tolist()


def written(directory: Path, name: str, documents: list[list[int]]) -> PreparedDataset:
    index, tokens = independent_pair(documents, code=8)
    idx_path(directory / name).write_bytes(index)
    (directory / f"{name}.bin").write_bytes(tokens)
    return PreparedDataset(
        name=name, prefix=directory / name, weight=1.0, documents=len(documents), tokens=0, text_bytes=0
    )


def section_of(datasets: list[DatasetSection], **others: object) -> DataSection:
    return DataSection(datasets=tuple(datasets), sequence_length=32, order="megatron", **others)  # type: ignore[arg-type]


def ordered(directory: Path, weights: list[float | str], *, samples: int) -> MegatronOrder:
    """The order of some datasets with weights, as a run makes it."""
    random = np.random.default_rng(1)
    sections, found = [], []
    for number, weight in enumerate(weights):
        documents = [[1] * int(size) for size in random.integers(1, 90, 300)]
        prepared = written(directory, f"d{number}", documents)
        sections.append(DatasetSection(name=prepared.name, path=str(prepared.prefix), weight=weight))  # type: ignore[arg-type]
        found.append(IndexedDataset(prepared.prefix))
    claims = tuple(Claim(name=one.name, samples=0, weight=Fraction(one.resolved_weight)) for one in sections)
    demand = Demand(claims=claims, samples=samples, slack=9, sequence_length=32)
    stream = begin_stream(section_of(sections), found, demand, seed=1234, samples=samples)
    assert isinstance(stream.order, MegatronOrder)
    return stream.order


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.1], [1 / 3, 0.1, 0.3, 1e-3], [30.0, 70.0, 1.1]])
def test_a_recipes_fractional_weights_give_megatrons_blend(tmp_path: Path, weights: list[float]) -> None:
    order = ordered(tmp_path, list(weights), samples=3000)
    theirs = np.concatenate(list(blends(np.array([normalize(normalize(weights))]), 3000)))
    assert order.locate((range(3000),))[0].tolist() == theirs.tolist()
    sizes = sizes_per_dataset(weights, 3000, surplus=0.005)
    for row, size in zip(order.rows, sizes, strict=True):
        assert row.epochs == -(-(size * 32 + 1) // row.epoch_tokens)


def test_one_dataset_provides_a_surplus_where_it_is_given_with_a_weight(tmp_path: Path) -> None:
    alone = ordered(tmp_path, ["auto"], samples=3)
    samples = alone.rows[0].sample_count  # as many as one epoch holds: any more need a second
    for weight, epochs in (("auto", 1), (1.0, 2), (0.3, 2)):
        order = ordered(tmp_path, [weight], samples=samples)
        assert order.rows[0].epochs == epochs
    assert order.blend is not None and not order.blend.datasets.any()


def test_a_dataset_of_weight_0_gives_nothing_and_changes_nothing_for_the_others(tmp_path: Path) -> None:
    weights = [0.0, 0.7, 0.0, 0.2, 0.1, 0.3, 0.31, 0.33, 0.17, 0.21, 0.0]
    blend, others = Blend(weights, 70_000), Blend([one for one in weights if one], 70_000)
    members = np.flatnonzero(weights)
    assert blend.datasets.tolist() == members[others.datasets].tolist()
    assert blend.before(69_999)[members].tolist() == others.before(69_999).tolist()
    assert blend.before(69_999).sum() == 69_999
    assert blend.sample_of(1, 3) == others.sample_of(0, 3)


def test_a_run_saved_with_the_first_rule_goes_on_with_it(tmp_path: Path) -> None:
    sections = [
        DatasetSection(name=name, path="", weight=w) for name, w in (("a", 0.7), ("b", 0.2), ("c", 0.1))
    ]
    found = [IndexedDataset(written(tmp_path, one.name, [[1] * 40] * 300).prefix) for one in sections]
    claims = tuple(Claim(name=one.name, samples=0, weight=Fraction(one.resolved_weight)) for one in sections)
    demand = Demand(claims=claims, samples=3000, slack=9, sequence_length=32)
    stream = begin_stream(section_of(sections), found, demand, seed=1234, samples=3000)
    assert isinstance(stream.order, MegatronOrder)
    first = stream.order.by_rule(1)
    once = [
        float(Fraction(weight) / (Fraction(0.7) + Fraction(0.2) + Fraction(0.1)))
        for weight in (0.7, 0.2, 0.1)
    ]
    theirs = np.concatenate(list(blends(np.array([normalize(once)]), 3000)))
    assert first.locate((range(3000),))[0].tolist() == theirs.tolist()
    assert theirs.tolist() != stream.order.locate((range(3000),))[0].tolist()
    resumed = stream.following(replace(stream, order=first).to_json(), at=32, left=9)
    assert resumed.order.locate((range(3000),))[0].tolist() == theirs.tolist()
    with pytest.raises(DataError, match="made for other datasets, weights"):
        stream.following({"megatron": "3000 0123456789abcdef"}, at=32, left=9)


@pytest.mark.parametrize(
    ("parts", "count", "ends"), [((54, 46, 0), 3575, (1931, 3575)), ((90, 5, 5), 30, (27, 29))]
)
def test_a_split_falls_on_the_side_that_float64_puts_it(
    tmp_path: Path, parts: tuple[int, ...], count: int, ends: tuple[int, int]
) -> None:
    expected = [
        part and tuple(round(end * float(count)) for end in part) for part in split_matrix(list(parts))
    ]
    assert (expected[0][1], expected[1][1]) == ends
    train, validation, test = split_documents(count, parts)
    assert (train.stop, validation.stop, test.stop) == (*ends, count)
    prepared = [written(tmp_path, "one", [[1] * 9] * count)]
    of_megatron = training_documents(section_of([], split=parts), prepared)
    assert of_megatron[0].document_count == ends[0]
    exact = split_documents(count, parts, exact=True)
    of_bloomery = training_documents(replace(section_of([], split=parts), order="bloomery"), prepared)
    assert of_bloomery[0].document_count == exact[0].stop
    assert exact != (train, validation, test)


def test_megatrons_split_counts_sequences_where_documents_are_empty(tmp_path: Path) -> None:
    documents = [[] if number % 3 == 1 else [1] * 40 for number in range(30)]
    prepared = [written(tmp_path, "one", documents)]
    (part,) = training_documents(section_of([], split=(1, 1, 0)), prepared)
    assert part.sequence_count == 10 and part.token_count == 400
