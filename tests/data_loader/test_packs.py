"""Packed documents and shifted windows, against lists of tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bloomery.data import sample_layout, storage
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data.order import Order
from bloomery.data.pair_files import bin_path
from bloomery.data.sample_layout import PackedPieces, Packs, Windows
from bloomery.data.seal import SealFacts
from bloomery.data_loader import reading
from bloomery.data_loader.batches import Batches
from bloomery.data_loader.packs import IGNORED, _groups, empty_packs, read_packs
from bloomery.data_loader.reading import Samples
from bloomery.errors import DataError

LENGTH, EOD = 11, 0


def texts_of(seed: int, count: int = 70) -> list[list[int]]:
    """Documents of 0 to 39 tokens that end with EOD; some are a multiple of LENGTH long."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(0, 40, size=count)
    return [[*draw.integers(1, 120, max(size - 1, 0)).tolist(), EOD][:size] for size in sizes.tolist()]


def written(prefix: Path, texts: list[list[int]]) -> IndexedDataset:
    with IndexedWriter(prefix, dtype="<u2", seal=SealFacts()) as writer:
        for text in texts:
            writer.add_document(text)
    return IndexedDataset(prefix)


def reader(datasets: list[IndexedDataset], layouts: list[Packs] | list[Windows], *, seed: int = 4) -> Samples:
    order = Order([layout.sample_count for layout in layouts], [1.0] * len(layouts), seed)
    return Samples(order, datasets, sequence_length=LENGTH, layouts=layouts, eod=EOD, vocabulary_size=120)


def pieces_of(rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> list[tuple[list[int], list[int]]]:
    """(inputs, targets) of each document that is in a sample."""
    found = []
    for tokens, targets, documents in zip(*rows, strict=True):
        for number in sorted(set(documents[targets != IGNORED].tolist())):
            inside = documents == number
            assert np.ptp(np.flatnonzero(inside)) == inside.sum() - 1, "a document is in one place"
            found.append((tokens[inside].tolist(), targets[inside].tolist()))
    return found


def expected_pieces(texts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    expected = []
    for text in texts:
        for begin in range(0, len(text), LENGTH):
            piece = text[begin : begin + LENGTH]
            before = text[begin - 1] if begin else EOD
            expected.append(([before, *piece[:-1]], piece))
    return expected


@pytest.mark.parametrize("documents_at_once", [1 << 17, 7])
def test_an_epoch_of_packs_has_every_token_as_a_target_once_and_cuts_no_document_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents_at_once: int
) -> None:
    monkeypatch.setattr(sample_layout, "_DOCUMENTS_AT_ONCE", documents_at_once)
    texts = texts_of(1)
    dataset = written(tmp_path / "pair", texts)
    layout = Packs(dataset, length=LENGTH)
    samples = reader([dataset], [layout])
    every = np.arange(layout.sample_count)
    rows = samples.rows(every)
    assert rows.documents is not None
    found = pieces_of((rows.tokens, rows.targets, rows.documents))
    assert sorted(found) == sorted(expected_pieces(texts))
    assert samples.counted(every) == (rows.targets != IGNORED).sum() == sum(map(len, texts))
    empty = rows.targets == IGNORED
    assert (rows.tokens[empty] == EOD).all()
    assert empty.sum() == layout.packing.empty_places < LENGTH * layout.sample_count / 20


def test_packs_of_a_part_and_of_a_mixture_are_those_of_its_documents(tmp_path: Path) -> None:
    texts = [texts_of(2), texts_of(3, 30)]
    whole = written(tmp_path / "a", texts[0])
    datasets = [whole.part(range(10, 60)), written(tmp_path / "b", texts[1])]
    layouts = [Packs(dataset, length=LENGTH) for dataset in datasets]
    order = Order([layout.sample_count for layout in layouts], [3.0, 1.0], 4)
    samples = Samples(order, datasets, sequence_length=LENGTH, layouts=layouts, eod=EOD)
    asked = np.arange(layouts[0].sample_count * 2)
    rows = samples.rows(asked)
    assert rows.documents is not None
    which, _ = order.locate_samples(asked)
    for dataset, own in ((0, texts[0][10:60]), (1, texts[1])):
        mine = which == dataset
        count = layouts[dataset].sample_count
        first = np.flatnonzero(mine)[:count]  # its first epoch
        found = pieces_of((rows.tokens[first], rows.targets[first], rows.documents[first]))
        assert mine.sum() >= count and sorted(found) == sorted(expected_pieces(own))


def test_any_rank_micro_batch_and_order_of_asking_gets_the_same_packs(tmp_path: Path) -> None:
    """So a run resumes with the very next sample, as it does with windows: nothing is remembered."""
    dataset = written(tmp_path / "pair", texts_of(5))
    layout = Packs(dataset, length=LENGTH)
    order = Order([layout.sample_count], [1.0], 4)
    expected = Samples(order, [dataset], sequence_length=LENGTH, layouts=[layout], eod=EOD).rows(
        np.arange(96)
    )
    assert expected.documents is not None
    for degree, micro_batch in ((1, 8), (2, 4), (4, 2)):
        for rank in range(degree):
            batches = Batches(
                order,
                [dataset],
                sequence_length=LENGTH,
                mask_documents=True,
                rank=rank,
                degree=degree,
                eod=EOD,
                prefetch=0,
                layouts=[Packs(dataset, length=LENGTH)],
            )
            for start in (80, 0, 40):
                for batch in batches.batch((range(start, start + 16),), micro_batch):
                    numbers = batch.samples.numpy()
                    assert (batch.tokens.numpy() == expected.tokens[numbers]).all()
                    assert (batch.targets.numpy() == expected.targets[numbers]).all()
                    assert batch.documents is not None
                    assert (batch.documents.numpy() == expected.documents[numbers]).all()
                    whole = expected.targets[start : start + 16]
                    assert batch.global_targets == (whole != IGNORED).sum()


def test_damage_and_strange_ids_are_named(tmp_path: Path) -> None:
    texts = texts_of(6)
    dataset = written(tmp_path / "pair", texts)
    layout = Packs(dataset, length=LENGTH)
    order = Order([layout.sample_count], [1.0], 4)
    few = Samples(order, [dataset], sequence_length=LENGTH, layouts=[layout], eod=EOD, vocabulary_size=100)
    with pytest.raises(DataError, match=r"token id \d+ within tokens .* the vocabulary ends at 99"):
        few.rows(np.arange(layout.sample_count))
    content = bytearray(bin_path(tmp_path / "pair").read_bytes())
    content[50] ^= 1
    bin_path(tmp_path / "pair").write_bytes(content)
    again = IndexedDataset(tmp_path / "pair")
    with pytest.raises(DataError, match=r"pair.bin is not what was written"):
        reader([again], [layout]).rows(np.arange(layout.sample_count))


def test_the_token_before_a_piece_is_checked_with_it(tmp_path: Path) -> None:
    length = 2048  # as many tokens as a page holds: the second piece of a document begins a page
    written(tmp_path / "pair", [[1] * (2 * length)])
    content = bytearray(bin_path(tmp_path / "pair").read_bytes())
    content[0] ^= 1
    bin_path(tmp_path / "pair").write_bytes(content)
    dataset = IndexedDataset(tmp_path / "pair")
    layout = Packs(dataset, length=length)
    pieces = layout.pieces(np.arange(layout.sample_count))
    second = int(np.flatnonzero(pieces.continues)[0])
    order = Order([layout.sample_count], [1.0], 4)
    samples = Samples(order, [dataset], sequence_length=length, layouts=[layout], eod=EOD)
    at = np.flatnonzero(order.locate_samples(np.arange(2))[1] == int(pieces.row[second]))
    with pytest.raises(DataError, match=r"pair.bin is not what was written, somewhere in bytes 0 to 4,095"):
        samples.rows(at)


def test_the_places_of_documents_are_kept_once_on_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "AT_LEAST_BYTES", 1)
    texts = texts_of(7)
    dataset = written(tmp_path / "pair", texts)
    first = Packs(dataset, length=LENGTH, kept_in=tmp_path / "orders")

    def fail(*_: object) -> None:
        raise AssertionError("it was there already")

    monkeypatch.setattr(sample_layout, "_fill_places", fail)  # a second process maps them
    second = Packs(dataset, length=LENGTH, kept_in=tmp_path / "orders")
    (kept,) = (tmp_path / "orders").glob("*.arrays")
    assert kept.stat().st_size == 8 * len(expected_pieces(texts))
    every = np.arange(first.sample_count)
    assert (first.pieces(every).start == second.pieces(every).start).all()


def test_shifted_windows_are_cut_elsewhere_in_each_epoch(tmp_path: Path) -> None:
    tokens = list(range(1, 101))
    dataset = written(tmp_path / "pair", [tokens])
    layout = Windows.of(100, length=LENGTH, is_shifted=True, seed=9)
    count = layout.sample_count
    assert count == (100 - LENGTH) // LENGTH
    order = Order([count], [1.0], 4)
    samples = Samples(order, [dataset], sequence_length=LENGTH, layouts=[layout])
    offsets = []
    for epoch in range(6):
        inputs, targets = samples.read(np.arange(epoch * count, epoch * count + count))
        starts = sorted(int(row[0]) - 1 for row in inputs)
        assert starts == [starts[0] + LENGTH * number for number in range(count)]
        assert all(row.tolist() == tokens[row[0] - 1 : row[0] - 1 + LENGTH] for row in inputs)
        assert (targets[:, :-1] == inputs[:, 1:]).all() and (targets[:, -1] == inputs[:, -1] + 1).all()
        assert 0 <= starts[0] < LENGTH
        offsets.append(starts[0])
    assert len(set(offsets)) > 3
    mixed = np.array([3 * count + 1, 2, 5 * count])  # from several epochs at once
    inputs, _ = samples.read(mixed)
    for row, sample in enumerate(mixed.tolist()):
        assert inputs[row].tolist() == samples.read(np.array([sample]))[0][0].tolist()


def test_windows_that_are_not_shifted_follow_one_another_in_every_epoch() -> None:
    layout = Windows.of(100, length=LENGTH)
    numbers = np.arange(layout.sample_count)
    for epoch in (0, 3):
        starts = layout.starts(numbers, np.full_like(numbers, epoch)).tolist()
        assert starts == list(range(0, 100 - LENGTH, LENGTH))


@pytest.mark.parametrize("tokens", [2, 11, 12, 21, 22, 23, 24, 100, 101])
def test_no_shifted_window_leaves_the_dataset(tokens: int) -> None:
    layout = Windows.of(tokens, length=LENGTH, is_shifted=True, seed=3)
    if layout.sample_count:
        starts = layout.starts(np.full(500, layout.sample_count - 1), np.arange(500))
        assert starts.max() + LENGTH + 1 <= tokens
    assert layout.sample_count >= Windows.of(tokens, length=LENGTH).sample_count - 1


@pytest.mark.parametrize(
    ("blocks", "groups"),
    [
        ([], []),
        ([3, 1, 2, 5, 1], [(0, 2), (2, 3), (3, 4), (4, 5)]),
        ([9, 9], [(0, 1), (1, 2)]),
        ([1, 1, 1, 1], [(0, 4)]),
        ([2, 3, 1, 1], [(0, 1), (1, 3), (3, 4)]),
    ],
)
def test_pieces_of_a_remote_pair_are_read_together_up_to_a_quarter_of_its_cache(
    blocks: list[int], groups: list[tuple[int, int]]
) -> None:
    mirror = SimpleNamespace(capacity=16, blocks_of=lambda begins, ends: int((ends - begins).sum()))
    source: object = SimpleNamespace(mirror=mirror)
    begins = 100 * np.arange(len(blocks))
    found = _groups(source, begins, begins + np.array(blocks, dtype=np.int64))  # type: ignore[arg-type]
    assert [(group.start, group.stop) for group in found] == groups
    assert [(group.start, group.stop) for group in reading._groups(blocks, most=4)] == groups


def test_a_negative_id_counts_as_the_largest_and_no_pieces_have_none() -> None:
    flat = np.array([3, -2, 7], dtype="<i4")
    source: Any = SimpleNamespace(flat=flat, mirror=None, pages=None, first_byte=0, dtype=flat.dtype)

    def read(*pieces: tuple[int, int]) -> tuple[int, int]:
        start, length = np.array(pieces, dtype=np.int64).reshape(-1, 2).T
        zeros = np.zeros_like(start)
        packed = PackedPieces(row=zeros, column=start, start=start, length=length, continues=zeros)
        return read_packs(source, packed, np.array([0]), empty_packs(1, 4, eod=EOD), eod=EOD)

    assert read((0, 1), (1, 2)) == ((1 << 64) - 1, 1)
    assert read((0, 1), (2, 1)) == (7, 2)
    assert read() == (0, 0)
