"""Positions, mixtures, layouts and shares by small numbers that are worked out by hand."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bloomery.config.data import DataSection, DatasetSection
from bloomery.data import megatron_order
from bloomery.data.dataset_shares import (
    Claim,
    Demand,
    Extent,
    claims,
    held_out_weights,
    read_weights,
    split_documents,
)
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.megatron_order import (
    Blend,
    DocumentRow,
    EpochPlan,
    MegatronOrder,
    plan_epochs,
    with_surplus,
)
from bloomery.data.mixture import BLOCK, Mixture, counts_to_end, shares_to_end
from bloomery.data.order import Order, order_through, permute
from bloomery.data.position import Position, SampleShare, lease, merged, next_samples
from bloomery.data.sample_layout import Packs, Windows, best_fit, layout_of
from bloomery.errors import DataError


def test_ranges_with_gaps_are_no_ranges_of_samples() -> None:
    with pytest.raises(ValueError, match=r"range\(0, 9, 2\) has gaps"):
        merged([range(0, 9, 2)])
    assert merged([range(9, 0, 1), range(3, 5), range(0, 2), range(5, 6), range(1, 2)]) == (
        range(0, 2),
        range(3, 6),
    )


def test_what_was_not_consumed_cannot_be_returned() -> None:
    position = Position(consumed=10, skips=(range(3, 5),), holes=(range(7, 9),))  # the cursor is 14
    assert position.cursor == 14
    back = position.returning((range(0, 2), range(12, 14)))
    assert back == Position(consumed=6, skips=(range(3, 5),), holes=(range(0, 2), range(7, 9), range(12, 14)))
    for wrong in ((range(2, 4),), (range(6, 8),), (range(13, 15),), (range(0, 2), range(1, 3))):
        with pytest.raises(ValueError, match="cannot be returned: not all of it was consumed"):
            position.returning(wrong)


def test_holes_that_are_skipped_are_no_longer_holes_and_what_is_ahead_is_passed_over() -> None:
    position = Position(consumed=4, holes=(range(2, 6),)).skipping(range(0, 3), range(5, 12), range(20, 21))
    assert position == Position(
        consumed=4, skips=(range(2, 3), range(5, 6), range(8, 12), range(20, 21)), holes=(range(3, 5),)
    )
    assert position.cursor == 12 and position.next_samples(5) == (range(3, 5), range(12, 15))
    assert position.next_samples(12) == (range(3, 5), range(12, 20), range(21, 23))
    assert position.next_samples(3, withheld=(range(4, 9),)) == (range(3, 4), range(12, 14))
    assert position.next_samples(0) == ()
    after = position.after((range(3, 5), range(12, 13)))
    assert after == Position(consumed=7, skips=position.skips) and after.cursor == 13


def test_a_lease_gives_its_samples_in_their_order_while_they_are_holes() -> None:
    shares, opened = lease(Position(consumed=3, holes=(range(1, 2),)), samples=[2, 0, 3])
    assert [share.lease for share in shares] == [(range(1, 2), range(4, 5)), (), (range(5, 8),)]
    assert opened == Position(consumed=3, holes=(range(1, 2), range(4, 8)))
    assert next_samples(opened, 2, shares[2]) == (range(5, 7),)
    later = opened.after((range(5, 7),))
    assert next_samples(later, 1, shares[2]) == (range(7, 8),)
    with pytest.raises(DataError) as refused:
        next_samples(later, 2, shares[2])
    assert refused.value.message == "The lease of this peer has 1 samples left, and the batch takes 2."
    with pytest.raises(DataError, match="has 0 samples left, and the batch takes 1"):
        next_samples(opened, 1, SampleShare(lease=()))


@pytest.mark.parametrize("size", [0, -1, (1 << 62) + 1])
def test_a_range_that_no_permutation_is_of_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="a permutation of range"):
        permute(np.zeros(1, dtype=np.int64), size, np.zeros(1, dtype=np.uint64))


def test_budgets_become_multiples_of_one_sample_and_other_shares_stay() -> None:
    one = 1 << 46
    shares = [one // 4, one // 4, one // 2]  # of 10 samples: 2.5, 2.5 and 5, a whole number
    found = shares_to_end(shares, samples=10)
    unit = sum(found) // 10
    assert sum(found) == unit * 10 and found[2] == 5 * unit
    assert abs(found[0] - found[1]) == 1, "of an odd unit each has a half"
    whole = shares_to_end([one // 5, one - one // 5], samples=5)
    assert [Fraction(share, sum(whole)) for share in whole] == [Fraction(1, 5), Fraction(4, 5)]
    third = [one // 3 + 1, one // 3, one // 3]
    assert [Fraction(share, sum(shares_to_end(third, samples=7))) * 7 for share in third] != [2, 2, 3]


@pytest.mark.parametrize(
    ("shares", "before", "samples", "left"),
    [
        ([1, 1], [0, 0], 4, [2, 2]),
        ([1, 1], [2, 1], 4, [0, 1]),
        ([1, 1], [3, 0], 4, [0, 1]),  # it gave one more than its share: the other gives one less
        ([1, 0, 3], [0, 0, 0], 8, [2, 0, 6]),
        ([2, 1], [0, 0], 4, [3, 1]),  # 2.67 and 1.33
        ([1, 1, 1], [0, 0, 0], 2, [1, 1, 0]),
    ],
)
def test_what_is_left_to_give_is_the_share_of_the_whole_run_less_what_was_given(
    shares: list[int], before: list[int], samples: int, left: list[int]
) -> None:
    whole = [share * (1 << 46) // sum(shares) for share in shares]
    whole[int(np.argmax(whole))] += (1 << 46) - sum(whole)
    assert counts_to_end(whole, before, samples=samples) == left


def test_an_order_of_several_mixtures_changes_at_their_beginnings() -> None:
    first = Mixture.of([50, 50], [1, 0])
    second = Mixture.of([50, 50, 9], [0, 1, 0], at=30)
    third = Mixture.of([50, 50, 9], [0, 0, 1], at=40)
    datasets, _ = order_through([first, second, third], 3).locate((range(50),))
    assert datasets.tolist() == [0] * 30 + [1] * 10 + [2] * 10
    order = order_through([first, second, third], 3)
    assert order.given_before(45).tolist() == [30, 10, 5]
    assert [order.sample_of_turn(dataset, 4, below=50) for dataset in range(3)] == [4, 34, 44]
    assert order.sample_of_turn(2, 4, below=44) is None and order.sample_of_turn(0, 30, below=50) is None
    assert order.sample_of_turn(0, 0, below=0) is None
    one, windows, epochs = Order([4], [1.0], 3).locate_epochs(np.arange(9))
    assert one.tolist() == [0] * 9 and epochs.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert sorted(windows[:4].tolist()) == [0, 1, 2, 3]
    assert BLOCK == 65_536


@pytest.mark.parametrize(
    ("tokens", "length", "plain", "shifted"),
    [(0, 4, 0, 0), (4, 4, 0, 0), (5, 4, 1, 0), (7, 4, 1, 0), (8, 4, 1, 1), (9, 4, 2, 1), (12, 4, 2, 2)],
)
def test_windows_take_one_token_more_and_shifted_ones_leave_room(
    tokens: int, length: int, plain: int, shifted: int
) -> None:
    assert Windows.of(tokens, length=length).sample_count == plain
    assert Windows.of(tokens, length=length, is_shifted=True).sample_count == shifted


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    with IndexedWriter(tmp_path / "pair", dtype="<u2") as writer:
        writer.add_documents(np.arange(16), np.array([3, 0, 9, 4]))
    return IndexedDataset(tmp_path / "pair")


def test_pieces_of_documents_are_packed_where_they_leave_the_least(dataset: IndexedDataset) -> None:
    packs = layout_of(dataset, "documents", length=4, seed=1, number=0)
    assert isinstance(packs, Packs) and packs.sample_count == 4
    found = packs.pieces(np.arange(4))
    samples: dict[int, list[tuple[int, int, int, bool]]] = {}
    for row, column, start, length, more in zip(
        *(getattr(found, name).tolist() for name in ("row", "column", "start", "length", "continues")),
        strict=True,
    ):
        samples.setdefault(row, []).append((column, start, length, more))
    # pieces of four: 3..6, 7..10 of the third document, and the last; of three: the first; of one: 11
    assert samples == {
        0: [(0, 3, 4, False)],
        1: [(0, 7, 4, True)],
        2: [(0, 12, 4, False)],
        3: [(0, 11, 1, True), (1, 0, 3, False)],
    }
    assert packs.filled(np.array([0, 3])).tolist() == [4, 4] and packs.packing.empty_places == 0
    twice = packs.pieces(np.array([3, 3]))
    assert twice.row.tolist() == [0, 0, 1, 1] and twice.start.tolist() == [11, 0, 11, 0]
    assert packs.pieces(np.empty(0, dtype=np.int64)).row.size == 0


def test_layouts_are_those_that_the_setting_names(dataset: IndexedDataset, tmp_path: Path) -> None:
    common: dict[str, Any] = {"length": 4, "seed": 5, "number": 2}
    assert layout_of(dataset, "windows", **common) == Windows(sample_count=3, length=4, seed=5, dataset=2)
    assert layout_of(dataset, "shifted", **common) == Windows(
        sample_count=3, length=4, is_shifted=True, seed=5, dataset=2
    )
    with IndexedWriter(tmp_path / "empty", dtype="<u2") as writer:
        writer.add_document([])
    with pytest.raises(DataError, match=rf"The dataset {tmp_path / 'empty'} holds no document\."):
        layout_of(IndexedDataset(tmp_path / "empty"), "documents", **common)
    assert best_fit([0, 0, 0], capacity=2).sample_count == 0


@pytest.mark.parametrize(
    ("tokens", "samples", "plan"),
    [
        (41, 4, EpochPlan(epochs=1, samples=4, samples_before_last=0, separate=False)),
        (41, 5, EpochPlan(epochs=2, samples=8, samples_before_last=4, separate=True)),  # 1 of 4 below 3
        (41, 6, EpochPlan(epochs=2, samples=8, samples_before_last=4, separate=True)),
        (41, 7, EpochPlan(epochs=2, samples=8, samples_before_last=4, separate=False)),  # 3 of 4
        (5, 3, EpochPlan(epochs=7, samples=3, samples_before_last=2, separate=False)),
    ],
)
def test_a_last_epoch_of_few_samples_is_shuffled_apart(tokens: int, samples: int, plan: EpochPlan) -> None:
    assert plan_epochs(tokens, samples=samples, sequence_length=10) == plan


def test_a_blend_tells_when_each_dataset_gives_which_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_order, "_BLOCK", 4)
    monkeypatch.setattr(megatron_order, "_BLOCKS_KEPT", 2)
    blend = Blend([2, 0, 1], 10)
    assert blend.datasets.tolist() == [0, 2, 0, 0, 2, 0, 0, 2, 0, 0]
    chosen = blend.datasets.tolist()
    for sample in range(11):
        expected = [chosen[:sample].count(dataset) for dataset in range(3)]
        assert blend.before(sample).tolist() == expected
    for dataset in range(3):
        places = [sample for sample, one in enumerate(chosen) if one == dataset]
        assert [blend.sample_of(dataset, turn) for turn in range(9)] == [*places, *[None] * (9 - len(places))]
    asked = np.array([9, 0, 4, 7, 2])
    which, turns = blend.locate(asked)
    assert which.tolist() == [0, 0, 2, 2, 0] and turns.tolist() == [6, 0, 1, 2, 1]
    assert [with_surplus(samples, share) for samples, share in ((100, 0.5), (1000, 0.2), (3, 0.34))] == [
        *(51, 201, 3)
    ]


def test_a_megatron_order_ends_where_its_samples_do() -> None:
    lengths = [np.full(6, 10, np.int32), np.full(3, 10, np.int32)]
    order = MegatronOrder(lengths, [2, 1], samples=12, sequence_length=5, seed=1)
    assert order.next_span(Position(consumed=8), 4) == (range(8, 12),)
    with pytest.raises(DataError) as refused:
        order.next_span(Position(consumed=9), 4)
    assert refused.value.message == (
        "The megatron order was made for 12 samples and ends at sample 12; the next batch would take those "
        "up to 13."
    )
    assert order.sample_of_turn(0, 7, below=99) == 11 and order.sample_of_turn(0, 7, below=11) is None
    assert order.sample_of_turn(0, 8, below=99) is None
    row = DocumentRow(lengths[1], samples=4, sequence_length=5, seed=1)
    with pytest.raises(DataError, match=r"A dataset of 5 samples is asked for its sample 5\."):
        row.shuffled(np.array([0, 5]))
    with pytest.raises(DataError, match="holds no token"):
        DocumentRow(np.zeros(3, np.int32), samples=1, sequence_length=5, seed=1)
    for seed in (-1, 1 << 32):
        with pytest.raises(DataError, match=rf"has no seed {seed}: its generator takes 0 to 4,294,967,295\."):
            MegatronOrder(lengths, [1, 1], samples=1, sequence_length=5, seed=seed)
    MegatronOrder(lengths, [1, 1], samples=1, sequence_length=5, seed=(1 << 32) - 1)


def section(*datasets: dict[str, Any], **settings: Any) -> DataSection:
    named = tuple(
        DatasetSection(path="p", **{"name": f"d{number}", **one}) for number, one in enumerate(datasets)
    )
    return DataSection(sequence_length=10, datasets=named, **settings)


def test_a_budget_beyond_a_dataset_is_told_with_the_epochs_that_it_takes() -> None:
    extents = [Extent(name="d0", tokens=400, windows=39)]
    with pytest.raises(DataError) as refused:
        claims(section({"tokens": 1001}), extents)
    assert refused.value.message == (
        "The dataset 'd0' has a budget of 1,001 tokens and holds 400: it is too small for it."
    )
    assert refused.value.remedy == "Lower its budget, or repeat it knowingly: epochs = 2.5."
    assert claims(section({"epochs": 2.5}), extents) == (Claim(name="d0", samples=98, weight=Fraction(1)),)


def test_of_many_datasets_five_are_named() -> None:
    for count, more in ((5, ""), (7, " and 2 more")):
        demand = Demand(
            claims=tuple(Claim(name=f"d{n}", samples=0, weight=Fraction(0)) for n in range(count)),
            samples=9, slack=0, sequence_length=1,
        )  # fmt: skip
        with pytest.raises(DataError) as refused:
            demand.shares()
        assert refused.value.message == f"The weights of 'd0', 'd1', 'd2', 'd3', 'd4'{more} sum to 0."


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('[{"dataset": "a", "weight": 2}, {"name": "b", "weight": 1, "ratio": 3}]', None),
        ('{"weights": [{"dataset": "a", "ratio": 2}, {"name": "b", "ratio": 3}]}', None),
        ('{"train": {"weights": {"a": 2, "b": 3}}}', None),
        ('{"train": 5, "a": 2, "b": 3}', "'train'"),
        ('{"a": true}', "entry 1 is not a name with a number"),
        ('[{"name": "a", "weight": 1}, {"name": 3, "weight": 1}]', "entry 2 is not a name with a number"),
        ('{"a": NaN}', "'a' has the weight nan"),
        ('{"a": Infinity}', "'a' has the weight inf"),
    ],
)
def test_a_file_of_weights_has_names_with_numbers(tmp_path: Path, content: str, told: str | None) -> None:
    path = tmp_path / "w.json"
    path.write_text(content)
    if told is None:
        assert read_weights(path) == {"a": 2, "b": 3}
    elif told == "'train'":
        assert read_weights(path) == {"train": 5, "a": 2, "b": 3}
    else:
        with pytest.raises(DataError) as refused:
            read_weights(path)
        assert refused.value.message == f"{path} cannot be read as weights: {told}."


def test_weights_of_a_file_stand_for_those_of_the_recipe_and_budgets_need_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "w.toml").write_text("[train]\nd1 = 4\n[valid]\nd0 = 1\nd1 = 0\n")
    data = section({"epochs": 1.0}, {"weight": 9.0}, weights_file="~/w.toml")
    extents = [Extent(name=name, tokens=100, windows=9) for name in ("d0", "d1")]
    assert claims(data, extents) == (
        Claim(name="d0", samples=9, weight=Fraction(0)),
        Claim(name="d1", samples=0, weight=Fraction(4)),
    )
    assert held_out_weights(data) == {"d0": 1, "d1": 0}
    plain = section({}, {"weight": 9.0})
    assert [claim.weight for claim in claims(plain, extents)] == [1, 9]


def test_a_split_of_three_parts_covers_all_documents() -> None:
    assert split_documents(10, (6, 3, 1)) == (range(0, 6), range(6, 9), range(9, 10))
    assert split_documents(10, (1,)) == (range(0, 10), range(10, 10), range(10, 10))
    assert split_documents(10, (1, 0, 1), exact=True) == (range(0, 5), range(5, 5), range(5, 10))
    assert split_documents(0, (1, 1)) == (range(0, 0),) * 3
