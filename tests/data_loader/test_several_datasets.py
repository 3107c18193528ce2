"""Samples of several datasets at once: each token of its own, counted with its own answers, and checked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bloomery.data import native_kernels
from bloomery.data.answers import AnswerTokens
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.megatron_order import DocumentRow
from bloomery.data.order import Order
from bloomery.data.sample_layout import Layout, Packs, Windows
from bloomery.data_loader import reading
from bloomery.data_loader.packs import IGNORED, empty_packs, read_packs
from bloomery.data_loader.reading import Samples, _byte_ranges, count_bigrams, read_rows
from bloomery.errors import DataError

LENGTH, EOD = 8, 0


@pytest.fixture(params=["native", "numpy"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(native_kernels, "_functions", dict)
    elif not native_kernels._functions():
        pytest.skip("the native library is not built")


def written(prefix: Path, first: int, documents: list[tuple[int, int]], dtype: str = "<u2") -> IndexedDataset:
    """Documents of a prompt and an answer; tokens count up from `first`, so that each tells its place."""
    sizes = np.array([prompt + answer for prompt, answer in documents])
    with IndexedWriter(prefix, dtype=dtype) as writer:
        prompts = np.array([prompt for prompt, _ in documents])
        writer.add_documents(first + np.arange(sizes.sum()), sizes, prompts=prompts)
    return IndexedDataset(prefix)


@pytest.fixture
def datasets(tmp_path: Path) -> list[IndexedDataset]:
    one = written(tmp_path / "one", 100, [(3, 5), (9, 2), (1, 14), (4, 4), (2, 9)])
    two = written(tmp_path / "two", 500, [(1, 6), (5, 5), (8, 3), (2, 2)])
    return [one, two.part(range(1, 4))]


def is_answer(datasets: list[IndexedDataset]) -> set[int]:
    """The tokens that belong to answers, which are all different."""
    found = set()
    for dataset in datasets:
        sizes = dataset.sequence_lengths.tolist()
        ends = np.cumsum(sizes)
        for number in range(1, len(sizes), 2):
            found |= {int(token) for token in dataset.flat[ends[number] - sizes[number] : ends[number]]}
    return found


def layouts_of(kind: str, datasets: list[IndexedDataset]) -> list[Layout]:
    if kind == "documents":
        return [Packs(dataset, length=LENGTH) for dataset in datasets]
    is_shifted = kind == "shifted"
    return [
        Windows.of(dataset.token_count, length=LENGTH, is_shifted=is_shifted, seed=3, dataset=number)
        for number, dataset in enumerate(datasets)
    ]


@pytest.mark.parametrize("kind", ["windows", "shifted", "documents"])
def test_answers_of_each_dataset_count_in_its_own_rows(datasets: list[IndexedDataset], kind: str) -> None:
    layouts = layouts_of(kind, datasets)
    order = Order([layout.sample_count for layout in layouts], [1.0, 1.0], 5)
    settings: dict[str, Any] = {
        "sequence_length": LENGTH,
        "layouts": () if kind == "windows" else layouts,
        "eod": EOD,
    }
    every = Samples(order, datasets, **settings)
    answers = Samples(order, datasets, answers=[AnswerTokens(one) for one in datasets], **settings)
    asked = np.array([7, 0, 3, 12, 5, 3])
    whole, some = every.rows(asked), answers.rows(asked)
    counting = is_answer(datasets)
    expected = [[token if token in counting else IGNORED for token in row] for row in whole.targets.tolist()]
    assert some.targets.tolist() == expected and np.array_equal(some.tokens, whole.tokens)
    kept = sum(token != IGNORED for row in expected for token in row)
    assert answers.counted(asked) == kept > 0
    assert every.counted(asked) == int((whole.targets != IGNORED).sum())
    for row, sample in enumerate(asked.tolist()):
        alone = answers.rows(np.array([sample]))
        assert np.array_equal(alone.targets[0], some.targets[row])
        assert answers.counted(np.array([sample])) == int((some.targets[row] != IGNORED).sum())
    if kind == "documents":
        assert some.documents is not None and np.array_equal(some.documents, whole.documents)
    else:
        assert some.documents is None and every.counted(asked) == asked.size * LENGTH


def test_rows_are_filled_where_they_belong_and_others_stay(
    datasets: list[IndexedDataset], either_way: None
) -> None:
    for dataset in datasets:
        out = np.full((4, LENGTH + 1), -7, dtype=np.int32)
        largest = read_rows(dataset, np.array([9, 2]), np.array([3, 1]), out)
        flat = dataset.flat.tolist()
        assert out.tolist() == [[-7] * 9, flat[2:11], [-7] * 9, flat[9:18]]
        assert largest.tolist() == [max(flat[9:18]), max(flat[2:11])]


def test_the_bytes_of_a_sample_are_those_of_its_tokens(datasets: list[IndexedDataset]) -> None:
    part = datasets[1]
    (begin,), (end,) = _byte_ranges(part, 3, 9, None)
    assert (begin, end) == (2 * (7 + 3), 2 * (7 + 3 + 9))
    row = DocumentRow(part.sequence_lengths, samples=2, sequence_length=LENGTH, seed=1)
    pieces = row.pieces(1)
    pointers = part.pointers.tolist()
    begins, ends = _byte_ranges(part, LENGTH, LENGTH + 1, row)
    assert begins.tolist() == [pointers[number] + 2 * first for number, first, _ in pieces]
    assert (ends - begins).tolist() == [2 * taken for *_, taken in pieces]


@pytest.mark.parametrize("bad", [-3, 900])
def test_a_strange_id_in_a_pack_is_told_with_the_piece_that_has_it(tmp_path: Path, bad: int) -> None:
    tokens = np.arange(1, 41)
    tokens[29] = bad
    with IndexedWriter(tmp_path / "pair", dtype="<i4") as writer:
        writer.add_documents(tokens, np.array([5, 20, 15]))  # of pieces 0–4, 5–12, 13–20, 21–24, 25–32, 33–39
    dataset = IndexedDataset(tmp_path / "pair")
    packs = Packs(dataset, length=LENGTH)
    order = Order([packs.sample_count], [1.0], 5)
    samples = Samples(order, [dataset], sequence_length=LENGTH, layouts=[packs], eod=EOD, vocabulary_size=900)
    with pytest.raises(DataError) as refused:
        samples.rows(np.arange(packs.sample_count))
    what = "token id 900" if bad > 0 else "a negative token id"
    said = f"{dataset.prefix} has {what} within tokens 25 to 33, and the vocabulary ends at 899."
    assert refused.value.message == said
    assert refused.value.remedy.startswith("Set data.tokenizer to the one that made this dataset")
    out = empty_packs(packs.sample_count, LENGTH, eod=EOD)
    pieces = packs.pieces(np.arange(packs.sample_count))
    largest = read_packs(dataset, pieces, np.arange(packs.sample_count), out, eod=EOD)
    assert largest == (900 if bad > 0 else (1 << 64) - 1, 25)
    none = packs.pieces(np.empty(0, dtype=np.int64))
    empty = np.empty(0, dtype=np.int64)
    assert read_packs(dataset, none, empty, empty_packs(0, LENGTH, eod=EOD), eod=EOD) == (0, 0)


def test_places_that_no_document_takes_have_a_number_of_their_own(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "pair", dtype="<u2") as writer:
        writer.add_documents(np.arange(1, 11), np.array([3, 2, 5]))
    dataset = IndexedDataset(tmp_path / "pair")
    packs = Packs(dataset, length=7)
    rows = empty_packs(3, 7, eod=99)
    assert (rows.tokens == 99).all() and (rows.targets == IGNORED).all()
    assert rows.documents is not None and (rows.documents == -1).all()
    read_packs(dataset, packs.pieces(np.array([1, 0])), np.array([2, 0]), rows, eod=99)
    no = IGNORED
    assert rows.targets.tolist() == [[4, 5, 6, 7, 8, 9, 10], [no] * 7, [1, 2, 3, no, no, no, no]]
    assert rows.tokens.tolist() == [[99, 4, 99, 6, 7, 8, 9], [99] * 7, [99, 1, 2, 99, 99, 99, 99]]
    assert rows.documents.tolist() == [[0, 0, 1, 1, 1, 1, 1], [-1] * 7, [0, 0, 0, 1, 1, 1, 1]]


def test_a_remote_pair_is_read_in_groups_of_a_quarter_of_its_cache(
    datasets: list[IndexedDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, asked = datasets[0], list[tuple[list[int], list[int]]]()

    def read(begins: np.ndarray, ends: np.ndarray, copy: Any) -> None:
        asked.append((begins.tolist(), ends.tolist()))
        copy()

    blocks = lambda begins, ends: int(((ends - 1) // 8 - begins // 8 + 1).sum())  # noqa: E731
    mirror: Any = SimpleNamespace(capacity=25, blocks_of=blocks, read=read)
    local = IndexedDataset(dataset.prefix)
    dataset.mirror = mirror
    out, plain = (np.zeros((5, LENGTH + 1), dtype=np.int32) for _ in range(2))
    starts, rows = np.array([0, 4, 20, 30, 8]), np.array([2, 0, 1, 4, 3])  # of three blocks each
    largest = read_rows(dataset, starts, rows, out)
    assert np.array_equal(largest, read_rows(local, starts, rows, plain)) and np.array_equal(out, plain)
    assert asked == [([0, 8], [18, 26]), ([40, 60], [58, 78]), ([16], [34])]
    asked.clear()
    with pytest.raises(IndexError, match="samples from tokens 0 to 45 on, of 53"):
        read_rows(dataset, np.array([0, 45]), np.array([0, 1]), out)
    assert asked == [], "nothing is fetched of a read that leaves the file"
    packs = Packs(local, length=LENGTH)
    pieces = packs.pieces(np.arange(packs.sample_count))
    ours, theirs = (empty_packs(packs.sample_count, LENGTH, eod=EOD) for _ in range(2))
    places = np.arange(packs.sample_count)
    found = [
        read_packs(one, pieces, places, into, eod=EOD) for one, into in ((dataset, ours), (local, theirs))
    ]
    assert found[0] == found[1] and len(asked) > 2
    assert np.array_equal(ours.tokens, theirs.tokens) and np.array_equal(ours.targets, theirs.targets)


def test_bigrams_of_the_beginnings_of_several_datasets_are_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for name, tokens in (("a", [0, 1, 2, 0, 1]), ("b", [1, 2]), ("c", [2]), ("d", [])):
        with IndexedWriter(tmp_path / name, dtype="<u2") as writer:
            writer.add_document(tokens)
        made.append(IndexedDataset(tmp_path / name))
    assert count_bigrams(made, 3).tolist() == [[0, 2, 0], [0, 0, 2], [1, 0, 0]]
    monkeypatch.setattr(reading, "MOST_TOKENS", 3)
    assert count_bigrams(made, 3).tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 0]]
    assert count_bigrams([], 2).tolist() == [[0, 0], [0, 0]]
