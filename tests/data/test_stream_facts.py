"""What a stream tells of itself: rows of datasets, its identity to the letter, and where orders are kept."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from bloomery.config.data import DataSection
from bloomery.data import storage
from bloomery.data.dataset_shares import Claim, Demand
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.order import Order
from bloomery.data.sample_layout import Packs, Windows
from bloomery.data.stream import (
    DatasetRow,
    SampleStream,
    begin_stream,
    dataset_rows,
    epoch_ends,
    group_rows,
    layouts_of,
    places_of_orders,
    stream_identity,
)
from bloomery.errors import DataError

LENGTH = 16


def pair(prefix: Path, *, tokens: int = 2000, step: int = 1) -> IndexedDataset:
    with IndexedWriter(prefix, dtype="<u2") as writer:
        writer.add_documents(np.arange(tokens) * step % 1000, np.full(tokens // 50, 50))
    return IndexedDataset(prefix)


def demand(*weights: int, samples: int = 100) -> Demand:
    claims = tuple(
        Claim(name=f"d{number}", samples=0, weight=Fraction(weight)) for number, weight in enumerate(weights)
    )
    return Demand(claims=claims, samples=samples, slack=8, sequence_length=LENGTH)


def stream_of(
    datasets: list[IndexedDataset], *weights: int, seed: int = 1, samples: int = 100, **settings: object
) -> SampleStream:
    section = DataSection(sources=("x",), sequence_length=LENGTH, **settings)  # type: ignore[arg-type]
    return begin_stream(section, datasets, demand(*weights), seed=seed, samples=samples)


@pytest.fixture
def datasets(tmp_path: Path) -> list[IndexedDataset]:
    """Of 124 and 12 samples."""
    return [pair(tmp_path / "large"), pair(tmp_path / "small", tokens=200, step=3)]


def test_each_row_tells_what_its_dataset_gives_to_a_run(datasets: list[IndexedDataset]) -> None:
    stream = stream_of(datasets, 3, 1)
    rows = dataset_rows(
        stream,
        names=("large", "small"),
        groups=("web", ""),
        tokens=(2000, 200),
        samples=100,
        step_of=lambda samples: samples * 10,
    )
    ends = dict(epoch_ends(stream.order, below=100))
    assert list(ends) == [1] and 45 <= ends[1] <= 49
    assert rows == [
        DatasetRow(
            name="large", group="web", tokens=2000, wanted=0.75, delivered=0.75, epochs=0.6,
            first_epoch_step=None,
        ),
        DatasetRow(
            name="small", group="", tokens=200, wanted=0.25, delivered=0.25, epochs=2.0,
            first_epoch_step=ends[1] * 10,
        ),
    ]  # fmt: skip
    (web,) = group_rows(rows)
    assert web == DatasetRow(
        name="web", group="", tokens=2000, wanted=0.75, delivered=0.75, epochs=0.6, first_epoch_step=None
    )


def test_an_epoch_of_packed_documents_is_one_of_their_samples(tmp_path: Path) -> None:
    """Documents that fill half of their samples and one token more leave the rest of each empty."""
    with IndexedWriter(tmp_path / "packed", dtype="<u2") as writer:
        for _ in range(12):
            writer.add_document([1] * (LENGTH // 2 + 1))
    packed = IndexedDataset(tmp_path / "packed")
    stream = stream_of([packed], 1, samples=24, packing="documents", mask_documents=True)
    (row,) = dataset_rows(
        stream, names=("packed",), groups=("",), tokens=(packed.token_count,),
        samples=24, step_of=int,
    )  # fmt: skip
    assert (row.epochs, row.first_epoch_step) == (2.0, 12)


def test_rows_tell_of_the_mixture_in_force_and_of_all_that_was_given(datasets: list[IndexedDataset]) -> None:
    stream = stream_of(datasets, 1, 0).demanding(demand(1, 4), at=50, left=50)
    large, small = dataset_rows(
        stream,
        names=("large", "small"),
        groups=("", ""),
        tokens=(2000, 200),
        samples=100,
        step_of=int,
    )
    assert (large.wanted, large.delivered) == (pytest.approx(0.2), 0.6)
    assert (small.wanted, small.delivered, small.epochs) == (pytest.approx(0.8), 0.4, 3.2)


def test_the_identity_of_a_stream_is_to_the_letter_what_other_machines_compute(
    datasets: list[IndexedDataset], tmp_path: Path
) -> None:
    """Digests of the first version: a machine with another one would take no part in the run."""
    long = pair(tmp_path / "long", tokens=300_000)  # more than the pieces of it that are hashed
    named = {"large": datasets[0], "long": long}
    stream = stream_of([*named.values()], 3, 1, seed=7)
    assert stream_identity(stream, named, text="of the text") == IDENTITY
    of_one = {"the dataset 'large'", "the order of the samples", "the text and its tokenizer"}
    assert stream_identity(stream_of(datasets[:1], 1), {"large": datasets[0]}, text="t").keys() == of_one


IDENTITY = {
    "the dataset 'large'": "2,000 tokens in 40 documents, 761c920d1ad8a741",
    "the dataset 'long'": "300,000 tokens in 6,000 documents, 2090762e51561bc2",
    "the order of the samples": "e028dd4bf6f42e10",
    "the text and its tokenizer": "of the text",
    "the rule of the mixture": "3",
}


def test_the_order_is_told_apart_by_packing_names_and_what_is_asked(datasets: list[IndexedDataset]) -> None:
    def order(stream: SampleStream, *names: str) -> str:
        named = dict(zip(names or ("a", "b"), datasets, strict=True))
        return stream_identity(stream, named, text="t")["the order of the samples"]

    plain, shifted, packed = (
        stream_of(datasets, 3, 1, packing=packing) for packing in ("windows", "shifted", "documents")
    )
    claims = tuple(
        Claim(name=name, samples=count, weight=Fraction(1)) for name, count in (("a", 9), ("b", 0))
    )
    budgets = Demand(claims=claims, samples=100, slack=8, sequence_length=LENGTH)
    section = DataSection(sources=("x",), sequence_length=LENGTH)
    budgeted = begin_stream(section, datasets, budgets, seed=1, samples=100)
    megatron = stream_of(datasets, 3, 1, order="megatron")
    streams = [plain, shifted, packed, budgeted, megatron, stream_of(datasets, 3, 1, seed=2)]
    assert len({*map(order, streams), order(plain, "b", "a")}) == 7
    assert order(plain) == order(stream_of(datasets, 3, 1))


def test_more_datasets_than_two_hundred_are_named_by_one_hash_of_all(datasets: list[IndexedDataset]) -> None:
    stream = stream_of(datasets[1:], 1)
    some, many, other = (
        stream_identity(stream, {f"{number:03}{more}": datasets[1] for number in range(count)}, text="t")
        for count, more in ((200, ""), (201, ""), (201, "x"))
    )
    assert len([key for key in some if key.startswith("the dataset '")]) == 200
    keys = ["the 201 datasets", "the order of the samples", "the text and its tokenizer"]
    assert sorted(key for key in many if "rule" not in key) == keys
    assert many["the 201 datasets"] != other["the 201 datasets"]


@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("kind", ["megatron", "documents"])
def test_an_order_is_kept_beside_its_dataset_or_where_the_recipe_says(
    datasets: list[IndexedDataset],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_cache: bool,
    kind: str,
) -> None:
    monkeypatch.setattr(storage, "AT_LEAST_BYTES", 1)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    settings = {"order": "megatron"} if kind == "megatron" else {"packing": "documents"}
    stream_of(datasets, 1, 1, cache="~/cache" if has_cache else "", **settings)
    place = tmp_path / "home" / "cache" if has_cache else tmp_path
    kept = sorted(path.parent.relative_to(place).as_posix() for path in tmp_path.rglob("*.arrays"))
    assert kept == ["orders/large", "orders/small"]


def test_datasets_of_one_name_keep_their_orders_apart(tmp_path: Path) -> None:
    datasets = [pair(tmp_path / place) for place in ("de/text", "fr/text", "fr/code", "de/text")]
    section = DataSection(sources=("x",), sequence_length=LENGTH)
    beside = places_of_orders(section, datasets)
    assert beside == [dataset.prefix.parent / "orders" / dataset.prefix.name for dataset in datasets]
    kept = places_of_orders(replace(section, cache=str(tmp_path / "cache")), datasets)
    german, french, code, again = kept
    assert len({german, french, code}) == 3 and again == german
    assert code == tmp_path / "cache" / "orders" / "code"
    assert french.parent == code.parent and french.name.startswith("text-")


def test_a_stream_holds_the_layouts_of_its_datasets(datasets: list[IndexedDataset]) -> None:
    windows = stream_of(datasets, 1, 1)
    assert windows.layouts == (
        Windows(sample_count=124, length=LENGTH, dataset=0, seed=1),
        Windows(sample_count=12, length=LENGTH, dataset=1, seed=1),
    )
    assert (windows.windows, windows.packing, windows.seed) == ((124, 12), "windows", 1)
    shifted = stream_of(datasets, 1, 1, packing="shifted", seed=4)
    assert shifted.layouts == (
        Windows(sample_count=124, length=LENGTH, is_shifted=True, dataset=0, seed=4),
        Windows(sample_count=11, length=LENGTH, is_shifted=True, dataset=1, seed=4),
    )
    assert (shifted.windows, shifted.packing) == ((124, 11), "shifted")
    section = DataSection(sources=("x",), sequence_length=LENGTH, packing="documents")
    packs = layouts_of(section, datasets, seed=3)
    assert all(isinstance(layout, Packs) for layout in packs)
    given = begin_stream(section, datasets, demand(1, 1), seed=3, samples=100, layouts=packs)
    assert given.layouts == tuple(packs) and given.windows == tuple(one.sample_count for one in packs)
    assert given.order.windows == given.windows


def test_megatrons_order_of_a_checkpoint_goes_on_by_its_rule_or_is_refused(
    datasets: list[IndexedDataset],
) -> None:
    today = stream_of(datasets, 3, 1, order="megatron")
    assert isinstance(today.order, MegatronOrder) and today.order.samples == 100
    stored = today.to_json()
    assert stored["megatron"].startswith("100 ") and len(stored["mixtures"]) == 1
    assert today.following(stored, at=10, left=90) is today
    by_rule_1 = today.order.by_rule(1)
    earlier = replace(today, order=by_rule_1).to_json()
    if earlier["megatron"] != stored["megatron"]:
        resumed = today.following(earlier, at=10, left=90)
        assert resumed.to_json()["megatron"] == earlier["megatron"]
    other = stream_of(datasets, 3, 1, order="megatron", samples=90)
    assert other.to_json()["megatron"].startswith("90 ")
    with pytest.raises(DataError) as refused:
        today.following(other.to_json(), at=10, left=90)
    assert "than today's, which is made for 100 samples." in refused.value.message
    assert "set data.order_samples to what it was made for, 90. The" in refused.value.remedy
    with pytest.raises(DataError) as refused:
        today.following({"mixtures": stored["mixtures"]}, at=10, left=90)
    assert "to what it was made for. The" in refused.value.remedy
    assert "megatron" not in stream_of(datasets, 3, 1).to_json()
    alone = stream_of(datasets[:1], 1, order="megatron")
    assert isinstance(alone.order, MegatronOrder) and alone.order.blend is None
    assert alone.following(alone.to_json(), at=10, left=90) is alone


def test_weights_are_those_of_megatron_even_where_they_are_equal(datasets: list[IndexedDataset]) -> None:
    other = stream_of([datasets[1], datasets[1]], 1, 1, order="megatron")
    weighed = stream_of([datasets[1], datasets[1]], 5, 1, order="megatron")
    assert other.to_json()["megatron"] != weighed.to_json()["megatron"]
    assert isinstance(weighed.order, MegatronOrder) and weighed.order.blend is not None
    assert weighed.order.given_before(60).tolist() == [50, 10]


def test_a_block_is_laid_out_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    order, locked = Order([50, 50], [1.0, 1.0], 3), list[bool]()
    lay_out = order._quotas.samples_of  # type: ignore[union-attr]

    def watched(block: int) -> object:
        locked.append(order._lock.locked())
        return lay_out(block)

    monkeypatch.setattr(order._quotas, "samples_of", watched)
    for _ in range(2):
        order.locate_samples(np.arange(9))
    assert locked == [True], "it is kept: a second thread finds it"


def test_what_was_made_for_other_datasets_is_no_order() -> None:
    with pytest.raises(ValueError, match="2 datasets and 1 weights"):
        Order([5, 5], [1.0], 1)
    with pytest.raises(ValueError, match="2 datasets and no weights"):
        MegatronOrder([np.ones(5, np.int32)] * 2, None, samples=3, sequence_length=2, seed=1)


def test_a_file_of_weights_is_a_weight_of_a_single_dataset_too(datasets: list[IndexedDataset]) -> None:
    given = stream_of(datasets[:1], 1, order="megatron", weights_file="weights.json")
    assert isinstance(given.order, MegatronOrder) and given.order.blend is not None
