"""Megatron's order, array for array against the published algorithm written out slowly."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.data import megatron_order, native_kernels, storage
from bloomery.data.megatron_order import Blend, DocumentRow, MegatronOrder, plan_epochs
from bloomery.data.position import Position, SampleShare
from bloomery.errors import DataError

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture(params=["native", "numpy"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(native_kernels, "_functions", dict)
    elif not native_kernels._functions():
        pytest.skip("the native library is not built")
    return str(request.param)


def slow_row(lengths: list[int], samples: int, length: int, seed: int) -> Arrays:
    """(documents, where each sample begins, in which order samples come): lists and RandomState alone."""
    tokens, random = sum(lengths), np.random.RandomState(seed)
    epochs = 1
    while epochs * tokens < samples * length + 1:
        epochs += 1
    before_last = ((epochs - 1) * tokens - 1) // length
    separate = epochs > 1 and samples - before_last < int(0.8 * ((tokens - 1) // length))
    ids = list(range(len(lengths)))
    if separate:
        most = np.array(ids * (epochs - 1), dtype=np.int32)
        last = np.array(ids, dtype=np.int32)
        random.shuffle(most)
        random.shuffle(last)
        documents = np.concatenate([most, last])
    else:
        documents = np.array(ids * epochs, dtype=np.int32)
        random.shuffle(documents)
    count = (epochs * tokens - 1) // length
    owners = [(int(one), inside) for one in documents for inside in range(lengths[one])]
    starts = np.array([owners[sample * length] for sample in range(count)]).reshape(-1, 2)
    order = np.arange(count)
    if separate:
        random.shuffle(order[:before_last])
        random.shuffle(order[before_last:])
    else:
        random.shuffle(order)
    return documents, starts, order


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda drawn: sum(drawn) > 1),
    samples=st.integers(1, 60),
    length=st.integers(2, 17),
    seed=st.integers(0, 2**32 - 1),
)
def test_each_array_is_that_of_the_algorithm(
    lengths: list[int], samples: int, length: int, seed: int
) -> None:
    documents, starts, order = slow_row(lengths, samples, length, seed)
    row = DocumentRow(np.array(lengths, np.int32), samples=samples, sequence_length=length, seed=seed)
    assert row.order.tolist() == documents.tolist()
    assert row.shuffled(np.arange(row.sample_count)).tolist() == order.tolist()
    text = [(int(one), inside) for one in documents for inside in range(lengths[one])]
    for sample in range(row.sample_count):
        found = [(d, first + i) for d, first, count in row.pieces(sample) for i in range(count)]
        assert found[0] == tuple(starts[sample])
        assert found == text[sample * length : sample * length + length + 1]


def test_native_and_numpy_agree_on_many_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native_kernels._functions():
        pytest.skip("the native library is not built")
    lengths = np.random.default_rng(3).integers(0, 3000, 20_000).astype(np.int32)
    weights = np.random.default_rng(4).random(46)

    def arrays() -> tuple[np.ndarray, ...]:
        row = DocumentRow(lengths, samples=40_000, sequence_length=1024, seed=77)
        return row.order, row.ends, row.shuffled(np.arange(row.sample_count)), Blend(weights, 3000).datasets

    quick = arrays()
    monkeypatch.setattr(native_kernels, "_functions", dict)
    for one, other in zip(quick, arrays(), strict=True):
        assert np.array_equal(one, other)


def test_what_is_kept_fits_sixteen_bytes_a_document_and_eight_a_sample() -> None:
    lengths = np.full(10_000, 700, dtype=np.int32)
    order = MegatronOrder([lengths, lengths], [0.5, 0.5], samples=6000, sequence_length=1000, seed=1)
    assert order.blend is not None
    for row in order.rows:
        assert row.nbytes <= 16 * row.order.size + 8 * row.sample_count
    per_sample = order.blend.datasets.nbytes / order.samples + 4
    assert per_sample <= 8


def test_epochs_are_exact_where_float32_is_not() -> None:
    tokens, length = 10**12 + 7, 2048
    per_epoch = (tokens - 1) // length
    for samples in (per_epoch, per_epoch + 1, 3 * tokens // length, 10 * tokens // length + 1):
        plan = plan_epochs(tokens, samples=samples, sequence_length=length)
        assert plan.epochs == -(-(samples * length + 1) // tokens)
        assert (plan.epochs - 1) * tokens < samples * length + 1 <= plan.epochs * tokens
        assert plan.samples >= samples


def test_each_sample_of_a_blend_is_given_by_the_dataset_furthest_behind(either_way: str) -> None:
    weights = [0.61, 0.2, 0.19, 1e-3]
    order = MegatronOrder([np.full(50, 40, np.int32)] * 4, weights, samples=2000, sequence_length=16, seed=5)
    assert order.blend is not None
    shares = order.blend.weights
    counts = [0] * 4
    datasets, _ = order.locate((range(2000),))
    for sample, dataset in enumerate(datasets.tolist()):
        behind = [float(share * max(sample, 1) - count) for share, count in zip(shares, counts, strict=True)]
        assert dataset == behind.index(max(behind))
        counts[dataset] += 1
    assert order.given_before(2000).tolist() == counts
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - Fraction(share) * 2000) < 2


def test_a_blend_takes_each_datasets_samples_in_its_own_order() -> None:
    lengths = [np.full(300, 40, np.int32), np.full(20, 40, np.int32)]
    order = MegatronOrder(lengths, [0.9, 0.1], samples=700, sequence_length=16, seed=5)
    datasets, found = order.locate((range(700),))
    for number, row in enumerate(order.rows):
        taken = found[datasets == number]
        assert taken.tolist() == row.shuffled(np.arange(taken.size)).tolist()
    some = np.array([3, 699, 12, 500])
    assert order.locate_samples(some)[1].tolist() == found[some].tolist()


def test_the_order_ends_and_says_so() -> None:
    order = MegatronOrder([np.full(5, 40, np.int32)], None, samples=6, sequence_length=16, seed=5)

    assert order.next_span(Position(), 8) == (range(8),)  # what the epoch holds may be used
    with pytest.raises(DataError, match=r"made for 6 samples and ends at sample 12"):
        order.next_span(Position(consumed=8), 8)


@pytest.mark.parametrize(
    ("weights", "seed", "told"),
    [
        ([0.0, 0.0], 1, "give no mixture"),
        ([float("nan"), 1.0], 1, "give no mixture"),
        ([1, 1], -1, "no seed"),
    ],
)
def test_what_cannot_be_ordered_is_refused(weights: list[float], seed: int, told: str) -> None:
    with pytest.raises(DataError, match=told):
        MegatronOrder([np.full(5, 40, np.int32)] * 2, weights, samples=6, sequence_length=16, seed=seed)


def test_one_dataset_with_a_weight_is_a_blend_since_the_second_rule() -> None:
    def order(weights: list[float] | None, rule: int) -> MegatronOrder:
        lengths = [np.full(50, 40, np.int32)]
        return MegatronOrder(lengths, weights, samples=20, sequence_length=16, seed=5, rule=rule)

    assert [order([1.0], rule).blend is not None for rule in (1, 2)] == [False, True]
    assert order(None, 2).blend is None


@pytest.fixture
def keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "AT_LEAST_BYTES", 1)


def a_row(directory: Path | None, *, seed: int = 3) -> DocumentRow:
    lengths = np.random.default_rng(1).integers(1, 90, 5000, dtype=np.int32)
    return DocumentRow(lengths, samples=40_000, sequence_length=16, seed=seed, kept_in=directory)


def same(first: DocumentRow, second: DocumentRow) -> bool:
    turns = np.arange(first.sample_count)
    return (
        np.array_equal(first.order, second.order)
        and np.array_equal(first.ends, second.ends)
        and np.array_equal(first.shuffled(turns), second.shuffled(turns))
    )


@pytest.mark.usefixtures("keeps_all")
def test_one_process_computes_a_row_and_the_others_map_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, either_way: str
) -> None:
    computed = []
    fill = megatron_order._fill_row

    def watched(*arguments: Any) -> None:
        computed.append(arguments)
        fill(*arguments)

    monkeypatch.setattr(megatron_order, "_fill_row", watched)
    plain = a_row(None)
    first, second = a_row(tmp_path), a_row(tmp_path)
    assert same(plain, first) and same(plain, second) and len(computed) == 2
    assert isinstance(second.ends, np.memmap) and not second.ends.flags.writeable
    (path,) = tmp_path.glob("*.arrays")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert same(plain, a_row(tmp_path)) and len(computed) == 3, "a damaged file is made again"
    assert not same(plain, a_row(tmp_path, seed=4)) and len(list(tmp_path.glob("*.arrays"))) == 2
    for seed in range(5, 9):
        a_row(tmp_path, seed=seed)
    assert len(list(tmp_path.glob("*.arrays"))) == len(list(tmp_path.glob("*.json"))) == 4


@pytest.mark.usefixtures("keeps_all")
def test_a_row_that_is_kept_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    lengths = np.full(1_000_000, 20, np.int32)
    tracemalloc.start()
    row = DocumentRow(lengths, samples=900_000, sequence_length=20, seed=1, kept_in=tmp_path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert row.nbytes > 15_000_000
    assert peak_bytes < 4_000_000


@pytest.mark.usefixtures("keeps_all")
def test_a_place_that_cannot_keep_a_row_is_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "orders").write_text("a file, not a directory")
    assert same(a_row(None), a_row(tmp_path / "orders")) and "in memory" in caplog.text


def test_a_single_dataset_gives_no_sample_behind_the_end_of_its_order() -> None:
    order = MegatronOrder([np.full(9, 20, np.int32)], None, samples=3, sequence_length=20, seed=1)
    assert order.rows[0].sample_count > 4 > order.samples
    turns = [order.sample_of_turn(0, turn, below=100) for turn in range(5)]
    assert turns == [0, 1, 2, None, None] and order.sample_of_turn(0, 1, below=1) is None


def test_a_blend_has_given_all_that_it_has_at_any_place_behind_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(megatron_order, "_BLOCK", 2)
    blend = megatron_order.Blend([1.0, 1.0], 4)
    assert [blend.before(sample).tolist() for sample in (3, 4, 5, 9)] == [[2, 1], [2, 2], [2, 2], [2, 2]]


@pytest.mark.usefixtures("keeps_all")
def test_an_order_by_another_rule_is_of_the_same_datasets_and_keeps_its_rows_where_they_are(
    tmp_path: Path,
) -> None:
    lengths = [np.full(9, 20, np.int32), np.full(5, 30, np.int32)]
    order = MegatronOrder(
        lengths, [3.0, 1.0], samples=12, sequence_length=20, seed=4, kept_in=[tmp_path / "a", tmp_path / "b"]
    )
    earlier = order.by_rule(1)
    assert earlier.samples == 12 and all(isinstance(row.ends, np.memmap) for row in earlier.rows)
    assert all(
        np.array_equal(one.order, other.order) for one, other in zip(order.rows, earlier.rows, strict=True)
    )
    assert sorted(path.parent.name for path in tmp_path.rglob("*.arrays")) == ["a", "b"]


def test_a_peer_takes_from_the_order_what_its_lease_holds_alone() -> None:
    order = MegatronOrder([np.full(9, 40, np.int32)], None, samples=20, sequence_length=16, seed=5)
    position, share = Position(consumed=2, holes=(range(2, 10),)), SampleShare(lease=(range(6, 10),))
    assert order.next_span(position, 3, share) == (range(6, 9),)
    assert order.next_span(position, 3) == (range(2, 5),)
