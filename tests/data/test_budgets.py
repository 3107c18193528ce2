"""Budgets are spent once: to the sample, through longer, shorter, skipping and resumed runs."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bloomery.config.data import DataSection, DatasetSection
from bloomery.data.dataset_shares import Claim, Demand
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.mixture import BLOCK, Mixture, counts_to_end, whole_shares
from bloomery.data.stream import SampleStream, begin_stream
from bloomery.errors import DataError

LENGTH = 4


def demand(samples: int, *claims: tuple[int, float], slack: int = 8) -> Demand:
    made = (
        Claim(name=f"d{number}", samples=budget, weight=Fraction(weight))
        for number, (budget, weight) in enumerate(claims)
    )
    return Demand(claims=tuple(made), samples=samples, slack=slack, sequence_length=LENGTH)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[IndexedDataset]:
    """Of 300, 41 and 70,000 samples."""
    made = []
    for number, windows in enumerate((300, 41, 70_000)):
        prefix = tmp_path_factory.mktemp("budgets") / str(number)
        with IndexedWriter(prefix, dtype="<u2") as writer:
            writer.add_document(np.arange(windows * LENGTH + 1) % 60_000)
        made.append(IndexedDataset(prefix))
    return made


def stream_of(datasets: list[IndexedDataset], wanted: Demand) -> SampleStream:
    section = DataSection(sequence_length=LENGTH)
    return begin_stream(section, datasets, wanted, seed=3, samples=wanted.samples)


def resumed(
    datasets: list[IndexedDataset], stream: SampleStream, wanted: Demand, at: int, left: int
) -> SampleStream:
    stored = json.loads(json.dumps(stream.to_json()))
    return stream_of(datasets, wanted).following(stored, at=at, left=left)


def times_read(stream: SampleStream, dataset: int, samples: int) -> np.ndarray:
    """How often the first `samples` of a stream read each window of a dataset, counted one by one."""
    chosen, windows = stream.order.locate_samples(np.arange(samples))
    return np.bincount(windows[chosen == dataset], minlength=stream.windows[dataset])


@pytest.mark.parametrize("samples", [700, 2_000, BLOCK, 2 * BLOCK + 1])
def test_a_budget_of_all_it_holds_reads_each_window_of_a_dataset_once(
    datasets: list[IndexedDataset], samples: int
) -> None:
    stream = stream_of(datasets, demand(samples, (300, 1), (41, 1), (0, 1)))
    for dataset in (0, 1):
        assert (times_read(stream, dataset, samples) == 1).all()
    beyond = times_read(stream, 1, samples + 500)  # others were skipped: these have no budget left
    assert (beyond == 1).all()


@pytest.mark.parametrize("samples", [700, BLOCK, BLOCK + 1, 2 * BLOCK + 300])
def test_budgets_of_a_run_that_began_with_the_second_rule_end_with_it(
    datasets: list[IndexedDataset], samples: int
) -> None:
    wanted = demand(samples, (300, 1), (41, 1), (0, 1))
    today = stream_of(datasets, wanted)
    stored = today.to_json()
    stored["mixtures"][0]["rule"] = 2
    stream = today.following(stored, at=0, left=samples)
    for dataset in (0, 1):
        assert (times_read(stream, dataset, samples) == 1).all()
        assert (times_read(stream, dataset, samples + 500) == 1).all()
    longer = demand(samples + 400, (300, 1), (41, 1), (0, 1))
    later = stream.demanding(longer, at=samples - 200, left=600)
    for dataset in (0, 1):
        assert (times_read(later, dataset, samples + 400) == 1).all()


@settings(max_examples=100)
@given(budget=st.integers(1, 300), rest=st.integers(10, 500))
@example(budget=54, rest=37)  # its share, rounded, makes it 55 samples
def test_a_budget_of_a_part_of_what_it_holds_is_given_to_the_sample(
    datasets: list[IndexedDataset], budget: int, rest: int
) -> None:
    stream = stream_of(datasets, demand(budget + rest, (budget, 1), (0, 1), (0, 1)))
    given_in_all = stream.order.given_before(budget + rest)
    assert given_in_all[0] == budget and given_in_all.sum() == budget + rest


def test_one_epoch_of_everything_is_everything_once(datasets: list[IndexedDataset]) -> None:
    samples = 300 + 41 + 70_000
    stream = stream_of(datasets, demand(samples, (300, 1), (41, 1), (70_000, 1)))
    for dataset in range(3):
        assert (times_read(stream, dataset, samples) == 1).all()


@settings(max_examples=15)
@given(
    changes=st.lists(st.tuples(st.integers(1, 900), st.integers(400, 90_000)), min_size=1, max_size=3),
    first=st.integers(800, 80_000),
)
def test_no_window_of_a_budget_is_read_twice_however_the_length_changes_at_resumes(
    datasets: list[IndexedDataset], changes: list[tuple[int, int]], first: int
) -> None:
    claims = ((300, 1.0), (41, 1.0), (0, 1.0))
    stream, at, end = stream_of(datasets, demand(first, *claims)), 0, first
    for further, left in changes:
        at = min(at + further, end)
        end = at + left
        stream = resumed(datasets, stream, demand(end, *claims), at, left)
    for dataset in (0, 1):
        assert (times_read(stream, dataset, end) == 1).all()
    unchanged = resumed(datasets, stream, demand(end, *claims), end - 1, 1)
    assert unchanged.mixtures == stream.mixtures


def test_a_length_that_budgets_cannot_fill_is_refused_with_both_values(
    datasets: list[IndexedDataset],
) -> None:
    alone = ((300, 1.0), (41, 1.0), (0, 0.0))
    stream = stream_of(datasets, demand(341, *alone))
    with pytest.raises(DataError, match="give 1,364 tokens, and the run takes 2,400") as refused:
        resumed(datasets, stream, demand(600, *alone), 100, 500)
    assert "train.tokens = 1364" in refused.value.remedy
    with pytest.raises(DataError, match="yet give 964 tokens, and the run yet takes 2,000") as refused:
        stream.demanding(demand(600, *alone), at=100, left=500)
    assert "train.tokens = 1364" in refused.value.remedy
    mixed = ((300, 1.0), (41, 1.0), (0, 1.0))
    stream = stream_of(datasets, demand(1000, *mixed))
    with pytest.raises(DataError, match=r"yet take .* tokens, and the run yet has 400: nothing is left"):
        stream.demanding(demand(400, *mixed), at=300, left=100)
    with pytest.raises(DataError, match=r"'d0' has given .* tokens, and its budget is 40 now"):
        resumed(datasets, stream, demand(1000, (10, 1), (41, 1), (0, 1)), 500, 500)


def test_a_smaller_weight_in_mid_run_leaves_budgets_what_they_were(datasets: list[IndexedDataset]) -> None:
    stream = stream_of(datasets, demand(5_000, (300, 1), (0, 3), (0, 1)))
    stream = resumed(datasets, stream, demand(5_000, (300, 1), (0, 1), (0, 9)), 2_000, 3_000)
    assert len(stream.mixtures) == 2
    assert (times_read(stream, 0, 5_000) == 1).all()
    later = np.bincount(stream.order.locate_samples(np.arange(2_000, 5_000))[0], minlength=3)
    assert later[2] == pytest.approx(9 * later[1], rel=0.02)


def test_a_mixture_with_budgets_comes_back_from_its_json() -> None:
    wanted = demand(9_000, (300, 1), (0, 2), (41, 1))
    mixture = Mixture.of([300, 70_000, 41], wanted.shares(), demand=wanted, length=9_000)
    stored = json.loads(json.dumps(mixture.to_json()))
    assert Mixture.from_json(stored, windows=[300, 70_000, 41]) == mixture
    assert len(json.dumps(stored)) < 200


@given(st.lists(st.integers(0, 400), min_size=1, max_size=30).filter(any), st.data())
def test_counts_to_the_end_come_to_what_was_asked(counts: list[int], data: st.DataObject) -> None:
    given = [data.draw(st.integers(0, count)) for count in counts]
    left = counts_to_end(whole_shares(counts), given, samples=sum(counts))
    assert [had + yet for had, yet in zip(given, left, strict=True)] == counts


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any),
    st.integers(1, 60),
    st.lists(st.integers(0, 60), min_size=12, max_size=12),
)
@example(weights=[1] * 6 + [0, 30, 8], samples=10, drawn=[1] * 6 + [0] * 6)
@example(weights=[1] * 8 + [3, 3, 3], samples=5, drawn=[1] * 5 + [0] * 7)
def test_counts_to_the_end_are_those_of_the_shares_within_a_sample_whatever_was_rounded_up_before(
    weights: list[int], samples: int, drawn: list[int]
) -> None:
    """Each dataset gave at most its share, rounded up: many of less than a sample may have given theirs."""
    shares = whole_shares(weights)
    dues = [Fraction(weight * samples, sum(weights)) for weight in weights]
    before: list[int] = []
    for due, count in zip(dues, drawn, strict=False):
        before.append(min(count, samples - sum(before), math.ceil(due)))
    left = counts_to_end(shares, before, samples=samples)
    assert min(left) >= 0 and sum(left) == samples - sum(before)
    assert all(not count for count, weight in zip(left, weights, strict=True) if not weight)
    over = [had + yet - due for had, yet, due in zip(before, left, dues, strict=True)]
    assert max(over) < 1
    if all(had <= due for had, due in zip(before, dues, strict=True)):
        assert min(over) > -1
        remainders = [due % 1 for due in dues]  # the largest are rounded up, of equal ones the first
        up = sorted(range(len(dues)), key=lambda number: -remainders[number])[: int(sum(remainders))]
        if len({*remainders}) == len(remainders):
            assert [had + yet for had, yet in zip(before, left, strict=True)] == [
                math.floor(due) + (number in up) for number, due in enumerate(dues)
            ]


def test_what_small_datasets_gave_early_the_others_give_less_in_turn() -> None:
    weights = [1] * 6 + [0, 30, 8]
    left = counts_to_end(whole_shares(weights), [1] * 6 + [0] * 3, samples=10)
    assert left == [0] * 7 + [4, 0]  # their shares are 6.8 and 1.8 samples, and four are left


def test_what_small_datasets_gave_early_is_no_reason_to_cut_a_budget() -> None:
    shares = whole_shares([Fraction(3, 10), Fraction(3, 10), 50, Fraction(494, 10)])
    assert counts_to_end(shares, [1, 1, 20, 20], samples=100) == [0, 0, 30, 28]


def test_a_sample_to_spare_is_given_by_the_largest_remainder_whatever_each_gave_before() -> None:
    shares = whole_shares([Fraction(33), Fraction(31)])  # 8.25 and 7.75 of 16 samples
    assert counts_to_end(shares, [6, 2], samples=16) == [2, 6]
    assert counts_to_end(shares, [2, 6], samples=16) == [6, 2]


def test_a_run_of_budgets_alone_goes_on_past_what_it_skipped(datasets: list[IndexedDataset]) -> None:
    alone = demand(341, (300, 1.0), (41, 1.0), (0, 0.0))
    stream = stream_of(datasets, alone)
    later = stream.demanding(alone, at=100, left=241 + 60)  # sixty were skipped
    assert resumed(datasets, later, alone, 200, 201).mixtures == later.mixtures
    over = later.demanding(alone, at=401, left=9)
    assert times_read(over, 0, 410).sum() + times_read(over, 1, 410).sum() == 410
    assert np.array_equal(
        over.order.locate_samples(np.arange(100)), stream.order.locate_samples(np.arange(100))
    )


def test_megatrons_order_gets_the_shares_that_budgets_come_to(datasets: list[IndexedDataset]) -> None:
    budgets, weights = (
        demand(341, (300, 1.0), (41, 1.0), (0, 0.0)),
        demand(341, (0, 300.0), (0, 41.0), (0, 0.0)),
    )
    section = DataSection(sequence_length=LENGTH, order="megatron")
    orders = [
        begin_stream(section, datasets, wanted, seed=3, samples=341).order for wanted in (budgets, weights)
    ]
    (by_budgets, _), (by_weights, _) = (order.locate_samples(np.arange(341)) for order in orders)
    assert np.array_equal(np.bincount(by_budgets, minlength=3), np.bincount(by_weights, minlength=3))


def test_megatron_blends_one_dataset_only_if_somebody_gave_it_a_weight(
    datasets: list[IndexedDataset], tmp_path: Path
) -> None:
    weights = tmp_path / "weights.toml"
    weights.write_text("a = 1.0")
    alone = demand(200, (0, 1.0))
    unweighed, weighed = DatasetSection(name="a", path="a"), DatasetSection(name="a", path="a", weight=2.0)
    for more, is_blend in (
        ({"datasets": (unweighed,)}, False),
        ({"datasets": (weighed,)}, True),
        ({"datasets": (unweighed,), "weights_file": str(weights)}, True),
    ):
        section = DataSection(sequence_length=LENGTH, order="megatron", **more)
        order = begin_stream(section, datasets[:1], alone, seed=3, samples=200).order
        assert isinstance(order, MegatronOrder) and (order.blend is not None) == is_blend
    section = DataSection(sequence_length=LENGTH, order="megatron", datasets=(unweighed, unweighed))
    order = begin_stream(section, datasets[:2], demand(200, (0, 3.0), (0, 1.0)), seed=3, samples=200).order
    assert isinstance(order, MegatronOrder) and order.blend is not None
    assert np.bincount(order.locate_samples(np.arange(200))[0]).tolist() == [150, 50]
