"""Reading samples: both ways equal a slow gather of tokens kept in lists."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from bloomery.data import native_kernels
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.megatron_order import MegatronOrder
from bloomery.data.order import Order
from bloomery.data.pair_files import bin_path
from bloomery.data.sample_layout import Packs
from bloomery.data_loader.reading import Samples, _groups, read_rows
from bloomery.errors import DataError

LENGTH = 11


@pytest.fixture(params=["native", "numpy"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(native_kernels, "_functions", dict)
    elif not native_kernels._functions():
        pytest.skip("the native library is not built")


def documents(seed: int, *, largest: int = 120) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, largest, size).tolist() for size in draw.integers(0, 40, size=70)]


def written(prefix: Path, texts: list[list[int]], dtype: str = "<u2") -> IndexedDataset:
    with IndexedWriter(prefix, dtype=dtype) as writer:
        for text in texts:
            writer.add_document(text)
    return IndexedDataset(prefix)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", ["<u1", "<i1", "<i2", "<u2", "<i4", "<i8"])
def test_windows_of_every_type_are_those_of_the_file(tmp_path: Path, dtype: str) -> None:
    texts = documents(1)
    dataset, tokens = written(tmp_path / "pair", texts, dtype), list(chain(*texts))
    order = Order([dataset.window_count(LENGTH)], [1.0], 4)
    samples = np.array([5, 0, 77, 3, 76])
    inputs, targets = Samples(order, [dataset], sequence_length=LENGTH).read(samples)
    _, windows = order.locate_samples(samples)
    for row, window in enumerate(windows.tolist()):
        expected = tokens[window * LENGTH : window * LENGTH + LENGTH + 1]
        assert inputs[row].tolist() == expected[:-1] and targets[row].tolist() == expected[1:]


@pytest.mark.usefixtures("either_way")
def test_megatrons_samples_are_those_of_its_row_of_documents(tmp_path: Path) -> None:
    texts = [documents(1), documents(2)]
    datasets = [written(tmp_path / str(number), one) for number, one in enumerate(texts)]
    order = MegatronOrder(
        [dataset.sequence_lengths for dataset in datasets],
        [0.7, 0.3],
        samples=300,  # more than an epoch of the first
        sequence_length=LENGTH,
        seed=9,
    )
    samples = np.arange(300)
    inputs, targets = Samples(order, datasets, sequence_length=LENGTH).read(samples)
    which, numbers = order.locate_samples(samples)
    kept = [[text for text in one if text] for one in texts]  # an empty document has no sequence
    rows = [[token for number in order.rows[i].order.tolist() for token in kept[i][number]] for i in range(2)]
    for row, (dataset, number) in enumerate(zip(which.tolist(), numbers.tolist(), strict=True)):
        expected = rows[dataset][number * LENGTH : number * LENGTH + LENGTH + 1]
        assert inputs[row].tolist() == expected[:-1] and targets[row].tolist() == expected[1:]


@pytest.mark.usefixtures("either_way")
def test_a_part_of_a_dataset_reads_its_own_documents_only(tmp_path: Path) -> None:
    texts = documents(3)
    whole = written(tmp_path / "pair", texts)
    part = whole.part(range(20, 55)).part(range(3, 30))
    kept = texts[23:50]
    tokens = list(chain(*kept))
    assert part.token_count == len(tokens) and part.document_count == 27
    assert [part.document(number).tolist() for number in range(27)] == kept
    assert part.sequence_lengths.tolist() == [len(text) for text in kept if text]
    order = Order([part.window_count(LENGTH)], [1.0], 4)
    inputs, _ = Samples(order, [part], sequence_length=LENGTH).read(np.arange(order.windows[0]))
    _, windows = order.locate_samples(np.arange(order.windows[0]))
    for row, window in enumerate(windows.tolist()):
        assert inputs[row].tolist() == tokens[window * LENGTH : (window + 1) * LENGTH]
    megatron = MegatronOrder([part.sequence_lengths], None, samples=9, sequence_length=LENGTH, seed=9)
    inputs, _ = Samples(megatron, [part], sequence_length=LENGTH).read(np.arange(9))
    own = [text for text in kept if text]
    row = [token for number in megatron.rows[0].order.tolist() for token in own[number]]
    _, numbers = megatron.locate_samples(np.arange(9))
    for read, number in zip(inputs.tolist(), numbers.tolist(), strict=True):
        assert read == row[number * LENGTH : (number + 1) * LENGTH]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(("bad", "told"), [(121, "token id 121"), (-1, "a negative token id")])
def test_an_id_that_no_token_has_is_refused_with_its_place(tmp_path: Path, bad: int, told: str) -> None:
    dataset = written(tmp_path / "pair", [[7] * 30, [7] * 5 + [bad] + [7] * 40], "<i4")
    windows = Order([dataset.window_count(LENGTH)], [1.0], 4)
    with pytest.raises(DataError, match=rf"pair has {told} within tokens 33 to 44, .* ends at 120"):
        Samples(windows, [dataset], sequence_length=LENGTH, vocabulary_size=121).read(np.arange(6))
    shuffled = MegatronOrder([dataset.sequence_lengths], None, samples=6, sequence_length=LENGTH, seed=9)
    with pytest.raises(DataError, match=rf"{told} within the sample that begins with token .* of document"):
        Samples(shuffled, [dataset], sequence_length=LENGTH, vocabulary_size=121).read(np.arange(6))


@pytest.mark.usefixtures("either_way")
def test_a_refused_sample_of_several_documents_is_named_by_its_first_token(tmp_path: Path) -> None:
    size, count = LENGTH - 3, 12  # so that each sample goes on in other documents
    dataset = written(tmp_path / "pair", [[7] * (size - 1) + [121]] * count)
    order = MegatronOrder([dataset.sequence_lengths], None, samples=8, sequence_length=LENGTH, seed=9)
    _, numbers = order.locate_samples(np.arange(8))
    samples = Samples(order, [dataset], sequence_length=LENGTH, vocabulary_size=121)
    for sample, number in enumerate(numbers.tolist()):
        place, first = divmod(number * LENGTH, size)
        begins = f"begins with token {first} of document {order.rows[0].order[place]},"
        with pytest.raises(DataError, match=begins):
            samples.read(np.array([sample]))


@pytest.mark.usefixtures("either_way")
def test_samples_are_the_same_from_memory_and_from_the_disk(tmp_path: Path) -> None:
    texts = [list(range(1000)) for _ in range(400)]
    dataset = written(tmp_path / "pair", texts)
    windows = Order([dataset.window_count(LENGTH)], [1.0], 4)
    shuffled = MegatronOrder([dataset.sequence_lengths], None, samples=200, sequence_length=LENGTH, seed=9)
    from_memory = [
        Samples(order, [dataset], sequence_length=LENGTH).read(np.arange(200))
        for order in (windows, shuffled)
    ]
    del dataset
    with bin_path(tmp_path / "pair").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for order, expected in zip((windows, shuffled), from_memory, strict=True):
        read = Samples(order, [IndexedDataset(tmp_path / "pair")], sequence_length=LENGTH).read(
            np.arange(200)
        )
        assert np.array_equal(read, expected)


@pytest.mark.usefixtures("either_way")
def test_a_sample_beyond_the_file_is_never_read(tmp_path: Path) -> None:
    dataset = written(tmp_path / "pair", [[7] * 30])
    read = np.empty((1, LENGTH + 1), dtype=np.int32)
    for start in (-1, 19, 10**9):
        with pytest.raises(IndexError, match="of 30"):
            read_rows(dataset, np.array([start]), np.array([0]), read)
    assert read_rows(dataset, np.array([18]), np.array([0]), read).tolist() == [7]


@pytest.mark.usefixtures("either_way")
def test_of_no_samples_nothing_is_read(tmp_path: Path) -> None:
    dataset = written(tmp_path / "pair", [[7] * 30])
    samples = Samples(Order([2], [1.0], 4), [dataset], sequence_length=LENGTH)
    none = np.empty(0, dtype=np.int64)
    assert [part.shape for part in samples.read(none)] == [(0, LENGTH)] * 2 and samples.counted(none) == 0


@pytest.mark.parametrize("kind", ["bloomery", "megatron", "packs"])
def test_a_dataset_is_named_before_it_is_read(tmp_path: Path, kind: str) -> None:
    datasets = [written(tmp_path / name, documents(seed)) for seed, name in enumerate("ab")]
    order: Order | MegatronOrder = Order([one.window_count(LENGTH) for one in datasets], [0.5, 0.5], 4)
    if kind == "megatron":
        lengths = [one.sequence_lengths for one in datasets]
        order = MegatronOrder(lengths, [0.5, 0.5], samples=90, sequence_length=LENGTH, seed=4)
    layouts = [Packs(one, length=LENGTH) for one in datasets] if kind == "packs" else []
    if layouts:
        order = Order([layout.sample_count for layout in layouts], [0.5, 0.5], 4)
    named: list[str] = []
    Samples(order, datasets, sequence_length=LENGTH, layouts=layouts).read(
        np.arange(40), beginning=named.append
    )
    assert sorted(named) == [str(tmp_path / name) for name in "ab"]


def test_samples_are_read_together_as_far_as_their_blocks_may_be_held() -> None:
    groups = [(group.start, group.stop) for group in _groups([2, 2, 1, 2, 1, 9, 1, 1], most=4)]
    assert groups == [(0, 2), (2, 5), (5, 6), (6, 8)]
    assert list(_groups([], most=4)) == []
