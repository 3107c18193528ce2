"""Weights, budgets and weights files: exact shares, and clear refusals."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.config.data import DataSection, DatasetSection
from bloomery.data.dataset_shares import (
    Claim,
    Demand,
    Extent,
    claims,
    held_out_weights,
    read_weights,
    split_documents,
)
from bloomery.errors import DataError


def section(*datasets: dict[str, object], **settings: object) -> DataSection:
    made = tuple(
        DatasetSection(path="p", **{"name": f"d{number}", **one})  # type: ignore[arg-type]  — as written
        for number, one in enumerate(datasets)
    )
    return DataSection(sequence_length=1, datasets=made, **settings)  # type: ignore[arg-type]


def found(data: DataSection, tokens: list[int], samples: int) -> list[Fraction]:
    extents = [
        Extent(name=one.name, tokens=held, windows=held)
        for one, held in zip(data.datasets, tokens, strict=True)
    ]
    demand = Demand(claims=claims(data, extents), samples=samples, slack=10, sequence_length=1)
    return list(demand.shares())


def test_weights_divide_what_budgets_leave() -> None:
    data = section({"tokens": 300}, {"epochs": 2.0}, {"weight": 3.0}, {"weight": 1.0})
    assert found(data, [500, 50, 9, 9], 1000) == [
        Fraction(300, 1000),
        Fraction(100, 1000),
        Fraction(450, 1000),
        Fraction(150, 1000),
    ]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50).filter(any), st.integers(1, 10**14))
def test_shares_of_weights_alone_do_not_depend_on_the_run(weights: list[float], run_tokens: int) -> None:
    data = section(*({"weight": weight} for weight in weights))
    got = found(data, [10] * len(weights), run_tokens)
    assert sum(got) == 1
    assert got == [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]


def test_budgets_alone_must_be_the_length_of_the_run() -> None:
    data = section({"epochs": 1.0}, {"epochs": 3.0})
    assert found(data, [400, 200], 1009) == [Fraction(2, 5), Fraction(3, 5)]
    with pytest.raises(DataError, match="give 1,000 tokens, and the run takes 1,300") as refused:
        found(data, [400, 200], 1300)
    assert "train.tokens = 1000" in refused.value.remedy


@pytest.mark.parametrize(
    ("datasets", "told"),
    [
        ([{"tokens": 600}, {}], "'d0' has a budget of 600 tokens and holds 500: it is too small"),
        ([{"epochs": 2.0}, {}], "take 1,000 tokens, and the run has 1,000: nothing is left"),
        ([{"weight": 0.0}, {"weight": 0.0}], "weights of 'd0', 'd1' sum to 0"),
    ],
)
def test_what_cannot_be_honoured_is_refused(datasets: list[dict[str, object]], told: str) -> None:
    with pytest.raises(DataError, match=told):
        found(section(*datasets), [500, 500], 1000)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("w.toml", "d0 = 3\nd1 = 0.5\n"),
        ("w.toml", "[weights]\nd0 = 3\nd1 = 0.5\n"),
        ("w.json", json.dumps({"d0": 3, "d1": 0.5})),
        ("w.json", json.dumps({"train": {"d0": 3, "d1": 0.5}, "validation": {"d0": 1}})),
        (
            "w.json",
            json.dumps([{"dataset_path": "d0", "ratio": 3}, {"dataset_path": "d1", "ratio": 0.5, "x": True}]),
        ),
        ("w.json", json.dumps([{"name": "d0", "weight": 3}, {"dataset": "d1", "weight": 0.5}])),
        ("w.json", json.dumps({"train": {"weights": {"d0": 3, "d1": 0.5}}, "weights": {"d0": 1}})),
    ],
)
def test_a_weights_file_may_be_a_table_or_a_catalogue(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert read_weights(path) == {"d0": Fraction(3), "d1": Fraction(1, 2)}
    data = section({}, {}, weights_file=str(path))
    assert found(data, [10, 10], 100) == [Fraction(6, 7), Fraction(1, 7)]
    with pytest.raises(DataError, match="gives no weight to 'd2'"):
        found(section({}, {}, {}, weights_file=str(path)), [10, 10, 10], 100)
    with pytest.raises(DataError, match=r"names what data\.datasets lacks: 'd1'"):
        found(section({}, weights_file=str(path)), [10], 100)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("w.toml", "d0 = ", "is not TOML"),
        ("w.json", "{", "is not JSON"),
        ("w.toml", "d0 = 'many'", "entry 1 is not a name with a number"),
        ("w.toml", "d0 = -1", "'d0' has the weight -1"),
        ("w.json", '[{"name": "a", "ratio": 1}, {"name": "a", "ratio": 2}]', "'a' stands in it twice"),
        ("w.json", "[3]", "entry 1 is not a name"),
        ("w.json", "3", "it holds 3, and no names"),
        ("w.json", "null", "it holds None, and no names"),
        ("w.json", '{"d0": 1' + "0" * 400 + "}", "'d0' has the weight 1000"),
        ("w.json", "[" * 100_000, "is not JSON: maximum recursion"),
        ("none.toml", None, "Cannot read data.weights_file"),
    ],
)
def test_a_weights_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, text: str | None, told: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=told):
        read_weights(tmp_path / name)


@given(st.integers(0, 10**9), st.lists(st.integers(0, 1000), max_size=3).filter(lambda p: not p or p[0] > 0))
def test_a_document_is_in_one_part_of_a_split(count: int, parts: list[int]) -> None:
    train, validation, test = split_documents(count, parts)
    assert (train.start, train.stop, validation.stop, test.stop) == (
        0,
        validation.start,
        test.start,
        count,
    )
    for part, share in zip(
        (train, validation, test), [*parts, 0, 0, 0] if parts else [1, 0, 0], strict=False
    ):
        assert abs(len(part) - count * Fraction(share, sum(parts) or 1)) <= 1


def test_budgets_alone_may_miss_the_run_by_the_slack_and_not_by_a_sample_more() -> None:
    data = section({"tokens": 300}, {"tokens": 100})
    assert found(data, [500, 500], 410) == [Fraction(3, 4), Fraction(1, 4)]
    with pytest.raises(DataError, match=r"train\.tokens = 400"):
        found(data, [500, 500], 411)
    extents = [Extent(name=dataset.name, tokens=500, windows=500) for dataset in data.datasets]
    longer = Demand(claims=claims(data, extents), samples=500, slack=10, sequence_length=1)
    assert longer.shares(given_before=[50, 0], samples=340) == (Fraction(5, 7), Fraction(2, 7))


def test_what_is_left_of_budgets_decides_who_replaces_skipped_samples() -> None:
    data = section({"tokens": 300}, {"tokens": 100})
    extents = [Extent(name=dataset.name, tokens=500, windows=500) for dataset in data.datasets]
    demand = Demand(claims=claims(data, extents), samples=400, slack=10, sequence_length=1)
    assert demand.shares(given_before=[290, 60], samples=50) == (Fraction(1, 5), Fraction(4, 5))
    assert demand.shares(given_before=[300, 100], samples=8, is_new=False) == (Fraction(3, 4), Fraction(1, 4))


@pytest.mark.parametrize(
    ("dataset", "tokens", "samples"),
    [
        ({"tokens": 1007}, 5000, 100),  # whole samples of ten tokens
        ({"tokens": 9}, 5000, 1),
        ({"tokens": 5000}, 5000, 499),  # no more than it has
        ({"epochs": 1.5}, 5000, 748),
        ({"epochs": 1e-9}, 5000, 1),
        ({"weight": 2.0}, 5000, 0),
    ],
)
def test_a_budget_is_counted_in_whole_samples(dataset: dict[str, object], tokens: int, samples: int) -> None:
    data = section(dataset, {})
    extents = [Extent(name=name, tokens=tokens, windows=(tokens - 1) // 10) for name in ("d0", "d1")]
    data = DataSection(sequence_length=10, datasets=data.datasets)
    first, _ = claims(data, extents)
    assert first.samples == samples and first.name == "d0"


def test_budgets_of_a_run_that_goes_on_are_less_what_was_given_and_never_less_than_that() -> None:
    data = section({"tokens": 300}, {"weight": 3.0}, {"weight": 1.0})
    extents = [Extent(name=dataset.name, tokens=500, windows=500) for dataset in data.datasets]
    demand = Demand(claims=claims(data, extents), samples=1000, slack=0, sequence_length=7)
    shares = demand.shares(given_before=[100, 250, 50], samples=600)
    assert shares == (Fraction(200, 600), Fraction(300, 600), Fraction(100, 600))
    with pytest.raises(DataError, match="has given 2,107 tokens, and its budget is 2,100 now"):
        demand.shares(given_before=[301], samples=600)
    assert demand.shares(given_before=[301], samples=600, is_new=False)[0] == 0
    assert demand.shares(given_before=[300], samples=600)[0] == 0, (
        "what it has given is all that it shall give"
    )
    with pytest.raises(DataError, match="yet take 1,400 tokens, and the run yet has 1,400"):
        demand.shares(given_before=[100], samples=200)
    assert demand.budgeted == (0,) and demand.digest
    alone = Demand(claims=demand.claims[1:], samples=1000, slack=0, sequence_length=7)
    assert (alone.budgeted, alone.digest) == ((), "")


def test_the_ratios_of_a_held_out_loss_are_those_of_the_split_for_validation(tmp_path: Path) -> None:
    path = tmp_path / "w.json"

    def ratios(content: object) -> dict[str, Fraction] | None:
        path.write_text(json.dumps(content))
        kept = (DatasetSection(path="p", name="kept"),)
        return held_out_weights(section({}, {}, weights_file=str(path), held_out_datasets=kept))

    assert held_out_weights(section({})) is None and ratios({"train": {"d0": 1, "d1": 2}}) is None
    for key in ("valid", "validation"):
        assert ratios({"train": {"d0": 1}, key: {"d0": 3, "kept": 0.5}}) == {"d0": 3, "kept": Fraction(1, 2)}
        assert ratios({key: [{"name": "d1", "ratio": 2}]}) == {"d1": 2} and ratios({key: 5}) is None
    assert ratios(["d0"]) is None, "a list has no splits"
    with pytest.raises(DataError, match="validates on what the recipe lacks: 'd7'"):
        ratios({"valid": {"d0": 1, "d7": 1}})
    with pytest.raises(DataError, match="sum to 0"):
        ratios({"valid": {"d0": 0, "kept": 0}})


@pytest.mark.parametrize(
    ("count", "parts", "exact", "ends"),
    [
        (10, [8, 1, 1], False, (8, 9, 10)),
        (10, [949, 50, 1], False, (9, 10, 10)),
        (5, [1, 1], True, (2, 5, 5)),  # two and a half, to the even one
        (7, [1, 1], True, (4, 7, 7)),
        (9, [], False, (9, 9, 9)),
        (100, [2, 1, 1], True, (50, 75, 100)),
    ],
)
def test_documents_are_split_in_order_at_rounded_ends(
    count: int, parts: list[int], exact: bool, ends: tuple[int, int, int]
) -> None:
    assert tuple(part.stop for part in split_documents(count, parts, exact=exact)) == ends


def test_what_a_dataset_is_too_small_for_is_told_with_the_epochs_that_come_to_it() -> None:
    with pytest.raises(DataError) as refused:
        found(section({"tokens": 750}, {}), [500, 500], 1000)
    assert refused.value.remedy == "Lower its budget, or repeat it knowingly: epochs = 1.5."


def test_of_many_datasets_five_are_named() -> None:
    for count, more in ((5, ""), (7, " and 2 more")):
        with pytest.raises(DataError) as refused:
            found(section(*[{"weight": 0.0}] * count), [9] * count, 10)
        assert refused.value.message == f"The weights of 'd0', 'd1', 'd2', 'd3', 'd4'{more} sum to 0."


def test_datasets_with_budgets_need_no_weight_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "w.toml").write_text("d2 = 5\n")
    data = section({"tokens": 300}, {"epochs": 2.0}, {}, weights_file=str(tmp_path / "w.toml"))
    assert found(data, [500, 50, 9], 1000) == [Fraction(300, 1000), Fraction(100, 1000), Fraction(600, 1000)]


def test_a_budget_below_what_was_given_is_told_with_what_would_do() -> None:
    demand = Demand(
        claims=(
            Claim(name="a", samples=30, weight=Fraction(1)),
            Claim(name="b", samples=0, weight=Fraction(2)),
        ),
        samples=100,
        slack=0,
        sequence_length=7,
    )
    with pytest.raises(DataError) as refused:
        demand.shares(given_before=[31], samples=60)
    assert refused.value.remedy == "Give it at least 217, or weight = 0 to have no more of it."


def test_demands_of_other_budgets_or_weights_have_other_digests_whatever_the_run() -> None:
    def digest(samples: int, weight: int, *, run: int = 100) -> str:
        first = Claim(name="a", samples=samples, weight=Fraction(1))
        second = Claim(name="b", samples=0, weight=Fraction(weight))
        return Demand(claims=(first, second), samples=run, slack=0, sequence_length=7).digest

    assert len({digest(30, 2), digest(31, 2), digest(30, 3)}) == 3
    assert digest(30, 2) == digest(30, 2, run=200)


def test_ratios_of_a_held_out_loss_are_taken_of_the_first_split_of_two(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"validation": {"d0": 1}, "valid": {"d1": 2}}))
    assert held_out_weights(section({}, {}, weights_file=str(path))) == {"d1": 2}
